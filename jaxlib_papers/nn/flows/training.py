"""Fitting a flow (or any small module) by gradient steps on batches, as one compiled scan.

All steps run inside one `lax.scan`, so there is no Python between them: for small flows that is
most of the time. Sharded arrays stay sharded; for the long run of a large model use
`jaxlib_papers.train`.

Source: defaults as in JAPAN, arXiv 2505.23196 (reconstructed): Adam, cosine, clipping, the
parameters with the best validation likelihood.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.flatten_util import ravel_pytree
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Key

from jaxlib_papers.nn.flows.base import Flow
from jaxlib_papers.ops.checks import as_float, check_count, check_nonnegative, check_positive

__all__ = ["FitConfig", "FitHistory", "fit_flow", "fit_module"]

Module = TypeVar("Module", bound=nnx.Module)


@dataclasses.dataclass(frozen=True)
class FitConfig:
    """How a module is fitted.

    Attributes:
      steps: Gradient steps; None is `epochs` passes over the training rows.
      epochs: Passes, where steps is None.
      batch_size: Rows a step, drawn with replacement.
      learning_rate: Adam's, falling to 0 along a cosine.
      clip_norm: Largest norm of a gradient.
      validation_fraction: Share of the rows that only chooses among the parameters on the way; 0
        takes the last ones. These rows come out of the training split, never out of calibration.
      evaluations: How often the validation rows are looked at.
      noise: Standard deviation of noise added to the targets of each batch, in their units.
    """

    steps: int | None = None
    epochs: int = 200
    batch_size: int = 256
    learning_rate: float = 2e-3
    clip_norm: float = 5.0
    validation_fraction: float = 0.1
    evaluations: int = 20
    noise: float = 0.0

    def __post_init__(self) -> None:
        """Checks the numbers."""
        if self.steps is not None:
            check_count("FitConfig.steps", self.steps, 0)
        check_count("FitConfig.epochs", self.epochs, 1)
        check_count("FitConfig.batch_size", self.batch_size, 1)
        check_count("FitConfig.evaluations", self.evaluations, 1)
        check_positive("FitConfig.learning_rate", self.learning_rate)
        check_positive("FitConfig.clip_norm", self.clip_norm)
        check_nonnegative("FitConfig.noise", self.noise)
        if not 0 <= self.validation_fraction < 1:
            raise ValueError(
                f"FitConfig.validation_fraction is {self.validation_fraction}, expected [0, 1)"
            )


class FitHistory(NamedTuple):
    """What happened on the way.

    Attributes:
      loss: Of each step's batch, [steps].
      validation: Mean loss of the validation rows at each look, [looks]; empty without such rows.
      skipped: Steps whose loss or gradient was not finite; they changed nothing.
    """

    loss: Float[Array, " steps"]
    validation: Float[Array, " looks"]
    skipped: Array


@functools.partial(jax.jit, static_argnames=("graphdef", "loss", "config", "steps"))
def _run(graphdef, params, rest, train, held, key, *, loss, config: FitConfig, steps: int):
    # One vector for all parameters: few operations a step, which is what small models spend on.
    start, unravel = ravel_pytree(params)
    rows = jax.tree.leaves(train)[0].shape[0]

    def mean_loss(vector, batch, key):
        return jnp.mean(loss(nnx.merge(graphdef, unravel(vector), rest), batch, key))

    def step(carry, index):
        vector, first, second, skipped = carry
        pick_key, loss_key = jax.random.split(jax.random.fold_in(key, index))
        chosen = jax.random.randint(pick_key, (config.batch_size,), 0, rows)
        batch = jax.tree.map(lambda a: a[chosen], train)
        value, gradient = jax.value_and_grad(mean_loss)(vector, batch, loss_key)
        norm = jnp.sqrt(jnp.sum(jnp.square(gradient)))
        good = jnp.isfinite(value) & jnp.isfinite(norm)
        gradient = jnp.where(good, gradient, 0) * (
            config.clip_norm / jnp.maximum(jnp.where(good, norm, 0), config.clip_norm)
        )
        # Adam (arXiv 1412.6980, algorithm 1); a step that is not finite changes nothing.
        count = (index + 1).astype(vector.dtype)
        rate = (
            0.5
            * config.learning_rate
            * (1 + jnp.cos(index.astype(vector.dtype) * (math.pi / steps)))
        )
        new_first = 0.9 * first + 0.1 * gradient
        new_second = 0.999 * second + 0.001 * jnp.square(gradient)
        unbiased = new_first / (1 - 0.9**count)
        spread = jnp.sqrt(new_second / (1 - 0.999**count)) + 1e-8
        new = (vector - rate * unbiased / spread, new_first, new_second)
        kept = tuple(jnp.where(good, a, b) for a, b in zip(new, carry[:3], strict=True))
        return (*kept, skipped + jnp.where(good, 0, 1)), value

    carry = (start, jnp.zeros_like(start), jnp.zeros_like(start), jnp.int32(0))
    if held is None:
        carry, losses = jax.lax.scan(step, carry, jnp.arange(steps))
        return unravel(carry[0]), FitHistory(losses, jnp.zeros(0), carry[3])

    def look(state, indices):
        carry, best, best_value = state
        carry, losses = jax.lax.scan(step, carry, indices)
        value = mean_loss(carry[0], held, None)
        best = jnp.where(value < best_value, carry[0], best)
        return (carry, best, jnp.fmin(value, best_value)), (losses, value)

    length = max(1, steps // config.evaluations)
    whole, left = divmod(steps, length)
    state = (carry, start, mean_loss(start, held, None))
    state, (losses, seen) = jax.lax.scan(
        look, state, jnp.arange(whole * length).reshape(whole, length)
    )
    losses = losses.reshape(-1)
    if left:
        state, (last, value) = look(state, jnp.arange(whole * length, steps))
        losses, seen = jnp.concatenate([losses, last]), jnp.append(seen, value)
    return unravel(state[1]), FitHistory(losses, seen, state[0][3])


def fit_module(
    module: Module,
    loss: Callable[[Module, Any, Key[Array, ""] | None], Float[Array, " batch"]],
    data: Any,
    config: FitConfig,
    *,
    key: Key[Array, ""],
) -> tuple[Module, FitHistory]:
    """Minimises a mean loss over rows.

    Args:
      module: Its `nnx.Param`s are trained; it is not changed itself.
      loss: (module, batch, key or None for evaluation) -> a loss a row. A function at module level
        is compiled once for all modules of one structure.
      data: Tree of arrays with the rows along their first axis.
      config: Steps, batches, validation.
      key: Chooses validation rows, batches and noise.

    Returns:
      (trained module, what happened).

    Raises:
      ValueError: Fewer than two rows, or arrays of different lengths.
    """
    lengths = {int(leaf.shape[0]) for leaf in jax.tree.leaves(data)}
    if len(lengths) != 1:
        raise ValueError(f"data has arrays of lengths {sorted(lengths)}, expected one length")
    rows = lengths.pop()
    check_count("rows of data", rows, 2)
    order_key, run_key = jax.random.split(key)
    size = round(config.validation_fraction * rows)
    held, train = None, data
    if size:
        order = jax.random.permutation(order_key, rows)
        held = jax.tree.map(lambda a: a[order[:size]], data)
        train = jax.tree.map(lambda a: a[order[size:]], data)
    steps = config.steps
    if steps is None:
        steps = config.epochs * max(1, -(-(rows - size) // config.batch_size))
    if steps == 0:
        return module, FitHistory(jnp.zeros(0), jnp.zeros(0), jnp.int32(0))
    graphdef, params, rest = nnx.split(module, nnx.Param, ...)
    params, history = _run(
        graphdef, params, rest, train, held, run_key, loss=loss, config=config, steps=steps
    )
    return nnx.merge(graphdef, params, rest), history


def _negative_log_likelihood(flow: Flow, batch: Any, key: Array | None) -> Array:
    y, x, noise = batch
    if key is not None:
        extra = noise.reshape((-1,) + (1,) * (y.ndim - 1))
        y = y + extra * jax.random.normal(key, y.shape, y.dtype)
    return -flow.log_prob(y, x)


def _negative_log_likelihood_plain(flow: Flow, batch: Any, key: Array | None) -> Array:
    y, x = batch
    return -flow.log_prob(y, x)


def fit_flow(
    flow: Flow,
    y: Float[ArrayLike, "rows *event"],
    x: Float[ArrayLike, "rows *context"] | None = None,
    config: FitConfig | None = None,
    *,
    key: Key[Array, ""],
) -> tuple[Flow, FitHistory]:
    """Maximum likelihood: minimises the mean of -log p(y | x).

    Args:
      flow: The density to fit; it is not changed itself.
      y: Rows of the training split.
      x: Their contexts; None for a flow without.
      config: None is `FitConfig()`.
      key: Chooses validation rows, batches and noise.

    Returns:
      (fitted flow, what happened).

    Raises:
      ValueError: Shapes that do not fit the flow, fewer than two rows, values that are not finite.

    Source: arXiv 2505.23196, training by the negative log-likelihood.
    """
    config = FitConfig() if config is None else config
    y = as_float(y)
    x = None if x is None or flow.context_shape is None else as_float(x)
    for name, array in (("y", y), ("x", x)):
        if array is not None and not bool(np.isfinite(np.asarray(array)).all()):
            raise ValueError(f"{name} holds NaN or infinite values; clean the training rows")
    if config.noise:
        data = (y, x, jnp.full(y.shape[0], config.noise, y.dtype))
        return fit_module(flow, _negative_log_likelihood, data, config, key=key)
    return fit_module(flow, _negative_log_likelihood_plain, (y, x), config, key=key)
