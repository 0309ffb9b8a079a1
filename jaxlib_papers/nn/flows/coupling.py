"""Coupling flows: one half of the dimensions moves, told how by the other half and the context.

Source: Dinh et al., arXiv 1605.08803 (RealNVP); Durkan et al., arXiv 1906.04032 (splines); sizes,
the bounded log-scale and masks by parity as in JAPAN, arXiv 2505.23196 (reconstructed).
"""

from __future__ import annotations

import abc

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Key

from jaxlib_papers.nn.flows.base import Flow
from jaxlib_papers.nn.flows.networks import MLP
from jaxlib_papers.nn.layers import stack_modules
from jaxlib_papers.ops.checks import as_float, check_count, check_positive
from jaxlib_papers.ops.splines import MIN_BIN, identity_slope, rational_quadratic_spline

__all__ = ["ConditionalRealNVP", "ConditionalSplineFlow", "affine_coupling", "bounded_log_scale"]


def bounded_log_scale(raw: Float[Array, "*batch"]) -> Float[Array, "*batch"]:
    """2 tanh(raw / 2): near the identity, between -2 and 2, so that no layer explodes.

    Source: arXiv 2505.23196, affine coupling (reconstructed).
    """
    return 2 * jnp.tanh(raw / 2)


def affine_coupling(
    y: Float[ArrayLike, "*batch dim"],
    raw: Float[ArrayLike, "*batch twodim"],
    keep: ArrayLike,
    inverse: bool = False,
) -> tuple[Float[Array, "*batch dim"], Float[Array, "*batch"]]:
    """Scales and shifts the half of y that is not kept: z = y exp(s) + t.

    Args:
      y: Input of the map; of its inverse, where that is asked for.
      raw: Output of the network on (keep * y, context): the first half gives the log-scales
        s = 2 tanh(raw / 2), the second the shifts t. Entries for kept dimensions are ignored.
      keep: [dim], true or 1 for dimensions that stay.
      inverse: Apply (y - t) exp(-s).

    Returns:
      (z, logdet) of the map that was applied, float32 (float64 for float64 input).

    Raises:
      ValueError: Shapes that do not fit.

    Source: arXiv 1605.08803, eqs. 7-8; s as in arXiv 2505.23196 (reconstructed).
    """
    y, raw = as_float(y, raw)
    y = jnp.asarray(y)
    keep = jnp.asarray(keep).astype(bool)
    dim = y.shape[-1] if y.ndim else 0
    if dim < 1 or raw.shape != (*y.shape[:-1], 2 * dim) or keep.shape != (dim,):
        raise ValueError(
            f"raw has shape {raw.shape} and keep {keep.shape}, expected {(*y.shape[:-1], 2 * dim)} "
            f"and {(dim,)} for y {y.shape}"
        )
    moved = ~keep.reshape((1,) * (y.ndim - 1) + (dim,))
    scale = jnp.where(moved, bounded_log_scale(raw[..., :dim]), 0)
    shift = jnp.where(moved, raw[..., dim:], 0)
    if inverse:
        return (y - shift) * jnp.exp(-scale), -jnp.sum(scale, axis=-1)
    return y * jnp.exp(scale) + shift, jnp.sum(scale, axis=-1)


def _parity_masks(layers: int, dim: int) -> np.ndarray:
    """Whether layer l keeps dimension i: (i + l) even."""
    return (np.arange(dim)[None] + np.arange(layers)[:, None]) % 2 == 0


class _Coupling(Flow):
    """A stack of like layers, run by one scan; subclasses say what a layer does to its half.

    One dimension has no other half: then every layer moves it, told by the context alone.
    """

    def __init__(
        self,
        dim: int,
        context_dim: int,
        outputs: int,
        *,
        layers: int,
        hidden: int,
        unroll: bool,
        zero_last: bool,
        key: Key[Array, ""],
    ):
        check_count("dim", dim, 1)
        check_count("context_dim", context_dim, 0)
        check_count("layers", layers, 1)
        check_count("hidden", hidden, 1)
        self.event_shape = (dim,)
        self.context_shape = (context_dim,) if context_dim else None
        sizes = (dim + context_dim, hidden, hidden, outputs * dim)
        self.nets = stack_modules(
            lambda k: MLP(sizes, key=k, zero_last=zero_last), jax.random.split(key, layers)
        )
        self.layers, self.unroll = layers, unroll

    @abc.abstractmethod
    def _layer(self, values: Array, raw: Array, keep: Array, inverse: bool) -> tuple[Array, Array]:
        """One coupling from the output of its net."""

    def _run(self, values: Array, x: Array | None, inverse: bool) -> tuple[Array, Array]:
        dim = self.event_shape[0]
        masks = _parity_masks(self.layers, dim) if dim > 1 else np.zeros((self.layers, 1), bool)

        def step(carry: tuple[Array, Array], layer: tuple[MLP, Array]):
            values, total = carry
            net, keep = layer
            seen = jnp.where(keep.reshape((1,) * (values.ndim - 1) + (dim,)), values, 0)
            joined = seen if x is None else jnp.concatenate([seen, x], axis=-1)
            values, logdet = self._layer(values, net(joined), keep, inverse)
            return (values, total + logdet), None

        start = (values, jnp.zeros_like(values[..., 0]))
        unroll = self.layers if self.unroll else 1
        (values, total), _ = jax.lax.scan(
            step, start, (self.nets, jnp.asarray(masks)), reverse=inverse, unroll=unroll
        )
        return values, total

    def _forward(self, y: Array, x: Array | None) -> tuple[Array, Array]:
        return self._run(y, x, False)

    def _inverse(self, z: Array, x: Array | None) -> tuple[Array, Array]:
        return self._run(z, x, True)


