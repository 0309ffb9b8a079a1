"""The estimator: independence tests, order, greedy search, fit and pruning, in float64."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Literal

import jax
import numpy as np
from jaxtyping import Float

from jaxlib_papers.causal._ci import PCTIndependence, rows_needed
from jaxlib_papers.causal._diagnostics import hsic_pvalue, parameter_confounding
from jaxlib_papers.causal._features import Gram
from jaxlib_papers.causal._fit import GraphFit
from jaxlib_papers.causal._graphs import (
    complete_along,
    descendants,
    orient_along,
    orient_v_structures,
)
from jaxlib_papers.causal._greedy import SCORES, LocalScore, greedy_trace
from jaxlib_papers.causal._inputs import check_basis, check_table
from jaxlib_papers.causal._order import functional_lingam_order
from jaxlib_papers.causal._result import CausalGraph, FitData
from jaxlib_papers.causal._skeleton import pc_skeleton
from jaxlib_papers.ops.checks import check_choice, check_count, check_nonnegative
from jaxlib_papers.ops.polynomials import FamilySpec, fit_families, multi_index, pce_basis

__all__ = ["PCTCD", "PCTCDConfig"]


def _refit(config: PCTCDConfig, X: np.ndarray, xi: np.ndarray) -> CausalGraph:
    return PCTCD(config).fit(X, xi)


@dataclasses.dataclass(frozen=True)
class PCTCDConfig:
    """Settings of `PCTCD`.

    Attributes:
        degree: N_p of the coefficient functions (the paper's default).
        q: hyperbolic truncation (0.5 keeps 16 of 35 terms for three parameters; the paper has 1).
        families: of the parameters, as in `ops.polynomials.fit_families`.
        test_degree: N_p of the independence tests; None is `degree`. Not smaller: a conditional
            covariance is a rational function of xi even where the strengths are polynomials.
        alpha: level of the independence tests.
        max_cond: largest conditioning set (reconstructed).
        orient: "order" (functional LiNGAM) or "vstructures" (those first, Meek's rules, the order
            for the rest) (reconstructed).
        score: "bic", or "ls" for least squares with one unit of penalty an edge.
        lam: multiplier of the penalty.
        candidates: pairs that the search may join: those of the "skeleton", or "all".
        intercept: whether xi may move the means of the nodes.
        max_parents: most parents of a node; None leaves it to the number of rows.
        max_moves: moves after which the search stops.
        scale: whether columns are divided by their standard deviation (reconstructed).
        prune_alpha: an edge goes when its Wald test has a larger p-value (reconstructed).
        min_norm: an edge goes when its norm is smaller (reconstructed).
        confounding_alpha: level, shared by all nodes, at which residuals that depend on xi cause a
            warning.
        mi_check: whether HSIC compares each residual with the other possible causes; what it
            finds is flagged in the result, and nothing is added.
    """

    degree: int = 4
    q: float = 0.5
    families: FamilySpec | Sequence[FamilySpec] = "uniform"
    test_degree: int | None = None
    alpha: float = 0.05
    max_cond: int = 3
    orient: Literal["order", "vstructures"] = "order"
    score: Literal["bic", "ls"] = "bic"
    lam: float = 1.0
    candidates: Literal["skeleton", "all"] = "skeleton"
    intercept: bool = False
    max_parents: int | None = None
    max_moves: int = 200
    scale: bool = True
    prune_alpha: float = 0.01
    min_norm: float = 0.05
    confounding_alpha: float = 0.01
    mi_check: bool = False

    def __post_init__(self) -> None:
        for name, low in (("degree", 0), ("max_cond", 0), ("max_moves", 0)):
            check_count(name, getattr(self, name), low)
        if self.test_degree is not None:
            check_count("test_degree", self.test_degree, self.degree)
        if self.max_parents is not None:
            check_count("max_parents", self.max_parents, 0)
        for name in ("alpha", "prune_alpha", "confounding_alpha"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected a level in (0, 1)")
        if not 0 < self.q <= 1:
            raise ValueError(f"q is {self.q}, expected a number in (0, 1]")
        check_nonnegative("lam", self.lam)
        check_nonnegative("min_norm", self.min_norm)
        check_choice("orient", self.orient, ("order", "vstructures"))
        check_choice("score", self.score, SCORES)
        check_choice("candidates", self.candidates, ("skeleton", "all"))


def _names(given: Sequence[str] | None, count: int, prefix: str) -> tuple[str, ...]:
    names = (
        tuple(map(str, given)) if given is not None else tuple(f"{prefix}{k}" for k in range(count))
    )
    if len(names) != count or len(set(names)) != count:
        raise ValueError(f"names {names} have to be {count} different ones, one a column")
    return names


class PCTCD:
    """Causal graph whose strengths are polynomial-chaos expansions of operating parameters.

    Stages: PC-stable skeleton with the parametric independence test, a causal order by functional
    LiNGAM (or v-structures), greedy score search inside the skeleton, least squares, pruning.

    All numerics run in float64, inside `jax.enable_x64`, whatever the caller's setting: the score
    compares sums of squares whose differences float32 would lose.

    Args:
        config: the settings; None for the defaults.

    Example:
        >>> import jax
        >>> from jaxlib_papers.causal.pce_causal import PCTCD, PCTCDConfig, reactor9
        >>> data = reactor9(jax.random.key(0), 400, "laplace")
        >>> graph = PCTCD(PCTCDConfig(degree=2, q=1.0)).fit(data.X, data.xi)
        >>> bool(graph.adjacency[1, 0])
        True
    """

    def __init__(self, config: PCTCDConfig | None = None):
        self.config = PCTCDConfig() if config is None else config

    def fit(
        self,
        X: Float[np.ndarray, "m n"],
        xi: Float[np.ndarray, "m d"],
        *,
        names: Sequence[str] | None = None,
        parameters: Sequence[str] | None = None,
    ) -> CausalGraph:
        """Learns the graph and the functions.

        Args:
            X: observations, one row a time or batch, in any units.
            xi: operating parameters at the same rows.
            names: of X's columns; None is X0, X1, ...
            parameters: names of xi's columns; None is xi0, xi1, ...

        Returns:
            `CausalGraph`.

        Raises:
            ValueError: rows that differ, NaN, constant, duplicated or dependent columns, too few
                rows (with the number needed), a parameter outside of its family's domain, an
                unknown family, a basis that the settings do not determine.

        Warns:
            UserWarning: residuals depend on xi, with the statistic: parameters and noise are
                confounded (a control loop), or xi moves a mean (see `intercept`).

        Source: OpenReview 4bnCXOtHTm, stages 1 to 5; details (reconstructed) as in the module.
        """
        X, xi = (np.asarray(v) for v in (X, xi))
        xi = xi[:, None] if xi.ndim == 1 else xi
        names = _names(names, X.shape[1] if X.ndim == 2 else 1, "X")
        parameters = _names(parameters, xi.shape[-1], "xi")
        X, xi = check_table(X, xi, names, parameters)
        with jax.enable_x64(True):
            return self._fit(X, xi, names, parameters)

    def _basis(self, xi, families, degree, parameters):
        index = multi_index(xi.shape[1], degree, self.config.q)
        psi = np.asarray(pce_basis(xi, index, families))
        check_basis(psi, xi, index, parameters)
        return index, psi

    def _fit(self, X, xi, names, parameters) -> CausalGraph:
        config = self.config
        m, n = X.shape
        test_degree = config.degree if config.test_degree is None else config.test_degree
        size = len(multi_index(xi.shape[1], test_degree, config.q))
        needed = rows_needed(size, min(config.max_cond, n - 2))
        if m < needed:
            raise ValueError(
                f"X has {m} rows; {size} basis functions and conditioning sets of "
                f"{min(config.max_cond, n - 2)} need at least {needed} (and the level of the tests "
                "several times that); lower degree, q or max_cond, or bring more rows"
            )
        families = fit_families(xi, config.families, test_degree)
        for k, (name, family) in enumerate(zip(parameters, families, strict=True)):
            escaped = name.replace("{", "{{").replace("}", "}}")
            family.check_domain(xi[:, k], f"xi column {escaped!r}, row {{}},")
        index, psi = self._basis(xi, families, config.degree, parameters)
        test_psi = psi
        if test_degree != config.degree:
            test_psi = self._basis(xi, families, test_degree, parameters)[1]

        location = X.mean(axis=0)
        scale = X.std(axis=0) if config.scale else np.ones(n)
        unit = (X - location) / scale
        ci = PCTIndependence(unit, test_psi)
        skeleton, sepsets = pc_skeleton(ci, n, config.alpha, config.max_cond)
        order = functional_lingam_order(unit, psi)
        if config.orient == "order":
            start = orient_along(skeleton, order)
        else:
            start = complete_along(orient_v_structures(skeleton, sepsets), order)

        gram = Gram(unit, psi, intercept=config.intercept)
        noise = None
        if config.score == "ls":
            noise = self._noise(gram, skeleton)
        score = LocalScore(gram, config.lam, config.score, noise, config.max_parents)
        # More parents than the rows or the settings allow: the search adds the best of them again.
        start[start.sum(axis=1) > score.max_parents] = False
        pairs = skeleton if config.candidates == "skeleton" else "all"
        graph, totals = greedy_trace(start, score, pairs, max_moves=config.max_moves)

        figures = {
            edge: dict(zip(("wald", "pvalue", "norm"), values, strict=True))
            for edge, values in GraphFit(gram, graph).wald().items()
        }
        pruned = {
            edge: f
            for edge, f in figures.items()
            if f["pvalue"] > config.prune_alpha or f["norm"] < config.min_norm
        }
        for i, j in pruned:
            graph[i, j] = False
        fit = GraphFit(gram, graph)
        result = CausalGraph(
            adjacency=graph,
            theta=fit.theta,
            index=index,
            families=families,
            names=names,
            parameters=parameters,
            intercept=fit.intercept,
            noise=fit.noise,
            edges={edge: f for edge, f in figures.items() if edge not in pruned},
            pruned=pruned,
            order=order,
            skeleton=skeleton,
            score=totals[-1],
            tests=ci.tests,
            confounding=np.zeros((n, 2)),
            nonlinear=None,
            location=location,
            scale=scale,
            config=config,
            covariance=fit.covariance,
            data=FitData(X, xi, unit, psi, _refit),
        )
        return self._diagnose(result)

    def _noise(self, gram: Gram, skeleton) -> np.ndarray:
        """Noise variances for the "ls" score: of each node on all of its neighbours."""
        most = (gram.rows - 2) // gram.basis - gram.intercept
        sets = [np.flatnonzero(row)[:most].tolist() for row in skeleton]
        used = np.array([gram.basis * (len(s) + gram.intercept) for s in sets])
        return gram.rss(list(enumerate(sets))) / (gram.rows - used)

    def _diagnose(self, graph: CausalGraph) -> CausalGraph:
        config, residuals = self.config, graph.residuals()
        n = residuals.shape[1]
        if config.intercept:  # the residuals are orthogonal to the basis by construction
            stats, p = np.zeros(n), np.ones(n)
        else:
            stats, p = parameter_confounding(residuals, graph.data.psi)
        bad = np.flatnonzero(p < config.confounding_alpha / n)
        if bad.size:
            listed = ", ".join(
                f"{graph.names[i]} (chi2 = {stats[i]:.1f}, df = {len(graph.index) - 1}, "
                f"p = {p[i]:.1e})"
                for i in bad
            )
            warnings.warn(
                f"residuals depend on the parameters: {listed}. The method assumes noise that is "
                "independent of xi: look for control loops that set a parameter by a measured "
                "variable; if xi only moves means, set intercept=True",
                UserWarning,
                stacklevel=4,
            )
        found = self._nonlinear(graph, residuals) if config.mi_check else None
        return dataclasses.replace(graph, confounding=np.stack([stats, p], axis=1), nonlinear=found)

    def _nonlinear(self, graph: CausalGraph, residuals, rows: int = 300, level: float = 0.01):
        """Pairs whose residual and possible cause HSIC finds dependent (Bonferroni)."""
        m, n = residuals.shape
        chosen = np.linspace(0, m - 1, min(m, rows)).astype(int)
        below = descendants(graph.adjacency)
        pairs = [(i, j) for i in range(n) for j in range(n) if i != j and not below[j, i]]
        found = []
        for i, j in pairs:
            p = hsic_pvalue(residuals[chosen, i], graph.data.unit[chosen, j])
            if p < level / len(pairs):
                found.append((i, j, p))
        return found
