"""Packing: nothing lost, nothing doubled, no target across documents."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxlib_papers.data import DataError
from jaxlib_papers.data.packing import Span, check_length, max_segments, pack
from jaxlib_papers.data.token_store import DomainTokens

PAD = 9999


def build(lengths, name="d"):
    """Token value = 100 * document + place: a test can tell where each came from."""
    tokens = np.concatenate([100 * i + np.arange(n) for i, n in enumerate(lengths)])
    return DomainTokens(name, tokens.astype(np.uint32), np.cumsum([0, *lengths], dtype=np.int64))


def pack_spans(streams, spans, length, chunks=1, segments=None):
    return pack(
        streams,
        spans,
        chunks=chunks,
        chunk_length=length,
        segments=segments or length * chunks,
        pad_id=PAD,
    )


def test_by_hand():
    # Documents 0: 000 001 002, 1: 100 101, 2: 200 201 202 203, in rows of 4.
    stream = build([3, 2, 4])
    batch = pack_spans([stream], [Span(0, 0, 4), Span(0, 4, 4), Span(0, 8, 1)], 4, segments=2)
    np.testing.assert_array_equal(
        batch["tokens"], [[0, 1, 2, 100], [101, 200, 201, 202], [203, PAD, PAD, PAD]]
    )
    np.testing.assert_array_equal(
        batch["targets"], [[1, 2, PAD, 101], [PAD, 201, 202, 203], [PAD, PAD, PAD, PAD]]
    )
    np.testing.assert_array_equal(batch["loss_mask"], [[1, 1, 0, 1], [0, 1, 1, 1], [0, 0, 0, 0]])
    np.testing.assert_array_equal(batch["segment_ids"], [[1, 1, 1, 2], [1, 2, 2, 2], [1, 0, 0, 0]])
    np.testing.assert_array_equal(batch["positions"], [[0, 1, 2, 0], [0, 0, 1, 2], [0, 0, 0, 0]])
    np.testing.assert_array_equal(batch["domain_ids"], [[0, 0], [0, 0], [0, -1]])


def test_dtypes():
    batch = pack_spans([build([5])], [Span(0, 0, 4)], 4)
    assert {k: v.dtype.name for k, v in batch.items()} == {
        "tokens": "int32",
        "targets": "int32",
        "loss_mask": "bool",
        "segment_ids": "int32",
        "positions": "int32",
        "domain_ids": "int32",
    }


lengths = st.lists(st.integers(1, 30), min_size=1, max_size=12)


@given(lengths, st.integers(2, 40), st.integers(0, 500))
def test_an_epoch_has_every_token_once(lengths, length, start):
    stream = build(lengths)
    rows = stream.total // length
    if not rows:
        with pytest.raises(DataError):
            check_length(stream, length, "train")
        return
    spans = [Span(0, start + r * length, length) for r in range(rows)]
    segments = max_segments(stream, length)
    batch = pack_spans([stream], spans, length, segments=segments)

    # The inputs are the circular stream, in order, without its last total % length tokens.
    circle = np.roll(stream.tokens, -(start % stream.total))
    flat = batch["tokens"].reshape(-1)
    np.testing.assert_array_equal(flat, circle[: rows * length])
    assert len(set(flat.tolist())) == rows * length

    # The target is the token's successor in its document; masked if there is none.
    ends = {100 * i + n - 1 for i, n in enumerate(lengths)}
    mask = batch["loss_mask"].reshape(-1)
    targets = batch["targets"].reshape(-1)
    for token, target, counted in zip(flat.tolist(), targets.tolist(), mask.tolist(), strict=True):
        assert counted == (token not in ends)
        assert target == (token + 1 if counted else PAD)

    for row in range(rows):
        tokens, segment, place = (
            batch[name][row].tolist() for name in ("tokens", "segment_ids", "positions")
        )
        assert segment[0] == 1 and place[0] == 0
        for i in range(1, length):
            follows = tokens[i] == tokens[i - 1] + 1 and tokens[i - 1] not in ends
            assert segment[i] - segment[i - 1] == (0 if follows else 1)
            assert place[i] == (place[i - 1] + 1 if follows else 0)
        domains = batch["domain_ids"][row]
        np.testing.assert_array_equal(domains[: segment[-1]], 0)
        np.testing.assert_array_equal(domains[segment[-1] :], -1)


@given(lengths, st.integers(1, 40))
def test_max_segments_is_reached_and_never_passed(lengths, length):
    stream = build(lengths)
    if stream.total < length:
        return
    spans = [Span(0, start, length) for start in range(stream.total)]
    batch = pack_spans([stream], spans, length)
    assert batch["segment_ids"].max() == max_segments(stream, length)


@given(st.lists(lengths, min_size=2, max_size=3), st.integers(2, 10), st.integers(0, 10**6))
def test_chunks_of_several_domains_in_a_row(all_lengths, length, seed):
    streams = [build(found, f"d{i}") for i, found in enumerate(all_lengths)]
    rng = np.random.default_rng(seed)
    spans = [
        Span(int(d), int(rng.integers(streams[d].total)), min(length, streams[d].total))
        for d in rng.integers(len(streams), size=6)
    ]
    batch = pack_spans(streams, spans, length, chunks=3)
    for index, span in enumerate(spans):
        row, chunk = divmod(index, 3)
        alone = pack_spans(streams, [span], length)
        part = slice(chunk * length, (chunk + 1) * length)
        for name in ("tokens", "targets", "loss_mask", "positions"):
            np.testing.assert_array_equal(batch[name][row, part], alone[name][0], err_msg=name)
        segment = batch["segment_ids"][row, part]
        inside = segment > 0
        np.testing.assert_array_equal(inside, alone["segment_ids"][0] > 0)
        np.testing.assert_array_equal(batch["domain_ids"][row][segment[inside] - 1], span.domain_id)
        if index % 3:  # a chunk never goes on with the segment of the one before it
            earlier = batch["segment_ids"][row, : chunk * length]
            assert segment[0] == earlier.max() + 1


def test_one_document_as_long_as_a_row_closes_its_circle():
    batch = pack_spans([build([6])], [Span(0, 4, 6)], 6)
    np.testing.assert_array_equal(batch["tokens"], [[4, 5, 0, 1, 2, 3]])
    # 3 goes on with 4, which is the next epoch's first token and its right successor.
    np.testing.assert_array_equal(batch["targets"], [[5, PAD, 1, 2, 3, 4]])
    np.testing.assert_array_equal(batch["segment_ids"], [[1, 1, 2, 2, 2, 2]])


def test_padding_row():
    batch = pack_spans([build([6])], [Span(0, 0, 0)], 4)
    assert (batch["tokens"] == PAD).all() and not batch["loss_mask"].any()
    assert (batch["segment_ids"] == 0).all() and (batch["domain_ids"] == -1).all()


def test_too_many_segments():
    with pytest.raises(ValueError, match="a row has 4 segments, more than segments=2"):
        pack_spans([build([1, 1, 1, 1])], [Span(0, 0, 4)], 4, segments=2)


def test_short_domain_is_named_with_numbers():
    with pytest.raises(
        DataError,
        match="domain 'tiny' has 7 tokens in 2 documents of split 'train', fewer than .* 8",
    ):
        check_length(build([3, 4], "tiny"), 8, "train")
    assert check_length(build([3, 4]), 7, "train") == 1


def test_empty_stream():
    empty = DomainTokens("d", np.zeros(0, np.uint16), np.zeros(1, np.int64))
    assert max_segments(empty, 8) == 0
    with pytest.raises(DataError, match="has 0 tokens in 0 documents"):
        check_length(empty, 8, "train")
