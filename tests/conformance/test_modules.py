"""One sweep over every Flax class: a module is a value, whatever paper it comes from."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.conformance.cases import CASES, Case
from tests.conformance.discovery import module_classes

DTYPES = ("float32", "bfloat16")
# Rounding differs between fused and unfused code: by some last places of the compute dtype.
TOLERANCE = {"float32": 2e-5, "bfloat16": 4e-2}


def a_key(seed: int) -> jax.Array:
    """Compiles in a tenth of the default generator's time; which numbers come does not matter."""
    return jax.random.key(seed, impl="unsafe_rbg")


def params_of(module: nnx.Module):
    return nnx.split(module, nnx.Param, ...)


def float_leaves(tree) -> list[jax.Array]:
    return [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]


def size_of_output(case: Case, module: nnx.Module, key: jax.Array, dtype: str) -> jax.Array:
    """A scalar that every floating output moves, by a different amount at each place."""
    total = jnp.float32(0)
    for index, leaf in enumerate(float_leaves(case.call(module, key, dtype))):
        leaf = leaf.astype(jnp.float32)
        weight = jnp.cos(jnp.arange(leaf.size, dtype=jnp.float32) + index).reshape(leaf.shape)
        total += jnp.sum(weight * jnp.tanh(leaf))
    return total


def problems_of_structure(module: nnx.Module) -> list[str]:
    """What keeps a module from being a plain tree of annotated arrays."""
    found = []
    _, state = nnx.split(module)
    for path, variable in nnx.to_flat_state(state):
        name = ".".join(map(str, path))
        value = variable[...]
        if isinstance(variable, nnx.RngState) or jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            found.append(f"{name}: random state")
        if value.dtype == jnp.uint32:
            found.append(f"{name}: a uint32 leaf, as an old-style key is")
        if isinstance(variable, nnx.Param):
            axes = variable.get_metadata().get("logical_axes")
            if axes is None or len(axes) != value.ndim:
                found.append(f"{name}: logical_axes={axes} for shape {value.shape}")
    return found


def check_graph_modes(module: nnx.Module) -> None:
    """Splits and merges in both modes; a shared variable raises in tree mode."""
    for graph in (True, False):
        with nnx.set_graph_mode(graph):
            graphdef, state = nnx.split(module)
            again = nnx.merge(graphdef, state)
        old, new = jax.tree.leaves(module), jax.tree.leaves(again)
        assert len(old) == len(new) and all(map(np.array_equal, old, new))


@pytest.fixture(scope="module")
def built():
    """Modules by (name, dtype); construction is the slow part of each test."""
    cache = {}

    def build(name: str, dtype: str) -> nnx.Module:
        if (name, dtype) not in cache:
            make = jax.jit(CASES[name].make, static_argnums=1)  # one compilation, not hundreds
            cache[name, dtype] = make(a_key(0), dtype)
        return cache[name, dtype]

    return build


def test_every_module_class_has_a_case():
    missing = set(module_classes()) - {case.cls for case in CASES.values()}
    assert not missing, "add the class to cases.py"


@pytest.mark.parametrize("name", sorted(CASES))
def test_structure(name, built):
    module = built(name, "float32")
    assert type(module) is CASES[name].cls
    assert problems_of_structure(module) == []
    check_graph_modes(module)


@pytest.mark.parametrize("name", sorted(CASES))
def test_construction_depends_on_the_key_and_on_nothing_else(name, built):
    module, case = built(name, "float32"), CASES[name]
    make = jax.jit(case.make, static_argnums=1)
    again, other = (make(a_key(seed), "float32") for seed in (0, 1))
    leaves = [jax.tree.leaves(m) for m in (module, again, other)]
    assert all(map(np.array_equal, leaves[0], leaves[1]))
    # Scales and biases start constant; whatever was drawn was drawn from the key.
    drawn = [i for i, leaf in enumerate(leaves[0]) if float(np.ptp(leaf)) > 0]
    assert not any(np.array_equal(leaves[0][i], leaves[2][i]) for i in drawn)
    abstract = jax.eval_shape(lambda key: case.make(key, "float32"), a_key(0))
    for real, shape in zip(leaves[0], jax.tree.leaves(abstract), strict=True):
        assert (real.shape, real.dtype) == (shape.shape, shape.dtype)


@pytest.mark.parametrize(
    ("name", "dtype"), [(n, d) for n in sorted(CASES) for d in CASES[n].eager_dtypes]
)
def test_jit_equals_eager_and_the_call_leaves_no_trace(name, dtype, built):
    module, case, key = built(name, dtype), CASES[name], a_key(1)
    before = [np.asarray(leaf) for leaf in jax.tree.leaves(module)]
    eager = case.call(module, key, dtype)
    jitted = jax.jit(case.call, static_argnums=2)(module, key, dtype)
    assert jax.tree.structure(eager) == jax.tree.structure(jitted)
    assert jax.tree.leaves(eager), "the case returns no arrays"
    for one, other in zip(jax.tree.leaves(eager), jax.tree.leaves(jitted), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        one, other = (np.asarray(x.astype(jnp.float32)) for x in (one, other))
        assert np.isfinite(one).all()
        scale = max(1.0, np.abs(one).max(initial=0.0))
        np.testing.assert_allclose(other, one, rtol=0, atol=TOLERANCE[dtype] * scale)
    assert all(map(np.array_equal, before, jax.tree.leaves(module)))


def loss_of_params(case: Case, module: nnx.Module, dtype: str):
    graphdef, params, rest = params_of(module)

    def loss(params):
        return size_of_output(case, nnx.merge(graphdef, params, rest), a_key(1), dtype)

    return loss, params


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", sorted(CASES))
def test_gradients_are_finite_and_reach_every_parameter(name, dtype, built):
    case = CASES[name]
    loss, params = loss_of_params(case, built(name, dtype), dtype)
    value, gradient = jax.jit(jax.value_and_grad(loss))(params)
    assert np.isfinite(float(value))
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
        where = jax.tree_util.keystr(path)
        assert bool(jnp.isfinite(leaf).all()), f"{where} is not finite"
        if not any(part in where for part in case.without_gradient):
            assert bool((leaf != 0).any()), f"{where} gets no gradient"


@pytest.mark.parametrize("name", sorted(CASES))
def test_both_graph_modes_make_the_same_program(name, built):
    programs = []
    for graph in (True, False):
        with nnx.set_graph_mode(graph):
            loss, params = loss_of_params(CASES[name], built(name, "float32"), "float32")
            jaxpr = jax.make_jaxpr(jax.value_and_grad(loss))(params)
        programs.append(re.sub(r"0x[0-9a-f]+", "", str(jaxpr)))
    assert programs[0] == programs[1]


class TestTheChecksThemselves:
    """Modules that break the rules, each seen by the check that is there for it."""

    class Plain(nnx.Module):
        def __init__(self, axes=("embed",)):
            self.scale = nnx.Param(jnp.ones(3), logical_axes=axes)

    def test_good_module(self):
        assert problems_of_structure(self.Plain()) == []
        check_graph_modes(self.Plain())

    @pytest.mark.parametrize("axes", [(), ("embed", "mlp"), None])
    def test_missing_axes(self, axes):
        assert "logical_axes" in problems_of_structure(self.Plain(axes))[0]

    def test_random_state(self):
        module = self.Plain()
        module.rngs = nnx.Rngs(0)
        assert any("random state" in problem for problem in problems_of_structure(module))

    def test_sharing(self):
        module = self.Plain()
        module.other = module.scale
        with pytest.raises(ValueError):
            check_graph_modes(module)
