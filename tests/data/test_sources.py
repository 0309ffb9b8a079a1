"""What each source yields, and what it says about input that it cannot use."""

from __future__ import annotations

import gzip
import json
import os

import pytest

from jaxlib_papers.data import DataError
from jaxlib_papers.data.documents import Document
from jaxlib_papers.data.sources import make_source


def read(spec):
    return list(make_source(spec).documents())


class TestSpec:
    @pytest.mark.parametrize("spec", ["", "web:x", "text", "embeddedx", "embedded:x", "json:dir"])
    def test_unknown_scheme(self, spec):
        with pytest.raises(DataError, match=r"unknown data spec .*text:<dir>"):
            make_source(spec)

    @pytest.mark.parametrize("spec", ["text:", "jsonl:", "tfds:"])
    def test_nothing_after_the_colon(self, spec):
        with pytest.raises(DataError, match="nothing after the colon"):
            make_source(spec)

    def test_unknown_option(self):
        with pytest.raises(DataError, match=r"unknown option content \(known: text, domain\)"):
            make_source("jsonl:x?content=a")

    def test_option_must_be_a_number(self):
        with pytest.raises(DataError, match="max_bytes must be a whole number, got 'big'"):
            make_source("embedded?max_bytes=big")

    def test_embedded_options(self):
        source = make_source("embedded?max_bytes=2000&max_document_bytes=1000")
        assert (source.max_bytes, source.max_document_bytes) == (2000, 1000)

    def test_embedded_size_too_small(self):
        with pytest.raises(DataError, match="at least 512"):
            make_source("embedded?max_bytes=10")

    @pytest.mark.parametrize("scheme", ["text", "jsonl"])
    def test_missing_directory(self, scheme, tmp_path):
        with pytest.raises(DataError, match="does not exist"):
            read(f"{scheme}:{tmp_path / 'none'}")

    @pytest.mark.parametrize("scheme", ["text", "jsonl"])
    def test_file_instead_of_directory(self, scheme, tmp_path):
        (tmp_path / "a").write_text("x")
        with pytest.raises(DataError, match="is a file, expected a directory"):
            read(f"{scheme}:{tmp_path / 'a'}")


class TestText:
    def test_documents_in_sorted_order(self, tmp_path):
        for name in ("b/2.txt", "b/1.txt", "a/x/y.md", "b/.hidden", ".git/config"):
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"text of {name}\r\n", newline="")
        assert read(f"text:{tmp_path}") == [
            Document("x/y.md", "a", "text of a/x/y.md\r\n"),
            Document("1.txt", "b", "text of b/1.txt\r\n"),
            Document("2.txt", "b", "text of b/2.txt\r\n"),
        ]

    def test_undecodable_bytes_are_located(self, tmp_path):
        (tmp_path / "a").mkdir()
        (tmp_path / "a" / "bad.txt").write_bytes("é".encode() * 3 + b"\xff\xfe more")
        with pytest.raises(DataError, match=r"bad\.txt: not UTF-8 at byte offset 6 \(bytes ff fe"):
            read(f"text:{tmp_path}")
        (document,) = read(f"text:{tmp_path}?errors=replace")
        assert document.text == "ééé�� more"

    def test_other_error_handlers_are_refused(self, tmp_path):
        with pytest.raises(DataError, match="'strict' or 'replace', got 'ignore'"):
            make_source(f"text:{tmp_path}?errors=ignore")

    def test_no_sub_folder(self, tmp_path):
        (tmp_path / "loose.txt").write_text("x")
        with pytest.raises(DataError, match="has no sub-folders"):
            read(f"text:{tmp_path}")

    def test_loose_files_are_mentioned(self, tmp_path):
        (tmp_path / "a").mkdir()
        (tmp_path / "a" / "1.txt").write_text("x")
        (tmp_path / "readme").write_text("x")
        with pytest.warns(UserWarning, match="1 files outside .* are not read"):
            assert len(read(f"text:{tmp_path}")) == 1

    def test_signature_follows_changes(self, tmp_path):
        (tmp_path / "a").mkdir()
        path = tmp_path / "a" / "1.txt"
        path.write_text("x")
        source = make_source(f"text:{tmp_path}")
        before = source.signature()
        assert source.signature() == before
        os.utime(path, ns=(1, 1))
        assert source.signature() != before
        json.dumps(before)


