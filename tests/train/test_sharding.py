"""From logical axes to specs: the table, its errors, and the state that follows it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxlib_papers.nn.partitioning import (
    DEFAULT_RULES,
    ShardingRules,
    constrain,
    current_sharding,
    logical_to_spec,
    use_sharding,
)
from jaxlib_papers.train.mesh import abstract_mesh, make_mesh
from jaxlib_papers.train.sharding import describe_shardings, format_rows, tree_specs
from jaxlib_papers.train.state import abstract_model
from tests.train.toy import HIDDEN, VOCAB, WIDTH, model_fn

MESH = abstract_mesh("data=2,fsdp=4,tensor=2")


def spec(axes, shape, rules=DEFAULT_RULES):
    return logical_to_spec(axes, shape, rules, MESH, name="layers.query")


def test_specs():
    assert spec(("layers", "embed", "heads", "head_dim"), (3, 8, 4, 5)) == P(
        None, "fsdp", "tensor", None
    )
    # Axes of size 1 are left out; a dimension over two axes keeps both.
    assert spec(("experts", "embed"), (3, 8)) == P(None, "fsdp")
    assert spec(("batch", None), (16, 3)) == P(("data", "fsdp"), None)


def test_kv_heads_that_do_not_divide_are_replicated_and_nothing_else_is():
    assert spec(("embed", "kv_heads", "head_dim"), (8, 3, 5)) == P("fsdp", None, None)
    with pytest.raises(
        ValueError, match=r"layers.query: dimension 1 \('heads'\) of size 3.*tensor"
    ):
        spec(("embed", "heads", "head_dim"), (8, 3, 5))
    allowed = DEFAULT_RULES.override(replicate_if_indivisible=["heads"])
    assert spec(("embed", "heads", "head_dim"), (8, 3, 5), allowed) == P("fsdp", None, None)


def test_two_dimensions_on_one_mesh_axis_are_an_error_even_where_its_size_is_one():
    with pytest.raises(ValueError, match=r"layers.query: dimensions 0 .* 1 .*claim.*'tensor'"):
        spec(("heads", "mlp"), (8, 8))
    one = make_mesh("auto", jax.devices()[:1])
    with pytest.raises(ValueError, match="claim"):
        logical_to_spec(("heads", "mlp"), (8, 8), DEFAULT_RULES, one)


def test_wrong_ranks_and_names_are_errors():
    with pytest.raises(ValueError, match="layers.query: 1 logical axes"):
        spec(("embed",), (8, 8))
    with pytest.raises(ValueError, match="'lora' is not in the sharding rules"):
        spec(("embed", "lora"), (8, 8))
    assert spec(("embed", "lora"), (8, 8), DEFAULT_RULES.override(lora=None)) == P("fsdp", None)


def test_rules_are_checked():
    with pytest.raises(ValueError, match="more than once"):
        ShardingRules((("a", None), ("a", "data")))
    with pytest.raises(ValueError, match="mesh axis 'model'"):
        DEFAULT_RULES.override(vocab="model")


def test_constrain_is_the_identity_without_a_context_and_on_one_device():
    x = jnp.ones((4, 3))
    assert constrain(x, ("batch", "embed_act")) is x
    with use_sharding(make_mesh("auto", jax.devices()[:1]), DEFAULT_RULES):
        assert constrain(x, ("batch", "embed_act")) is x
        with pytest.raises(ValueError, match="rank 2"):
            constrain(x, ("batch",))
        with use_sharding(None, DEFAULT_RULES):
            assert current_sharding() is None
    assert current_sharding() is None


def test_optimizer_moments_lie_beside_their_parameters():
    model = abstract_model(model_fn)
    tree = jax.eval_shape(optax.chain(optax.clip(1.0), optax.adamw(1e-3)).init, model.params)
    specs = tree_specs(tree, model.axes, MESH)
    adam = specs[1][0]
    assert adam.mu["up"] == adam.nu["up"] == P("fsdp", "tensor")
    assert adam.mu["head"] == P("fsdp", "tensor")
    assert adam.count == P()


def test_moments_of_another_shape_are_replicated():
    model = abstract_model(model_fn)
    tree = jax.eval_shape(optax.scale_by_factored_rms(min_dim_size_to_factor=2).init, model.params)
    specs = tree_specs(tree, model.axes, MESH, like=model.params)
    assert specs.v_row["up"] == P()
    assert specs.v["bias"] == P(None)


def test_the_table_counts_bytes_per_device():
    model = abstract_model(model_fn)
    rows = {row.name: row for row in describe_shardings(model.params, model.axes, MESH)}
    assert rows["up"].axes == ("embed", "mlp")
    assert rows["up"].spec == P("fsdp", "tensor")
    assert rows["up"].bytes_per_device == WIDTH * HIDDEN * 4 // 8
    assert rows["embed"].bytes_per_device == VOCAB * WIDTH * 4 // 8
    assert rows["bias"].bytes_per_device == WIDTH * 4
    text = format_rows(rows.values())
    assert "up" in text and "fsdp tensor" in text
    total = sum(row.bytes_per_device for row in rows.values())
    assert text.splitlines()[-1].split() == ["total", str(total)]


def test_a_parameter_that_does_not_fit_is_named():
    model = abstract_model(model_fn)
    with pytest.raises(ValueError, match=r"down: dimension 0 \('mlp'\) of size 12"):
        describe_shardings(model.params, model.axes, abstract_mesh("tensor=8"))


def test_a_parameter_without_axes_is_named():
    class Bare(nnx.Module):
        def __init__(self, key):
            self.inner = nnx.List([nnx.Param(jax.random.normal(key, (2,)))])

    with pytest.raises(ValueError, match="parameter inner.0 carries no logical axes"):
        abstract_model(Bare)


def test_names_do_not_depend_on_the_container():
    model = abstract_model(model_fn)
    names = [row.name for row in describe_shardings(model.params, model.axes, MESH)]
    assert names == sorted(names) and all(isinstance(name, str) for name in names)
    tree = {"list": [np.zeros(2)], "state": optax.EmptyState(), "adam": optax.ScaleState()}
    assert [row.name for row in describe_shardings(tree, {}, MESH)] == ["list.0"]
