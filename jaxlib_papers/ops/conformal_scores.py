"""Nonconformity scores of joint prediction sets, as functions of samples, residuals and latents.

All but `hpd_score` are nonconformity scores: higher is stranger, for `conformal_quantile`.
`hpd_score` is a conforming score, for `conformal_threshold`. Arithmetic is in float32 (float64 for
float64 input).

Sources: PCP, Wang et al., arXiv 2206.06584; C-PCP, CP2-PCP, HPD and latent (CONTRA) scores as in
the comparison of Dheur et al., arXiv 2501.10533; quantile bands, Romano et al., arXiv 1905.03222;
normalised maxima over time as in JANET, arXiv 2407.06390; all of them are JAPAN's comparisons,
arXiv 2505.23196.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jaxlib_papers.ops.checks import as_float, check_ndim, check_shape, is_concrete
from jaxlib_papers.ops.conformal import conformal_rank

__all__ = [
    "c_pcp_score",
    "cp2_pcp_score",
    "cqr_score",
    "hd_pcp_samples",
    "hpd_score",
    "latent_radius_score",
    "linf_score",
    "mahalanobis_score",
    "max_normalised_residual_score",
    "nearest_sample_distance",
    "pcp_score",
]


def hpd_score(
    log_prob_y: Float[ArrayLike, " batch"], log_prob_samples: Float[ArrayLike, "samples batch"]
) -> Float[Array, " batch"]:
    """Share of model samples that are no more likely than y: 1 minus its highest-density level.

    Args:
        log_prob_y: log p(y | x).
        log_prob_samples: log p(y' | x) of samples y' ~ p(. | x) at the same x.

    Returns:
        mean over samples of [log p(y' | x) <= log p(y | x)], in {0, 1/M, ..., 1}; conforming
        (higher is more typical). Its ties, at most M + 1 values, only raise coverage. NaN as the
        log-density of y gives 0.

    Raises:
        ValueError: no samples, or shapes that do not fit.

    Source: arXiv 2505.23196, adaptive threshold (reconstructed form); arXiv 2501.10533, HPD.
    """
    own, samples = as_float(log_prob_y, log_prob_samples)
    if samples.ndim < 1 or samples.shape[0] == 0:
        raise ValueError(
            f"log_prob_samples has shape {samples.shape}, expected [M, *batch] with M >= 1 samples"
        )
    check_shape("log_prob_samples", samples, (samples.shape[0], *own.shape), "[M, *batch]")
    return jnp.mean((samples <= own[None]).astype(own.dtype), axis=0)


def latent_radius_score(z: Float[ArrayLike, "*batch dim"]) -> Float[Array, "*batch"]:
    """Euclidean norm of the latent code: the score of CONTRA, which ignores the Jacobian.

    Args:
        z: h(y, x) under the flow.

    Returns:
        |z|_2, nonconformity; 0 with gradient 0 at the origin.

    Raises:
        ValueError: z has no axis.

    Source: CONTRA, as the latent score of arXiv 2505.23196.
    """
    z = as_float(z)
    if z.ndim < 1:
        raise ValueError("z has shape (), expected [*batch, dim]")
    return _norm(z)


def linf_score(residual: Float[ArrayLike, "*batch dim"]) -> Float[Array, "*batch"]:
    """Largest absolute residual over the last axis: a cube around the prediction.

    Source: arXiv 2505.23196, comparison with boxes (reconstructed).
    """
    return jnp.max(jnp.abs(as_float(residual)), axis=-1)


def _norm(v: Array) -> Array:
    square = jnp.sum(jnp.square(v), axis=-1)
    safe = jnp.where(square > 0, square, 1)
    return jnp.where(square > 0, jnp.sqrt(safe), 0)


def nearest_sample_distance(
    points: Float[Array, "*many batch dim"], samples: Float[Array, "samples batch dim"]
) -> Float[Array, "*many batch"]:
    """Distance of each point to the nearest sample of its own row, one sample at a time.

    Memory is that of `points`, not points times samples: a scan keeps the running minimum.

    Args:
        points: any leading axes.
        samples: at least one.

    Source: Wang et al., arXiv 2206.06584.
    """
    square = jnp.full(points.shape[:-1], jnp.inf, points.dtype)
    expand = (1,) * (points.ndim - samples.ndim + 1)
    if samples.shape[0] <= 64:
        for sample in samples:
            away = points - sample.reshape(expand + sample.shape)
            square = jnp.minimum(square, jnp.sum(jnp.square(away), axis=-1))
    else:
        for start in range(0, samples.shape[0], 64):
            part = nearest_sample_distance(points, samples[start : start + 64])
            square = jnp.minimum(square, jnp.square(part))
    return jnp.sqrt(square)


def _check_samples(y: ArrayLike, **named: ArrayLike) -> tuple[Array, ...]:
    arrays = as_float(y, *named.values())
    own = arrays[0]
    check_ndim("y", own, (2,), "[batch, dim]")
    for name, array in zip(named, arrays[1:], strict=True):
        check_ndim(name, array, (3,), "[samples, batch, dim]")
        if array.shape[0] == 0:
            raise ValueError(f"{name} has shape {array.shape}, expected at least one sample")
        check_shape(name, array, (array.shape[0], *own.shape), "[samples, batch, dim]")
    return arrays


def pcp_score(
    y: Float[ArrayLike, "batch dim"], samples: Float[ArrayLike, "samples batch dim"]
) -> Float[Array, " batch"]:
    """Distance of y to the nearest of K samples of the model: the set is a union of balls.

    Args:
        y: targets.
        samples: ~ p(. | x) for each row's own x.

    Returns:
        Nonconformity, in the units of y.

    Raises:
        ValueError: no samples, or shapes that do not fit.

    Source: Wang et al., arXiv 2206.06584.
    """
    own, samples = _check_samples(y, samples=samples)
    return nearest_sample_distance(own, samples)


def cp2_pcp_score(
    y: Float[ArrayLike, "batch dim"],
    samples: Float[ArrayLike, "samples batch dim"],
    mc_samples: Float[ArrayLike, "fresh batch dim"],
    alpha: float,
) -> Float[Array, " batch"]:
    """PCP's distance over the model's own (1 - alpha)-quantile of it at the same x.

    Args:
        y: targets.
        samples: the K centres of PCP's balls.
        mc_samples: fresh samples, independent of the centres.
        alpha: miscoverage in (0, 1).

    Returns:
        Nonconformity, without unit, about 1 at the threshold of a perfect model. The quantile
        interpolates linearly. Where it is 0 (all fresh samples are centres), 0 / 0 counts as 1
        and the rest as +inf.

    Raises:
        ValueError: alpha outside (0, 1), no samples, or shapes that do not fit.

    Source: CP2-PCP as in arXiv 2501.10533.
    """
    conformal_rank(1, alpha)  # checks alpha as everywhere
    own, samples, fresh = _check_samples(y, samples=samples, mc_samples=mc_samples)
    distance = nearest_sample_distance(own, samples)
    scale = jnp.quantile(nearest_sample_distance(fresh, samples), 1 - float(alpha), axis=0)
    ratio = distance / jnp.where(scale > 0, scale, 1)
    without = jnp.where(distance > 0, jnp.inf, 1.0).astype(ratio.dtype)
    return jnp.where(scale > 0, ratio, without)


def c_pcp_score(
    y: Float[ArrayLike, "batch dim"],
    samples: Float[ArrayLike, "samples batch dim"],
    mc_samples: Float[ArrayLike, "fresh batch dim"],
) -> Float[Array, " batch"]:
    """PCP's distance as a level: share of fresh samples that lie at least as near to a centre.

    Args:
        y: targets.
        samples: the K centres of PCP's balls.
        mc_samples: fresh samples, independent of the centres.

    Returns:
        Nonconformity in [0, 1].

    Raises:
        ValueError: no samples, or shapes that do not fit.

    Source: C-PCP as in arXiv 2501.10533.
    """
    own, samples, fresh = _check_samples(y, samples=samples, mc_samples=mc_samples)
    distance = nearest_sample_distance(own, samples)
    nearer = nearest_sample_distance(fresh, samples) <= distance[None]
    return jnp.mean(nearer.astype(distance.dtype), axis=0)


def hd_pcp_samples(
    samples: Float[ArrayLike, "samples batch dim"],
    log_prob: Float[ArrayLike, "samples batch"],
    alpha: float,
) -> Float[Array, "kept batch dim"]:
    """The most likely (1 - alpha) K of K samples of each row: the centres of HD-PCP.

    Args:
        samples: ~ p(. | x).
        log_prob: their log-densities.
        alpha: share left out, in (0, 1).

    Returns:
        ceil((1 - alpha) K) samples a row, most likely first; `pcp_score` takes them.

    Raises:
        ValueError: alpha outside (0, 1), no samples, or shapes that do not fit.

    Source: HD-PCP, Wang et al., arXiv 2206.06584.
    """
    samples, log_prob = as_float(samples, log_prob)
    check_ndim("samples", samples, (3,), "[samples, batch, dim]")
    check_shape("log_prob", log_prob, samples.shape[:2], "[samples, batch]")
    if samples.shape[0] == 0:
        raise ValueError(f"samples has shape {samples.shape}, expected at least one sample")
    kept = conformal_rank(samples.shape[0] - 1, alpha)
    order = jnp.argsort(-log_prob, axis=0)[:kept]
    return jnp.take_along_axis(samples, order[:, :, None], axis=0)


def mahalanobis_score(
    residual: Float[ArrayLike, "*batch dim"], covariance: Float[ArrayLike, "*#batch dim dim"]
) -> Float[Array, "*batch"]:
    """Squared Mahalanobis length r' S^-1 r, by a Cholesky factor: an ellipsoid.

    Args:
        residual: y minus its prediction.
        covariance: S, positive definite; one for all, or one a row.

    Returns:
        Nonconformity (squared).

    Raises:
        ValueError: shapes that do not fit, or a covariance that is not positive definite (seen
            outside `jit`).

    Source: arXiv 2505.23196, comparison RCP (reconstructed); Messoudi et al. (2022) for NLE.
    """
    residual, covariance = as_float(residual, covariance)
    dim = residual.shape[-1] if residual.ndim else 0
    if dim == 0 or covariance.shape[-2:] != (dim, dim):
        raise ValueError(
            f"covariance has shape {covariance.shape}, expected [..., d, d] for residual "
            f"{residual.shape} = [..., d]"
        )
    factor = jnp.linalg.cholesky(covariance)
    if is_concrete(factor) and not bool(jnp.all(jnp.isfinite(factor))):
        raise ValueError(
            "covariance is not positive definite (a constant or duplicated column?); "
            "add a small multiple of the identity, or drop the column"
        )
    factor = jnp.broadcast_to(factor, (*residual.shape[:-1], dim, dim))
    white = solve_triangular(factor, residual[..., None], lower=True)[..., 0]
    return jnp.sum(jnp.square(white), axis=-1)


def cqr_score(
    y: Float[ArrayLike, "*batch dim"],
    lower: Float[ArrayLike, "*batch dim"],
    upper: Float[ArrayLike, "*batch dim"],
) -> Float[Array, "*batch"]:
    """Largest distance of y outside of a band of quantiles, negative inside.

    Args:
        y: targets.
        lower: predicted quantile, e.g. at alpha / 2.
        upper: predicted quantile, e.g. at 1 - alpha / 2. Crossed quantiles are taken as they are.

    Returns:
        max over dimensions of max(lower - y, y - upper), nonconformity.

    Raises:
        ValueError: shapes that differ, or no axis.

    Source: Romano et al., arXiv 1905.03222, eq. 6; joint maximum as in arXiv 2505.23196.
    """
    y, lower, upper = as_float(y, lower, upper)
    if y.ndim < 1:
        raise ValueError("y has shape (), expected [*batch, dim]")
    check_shape("lower", lower, y.shape, "the shape of y")
    check_shape("upper", upper, y.shape, "the shape of y")
    return jnp.max(jnp.maximum(lower - y, y - upper), axis=-1)


def max_normalised_residual_score(
    residual: Float[ArrayLike, "*batch dim"], sigma: Float[ArrayLike, "*#batch dim"]
) -> Float[Array, "*batch"]:
    """Largest |residual| in units of its own scale: a box whose sides follow sigma.

    Args:
        residual: y minus its prediction, over steps (or dimensions).
        sigma: scale of each, > 0; one for all rows, or one a row.

    Returns:
        max over the last axis of |r| / sigma, nonconformity.

    Raises:
        ValueError: shapes that do not fit, sigma not > 0 (seen outside `jit`).

    Source: JANET, arXiv 2407.06390, as compared in arXiv 2505.23196.
    """
    residual, sigma = as_float(residual, sigma)
    if residual.ndim < 1 or sigma.shape[-1:] != residual.shape[-1:]:
        raise ValueError(
            f"sigma has shape {sigma.shape}, expected [..., d] for residual {residual.shape}"
        )
    if is_concrete(sigma) and not bool(jnp.all(sigma > 0)):
        raise ValueError("sigma holds values that are not > 0, expected positive scales")
    sigma = jnp.broadcast_to(sigma, residual.shape)
    return jnp.max(jnp.abs(residual) / sigma, axis=-1)
