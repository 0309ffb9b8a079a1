"""Fine-tuning of adapters in one call: what trains, its optimizer state, and the jitted step.

The trainer's step (`train.step`) takes the whole model in its state and gives its buffers away.
Here the state holds what trains and nothing else, so the base model stays where it is, is never
copied, and several adapters can train on it side by side.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jaxlib_papers.nn.adapters import AdapterParam
from jaxlib_papers.train.objectives import language_objective
from jaxlib_papers.train.state import TrainState, merge_model, split_model
from jaxlib_papers.train.step import Objective, make_train_step

__all__ = ["AdapterTraining", "adapter_training"]


class AdapterTraining(NamedTuple):
    """What `adapter_training` makes.

    Attributes:
      state: The state at step 0; its `rest` is empty, so it is as small as the adapters.
      step: `step(state, batch) -> (state, metrics)`, jitted; the given state is donated. Metrics
        are those of `make_train_step`.
      merge: `merge(state) -> model`, the model with the adapters of a state; they are copied, so
        it outlives further steps.
    """

    state: TrainState
    step: Callable[[TrainState, Mapping[str, Any]], tuple[TrainState, dict[str, jax.Array]]]
    merge: Callable[[TrainState], Any]


def adapter_training(
    model: nnx.Module,
    optimizer: optax.GradientTransformation,
    objective: Objective | None = None,
    *,
    trainable: nnx.filterlib.Filter = AdapterParam,
    accum_steps: int = 1,
    seed: int = 0,
) -> AdapterTraining:
    """Prepares the training of a model's adapters on frozen base arrays.

    Arrays stay on the devices where they lie; for a mesh of your own use `make_train_step`.

    Args:
      model: With adapters (`inject_lora`, `with_mole`). Its arrays are neither copied nor given
        away, so it can be used on.
      optimizer: Over the dict of what trains.
      objective: The loss; None is `language_objective()`.
      trainable: NNX filter of what trains, for instance `nnx.Any(AdapterParam, ...)`.
      accum_steps: As in `make_train_step`.
      seed: As in `make_train_step`; dropout depends on it and on the step only.

    Returns:
      `AdapterTraining`.

    Raises:
      ValueError: The model has nothing that trains.
    """
    graphdef, params, rest = split_model(model, trainable)
    objective = language_objective() if objective is None else objective
    whole = make_train_step(graphdef, objective, optimizer, accum_steps=accum_steps, seed=seed)
    copy = functools.partial(jax.tree.map, jnp.copy)

    # Copied since the first step gives the state's buffers away.
    first = _committed_like(rest, TrainState.create(copy(params), optimizer))
    # A state comes out as it went in: with other shardings, or a first state that is committed to
    # no device, the second step would be compiled again.
    kept = {}
    if all(leaf.committed for leaf in jax.tree.leaves(first)):
        kept = {"out_shardings": (jax.tree.map(lambda leaf: leaf.sharding, first), None)}

    @functools.partial(jax.jit, donate_argnums=0, **kept)
    def run(state: TrainState, rest: Any, batch: Mapping[str, Any]) -> Any:
        new, metrics = whole.function(dataclasses.replace(state, rest=rest), batch)
        return dataclasses.replace(new, rest={}), metrics

    return AdapterTraining(
        state=first,
        step=lambda state, batch: run(state, rest, batch),
        merge=lambda state: merge_model(graphdef, copy(state.params), rest),
    )


def _committed_like(rest: Any, state: TrainState) -> TrainState:
    """The state, committed to the devices of the base where that is committed."""
    shardings = [leaf.sharding for leaf in jax.tree.leaves(rest) if leaf.committed]
    if not shardings:
        return state
    place = shardings[0]
    if isinstance(place, NamedSharding):
        place = NamedSharding(place.mesh, PartitionSpec())
    return jax.tree.map(lambda x: x if x.committed else jax.device_put(x, place), state)
