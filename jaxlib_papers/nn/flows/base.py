"""The flow contract, and flows made of flows: chains, permutations, standardising.

A flow is an invertible map h(., x) from data y to a code z ~ N(0, I) for each context x, so that
log p(y | x) = log N(h(y, x)) + log |det dh/dy|. Every flow has `forward(y, x) -> (z, logdet)`,
`inverse(z, x) -> (y, logdet)`, `log_prob(y, x)` and `sample(key, x, n)`. Axes before those of one
event are batch axes and behave like `vmap`; a single example has none. `x` is None for a flow
without context.

Arithmetic is in float32 (float64 for float64 input) whatever dtype the input has: a map that is
rounded to bfloat16 on the way can't be inverted.

Source: Papamakarios et al., arXiv 1912.02762 (contract); JAPAN, arXiv 2505.23196 (conditional use).
"""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Key

from jaxlib_papers.ops.checks import as_float, check_count, float_dtype

__all__ = [
    "Buffer",
    "Chain",
    "Flow",
    "Permutation",
    "StandardisedFlow",
    "standard_normal_log_prob",
]


class Buffer(nnx.Variable):
    """Numbers of a flow that are not trained, e.g. the scale of the data."""


def standard_normal_log_prob(z: Float[Array, "*batch event"], event_ndim: int = 1) -> Array:
    """Log-density of N(0, I) over the last `event_ndim` axes."""
    axes = tuple(range(z.ndim - event_ndim, z.ndim))
    size = math.prod(z.shape[a] for a in axes)
    return -0.5 * (jnp.sum(jnp.square(z), axis=axes) + size * math.log(2 * math.pi))


