"""The functional LiNGAM order."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxlib_papers.causal._order import nonlinear_dependence
from jaxlib_papers.causal.pce_causal import functional_lingam_order, reactor9
from tests.causal.data import legendre_basis, linear_sem


def test_order_of_a_linear_model_with_a_constant_basis():
    X, _ = linear_sem(3000)
    columns = np.array([3, 1, 4, 0, 2])
    order = functional_lingam_order(
        X[:, columns].astype(np.float32), np.ones((3000, 1), np.float32)
    )
    assert columns[order].tolist() == [0, 1, 2, 3, 4]
    # Scale and location of the columns say nothing.
    moved = (X * [1, 50, 0.01, 3, 7] + [0, 9, 0, -4, 100])[:, columns]
    np.testing.assert_array_equal(
        functional_lingam_order(moved.astype(np.float32), np.ones((3000, 1), np.float32)), order
    )


def test_order_of_the_reactor_respects_every_edge():
    data = reactor9(jax.random.key(0), 2000, "uniform", permute=True)
    order = functional_lingam_order(data.X, legendre_basis(np.asarray(data.xi), 2))
    rank = np.argsort(order)
    assert sorted(order) == list(range(9))
    assert all(rank[j] < rank[i] for i, j in np.argwhere(data.adjacency))


def test_many_nodes_are_ordered_in_shrinking_programs():
    r = np.random.default_rng(0)
    X = r.laplace(size=(1500, 20))
    for i in range(1, 20):
        X[:, i] += 0.9 * X[:, i - 1]
    X = X.astype(np.float32)
    order = functional_lingam_order(X[:, ::-1], np.ones((1500, 1), np.float32))
    assert stats_of(19 - order) > 0.97


def stats_of(order):
    from scipy.stats import spearmanr

    return spearmanr(order, np.arange(len(order))).statistic


def test_dependence_is_small_for_independent_and_large_for_dependent():
    r = np.random.default_rng(0)
    x, e = r.laplace(size=(2, 5000)).astype(np.float32)
    assert float(nonlinear_dependence(x, e)) < 0.01 < 0.1 < float(nonlinear_dependence(x, x * x))
    assert float(nonlinear_dependence(x, 0 * e)) == 0


def test_one_node_is_refused():
    with pytest.raises(ValueError, match="n >= 2"):
        functional_lingam_order(np.ones((5, 1)), np.ones((5, 1)))
    with pytest.raises(ValueError, match="Psi"):
        functional_lingam_order(np.ones((5, 2)), np.ones((4, 1)))
