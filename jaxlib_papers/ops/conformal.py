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
import warnings
from fractions import Fraction
from numbers import Real

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int, Key

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


def _check_level(name: str, alpha: float) -> float:
    """The miscoverage as a Python float; it decides a rank, so it has to be known while tracing."""
    if isinstance(alpha, jax.core.Tracer):
        raise ValueError(
            f"{name} is traced, but it decides which score is taken; make it a static argument"
        )
    if isinstance(alpha, (jax.Array, np.ndarray, np.generic)) and np.ndim(alpha) == 0:
        # float32 0.1 is 0.10000000149; the shortest decimal of its own dtype is what was meant.
        alpha = float(str(np.asarray(alpha)[()]))
    if not isinstance(alpha, Real) or not 0 < float(alpha) < 1:
        raise ValueError(f"{name} is {alpha!r}, expected a miscoverage in (0, 1), e.g. 0.1")
    return float(alpha)


def _fraction(alpha: float) -> Fraction:
    """The decimal or simple fraction that was meant by a float such as 0.1, 1 - 0.9 or 1 / 3."""
    near = Fraction(alpha).limit_denominator(1_000_000)
    exact = Fraction(alpha)
    return near if abs(near - exact) <= Fraction(1, 10**15) else exact


def conformal_rank(n: int, alpha: float) -> int:
    """Rank, from 1, of the nonconformity score that is the conformal quantile.

    Args:
        n: number of calibration scores.
        alpha: miscoverage in (0, 1).

    Returns:
        ceil((1 - alpha)(n + 1)), exactly; n + 1 (no score is large enough) where n is too small.

    Raises:
        ValueError: n < 0, alpha outside (0, 1).

    Source: Vovk et al.; arXiv 2505.23196, threshold (rank reconstructed).
    """
    check_count("n", n, 0)
    alpha = _check_level("alpha", alpha)
    return math.ceil((1 - _fraction(alpha)) * (n + 1))


def _check_scores(name: str, scores: ArrayLike, *, worst: float) -> Array:
    """Scores as floats; NaN and the infinity that would count as best are refused.

    The other infinity is a legitimate score (a density that is 0 there), and is warned of. Inside
    `jit` the values are not at hand: NaN counts as `worst` there, which can only enlarge a set.
    """
    values = as_float(scores)
    check_ndim(name, values, (1,), "[n], one score per calibration point")
    if values.shape[0] == 0:
        raise ValueError(f"{name} is empty, expected at least one calibration score")
    if is_concrete(values):
        host = np.asarray(values)
        for wrong, what in ((np.isnan(host), "NaN"), (host == -worst, f"{-worst}")):
            if wrong.any():
                raise ValueError(
                    f"{name}[{int(np.argmax(wrong))}] is {what}, expected a number; "
                    "look at the model that gave it, or leave the point out of the calibration"
                )
        if (host == worst).any():
            warnings.warn(
                f"{name} holds {int((host == worst).sum())} values {worst}: those points count as "
                "outside of every finite set",
                UserWarning,
                stacklevel=3,
            )
    return jnp.where(jnp.isnan(values), jnp.asarray(worst, values.dtype), values)


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
    alpha = _check_level("alpha", alpha)
    values = _check_scores("scores", scores, worst=math.inf)
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
    eps = _check_level("eps", eps)
    values = _check_scores("scores", scores, worst=-math.inf)
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
    values = jnp.sort(_check_scores("scores", scores, worst=math.inf))
    n = values.shape[0]
    below = jnp.searchsorted(values, as_float(test_scores).astype(values.dtype), side="left")
    return (1 + n - below).astype(values.dtype) / (n + 1)


def _rank_table(n: int, alpha: float) -> np.ndarray:
    """`conformal_rank(count, alpha)` for every count in 0..n, for counts that are traced."""
    share = 1 - _fraction(alpha)
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
    alpha = _check_level("alpha", alpha)
    check_count("num_groups", num_groups, 1)
    values = _check_scores("scores", scores, worst=math.inf)
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
    alpha = _check_level("alpha", alpha)
    values = _check_scores("scores", scores, worst=math.inf)
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
    alpha = _check_level("alpha", alpha)
    check_positive("bandwidth", bandwidth)
    check_count("chunk_size", chunk_size, 1)
    values = _check_scores("scores", scores, worst=math.inf)
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


def split_sizes(n: int, fractions: tuple[float, ...]) -> tuple[int, ...]:
    """Sizes of parts of n points by their shares; the last part takes what rounding leaves.

    Args:
        n: points to split.
        fractions: shares > 0 that sum to 1, e.g. (0.5, 0.25, 0.25).

    Returns:
        One size a share, each at least 1, with sum n.

    Raises:
        ValueError: shares that are not > 0 or do not sum to 1, fewer points than parts.

    Example:
        >>> split_sizes(10, (0.5, 0.25, 0.25))
        (5, 2, 3)

    Source: split conformal prediction, Vovk et al.
    """
    check_count("n", n, len(fractions))
    if not fractions or min(fractions) <= 0 or abs(math.fsum(fractions) - 1) > 1e-6:
        raise ValueError(f"fractions is {fractions}, expected shares > 0 that sum to 1")
    sizes = [max(1, math.floor(n * f + 1e-9)) for f in fractions[:-1]]
    rest = n - sum(sizes)
    if rest < 1:
        raise ValueError(f"fractions {fractions} leave no point of {n} for the last part")
    return (*sizes, rest)