class Flow(nnx.Module):
    """Base class: checks, density and sampling; a subclass gives `_forward` and `_inverse`.

    Both get (values [*batch, *event], context [*batch, *context] or None), wide floats of the same
    batch shape, and return (values, log |det|) of the map that they apply.

    Attributes:
      event_shape: Shape of one example, (dim,) or (steps, channels).
      context_shape: Shape of one context, or None where the flow has none.
    """

    event_shape: tuple[int, ...]
    context_shape: tuple[int, ...] | None

    @property
    def dim(self) -> int:
        """Numbers in one example."""
        return math.prod(self.event_shape)

    @abc.abstractmethod
    def _forward(self, y: Array, x: Array | None) -> tuple[Array, Array]:
        """The code and log |det dz/dy|."""

    @abc.abstractmethod
    def _inverse(self, z: Array, x: Array | None) -> tuple[Array, Array]:
        """The data and log |det dy/dz|."""

    def _prepare(
        self, name: str, value: ArrayLike, x: ArrayLike | None
    ) -> tuple[Array, Array | None]:
        """Checked arrays in one wide dtype, with the same batch axes."""
        value = jnp.asarray(value)
        event = len(self.event_shape)
        if value.ndim < event or value.shape[value.ndim - event :] != self.event_shape:
            raise ValueError(
                f"{name} has shape {value.shape}, expected [*batch, *{self.event_shape}]"
            )
        batch = value.shape[: value.ndim - event]
        if self.context_shape is None:
            if x is not None and math.prod(jnp.shape(x)[-1:]) != 0:
                raise ValueError(f"x has shape {jnp.shape(x)}, but this flow takes no context")
            return as_float(value), None
        if x is None:
            raise ValueError(f"x is None, expected a context [*batch, *{self.context_shape}]")
        value, x = as_float(value, x)
        rank = len(self.context_shape)
        if x.ndim < rank or x.shape[x.ndim - rank :] != self.context_shape:
            raise ValueError(
                f"x has shape {x.shape}, expected [*batch, *{self.context_shape}] as the flow was "
                "made for; check the number of features"
            )
        own = x.shape[: x.ndim - rank]
        try:
            both = jnp.broadcast_shapes(batch, own)
        except ValueError as error:
            raise ValueError(
                f"{name} has batch axes {batch} and x {own}; expected the same, or x broadcast"
            ) from error
        value = jnp.broadcast_to(value, (*both, *self.event_shape))
        x = jnp.broadcast_to(x, (*both, *self.context_shape))
        # Adds nothing, but under shard_map values then vary over devices wherever contexts do, as
        # the carries of loops over layers must.
        nothing = jnp.sum(jnp.zeros_like(x), axis=tuple(range(len(both), x.ndim)))
        return value + nothing.reshape(*both, *(1,) * event), x

    def forward(
        self, y: Float[ArrayLike, "*batch event"], x: Float[ArrayLike, "*batch context"] | None
    ) -> tuple[Float[Array, "*batch event"], Float[Array, "*batch"]]:
        """The code of y and log |det dz/dy|.

        Raises:
          ValueError: Shapes do not fit the flow.
        """
        return self._forward(*self._prepare("y", y, x))

    def inverse(
        self, z: Float[ArrayLike, "*batch event"], x: Float[ArrayLike, "*batch context"] | None
    ) -> tuple[Float[Array, "*batch event"], Float[Array, "*batch"]]:
        """The data of a code and log |det dy/dz|.

        Raises:
          ValueError: Shapes do not fit the flow.
        """
        return self._inverse(*self._prepare("z", z, x))

    def log_prob(
        self,
        y: Float[ArrayLike, "*batch event"],
        x: Float[ArrayLike, "*batch context"] | None = None,
    ) -> Float[Array, "*batch"]:
        """Log-density log p(y | x), in nats per event in the units of y.

        Raises:
          ValueError: Shapes do not fit the flow.
        """
        z, logdet = self.forward(y, x)
        return standard_normal_log_prob(z, len(self.event_shape)) + logdet

    def sample(
        self, key: Key[Array, ""], x: Float[ArrayLike, "*batch context"] | None = None, n: int = 1
    ) -> Float[Array, "samples *batch event"]:
        """Draws n samples y ~ p(. | x) for each context.

        Args:
          key: PRNG key.
          x: Contexts; None for a flow without.
          n: Samples of each, static.

        Raises:
          ValueError: n < 1, or shapes that do not fit the flow.
        """
        return self.sample_and_log_prob(key, x, n)[0]

    def sample_and_log_prob(
        self, key: Key[Array, ""], x: Float[ArrayLike, "*batch context"] | None = None, n: int = 1
    ) -> tuple[Float[Array, "samples *batch event"], Float[Array, "samples *batch"]]:
        """Samples and their log-densities, from one pass of the inverse.

        Args:
          key: PRNG key.
          x: Contexts; None for a flow without.
          n: Samples of each, static.

        Raises:
          ValueError: n < 1, or shapes that do not fit the flow.
        """
        check_count("n", n, 1)
        batch: tuple[int, ...] = ()
        dtype = jnp.dtype(jnp.float32)
        if x is not None:
            x = jnp.asarray(x)
            # A flow without context takes contexts of width 0, too.
            batch = x.shape[
                : x.ndim - (1 if self.context_shape is None else len(self.context_shape))
            ]
            dtype = float_dtype(x)
        z = jax.random.normal(key, (n, *batch, *self.event_shape), dtype)
        y, logdet = self.inverse(z, x)
        return y, standard_normal_log_prob(z, len(self.event_shape)) - logdet


class Permutation(Flow):
    """Reorders the dimensions of an event; its log-determinant is 0.

    Args:
      order: `z[i] = y[order[i]]`, a permutation of 0..dim - 1.
    """

    def __init__(self, order: Sequence[int]):
        if sorted(order) != list(range(len(order))) or not order:
            raise ValueError(f"order is {order}, expected a permutation of 0..dim - 1")
        self.order = tuple(int(i) for i in order)
        self.event_shape, self.context_shape = (len(self.order),), None

    def _forward(self, y: Array, x: Array | None) -> tuple[Array, Array]:
        return y[..., jnp.asarray(self.order)], jnp.zeros(y.shape[:-1], y.dtype)

    def _inverse(self, z: Array, x: Array | None) -> tuple[Array, Array]:
        back = sorted(range(len(self.order)), key=self.order.__getitem__)
        return z[..., jnp.asarray(back)], jnp.zeros(z.shape[:-1], z.dtype)


