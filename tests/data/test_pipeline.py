"""The stream of batches: order, hosts, epochs, and exact resumption (C14)."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

from jaxlib_papers.data import (
    ByteTokenizer,
    DataError,
    PipelineConfig,
    heldout_batches,
    make_pipeline,
    make_tokenizer,
    open_corpus,
)
from jaxlib_papers.data import batches as batches_module
from jaxlib_papers.data import pipeline as pipeline_module
from jaxlib_papers.data.token_store import open_tokens

CONFIG = PipelineConfig(seq_len=64, global_batch=8, accum_steps=2, seed=3)


def digest(batch):
    sha = hashlib.sha256()
    for name in sorted(batch):
        sha.update(name.encode() + np.ascontiguousarray(batch[name]).tobytes())
    return sha.hexdigest()


def take(iterator, count):
    return [next(iterator) for _ in range(count)]


def make(corpus, config=CONFIG, tokenizer=None, **kwargs):
    return make_pipeline(corpus, tokenizer or make_tokenizer(), config, **kwargs)


def stack(parts):
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def test_shapes(corpus):
    pipeline = make(corpus)
    batch = next(pipeline.iterator())
    for name in ("tokens", "targets", "loss_mask", "segment_ids", "positions"):
        assert batch[name].shape == (8, 64)
    assert batch["domain_ids"].shape == (8, pipeline.max_segments)
    assert pipeline.domains == corpus.domains == ("code", "math", "prose")
    assert batch["tokens"].max() < 259


def test_iterator_gives_what_random_access_gives(corpus):
    for threads in (0, 3):
        pipeline = make(corpus, dataclasses.replace(CONFIG, num_threads=threads))
        found = [digest(b) for b in take(iter(pipeline), 12)]
        assert found == [digest(pipeline.batch_at(step)) for step in range(12)]
        assert len(set(found)) == 12


def test_two_domains_in_each_micro_batch(corpus):
    pipeline = make(corpus, dataclasses.replace(CONFIG, weights={"code": 6, "math": 1, "prose": 1}))
    for batch in take(pipeline.iterator(), 40):
        for a in range(2):
            assert len(np.unique(batch["domain_ids"][a::2, 0])) >= 2


@pytest.mark.parametrize("small", [True, False], ids=["in memory", "by Grain"])
def test_epochs_show_every_token_and_differ(corpus, monkeypatch, small):
    if not small:
        monkeypatch.setattr(batches_module, "_SMALL_EPOCH", 0)
    config = PipelineConfig(
        seq_len=32, global_batch=1, weights={"code": 1, "math": 0, "prose": 0}, num_threads=0
    )
    pipeline = make(corpus, config)
    rows = pipeline.rows_per_epoch["code"]
    assert list(pipeline.rows_per_epoch) == ["code"]
    stream = open_tokens(corpus, ByteTokenizer(), "train")[0]
    assert rows == stream.total // 32
    epochs = []
    for epoch in range(2):
        batches = [pipeline.batch_at(epoch * rows + r)["tokens"][0] for r in range(rows)]
        epochs.append(np.stack(batches))
        seen = np.bincount(np.concatenate(batches), minlength=259)
        whole = np.bincount(stream.tokens, minlength=259)
        # Only the tail, less than a row, is missing.
        assert (whole - seen >= 0).all() and (whole - seen).sum() == stream.total % 32
    rows_of = [{row.tobytes() for row in epoch} for epoch in epochs]
    assert rows_of[0] != rows_of[1]  # cut at other places, too


def test_text_comes_through(corpus):
    """Every segment is a piece of a document of its domain."""
    texts = {d: [] for d in corpus.domains}
    for document in corpus.documents("train"):
        texts[document.domain].append(document.text.encode())
    for batch in take(make(corpus).iterator(), 5):
        for row in range(8):
            for segment in range(1, batch["segment_ids"][row].max() + 1):
                ids = batch["tokens"][row][batch["segment_ids"][row] == segment]
                piece = ids[ids < 256].astype(np.uint8).tobytes()
                assert (ids[:-1] < 256).all()
                domain = corpus.domains[batch["domain_ids"][row, segment - 1]]
                assert any(piece in text for text in texts[domain])


def test_bos_before_each_document(corpus):
    tokens = open_tokens(corpus, make_tokenizer(add_bos=True), "train")[1]
    plain = open_tokens(corpus, make_tokenizer(), "train")[1]
    assert (tokens.tokens[tokens.offsets[:-1]] == 256).all()
    assert (tokens.tokens[tokens.offsets[1:] - 1] == 257).all()
    assert tokens.total == plain.total + len(plain.offsets) - 1


def test_chunks_of_different_domains_share_rows(corpus):
    pipeline = make(corpus, dataclasses.replace(CONFIG, chunks_per_row=4))
    mixed = 0
    for batch in take(pipeline.iterator(), 10):
        for row in batch["domain_ids"]:
            mixed += len(set(row[row >= 0].tolist())) > 1
    assert mixed > 40


@pytest.mark.parametrize("hosts", [1, 2, 4])
def test_hosts_hold_slices_of_the_same_global_batch(corpus, hosts):
    whole = make(corpus)
    parts = [make(corpus, process_index=h, process_count=hosts) for h in range(hosts)]
    assert {p.max_segments for p in parts} == {whole.max_segments}
    for step in range(5):
        joined = stack([p.batch_at(step) for p in parts])
        assert digest(joined) == digest(whole.batch_at(step))


class TestResume:
    """C14: exact, whatever happens to the hosts, or refused."""

    @pytest.mark.parametrize("threads", [0, 2])
    def test_10_is_5_and_5(self, corpus, threads):
        config = dataclasses.replace(CONFIG, num_threads=threads)
        straight = [digest(b) for b in take(make(corpus, config).iterator(), 10)]
        first = make(corpus, config).iterator()
        before = [digest(b) for b in take(first, 5)]
        state = json.loads(json.dumps(first.get_state()))
        first.close()
        second = make(corpus, config).iterator()
        second.set_state(state)
        assert second.get_state() == state and state["step"] == 5
        assert before + [digest(b) for b in take(second, 5)] == straight

    def test_4_hosts_then_2(self, corpus):
        straight = [digest(b) for b in take(make(corpus).iterator(), 10)]
        four = [make(corpus, process_index=h, process_count=4).iterator() for h in range(4)]
        found = [digest(stack([next(it) for it in four])) for _ in range(5)]
        states = [it.get_state() for it in four]
        assert all(state == states[0] for state in states)
        two = [make(corpus, process_index=h, process_count=2).iterator() for h in range(2)]
        for iterator in two:
            iterator.set_state(states[0])
        found += [digest(stack([next(it) for it in two])) for _ in range(5)]
        assert found == straight

    def test_back_and_forth_on_a_running_iterator(self, corpus):
        iterator = make(corpus).iterator()
        start = iterator.get_state()
        first = [digest(b) for b in take(iterator, 6)]
        iterator.set_state(start)
        assert [digest(b) for b in take(iterator, 6)] == first

    def test_threads_and_prefetch_may_change(self, corpus):
        one = make(corpus, dataclasses.replace(CONFIG, num_threads=0)).iterator()
        take(one, 3)
        two = make(corpus, dataclasses.replace(CONFIG, num_threads=4, prefetch=9)).iterator()
        two.set_state(one.get_state())
        assert digest(next(two)) == digest(next(one))

    @pytest.mark.parametrize(
        ("field", "change"),
        [
            ("seq_len", {"seq_len": 32}),
            ("global_batch", {"global_batch": 16}),
            ("accum_steps", {"accum_steps": 1}),
            ("seed", {"seed": 4}),
            ("chunks_per_row", {"chunks_per_row": 2}),
            ("weights", {"weights": {"code": 2, "math": 1, "prose": 1}}),
        ],
    )
    def test_other_configuration_is_refused(self, corpus, field, change):
        state = make(corpus).iterator().get_state()
        other = make(corpus, dataclasses.replace(CONFIG, **change)).iterator()
        with pytest.raises(DataError, match=rf"another stream.*\b{field}: saved .*, now "):
            other.set_state(state)
        assert other.get_state()["step"] == 0

    def test_other_tokenizer_is_refused(self, corpus):
        state = make(corpus).iterator().get_state()
        other = make(corpus, tokenizer=make_tokenizer(add_bos=True)).iterator()
        with pytest.raises(DataError, match=r"tokenizer: saved 'byte-1', now 'byte-1\+bos'"):
            other.set_state(state)

    def test_other_split_is_refused(self, corpus):
        state = make(corpus).iterator().get_state()
        with pytest.raises(DataError, match="split: saved 'train', now 'heldout'"):
            make(corpus, split="heldout").iterator().set_state(state)

    def test_changed_text_is_refused(self, corpus, text_dir, tmp_path):
        state = make(corpus).iterator().get_state()
        copy = tmp_path / "copy"
        shutil.copytree(text_dir, copy)
        path = copy / "code" / "01.txt"
        path.write_text(path.read_text(encoding="utf-8") + "!", encoding="utf-8")
        changed = open_corpus(f"text:{copy}", cache_dir=tmp_path / "c", heldout_fraction=0.2)
        with pytest.raises(DataError, match=r"another stream.*corpus: saved '[0-9a-f]{64}', now"):
            make(changed).iterator().set_state(state)

    def test_other_shuffle_is_refused(self, corpus, monkeypatch):
        state = make(corpus).iterator().get_state()
        monkeypatch.setattr(pipeline_module, "_order_digest", lambda schedule: "other")
        with pytest.raises(DataError, match="order: saved"):
            make(corpus).iterator().set_state(state)

    @pytest.mark.parametrize("state", [{}, {"version": 99, "fingerprint": {}}, {"version": 1}])
    def test_foreign_state_is_refused(self, corpus, state):
        with pytest.raises(DataError, match="data state has version"):
            make(corpus).iterator().set_state(state)


class TestErrors:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"seq_len": 1}, "seq_len must be an integer >= 2, got 1"),
            ({"seq_len": 8.0}, "seq_len must be an integer"),
            ({"global_batch": 0}, "global_batch must be an integer >= 1"),
            ({"accum_steps": 0}, "accum_steps must be an integer >= 1"),
            ({"accum_steps": 3}, "global_batch=8 is not divisible by accum_steps=3"),
            ({"chunks_per_row": 3}, "chunks_per_row=3 must divide seq_len=64"),
            ({"chunks_per_row": 64}, "chunks of at least 2 tokens"),
            ({"seed": -1}, "seed must be an integer >= 0"),
            ({"num_threads": -1}, "num_threads must be an integer >= 0"),
        ],
    )
    def test_config(self, change, message):
        with pytest.raises(DataError, match=message):
            dataclasses.replace(CONFIG, **change)

    def test_hosts(self, corpus):
        with pytest.raises(DataError, match=r"accum_steps \* process_count = 2 \* 3"):
            make(corpus, process_count=3)
        with pytest.raises(DataError, match=r"process_index=2 must be in 0\.\.1"):
            make(corpus, process_index=2, process_count=2)

    def test_vocabulary(self, corpus):
        with pytest.raises(DataError, match="vocab_size=258 is smaller than the tokenizer's 259"):
            make(corpus, dataclasses.replace(CONFIG, vocab_size=258))

    def test_domain_shorter_than_a_row(self, corpus):
        config = dataclasses.replace(CONFIG, seq_len=100_000)
        with pytest.raises(DataError, match="domain 'code' has .* tokens .*needs"):
            make(corpus, config)

    def test_short_domain_can_be_left_out(self, corpus):
        totals = {s.domain: s.total for s in open_tokens(corpus, make_tokenizer(), "train")}
        shortest = min(totals, key=lambda d: totals[d])
        config = dataclasses.replace(CONFIG, seq_len=totals[shortest] + 1)
        with pytest.raises(DataError, match=f"domain '{shortest}' has {totals[shortest]} tokens"):
            make(corpus, config)
        weights = {d: float(d != shortest) for d in totals}
        batch = make(corpus, dataclasses.replace(config, weights=weights)).batch_at(0)
        assert corpus.domain_id(shortest) not in batch["domain_ids"]

    def test_micro_batch_of_one_row(self, corpus):
        with pytest.raises(DataError, match="must hold at least two domains"):
            make(corpus, dataclasses.replace(CONFIG, accum_steps=8))

    def test_split(self, corpus):
        with pytest.raises(DataError, match="split 'test' does not exist; this corpus has train"):
            make(corpus, split="test")


class TestTokenCache:
    def test_used_again_and_made_again_when_damaged(self, text_dir, tmp_path):
        corpus = open_corpus(f"text:{text_dir}", cache_dir=tmp_path)

        class Counting(ByteTokenizer):
            calls = 0

            def encode_batch(self, texts):
                Counting.calls += 1
                return super().encode_batch(texts)

        first = open_tokens(corpus, Counting(), "train")
        assert Counting.calls == 1
        second = open_tokens(corpus, Counting(), "train")
        assert Counting.calls == 1
        for one, two in zip(first, second, strict=True):
            np.testing.assert_array_equal(one.tokens, two.tokens)
        (folder,) = (tmp_path / "tokens").iterdir()
        next(folder.glob("*.tokens.npy")).unlink()
        open_tokens(corpus, Counting(), "train")
        assert Counting.calls == 2

    @pytest.mark.parametrize("suffix", ["tokens", "offsets"])
    def test_one_changed_bit_is_noticed_and_the_file_made_anew(self, text_dir, tmp_path, suffix):
        corpus = open_corpus(f"text:{text_dir}", cache_dir=tmp_path)
        first = [np.array(s.tokens) for s in open_tokens(corpus, make_tokenizer(), "train")]
        (folder,) = (tmp_path / "tokens").iterdir()
        path = folder / f"train-0001.{suffix}.npy"
        content = bytearray(path.read_bytes())
        content[-9] ^= 1
        path.write_bytes(bytes(content))
        for one, two in zip(first, open_tokens(corpus, make_tokenizer(), "train"), strict=True):
            np.testing.assert_array_equal(one, two.tokens)
        assert path.read_bytes() != bytes(content)

    def test_changed_documents_are_not_tokenised(self, text_dir, tmp_path):
        corpus = open_corpus(f"text:{text_dir}", cache_dir=tmp_path)
        listing = corpus.path / "documents.jsonl"
        listing.write_bytes(listing.read_bytes().replace(b"a", b"b", 1))
        with pytest.raises(
            DataError, match="are not those that were written .* remove that folder"
        ):
            open_tokens(corpus, make_tokenizer(), "train")

    def test_small_integers_for_small_vocabularies(self, corpus):
        class Wide(ByteTokenizer):
            vocab_size = 70_000
            eos_id = 69_999
            fingerprint = "wide"

            def __init__(self):
                self.add_bos = False

        assert open_tokens(corpus, make_tokenizer(), "train")[0].tokens.dtype == np.uint16
        wide = open_tokens(corpus, Wide(), "train")[0]
        assert wide.tokens.dtype == np.uint32 and wide.tokens.max() == 69_999

    def test_id_outside_of_the_vocabulary(self, corpus):
        class Broken(ByteTokenizer):
            def encode_batch(self, texts):
                return [np.asarray([300]) for _ in texts]

            def __init__(self):
                self.add_bos = False
                self.fingerprint = "broken"

        with pytest.raises(DataError, match="gave id 300, outside of its vocab_size 259"):
            open_tokens(corpus, Broken(), "train")

    def test_domain_whose_text_gives_no_token(self, corpus):
        class Deaf(ByteTokenizer):
            def encode_batch(self, texts):
                return [np.zeros(0, np.int32) for _ in texts]

            def __init__(self):
                self.add_bos = False
                self.fingerprint = "deaf"

        assert [s.total for s in open_tokens(corpus, Deaf(), "train")] == [0, 0, 0]
        with pytest.raises(DataError, match="domain 'code' has 0 tokens"):
            make(corpus, tokenizer=Deaf())
        with pytest.raises(DataError, match="domain 'math' has no tokens in split 'heldout'"):
            heldout_batches(corpus, Deaf(), 16, 2, "math")


class TestHeldout:
    def test_every_token_once_and_padding_is_inert(self, corpus):
        tokenizer = make_tokenizer()
        shapes = set()
        for domain_id, domain in enumerate(corpus.domains):
            stream = open_tokens(corpus, tokenizer, "heldout")[domain_id]
            batches = list(heldout_batches(corpus, tokenizer, 32, 4, domain))
            assert len(batches) == -(-stream.total // (32 * 4))
            joined = stack(batches)
            inside = joined["segment_ids"] > 0
            np.testing.assert_array_equal(joined["tokens"][inside], stream.tokens)
            assert not joined["loss_mask"][~inside].any()
            assert (joined["tokens"][~inside] == tokenizer.pad_id).all()
            # Every token but the first of each document is predicted once.
            assert joined["loss_mask"].sum() == stream.total - (len(stream.offsets) - 1)
            assert set(np.unique(joined["domain_ids"])) <= {-1, domain_id}
            shapes |= {tuple((k, v.shape) for k, v in sorted(b.items())) for b in batches}
        assert len(shapes) == 1

    def test_limit(self, corpus):
        tokenizer = make_tokenizer()
        every = list(heldout_batches(corpus, tokenizer, 16, 2, "code"))
        some = list(heldout_batches(corpus, tokenizer, 16, 2, "code", limit=3))
        assert [digest(b) for b in some] == [digest(b) for b in every[:3]]
        assert len(list(heldout_batches(corpus, tokenizer, 16, 2, "code", limit=10**6))) == len(
            every
        )

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ((1, 2, "code"), "seq_len must be at least 2"),
            ((8, 0, "code"), "batch must be at least 1"),
            ((8, 2, "cod"), "unknown domain 'cod'"),
            ((8, 2, "code", 0), "limit must be at least 1"),
        ],
    )
    def test_errors_come_at_once(self, corpus, arguments, message):
        with pytest.raises(DataError, match=message):
            heldout_batches(corpus, make_tokenizer(), *arguments)


def test_importing_is_light():
    code = (
        "import sys, jaxlib_papers.data;"
        "heavy = {'jax', 'grain', 'tensorflow_datasets', 'tokenizers', 'tensorflow'};"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    path = os.pathsep.join(p for p in sys.path if p)
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": path})
