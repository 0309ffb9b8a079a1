"""Divergences: golden table, accuracy where the textbook form fails, every degenerate point."""

from __future__ import annotations

import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxlib_papers.ops import divergence

VECTORS = np.load(Path(__file__).parents[1] / "vectors" / "expert_divergence.npz")
LN2 = math.log(2)

# Jitted once for the whole file: one compilation a shape instead of one an operation.
js_divergence = jax.jit(divergence.js_divergence, static_argnames="axis")
kl_divergence = jax.jit(divergence.kl_divergence, static_argnames=("axis", "floor"))
entropy = jax.jit(divergence.entropy, static_argnames="axis")
entropy_decomposition = jax.jit(divergence.entropy_decomposition, static_argnums=2)
DIVERGENCES = {"js": js_divergence, "kl": kl_divergence}
GRADIENTS = {k: jax.jit(jax.value_and_grad(f, argnums=(0, 1))) for k, f in DIVERGENCES.items()}
OF_LOGITS = {
    k: lambda z, f=f: f(jax.nn.softmax(z[0]), jax.nn.softmax(z[1])) for k, f in DIVERGENCES.items()
}


def softmax(z):
    z = np.exp(z - z.max(-1, keepdims=True))
    return z / z.sum(-1, keepdims=True)


def naive_js(p, q):
    m = (p + q) / 2
    with np.errstate(divide="ignore", invalid="ignore"):
        parts = np.where(p > 0, p * np.log(p / m), 0) + np.where(q > 0, q * np.log(q / m), 0)
    return parts.sum(-1) / 2


def test_golden_table():
    p, q, expected = (VECTORS[f"jsd/{k}"] for k in ("p", "q", "value"))
    with jax.enable_x64(True):
        value = js_divergence(p, q)
        assert value.dtype == jnp.float64
        np.testing.assert_allclose(value, expected, rtol=1e-9, atol=1e-18)
    # Rounding p and q to float32 moves the nearly equal row itself: hence the absolute tolerance.
    np.testing.assert_allclose(
        js_divergence(p.astype(np.float32), q.astype(np.float32)), expected, rtol=2e-5, atol=1e-12
    )


@pytest.mark.parametrize(("p", "expected"), [((1, 0), LN2), ((0.9, 0.1), 0.3680642)])
def test_values_of_the_paper_sheet(p, expected):
    value = js_divergence(np.array(p, np.float32), np.array(p[::-1], np.float32))
    assert float(value) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("scale", "bound"), [(1e-1, 4e-6), (1e-2, 3e-5), (1e-3, 2e-4)])
def test_float32_accuracy_on_nearly_equal_distributions(scale, bound):
    z = (scale * np.random.default_rng(1).normal(size=(2, 500, 8))).astype(np.float32)
    value = np.asarray(js_divergence(*softmax(z)), np.float64)
    with jax.enable_x64(True):
        exact = np.asarray(js_divergence(*softmax(z.astype(np.float64))))
    assert (value >= 0).all()
    assert np.max(np.abs(value - exact) / exact) < bound
    naive = naive_js(*softmax(z))
    assert np.max(np.abs(naive - exact) / exact) > 10 * bound  # why the safe form is needed


@given(st.integers(0, 10**6), st.floats(1e-2, 20.0))
def test_js_properties(seed, scale):
    with jax.enable_x64(True):
        p, q = softmax(scale * np.random.default_rng(seed).normal(size=(2, 6, 5)))
        value = np.asarray(js_divergence(p, q))
        assert (value >= 0).all() and (value <= LN2 + 1e-15).all()
        np.testing.assert_array_equal(value, js_divergence(q, p))
        np.testing.assert_allclose(value, naive_js(p, q), rtol=1e-8, atol=1e-14)
        m = (p + q) / 2
        by_kl = (kl_divergence(p, m) + kl_divergence(q, m)) / 2
        np.testing.assert_allclose(value, by_kl, rtol=1e-9, atol=1e-10)
        by_entropy = entropy(m) - (entropy(p) + entropy(q)) / 2
        np.testing.assert_allclose(value, by_entropy, rtol=1e-7, atol=1e-14)


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("scale", [3.0, 0.3, 1e-2])
def test_gradients_against_finite_differences(name, scale):
    loss = OF_LOGITS[name]
    rng = np.random.default_rng(2)
    with jax.enable_x64(True):
        z = scale * rng.normal(size=(2, 6))
        grad = jax.jit(jax.grad(loss))(z)
        forward = jax.jit(jax.jacfwd(loss))(z)  # both modes of differentiation
        step = 1e-5
        steps = step * np.eye(z.size).reshape(-1, *z.shape)
        numeric = jax.jit(jax.vmap(lambda d: loss(z + d) - loss(z - d)))(steps) / (2 * step)
        np.testing.assert_allclose(grad.ravel(), numeric, rtol=1e-4, atol=1e-9)
        np.testing.assert_allclose(grad, forward, rtol=1e-12)


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize(
    ("p", "q"),
    [
        ((1.0, 0, 0), (0, 1.0, 0)),  # disjoint
        ((1.0, 0, 0), (1.0, 0, 0)),  # equal, with zeros
        ((0.5, 0.5, 0), (0, 0.5, 0.5)),
        ((0, 0, 0), (0, 0, 0)),  # zero-filled rows
        ((0, 0, 0), (0.2, 0.3, 0.5)),
        ((1e-38, 1, 0), (1, 1e-45, 1e-30)),  # next to the bottom of float32
        ((1e-13, 1, 0), (0, 1, 1e-13)),  # below the floor of KL
    ],
)
def test_finite_at_degenerate_points_c3(name, p, q):
    p, q = np.array(p, np.float32), np.array(q, np.float32)
    value, grads = GRADIENTS[name](p, q)
    assert np.isfinite(value) and value >= 0
    assert all(np.isfinite(g).all() and np.abs(g).max() < 1e13 for g in grads)
    if (p == q).all():
        assert value == 0
        assert not any(g.any() for g in grads)


