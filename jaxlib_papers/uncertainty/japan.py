"""JAPAN: Joint Adaptive Prediction Areas with Normalising-Flows.

Eshant English and Christoph Lippert, ICLR 2026, arXiv 2505.23196. No public code.

A set that holds a vector (or a whole trajectory) with probability at least 1 - eps: fit a density
p(y | x), score calibration points by it, and keep every y whose score reaches a low quantile,

    region(x) = {y : log p(y | x) >= tau},  tau = k-th smallest score,  k = floor(eps (n + 1)),

which covers for any density and is small for a good one; it may be non-convex, in several parts,
and it moves with x. Its volume is a mean of [inside] / p(y | x) over samples of the density.

Here: the estimator `JapanRegressor` with its seven scores; thresholds, scores, volumes and metrics
(from `ops`), flows (from `nn.flows`), and the methods that it is compared with, as functions of
arrays.

Reconstructed, since the paper (as far as it was seen) leaves it open: flow sizes and training
defaults, both adaptive scores, the residual reading of the unconditional score, N = 1000 draws for
a volume, grids and their components, and details of the comparisons.
"""

from __future__ import annotations

from jaxlib_papers.nn.flows.autoregressive import ConditionalMAF
from jaxlib_papers.nn.flows.base import Chain, Flow, Permutation, StandardisedFlow
from jaxlib_papers.nn.flows.coupling import (
    ConditionalRealNVP,
    ConditionalSplineFlow,
    affine_coupling,
)
from jaxlib_papers.nn.flows.training import FitConfig, fit_flow
from jaxlib_papers.nn.flows.trajectory import TrajectoryFlow
from jaxlib_papers.ops.conformal import (
    conformal_quantile,
    conformal_rank,
    conformal_threshold,
    group_conformal_quantile,
    localised_conformal_quantile,
    weighted_conformal_quantile,
)
from jaxlib_papers.ops.conformal_scores import (
    c_pcp_score,
    cp2_pcp_score,
    cqr_score,
    hd_pcp_samples,
    hpd_score,
    latent_radius_score,
    mahalanobis_score,
    max_normalised_residual_score,
    pcp_score,
)
from jaxlib_papers.ops.regions import (
    connected_components_2d,
    coverage,
    label_components_2d,
    log_volume_importance,
    log_volume_of_balls,
    volume_box,
    worst_slab_coverage,
)
from jaxlib_papers.ops.splines import rational_quadratic_spline
from jaxlib_papers.uncertainty._baselines import (
    contra_regions,
    cqr_regions,
    hdr_regions,
    local_covariance,
    nle_regions,
    pcp_regions,
    rcp_regions,
    residual_regions,
)
from jaxlib_papers.uncertainty._region import Regions
from jaxlib_papers.uncertainty._regressor import JapanRegressor
from jaxlib_papers.uncertainty._scores import SCORES, Density
from jaxlib_papers.uncertainty._trajectory_baselines import (
    cfrnn_regions,
    copula_cpts_regions,
    janet_regions,
)
from jaxlib_papers.uncertainty._volumes import NotCalibratedError, RegionMask, RegionSamples

__all__ = [
    "SCORES",
    "Chain",
    "ConditionalMAF",
    "ConditionalRealNVP",
    "ConditionalSplineFlow",
    "Density",
    "FitConfig",
    "Flow",
    "JapanRegressor",
    "NotCalibratedError",
    "Permutation",
    "RegionMask",
    "RegionSamples",
    "Regions",
    "StandardisedFlow",
    "TrajectoryFlow",
    "affine_coupling",
    "c_pcp_score",
    "cfrnn_regions",
    "conformal_quantile",
    "conformal_rank",
    "conformal_threshold",
    "connected_components_2d",
    "contra_regions",
    "copula_cpts_regions",
    "coverage",
    "cp2_pcp_score",
    "cqr_regions",
    "cqr_score",
    "fit_flow",
    "group_conformal_quantile",
    "hd_pcp_samples",
    "hdr_regions",
    "hpd_score",
    "janet_regions",
    "label_components_2d",
    "latent_radius_score",
    "local_covariance",
    "localised_conformal_quantile",
    "log_volume_importance",
    "log_volume_of_balls",
    "mahalanobis_score",
    "max_normalised_residual_score",
    "nle_regions",
    "pcp_regions",
    "pcp_score",
    "rational_quadratic_spline",
    "rcp_regions",
    "residual_regions",
    "volume_box",
    "weighted_conformal_quantile",
    "worst_slab_coverage",
]
