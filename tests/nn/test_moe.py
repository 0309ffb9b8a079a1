"""The mixture layer against a sum over all experts, and what its router promises."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlib_papers.nn.config import DecoderConfig, MoEConfig
from jaxlib_papers.nn.moe import MoELayer, expert_mixture

WIDTH = 12
CONFIG = DecoderConfig(
    vocab_size=7,
    num_layers=1,
    embed_dim=WIDTH,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    init_std=0.5,
    moe=MoEConfig(5, 2, expert_dim=6),
)


def make(seed=0, **moe):
    """A layer with drawn parameters: no compilation."""
    config = dataclasses.replace(CONFIG, moe=dataclasses.replace(CONFIG.moe, **moe))
    abstract = jax.eval_shape(lambda: MoELayer(config, key=jax.random.key(0)))
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda a: jnp.asarray(0.5 * rng.normal(size=a.shape), a.dtype), abstract)


def stream(seed=0, shape=(2, 9, WIDTH), dtype="float32"):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def dense(layer, x):
    """Every expert on every token, weighted by the routing weights with zeros elsewhere."""
    moe = layer.config
    probs = jax.nn.softmax(jnp.einsum("bsd,de->bse", x, layer.router[...]))
    kth = jnp.sort(probs, axis=-1)[..., -moe.top_k][..., None]
    weights = jnp.where(probs >= kth, probs, jnp.zeros_like(probs))
    if moe.renormalize:
        weights = weights / weights.sum(-1, keepdims=True)
    both = jnp.einsum("bsd,edgh->bsegh", x, layer.gate_up[...])
    hidden = jax.nn.silu(both[..., 0, :]) * both[..., 1, :]
    y = jnp.einsum("bseh,ehd,bse->bsd", hidden, layer.down[...], weights)
    return y if layer.shared is None else y + layer.shared(x)


@functools.partial(jax.jit, static_argnums=0)
def value_and_grads(function, layer, x):
    probe = jnp.cos(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape)

    def loss(layer, x):
        y = function(layer, x)
        return jnp.sum(y * probe), y

    grads, y = jax.grad(loss, argnums=(0, 1), has_aux=True)(layer, x)
    return y, grads


def sparse(layer, x):
    return layer(x)[0]


def assert_trees_close(first, second, tolerance=1e-4):
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


MIXTURES = {
    "plain": {},
    "not renormalized": {"renormalize": False},
    "all experts": {"top_k": 5},
    "one expert": {"num_experts": 1, "top_k": 1},
    "shared expert": {"shared_expert_dim": 4},
    "ample capacity": {"capacity_factor": 5.0},
}


@pytest.mark.parametrize("name", sorted(MIXTURES))
def test_values_and_gradients_of_a_sum_over_experts(name):
    layer, x = make(**MIXTURES[name]), stream()
    assert_trees_close(value_and_grads(sparse, layer, x), value_and_grads(dense, layer, x))
    dropped = jax.jit(lambda m, x: m(x)[1].dropped_fraction)(layer, x)
    assert dropped is None if "capacity" not in name else float(dropped) == 0


@pytest.mark.parametrize("capacity_factor", (None, 1.0))
def test_unused_experts_get_exactly_no_gradient(capacity_factor):
    """C1: logits of experts 2-4 lie far below the others', so nobody chooses them."""
    layer = make(capacity_factor=capacity_factor)
    x = jnp.abs(stream(1)) + 0.1
    router = layer.router[...].at[:, 2:].set(-50.0)
    layer.router = layer.router.replace(router)
    _, (grads, dx) = value_and_grads(sparse, layer, x)
    for kernel in (grads.gate_up[...], grads.down[...]):
        assert (np.asarray(kernel[2:]) == 0.0).all()
        assert np.isfinite(kernel).all() and (np.abs(kernel[:2]).max((1, 2)) > 0).all()
    assert np.isfinite(dx).all()


def test_capacity_drops_the_last_tokens():
    """All 18 tokens choose experts 0 and 1, which have room for ceil(18 * 2 / 5) = 8 each."""
    layer, x = make(capacity_factor=1.0), jnp.abs(stream(2)) + 0.1
    layer.router = layer.router.replace(layer.router[...].at[:, 2:].set(-50.0))
    y, router = jax.jit(lambda m, x: m(x))(layer, x)
    flat = np.asarray(y).reshape(18, WIDTH)
    assert np.any(flat[:8], axis=1).all() and not np.any(flat[8:])
    np.testing.assert_allclose(router.dropped_fraction, 20 / 36, rtol=1e-6)
    ample = make(capacity_factor=5.0)
    ample.router = layer.router
    np.testing.assert_allclose(
        flat[:8], jax.jit(sparse)(ample, x).reshape(18, WIDTH)[:8], rtol=1e-4, atol=1e-5
    )
    # What was dropped has no gradient either.
    _, (_, dx) = value_and_grads(sparse, layer, x)
    assert not np.any(dx.reshape(18, WIDTH)[8:]) and np.isfinite(dx).all()


