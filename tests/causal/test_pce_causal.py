"""The estimator: recovery, equivariance, uncertainty, warnings, and every kind of bad table."""

from __future__ import annotations

import dataclasses
import warnings

import jax
import numpy as np
import pytest

from jaxlib_papers.causal import _features, _fit
from jaxlib_papers.causal._ci import _test_batch
from jaxlib_papers.causal._diagnostics import hsic_pvalue
from jaxlib_papers.causal._graphs import is_acyclic
from jaxlib_papers.causal.pce_causal import (
    PCTCD,
    PCTCDConfig,
    graph_metrics,
    random_plant,
    reactor9,
    reactor9_strengths,
)
from tests.causal.data import SMALL, fit, linear_sem


@pytest.fixture(scope="module")
def plant():
    return reactor9(jax.random.key(0), 1000, "laplace")


@pytest.fixture(scope="module")
def graph(plant):
    return fit(plant)


def test_reactor_has_eleven_edges_four_of_which_vanish_on_average(plant):
    assert plant.X.shape == (1000, 9) and plant.xi.shape == (1000, 3)
    assert plant.adjacency.sum() == 11 and is_acyclic(plant.adjacency)
    xi = np.random.default_rng(0).uniform(-1, 1, (200_000, 3))
    means = {edge: float(np.mean(b)) for edge, b in reactor9_strengths(xi).items()}
    assert {e for e, b in means.items() if abs(b) < 0.01} == {(0, 2), (2, 3), (4, 5), (6, 8)}
    assert means[0, 1] == pytest.approx(0.9, abs=0.01)
    X, s = np.asarray(plant.X), np.asarray(plant.strengths)
    noise = X - np.einsum("mij,mj->mi", s, X)
    np.testing.assert_allclose(noise.std(axis=0), 1, atol=0.15)
    permuted = reactor9(jax.random.key(0), 1000, "laplace", permute=True)
    np.testing.assert_allclose(np.sort(permuted.X[0]), np.sort(X[0]), rtol=1e-6)
    for noise in ("uniform", "normal"):
        X = reactor9(jax.random.key(1), 4000, noise).X
        assert float(np.var(X[:, 0])) == pytest.approx(1, abs=0.1)


def test_reactor_is_recovered_with_its_functions(plant, graph):
    assert graph_metrics(graph.adjacency, plant.adjacency).f1 == 1
    assert graph.theta.shape == (9, 9, 10) and (graph.theta[~graph.adjacency] == 0).all()
    xi = np.asarray(plant.xi)
    for i, j in np.argwhere(plant.adjacency):
        truth = np.asarray(plant.strengths[:, i, j])
        found = graph.edge_function(i, j, units="data")(xi)
        assert np.sqrt(np.mean((found - truth) ** 2)) < 0.25
        unit = graph.edge_function(i, j)(xi)
        np.testing.assert_allclose(unit * graph.scale[i] / graph.scale[j], found)
        band = graph.bands(i, j, xi, units="data")
        assert (band.lower <= band.strength).all() and (band.strength <= band.upper).all()
    inside = [
        np.mean((graph.bands(i, j, xi, units="data").lower <= plant.strengths[:, i, j])
        & (plant.strengths[:, i, j] <= graph.bands(i, j, xi, units="data").upper))
        for i, j in np.argwhere(plant.adjacency)
    ]  # fmt: skip
    assert 0.85 < np.mean(inside) <= 1
    assert graph.sobol(1, 0).dominant == 0 and graph.sobol(8, 6).dominant == 2
    assert graph.variation_pvalue(1, 0) < 1e-6
    sobol = graph.sobol(4, 2)  # .8 + .3 p1 p0: an interaction
    assert sobol.first.sum() < 0.5 < sobol.total[0] and sobol.total[1] > 0.5
    assert not graph.pruned or max(f["norm"] for f in graph.pruned.values()) < 0.3
    residuals = graph.residuals()
    np.testing.assert_allclose(residuals.var(axis=0), graph.noise, rtol=0.1)


def test_recovery_ignores_column_order_location_and_units(plant, graph):
    p = np.random.default_rng(0).permutation(9)
    X = np.asarray(plant.X, np.float64)
    moved = PCTCD(SMALL).fit((X * np.logspace(-3, 3, 9) + 100)[:, p], plant.xi)
    np.testing.assert_array_equal(moved.adjacency, graph.adjacency[np.ix_(p, p)])
    np.testing.assert_allclose(moved.theta, graph.theta[np.ix_(p, p)], atol=1e-7)
    single = PCTCD(SMALL).fit(np.asarray(plant.X, np.float32), np.asarray(plant.xi, np.float32))
    np.testing.assert_array_equal(single.adjacency, graph.adjacency)


