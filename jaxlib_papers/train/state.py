"""The train state: plain trees of arrays that live sharded from their first moment.

A model is used in its split form: a static `graphdef` (structure, configuration, logical axes) and
two nested dicts of arrays, `params` (what trains) and `rest` (what doesn't: frozen parameters,
buffers). So the optimizer and the checkpointer see plain trees, each call of the step costs the
dispatch of a plain tree, and a subset (LoRA factors, a router) trains by a filter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

from jaxlib_papers.nn.partitioning import DEFAULT_RULES, ShardingRules
from jaxlib_papers.train.sharding import model_axes, tree_shardings

__all__ = [
    "ModelSpec",
    "TrainState",
    "abstract_model",
    "abstract_state",
    "init_state",
    "merge_model",
    "split_model",
    "state_shardings",
]

PyTree = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that a step reads and writes.

    Attributes:
      step: int32 scalar, number of steps taken, skipped ones included. All randomness of a step is
        derived from it, so there is no key in the state.
      params: Nested dict of the arrays that train.
      opt_state: State of the optimizer.
      rest: Nested dict of the model's other arrays (empty when everything trains).
      skipped: int32 scalar, steps whose loss or gradient was not finite, since the start.
      skipped_in_a_row: int32 scalar, such steps since the last good one.
    """

    step: jax.Array
    params: PyTree
    opt_state: PyTree
    rest: PyTree
    skipped: jax.Array
    skipped_in_a_row: jax.Array

    @classmethod
    def create(
        cls, params: PyTree, optimizer: optax.GradientTransformation, rest: PyTree | None = None
    ) -> TrainState:
        """Returns the state at step 0.

        Args:
          params: Nested dict of arrays, or an `nnx.State` of them.
          optimizer: Its `init` makes the optimizer state.
          rest: As `params`, for what does not train.
        """
        params, rest = _plain(params), _plain({} if rest is None else rest)
        # One array per counter: a buffer cannot be donated twice.
        step, skipped, in_a_row = (jnp.zeros((), jnp.int32) for _ in range(3))
        return cls(step, params, optimizer.init(params), rest, skipped, in_a_row)


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """A model without its arrays.

    Attributes:
      graphdef: Static structure; `merge_model(graphdef, params, rest)` gives the module back.
      params: Nested dict of ShapeDtypeStructs of what trains.
      rest: The same for what doesn't.
      axes: Logical axes of `params`, a nested dict of tuples.
      rest_axes: Logical axes of `rest`.
    """

    graphdef: nnx.GraphDef
    params: PyTree
    rest: PyTree
    axes: PyTree
    rest_axes: PyTree


def _plain(tree: PyTree) -> PyTree:
    return nnx.to_pure_dict(tree) if isinstance(tree, nnx.State) else tree


def split_model(
    model: nnx.Module, trainable: nnx.filterlib.Filter = nnx.Param
) -> tuple[nnx.GraphDef, PyTree, PyTree]:
    """Splits a module into (graphdef, params, rest), the latter two nested dicts of arrays.

    Args:
      model: The module.
      trainable: NNX filter of the variables that train: a Variable type, a predicate
        `(path, variable) -> bool`, or any combination NNX knows.

    Raises:
      ValueError: If the filter selects nothing, or the module holds RNG state.
    """
    graphdef, params, rest = nnx.split(model, trainable, ...)
    rng = nnx.to_flat_state(nnx.filter_state(nnx.merge_state(params, rest), nnx.RngState))
    if rng:
        raise ValueError(
            f"{type(model).__name__} holds RNG state at {['.'.join(map(str, p)) for p, _ in rng]}; "
            "pass `key=` to the call instead of storing nnx.Rngs in the module"
        )
    if not jax.tree.leaves(params):
        raise ValueError(
            f"trainable={trainable!r} selects no variable of {type(model).__name__}; "
            "nothing would train"
        )
    return graphdef, nnx.to_pure_dict(params), nnx.to_pure_dict(rest)


