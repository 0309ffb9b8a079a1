"""Which domain each chunk of each batch comes from: a deterministic schedule with random access.

One *cycle* of batches is laid out in advance and repeats. Within it each domain has the number of
chunks that its weight gives (rounded by less than one), spread evenly over the cycle, and every
micro-batch has at least two domains. Where in the stream of its domain a chunk comes from follows
from how many chunks of that domain were scheduled before it, which is a table look-up.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxlib_papers.data.errors import DataError

__all__ = ["MixtureSchedule", "make_schedule", "normalised_weights", "random_bits"]

_MIN_CYCLE = 4096  # chunks
_MAX_CYCLE = 2**22


def random_bits(count: int, *key: object) -> np.ndarray:
    """Return uint64 random numbers, [count], that are the same for a key everywhere and always."""
    digest = hashlib.sha256("\0".join(map(str, key)).encode()).digest()
    # Of numpy's generators only the raw bits are promised to stay the same between versions.
    return np.random.Philox(key=int.from_bytes(digest[:16], "little")).random_raw(count)


def normalised_weights(
    domains: Sequence[str], weights: Mapping[str, float] | None
) -> dict[str, float]:
    """Return the share of every domain, in the order of `domains`, summing to 1.

    Args:
        domains: the corpus's domains.
        weights: non-negative weight of every domain, 0 to leave one out; None gives all the same.

    Raises:
        DataError: unknown or missing domain, a weight that is negative or not finite, or all zero.
    """
    if weights is None:
        return {domain: 1.0 / len(domains) for domain in domains}
    names = ", ".join(map(repr, domains))
    unknown = [domain for domain in weights if domain not in domains]
    if unknown:
        raise DataError(f"weights name unknown domain {unknown[0]!r}; the corpus has {names}")
    missing = [domain for domain in domains if domain not in weights]
    if missing:
        raise DataError(f"weights lack domain {missing[0]!r}; give 0 to leave it out ({names})")
    for domain, weight in weights.items():
        if not np.isfinite(weight) or weight < 0:
            raise DataError(f"weight of domain {domain!r} must be finite and >= 0, got {weight}")
    total = float(sum(weights.values()))
    if total <= 0:
        raise DataError(f"all weights are zero ({names}); at least one must be positive")
    return {domain: float(weights[domain]) / total for domain in domains}


@dataclass(frozen=True, eq=False)
class MixtureSchedule:
    """The schedule of one cycle; made by `make_schedule`.

    Attributes:
        domain: int32 [batches, rows, chunks], index of the domain.
        earlier: int64 [batches, rows, chunks], chunks of the same domain earlier in the cycle.
        counts: int64 [domains], chunks of each domain in a cycle.
    """

    domain: np.ndarray
    earlier: np.ndarray
    counts: np.ndarray

    def lookup(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Return domain and running number (from 0, within its domain) of each chunk of a batch.

        Args:
            step: index of the batch, from 0 without bound.

        Returns:
            Two arrays [rows, chunks], int32 and int64.
        """
        cycle, batch = divmod(step, len(self.domain))
        domain = self.domain[batch]
        return domain, self.earlier[batch] + cycle * self.counts[domain]

    @property
    def digest(self) -> str:
        """Hash of the schedule."""
        return hashlib.sha256(self.domain.astype("<i4").tobytes()).hexdigest()


