"""AdamW with clipping, a schedule and a decay mask, as one optax transformation and memory pass.

On large models (and on CPUs always) the optimizer is bound by memory traffic. A chain of
transformations, with a select between old and new state behind it, made XLA copy both moments on
CPU: four times the time of the form used here, in which the gradient's norm comes from the train
step (which has it for the metrics), and a bad step is skipped by selecting scalars and the
gradient instead of whole states. The numbers are those of the optax chain.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jaxlib_papers.train.schedules import (
    Schedule,
    constant,
    warmup_cosine,
    warmup_stable_decay,
)
from jaxlib_papers.train.sharding import state_axes

__all__ = [
    "AdamWState",
    "GuardedTransformation",
    "OptimizerConfig",
    "decay_mask",
    "global_norm",
    "guard",
    "make_optimizer",
    "make_schedule",
]

PyTree = Any
SCHEDULES = ("cosine", "wsd", "constant")


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW and its schedule.

    Attributes:
      learning_rate: Peak learning rate.
      warmup_steps: Updates of linear warm-up.
      total_steps: Length of the schedule in updates.
      schedule: "cosine", "wsd" (warm-up, stable, decay) or "constant".
      min_lr_ratio: Last learning rate as a fraction of the peak (cosine and wsd).
      decay_fraction: Part of the run over which wsd falls.
      b1: Decay of the first moment.
      b2: Decay of the second moment.
      eps: Added to the root of the second moment.
      weight_decay: Decoupled weight decay, multiplied by the learning rate.
      clip_norm: Largest global gradient norm; 0 switches clipping off.
    """

    learning_rate: float = 3e-4
    warmup_steps: int = 100
    total_steps: int = 1000
    schedule: str = "cosine"
    min_lr_ratio: float = 0.1
    decay_fraction: float = 0.2
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0

    def __post_init__(self) -> None:
        """Checks every value; the message names the field."""
        if self.schedule not in SCHEDULES:
            near = difflib.get_close_matches(self.schedule, SCHEDULES, 1)
            raise ValueError(
                f"schedule={self.schedule!r}; expected one of {SCHEDULES}"
                + (f" (did you mean {near[0]!r}?)" if near else "")
            )
        for field in ("b1", "b2"):
            if not 0.0 <= getattr(self, field) < 1.0:
                raise ValueError(f"{field}={getattr(self, field)}; expected a value in [0, 1)")
        if not self.eps > 0.0:
            raise ValueError(f"eps={self.eps}; expected > 0 (an unused parameter has moments 0)")
        for field in ("learning_rate", "eps", "weight_decay", "clip_norm"):
            value = getattr(self, field)
            if not (math.isfinite(value) and value >= 0.0):
                raise ValueError(f"{field}={value}; expected a finite value >= 0")
        if not 0.0 <= self.min_lr_ratio <= 1.0:
            raise ValueError(f"min_lr_ratio={self.min_lr_ratio}; expected a value in [0, 1]")
        make_schedule(self)


def make_schedule(config: OptimizerConfig) -> Schedule:
    """Returns the learning-rate schedule of a config."""
    if config.schedule == "cosine":
        return warmup_cosine(
            config.learning_rate,
            warmup_steps=config.warmup_steps,
            total_steps=config.total_steps,
            min_ratio=config.min_lr_ratio,
        )
    if config.schedule == "wsd":
        return warmup_stable_decay(
            config.learning_rate,
            warmup_steps=config.warmup_steps,
            total_steps=config.total_steps,
            decay_fraction=config.decay_fraction,
            min_ratio=config.min_lr_ratio,
        )
    return constant(config.learning_rate, warmup_steps=config.warmup_steps)


def decay_mask(axes: PyTree) -> PyTree:
    """Says for each parameter whether weight decay applies: to matrices, nothing else.

    A matrix is what has two dimensions that it maps between. "layers" and a leading "experts" only
    stack matrices, and "head_dim" belongs to its heads, so that biases and norm scales are left
    alone however they are stacked. Embedding tables (first axis "vocab") are left alone too.

    Args:
      axes: Nested dict of tuples of logical names.
    """

    def decays(names: tuple[str | None, ...] | None) -> bool:
        names = tuple(name for name in names or () if name != "layers")
        if names[:1] == ("vocab",):
            return False
        if names[:1] == ("experts",):
            names = names[1:]
        return len([name for name in names if name not in ("head_dim", "norm")]) >= 2

    return jax.tree.map(decays, axes, is_leaf=lambda x: x is None or isinstance(x, tuple))


class GuardedTransformation(optax.GradientTransformationExtraArgs):
    """An optax transformation that can be told that a gradient is unusable.

    `update(grads, state, params, *, grad_norm=None, good=None)`: `grad_norm` is the global norm if
    the caller has it; where the boolean scalar `good` is False, the updates are zero and the state
    is the old one.
    """


