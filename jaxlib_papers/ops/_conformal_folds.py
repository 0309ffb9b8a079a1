"""Conformal sets in which every point trains and calibrates: folds, cross-conformal, CV+.

Source: Barber et al., arXiv 1905.02928.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int, Key

from jaxlib_papers.ops._conformal_rank import check_level, check_scores, conformal_rank
from jaxlib_papers.ops.checks import (
    as_float,
    check_count,
    check_integer,
    check_ndim,
    check_shape,
    is_concrete,
)

__all__ = ["cross_conformal_contains", "cv_plus_interval", "fold_ids", "split_sizes"]


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
    values = check_scores("scores", scores, worst=math.inf)
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
    alpha = check_level("alpha", alpha)
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
    alpha = check_level("alpha", alpha)
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