def make_schedule(
    weights: Mapping[str, float],
    *,
    rows: int,
    accum_steps: int = 1,
    chunks_per_row: int = 1,
    seed: int = 0,
) -> MixtureSchedule:
    """Lay out one cycle.

    Micro-batch a of a batch is the rows r with r % accum_steps == a.

    Args:
        weights: share of each domain, summing to 1 (see `normalised_weights`).
        rows: rows of the global batch, a multiple of accum_steps.
        accum_steps: micro-batches per batch.
        chunks_per_row: chunks per row, each with a domain of its own.
        seed: order within micro-batches.

    Raises:
        DataError: with two domains or more of positive weight: a micro-batch of one chunk, a weight
            so large that some micro-batch could have no other domain, or one too small for a cycle.
    """
    names = list(weights)
    share = np.asarray([weights[name] for name in names], np.float64)
    present = np.flatnonzero(share > 0)
    size = rows // accum_steps * chunks_per_row  # chunks of a micro-batch
    if len(present) >= 2:
        _check_feasible(names, share, size, rows, accum_steps)
    counts = _cycle_counts(names, share, rows * chunks_per_row)
    micro = _spread(counts, present).reshape(-1, size)
    if len(present) >= 2:
        _repair(micro, len(names))
    micro = _shuffled(micro, seed)
    batches = len(micro) // accum_steps
    # [batch, micro-batch, its row, chunk] -> [batch, its row, micro-batch, chunk]: row r belongs to
    # micro-batch r % accum_steps.
    shape = (batches, accum_steps, rows // accum_steps, chunks_per_row)
    domain = micro.reshape(shape).swapaxes(1, 2).reshape(batches, rows, chunks_per_row)
    flat = domain.reshape(-1)
    earlier = np.zeros(flat.shape, np.int64)
    for index in present:
        places = flat == index
        earlier[places] = np.arange(int(counts[index]))
    return MixtureSchedule(np.ascontiguousarray(domain), earlier.reshape(domain.shape), counts)


def _check_feasible(
    names: list[str], share: np.ndarray, size: int, rows: int, accum_steps: int
) -> None:
    if size < 2:
        raise DataError(
            f"a micro-batch has {size} row (global_batch={rows}, accum_steps={accum_steps}), but "
            "it must hold at least two domains; use a larger global_batch or fewer accum_steps"
        )
    largest = int(np.argmax(share))
    if share[largest] > 1 - 1 / size + 1e-12:
        raise DataError(
            f"domain {names[largest]!r} has {share[largest]:.4g} of the weight, so some "
            f"micro-batch of {size} rows would hold no other domain; at most {1 - 1 / size:.4g} is "
            "possible. Lower its weight, enlarge the micro-batch (global_batch / accum_steps), or "
            "set the other weights to 0"
        )


def _cycle_counts(names: list[str], share: np.ndarray, batch: int) -> np.ndarray:
    """Chunks of each domain in a cycle of whole batches, rounded as little as possible."""
    positive = share[share > 0]
    wanted = max(_MIN_CYCLE, int(np.ceil(4 / positive.min())))
    if wanted > _MAX_CYCLE:
        name = names[int(np.flatnonzero(share == positive.min())[0])]
        raise DataError(
            f"domain {name!r} has {positive.min():.3g} of the weight, less than the "
            f"{4 / _MAX_CYCLE:.3g} that can be scheduled; raise it or set it to 0"
        )
    least = -(-wanted // batch)
    candidates = np.arange(least, least + max(least, 64)) * batch
    exact = candidates[:, None] * share
    error = np.abs(exact - np.round(exact)).max(axis=1)
    # Among equally good lengths the shortest; tiny differences are rounding noise.
    total = int(candidates[np.argmax(error <= error.min() + 1e-9)])
    # Largest remainder.
    exact = total * share
    counts = np.floor(exact + 1e-9).astype(np.int64)
    missing = total - int(counts.sum())
    order = np.argsort(counts - exact, kind="stable")
    counts[order[:missing]] += 1
    return counts


def _spread(counts: np.ndarray, present: np.ndarray) -> np.ndarray:
    """Domains in an order in which every stretch has nearly its share of each."""
    times = []
    domains = []
    for place, index in enumerate(present):
        phase = (place + 0.5) / len(present)
        times.append((np.arange(int(counts[index])) + phase) / counts[index])
        domains.append(np.full(counts[index], index, np.int32))
    order = np.argsort(np.concatenate(times), kind="stable")
    return np.concatenate(domains)[order]


def _repair(micro: np.ndarray, num_domains: int) -> None:
    """Swap chunks so that no micro-batch has one domain only.

    A micro-batch full of x takes a chunk from the nearest one with at least two that are not x; the
    giver keeps one of these and receives an x, so it has two domains as well. If x has at most
    1 - 1/size of all chunks there is always such a giver.
    """
    size = micro.shape[1]
    others = np.stack([size - (micro == index).sum(axis=1) for index in range(num_domains)], axis=1)
    for lone in np.flatnonzero((micro == micro[:, :1]).all(axis=1)):
        domain = int(micro[lone, 0])
        givers = _nearest(others[:, domain] >= 2, int(lone))
        place = int(np.flatnonzero(micro[givers] != domain)[0])
        taken = int(micro[givers, place])
        micro[lone, -1], micro[givers, place] = taken, domain
        for changed in (lone, givers):
            others[changed] = size - np.bincount(micro[changed], minlength=num_domains)


def _nearest(candidates: np.ndarray, place: int) -> int:
    reach = 16
    while True:
        low = max(place - reach, 0)
        found = np.flatnonzero(candidates[low : place + reach]) + low
        if len(found):
            return int(found[np.argmin(np.abs(found - place))])
        if reach > len(candidates):
            raise RuntimeError("no micro-batch can give a chunk of another domain")
        reach *= 4


def _shuffled(micro: np.ndarray, seed: int) -> np.ndarray:
    """Each micro-batch in random order, so that a host's rows are no pattern of domains."""
    keys = random_bits(micro.size, "mixture", seed).reshape(micro.shape)
    return np.take_along_axis(micro, np.argsort(keys, axis=1, kind="stable"), axis=1)
