"""A flow over whole trajectories: causal transformers standardise each step given those before.

Block after block, step t of y becomes z_t = (y_t - mu_t) exp(-a_t), where (mu_t, a_t) come from
causal self-attention over a start token and the steps before t, with the encoded history at every
position. Between blocks the channels of a step are mixed by an affine coupling (several channels),
or the order of time is reversed (one channel), unless told otherwise.

Source: the autoregressive blocks of TARFLOW, Zhai et al., arXiv 2412.06329, over time as in JAPAN,
arXiv 2505.23196 (encoder, sizes, couplings and orders reconstructed).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Key

from jaxlib_papers.nn.flows.base import Flow
from jaxlib_papers.nn.flows.coupling import ConditionalRealNVP, bounded_log_scale
from jaxlib_papers.nn.flows.networks import GRU, MLP, CausalLayer
from jaxlib_papers.nn.layers import RMSNorm, normal_param, stack_modules
from jaxlib_papers.ops.checks import check_count

__all__ = ["TrajectoryFlow"]


class _Block(nnx.Module):
    """(mu, raw log-scale) of every step from the steps before it and the encoded history."""

    def __init__(
        self,
        shape: tuple[int, int],
        code: int,
        width: int,
        heads: int,
        depth: int,
        coupled: bool,
        *,
        key: Key[Array, ""],
    ):
        steps, channels = shape
        keys = jax.random.split(key, 6)
        # A token a step: where it stands; the first is the start token.
        self.positions = normal_param(keys[0], (steps, width), (None, "embed"), 0.3, "float32")
        self.embed = MLP((channels, width), key=keys[1], zero_last=False)
        self.history = MLP((code, width), key=keys[2], zero_last=False) if code else None
        self.layers = stack_modules(
            lambda k: CausalLayer(width, heads, key=k), jax.random.split(keys[3], depth)
        )
        self.norm = RMSNorm(width, eps=1e-6)
        self.head = MLP((width, 2 * channels), key=keys[4])
        # Within a step, two couplings move every channel once.
        self.within = (
            ConditionalRealNVP(channels, 0, layers=2, hidden=width, key=keys[5])
            if coupled
            else None
        )

    def scales(self, y: Array, code: Array | None) -> tuple[Array, Array]:
        """(mu, bounded log-scale), [*batch, steps, channels] each."""
        tokens = self.embed(y[..., :-1, :])
        x = jnp.concatenate([jnp.zeros_like(tokens[..., :1, :]), tokens], axis=-2)
        if y.shape[-2] == 1:  # nothing before the only step
            x = jnp.zeros((*y.shape[:-1], self.norm.scale.shape[0]), y.dtype)
        positions = self.positions[...].astype(y.dtype)
        x = x + positions.reshape((1,) * (y.ndim - 2) + positions.shape)
        if self.history is not None and code is not None:
            x = x + self.history(code)[..., None, :]
        x, _ = jax.lax.scan(lambda x, layer: (layer(x), None), x, self.layers)
        return self._head(x)

    def _head(self, x: Array) -> tuple[Array, Array]:
        mean, raw = jnp.split(self.head(self.norm(x)), 2, axis=-1)
        return mean, bounded_log_scale(raw)

    def invert(self, z: Array, code: Array | None) -> tuple[Array, Array]:
        """(y, sum of log-scales) with z = (y - mu) exp(-a), step after step.

        Each layer remembers keys and values of the steps before, so that a step costs one token
        and not a whole pass.
        """
        steps = z.shape[-2]
        positions = self.positions[...].astype(z.dtype)
        start = jnp.broadcast_to(
            jnp.zeros_like(z[..., 0, :1]), (*z.shape[:-2], positions.shape[-1])
        )
        if self.history is not None and code is not None:
            start = start + self.history(code)

        def layer(state: tuple[Array, Array], pair: tuple[CausalLayer, tuple[Array, Array]]):
            x, time = state
            one, memory = pair
            x, memory = one.step(x, memory, time)
            return (x, time), memory

        def step(state: tuple, now: tuple[Array, Array]):
            token, memory, total = state
            time, z = now
            x = start + token + positions[time].reshape((1,) * (z.ndim - 1) + (-1,))
            (x, _), memory = jax.lax.scan(layer, (x, time), (self.layers, memory))
            mean, scale = self._head(x)
            y = z * jnp.exp(scale) + mean
            return (self.embed(y), memory, total + jnp.sum(scale, axis=-1)), y

        memory = jax.vmap(lambda one: one.no_steps(start, steps))(self.layers)
        state = (jnp.zeros_like(start), memory, jnp.zeros_like(z[..., 0, 0]))
        times = jnp.arange(steps, dtype=jnp.int32)
        (_, _, total), y = jax.lax.scan(step, state, (times, jnp.moveaxis(z, -2, 0)))
        return jnp.moveaxis(y, 0, -2), total


class TrajectoryFlow(Flow):
    """Density of whole future trajectories [horizon, channels] given a history.

    The joint density of all steps makes one score, so one conformal threshold gives one set of
    trajectories. A density takes one pass a block; a sample takes its steps one after another, with
    keys and values of the steps before kept.

    Args:
      horizon: Steps H of y.
      channels: Numbers m in each step.
      features: Channels F of the history x [*batch, T, F]; T is free. 0: no history.
      context_dim: Numbers in a context vector x [*batch, c], in place of a history.
      steps: T of the history, so that shapes can be checked; needed with `features`.
      blocks: Autoregressive maps.
      width: Of the transformers and of the encoder.
      heads: Attention heads; width is a multiple of it.
      attention_layers: Transformer layers in each block.
      alternate_order: Reverse time between blocks; None reverses for one channel only, and mixes
        the channels within each step otherwise.
      key: PRNG key of the initial weights; the flow starts as the identity (up to order).

    Raises:
      ValueError: Counts below 1, both kinds of context, heads that do not divide width.

    Source: arXiv 2412.06329, section 2; arXiv 2505.23196, forecasting (reconstructed).
    """

    def __init__(
        self,
        horizon: int,
        channels: int,
        *,
        features: int = 0,
        steps: int = 0,
        context_dim: int = 0,
        blocks: int = 4,
        width: int = 64,
        heads: int = 4,
        attention_layers: int = 2,
        alternate_order: bool | None = None,
        key: Key[Array, ""],
    ):
        check_count("horizon", horizon, 1)
        check_count("channels", channels, 1)
        check_count("features", features, 0)
        check_count("context_dim", context_dim, 0)
        check_count("blocks", blocks, 1)
        check_count("width", width, 1)
        check_count("attention_layers", attention_layers, 1)
        if features and context_dim:
            raise ValueError("features and context_dim are both given; the context is one of them")
        if bool(features) != bool(steps):
            raise ValueError(f"features is {features} and steps {steps}; a history needs both")
        self.event_shape = (horizon, channels)
        self.context_shape = None
        if features:
            self.context_shape = (steps, features)
        elif context_dim:
            self.context_shape = (context_dim,)
        reverse = channels == 1 if alternate_order is None else alternate_order
        coupled = channels > 1 and not reverse
        encoder_key, key = jax.random.split(key)
        self.encoder = GRU(features, width, key=encoder_key) if features else None
        code = width if features else context_dim
        keys = jax.random.split(key, blocks)
        self.blocks = stack_modules(
            lambda k: _Block(
                self.event_shape, code, width, heads, attention_layers, coupled, key=k
            ),
            keys,
        )
        self.reverse = bool(reverse)
        self.num_blocks = blocks

    def _code(self, x: Array | None) -> Array | None:
        return x if x is None or self.encoder is None else self.encoder(x)

    def _forward(self, y: Array, x: Array | None) -> tuple[Array, Array]:
        code = self._code(x)

        def step(carry: tuple[Array, Array], block: _Block):
            y, total = carry
            mean, scale = block.scales(y, code)
            z = (y - mean) * jnp.exp(-scale)
            total = total - jnp.sum(scale, axis=(-2, -1))
            if block.within is not None:
                z, logdet = block.within._forward(z, None)
                total = total + jnp.sum(logdet, axis=-1)
            return (z[..., ::-1, :] if self.reverse else z, total), None

        start = (y, jnp.zeros_like(y[..., 0, 0]))
        return jax.lax.scan(step, start, self.blocks)[0]

    def _inverse(self, z: Array, x: Array | None) -> tuple[Array, Array]:
        code = self._code(x)

        def step(carry: tuple[Array, Array], block: _Block):
            z, total = carry
            z = z[..., ::-1, :] if self.reverse else z
            if block.within is not None:
                z, logdet = block.within._inverse(z, None)
                total = total + jnp.sum(logdet, axis=-1)
            y, scale = block.invert(z, code)
            return (y, total + scale), None

        start = (z, jnp.zeros_like(z[..., 0, 0]))
        return jax.lax.scan(step, start, self.blocks, reverse=True)[0]
