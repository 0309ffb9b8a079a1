"""The exact rank of a conformal quantile, and the checks of levels and scores."""

from __future__ import annotations

import math
import warnings
from fractions import Fraction
from numbers import Real

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array

from jaxlib_papers.ops.checks import as_float, check_count, check_ndim, is_concrete

__all__ = ["as_fraction", "check_level", "check_scores", "conformal_rank"]


def check_level(name: str, alpha: float) -> float:
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


def as_fraction(alpha: float) -> Fraction:
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
    alpha = check_level("alpha", alpha)
    return math.ceil((1 - as_fraction(alpha)) * (n + 1))


def check_scores(name: str, scores: ArrayLike, *, worst: float) -> Array:
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
