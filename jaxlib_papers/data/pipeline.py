"""Checkpointable stream of packed batches, read by Grain.

The batch of a step is a pure function of (corpus, tokenizer, config, step). A host asks for its
rows of it, so the global order of examples does not depend on the number of hosts. Grain shuffles
the rows of each domain (statelessly, anew each epoch), reads ahead in threads and keeps the
position; the state that goes into a checkpoint is that position and a fingerprint of everything
that the order depends on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from jaxlib_papers.data.batches import BatchSource, PipelineConfig
from jaxlib_papers.data.corpus import Corpus
from jaxlib_papers.data.errors import DataError
from jaxlib_papers.data.mixture import (
    MixtureSchedule,
    make_schedule,
    normalised_weights,
)
from jaxlib_papers.data.packing import Batch, max_segments
from jaxlib_papers.data.storage import digest_of
from jaxlib_papers.data.token_store import open_tokens
from jaxlib_papers.data.tokenizers import Tokenizer, check_vocabulary

__all__ = ["Pipeline", "PipelineConfig", "PipelineIterator", "make_pipeline"]

_STATE_VERSION = 1


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
        source: BatchSource,
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
        source: Any = pipeline._source
        dataset = grain.MapDataset.source(source)
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
    source = BatchSource(streams, schedule, config, split, segments, tokenizer.pad_id, rows)
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

    probe: Any = grain.MapDataset.range(1000).shuffle(seed=1)
    return digest_of([schedule.digest, [int(probe[i]) for i in range(990, 1010)]])[:16]