def guard(optimizer: optax.GradientTransformation) -> GuardedTransformation:
    """Returns the optimizer as a GuardedTransformation, by selects around it if it isn't one."""
    if isinstance(optimizer, GuardedTransformation):
        return optimizer
    inner = optax.with_extra_args_support(optimizer)

    def update(grads, state, params=None, *, good=None, **extra):
        # Optax raises floats to integer powers, which strict promotion (our tests) forbids.
        with jax.numpy_dtype_promotion("standard"):
            updates, new = inner.update(grads, state, params, **extra)
        if good is None:
            return updates, new
        updates = jax.tree.map(lambda u: jnp.where(good, u, jnp.zeros_like(u)), updates)
        return updates, jax.tree.map(lambda n, o: jnp.where(good, n, o), new, state)

    return GuardedTransformation(inner.init, update)


def global_norm(tree: PyTree) -> jax.Array:
    """Returns the root of the sum of all squares, accumulated in float32 for any leaf dtype."""
    squares = (jnp.sum(jnp.square(x.astype(jnp.float32))) for x in jax.tree.leaves(tree))
    return jnp.sqrt(sum(squares, start=jnp.zeros((), jnp.float32)))


class AdamWState(NamedTuple):
    """State of the optimizer of `make_optimizer`.

    Attributes:
      count: int32, updates made (skipped ones not counted).
      mu: First moments, as the parameters.
      nu: Second moments, as the parameters.
      learning_rate: float32, the rate of the last update, for the metrics.
    """

    count: jax.Array
    mu: PyTree
    nu: PyTree
    learning_rate: jax.Array


def _materialise(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    # XLA on CPU does not write several results from one fusion. Left alone it computes the moments
    # once more for the parameters' update; reading the stored ones is faster. GPU and TPU compilers
    # write all three results from one fusion, which this must not break.
    return jax.lax.platform_dependent(
        *arrays, cpu=lambda *xs: jax.lax.optimization_barrier(xs), default=lambda *xs: xs
    )


def make_optimizer(config: OptimizerConfig, axes: PyTree | nnx.State) -> GuardedTransformation:
    """Returns AdamW with clipping by global norm, masked decoupled decay and the schedule.

    Equal to `optax.chain(clip_by_global_norm, scale_by_adam, add_decayed_weights(mask),
    scale_by_learning_rate)` where every step is good. A zero gradient stays zero under clipping.

    Args:
      config: The values.
      axes: Logical axes of the parameters (`ModelSpec.axes`), or the `nnx.State` that carries them.

    Returns:
      The transformation; moments have the dtype of their parameter.

    Source: Loshchilov and Hutter, arXiv:1711.05101, algorithm 2 (decay times learning rate).
    """
    decayed = decay_mask(state_axes(axes) if isinstance(axes, nnx.State) else axes)
    schedule = make_schedule(config)

    def init(params):
        def zeros():
            return jax.tree.map(jnp.zeros_like, params)

        return AdamWState(jnp.zeros((), jnp.int32), zeros(), zeros(), jnp.zeros((), jnp.float32))

    def update(grads, state, params=None, *, grad_norm=None, good=None, **extra):
        del extra
        if params is None:
            raise ValueError("params=None; weight decay needs update(grads, state, params)")
        good = jnp.array(True) if good is None else good
        rate = schedule(state.count)
        count = (state.count + 1).astype(jnp.float32)
        scale = jnp.ones((), jnp.float32)
        if config.clip_norm:
            norm = global_norm(grads) if grad_norm is None else grad_norm
            # No division by zero, and exactly 1 below the limit.
            scale = config.clip_norm / jnp.maximum(norm, config.clip_norm)
        # A bad step: moments times 1 plus nothing, and a learning rate of zero.
        b1, new1 = jnp.where(good, config.b1, 1.0), jnp.where(good, 1.0 - config.b1, 0.0)
        b2, new2 = jnp.where(good, config.b2, 1.0), jnp.where(good, 1.0 - config.b2, 0.0)
        step_size = -jnp.where(good, rate, 0.0)
        unbias1, unbias2 = 1.0 - config.b1**count, 1.0 - config.b2**count

        def leaf(g, m, v, p, decays):
            def scalar(x):
                return jnp.asarray(x, p.dtype)

            g = jnp.where(good, g * scalar(scale), scalar(0.0))
            m = scalar(b1) * m + scalar(new1) * g
            v = scalar(b2) * v + scalar(new2) * jnp.square(g)
            m, v = _materialise(m, v)
            u = (m / scalar(unbias1)) / (jnp.sqrt(v / scalar(unbias2)) + scalar(config.eps))
            if decays:
                u = u + scalar(config.weight_decay) * p
            return scalar(step_size) * u, m, v

        out = jax.tree.map(leaf, grads, state.mu, state.nu, params, decayed)
        updates, mu, nu = jax.tree.transpose(
            jax.tree.structure(grads), jax.tree.structure((0, 0, 0)), out
        )
        return updates, AdamWState(state.count + good.astype(jnp.int32), mu, nu, rate)

    return GuardedTransformation(init, update)
