"""The gated activation: value, gradient, dtypes, and what it keeps for the backward pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from jaxlib_papers.ops.activations import packed_swiglu, swiglu


def plain(gate, up):
    return gate / (1 + jnp.exp(-gate)) * up


def test_known_values():
    gate = jnp.array([0.0, 1.0, -1.0, 50.0, -50.0])
    expected = [0.0, 2 * 0.7310585786, 3 * -0.2689414214, 4 * 50.0, 0.0]
    up = jnp.arange(1.0, 6.0)
    np.testing.assert_allclose(swiglu(gate, up), expected, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("shape", [(7,), (2, 3, 5), (0, 4)])
def test_value_and_gradient_are_those_of_the_plain_form(shape):
    keys = jax.random.split(jax.random.key(0), 3)
    gate, up, cotangent = (3 * jax.random.normal(key, shape) for key in keys)
    ours, pullback = jax.vjp(swiglu, gate, up)
    theirs, plain_pullback = jax.vjp(plain, gate, up)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    for a, b in zip(pullback(cotangent), plain_pullback(cotangent), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_gradient_against_finite_differences_in_float64():
    with jax.enable_x64(True):
        rng = np.random.default_rng(1)
        gate, up = (jnp.asarray(rng.normal(size=6) * 2) for _ in range(2))
        check_grads(swiglu, (gate, up), order=1, modes=["rev"], rtol=1e-7)


def test_nothing_overflows():
    gate = jnp.array([-1e38, 1e4, -1e4, 0.0])
    value, gradient = jax.vjp(lambda g: swiglu(g, jnp.ones_like(g)), gate)
    assert jnp.isfinite(value).all()
    (slope,) = gradient(jnp.ones(4))
    np.testing.assert_allclose(slope, [0.0, 1.0, 0.0, 0.5], atol=1e-6)


def test_bfloat16_is_rounded_once():
    keys = jax.random.split(jax.random.key(2), 2)
    gate, up = (jax.random.normal(key, (64,)).astype("bfloat16") for key in keys)
    ours = swiglu(gate, up)
    assert ours.dtype == jnp.bfloat16
    exact = plain(gate.astype("float32"), up.astype("float32"))
    np.testing.assert_array_equal(ours, exact.astype("bfloat16"))


def test_only_the_arguments_are_kept():
    gate = up = jnp.ones((4, 8))
    _, pullback = jax.vjp(swiglu, gate, up)
    kept = [leaf for leaf in jax.tree.leaves(pullback) if getattr(leaf, "size", 0) >= gate.size]
    assert len(kept) == 2


def test_other_shape():
    with pytest.raises(ValueError, match="up"):
        swiglu(jnp.ones(3), jnp.ones(4))


@pytest.mark.parametrize("shape", [(6,), (3, 10), (2, 3, 4), (0, 2)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_is_that_of_the_halves(shape, dtype):
    hidden = (2 * jax.random.normal(jax.random.key(3), shape)).astype(dtype)

    def halves(hidden):
        return swiglu(*jnp.split(hidden, 2, axis=-1))

    ours, pullback = jax.vjp(packed_swiglu, hidden)
    theirs, plain_pullback = jax.vjp(halves, hidden)
    np.testing.assert_array_equal(ours, theirs)
    cotangent = jax.random.normal(jax.random.key(4), ours.shape).astype(dtype)
    np.testing.assert_array_equal(pullback(cotangent)[0], plain_pullback(cotangent)[0])


def test_packed_odd_axis():
    with pytest.raises(ValueError, match="hidden"):
        packed_swiglu(jnp.ones((2, 3)))