def test_disjoint_values():
    p, q = np.eye(2, dtype=np.float32)
    assert float(js_divergence(p, q)) == pytest.approx(LN2, rel=1e-7)
    assert float(kl_divergence(p, q)) == pytest.approx(math.log(1e12), rel=1e-6)
    assert float(kl_divergence(p, q, floor=1e-3)) == pytest.approx(math.log(1e3), rel=1e-2)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_huge_logits_c3(name):
    loss = jax.jit(jax.value_and_grad(OF_LOGITS[name]))
    z = np.array([[1e4, -1e4, 0, 0], [-1e4, 1e4, 0, 0]], np.float32)
    for pair in (z, z[[0, 0]], z * np.float32([[1], [0]])):
        value, grad = loss(pair)
        assert np.isfinite(value)
        assert np.isfinite(grad).all()


def test_rounding_is_not_a_difference():
    p = softmax(np.random.default_rng(3).normal(size=(64, 8)).astype(np.float32))
    q = (p + p + p) / np.float32(3)  # the same rows, rounded elsewhere
    assert (p != q).any()
    loss = jax.value_and_grad(lambda p: jnp.sum(jnp.log(js_divergence(p, q) + 1e-8)))
    value, grad = jax.jit(loss)(p)
    assert value == pytest.approx(64 * math.log(1e-8), rel=1e-6)
    assert not grad.any()


def test_entropy():
    assert float(entropy(np.full(8, 0.125, np.float32))) == pytest.approx(math.log(8))
    value, grad = jax.jit(jax.value_and_grad(entropy))(np.float32([1, 0]))
    assert value == 0
    assert np.isfinite(grad).all()
    np.testing.assert_allclose(entropy(np.full((2, 3), 0.5, np.float32), axis=0), [LN2] * 3)


def test_axis_and_broadcasting():
    p, q = softmax(np.random.default_rng(4).normal(size=(2, 3, 5)).astype(np.float32))
    expected = np.asarray(js_divergence(p, q))
    np.testing.assert_allclose(js_divergence(p.T, q.T, axis=0), expected, rtol=1e-6)
    np.testing.assert_allclose(js_divergence(p[:, None], q[0])[:, 0], js_divergence(p, q[:1]))
    np.testing.assert_allclose(jax.vmap(js_divergence)(p, q), expected, rtol=1e-6)
    with pytest.raises(ValueError, match=r"p has shape \(3, 5\) and q \(4, 5\)"):
        js_divergence(p, np.ones((4, 5), np.float32))


@given(st.integers(0, 10**6), st.sampled_from([1e-3, 0.3, 4.0]))
def test_decomposition_properties(seed, scale):
    rng = np.random.default_rng(seed)
    with jax.enable_x64(True):
        rows = softmax(scale * rng.normal(size=(9, 5)))
        ids = rng.integers(-1, 4, 9)
        total, inter, intra = (float(x) for x in entropy_decomposition(rows, ids, 4))
        assert min(total, inter, intra) >= 0
        assert total == pytest.approx(inter + intra, abs=1e-12)
        assert total <= math.log(5) + 1e-12
        kept = rows[ids >= 0]
        if len(kept):
            by_entropy = entropy(kept.mean(0)) - entropy(kept).mean()
            assert total == pytest.approx(float(by_entropy), abs=1e-12)


def test_decomposition_degenerate():
    loss = jax.jit(jax.value_and_grad(lambda rows, ids: sum(entropy_decomposition(rows, ids, 3))))
    one_hot = np.eye(3, dtype=np.float32)
    for ids in ([0, 0, 0], [0, 1, 2], [-1, -1, -1]):
        value, grad = loss(one_hot, np.array(ids))
        assert np.isfinite(value)
        assert np.isfinite(grad).all()
    assert [float(x) for x in entropy_decomposition(one_hot, np.full(3, -1), 3)] == [0, 0, 0]
    rows = np.repeat(softmax(np.arange(5, dtype=np.float32))[None], 6, 0)
    assert [float(x) for x in entropy_decomposition(rows, np.arange(6) % 2, 2)] == [0, 0, 0]
