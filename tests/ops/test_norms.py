"""RMS norm against its formula, in the dtypes that it is used in."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from jaxlib_papers.ops.norms import rms_norm


def formula(x, scale, eps):
    x, scale = np.asarray(x, np.float64), np.asarray(scale, np.float64)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * scale


@pytest.mark.parametrize("shape", [(7,), (2, 7), (2, 3, 4, 7), (0, 7)])
def test_formula(shape):
    rng = np.random.default_rng(0)
    x, scale = jnp.asarray(rng.normal(size=shape), jnp.float32), jnp.arange(7.0)
    np.testing.assert_allclose(rms_norm(x, scale, 0.1), formula(x, scale, 0.1), rtol=1e-5)


def test_bfloat16_is_rounded_once():
    x = jnp.asarray(np.random.default_rng(1).normal(size=(3, 4096)), jnp.bfloat16)
    scale = jnp.ones(4096, jnp.bfloat16)
    y = rms_norm(x, scale)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(y, np.float64), formula(x, scale, 1e-6), rtol=2**-8)


def test_zero_and_huge_rows():
    value, grad = jax.value_and_grad(lambda x: jnp.sum(rms_norm(x, jnp.ones(4))))(jnp.zeros((2, 4)))
    assert float(value) == 0 and np.isfinite(grad).all()
    assert np.isfinite(rms_norm(jnp.full((1, 4), 1e15), jnp.ones(4))).all()


def test_gradient():
    with jax.enable_x64(True):
        x = jnp.asarray(np.random.default_rng(2).normal(size=(3, 5)))
        assert rms_norm(x, jnp.ones(5)).dtype == jnp.float64
        check_grads(jax.jit(rms_norm), (x, jnp.linspace(0.5, 2, 5)), 1, atol=1e-6, rtol=1e-6)


def test_wrong_scale():
    with pytest.raises(ValueError, match="scale has shape"):
        rms_norm(jnp.zeros((2, 3)), jnp.ones(2))
