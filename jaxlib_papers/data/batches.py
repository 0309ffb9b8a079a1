"""The batch of each step, by random access: what Grain reads."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxlib_papers.data.errors import DataError
from jaxlib_papers.data.mixture import MixtureSchedule, random_bits
from jaxlib_papers.data.packing import Batch, Span, check_length, pack
from jaxlib_papers.data.token_store import DomainTokens

__all__ = ["BatchSource", "PipelineConfig"]

# Grain shuffles by walking cycles of a permutation of 2**16 numbers or more, which is slow when few
# of them are rows. Shorter epochs are small enough to be laid out in memory.
_SMALL_EPOCH = 2**16


@dataclass(frozen=True)
class PipelineConfig:
    """Shape and order of the batches.

    Attributes:
        seq_len: tokens per row, at least 2.
        global_batch: rows per batch over all hosts.
        accum_steps: micro-batches per batch; micro-batch a is the rows r with r % accum_steps == a.
        weights: weight of each domain in rows (chunks); None gives all domains the same.
        seed: of all shuffling.
        chunks_per_row: chunks of a row, each from a domain of its own; must divide seq_len.
        vocab_size: the model's, to check against the tokenizer's; None checks nothing.
        num_threads: threads that build batches ahead; 0 builds each when asked for it.
        prefetch: batches kept ready.
    """

    seq_len: int
    global_batch: int
    accum_steps: int = 1
    weights: Mapping[str, float] | None = None
    seed: int = 0
    chunks_per_row: int = 1
    vocab_size: int | None = None
    num_threads: int = 2
    prefetch: int = 4

    def __post_init__(self) -> None:
        for name, least in (
            ("seq_len", 2),
            ("global_batch", 1),
            ("accum_steps", 1),
            ("seed", 0),
            ("chunks_per_row", 1),
            ("num_threads", 0),
            ("prefetch", 0),
        ):
            value = getattr(self, name)
            if not isinstance(value, int | np.integer) or value < least:
                raise DataError(f"{name} must be an integer >= {least}, got {value!r}")
        if self.global_batch % self.accum_steps:
            raise DataError(
                f"global_batch={self.global_batch} is not divisible by "
                f"accum_steps={self.accum_steps}"
            )
        if self.seq_len % self.chunks_per_row or self.seq_len < 2 * self.chunks_per_row:
            raise DataError(
                f"chunks_per_row={self.chunks_per_row} must divide seq_len={self.seq_len} into "
                "chunks of at least 2 tokens"
            )

    @property
    def chunk_length(self) -> int:
        """Tokens per chunk."""
        return self.seq_len // self.chunks_per_row


class BatchSource:
    """Grain data source whose element `step` is this host's rows of the batch of that step.

    Args:
        streams: tokens of each domain.
        schedule: which domain each chunk comes from.
        config: shape and seed.
        split: named in errors.
        segments: width of `domain_ids`.
        pad_id: token at masked targets.
        rows: this host's rows of the global batch.

    Raises:
        DataError: a scheduled domain has fewer tokens than a chunk.
    """

    def __init__(
        self,
        streams: Sequence[DomainTokens],
        schedule: MixtureSchedule,
        config: PipelineConfig,
        split: str,
        segments: int,
        pad_id: int,
        rows: slice,
    ):
        import grain

        self._streams = streams
        self._schedule = schedule
        self._config = config
        self._segments = segments
        self._pad_id = pad_id
        self._rows = rows
        self.rows_per_epoch: dict[int, int] = {}
        self._order: dict[int, Any] = {}
        for index in np.flatnonzero(schedule.counts):
            domain = int(index)
            count = check_length(streams[domain], config.chunk_length, split)
            self.rows_per_epoch[domain] = count
            if count >= _SMALL_EPOCH:
                # Grain's shuffle is a keyed permutation: O(1) memory, another one each epoch.
                seed = _hash(config.seed, "order", streams[domain].domain) % 2**32
                self._order[domain] = grain.MapDataset.range(count).shuffle(seed=seed)
        # Neighbouring batches are in one epoch of a domain, or in two.
        self._epoch = functools.lru_cache(maxsize=4 * len(streams))(self._epoch_layout)

    def __len__(self) -> int:
        return 2**48  # endless

    def __getitem__(self, step: int) -> Batch:
        domains, numbers = self._schedule.lookup(int(step))
        spans = [
            self._span(domain, number)
            for domain, number in zip(
                domains[self._rows].reshape(-1).tolist(),
                numbers[self._rows].reshape(-1).tolist(),
                strict=True,
            )
        ]
        return pack(
            self._streams,
            spans,
            chunks=self._config.chunks_per_row,
            chunk_length=self._config.chunk_length,
            segments=self._segments,
            pad_id=self._pad_id,
        )

    def _epoch_layout(self, domain: int, epoch: int) -> tuple[int, np.ndarray | None]:
        """Where the stream starts in an epoch, and the order of its rows if that is small."""
        name = self._streams[domain].domain
        start = _hash(self._config.seed, "start", name, epoch) % self._streams[domain].total
        if domain in self._order:
            return start, None
        keys = random_bits(self.rows_per_epoch[domain], "rows", self._config.seed, name, epoch)
        return start, np.argsort(keys, kind="stable")

    def _span(self, domain: int, number: int) -> Span:
        epoch, within = divmod(number, self.rows_per_epoch[domain])
        start, order = self._epoch(domain, epoch)
        row = int(self._order[domain][number]) if order is None else int(order[within])
        length = self._config.chunk_length
        return Span(domain, start + row * length, length)


def _hash(*parts: Any) -> int:
    text = "\0".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