def test_programs_are_not_compiled_again_for_another_graph(plant):
    def programs():
        functions = (_features._rss_batch, _fit._node_fits, _test_batch)
        return [f._cache_size() for f in functions]

    fit(reactor9(jax.random.key(5), 1000, "laplace", permute=True))
    before = programs()
    for seed in (6, 7):
        fit(reactor9(jax.random.key(seed), 1000, "laplace", permute=True))
    # Widths of parent sets are powers of two: another graph may need one that is new.
    assert all(b - a <= 1 for a, b in zip(before, programs(), strict=True))
    settled = programs()
    fit(reactor9(jax.random.key(5), 1000, "laplace", permute=True))
    assert programs() == settled


def test_static_ablation_misses_what_cancels(plant, graph):
    static = fit(plant, PCTCDConfig(degree=0))
    assert static.theta.shape[2] == 1
    assert static.variation_pvalue(*np.argwhere(static.adjacency)[0]) == 1
    assert graph_metrics(static.adjacency, plant.adjacency).f1 < 0.8


@pytest.mark.parametrize(
    "changes",
    [
        {"orient": "vstructures"},
        {"candidates": "all"},
        {"score": "ls", "lam": 20.0},
        {"intercept": True},
        {"scale": False},
        {"test_degree": 3},
        {"families": "legendre"},
        {"families": ["empirical", "uniform(-1, 1)", ("jacobi", 0.0, 0.0)]},
    ],
)
def test_options_recover_the_reactor_too(plant, changes):
    found = fit(plant, dataclasses.replace(SMALL, **changes))
    assert graph_metrics(found.adjacency, plant.adjacency).f1 >= 0.9
    if changes.get("intercept"):
        assert np.abs(found.intercept).max() < 0.2 and np.ptp(found.confounding[:, 1]) == 0


def test_bootstrap_of_the_fixed_graph(graph):
    result = graph.bootstrap(60, seed=1)
    assert result.mean_strength.shape == (60, 9, 9)
    assert (result.edge_probability[~graph.adjacency] == 0).all()
    assert (result.edge_probability[graph.adjacency] > 0.9).all()
    spread = []
    for i, j in np.argwhere(graph.adjacency):
        low, high = result.interval[i, j]
        assert low < graph.theta[i, j, 0] < high
        spread.append((high - low) / (2 * 1.96 * np.sqrt(graph.covariance[i, j][0, 0])))
    assert 0.7 < np.mean(spread) < 1.5  # as wide as the analytic interval
    assert np.isnan(result.interval[~graph.adjacency]).all()
    again = graph.bootstrap(60, seed=1)
    np.testing.assert_array_equal(again.mean_strength, result.mean_strength)


def test_bootstrap_of_the_whole_search(plant):
    few = PCTCD(SMALL).fit(plant.X[:400], plant.xi[:400])
    result = few.bootstrap(3, refit="full")
    assert result.edge_probability[plant.adjacency].mean() > 0.8
    with pytest.raises(ValueError, match="refit"):
        few.bootstrap(3, refit="half")
    with pytest.raises(ValueError, match="samples"):
        few.bootstrap(1)


def test_confounded_parameters_cause_a_warning_with_the_statistic(plant):
    X, xi = np.array(plant.X, float), np.array(plant.xi, float)
    X[:, 0] += 1.5 * xi[:, 1]  # a controller sets the parameter by what it measures
    with pytest.warns(UserWarning, match=r"residuals depend on the parameters: .*chi2 = \d+"):
        found = PCTCD(SMALL).fit(X, xi)
    assert found.confounding[0, 1] < 1e-6
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        PCTCD(dataclasses.replace(SMALL, intercept=True)).fit(X, xi)
        fit(plant)


