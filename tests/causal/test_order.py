"""The functional LiNGAM order."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxlib_papers.causal._order import nonlinear_dependence
from jaxlib_papers.causal.pce_causal import functional_lingam_order, reactor9
from tests.causal.data import legendre_basis, linear_sem


def ones(m: int) -> np.ndarray:
    return np.ones((m, 1), np.float32)


def test_order_of_a_linear_model_with_a_constant_basis():
    X, _ = linear_sem(3000, noise="exponential")
    columns = np.array([3, 1, 4, 0, 2])
    order = functional_lingam_order(X[:, columns].astype(np.float32), ones(3000))
    assert columns[order].tolist() == [0, 1, 2, 3, 4]
    # Scale and location of the columns say nothing.
    moved = (X * [1, 50, 0.01, 3, 7] + [0, 9, 0, -4, 100])[:, columns].astype(np.float32)
    np.testing.assert_array_equal(functional_lingam_order(moved, ones(3000)), order)


def test_order_with_a_strength_that_changes_sign():
    """X1 = 1.5 p1(xi) X0 + e: a constant basis leaves all of X0 in the residual."""
    right = 0
    for seed in range(10):
        r = np.random.default_rng(seed)
        xi = r.uniform(-1, 1, (1000, 1))
        cause, e = r.exponential(size=(2, 1000)) - 1
        X = np.stack([1.5 * np.sqrt(3) * xi[:, 0] * cause + e, cause], axis=1)
        right += functional_lingam_order(X, legendre_basis(xi, 2)).tolist() == [1, 0]
    assert right >= 9


def test_order_of_the_reactor_does_not_depend_on_the_columns():
    data = reactor9(jax.random.key(0), 1000, "uniform")
    X, psi = np.asarray(data.X), legendre_basis(np.asarray(data.xi), 2)
    columns = np.random.default_rng(0).permutation(9)
    order = functional_lingam_order(X, psi)
    assert sorted(order) == list(range(9))
    np.testing.assert_array_equal(columns[functional_lingam_order(X[:, columns], psi)], order)


def test_many_nodes_are_ordered_in_shrinking_programs():
    X = np.random.default_rng(0).exponential(size=(2000, 20))
    for i in range(1, 20):
        X[:, i] += 0.9 * X[:, (i - 1) // 2]
    order = functional_lingam_order(X[:, ::-1].astype(np.float32), ones(2000))
    rank = np.argsort(19 - order)
    assert np.mean([rank[(i - 1) // 2] < rank[i] for i in range(1, 20)]) > 0.9


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
