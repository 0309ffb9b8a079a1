"""Small blocks on their own."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxlib_papers.nn.config import DecoderConfig
from jaxlib_papers.nn.layers import (
    RMSNorm,
    SwiGLU,
    dropout,
    normal_param,
    project,
    stack_modules,
)

CONFIG = DecoderConfig(
    vocab_size=7, num_layers=1, embed_dim=6, num_heads=2, num_kv_heads=1, head_dim=4, mlp_dim=8,
    init_std=0.5,
)  # fmt: skip


def test_project_contracts_what_is_left_of_the_stream():
    rng = np.random.default_rng(0)
    x, kernel, bias = (rng.normal(size=s).astype("f4") for s in ((2, 3, 6), (6, 2, 4), (2, 4)))
    out = project(jnp.asarray(x), nnx.Param(jnp.asarray(kernel)), nnx.Param(jnp.asarray(bias)))
    np.testing.assert_allclose(out, np.einsum("bsd,dhk->bshk", x, kernel) + bias, rtol=1e-5)
    back = rng.normal(size=(2, 4, 6)).astype("f4")
    got = project(out, nnx.Param(jnp.asarray(back)))
    np.testing.assert_allclose(got, np.einsum("bshk,hkd->bsd", out, back), rtol=1e-4, atol=1e-5)


def test_project_computes_in_the_dtype_of_the_stream():
    out = project(jnp.ones((1, 2, 6), jnp.bfloat16), nnx.Param(jnp.ones((6, 3))),
                  nnx.Param(jnp.ones(3)))  # fmt: skip
    assert out.dtype == jnp.bfloat16 and (out == 7).all()


def test_swiglu_formula():
    block = SwiGLU(CONFIG, 8, key=jax.random.key(0))
    x = np.random.default_rng(1).normal(size=(2, 3, 6))
    gate, up, down = (np.asarray(p[...], np.float64) for p in (block.gate, block.up, block.down))
    want = ((x @ gate) / (1 + np.exp(-x @ gate)) * (x @ up)) @ down
    np.testing.assert_allclose(block(jnp.asarray(x, jnp.float32)), want, rtol=1e-4, atol=1e-5)


def test_dropout_keeps_the_mean():
    x = jnp.ones((100, 100))
    y = dropout(x, 0.25, jax.random.key(0))
    np.testing.assert_allclose(np.unique(y), [0, 4 / 3], rtol=1e-6)
    assert float((y == 0).mean()) == pytest.approx(0.25, abs=0.02)
    assert dropout(x, 0.25, None) is x and dropout(x, 0.0, jax.random.key(0)) is x
    assert dropout(x.astype(jnp.bfloat16), 0.25, jax.random.key(0)).dtype == jnp.bfloat16


def test_stacked_modules_scan_like_a_loop():
    keys = jax.random.split(jax.random.key(0), 3)
    stacked = stack_modules(lambda key: SwiGLU(CONFIG, 8, key=key), keys)
    assert stacked.gate.shape == (3, 6, 8)
    assert stacked.down.get_metadata()["logical_axes"] == ("layers", "mlp", "embed")
    x = jnp.ones((1, 2, 6))
    scanned, _ = jax.lax.scan(lambda x, block: (x + block(x), None), x, stacked)
    for key in keys:
        x = x + SwiGLU(CONFIG, 8, key=key)(x)
    np.testing.assert_allclose(scanned, x, rtol=1e-5)


def test_initial_values():
    param = normal_param(jax.random.key(0), (40, 50), ("embed", None), 0.1, "bfloat16")
    assert param.dtype == jnp.bfloat16
    assert param.get_metadata()["logical_axes"] == ("embed", None)
    assert float(jnp.std(param[...].astype(jnp.float32))) == pytest.approx(0.1, rel=0.1)
    norm = RMSNorm(6, eps=1e-6)
    assert (norm.scale[...] == 1).all()
    assert norm.scale.get_metadata()["logical_axes"] == ("norm",)
