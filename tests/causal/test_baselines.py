"""The classical methods: golden acyclicity, linear models they must solve, bad input."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.linalg import expm

from jaxlib_papers.causal._graphs import is_acyclic
from jaxlib_papers.causal.baselines.ges import consistent_dag, equivalence_class, ges
from jaxlib_papers.causal.baselines.lingam import direct_lingam
from jaxlib_papers.causal.baselines.notears import acyclicity, notears_linear
from jaxlib_papers.causal.baselines.pc import FisherZ, pc_fisher_z
from tests.causal.data import VECTORS, linear_sem


@pytest.mark.parametrize("k", (0, 1))
def test_golden_acyclicity(k):
    W, h, grad = (VECTORS[f"acyc/{k}/{n}"] for n in ("W", "h", "grad"))
    with jax.enable_x64(True):
        value, gradient = jax.jit(jax.value_and_grad(acyclicity))(W)
        np.testing.assert_allclose(value, h, rtol=1e-9)
        np.testing.assert_allclose(gradient, grad, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(gradient, 2 * W * expm(W * W).T, rtol=1e-9, atol=1e-12)


def test_acyclicity_is_zero_only_for_a_dag():
    W = np.tril(np.random.default_rng(0).normal(size=(6, 6)), -1)
    p = np.random.default_rng(1).permutation(6)
    with jax.enable_x64(True):
        assert abs(float(acyclicity(W[np.ix_(p, p)]))) < 1e-12
        W[0, 5] = 0.3
        assert float(acyclicity(W[np.ix_(p, p)])) > 1e-6
    assert float(acyclicity(jnp.zeros((3, 3)))) == 0
    with pytest.raises(ValueError, match="W has shape"):
        acyclicity(jnp.zeros((2, 3)))


def test_notears_recovers_a_linear_model_and_depends_on_scale():
    X, B = linear_sem(2000)
    W = notears_linear(X, 0.05)
    np.testing.assert_array_equal(W.T != 0, B != 0)
    np.testing.assert_allclose(W.T, B, atol=0.1)
    assert is_acyclic(W != 0) and abs(float(acyclicity(W.astype(np.float32)))) < 1e-5
    # Column scales reverse edges: the known weakness, here on purpose.
    scaled = notears_linear(X * [100, 10, 1, 0.1, 0.01], 0.05)
    assert ((scaled.T != 0) != (B != 0)).any()


def test_direct_lingam_recovers_order_weights_and_graph():
    X, B = linear_sem(3000)
    columns = np.array([2, 4, 0, 3, 1])
    found = direct_lingam(X[:, columns] * [1, 5, 0.2, 1, 3] + 7)
    assert columns[found.order].tolist() == [0, 1, 2, 3, 4]
    np.testing.assert_array_equal(found.adjacency, (B != 0)[np.ix_(columns, columns)])
    plain = direct_lingam(X)
    np.testing.assert_allclose(plain.weights, B, atol=0.08)


@pytest.mark.parametrize("method", (pc_fisher_z, ges))
def test_equivalence_class_of_a_gaussian_linear_model(method):
    X, B = linear_sem(4000, noise="normal")
    extra = {"alpha": 0.001} if method is pc_fisher_z else {}
    found = method(X, **extra)
    np.testing.assert_array_equal(found, equivalence_class(B != 0))
    np.testing.assert_array_equal(equivalence_class(consistent_dag(found)), found)


def test_ges_deletes_what_it_inserted_too_early():
    """A collider of two causes of one chain: forward steps overshoot, backward steps mend."""
    r = np.random.default_rng(3)
    e = r.normal(size=(4000, 4))
    a, b = e[:, 0], e[:, 1]
    c = a + b + 0.5 * e[:, 2]
    d = c + 0.5 * e[:, 3]
    B = np.zeros((4, 4), bool)
    B[2, 0] = B[2, 1] = B[3, 2] = True
    np.testing.assert_array_equal(ges(np.stack([a, b, c, d], axis=1)), equivalence_class(B))


def test_fisher_z_agrees_with_the_textbook():
    from scipy.stats import norm

    X, _ = linear_sem(200)
    test = FisherZ(X)
    r = np.corrcoef(X[:, 0], X[:, 2])[0, 1]
    expected = 2 * norm.sf(np.sqrt(197) * abs(np.arctanh(r)))
    assert test(0, 2) == pytest.approx(expected, rel=1e-9)
    F = np.stack([np.ones(200), X[:, 1]], axis=1)
    a, b = (X[:, k] - F @ np.linalg.lstsq(F, X[:, k], rcond=None)[0] for k in (0, 2))
    expected = 2 * norm.sf(np.sqrt(196) * abs(np.arctanh(np.corrcoef(a, b)[0, 1])))
    assert test(0, 2, (1,)) == pytest.approx(expected, rel=1e-6)


METHODS = (notears_linear, direct_lingam, pc_fisher_z, ges)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda X: np.column_stack([X, X[:, 1]]), "'1' and '5' are duplicates"),
        (lambda X: np.column_stack([X, X[:, 1] + X[:, 2]]), "linearly dependent"),
        (lambda X: np.column_stack([X, np.full(len(X), 4.0)]), "'5' is constant"),
        (lambda X: np.where(np.arange(X.size).reshape(X.shape) == 8, np.nan, X), "row 1, column"),
        (lambda X: X[:4], "bring at least 7 rows"),
        (lambda X: X[:, :1], "at least 2 variables"),
    ],
)
def test_c24_bad_tables_are_named(method, spoil, message):
    with pytest.raises(ValueError, match=message):
        method(spoil(linear_sem(100)[0]))
