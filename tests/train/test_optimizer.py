"""AdamW equals optax's chain, decays what it should, and leaves everything alone when told."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxlib_papers.train.optimizer import (
    OptimizerConfig,
    decay_mask,
    global_norm,
    guard,
    make_optimizer,
    make_schedule,
)

AXES = {"kernel": ("embed", "mlp"), "table": ("vocab", "embed"), "bias": ("mlp",)}
CONFIG = OptimizerConfig(learning_rate=1e-2, warmup_steps=2, total_steps=20, clip_norm=0.5)


def trees(seed: int, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    shapes = {"kernel": (3, 4), "table": (5, 3), "bias": (4,)}
    return {name: jnp.asarray(rng.normal(size=s), dtype) for name, s in shapes.items()}


def optax_chain(config: OptimizerConfig, clip: bool = True):
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm) if clip else optax.identity(),
        optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps),
        optax.add_decayed_weights(config.weight_decay, mask=decay_mask(AXES)),
        optax.scale_by_learning_rate(make_schedule(config)),
    )


def test_ten_updates_equal_the_optax_chain():
    ours, theirs = make_optimizer(CONFIG, AXES), optax_chain(CONFIG)
    params = want = trees(0)
    state, reference = ours.init(params), theirs.init(params)
    for step in range(10):
        grads = jax.tree.map(lambda g: g * (0.05 if step % 2 else 3.0), trees(step + 1))  # noqa: B023
        updates, state = ours.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        with jax.numpy_dtype_promotion("standard"):
            updates, reference = theirs.update(grads, reference, want)
        want = optax.apply_updates(want, updates)
        assert float(state.learning_rate) == pytest.approx(float(make_schedule(CONFIG)(step)))
    for name in params:
        np.testing.assert_allclose(params[name], want[name], rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("optimizer", [make_optimizer(CONFIG, AXES), guard(optax_chain(CONFIG))])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_bad_gradient_changes_nothing(optimizer, poison):
    params = trees(0)
    _, state = optimizer.update(trees(1), optimizer.init(params), params)
    grads = jax.tree.map(lambda g: g.at[0].set(poison), trees(2))
    updates, after = optimizer.update(grads, state, params, good=jnp.array(False))
    assert all(not np.any(u) for u in jax.tree.leaves(updates))
    moments = [(x, y) for x, y in zip(*map(jax.tree.leaves, (state, after)), strict=True)]
    moments = [(x, y) for x, y in moments if x.ndim]
    assert len(moments) == 6
    for before, now in moments:
        np.testing.assert_array_equal(before, now)
    # The next good step is the one that would have come without the bad one.
    want, _ = optimizer.update(trees(3), state, params, good=jnp.array(True))
    got, _ = optimizer.update(trees(3), after, params, good=jnp.array(True))
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_a_bad_first_step_changes_nothing():
    optimizer, params = make_optimizer(CONFIG, AXES), trees(0)
    grads = jax.tree.map(lambda g: g * np.nan, trees(1))
    updates, state = optimizer.update(grads, optimizer.init(params), params, good=jnp.array(False))
    assert int(state.count) == 0
    for leaf in jax.tree.leaves((updates, state.mu, state.nu)):
        np.testing.assert_array_equal(leaf, 0.0)


def test_the_given_norm_is_used_for_clipping():
    optimizer, params = make_optimizer(CONFIG, AXES), trees(0)
    grads = trees(1)
    _, computed = optimizer.update(grads, optimizer.init(params), params)
    _, given = optimizer.update(grads, optimizer.init(params), params, grad_norm=global_norm(grads))
    _, doubled = optimizer.update(
        grads, optimizer.init(params), params, grad_norm=2.0 * global_norm(grads)
    )
    np.testing.assert_array_equal(computed.mu["kernel"], given.mu["kernel"])
    np.testing.assert_allclose(doubled.mu["kernel"], computed.mu["kernel"] / 2, rtol=1e-6)
    assert float(global_norm(computed.mu)) == pytest.approx(0.1 * 0.5, rel=1e-5)


def test_zero_gradients_stay_zero_and_decay_only_matrices():
    optimizer, params = make_optimizer(CONFIG, AXES), trees(0)
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = optimizer.update(zeros, optimizer.init(params), params)
    np.testing.assert_array_equal(updates["bias"], 0.0)
    np.testing.assert_array_equal(updates["table"], 0.0)
    rate = CONFIG.learning_rate / 2 * CONFIG.weight_decay
    np.testing.assert_allclose(updates["kernel"], -rate * params["kernel"], rtol=1e-6)


def test_mask_by_logical_axes():
    axes = {
        "embedding": ("vocab", "embed"),
        "head": ("embed", "vocab"),
        "query": ("layers", "embed", "heads", "head_dim"),
        "query_bias": ("layers", "heads", "head_dim"),
        "output": ("heads", "head_dim", "embed"),
        "scale": ("layers", "norm"),
        "head_scale": ("layers", "head_dim"),
        "router": ("layers", "embed", "experts"),
        "expert": ("layers", "experts", "embed", "expert_mlp"),
        "expert_bias": ("layers", "experts", "expert_mlp"),
        "unnamed": None,
    }
    assert {name for name, decays in decay_mask(axes).items() if decays} == {
        "head", "query", "output", "router", "expert",
    }  # fmt: skip


def test_bfloat16_parameters_keep_their_dtype():
    optimizer, params = make_optimizer(CONFIG, AXES), trees(0, jnp.bfloat16)
    updates, state = optimizer.update(trees(1, jnp.bfloat16), optimizer.init(params), params)
    assert {x.dtype for x in jax.tree.leaves((updates, state.mu))} == {jnp.dtype("bfloat16")}


def test_the_norm_of_bfloat16_is_taken_in_float32():
    assert float(global_norm({"a": jnp.full(4096, 0.1, jnp.bfloat16)})) == pytest.approx(6.4, 5e-3)
    assert float(global_norm({})) == 0.0


def test_axes_may_come_from_an_nnx_state():
    class Linear(nnx.Module):
        def __init__(self):
            self.kernel = nnx.Param(jnp.ones((2, 2)), logical_axes=("embed", "mlp"))

    _, params = nnx.split(Linear())
    plain = nnx.to_pure_dict(params)
    optimizer = make_optimizer(CONFIG, params)
    updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, plain), optimizer.init(plain), plain)
    assert np.all(updates["kernel"] < 0)


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"schedule": "cosin"}, "did you mean 'cosine'"),
        ({"b1": 1.0}, "b1=1.0"),
        ({"learning_rate": -1.0}, "learning_rate"),
        ({"clip_norm": float("nan")}, "clip_norm"),
        ({"eps": 0.0}, "eps"),
        ({"min_lr_ratio": 2.0}, "min_lr_ratio"),
        ({"warmup_steps": 2000}, "warmup_steps=2000"),
    ],
)
def test_bad_values_are_named(values, match):
    with pytest.raises(ValueError, match=match):
        OptimizerConfig(**values)
