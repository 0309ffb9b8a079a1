"""Packing of documents into rows of fixed length, by random access.

The documents of a domain are joined end to end (each ends with eos). An epoch cuts this stream,
taken as a circle from a starting point that depends on the epoch, into `total // length` spans, so
every token is an input exactly once an epoch except for the last `total % length` of them, and
since the starting point moves those are others in the next epoch. A span is found by one binary
search in the offsets of the documents; nothing the size of the corpus is held in memory.

A *segment* is the part of one document that lies in a span. Attention and router statistics work
per segment: it has one domain, its positions start at 0, and the target of its last token is masked
unless the document goes on in the next span (then the target is the token that comes there).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxlib_papers.data.errors import DataError
from jaxlib_papers.data.token_store import DomainTokens

__all__ = ["Batch", "Span", "check_length", "max_segments", "pack"]

Batch = dict[str, np.ndarray]


@dataclass(frozen=True)
class Span:
    """A stretch of one domain's stream.

    Attributes:
        domain_id: index into the list of streams.
        start: position of the first token, taken modulo the stream's length.
        length: number of tokens; fewer than a chunk leaves padding.
    """

    domain_id: int
    start: int
    length: int


def check_length(stream: DomainTokens, length: int, split: str) -> int:
    """Return how many spans of `length` tokens an epoch of a domain has.

    Raises:
        DataError: none; the domain and the numbers are named.
    """
    rows = stream.total // length
    if rows < 1:
        raise DataError(
            f"domain {stream.domain!r} has {stream.total} tokens in {len(stream.offsets) - 1} "
            f"documents of split {split!r}, fewer than the {length} that a row needs; add text, "
            "give the domain weight 0, or make rows (or chunks) shorter"
        )
    return rows


def max_segments(stream: DomainTokens, length: int) -> int:
    """Return the largest number of segments in any span of `length` tokens of the circular stream.

    That is at most `length`; 0 for an empty stream.
    """
    starts = np.asarray(stream.offsets[:-1], np.int64)
    if not len(starts):
        return 0
    # The fullest spans begin just before a document: they hold its predecessor's last token.
    twice = np.concatenate([starts, starts + stream.total])
    inside = np.searchsorted(twice, starts + (length - 1), "left") - np.arange(len(starts))
    return int(min(inside.max() + 1, length))


def pack(
    streams: Sequence[DomainTokens],
    spans: Sequence[Span],
    *,
    chunks: int,
    chunk_length: int,
    segments: int,
    pad_id: int,
) -> Batch:
    """Build a batch from spans, `chunks` of them side by side in each row.

    Args:
        streams: tokens of each domain.
        spans: rows * chunks spans, row by row, each at most `chunk_length` tokens long.
        chunks: spans per row.
        chunk_length: tokens per chunk; a row has chunks * chunk_length.
        segments: width G of `domain_ids`; must not be smaller than the segments of any row.
        pad_id: token in padding and at masked targets.

    Returns:
        `tokens`, `targets`, `segment_ids`, `positions` int32 [rows, seq], `loss_mask` bool
        [rows, seq] and `domain_ids` int32 [rows, G]. Segment ids count from 1 in each row; padding
        has segment 0, position 0 and no loss. `domain_ids[r, g]` is the domain of segment g + 1,
        or -1 if the row has fewer.

    Raises:
        ValueError: a row has more than `segments` segments.
    """
    rows = len(spans) // chunks
    seq_len = chunks * chunk_length
    # One more than a chunk: the token after it is the last one's target.
    tokens = np.full((len(spans), chunk_length + 1), pad_id, np.int32)
    starts = np.zeros((len(spans), chunk_length + 1), bool)
    valid = np.zeros((len(spans), chunk_length), bool)
    for index, span in enumerate(spans):
        _read(streams[span.domain_id], span, tokens[index], starts[index], pad_id)
        valid[index, : span.length] = True

    loss_mask = (~starts[:, 1:] & valid).reshape(rows, seq_len)
    targets = np.where(loss_mask, tokens[:, 1:].reshape(rows, seq_len), np.int32(pad_id))
    first = (starts[:, :-1] & valid).reshape(rows, seq_len)
    inside = valid.reshape(rows, seq_len)
    counted = np.cumsum(first, axis=1, dtype=np.int32)
    place = np.arange(seq_len, dtype=np.int32)
    begin = np.maximum.accumulate(np.where(first, place, np.int32(0)), axis=1)

    domain_ids = np.full((rows, segments), -1, np.int32)
    row, column = np.nonzero(first)
    if counted.size and counted.max() > segments:
        raise ValueError(f"a row has {counted.max()} segments, more than segments={segments}")
    of_span = np.asarray([span.domain_id for span in spans], np.int32)
    domain_ids[row, counted[row, column] - 1] = of_span[row * chunks + column // chunk_length]
    return {
        "tokens": tokens[:, :-1].reshape(rows, seq_len),
        "targets": targets,
        "loss_mask": loss_mask,
        "segment_ids": np.where(inside, counted, np.int32(0)),
        "positions": np.where(inside, place - begin, np.int32(0)),
        "domain_ids": domain_ids,
    }


def _read(
    stream: DomainTokens, span: Span, tokens: np.ndarray, starts: np.ndarray, pad_id: int
) -> None:
    """Fill in the span's tokens and the one after it, and mark where documents start."""
    if span.length == 0:
        return
    begin = span.start % stream.total
    wanted = span.length + 1
    done = 0
    while done < wanted:  # again where the circle closes, at the start of document 0
        count = min(wanted - done, stream.total - begin)
        tokens[done : done + count] = stream.tokens[begin : begin + count]
        low, high = np.searchsorted(stream.offsets, (begin, begin + count), "left")
        starts[stream.offsets[low:high] - (begin - done)] = True
        done += count
        begin = 0
    starts[0] = True
    if span.length < len(tokens) - 1:
        tokens[span.length] = pad_id