def fold_ids(key: Key[Array, ""], n: int, num_folds: int) -> Int[Array, " n"]:
    """A random fold 0..num_folds - 1 for each point; sizes differ by at most one.

    Args:
        key: PRNG key.
        n: points.
        num_folds: 2..n.

    Returns:
        int32 [n].

    Raises:
        ValueError: counts out of range.

    Source: Barber et al., arXiv 1905.02928, section 3 (folds of CV+).
    """
    check_count("n", n, 2)
    check_count("num_folds", num_folds, 2, n)
    return jax.random.permutation(key, jnp.arange(n, dtype=jnp.int32) % num_folds)


def _check_folds(scores: ArrayLike, folds: ArrayLike) -> tuple[Array, Array]:
    values = _check_scores("scores", scores, worst=math.inf)
    folds = jnp.asarray(folds)
    check_integer("folds", folds)
    check_shape("folds", folds, values.shape, "the fold of each score")
    return values, folds


def cross_conformal_contains(
    scores: Float[ArrayLike, " n"],
    folds: Int[ArrayLike, " n"],
    test_scores: Float[ArrayLike, "folds *batch"],
    alpha: float,
) -> Bool[Array, "*batch"]:
    """Whether test points lie in the cross-conformal set: every point trains and calibrates.

    Each calibration point was scored by the model that was fitted without its fold; a candidate is
    compared with it under that same model. Works for scores of any kind, densities included.

    Args:
        scores: out-of-fold nonconformity scores.
        folds: fold of each.
        test_scores: nonconformity of each candidate under each fold's model, shape [folds, ...].
        alpha: miscoverage in (0, 1); the set covers with probability about 1 - alpha in practice,
            and at least 1 - 2 alpha - (1 - K/n)/(K + 1) in theory.

    Returns:
        bool of the trailing shape of `test_scores`: whether fewer than (1 - alpha)(n + 1) scores
        lie strictly below the candidate's.

    Raises:
        ValueError: as `conformal_quantile`; shapes that differ.

    Source: Barber et al., arXiv 1905.02928, section 3 (CV+ and cross-conformal sets).
    """
    alpha = _check_level("alpha", alpha)
    values, folds = _check_folds(scores, folds)
    test = as_float(test_scores).astype(values.dtype)
    if test.ndim < 1:
        raise ValueError("test_scores has shape (), expected [folds, ...]")

    def of_fold(fold: Array, candidates: Array) -> Array:
        own = jnp.sort(jnp.where(folds == fold, values, jnp.inf))
        return jnp.searchsorted(own, candidates.reshape(-1), side="left").reshape(candidates.shape)

    labels = jnp.arange(test.shape[0], dtype=folds.dtype)
    below = jnp.sum(jax.vmap(of_fold)(labels, test), axis=0)
    return below < conformal_rank(values.shape[0], alpha)


def cv_plus_interval(
    residuals: Float[ArrayLike, " n"],
    folds: Int[ArrayLike, " n"],
    predictions: Float[ArrayLike, "folds batch"],
    alpha: float,
) -> tuple[Float[Array, " batch"], Float[Array, " batch"]]:
    """The CV+ interval of one target from out-of-fold absolute residuals.

    Args:
        residuals: |y_i - prediction of the model fitted without fold(i)|.
        folds: fold of each.
        predictions: each fold model's prediction of the test points.
        alpha: miscoverage in (0, 1); coverage is at least 1 - 2 alpha up to a term of order
            sqrt(2/n), about 1 - alpha in practice.

    Returns:
        (lower, upper): order statistics of prediction -+ residual at the exact conformal ranks;
        -inf and +inf where n is too small.

    Raises:
        ValueError: as `conformal_quantile`; shapes that differ; negative residuals.

    Source: Barber et al., arXiv 1905.02928, eq. 11.
    """
    alpha = _check_level("alpha", alpha)
    values, folds = _check_folds(residuals, folds)
    if is_concrete(values) and float(jnp.min(values)) < 0:
        raise ValueError(f"residuals holds {float(jnp.min(values))}, expected absolute values")
    means = as_float(predictions).astype(values.dtype)
    check_ndim("predictions", means, (2,), "[folds, batch]")
    own = jnp.take(means, folds, axis=0, mode="clip")
    n = values.shape[0]
    rank = conformal_rank(n, alpha)
    if rank > n:
        infinite = jnp.full(means.shape[1:], jnp.inf, values.dtype)
        return -infinite, infinite
    upper = jnp.sort(own + values[:, None], axis=0)[rank - 1]
    lower = jnp.sort(own - values[:, None], axis=0)[n - rank]
    return lower, upper
