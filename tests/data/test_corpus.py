"""Preparation of a corpus: splits, hashes, re-use, and that nothing is lost when it fails."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from jaxlib_papers.data import DataError, open_corpus
from jaxlib_papers.data import storage as storage_module
from jaxlib_papers.data.sources import make_source


def texts(corpus):
    return {(d.domain, d.id): d.text for split in corpus.splits for d in corpus.documents(split)}


def test_every_document_is_in_one_split(corpus, text_dir):
    source = {(d.domain, d.id): d.text for d in make_source(f"text:{text_dir}").documents()}
    assert texts(corpus) == source
    train = {(d.domain, d.id) for d in corpus.documents("train")}
    heldout = {(d.domain, d.id) for d in corpus.documents("heldout")}
    assert not train & heldout
    assert {d for d, _ in train} == {d for d, _ in heldout} == set(corpus.domains)


def test_manifest_counts_and_hashes(corpus):
    listed = [json.loads(line) for line in (corpus.path / "documents.jsonl").open()]
    assert len(listed) == 25
    for domain in corpus.domains:
        for split in corpus.splits:
            rows = [r for r in listed if (r["domain"], r["split"]) == (domain, split)]
            entry = corpus.manifest["domains"][domain][split]
            assert entry["documents"] == len(rows)
            assert entry["bytes"] == sum(r["bytes"] for r in rows)
            assert len(entry["sha256"]) == 64


def test_stored_as_array_record(corpus):
    assert list((corpus.path / "domain_text" / "1.0.0").glob("*train.array_record*"))


def test_second_opening_reads_no_source(corpus, text_dir, cache_dir, monkeypatch):
    import jaxlib_papers.data.builder as builder

    def never(*args, **kwargs):
        raise AssertionError("prepared again")

    monkeypatch.setattr(builder, "write_corpus", never)
    again = open_corpus(f"text:{text_dir}", cache_dir=cache_dir, heldout_fraction=0.2)
    assert again == corpus


def test_fingerprint_is_of_content_not_of_place(corpus, text_dir, tmp_path):
    shutil.copytree(text_dir, tmp_path / "copy")
    moved = open_corpus(
        f"text:{tmp_path / 'copy'}", cache_dir=tmp_path / "cache", heldout_fraction=0.2
    )
    assert moved.fingerprint == corpus.fingerprint


@pytest.mark.parametrize("change", ["one letter", "new document", "seed", "fraction", "domain"])
def test_fingerprint_follows_changes(corpus, text_dir, tmp_path, change):
    copy = tmp_path / "copy"
    shutil.copytree(text_dir, copy)
    options = {"heldout_fraction": 0.2, "seed": 0}
    path = copy / "math" / "01.txt"
    if change == "one letter":
        text = path.read_text(encoding="utf-8")
        path.write_text("X" + text[1:], encoding="utf-8")
    elif change == "new document":
        (copy / "math" / "99.txt").write_text("new")
    elif change == "seed":
        options["seed"] = 1
    elif change == "fraction":
        options["heldout_fraction"] = 0.6
    else:
        (copy / "math").rename(copy / "maths")
    changed = open_corpus(f"text:{copy}", cache_dir=tmp_path / "cache", **options)
    assert changed.fingerprint != corpus.fingerprint


def test_edited_file_is_noticed(tmp_path):
    (tmp_path / "t" / "a").mkdir(parents=True)
    for name in "12":
        (tmp_path / "t" / "a" / name).write_text(f"text {name}")
    first = open_corpus(f"text:{tmp_path / 't'}", cache_dir=tmp_path / "c", heldout_fraction=0.5)
    (tmp_path / "t" / "a" / "1").write_text("another text")
    second = open_corpus(f"text:{tmp_path / 't'}", cache_dir=tmp_path / "c", heldout_fraction=0.5)
    assert first.fingerprint != second.fingerprint
    assert texts(second)["a", "1"] == "another text"
    assert texts(first)["a", "1"] == "text 1"  # the old one is still there


@pytest.mark.parametrize(
    "damage", ["no manifest", "half a manifest", "another manifest", "short file", "no file"]
)
def test_damaged_cache_is_made_again(text_dir, tmp_path, damage):
    spec = f"text:{text_dir}"
    first = open_corpus(spec, cache_dir=tmp_path)
    wanted = texts(first)
    (data,) = (first.path / "domain_text" / "1.0.0").glob("*train.array_record*")
    if damage == "no manifest":
        (first.path / "manifest.json").unlink()
    elif damage == "half a manifest":
        (first.path / "manifest.json").write_text('{"files": ')
    elif damage == "another manifest":
        path = first.path / "manifest.json"
        other = "0" if first.fingerprint[0] != "0" else "1"
        path.write_text(path.read_text().replace(first.fingerprint, other + first.fingerprint[1:]))
    elif damage == "short file":
        data.write_bytes(data.read_bytes()[:-10])
    else:
        data.unlink()
    again = open_corpus(spec, cache_dir=tmp_path)
    assert again.fingerprint == first.fingerprint
    assert texts(again) == wanted
    assert [p.name for p in (tmp_path / "corpora").iterdir()] == [first.path.name]


def test_failure_while_writing_leaves_nothing(text_dir, tmp_path, monkeypatch):
    import jaxlib_papers.data.builder as builder

    original = builder.SplitPlan.split_of
    calls = []

    def full_disk(self, document):
        calls.append(document)
        if len(calls) > 7:
            raise OSError(28, "No space left on device")
        return original(self, document)

    with monkeypatch.context() as patch:
        patch.setattr(builder.SplitPlan, "split_of", full_disk)
        with pytest.raises(OSError, match="No space left"):
            open_corpus(f"text:{text_dir}", cache_dir=tmp_path)
    assert list((tmp_path / "corpora").iterdir()) == []
    assert len(texts(open_corpus(f"text:{text_dir}", cache_dir=tmp_path))) == 25


def test_two_writers_at_once(tmp_path):
    final = tmp_path / "f"
    with storage_module.written_atomically(final) as (slow, manifest):
        manifest["who"] = "slow"
        (slow / "x").write_text("same")
        with storage_module.written_atomically(final) as (quick, other):
            other["who"] = "quick"
            (quick / "x").write_text("same")
    found = storage_module.read_manifest(final)
    assert found is not None and found["who"] == "quick"
    assert [p.name for p in tmp_path.iterdir()] == ["f"]


def test_source_that_changes_while_read(tmp_path, monkeypatch):
    import jaxlib_papers.data.sources as sources

    folder = tmp_path / "t"
    (folder / "a").mkdir(parents=True)
    for i in range(20):
        (folder / "a" / f"{i}").write_text(f"text {i}")
    original = sources.TextSource.documents
    passes = []

    def documents(self):
        passes.append(1)
        return list(original(self))[: 20 if len(passes) == 1 else 19]

    monkeypatch.setattr(sources.TextSource, "documents", documents)
    with pytest.raises(DataError, match="domain 'a' had 20 documents at first and 19"):
        open_corpus(f"text:{folder}", cache_dir=tmp_path / "c", heldout_fraction=0.5)


class TestSplit:
    def make(self, tmp_path, documents, **options):
        folder = tmp_path / "t"
        (folder / "a").mkdir(parents=True)
        for i in range(documents):
            (folder / "a" / f"{i}.txt").write_text(f"text {i}")
        return open_corpus(f"text:{folder}", cache_dir=tmp_path / "c", **options)

    @pytest.mark.parametrize("fraction", [1e-6, 0.5, 0.999999])
    def test_no_domain_lacks_a_split(self, tmp_path, fraction):
        counts = self.make(tmp_path, 3, heldout_fraction=fraction).manifest["domains"]["a"]
        assert counts["train"]["documents"] >= 1 and counts["heldout"]["documents"] >= 1

    def test_share(self, tmp_path):
        counts = self.make(tmp_path, 400, heldout_fraction=0.25).manifest["domains"]["a"]
        assert 70 <= counts["heldout"]["documents"] <= 130

    def test_none_held_out(self, tmp_path):
        corpus = self.make(tmp_path, 1, heldout_fraction=0)
        assert corpus.splits == ("train",)
        with pytest.raises(DataError, match="split 'heldout' does not exist"):
            corpus.check_split("heldout")

    def test_one_document(self, tmp_path):
        with pytest.raises(DataError, match="domain 'a' has 1 document"):
            self.make(tmp_path, 1)

    @pytest.mark.parametrize("fraction", [-0.1, 1.0, float("nan")])
    def test_fraction_out_of_range(self, tmp_path, fraction):
        with pytest.raises(DataError, match="heldout_fraction must be in"):
            self.make(tmp_path, 2, heldout_fraction=fraction)


def test_empty_corpus(tmp_path):
    (tmp_path / "t" / "a").mkdir(parents=True)
    with pytest.raises(DataError, match="holds no text"):
        open_corpus(f"text:{tmp_path / 't'}", cache_dir=tmp_path / "c")
    (tmp_path / "t" / "a" / "blank").write_text(" \n")
    with pytest.raises(DataError, match=r"holds no text \(1 empty documents\)"):
        open_corpus(f"text:{tmp_path / 't'}", cache_dir=tmp_path / "c")


def test_bad_document_prepares_nothing(write_jsonl, tmp_path):
    folder = write_jsonl({"text": "a", "domain": "x"}, {"text": "b", "domain": "x"}, {"text": "c"})
    with pytest.raises(DataError, match=r"part\.jsonl:3"):
        open_corpus(f"jsonl:{folder}", cache_dir=tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_unknown_domain_is_named(corpus):
    with pytest.raises(DataError, match="unknown domain 'x'; this corpus has 'code', 'math'"):
        corpus.domain_id("x")


class TestCacheDir:
    def test_order_of_choices(self, monkeypatch, tmp_path):
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.delenv("JAXLIB_PAPERS_CACHE", raising=False)
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        assert storage_module.default_cache_dir() == tmp_path / ".cache" / "jaxlib_papers"
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
        assert storage_module.default_cache_dir() == tmp_path / "xdg" / "jaxlib_papers"
        monkeypatch.setenv("JAXLIB_PAPERS_CACHE", str(tmp_path / "own"))
        assert storage_module.default_cache_dir() == tmp_path / "own"
        assert storage_module.default_cache_dir("~/arg") == tmp_path / "arg"

    def test_not_writable(self, text_dir, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(DataError, match="cannot write the data cache .*JAXLIB_PAPERS_CACHE"):
            open_corpus(f"text:{text_dir}", cache_dir=tmp_path / "file")


def test_relative_cache_dir(text_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    corpus = open_corpus(f"text:{text_dir}", cache_dir="here")
    assert corpus.path.is_absolute() and Path(os.getcwd()) in corpus.path.parents
