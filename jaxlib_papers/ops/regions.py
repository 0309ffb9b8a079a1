"""What is measured of prediction regions: volume, coverage, worst slab, connected parts.

Sources: volumes and coverage as in JAPAN, arXiv 2505.23196; worst-slab coverage, Cauchois, Gupta
and Duchi, arXiv 2004.10181; volume of a union of balls, Karp and Luby (1983).
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import logsumexp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int, Key

from jaxlib_papers.ops.checks import as_float, check_count, check_ndim, check_shape, is_concrete

__all__ = [
    "connected_components_2d",
    "coverage",
    "label_components_2d",
    "log_ball_volume",
    "log_volume_importance",
    "log_volume_of_balls",
    "volume_box",
    "worst_slab_coverage",
]


def _as_bool(name: str, array: ArrayLike) -> Array:
    array = jnp.asarray(array)
    if array.dtype != jnp.bool_:
        raise ValueError(f"{name} has dtype {array.dtype}, expected bool; compare with a threshold")
    return array


def log_volume_importance(
    log_prob: Float[ArrayLike, "samples *batch"],
    inside: Bool[ArrayLike, "samples *batch"],
    axis: int = 0,
) -> Float[Array, "*batch"]:
    """Log-volume of sets from samples of a density: log mean of [inside] / p(y).

    Unbiased as a volume. For a super-level set {log p >= tau} every term is at most exp(-tau), so
    the variance is at most (exp(-tau) V - V^2) / N; other sets may reach low density, where a few
    samples decide.

    Args:
        log_prob: log-density of each sample under the density it was drawn from.
        inside: whether the sample lies in the set.
        axis: that of the samples.

    Returns:
        log V in nats of the units of y (units^d); -inf where no sample is inside. Nothing is
        exponentiated before the sum is taken, so d may be large.

    Raises:
        ValueError: shapes that differ, no samples, inside not bool.

    Source: arXiv 2505.23196, volume by importance sampling; the bound is derived here.
    """
    log_prob, inside = as_float(log_prob), _as_bool("inside", inside)
    check_shape("inside", inside, log_prob.shape, "the shape of log_prob")
    if log_prob.ndim < 1 or log_prob.shape[axis] == 0:
        raise ValueError(f"log_prob has shape {log_prob.shape}, expected at least one sample")
    terms = jnp.where(inside, -log_prob, -jnp.inf)
    return logsumexp(terms, axis=axis) - math.log(log_prob.shape[axis])


def volume_box(
    inside: Bool[ArrayLike, "samples *batch"],
    low: Float[ArrayLike, "*#batch dim"],
    high: Float[ArrayLike, "*#batch dim"],
) -> Float[Array, "*batch"]:
    """Volume of sets from uniform points of a box that holds them.

    Args:
        inside: whether each point lies in the set.
        low: corner of the box; one for all, or one a row of the batch.
        high: the opposite corner.

    Returns:
        Box volume times the share of points inside; 0 where there is none. What sticks out of
        the box is not counted.

    Raises:
        ValueError: shapes that differ, no points, high <= low (seen outside `jit`).

    Source: arXiv 2505.23196, sets that are no density level sets (reconstructed).
    """
    inside = _as_bool("inside", inside)
    low, high = as_float(low, high)
    check_shape("high", high, low.shape, "the shape of low")
    if inside.ndim < 1 or inside.shape[0] == 0:
        raise ValueError(f"inside has shape {inside.shape}, expected at least one point")
    if low.ndim < 1:
        raise ValueError("low has shape (), expected [dim]")
    if is_concrete(low) and is_concrete(high) and not bool(jnp.all(high > low)):
        raise ValueError("high is not above low in every dimension; swap or widen the box")
    box = jnp.prod(high - low, axis=-1)
    share = jnp.mean(inside.astype(low.dtype), axis=0)
    return share * jnp.broadcast_to(box, share.shape)


def log_ball_volume(dim: int, log_radius: Float[ArrayLike, "*batch"]) -> Float[Array, "*batch"]:
    """Log-volume of a Euclidean ball of `dim` dimensions.

    Args:
        dim: d >= 1.
        log_radius: logarithm of the radius; -inf gives -inf.

    Source: textbook, pi^(d/2) r^d / Gamma(d/2 + 1); arXiv 2505.23196 uses it for balls.
    """
    check_count("dim", dim, 1)
    unit = 0.5 * dim * math.log(math.pi) - math.lgamma(0.5 * dim + 1)
    return unit + dim * as_float(log_radius)


def log_volume_of_balls(
    key: Key[Array, ""],
    centres: Float[ArrayLike, "balls *batch dim"],
    radius: Float[ArrayLike, "*#batch"],
    num_samples: int = 256,
) -> Float[Array, "*batch"]:
    """Log-volume of a union of balls of one radius a row: the sets of PCP.

    A uniform point of a random ball counts 1 / (number of balls that hold it), which is unbiased
    and never larger than 1, however little of a bounding box the union fills.

    Args:
        key: PRNG key.
        centres: of the balls.
        radius: >= 0; 0 gives -inf, +inf gives +inf.
        num_samples: points drawn; each costs a distance to every centre.

    Returns:
        log V in nats of units^d.

    Raises:
        ValueError: counts below 1.

    Source: Karp and Luby (1983), union of sets; arXiv 2206.06584 for the sets.
    """
    check_count("num_samples", num_samples, 1)
    centres = as_float(centres)
    balls, dim, batch = centres.shape[0], centres.shape[-1], centres.shape[1:-1]
    radius = jnp.broadcast_to(as_float(radius).astype(centres.dtype), tuple(batch))
    finite = jnp.where(jnp.isfinite(radius), radius, 1)
    which_key, direction_key, length_key = jax.random.split(key, 3)
    which = jax.random.randint(which_key, (num_samples, *batch), 0, balls)
    direction = jax.random.normal(direction_key, (num_samples, *batch, dim), centres.dtype)
    direction = direction / jnp.linalg.norm(direction, axis=-1, keepdims=True)
    length = jax.random.uniform(length_key, (num_samples, *batch, 1), centres.dtype) ** (1 / dim)
    offset = finite[None, ..., None] * length * direction

    def held_by(pair: tuple[Array, Array]) -> Array:
        index, step = pair
        start = jnp.take_along_axis(centres, index[None, ..., None], axis=0)[0]
        apart = jnp.sum(jnp.square((start + step)[None] - centres), axis=-1)
        # The ball that the point was drawn from holds it, whatever rounding says.
        others = jnp.sum(apart <= jnp.square(finite)[None], axis=0)
        return 1 / jnp.maximum(others, 1).astype(centres.dtype)

    share = jnp.mean(jax.lax.map(held_by, (which, offset)), axis=0)
    log_radius = jnp.log(jnp.where(finite > 0, finite, 1))
    log_volume = jnp.log(share) + math.log(balls) + log_ball_volume(dim, log_radius)
    log_volume = jnp.where(finite > 0, log_volume, -jnp.inf)
    return jnp.where(jnp.isfinite(radius), log_volume, jnp.inf)


def coverage(
    covered: Bool[ArrayLike, " batch"], mask: Bool[ArrayLike, " batch"] | None = None
) -> Float[Array, ""]:
    """Share of test points that their regions hold.

    Args:
        covered: whether each region holds its target.
        mask: test points that count; None counts all.

    Returns:
        A number in [0, 1].

    Raises:
        ValueError: no points, not bool, shapes that differ.

    Source: arXiv 2505.23196, marginal coverage.
    """
    covered = _as_bool("covered", covered)
    if covered.size == 0:
        raise ValueError(f"covered has shape {covered.shape}, expected at least one test point")
    if mask is None:
        return jnp.mean(covered.astype(jnp.float32))
    mask = _as_bool("mask", mask)
    check_shape("mask", mask, covered.shape, "the shape of covered")
    if is_concrete(mask) and not bool(jnp.any(mask)):
        raise ValueError("mask selects no test point")
    count = jnp.sum(mask, dtype=jnp.float32)
    return jnp.sum(covered & mask, dtype=jnp.float32) / jnp.maximum(count, 1)


def _worst_run(hits: np.ndarray, length: int, bound: float) -> tuple[float, int, int]:
    """Smallest mean over all runs of at least `length` values, if it is below `bound`.

    Dinkelbach's iteration on (sum - bound * size): each round is linear, and few are needed.

    Returns:
        (mean, start, end); `bound` and an empty run where no mean is smaller.
    """
    best, start, end = bound, 0, 0
    while True:
        sums = np.concatenate([[0.0], np.cumsum(hits - best)])
        # For each end, the start at least `length` before it from which the sum is smallest.
        highest = np.maximum.accumulate(sums[: len(sums) - length])
        gains = sums[length:] - highest
        at = int(np.argmin(gains))
        if gains[at] >= -1e-9:
            return best, start, end
        end = at + length
        start = int(np.argmax(sums[: at + 1]))
        best = float(hits[start:end].mean())


def worst_slab_coverage(
    x: Float[ArrayLike, "batch features"],
    covered: Bool[ArrayLike, " batch"],
    delta: float = 0.2,
    M: int = 1000,  # noqa: N803
    *,
    seed: int = 0,
    holdout: bool = False,
) -> float:
    """Coverage in the worst slab {a <= v'x <= b} that holds a share delta of the points.

    A measure of how far coverage is from holding at each x. The minimum over slabs is biased
    downwards: some slab is bad by chance. `holdout` searches on a random quarter of the points and
    reports the coverage in the slab found on the others.

    Args:
        x: features of the test points; standardise them, or directions follow the units.
        covered: whether each region holds its target.
        delta: least share of points in a slab, in (0, 1].
        M: random directions v, uniform on the sphere (features = 1: the axis alone).
        seed: of the directions and of the split.
        holdout: report on points that did not take part in the search.

    Returns:
        A number in [0, 1]; that of all points where delta is 1.

    Raises:
        ValueError: shapes that differ, delta outside (0, 1], M < 1, non-finite x, too few points.

    Source: Cauchois et al., arXiv 2004.10181, section 4 (search over slabs).
    """
    features, hits = np.asarray(x), np.asarray(covered)
    check_ndim("x", features, (2,), "[batch, features]")
    check_count("M", M, 1)
    if hits.dtype != np.bool_:
        raise ValueError(f"covered has dtype {hits.dtype}, expected bool")
    check_shape("covered", hits, features.shape[:1], "one entry a row of x")
    if not 0 < delta <= 1:
        raise ValueError(f"delta is {delta}, expected a share in (0, 1]")
    if not np.isfinite(features).all():
        raise ValueError("x holds NaN or infinite features; a slab needs numbers")
    rng = np.random.default_rng(seed)
    search = np.arange(len(hits))
    if holdout:
        search = rng.permutation(len(hits))[: len(hits) // 4]
    if len(search) < 2:
        raise ValueError(f"covered has {len(hits)} points, too few to look for a slab")
    directions = rng.standard_normal((1 if features.shape[1] == 1 else M, features.shape[1]))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    length = max(1, math.ceil(delta * len(search) - 1e-9))
    worst, slab = 2.0, (directions[0], -math.inf, math.inf)
    for direction in directions:
        along = features[search] @ direction
        order = np.argsort(along, kind="stable")
        value, start, end = _worst_run(hits[search][order].astype(np.float64), length, worst)
        if value < worst:
            worst, slab = value, (direction, along[order][start], along[order][end - 1])
    if not holdout:
        return worst
    direction, low, high = slab
    rest = np.setdiff1d(np.arange(len(hits)), search)
    there = features[rest] @ direction
    chosen = (low <= there) & (there <= high)
    return float(hits[rest][chosen].mean()) if chosen.any() else worst


def label_components_2d(
    mask: Bool[ArrayLike, "rows columns"],
) -> tuple[Int[np.ndarray, "rows columns"], int]:
    """Labels the parts of a mask that hang together over the four neighbours of a cell.

    Args:
        mask: bool [rows, columns].

    Returns:
        (labels, count): int32 labels 1..count in reading order of each part's first cell, 0
        outside of the mask; count 0 for an empty mask.

    Raises:
        ValueError: not two axes, not bool.

    Source: arXiv 2505.23196, disjoint regions (grid and connectivity reconstructed).
    """
    from scipy import ndimage

    array = np.asarray(mask)
    check_ndim("mask", array, (2,), "[rows, columns]")
    if array.dtype != np.bool_:
        raise ValueError(f"mask has dtype {array.dtype}, expected bool")
    labels, count = ndimage.label(array)  # its default structure is the four neighbours
    return np.asarray(labels, np.int32), int(count)


def connected_components_2d(mask: Bool[ArrayLike, "rows columns"]) -> int:
    """Number of parts of a mask that hang together over the four neighbours of a cell.

    Args:
        mask: bool [rows, columns]; one row or one column for a region on a line.

    Returns:
        The count, 0 for an empty mask; `label_components_2d` also tells which cell is in which.

    Raises:
        ValueError: not two axes, not bool.

    Source: arXiv 2505.23196, disjoint regions (grid and connectivity reconstructed).
    """
    return label_components_2d(mask)[1]