def merge_model(graphdef: nnx.GraphDef, params: PyTree, rest: PyTree | None = None) -> Any:
    """Returns the module of `split_model`'s parts; cheap, meant for inside a jitted function."""
    return nnx.merge(graphdef, params, {} if rest is None else rest)


def abstract_model(
    model_fn: Callable[[jax.Array], nnx.Module], trainable: nnx.filterlib.Filter = nnx.Param
) -> ModelSpec:
    """Describes the model that `model_fn(key)` makes, without allocating it."""
    # The key is made while tracing: this touches no device, so it may come before
    # jax.distributed.initialize().
    model = jax.eval_shape(lambda: model_fn(jax.random.key(0)))
    graphdef, params, rest = split_model(model, trainable)
    axes, rest_axes = model_axes(graphdef, params, rest)
    return ModelSpec(graphdef, params, rest, axes, rest_axes)


def state_shardings(
    graphdef: nnx.GraphDef, state: TrainState, mesh: Mesh, rules: ShardingRules = DEFAULT_RULES
) -> TrainState:
    """Returns the NamedSharding of every leaf of a (concrete or abstract) train state.

    Parameters lie where their logical axes say, optimizer moments beside their parameter, and
    everything else is replicated.
    """
    axes, rest_axes = model_axes(graphdef, state.params, state.rest)
    return dataclasses.replace(
        tree_shardings(state, {}, mesh, rules),
        params=tree_shardings(state.params, axes, mesh, rules),
        opt_state=tree_shardings(state.opt_state, axes, mesh, rules, like=state.params),
        rest=tree_shardings(state.rest, rest_axes, mesh, rules),
    )


def abstract_state(
    model_fn: Callable[[jax.Array], nnx.Module],
    optimizer: optax.GradientTransformation,
    *,
    mesh: Mesh | None = None,
    rules: ShardingRules = DEFAULT_RULES,
    trainable: nnx.filterlib.Filter = nnx.Param,
) -> TrainState:
    """Returns the train state as ShapeDtypeStructs with shardings: what a checkpoint restores to.

    Args:
      model_fn: Makes the model from a key.
      optimizer: The optimizer.
      mesh: Where the state is to live; None leaves shardings out.
      rules: The sharding rules.
      trainable: NNX filter of what trains.
    """
    spec = abstract_model(model_fn, trainable)
    state = jax.eval_shape(lambda p, r: TrainState.create(p, optimizer, r), spec.params, spec.rest)
    if mesh is None:
        return state
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        state,
        state_shardings(spec.graphdef, state, mesh, rules),
    )


def init_state(
    model_fn: Callable[[jax.Array], nnx.Module],
    optimizer: optax.GradientTransformation,
    key: jax.Array,
    *,
    mesh: Mesh | None = None,
    rules: ShardingRules = DEFAULT_RULES,
    trainable: nnx.filterlib.Filter = nnx.Param,
) -> TrainState:
    """Makes the train state, each array directly in its shards.

    The whole initialisation is one jitted function with sharded outputs: no device ever holds more
    than its part. The values don't depend on the mesh.

    Args:
      model_fn: Makes the model from a key.
      optimizer: The optimizer.
      key: The initialisation key.
      mesh: Where the state is to live; None is the default device.
      rules: The sharding rules.
      trainable: NNX filter of what trains.

    Returns:
      The state at step 0.
    """

    def make(key: jax.Array) -> TrainState:
        _, params, rest = split_model(model_fn(key), trainable)
        return TrainState.create(params, optimizer, rest)

    if mesh is None:
        return jax.jit(make)(key)
    target = abstract_state(model_fn, optimizer, mesh=mesh, rules=rules, trainable=trainable)
    return jax.jit(make, out_shardings=jax.tree.map(lambda x: x.sharding, target))(key)