class ConditionalRealNVP(_Coupling):
    """Affine couplings with alternating parity masks.

    Each net sees [keep * y, x]: two hidden layers with SiLU, a last layer that starts at 0, so the
    flow starts as the identity. With one dimension it is Gaussian given x: use splines there.

    Args:
      dim: Numbers in y.
      context_dim: Numbers in x; 0 is no context.
      layers: Couplings; at least two, so that every dimension moves.
      hidden: Width of both hidden layers.
      unroll: Lay the layers out one after another instead of in a loop: compiles longer, and runs
        faster where the layers are small.
      zero_last: Start as the identity; False starts with random couplings.
      key: PRNG key of the initial weights.

    Raises:
      ValueError: Counts below 1.

    Source: arXiv 1605.08803; arXiv 2505.23196 (sizes reconstructed).
    """

    def __init__(
        self,
        dim: int,
        context_dim: int = 0,
        *,
        layers: int = 6,
        hidden: int = 64,
        unroll: bool = False,
        zero_last: bool = True,
        key: Key[Array, ""],
    ):
        options = dict(layers=layers, hidden=hidden, unroll=unroll, zero_last=zero_last)
        super().__init__(dim, context_dim, 2, **options, key=key)

    def _layer(self, values: Array, raw: Array, keep: Array, inverse: bool) -> tuple[Array, Array]:
        return affine_coupling(values, raw, keep, inverse)


class ConditionalSplineFlow(_Coupling):
    """Rational-quadratic spline couplings with alternating parity masks and linear tails.

    Made for standardised data: beyond `tail_bound` it is the identity. With one dimension the
    context alone tells the spline, layer after layer.

    Args:
      dim: Numbers in y.
      context_dim: Numbers in x; 0 is no context.
      layers: Couplings; at least two, so that every dimension moves.
      hidden: Width of both hidden layers of each net.
      bins: K, at most 999.
      tail_bound: B, half of the interval that is bent.
      unroll: As in `ConditionalRealNVP`.
      zero_last: Start as the identity; False starts with random splines.
      key: PRNG key of the initial weights.

    Raises:
      ValueError: Counts below 1, too many bins, tail_bound not > 0.

    Source: arXiv 1906.04032; arXiv 2505.23196 (sizes reconstructed).
    """

    def __init__(
        self,
        dim: int,
        context_dim: int = 0,
        *,
        layers: int = 6,
        hidden: int = 64,
        bins: int = 8,
        tail_bound: float = 5.0,
        unroll: bool = False,
        zero_last: bool = True,
        key: Key[Array, ""],
    ):
        check_count("bins", bins, 1, round(1 / MIN_BIN) - 1)
        check_positive("tail_bound", tail_bound)
        options = dict(layers=layers, hidden=hidden, unroll=unroll, zero_last=zero_last)
        super().__init__(dim, context_dim, 3 * bins - 1, **options, key=key)
        self.bins, self.tail_bound = bins, float(tail_bound)

    def _layer(self, values: Array, raw: Array, keep: Array, inverse: bool) -> tuple[Array, Array]:
        bins = self.bins
        raw = raw.reshape(*values.shape, 3 * bins - 1)
        moved, logdet = rational_quadratic_spline(
            values,
            raw[..., :bins],
            raw[..., bins : 2 * bins],
            raw[..., 2 * bins :] + identity_slope(),
            inverse=inverse,
            tail_bound=self.tail_bound,
        )
        keep = keep.reshape((1,) * (values.ndim - 1) + keep.shape)
        return jnp.where(keep, values, moved), jnp.sum(jnp.where(keep, 0, logdet), axis=-1)
