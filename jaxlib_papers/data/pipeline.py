"""Checkpointable stream of packed batches, read by Grain.

The batch of a step is a pure function of (corpus, tokenizer, config, step). A host asks for its
rows of it, so the global order of examples does not depend on the number of hosts. Grain shuffles
the rows of each domain (statelessly, anew each epoch), reads ahead in threads and keeps the
position; the state that goes into a checkpoint is that position and a fingerprint of everything
that the order depends on.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxlib_papers.data.corpus import Corpus
from jaxlib_papers.data.errors import DataError
from jaxlib_papers.data.mixture import (
    MixtureSchedule,
    make_schedule,
    normalised_weights,
    random_bits,
)
from jaxlib_papers.data.packing import Batch, Span, check_length, max_segments, pack
from jaxlib_papers.data.storage import digest_of
from jaxlib_papers.data.token_store import DomainTokens, open_tokens
from jaxlib_papers.data.tokenizers import Tokenizer, check_vocabulary

__all__ = ["Pipeline", "PipelineConfig", "PipelineIterator", "make_pipeline"]

_STATE_VERSION = 1
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


class _Batches:
    """Grain data source whose element `step` is this host's rows of the batch of that step."""

    def __init__(
        self,
        streams: list[DomainTokens],
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


class Pipeline:
    """Endless batches of one split for one host; made by `make_pipeline`.

    Attributes:
        domains: names of the corpus's domains; `domain_ids` index into them.
        max_segments: width G of `domain_ids`, the same on every host.
        config: the configuration.
        fingerprint: JSON values of everything that the order of examples depends on.
        rows_per_epoch: rows (chunks) that make one epoch of each domain with positive weight.
    """

    def __init__(
        self,
        source: _Batches,
        config: PipelineConfig,
        domains: tuple[str, ...],
        segments: int,
        fingerprint: dict[str, Any],
    ):
        self._source = source
        self.config = config
        self.domains = domains
        self.max_segments = segments
        self.fingerprint = fingerprint
        self.rows_per_epoch = {domains[d]: n for d, n in source.rows_per_epoch.items()}

    def batch_at(self, step: int) -> Batch:
        """Return this host's rows of the batch of a step, by random access."""
        return self._source[step]

    def iterator(self) -> PipelineIterator:
        """Return an iterator from the first batch on."""
        return PipelineIterator(self)

    def __iter__(self) -> PipelineIterator:
        return self.iterator()


class PipelineIterator(Iterator[Batch]):
    """Iterator whose position can be saved and restored; see `Pipeline.iterator`."""

    def __init__(self, pipeline: Pipeline):
        import grain

        self._fingerprint = pipeline.fingerprint
        self._step = 0
        config = pipeline.config
        threads = config.num_threads if config.prefetch else 0
        options = grain.ReadOptions(
            num_threads=threads, prefetch_buffer_size=config.prefetch if threads else 0
        )
        dataset = grain.MapDataset.source(pipeline._source)
        self._iterator = dataset.to_iter_dataset(options).__iter__()

    def __iter__(self) -> PipelineIterator:
        return self

    def __next__(self) -> Batch:
        batch = next(self._iterator)
        self._step += 1
        return batch

    def get_state(self) -> dict[str, Any]:
        """Return the position as a JSON value; the next batch after it is not yet consumed."""
        return {
            "version": _STATE_VERSION,
            "step": self._step,
            "grain": self._iterator.get_state(),
            "fingerprint": dict(self._fingerprint),
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position; the number of hosts may have changed since.

        Raises:
            DataError: the state belongs to other data or another configuration; every differing
                field is named, with both values. The iterator stays where it is.
        """
        if state.get("version") != _STATE_VERSION or "fingerprint" not in state:
            raise DataError(
                f"data state has version {state.get('version')!r}, expected {_STATE_VERSION}"
            )
        saved = state["fingerprint"]
        fields = sorted(set(saved) | set(self._fingerprint))
        differing = [
            f"{name}: saved {saved.get(name)!r}, now {self._fingerprint.get(name)!r}"
            for name in fields
            if saved.get(name) != self._fingerprint.get(name)
        ]
        if differing:
            raise DataError(
                "the saved data position belongs to another stream, so the run cannot go on "
                f"exactly where it was ({'; '.join(differing)}). Restore these, or start the data "
                "from the beginning"
            )
        self._iterator.set_state(dict(state["grain"]))
        self._step = int(state["step"])

    def close(self) -> None:
        """Stop reading ahead."""
        self._iterator.close()


def make_pipeline(
    corpus: Corpus,
    tokenizer: Tokenizer,
    config: PipelineConfig,
    *,
    split: str = "train",
    process_index: int = 0,
    process_count: int = 1,
) -> Pipeline:
    """Build the stream of batches of one host.

    Host h of H gets rows [h * R / H, (h + 1) * R / H) of each global batch of R rows.

    Args:
        corpus: from `open_corpus`.
        tokenizer: from `make_tokenizer`.
        config: shape and order.
        split: "train" or "heldout".
        process_index: this host.
        process_count: number of hosts.

    Raises:
        DataError: batch not divisible by accum_steps * process_count, bad weights, a domain without
            enough tokens for a row, a micro-batch that cannot hold two domains, or a vocabulary
            smaller than the tokenizer's.
    """
    if process_count < 1 or not 0 <= process_index < process_count:
        raise DataError(f"process_index={process_index} must be in 0..{process_count - 1}")
    if config.global_batch % (config.accum_steps * process_count):
        raise DataError(
            f"global_batch={config.global_batch} is not divisible by accum_steps * process_count = "
            f"{config.accum_steps} * {process_count}"
        )
    if config.vocab_size is not None:
        check_vocabulary(tokenizer, config.vocab_size)
    weights = normalised_weights(corpus.domains, config.weights)
    schedule = make_schedule(
        weights,
        rows=config.global_batch,
        accum_steps=config.accum_steps,
        chunks_per_row=config.chunks_per_row,
        seed=config.seed,
    )
    streams = open_tokens(corpus, tokenizer, split)
    segments = config.chunks_per_row * max(
        max_segments(stream, config.chunk_length)
        for stream, weight in zip(streams, weights.values(), strict=True)
        if weight > 0
    )
    per_host = config.global_batch // process_count
    rows = slice(process_index * per_host, (process_index + 1) * per_host)
    source = _Batches(streams, schedule, config, split, segments, tokenizer.pad_id, rows)
    fingerprint = {
        "corpus": corpus.fingerprint,
        "tokenizer": tokenizer.fingerprint,
        "split": split,
        "seq_len": int(config.seq_len),
        "global_batch": int(config.global_batch),
        "accum_steps": int(config.accum_steps),
        "chunks_per_row": int(config.chunks_per_row),
        "weights": weights,
        "seed": int(config.seed),
        "order": _order_digest(schedule),
    }
    return Pipeline(source, config, corpus.domains, segments, fingerprint)


def _order_digest(schedule: MixtureSchedule) -> str:
    """Hash of the schedule and of a sample of Grain's shuffle.

    A version of a library that orders differently is so noticed on resume.
    """
    import grain

    probe = grain.MapDataset.range(1000).shuffle(seed=1)
    return digest_of([schedule.digest, [int(probe[i]) for i in range(990, 1010)]])[:16]
