"""Conformal quantiles at their exact rank: split, weighted, per group, and across folds.

A conformal threshold is an order statistic, and the whole guarantee lies in taking the right one:
of n scores the one of rank ceil((1 - alpha)(n + 1)), plus infinity where that rank is past n. The
rank is computed with Python integers from the decimal that alpha was written as, never from a
rounded product, so n = 99 at alpha = 0.1 gives 90 and not 91.

Sources: Vovk, Gammerman and Shafer, "Algorithmic Learning in a Random World" (split and Mondrian);
Tibshirani et al., arXiv 1904.06019 (weights); Hore and Barber, arXiv 2310.07850 (localised, with a
random centre); Barber et al., arXiv 1905.02928 (CV+); the side of the threshold as in JAPAN, arXiv
2505.23196.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int, Key

from jaxlib_papers.ops._conformal_folds import (
    cross_conformal_contains,
    cv_plus_interval,
    fold_ids,
    split_sizes,
)
from jaxlib_papers.ops._conformal_rank import (
    as_fraction,
    check_level,
    check_scores,
    conformal_rank,
)
from jaxlib_papers.ops.checks import (
    as_float,
    check_count,
    check_integer,
    check_ndim,
    check_positive,
    check_shape,
    is_concrete,
)

__all__ = [
    "conformal_p_value",
    "conformal_quantile",
    "conformal_rank",
    "conformal_threshold",
    "cross_conformal_contains",
    "cv_plus_interval",
    "fold_ids",
    "group_conformal_quantile",
    "localised_conformal_quantile",
    "split_sizes",
    "weighted_conformal_quantile",
]


def conformal_quantile(scores: Float[ArrayLike, " n"], alpha: float) -> Float[Array, ""]:
    """Threshold of nonconformity scores (higher is stranger): keep y where score <= threshold.

    Args:
        scores: scores of n calibration points, exchangeable with the test point's.
        alpha: miscoverage in (0, 1), a Python number.

    Returns:
        The `conformal_rank(n, alpha)`-th smallest score; +inf (the whole space) where n is less
        than that rank, i.e. n < ceil(1 / alpha) - 1. Without ties the set covers with probability
        rank / (n + 1), in [1 - alpha, 1 - alpha + 1 / (n + 1)); ties only raise it.

    Raises:
        ValueError: alpha outside (0, 1), no scores, NaN or -inf among them.

    Source: arXiv 2505.23196, threshold in nonconformity form (rank reconstructed).
    """
    alpha = check_level("alpha", alpha)
    values = check_scores("scores", scores, worst=math.inf)
    n = values.shape[0]
    rank = conformal_rank(n, alpha)
    if rank > n:
        return jnp.asarray(jnp.inf, values.dtype)
    return jnp.sort(values)[rank - 1]


def conformal_threshold(scores: Float[ArrayLike, " n"], eps: float) -> Float[Array, ""]:
    """Threshold of conforming scores (higher is better): keep y where score >= threshold.

    Args:
        scores: scores of n calibration points, e.g. log-densities.
        eps: miscoverage in (0, 1), a Python number.

    Returns:
        The k-th smallest score, k = floor(eps (n + 1)); -inf (the whole space) where k = 0. It is
        minus `conformal_quantile` of minus the scores.

    Raises:
        ValueError: eps outside (0, 1), no scores, NaN or +inf among them.

    Source: arXiv 2505.23196, threshold (rank reconstructed).
    """
    eps = check_level("eps", eps)
    values = check_scores("scores", scores, worst=-math.inf)
    n = values.shape[0]
    rank = n + 1 - conformal_rank(n, eps)
    if rank == 0:
        return jnp.asarray(-jnp.inf, values.dtype)
    return jnp.sort(values)[rank - 1]


def conformal_p_value(
    scores: Float[ArrayLike, " n"], test_scores: Float[ArrayLike, "*batch"]
) -> Float[Array, "*batch"]:
    """Share of scores, the point's own included, that are at least as strange as the point's.

    Args:
        scores: nonconformity scores of the calibration points.
        test_scores: nonconformity scores of the points asked about.

    Returns:
        (1 + number of scores >= test score) / (n + 1). The set {p > alpha} is that of
        `conformal_quantile`.

    Raises:
        ValueError: no scores, NaN or -inf among them.

    Source: Vovk et al., split conformal p-value.
    """
    values = jnp.sort(check_scores("scores", scores, worst=math.inf))
    n = values.shape[0]
    below = jnp.searchsorted(values, as_float(test_scores).astype(values.dtype), side="left")
    return (1 + n - below).astype(values.dtype) / (n + 1)


def _rank_table(n: int, alpha: float) -> np.ndarray:
    """`conformal_rank(count, alpha)` for every count in 0..n, for counts that are traced."""
    share = 1 - as_fraction(alpha)
    top, bottom = share.numerator, share.denominator
    counts = [-(-top * (m + 1) // bottom) for m in range(n + 1)]
    return np.asarray(counts, np.int32)


def group_conformal_quantile(
    scores: Float[ArrayLike, " n"], groups: Int[ArrayLike, " n"], num_groups: int, alpha: float
) -> Float[Array, " groups"]:
    """One `conformal_quantile` per group, which makes coverage hold within each (Mondrian).

    Args:
        scores: nonconformity scores.
        groups: group of each, 0..num_groups - 1, known before y is; other labels are left out.
        num_groups: static.
        alpha: miscoverage in (0, 1).

    Returns:
        A threshold a group; +inf for groups too small for any, empty ones included.

    Raises:
        ValueError: as `conformal_quantile`; groups of another shape or not integers.

    Source: Vovk et al., Mondrian conformal predictors.
    """
    alpha = check_level("alpha", alpha)
    check_count("num_groups", num_groups, 1)
    values = check_scores("scores", scores, worst=math.inf)
    groups = jnp.asarray(groups)
    check_integer("groups", groups)
    check_shape("groups", groups, values.shape, "one group a score")
    n = values.shape[0]
    labels = jnp.arange(num_groups, dtype=groups.dtype)
    member = groups[None, :] == labels[:, None]
    inside = jnp.sort(jnp.where(member, values[None, :], jnp.inf), axis=1)
    counts = jnp.sum(member, axis=1, dtype=jnp.int32)
    ranks = jnp.asarray(_rank_table(n, alpha))[counts]
    picked = jnp.take_along_axis(inside, jnp.minimum(ranks, n)[:, None] - 1, axis=1)[:, 0]
    return jnp.where(ranks > counts, jnp.asarray(jnp.inf, values.dtype), picked)


def weighted_conformal_quantile(
    scores: Float[ArrayLike, " n"],
    w: Float[ArrayLike, " n"],
    w_test: Float[ArrayLike, "*batch"],
    alpha: float,
) -> Float[Array, "*batch"]:
    """Threshold of nonconformity scores under weights: covariate shift, or locality.

    Args:
        scores: nonconformity scores of the calibration points.
        w: weight of each, >= 0: the likelihood ratio test / calibration at x_i, or a kernel's.
        w_test: weight of the test point, which stands at +inf; any shape, for several test points.
        alpha: miscoverage in (0, 1).

    Returns:
        The smallest score below or at which lies a share 1 - alpha of all weight, the test
        point's counted in the whole; +inf where there is none. Equal weights give
        `conformal_quantile`. A weight of 0 is as good as leaving the point out.

    Raises:
        ValueError: as `conformal_quantile`; shapes that differ; weights that are negative, not
            finite, or all 0 (values are looked at outside `jit` only; inside, a weight that is
            not a number >= 0 makes the threshold +inf).

    Source: Tibshirani et al., arXiv 1904.06019, eq. 7.
    """
    alpha = check_level("alpha", alpha)
    values = check_scores("scores", scores, worst=math.inf)
    values, weights, own = as_float(values, w, w_test)
    check_shape("w", weights, values.shape, "one weight a score")
    for name, array in (("w", weights), ("w_test", own)):
        if is_concrete(array):
            host = np.asarray(array)
            if not (np.isfinite(host) & (host >= 0)).all():
                raise ValueError(f"{name} holds {host.min()}, expected finite weights >= 0")
    if is_concrete(weights) and is_concrete(own):
        if float(jnp.sum(weights)) + float(jnp.min(own, initial=0.0)) <= 0:
            raise ValueError(
                "w and w_test sum to 0, expected some weight; is the kernel too narrow?"
            )
    order = jnp.argsort(values)
    reached = jnp.cumsum(weights[order])
    total = reached[-1] + own
    usable = jnp.all(weights >= 0) & (own >= 0) & (total > 0) & jnp.isfinite(total)
    # Rounding of sums must not move the rank: equal weights reach their share to a few ulps.
    share = total * (1 - alpha) * (1 - 8 * jnp.finfo(values.dtype).eps)
    index = jnp.searchsorted(reached, share.reshape(-1), side="left").reshape(share.shape)
    picked = jnp.append(values[order], jnp.inf)[index]
    return jnp.where(usable, picked, jnp.asarray(jnp.inf, values.dtype))


def localised_conformal_quantile(
    scores: Float[ArrayLike, " n"],
    x: Float[ArrayLike, "n features"],
    x_test: Float[ArrayLike, "batch features"],
    bandwidth: float,
    alpha: float,
    *,
    key: Key[Array, ""] | None = None,
    chunk_size: int = 1024,
) -> Float[Array, " batch"]:
    """A threshold for each test point from the calibration points near to it.

    Weights are a Gaussian kernel's, exp(-|x - centre|^2 / (2 bandwidth^2)).

    Args:
        scores: nonconformity scores.
        x: features of the calibration points.
        x_test: features of the test points.
        bandwidth: of the kernel, > 0, in the units of x.
        alpha: miscoverage in (0, 1).
        key: draws each centre from the kernel around its test point, which makes marginal coverage
            exact; None centres at the test point itself, which follows local noise as closely
            and guarantees nothing.
        chunk_size: test points at once; memory is chunk_size * n numbers.

    Returns:
        A threshold a test point; +inf where the neighbourhood holds too few points.

    Raises:
        ValueError: as `weighted_conformal_quantile`; bandwidth not > 0; widths that differ.

    Source: Hore and Barber, arXiv 2310.07850, section 3.
    """
    alpha = check_level("alpha", alpha)
    check_positive("bandwidth", bandwidth)
    check_count("chunk_size", chunk_size, 1)
    values = check_scores("scores", scores, worst=math.inf)
    values, x, x_test = as_float(values, x, x_test)
    check_ndim("x_test", x_test, (2,), "[batch, features]")
    check_shape("x", x, (values.shape[0], x_test.shape[1]), "[scores, features]")
    centres = x_test
    if key is not None:
        centres = x_test + bandwidth * jax.random.normal(key, x_test.shape, x_test.dtype)

    def one(pair: tuple[Array, Array]) -> Array:
        point, centre = pair
        distances = jnp.sum(jnp.square(jnp.vstack([x, point[None]]) - centre[None]), axis=1)
        # A kernel's scale cancels; the largest weight is set to 1 so that none underflows alone.
        weights = jnp.exp((jnp.min(distances) - distances) / (2 * bandwidth**2))
        return weighted_conformal_quantile(values, weights[:-1], weights[-1], alpha)

    return jax.lax.map(one, (x_test, centres), batch_size=chunk_size)