class Chain(Flow):
    """Flows one after another, data first: z = h_n(... h_1(y, x) ..., x).

    Args:
      flows: At least one, of one event shape. Those with a context share it.
    """

    def __init__(self, flows: Sequence[Flow]):
        if not flows:
            raise ValueError("flows is empty, expected at least one flow")
        events = {flow.event_shape for flow in flows}
        contexts = {flow.context_shape for flow in flows if flow.context_shape is not None}
        if len(events) > 1 or len(contexts) > 1:
            raise ValueError(f"flows disagree: event shapes {events}, context shapes {contexts}")
        self.flows = nnx.List(flows)
        self.event_shape = flows[0].event_shape
        self.context_shape = next(iter(contexts), None)

    def _forward(self, y: Array, x: Array | None) -> tuple[Array, Array]:
        total = jnp.zeros(y.shape[: y.ndim - len(self.event_shape)], y.dtype)
        for flow in self.flows:
            y, logdet = flow._forward(y, x if flow.context_shape is not None else None)
            total = total + logdet
        return y, total

    def _inverse(self, z: Array, x: Array | None) -> tuple[Array, Array]:
        total = jnp.zeros(z.shape[: z.ndim - len(self.event_shape)], z.dtype)
        for flow in list(self.flows)[::-1]:
            z, logdet = flow._inverse(z, x if flow.context_shape is not None else None)
            total = total + logdet
        return z, total


class StandardisedFlow(Flow):
    """A flow of (y - loc) / scale given (x - context_loc) / context_scale.

    Densities and volumes are in the units of y: log |det| holds -sum log scale.

    Args:
      flow: Works on standardised numbers.
      loc: Mean of y on the training split, event shape.
      scale: Standard deviation, > 0 (a constant column has none: drop it).
      context_loc: Mean of x; None leaves the context as it is.
      context_scale: Standard deviation of x, > 0.
    """

    def __init__(
        self,
        flow: Flow,
        loc: ArrayLike,
        scale: ArrayLike,
        context_loc: ArrayLike | None = None,
        context_scale: ArrayLike | None = None,
    ):
        self.flow = flow
        self.event_shape, self.context_shape = flow.event_shape, flow.context_shape
        self.loc = self._buffer("loc", loc, self.event_shape)
        self.scale = self._buffer("scale", scale, self.event_shape)
        has_context = self.context_shape is not None and context_loc is not None
        if has_context and context_scale is None:
            raise ValueError("context_scale is None though context_loc is given; give both")
        self.context_loc = (
            self._buffer("context_loc", context_loc, self.context_shape) if has_context else None
        )
        self.context_scale = (
            self._buffer("context_scale", context_scale, self.context_shape)
            if has_context
            else None
        )

    @staticmethod
    def _buffer(name: str, value: ArrayLike | None, shape: tuple[int, ...] | None) -> Buffer:
        array = as_float(value)
        if array.shape != shape:
            raise ValueError(f"{name} has shape {array.shape}, expected {shape}")
        return Buffer(array, logical_axes=(None,) * array.ndim)

    def _on(self, buffer: Buffer, like: Array) -> Array:
        value = buffer[...].astype(like.dtype)
        return value.reshape((1,) * (like.ndim - value.ndim) + value.shape)

    def _context(self, x: Array | None) -> Array | None:
        if x is None or self.context_loc is None or self.context_scale is None:
            return x
        return (x - self._on(self.context_loc, x)) / self._on(self.context_scale, x)

    def _log_scale(self, like: Array) -> Array:
        return jnp.sum(jnp.log(self.scale[...])).astype(like.dtype)

    def _forward(self, y: Array, x: Array | None) -> tuple[Array, Array]:
        standard = (y - self._on(self.loc, y)) / self._on(self.scale, y)
        z, logdet = self.flow._forward(standard, self._context(x))
        return z, logdet - self._log_scale(z)

    def _inverse(self, z: Array, x: Array | None) -> tuple[Array, Array]:
        y, logdet = self.flow._inverse(z, self._context(x))
        return y * self._on(self.scale, y) + self._on(self.loc, y), logdet + self._log_scale(z)