def test_hsic_flags_a_nonlinear_edge_and_adds_nothing():
    r = np.random.default_rng(0)
    xi = r.uniform(-1, 1, (600, 1))
    x = r.uniform(-1.7, 1.7, 600)
    X = np.stack([x, x * x + 0.2 * r.normal(size=600), r.laplace(size=600)], axis=1)
    config = PCTCDConfig(degree=1, mi_check=True, max_cond=1)
    found = PCTCD(config).fit(X, xi)
    assert any({i, j} == {0, 1} for i, j, _ in found.nonlinear)
    assert not any(2 in (i, j) for i, j, _ in found.nonlinear)
    e = r.laplace(size=300)
    assert hsic_pvalue(x[:300], e) > 0.01 > hsic_pvalue(x[:300], x[:300] ** 2 + 0.1 * e)
    with pytest.raises(ValueError, match="at least 6"):
        hsic_pvalue(x[:5], e[:5])


def test_random_plants_are_sparse_dags():
    data = random_plant(jax.random.key(0), 50, 30)
    assert is_acyclic(data.adjacency) and data.adjacency.sum(axis=1).max() <= 3
    assert 20 <= data.adjacency.sum() <= 60 and np.isfinite(data.X).all()
    other = random_plant(jax.random.key(1), 50, 30)
    assert (other.adjacency != data.adjacency).any()


def spoiled(**changes):
    r = np.random.default_rng(0)
    X, _ = linear_sem(120)
    return {"X": X, "xi": r.uniform(-1, 1, (120, 2))} | changes


def with_value(array, row, column, value):
    array = np.array(array, float)
    array[row, column] = value
    return array


BASE = spoiled()


@pytest.mark.parametrize(
    ("changes", "config", "message"),
    [
        ({"X": BASE["X"][:50]}, {}, "X has 50 rows and xi 120"),
        ({"X": with_value(BASE["X"], 7, 2, np.nan)}, {}, "row 7, column 'X2'"),
        ({"xi": with_value(BASE["xi"], 3, 1, np.inf)}, {}, "row 3, column 'xi1'"),
        ({"X": np.column_stack([BASE["X"], np.ones(120)])}, {}, "'X5' is constant"),
        ({"X": BASE["X"][:, [0, 1, 2, 1]]}, {}, "'X1' and 'X3' are duplicates"),
        ({"X": np.column_stack([BASE["X"], BASE["X"].sum(axis=1)])}, {}, "linearly dependent"),
        ({"X": BASE["X"][:, :1]}, {}, "at least 2 variables"),
        ({"xi": np.column_stack([BASE["xi"][:, 0], np.ones(120)])}, {}, "'xi1' is constant"),
        ({"xi": BASE["xi"][:, [0, 0]]}, {}, r"\['xi0', 'xi1'\].*linearly dependent"),
        ({"xi": np.sign(BASE["xi"])}, {}, "'xi0' takes 2 distinct values"),
        ({"X": BASE["X"][:20], "xi": BASE["xi"][:20]}, {}, "need at least 25"),
        ({"xi": 3 * BASE["xi"]}, {"families": "legendre"}, "domain of family 'legendre'"),
        ({"xi": -1 - BASE["xi"]}, {"families": "laguerre"}, "domain"),
        ({}, {"families": "cauchy"}, "family 'cauchy' is unknown"),
        ({}, {"families": ["uniform"] * 3}, "families has 3 entries"),
        ({"X": np.array([["a", "b"]] * 120)}, {}, "no number"),
    ],
)
def test_c24_bad_tables_are_named(changes, config, message):
    table = BASE | changes
    with pytest.raises(ValueError, match=message):
        PCTCD(dataclasses.replace(SMALL, **config)).fit(table["X"], table["xi"])


@pytest.mark.parametrize(
    "config",
    [
        {"degree": -1},
        {"q": 0.0},
        {"alpha": 1.0},
        {"max_cond": -1},
        {"test_degree": 1, "degree": 2},
        {"orient": "up"},
        {"score": "aic"},
        {"candidates": "none"},
        {"lam": -1.0},
    ],
)
def test_bad_settings_are_named(config):
    with pytest.raises(ValueError, match=next(iter(config))):
        PCTCDConfig(**config)


def test_questions_about_edges_that_are_not_there(graph, plant):
    with pytest.raises(ValueError, match="there is no edge X8 -> X0"):
        graph.edge_function(0, 8)
    with pytest.raises(ValueError, match="i is 9"):
        graph.sobol(9, 0)
    with pytest.raises(ValueError, match="domain"):
        graph.edge_function(1, 0)(np.full((1, 3), 2.0))
    with pytest.raises(ValueError, match="units"):
        graph.bands(1, 0, np.asarray(plant.xi), units="kg")
    with pytest.raises(ValueError, match="names"):
        PCTCD(SMALL).fit(plant.X, plant.xi, names=["a"] * 9)
