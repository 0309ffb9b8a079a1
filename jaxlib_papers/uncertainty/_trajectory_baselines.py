"""What JAPAN is compared with on trajectories: radii or scales of every step of a forecast.

Source: comparisons of arXiv 2505.23196 (details reconstructed), each function naming its own paper.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jaxlib_papers.ops.checks import as_float, check_ndim
from jaxlib_papers.ops.conformal import conformal_quantile
from jaxlib_papers.ops.conformal_scores import latent_radius_score, max_normalised_residual_score
from jaxlib_papers.ops.regions import log_ball_volume
from jaxlib_papers.uncertainty._region import Regions, as_rows

__all__ = ["cfrnn_regions", "copula_cpts_regions", "janet_regions"]


def _step_norms(r: ArrayLike) -> Array:
    r = as_float(r)
    check_ndim("residuals", r, (3,), "[n, steps, channels]")
    return latent_radius_score(r)


def cfrnn_regions(
    r_cal: Float[ArrayLike, "n steps channels"],
    r_test: Float[ArrayLike, "batch steps channels"],
    eps: float,
) -> Regions:
    """A ball for each step of a trajectory, each at eps / H, so that all hold together.

    Args:
        r_cal: residuals of forecasts on the calibration split.
        r_test: residuals on the test split.
        eps: miscoverage of the whole trajectory, in (0, 1).

    Raises:
        ValueError: shapes that do not fit, as `conformal_quantile`.

    Source: CF-RNN, Stankeviciute et al. (NeurIPS 2021), as compared in arXiv 2505.23196.
    """
    cal, test = _step_norms(r_cal), _step_norms(r_test)
    steps = cal.shape[1]
    q = jnp.stack([conformal_quantile(cal[:, t], eps / steps) for t in range(steps)])
    volume = jnp.sum(log_ball_volume(jnp.shape(r_cal)[-1], jnp.log(q)))
    covered = jnp.all(test <= q[None], axis=1)
    return Regions(q, covered, jnp.broadcast_to(volume, covered.shape))


def copula_cpts_regions(
    r_cal: Float[ArrayLike, "n steps channels"],
    r_test: Float[ArrayLike, "batch steps channels"],
    eps: float,
) -> Regions:
    """A ball for each step, at a level that is found jointly.

    The first half of the calibration split gives the distribution of each step's residual norm,
    the second the joint level: the largest, over steps, of each trajectory's ranks, at its exact
    conformal rank.

    Args:
        r_cal: residuals of forecasts on the calibration split, in random order.
        r_test: residuals on the test split.
        eps: miscoverage of the whole trajectory, in (0, 1).

    Raises:
        ValueError: fewer than two calibration rows, shapes that do not fit.

    Source: CopulaCPTS, Sun and Yu, arXiv 2212.03281, with the empirical copula's diagonal
    (reconstructed).
    """
    cal, test = _step_norms(r_cal), _step_norms(r_test)
    half = cal.shape[0] // 2
    if half < 1:
        raise ValueError(f"r_cal has {cal.shape[0]} rows, expected at least 2")
    grid = jnp.sort(cal[:half], axis=0)
    # Smallest index of the grid that reaches each norm; half: beyond all of them.
    rank = jax.vmap(lambda g, v: jnp.searchsorted(g, v, side="left"), in_axes=1, out_axes=1)(
        grid, cal[half:]
    )
    level = conformal_quantile(jnp.max(rank, axis=1).astype(cal.dtype), eps)
    padded = jnp.concatenate([grid, jnp.full((1, grid.shape[1]), jnp.inf, grid.dtype)])
    index = jnp.minimum(level, half).astype(jnp.int32)
    q = padded[index]
    volume = jnp.sum(log_ball_volume(jnp.shape(r_cal)[-1], jnp.log(q)))
    covered = jnp.all(test <= q[None], axis=1)
    return Regions(q, covered, jnp.broadcast_to(volume, covered.shape))


def janet_regions(
    r_cal: Float[ArrayLike, "n steps"],
    r_test: Float[ArrayLike, "batch steps"],
    eps: float,
    sigma: tuple[ArrayLike, ArrayLike] | None = None,
) -> Regions:
    """Boxes over time whose sides are one multiple of each step's own scale.

    Args:
        r_cal: residuals of the calibration split, one number a step (flatten several channels).
        r_test: residuals of the test split.
        eps: miscoverage of the whole trajectory, in (0, 1).
        sigma: scales > 0 of the second half of the calibration rows and of the test rows, [.., d]
            each, from a model of one's own; None takes root mean squares over the first half.

    Raises:
        ValueError: fewer than two calibration rows, shapes that do not fit.

    Source: JANET, arXiv 2407.06390, as compared in arXiv 2505.23196 (reconstructed).
    """
    r_cal, r_test = as_rows(r_cal, r_test)
    half = r_cal.shape[0] // 2
    if half < 1:
        raise ValueError(f"r_cal has {r_cal.shape[0]} rows, expected at least 2")
    if sigma is None:
        scale = jnp.sqrt(jnp.mean(jnp.square(r_cal[:half]), axis=0))
        scale = jnp.maximum(scale, jnp.finfo(scale.dtype).tiny)
        scale_cal = scale_test = scale
    else:
        scale_cal, scale_test = map(as_float, sigma)
    q = conformal_quantile(max_normalised_residual_score(r_cal[half:], scale_cal), eps)
    covered = max_normalised_residual_score(r_test, scale_test) <= q
    volume = jnp.sum(jnp.log(2 * q * jnp.broadcast_to(scale_test, r_test.shape)), axis=1)
    return Regions(q, covered, volume)
