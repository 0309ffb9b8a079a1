"""Held-out batches of one domain, for evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jaxlib_papers.data.corpus import Corpus
from jaxlib_papers.data.errors import DataError
from jaxlib_papers.data.packing import Batch, Span, max_segments, pack
from jaxlib_papers.data.token_store import DomainTokens, open_tokens
from jaxlib_papers.data.tokenizers import Tokenizer

__all__ = ["heldout_batches"]


def heldout_batches(
    corpus: Corpus,
    tokenizer: Tokenizer,
    seq_len: int,
    batch: int,
    domain: str,
    limit: int | None = None,
    *,
    split: str = "heldout",
) -> Iterator[Batch]:
    """Iterate over the held-out documents of one domain, once, in a fixed order.

    All batches of all domains have the same shapes (`domain_ids` is as wide as the fullest row of
    any domain needs), so an evaluation step compiles once. The last batch is padded: segment 0, no
    loss.

    Args:
        corpus: from `open_corpus`.
        tokenizer: from `make_tokenizer`.
        seq_len: tokens per row, at least 2.
        batch: rows per batch.
        domain: which domain.
        limit: at most so many batches; None gives all.
        split: "heldout", or "train" to evaluate on training text.

    Returns:
        An iterator of batches as `packing.pack` describes them.

    Raises:
        DataError: no such split or domain, no text in it, or a size out of range.
    """
    for name, value, least in (("seq_len", seq_len, 2), ("batch", batch, 1)):
        if value < least:
            raise DataError(f"{name} must be at least {least}, got {value}")
    if limit is not None and limit < 1:
        raise DataError(f"limit must be at least 1 or None, got {limit}")
    domain_id = corpus.domain_id(domain)
    streams = open_tokens(corpus, tokenizer, split)
    total = streams[domain_id].total
    if not total:
        raise DataError(f"domain {domain!r} has no tokens in split {split!r}")
    segments = max(max_segments(stream, seq_len) for stream in streams)
    return _batches(streams, domain_id, seq_len, batch, limit, segments, tokenizer.pad_id)


def _batches(
    streams: Sequence[DomainTokens],
    domain_id: int,
    seq_len: int,
    batch: int,
    limit: int | None,
    segments: int,
    pad_id: int,
) -> Iterator[Batch]:
    total = streams[domain_id].total
    starts = range(0, total, seq_len)
    count = -(-len(starts) // batch)
    for index in range(count if limit is None else min(limit, count)):
        spans = [
            Span(domain_id, start, min(seq_len, total - start))
            for start in starts[index * batch : (index + 1) * batch]
        ]
        spans += [Span(domain_id, 0, 0)] * (batch - len(spans))
        yield pack(streams, spans, chunks=1, chunk_length=seq_len, segments=segments, pad_id=pad_id)
