"""The independence test: golden values, invariances, level and power, degenerate input."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxlib_papers.causal.baselines.pc import FisherZ
from jaxlib_papers.causal.pce_causal import (
    PCTIndependence,
    interaction_features,
    multi_index,
    pce_basis,
    pct_ci_test,
)
from tests.causal.data import VECTORS, legendre_basis


@pytest.mark.parametrize("k", (0, 1))
@pytest.mark.parametrize("x64", (True, False))
def test_golden_vectors_one_by_one_and_in_a_batch(k, x64):
    X, xi, index, a, b, z = (VECTORS[f"ci/{k}/{n}"] for n in ("X", "xi", "index", "a", "b", "z"))
    names = ("stat", "pvalue", "C")
    expected = dict(zip(names, (VECTORS[f"ci/{k}/{n}"] for n in names), strict=True))
    rtol = {"stat": 1e-9, "pvalue": 1e-9, "C": 1e-9} if x64 else dict.fromkeys(names, 2e-3)
    with jax.enable_x64(x64):
        dtype = jnp.float64 if x64 else jnp.float32
        X, psi = jnp.asarray(X, dtype), pce_basis(jnp.asarray(xi, dtype), index, "legendre")
        ci = PCTIndependence(X, psi)
        stat, coef = ci.statistics(a, b, z)
        np.testing.assert_allclose(stat, expected["stat"], rtol=rtol["stat"])
        np.testing.assert_allclose(coef, expected["C"], rtol=rtol["C"], atol=1e-9 if x64 else 1e-4)
        np.testing.assert_allclose(ci.batch(a, b, z), expected["pvalue"], rtol=rtol["pvalue"])
        for t in range(len(a)) if x64 else (0,):  # each size of z is a program to compile
            given = z[t][z[t] >= 0]
            one = pct_ci_test(X[:, int(a[t])], X[:, int(b[t])], X[:, given], psi)
            assert one.df == len(index) and one.stat.dtype == dtype
            np.testing.assert_allclose(one.stat, expected["stat"][t], rtol=rtol["stat"])
            np.testing.assert_allclose(one.pvalue, expected["pvalue"][t], rtol=rtol["pvalue"])
        assert ci(int(a[0]), int(b[0])) == pytest.approx(expected["pvalue"][0], rel=2e-3)


def some_data(m=400, seed=0):
    r = np.random.default_rng(seed)
    xi = r.uniform(-1, 1, (m, 2))
    z = r.laplace(size=m)
    x, y = (b * z + r.laplace(size=m) for b in (0.8 * xi[:, 0], 0.5 + xi[:, 1]))
    return x, y, z, xi


def test_invariant_to_scale_and_to_orthogonal_change_of_basis():
    x, y, z, xi = some_data()
    with jax.enable_x64(True):
        psi = legendre_basis(xi, 2)
        rotation = np.linalg.qr(np.random.default_rng(1).normal(size=(6, 6)))[0]
        one = pct_ci_test(x, y, z[:, None], psi, reg=0.0, ridge=0.0)
        for xx, yy, pp in ((3e4 * x, y / 7e5, psi), (x, y, psi @ rotation)):
            other = pct_ci_test(xx, yy, z[:, None], pp, reg=0.0, ridge=0.0)
            assert float(other.stat) == pytest.approx(float(one.stat), rel=1e-8)
        for scale in (1e-5, 1e5):  # and to the scale of what is given
            other = pct_ci_test(x, y, scale * z[:, None], psi, reg=0.0, ridge=0.0)
            assert float(other.stat) == pytest.approx(float(one.stat), rel=1e-8)
        # Symmetric in the pair; jit and eager agree.
        assert float(pct_ci_test(y, x, z[:, None], psi).stat) == pytest.approx(
            float(jax.jit(pct_ci_test)(x, y, z[:, None], psi).stat), rel=1e-10
        )


def test_pvalues_are_uniform_under_independence():
    @jax.jit
    @jax.vmap
    def pvalue(key):
        k = jax.random.split(key, 3)
        psi = jnp.stack([jnp.ones(600), 3**0.5 * jax.random.uniform(k[0], (600,), minval=-1)], 1)
        x, y = (jax.random.normal(key, (600,)) for key in k[1:])
        return pct_ci_test(x, y, None, psi).pvalue

    p = np.asarray(pvalue(jax.random.split(jax.random.key(0), 1000)))
    assert stats.kstest(p, "uniform").pvalue > 0.01


def test_one_basis_function_is_a_robust_partial_correlation_test():
    x, y, z, _ = some_data()
    with jax.enable_x64(True):
        test = pct_ci_test(x, y, z[:, None], np.ones((len(x), 1)), ridge=0.0, reg=0.0)
        F = np.stack([np.ones_like(z), z], axis=1)
        r_x, r_y = (v - F @ np.linalg.lstsq(F, v, rcond=None)[0] for v in (x, y))
        v = r_x * r_y
        assert float(test.stat) == pytest.approx(len(x) * v.mean() ** 2 / v.var(ddof=1), rel=1e-9)
        assert test.df == 1


def cancellation(key, m=500):
    """Z drives Y with a sign that xi decides: no correlation on average."""
    k = jax.random.split(key, 3)
    xi = jax.random.uniform(k[0], (m, 1), minval=-1.0)
    z, e = (jax.random.laplace(key, (m,)) / jnp.sqrt(2.0) for key in k[1:])
    return xi, z, 0.4 * jnp.sqrt(3.0) * xi[:, 0] * z + e


def shared_parent(key, m=500):
    """Two effects of one cause, independent given it and xi."""
    k = jax.random.split(key, 4)
    xi = jax.random.uniform(k[0], (m, 1), minval=-1.0)
    z, e1, e2 = (jax.random.laplace(key, (m,)) / jnp.sqrt(2.0) for key in k[1:])
    moving = jnp.sqrt(3.0) * xi[:, 0]
    return xi, z, 0.8 * moving * z + e1, (0.7 + 0.4 * moving) * z + e2


def test_power_where_the_margin_cancels_and_level_with_moving_weights():
    index = multi_index(1, 3)

    @jax.jit
    @jax.vmap
    def both(key):
        xi, z, y = cancellation(key)
        power = pct_ci_test(z, y, None, pce_basis(xi, index, "legendre")).pvalue
        xi, z, x, w = shared_parent(key)
        level = pct_ci_test(x, w, z[:, None], pce_basis(xi, index, "legendre")).pvalue
        return power, level, z, y

    power, level, _, _ = map(np.asarray, both(jax.random.split(jax.random.key(1), 400)))
    assert np.mean(power < 0.05) >= 0.95
    assert 0.02 <= np.mean(level < 0.05) <= 0.08
    marginal = []
    for seed in range(60):
        _, z, y = cancellation(jax.random.key(seed))
        marginal.append(FisherZ(np.stack([z, y], axis=1))(0, 1) < 0.05)
    assert np.mean(marginal) < 0.4


def test_explained_variables_and_constants_give_no_evidence():
    x, y, z, xi = some_data()
    psi = legendre_basis(xi.astype(np.float32), 1)
    for a, b, given in ((z, y, z), (np.zeros_like(x), y, z), (2 * z, z, z)):
        test = pct_ci_test(*(v.astype(np.float32) for v in (a, b, given)), psi)
        assert float(test.stat) == 0 and float(test.pvalue) == 1
    grad = jax.grad(lambda v: pct_ci_test(v, y, z, psi).stat)(jnp.asarray(x, jnp.float32))
    assert bool(jnp.isfinite(grad).all()) and bool((grad != 0).any())


def test_duplicate_conditioning_columns_are_regularised():
    x, y, z, xi = some_data()
    with jax.enable_x64(True):
        psi = legendre_basis(xi, 1)
        one = pct_ci_test(x, y, z[:, None], psi)
        two = pct_ci_test(x, y, np.stack([z, z], axis=1), psi)
        assert float(two.stat) == pytest.approx(float(one.stat), rel=1e-5)
    two = pct_ci_test(*(np.float32(v) for v in (x, y, np.stack([z, z], 1))), np.float32(psi))
    assert float(two.stat) == pytest.approx(float(one.stat), rel=1e-2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x_b": np.ones(9)}, "x_b has shape"),
        ({"Z": np.ones((5, 1))}, "Z has shape"),
        ({"x_a": np.full(12, np.nan)}, "x_a has values that are not finite"),
        ({"Z": np.ones((12, 2))}, "bring at least 13 rows"),
        ({"ridge": -1.0}, "ridge"),
    ],
)
def test_bad_input_is_named(changes, message):
    r = np.random.default_rng(0)
    kwargs = {"x_a": r.normal(size=12), "x_b": r.normal(size=12), "Z": None}
    kwargs |= {"Psi": r.normal(size=(12, 4))} | changes
    with pytest.raises(ValueError, match=message):
        pct_ci_test(**kwargs)


def test_interaction_features_order_and_errors():
    X, psi = np.arange(6.0).reshape(3, 2), np.array([[1, 2], [1, 3], [1, 4]], float)
    F = interaction_features(X, psi, [1, 0], True)
    np.testing.assert_array_equal(F[1], [1, 3, 3, 9, 2, 6])
    assert interaction_features(X, psi, [], False).shape == (3, 0)
    for cols in ([2], [-1]):
        with pytest.raises(ValueError, match="cols"):
            interaction_features(X, psi, cols, False)
    with pytest.raises(ValueError, match="Psi"):
        interaction_features(X, psi[:2], [0], False)