class TestJsonl:
    def test_records(self, write_jsonl):
        folder = write_jsonl(
            {"text": "a", "domain": "x", "more": 1}, b"", {"domain": "y", "text": "ü"}
        )
        with gzip.open(folder / "z.jsonl.gz", "wt") as out:
            out.write('{"text": "zipped", "domain": "x"}\n')
        assert read(f"jsonl:{folder}") == [
            Document("part.jsonl:1", "x", "a"),
            Document("part.jsonl:3", "y", "ü"),
            Document("z.jsonl.gz:1", "x", "zipped"),
        ]

    def test_other_field_names(self, write_jsonl):
        folder = write_jsonl({"content": "a", "source": "x"})
        assert read(f"jsonl:{folder}?text=content&domain=source") == [
            Document("part.jsonl:1", "x", "a")
        ]

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            (b'{"text": "a"}', r"no field 'domain' \(it has 'text'\)"),
            (b'{"domain": "a"}', r"no field 'text' \(it has 'domain'\)"),
            (b"{}", "it has none"),
            (b'{"text": "a", "domain"', "not a line of JSON"),
            (b"\xff\xfe", "not a line of JSON"),
            (b"[1, 2]", "expected a JSON object, got list"),
            (b'{"text": 3, "domain": "a"}', "'text' must be a string, got int"),
            (b'{"text": null, "domain": "a"}', "'text' must be a string, got NoneType"),
            (b'{"text": "\\ud800", "domain": "a"}', "lone surrogate at character 0"),
            (b'{"text": "a", "domain": 7}', "domain must be a non-empty string"),
            (b'{"text": "a", "domain": " "}', "domain must be a non-empty string"),
            (b'{"text": "a", "domain": "x\\ny"}', "control characters"),
        ],
    )
    def test_bad_line_is_named(self, write_jsonl, line, message):
        folder = write_jsonl({"text": "a", "domain": "x"}, line)
        with pytest.raises(DataError, match=rf"part\.jsonl:2: .*{message}"):
            read(f"jsonl:{folder}")

    def test_no_file(self, tmp_path):
        (tmp_path / "data.json").write_text("{}")
        with pytest.raises(DataError, match=r"has no \*\.jsonl"):
            read(f"jsonl:{tmp_path}")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A TFDS dataset made by another program: label classes, other feature names."""
    import tensorflow_datasets as tfds

    class ForeignText(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("2.0.0")
        url_infos = None

        def _info(self):
            features = {
                "content": tfds.features.Text(),
                "topic": tfds.features.ClassLabel(names=["sport", "art"]),
                "lang": tfds.features.Text(),
            }
            return tfds.core.DatasetInfo(
                builder=self, features=tfds.features.FeaturesDict(features)
            )

        def _split_generators(self, dl_manager):
            return {"whole": self._generate_examples()}

        def _generate_examples(self):
            for i in range(6):
                yield i, {"content": f"text {i} é", "topic": i % 2, "lang": "en"}

    root = tmp_path_factory.mktemp("tfds")
    builder = ForeignText(data_dir=root, file_format="array_record")
    builder.download_and_prepare()
    return root, builder.data_dir


class TestTfds:
    def test_class_labels_become_names(self, prepared):
        root, _ = prepared
        found = read(f"tfds:foreign_text?text=content&domain=topic&split=whole&data_dir={root}")
        assert len(found) == 6
        for document in found:
            number = int(document.text.split()[1])
            assert document.text == f"text {number} é"
            assert document.domain == ("sport", "art")[number % 2]
        assert len({document.id for document in found}) == 6

    def test_directory_and_string_domain(self, prepared):
        _, version = prepared
        found = read(f"tfds:{version}?text=content&domain=lang&split=whole")
        assert {document.domain for document in found} == {"en"}

    def test_errors(self, prepared):
        root, version = prepared
        with pytest.raises(DataError, match="no feature 'text' .*content, lang, topic"):
            read(f"tfds:{version}?split=whole")
        with pytest.raises(DataError, match="no prepared split 'train' .*prepared: whole"):
            read(f"tfds:{version}?text=content&domain=topic")
        with pytest.raises(DataError, match="tfds:no_such_set: no such dataset"):
            read(f"tfds:no_such_set?data_dir={root}")
