"""Masked autoregressive flow: each dimension is standardised given those before it.

Source: Papamakarios et al., arXiv 1705.07057, eqs. 3-5; JAPAN, arXiv 2505.23196 (sizes and the
bounded log-scale reconstructed).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key

from jaxlib_papers.nn.flows.base import Flow
from jaxlib_papers.nn.flows.coupling import bounded_log_scale
from jaxlib_papers.nn.flows.networks import MaskedMLP
from jaxlib_papers.nn.layers import stack_modules
from jaxlib_papers.ops.checks import check_count

__all__ = ["ConditionalMAF"]


class ConditionalMAF(Flow):
    """z_i = (y_i - mu_i(y_<i, x)) exp(-a_i(y_<i, x)), the order reversed between layers.

    A density takes one pass a layer, a sample `dim` passes. The Jacobian of one layer is lower
    triangular.

    Args:
      dim: Numbers in y.
      context_dim: Numbers in x; 0 is no context.
      layers: Autoregressive maps.
      hidden: Width of both hidden layers, at least `dim`.
      key: PRNG key of the initial weights; the flow starts as the identity (up to order).

    Raises:
      ValueError: Counts below 1, hidden < dim.

    Source: arXiv 1705.07057; arXiv 2505.23196 (sizes reconstructed).
    """

    def __init__(
        self,
        dim: int,
        context_dim: int = 0,
        *,
        layers: int = 4,
        hidden: int = 64,
        key: Key[Array, ""],
    ):
        check_count("dim", dim, 1)
        check_count("context_dim", context_dim, 0)
        check_count("layers", layers, 1)
        self.event_shape = (dim,)
        self.context_shape = (context_dim,) if context_dim else None
        keys = jax.random.split(key, layers)
        self.nets = stack_modules(lambda k: MaskedMLP(dim, context_dim, hidden, 2, key=k), keys)
        self.layers = layers

    def _forward(self, y: Array, x: Array | None) -> tuple[Array, Array]:
        def step(carry: tuple[Array, Array], net: MaskedMLP):
            y, total = carry
            mean, raw = net(y, x)
            scale = bounded_log_scale(raw)
            z = (y - mean) * jnp.exp(-scale)
            return (z[..., ::-1], total - jnp.sum(scale, axis=-1)), None

        start = (y, jnp.zeros_like(y[..., 0]))
        (z, total), _ = jax.lax.scan(step, start, self.nets)
        return z[..., ::-1], total  # no reversal after the last layer

    def _inverse(self, z: Array, x: Array | None) -> tuple[Array, Array]:
        def step(carry: tuple[Array, Array], net: MaskedMLP):
            z, total = carry

            def dimension(index: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
                y, scale = state
                mean, raw = net(y, x)
                scale = bounded_log_scale(raw)
                here = (jnp.arange(y.shape[-1]) == index).reshape((1,) * (y.ndim - 1) + (-1,))
                return jnp.where(here, z * jnp.exp(scale) + mean, y), scale

            blank = (jnp.zeros_like(z), jnp.zeros_like(z))
            # A last pass would only repeat the scales: those of pass i are right up to i.
            y, scale = jax.lax.fori_loop(0, z.shape[-1], dimension, blank)
            return (y[..., ::-1], total + jnp.sum(scale, axis=-1)), None

        start = (z, jnp.zeros_like(z[..., 0]))
        (y, total), _ = jax.lax.scan(step, start, self.nets, reverse=True)
        return y[..., ::-1], total
