"""Learning Dynamic Causal Graphs Under Parametric Uncertainty via Polynomial Chaos Expansions.

Authors not named in the copy that was seen. ICLR 2026, OpenReview 4bnCXOtHTm. No arXiv version and
no public code found; the paper's data are proprietary.

One directed acyclic graph whose edge strengths are functions of measured operating parameters,

    X_i = sum over parents j of b_ij(xi) X_j + e_i,
    b_ij(xi) = sum_alpha theta_ij,alpha Psi_alpha(xi),

with Psi orthonormal under the distribution of xi. "Dynamic" means that strengths vary with the
parameters, not with time; rows are taken as independent. An edge whose strength changes sign with
xi may vanish on average: methods that ignore xi miss it.

Here: bases (stage 0, from `ops.polynomials`), the test of independence for almost every xi (stage
1), the PC-stable skeleton (2), orientation (3), score, natural gradient and greedy search (4),
bands, Sobol indices and bootstrap (5), the estimator that runs them, and a nine-variable reactor.
A[i, j] is True when j -> i.

Reconstructed, since the paper (as far as it was seen) leaves it open: scaling of columns, the
empirical basis, the constant block and ridge of the test, conditioning sets of at most 3, the whole
orientation stage, the scale of the score, moves and stopping of the search, pruning by Wald test
and norm, the check of residuals against xi, and the reactor itself. There is no acyclicity penalty
in this method: moves that would close a cycle are rejected.

Identifiable are DAG and functions under: non-Gaussian noise (at most one Gaussian), no hidden
common causes, faithfulness, strengths that do not vanish for almost all xi, and a positive definite
design. Time: the batches of tests and scores run over padded parent sets, compiled once a size.
"""

from __future__ import annotations

from jaxlib_papers.causal._ci import CITest, PCTIndependence, pct_ci_test
from jaxlib_papers.causal._estimator import PCTCD, PCTCDConfig
from jaxlib_papers.causal._export import graph_to_dict, graph_to_graphml
from jaxlib_papers.causal._features import interaction_features
from jaxlib_papers.causal._fit import (
    fit_coefficients,
    natural_gradient_step,
    node_rss,
    pct_bic,
)
from jaxlib_papers.causal._generators import (
    ParametricData,
    random_plant,
    reactor9,
    reactor9_strengths,
)
from jaxlib_papers.causal._graphs import GraphMetrics, graph_metrics
from jaxlib_papers.causal._greedy import LocalScore, greedy_dag
from jaxlib_papers.causal._order import functional_lingam_order
from jaxlib_papers.causal._result import Band, Bootstrap, CausalGraph, EdgeSobol
from jaxlib_papers.causal._skeleton import pc_skeleton
from jaxlib_papers.causal.baselines.lingam import direct_lingam
from jaxlib_papers.causal.baselines.notears import notears_linear
from jaxlib_papers.ops.polynomials import (
    hermite,
    jacobi,
    laguerre,
    legendre,
    multi_index,
    pce_basis,
)

__all__ = [
    "PCTCD",
    "Band",
    "Bootstrap",
    "CITest",
    "CausalGraph",
    "EdgeSobol",
    "GraphMetrics",
    "LocalScore",
    "PCTCDConfig",
    "PCTIndependence",
    "ParametricData",
    "direct_lingam",
    "fit_coefficients",
    "functional_lingam_order",
    "graph_metrics",
    "graph_to_dict",
    "graph_to_graphml",
    "greedy_dag",
    "hermite",
    "interaction_features",
    "jacobi",
    "laguerre",
    "legendre",
    "multi_index",
    "natural_gradient_step",
    "node_rss",
    "notears_linear",
    "pc_skeleton",
    "pce_basis",
    "pct_bic",
    "pct_ci_test",
    "random_plant",
    "reactor9",
    "reactor9_strengths",
]
