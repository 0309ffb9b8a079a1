"""Splitting, merging, initialising."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxlib_papers.train.mesh import make_mesh
from jaxlib_papers.train.state import (
    TrainState,
    abstract_model,
    abstract_state,
    init_state,
    merge_model,
    split_model,
)
from tests.train.toy import batch, model_fn


def test_split_and_merge_give_the_same_function():
    model = model_fn(jax.random.key(0))
    graphdef, params, rest = split_model(model)
    assert rest == {} and isinstance(params, dict) and isinstance(params["up"], jax.Array)
    tokens = batch()["tokens"]
    np.testing.assert_array_equal(merge_model(graphdef, params)(tokens), model(tokens))


def test_a_filter_leaves_the_rest_untrained():
    model = model_fn(jax.random.key(0))
    graphdef, params, rest = split_model(model, lambda path, _: path[0] in ("up", "down"))
    assert sorted(params) == ["down", "up"] and sorted(rest) == ["bias", "embed", "head"]
    tokens = batch()["tokens"]
    np.testing.assert_array_equal(merge_model(graphdef, params, rest)(tokens), model(tokens))


def test_an_empty_filter_is_an_error():
    with pytest.raises(ValueError, match="selects no variable of ToyLM"):
        split_model(model_fn(jax.random.key(0)), lambda path, _: False)


def test_modules_with_rng_state_are_refused():
    class Stochastic(nnx.Module):
        def __init__(self):
            self.kernel = nnx.Param(jnp.ones(2), logical_axes=("norm",))
            self.dropout = nnx.Dropout(0.1, rngs=nnx.Rngs(0))

    with pytest.raises(ValueError, match="RNG state at .*dropout.*key="):
        split_model(Stochastic())


def test_the_abstract_model_allocates_nothing_and_knows_axes():
    spec = abstract_model(model_fn)
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(spec.params))
    assert spec.axes["up"] == ("embed", "mlp")
    assert spec.graphdef == split_model(model_fn(jax.random.key(1)))[0]


def test_init_is_the_same_with_and_without_a_mesh_and_matches_its_abstract_form():
    optimizer = optax.adam(1e-3)
    mesh = make_mesh("auto", jax.devices()[:1])
    plain = init_state(model_fn, optimizer, jax.random.key(3))
    meshed = init_state(model_fn, optimizer, jax.random.key(3), mesh=mesh)
    target = abstract_state(model_fn, optimizer, mesh=mesh)
    assert jax.tree.structure(plain) == jax.tree.structure(meshed) == jax.tree.structure(target)
    for a, b, t in zip(*map(jax.tree.leaves, (plain, meshed, target)), strict=True):
        np.testing.assert_array_equal(a, b)
        assert (b.shape, b.dtype, b.sharding) == (t.shape, t.dtype, t.sharding)
    eager = split_model(model_fn(jax.random.key(3)))[1]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), plain.params, eager)


def test_the_state_holds_no_keys_and_no_buffer_twice():
    state = init_state(model_fn, optax.adam(1e-3), jax.random.key(0))
    leaves = jax.tree.leaves(state)
    assert not any(jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in leaves)
    pointers = [x.unsafe_buffer_pointer() for x in leaves]
    assert len(set(pointers)) == len(pointers)


def test_create_takes_nnx_states():
    _, params = nnx.split(model_fn(jax.random.key(0)))
    state = TrainState.create(params, optax.sgd(1.0))
    assert isinstance(state.params, dict) and isinstance(state.params["up"], jax.Array)
