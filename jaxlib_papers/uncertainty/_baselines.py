"""What JAPAN is compared with: joint regions from residuals, quantiles, samples and latent codes.

Each is a function of arrays that were computed on the calibration and on the test split, and
returns thresholds, coverage and log-volumes; the same split and the same exact rank serve all. They
are pure and run under `jit` and `vmap` (over repetitions, say), `nle` included.

Source: comparisons of arXiv 2505.23196 (details reconstructed), each function naming its own paper.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Key

from jaxlib_papers.ops.checks import as_float, check_choice, check_shape
from jaxlib_papers.ops.conformal import conformal_quantile
from jaxlib_papers.ops.conformal_scores import (
    c_pcp_score,
    cp2_pcp_score,
    cqr_score,
    hd_pcp_samples,
    latent_radius_score,
    linf_score,
    mahalanobis_score,
    nearest_sample_distance,
    pcp_score,
)
from jaxlib_papers.ops.regions import (
    log_ball_volume,
    log_volume_importance,
    log_volume_of_balls,
)
from jaxlib_papers.uncertainty._region import Regions, as_rows

__all__ = [
    "contra_regions",
    "cqr_regions",
    "hdr_regions",
    "local_covariance",
    "nle_regions",
    "pcp_regions",
    "rcp_regions",
    "residual_regions",
]


def residual_regions(
    r_cal: Float[ArrayLike, "n dim"],
    r_test: Float[ArrayLike, "batch dim"],
    eps: float,
    norm: str = "l2",
) -> Regions:
    """Balls ("l2") or cubes ("linf") of one size around a prediction.

    Args:
        r_cal: residuals y - prediction of the calibration split.
        r_test: residuals of the test split.
        eps: miscoverage in (0, 1).
        norm: "l2" or "linf".

    Raises:
        ValueError: another norm, shapes that do not fit, as `conformal_quantile`.

    Source: arXiv 2505.23196, comparison with residual scores (reconstructed).
    """
    check_choice("norm", norm, ("l2", "linf"))
    r_cal, r_test = as_rows(r_cal, r_test)
    score = latent_radius_score if norm == "l2" else linf_score
    q = conformal_quantile(score(r_cal), eps)
    dim = r_test.shape[1]
    log_q = jnp.log(q)
    volume = log_ball_volume(dim, log_q) if norm == "l2" else dim * (math.log(2) + log_q)
    return Regions(q, score(r_test) <= q, jnp.broadcast_to(volume, r_test.shape[:1]))


def _log_ellipsoid(q: Array, covariance: Array) -> Array:
    """Log-volume of {r' S^-1 r <= q}."""
    _, logdet = jnp.linalg.slogdet(covariance)
    return log_ball_volume(covariance.shape[-1], 0.5 * jnp.log(q)) + 0.5 * logdet


def _covariance(r: Array) -> Array:
    centred = r - jnp.mean(r, axis=0, keepdims=True)
    cov = centred.T @ centred / max(r.shape[0] - 1, 1)
    # A ridge far below the data's own scale keeps duplicated columns invertible.
    ridge = 1e-6 * jnp.trace(cov) / cov.shape[0]
    return cov + ridge * jnp.eye(cov.shape[0], dtype=cov.dtype)


def rcp_regions(
    r_train: Float[ArrayLike, "rows dim"],
    r_cal: Float[ArrayLike, "n dim"],
    r_test: Float[ArrayLike, "batch dim"],
    eps: float,
) -> Regions:
    """Ellipsoids r' S^-1 r <= q with the covariance S of training residuals.

    Args:
        r_train: residuals of the training split.
        r_cal: residuals of the calibration split.
        r_test: residuals of the test split.
        eps: miscoverage in (0, 1).

    Raises:
        ValueError: shapes that do not fit, residuals without spread, as `conformal_quantile`.

    Source: arXiv 2505.23196, comparison RCP: volume V_d q^(d/2) sqrt(det S).
    """
    r_train, r_cal, r_test = as_rows(r_train, r_cal, r_test)
    cov = _covariance(r_train)
    q = conformal_quantile(mahalanobis_score(r_cal, cov), eps)
    volume = jnp.broadcast_to(_log_ellipsoid(q, cov), r_test.shape[:1])
    return Regions(q, mahalanobis_score(r_test, cov) <= q, volume)


def local_covariance(
    x_train: Float[ArrayLike, "rows features"],
    r_train: Float[ArrayLike, "rows dim"],
    x: Float[ArrayLike, "batch features"],
    *,
    weight: float = 0.95,
    fraction: float = 0.1,
    chunk_size: int = 256,
) -> Float[Array, "batch dim dim"]:
    """Weight * S_knn(x) + (1 - weight) * S: residual covariance near x, pulled to that of all.

    Args:
        x_train: features of the training split.
        r_train: its residuals.
        x: where the covariance is wanted.
        weight: lambda, of the local part.
        fraction: share of the training rows that are neighbours (at least dim + 1 rows).
        chunk_size: points at once; memory is chunk_size * rows.

    Source: Messoudi et al., "Ellipsoidal conformal inference for multi-target regression" (2022),
    as compared in arXiv 2505.23196 (reconstructed).
    """
    x_train, r_train, x = as_rows(x_train, r_train, x)
    count = min(len(r_train), max(r_train.shape[1] + 1, round(fraction * len(r_train))))
    whole = _covariance(r_train)

    def one(point: Array) -> Array:
        away = jnp.sum(jnp.square(x_train - point[None]), axis=1)
        _, near = jax.lax.top_k(-away, count)
        return weight * _covariance(r_train[near]) + (1 - weight) * whole

    return jax.lax.map(one, x, batch_size=chunk_size)


def nle_regions(
    x_train: Float[ArrayLike, "rows features"],
    r_train: Float[ArrayLike, "rows dim"],
    x_cal: Float[ArrayLike, "n features"],
    r_cal: Float[ArrayLike, "n dim"],
    x_test: Float[ArrayLike, "batch features"],
    r_test: Float[ArrayLike, "batch dim"],
    eps: float,
    *,
    weight: float = 0.95,
    fraction: float = 0.1,
) -> Regions:
    """Ellipsoids whose shape follows the residuals of neighbours.

    Args:
        x_train: features of the training split.
        r_train: its residuals.
        x_cal: features of the calibration split.
        r_cal: its residuals.
        x_test: features of the test split.
        r_test: its residuals.
        eps: miscoverage in (0, 1).
        weight: as in `local_covariance`.
        fraction: as in `local_covariance`.

    Raises:
        ValueError: shapes that do not fit, as `conformal_quantile`.

    Source: Messoudi et al. (2022), as compared in arXiv 2505.23196 (reconstructed).
    """
    options = dict(weight=weight, fraction=fraction)
    cov_cal = local_covariance(x_train, r_train, x_cal, **options)
    cov_test = local_covariance(x_train, r_train, x_test, **options)
    q = conformal_quantile(mahalanobis_score(r_cal, cov_cal), eps)
    return Regions(q, mahalanobis_score(r_test, cov_test) <= q, _log_ellipsoid(q, cov_test))


def cqr_regions(
    y_cal: Float[ArrayLike, "n dim"],
    band_cal: tuple[ArrayLike, ArrayLike],
    y_test: Float[ArrayLike, "batch dim"],
    band_test: tuple[ArrayLike, ArrayLike],
    eps: float,
    joint: bool = True,
) -> Regions:
    """Boxes from predicted quantiles, widened by what the calibration split asks for.

    Args:
        y_cal: targets of the calibration split.
        band_cal: their (lower, upper) predicted quantiles.
        y_test: targets of the test split.
        band_test: their (lower, upper) predicted quantiles.
        eps: miscoverage in (0, 1).
        joint: one threshold for the largest excess over all dimensions (MCQR); False is one
            threshold a dimension at eps / d (CQR with Bonferroni).

    Raises:
        ValueError: shapes that do not fit, as `conformal_quantile`.

    Source: Romano et al., arXiv 1905.03222; several targets as in arXiv 2505.23196 (reconstructed).
    """
    y_cal, y_test = as_rows(y_cal, y_test)
    (low_cal, high_cal), (low, high) = map(as_float, band_cal), map(as_float, band_test)
    dim = y_cal.shape[1]
    if joint:
        q = conformal_quantile(cqr_score(y_cal, low_cal, high_cal), eps)
        q = jnp.broadcast_to(q, (dim,))
    else:
        excess = jnp.maximum(low_cal - y_cal, y_cal - high_cal)
        q = jnp.stack([conformal_quantile(excess[:, k], eps / dim) for k in range(dim)])
    covered = jnp.all(jnp.maximum(low - y_test, y_test - high) <= q[None], axis=1)
    sides = jnp.maximum(high - low + 2 * q[None], 0)  # a threshold below 0 may empty a side
    return Regions(q, covered, jnp.sum(jnp.log(sides), axis=1))


def contra_regions(
    z_cal: Float[ArrayLike, "n dim"],
    z_test: Float[ArrayLike, "batch dim"],
    z_samples: Float[ArrayLike, "samples batch dim"],
    log_prob_samples: Float[ArrayLike, "samples batch"],
    eps: float,
) -> Regions:
    """Images of a ball of latent codes: CONTRA.

    Args:
        z_cal: codes of the calibration split.
        z_test: codes of the test split.
        z_samples: codes of model samples at each test point, ~ N(0, I).
        log_prob_samples: log p(y | x) of what they map to.
        eps: miscoverage in (0, 1).

    Raises:
        ValueError: shapes that do not fit, as `conformal_quantile`.

    Source: CONTRA, the latent score of arXiv 2505.23196.
    """
    q = conformal_quantile(latent_radius_score(z_cal), eps)
    inside = latent_radius_score(z_samples) <= q
    volume = jnp.where(jnp.isfinite(q), log_volume_importance(log_prob_samples, inside), jnp.inf)
    return Regions(q, latent_radius_score(z_test) <= q, volume)


def pcp_regions(
    y_cal: Float[ArrayLike, "n dim"],
    samples_cal: Float[ArrayLike, "samples n dim"],
    y_test: Float[ArrayLike, "batch dim"],
    samples_test: Float[ArrayLike, "samples batch dim"],
    eps: float,
    *,
    key: Key[Array, ""],
    kind: str = "pcp",
    fresh: tuple[ArrayLike, ArrayLike] | None = None,
    log_prob: tuple[ArrayLike, ArrayLike] | None = None,
) -> Regions:
    """Unions of balls around samples of the model: PCP and its three relatives.

    Args:
        y_cal: targets of the calibration split.
        samples_cal: K samples of the model at each calibration point.
        y_test: targets of the test split.
        samples_test: K samples at each test point.
        eps: miscoverage in (0, 1).
        key: draws the points that measure volumes.
        kind: "pcp"; "hd_pcp" keeps the most likely samples; "cp2_pcp" divides the distance by its
            own (1 - eps)-quantile at x; "c_pcp" takes the level of the distance at x.
        fresh: second samples (calibration, test), for "cp2_pcp" and "c_pcp".
        log_prob: log-densities of the K samples (calibration, test), for "hd_pcp".

    Raises:
        ValueError: another kind, a missing argument, shapes that do not fit.

    Source: Wang et al., arXiv 2206.06584 (PCP, HD-PCP); arXiv 2501.10533 (CP2-PCP, C-PCP).
    """
    check_choice("kind", kind, ("pcp", "hd_pcp", "cp2_pcp", "c_pcp"))
    y_cal, y_test = as_rows(y_cal, y_test)
    cal, test = as_float(samples_cal), as_float(samples_test)
    if kind == "hd_pcp":
        if log_prob is None:
            raise ValueError("log_prob is None, expected the samples' log-densities for hd_pcp")
        cal, test = (hd_pcp_samples(s, p, eps) for s, p in zip((cal, test), log_prob, strict=True))
    if kind in ("pcp", "hd_pcp"):
        q = conformal_quantile(pcp_score(y_cal, cal), eps)
        covered = pcp_score(y_test, test) <= q
        radius = jnp.broadcast_to(q, covered.shape)
    else:
        if fresh is None:
            raise ValueError(f"fresh is None, expected second samples for {kind}")
        again_cal, again_test = map(as_float, fresh)
        away = jnp.sort(nearest_sample_distance(again_test, test), axis=0)
        if kind == "cp2_pcp":
            q = conformal_quantile(cp2_pcp_score(y_cal, cal, again_cal, eps), eps)
            covered = cp2_pcp_score(y_test, test, again_test, eps) <= q
            radius = q * jnp.quantile(away, 1 - eps, axis=0)
        else:
            q = conformal_quantile(c_pcp_score(y_cal, cal, again_cal), eps)
            covered = c_pcp_score(y_test, test, again_test) <= q
            # Inside: at most q M fresh samples at least as near, so below the next distance.
            index = jnp.floor(jnp.minimum(q, 1) * len(away) + 1e-4).astype(jnp.int32)
            edge = jnp.full((1, away.shape[1]), jnp.inf, away.dtype)
            radius = jnp.concatenate([away, edge])[index]
    return Regions(q, covered, log_volume_of_balls(key, test, radius))


def hdr_regions(
    level_cal: Float[ArrayLike, " n"],
    level_test: Float[ArrayLike, " batch"],
    log_prob_samples: Float[ArrayLike, "samples batch"],
    eps: float,
) -> Regions:
    """Highest-density regions whose level is calibrated: HPD or HDR split conformal.

    Args:
        level_cal: 1 - `hpd_score` of the calibration split: the highest-density level of each y.
        level_test: the same of the test split.
        log_prob_samples: log-densities of model samples at each test point.
        eps: miscoverage in (0, 1).

    Raises:
        ValueError: shapes that do not fit, as `conformal_quantile`.

    Source: HPD split, Izbicki et al., arXiv 1910.05575; HDR as compared in arXiv 2505.23196.
    """
    levels, samples = as_float(level_test), as_float(log_prob_samples)
    check_shape("log_prob_samples", samples, (samples.shape[0], *levels.shape), "[samples, batch]")
    q = conformal_quantile(level_cal, eps)
    ordered = jnp.sort(samples, axis=0)
    many = samples.shape[0]
    above = (
        1
        - jax.vmap(
            lambda row, own: jnp.searchsorted(row, own, side="right"), in_axes=1, out_axes=1
        )(ordered, samples).astype(samples.dtype)
        / many
    )
    volume = log_volume_importance(samples, above <= q)
    whole = jnp.isinf(q) | (q >= 1)
    return Regions(q, levels <= q, jnp.where(whole, jnp.inf, volume))