def test_indices_outside_the_experts_add_nothing():
    """What a device of an expert axis sees: most assignments belong to others."""
    layer, x = make(), stream(3).reshape(18, WIDTH)
    rng = np.random.default_rng(4)
    indices = np.argsort(rng.random((18, 10)), axis=1)[:, :2].astype(np.int32) - 3
    weights = jnp.asarray(rng.random((18, 2)), jnp.float32)
    kernels = layer.gate_up[...], layer.down[...]
    inside = (indices >= 0) & (indices < 5)
    assert 0 < inside.sum() < indices.size
    want = np.zeros((18, WIDTH))
    for t, k in zip(*np.nonzero(inside), strict=True):
        gate, up = (x[t] @ kernels[0][indices[t, k], :, i] for i in (0, 1))
        want[t] += weights[t, k] * ((jax.nn.silu(gate) * up) @ kernels[1][indices[t, k]])
    for factor in (None, 5.0):
        y, dropped = jax.jit(functools.partial(expert_mixture, capacity_factor=factor))(
            x, indices, weights, *kernels
        )
        np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-4)
        assert int(dropped) == 0
    _, dropped = jax.jit(functools.partial(expert_mixture, capacity_factor=0.1))(
        x, indices, weights, *kernels
    )
    used = len(np.unique(indices[inside]))
    assert int(dropped) == inside.sum() - used  # one row each


@pytest.mark.parametrize("capacity_factor", (None, 1.0))
def test_no_scatter_forward_or_backward(capacity_factor):
    layer = make(capacity_factor=capacity_factor, shared_expert_dim=4)
    step = value_and_grads.trace(sparse, layer, stream())
    assert "scatter" not in str(step.jaxpr)
    assert "scatter" not in step.lower().as_text()


def test_logits_are_logits():
    """C5: their softmax is the probabilities, and they are not probabilities themselves."""
    logits, probs, _ = jax.jit(lambda m, x: m(x)[1])(make(), stream())
    assert logits.shape == probs.shape == (2, 9, 5)
    np.testing.assert_allclose(jax.nn.softmax(logits), probs, rtol=1e-6)
    assert np.abs(logits.sum(-1) - 1).min() > 1e-3


def test_router_is_float32_whatever_the_layer_computes_in():
    layer, x = make(), stream(5, dtype="bfloat16")
    y, (logits, probs, _) = jax.jit(lambda m, x: m(x))(layer, x)
    assert y.dtype == jnp.bfloat16 and logits.dtype == probs.dtype == jnp.float32
    exact = np.asarray(x, np.float64) @ np.asarray(layer.router[...], np.float64)
    np.testing.assert_allclose(logits, exact, rtol=1e-5, atol=1e-5)
    narrow = dataclasses.replace(CONFIG, param_dtype="bfloat16", compute_dtype="bfloat16")
    abstract = jax.eval_shape(lambda: MoELayer(narrow, key=jax.random.key(0)))
    assert abstract.router.dtype == jnp.float32 and abstract.down.dtype == jnp.bfloat16


def chosen(probs, top_k):
    return np.sort(np.argsort(-np.asarray(probs), axis=1, kind="stable")[:, :top_k], axis=1)


def test_c4_experts_are_those_of_a_float64_router():
    """4096 tokens of width 576, 64 experts, top 8; bfloat16 operands would choose others."""
    config = dataclasses.replace(
        CONFIG, embed_dim=576, moe=MoEConfig(64, 8, expert_dim=1, router_std=0.04)
    )
    layer = jax.jit(lambda key: MoELayer(config, key=key))(jax.random.key(1))
    x = stream(6, (8, 512, 576))
    probs = jax.jit(lambda m, x: m(x)[1].probs)(layer, x).reshape(-1, 64)
    exact = np.asarray(x, np.float64).reshape(-1, 576) @ np.asarray(layer.router[...], np.float64)
    want = chosen(exact, 8)
    np.testing.assert_array_equal(chosen(probs, 8), want)
    few = layer(x[:1, :16])[1].probs.reshape(-1, 64)  # not jitted
    np.testing.assert_array_equal(chosen(few, 8), want[:16])
    half = jnp.dot(
        x.reshape(-1, 576).astype(jnp.bfloat16), layer.router[...].astype(jnp.bfloat16)
    ).astype(jnp.float32)
    assert (chosen(half, 8) != want).any(1).mean() > 0.01


def test_no_token_at_all():
    for factor in (None, 1.0):
        layer = make(capacity_factor=factor)
        y, router = jax.jit(lambda m, x: m(x))(layer, stream(shape=(0, 9, WIDTH)))
        assert y.shape == (0, 9, WIDTH) and router.logits.shape == (0, 9, 5)
        assert factor is None or float(router.dropped_fraction) == 0


def test_a_dense_configuration_has_no_mixture():
    config = dataclasses.replace(CONFIG, moe=None, mlp_dim=4)
    with pytest.raises(ValueError, match="config.moe is None"):
        MoELayer(config, key=jax.random.key(0))
