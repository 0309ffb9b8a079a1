"""The train step: one jitted function for every objective, mesh and accumulation.

What a paper plugs in is an `Objective`. Its loss and metrics are *additive contributions*: summed
over the micro-batches of a step they are the values of the whole batch. So a term that is a mean
over tokens divides by the batch's token count (handed in as `totals`), not by the micro-batch's,
and gradients and logged values are those of the global batch however it is cut.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxlib_papers.nn.partitioning import DEFAULT_RULES, ShardingRules, constrain, use_sharding
from jaxlib_papers.train.mesh import BATCH_AXES, batch_shardings
from jaxlib_papers.train.optimizer import global_norm, guard
from jaxlib_papers.train.sharding import model_axes, tree_shardings
from jaxlib_papers.train.state import TrainState, merge_model, state_shardings

__all__ = ["EvalStep", "Objective", "TrainStep", "make_eval_step", "make_train_step"]

PyTree = Any
Batch = Mapping[str, jax.Array]


class Objective(NamedTuple):
    """What a paper plugs into the trainer.

    Attributes:
      count: `count(batch) -> totals`. Cheap, without the model: additive amounts as float32, e.g.
        `{"tokens": mask.sum(), "microbatches": 1.0}`. Their sum over the micro-batches of a step
        is handed to `loss`.
      loss: `loss(model, batch, key, totals, statistics) -> (loss, metrics)`. A float32 scalar and
        a dict of float32 arrays, both additive contributions of this micro-batch. `key` is None
        in evaluation (no dropout).
      statistics: Optional `statistics(model, batch, key) -> tree`, for terms that are no sum over
        micro-batches (a function of batch-wide means). With `exact_statistics`, a first forward
        pass sums them over the whole batch, without gradient, and `loss` gets the sum; it then
        adds its own (with gradient) minus its own (without), which gives the exact gradient of the
        batch. Otherwise `loss` gets None and works per micro-batch.
    """

    count: Callable[[Batch], PyTree]
    loss: Callable[..., tuple[jax.Array, dict[str, jax.Array]]]
    statistics: Callable[[nnx.Module, Batch, jax.Array | None], PyTree] | None = None


@dataclasses.dataclass(eq=False)
class _Step:
    """A function that is jitted, with shardings for what it gets, when it first sees its input."""

    function: Callable[..., Any]
    shardings: Callable[..., dict[str, Any]] | None
    donate: tuple[int, ...] = ()
    _jitted: Any = dataclasses.field(default=None, init=False)

    def _compiled(self, *args: Any) -> Any:
        if self._jitted is None:
            options = {} if self.shardings is None else self.shardings(*args)
            self._jitted = jax.jit(self.function, donate_argnums=self.donate, **options)
        return self._jitted

    def __call__(self, *args: Any) -> Any:
        """Runs the step."""
        # One attribute look-up and one call: the rest is JAX's C++ dispatch.
        return (self._jitted or self._compiled(*args))(*args)

    def lower(self, *args: Any) -> jax.stages.Lowered:
        """Lowers the step for arrays or ShapeDtypeStructs (compile times, memory, FLOPs)."""
        return self._compiled(*args).lower(*args)


class TrainStep(_Step):
    """`step(state, batch) -> (state, metrics)`; the given state is donated."""


class EvalStep(_Step):
    """`evaluate(state, batch) -> (metrics, totals)`."""


def make_train_step(
    graphdef: nnx.GraphDef,
    objective: Objective,
    optimizer: optax.GradientTransformation,
    *,
    mesh: Mesh | None = None,
    rules: ShardingRules = DEFAULT_RULES,
    accum_steps: int = 1,
    seed: int = 0,
    exact_statistics: bool = False,
    batch_axes: Mapping[str, tuple[str | None, ...]] = BATCH_AXES,
) -> TrainStep:
    """Makes the jitted train step.

    Args:
      graphdef: Static structure of the model (`ModelSpec.graphdef`).
      objective: The loss.
      optimizer: An optax transformation over the trainable parameters' dict; `make_optimizer`'s
        needs fewer memory passes than a general one.
      mesh: The mesh; None runs on the default device.
      rules: The sharding rules.
      accum_steps: Micro-batches per step, A. Micro-batch a holds the rows r with r % A == a, so
        that cutting moves no data between devices.
      seed: Seed of all randomness in steps; step and micro-batch are folded in, so a resumed run
        draws what the uninterrupted one would have drawn.
      exact_statistics: Run `objective.statistics` in a forward pass of its own first.
      batch_axes: Logical axes of batch entries, as in `to_global`.

    Returns:
      `step(state, batch) -> (state, metrics)`. The batch's entries are [rows, ...]. The metrics are
      the objective's and "loss", "grad_norm" (before clipping), "skipped" (total),
      "skipped_in_a_row" and, if the optimizer keeps it in its state, "learning_rate". Where the
      loss or the gradient norm isn't finite, parameters and optimizer state are kept, the step
      counter advances, and the metrics show the values that were not finite.

    Raises:
      ValueError: If accum_steps < 1; if `exact_statistics` has no statistics; at the first call,
        if rows or parameters do not fit the mesh.
    """
    if accum_steps < 1:
        raise ValueError(f"accum_steps={accum_steps}; expected >= 1")
    if exact_statistics and objective.statistics is None:
        raise ValueError("exact_statistics=True, but the objective has statistics=None")
    optimizer = guard(optimizer)

    def place(grads: PyTree, params: PyTree, rest: PyTree) -> PyTree:
        # Said aloud, the gradient's sums over rows become reduce-scatters to the parameter's
        # shards, and the accumulator is sharded from the start.
        if mesh is None or mesh.size == 1:
            return grads
        axes, _ = model_axes(graphdef, params, rest)
        return jax.lax.with_sharding_constraint(grads, tree_shardings(grads, axes, mesh, rules))

    def gradient(state: TrainState, batch: Batch, key: jax.Array):
        micro = _Micro(batch, accum_steps, key, batch_axes)
        totals = micro.sum(lambda part, _: objective.count(part))
        statistics = None
        if exact_statistics:
            model = merge_model(graphdef, state.params, state.rest)
            statistics = micro.sum(lambda part, k: objective.statistics(model, part, k))
            statistics = jax.lax.stop_gradient(statistics)

        def loss(params: PyTree, part: Batch, k: jax.Array):
            model = merge_model(graphdef, params, state.rest)
            return objective.loss(model, part, k, totals, statistics)

        def value_and_grad(part: Batch, k: jax.Array):
            value, grads = jax.value_and_grad(loss, has_aux=True)(state.params, part, k)
            return value, place(grads, state.params, state.rest)

        if accum_steps == 1:
            return micro.apply(value_and_grad)

        def body(total: PyTree, xs: PyTree):
            value, grads = value_and_grad(*micro.take(xs))
            total = jax.tree.map(lambda t, g: t + g.astype(jnp.float32), total, grads)
            return place(total, state.params, state.rest), value

        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), state.params)
        grads, values = jax.lax.scan(body, place(zeros, state.params, state.rest), micro.xs)
        grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, state.params)
        return jax.tree.map(lambda v: jnp.sum(v, axis=0), values), grads

    def step(state: TrainState, batch: Batch):
        with use_sharding(mesh, rules):
            key = jax.random.fold_in(jax.random.key(seed), state.step)
            (value, metrics), grads = gradient(state, batch, key)
            norm = global_norm(grads)
            good = jnp.isfinite(value) & jnp.isfinite(norm)
            updates, opt_state = optimizer.update(
                grads, state.opt_state, state.params, grad_norm=norm, good=good
            )
            bad = (~good).astype(jnp.int32)
            rates = optax.tree.get_all_with_path(opt_state, "learning_rate")
            new = TrainState(
                step=state.step + 1,
                params=optax.apply_updates(state.params, updates),
                opt_state=opt_state,
                rest=state.rest,
                skipped=state.skipped + bad,
                skipped_in_a_row=(state.skipped_in_a_row + bad) * bad,
            )
            metrics = metrics | {
                "loss": value,
                "grad_norm": norm,
                "skipped": new.skipped,
                "skipped_in_a_row": new.skipped_in_a_row,
            }
            return new, metrics | ({"learning_rate": rates[0][1]} if rates else {})

    def shardings(state: TrainState, batch: Batch) -> dict[str, Any]:
        for_state = state_shardings(graphdef, state, mesh, rules)
        for_batch = batch_shardings(batch, mesh, rules, axes=batch_axes)
        whole = NamedSharding(mesh, PartitionSpec())
        return {"in_shardings": (for_state, for_batch), "out_shardings": (for_state, whole)}

    return TrainStep(step, None if mesh is None else shardings, donate=(0,))


def make_eval_step(
    graphdef: nnx.GraphDef,
    objective: Objective,
    *,
    mesh: Mesh | None = None,
    rules: ShardingRules = DEFAULT_RULES,
    batch_axes: Mapping[str, tuple[str | None, ...]] = BATCH_AXES,
) -> EvalStep:
    """Makes the jitted evaluation step: the objective without key (no dropout) and gradient.

    Args:
      graphdef: Static structure of the model.
      objective: The loss.
      mesh: The mesh; None runs on the default device.
      rules: The sharding rules.
      batch_axes: Logical axes of batch entries, as in `to_global`.

    Returns:
      `evaluate(state, batch) -> (metrics, totals)`: the objective's metrics and "loss" for this
      batch, and its `count`. Over several batches, a token mean is the sum of
      `metric * totals["tokens"]` divided by the sum of `totals["tokens"]`.
    """

    def evaluate(state: TrainState, batch: Batch):
        with use_sharding(mesh, rules):
            totals = jax.tree.map(_float32, objective.count(batch))
            model = merge_model(graphdef, state.params, state.rest)
            value, metrics = objective.loss(model, batch, None, totals, None)
            return metrics | {"loss": value}, totals

    def shardings(state: TrainState, batch: Batch) -> dict[str, Any]:
        for_state = state_shardings(graphdef, state, mesh, rules)
        for_batch = batch_shardings(batch, mesh, rules, axes=batch_axes)
        whole = NamedSharding(mesh, PartitionSpec())
        return {"in_shardings": (for_state, for_batch), "out_shardings": whole}

    return EvalStep(evaluate, None if mesh is None else shardings)


def _float32(x: Any) -> jax.Array:
    return jnp.asarray(x, jnp.float32)


class _Micro:
    """The micro-batches of a batch: micro-batch a of A holds the rows r with r % A == a."""

    def __init__(
        self,
        batch: Batch,
        parts: int,
        key: jax.Array,
        axes: Mapping[str, tuple[str | None, ...]],
    ):
        self._batch, self._parts, self._key = batch, parts, key
        if parts > 1:
            cut = {name: self._cut(name, x, axes.get(name)) for name, x in batch.items()}
            self.xs = (cut, jnp.arange(parts, dtype=jnp.int32))

    def _cut(self, name: str, x: jax.Array, axes: tuple[str | None, ...] | None) -> jax.Array:
        rows, parts = x.shape[0], self._parts
        if rows % parts:
            raise ValueError(
                f"batch[{name!r}] has {rows} rows, which accum_steps={parts} does not divide"
            )
        axes = axes or ("batch",) + (None,) * (x.ndim - 1)
        # Neighbouring rows go to different micro-batches, so each device cuts the rows it has.
        x = x.reshape(rows // parts, parts, *x.shape[1:])
        x = constrain(
            x, (axes[0], None, *axes[1:]), name=f"batch[{name!r}] cut into {parts} micro-batches"
        )
        return jnp.moveaxis(x, 1, 0)

    def take(self, xs: PyTree) -> tuple[Batch, jax.Array]:
        """A slice of `xs` as the micro-batch and its key."""
        part, index = xs
        return part, jax.random.fold_in(self._key, index)

    def apply(self, function: Callable[..., Any]) -> Any:
        """The function of the only micro-batch."""
        return function(self._batch, jax.random.fold_in(self._key, 0))

    def sum(self, function: Callable[..., PyTree]) -> PyTree:
        """The sum over micro-batches of a tree of float32 arrays."""
        if self._parts == 1:
            return jax.tree.map(_float32, self.apply(function))
        _, values = jax.lax.scan(
            lambda _, xs: (None, jax.tree.map(_float32, function(*self.take(xs)))), None, self.xs
        )
        return jax.tree.map(lambda v: jnp.sum(v, axis=0), values)
