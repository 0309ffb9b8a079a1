"""The networks inside flows: perceptrons (plain and masked), a causal layer, a recurrent unit.

Source: perceptrons as in JAPAN, arXiv 2505.23196 (sizes reconstructed); masks, Germain et al.,
arXiv 1502.03509; causal layer, Vaswani et al., arXiv 1706.03762; GRU, Cho et al., arXiv 1406.1078.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Key

from jaxlib_papers.nn.layers import RMSNorm
from jaxlib_papers.ops.checks import check_count, check_ndim

__all__ = ["GRU", "MLP", "CausalLayer", "MaskedMLP", "masked_degrees"]


def _uniform(key: Key[Array, ""], shape: tuple[int, ...], fan_in: int) -> Array:
    """LeCun-style uniform weights, bounded by 1 / sqrt(fan_in)."""
    return jax.random.uniform(key, shape, minval=-1, maxval=1) / math.sqrt(max(fan_in, 1))


def _dense(x: Array, kernel: nnx.Param, bias: nnx.Param, mask: np.ndarray | None = None) -> Array:
    weight = kernel[...].astype(x.dtype)
    if mask is not None:
        weight = weight * jnp.asarray(mask, x.dtype)
    out = jax.lax.dot_general(x, weight, (((x.ndim - 1,), (0,)), ((), ())))
    offset = bias[...].astype(x.dtype)
    return out + offset.reshape((1,) * (x.ndim - 1) + offset.shape)


class MLP(nnx.Module):
    """Dense layers with SiLU between them.

    Args:
      sizes: Widths from input to output.
      key: PRNG key of the initial weights.
      zero_last: Start with an output of 0, so that a flow starts as the identity.
    """

    def __init__(self, sizes: tuple[int, ...], *, key: Key[Array, ""], zero_last: bool = True):
        if len(sizes) < 2:
            raise ValueError(f"sizes is {sizes}, expected widths of input and output at least")
        keys = jax.random.split(key, len(sizes) - 1)
        kernels, biases = [], []
        for index, (inner, outer) in enumerate(zip(sizes[:-1], sizes[1:], strict=True)):
            last = index == len(sizes) - 2
            weight = _uniform(keys[index], (inner, outer), inner)
            weight = jnp.zeros_like(weight) if last and zero_last else weight
            kernels.append(nnx.Param(weight, logical_axes=("embed", None if last else "mlp")))
            biases.append(nnx.Param(jnp.zeros(outer), logical_axes=(None if last else "mlp",)))
            if index > 0:  # widths between: split along the input
                kernels[-1] = nnx.Param(weight, logical_axes=("mlp", None))
        self.kernels, self.biases = nnx.List(kernels), nnx.List(biases)

    def __call__(self, x: Float[Array, "*batch inner"]) -> Float[Array, "*batch outer"]:
        """Applies the network to the last axis, in the dtype of x."""
        for index in range(len(self.kernels)):
            x = _dense(x, self.kernels[index], self.biases[index])
            if index < len(self.kernels) - 1:
                x = jax.nn.silu(x)
        return x


def masked_degrees(dim: int, hidden: int) -> tuple[np.ndarray, np.ndarray]:
    """Degrees of inputs (1..dim) and of hidden units (0..dim - 1, evenly dealt).

    A unit of degree m sees inputs up to m; output i is fed by hidden units of degree below i.
    Units of degree 0 see the context only, which is all that the first output may depend on.

    Args:
      dim: Inputs.
      hidden: Hidden units, at least `dim` so that every degree occurs.

    Source: Germain et al., arXiv 1502.03509, section 4.
    """
    return np.arange(1, dim + 1), np.arange(hidden) % dim


class MaskedMLP(nnx.Module):
    """A perceptron whose output i depends on inputs before i and on the whole context.

    Args:
      dim: Inputs.
      context_dim: Width of the context, 0 for none.
      hidden: Width of the two hidden layers, >= dim.
      outputs: Numbers for each input.
      key: PRNG key of the initial weights.

    Source: Germain et al., arXiv 1502.03509.
    """

    def __init__(
        self, dim: int, context_dim: int, hidden: int, outputs: int, *, key: Key[Array, ""]
    ):
        check_count("dim", dim, 1)
        check_count("context_dim", context_dim, 0)
        check_count("hidden", hidden, dim)
        check_count("outputs", outputs, 1)
        keys = jax.random.split(key, 3)

        def param(value: Array, *axes: str | None) -> nnx.Param:
            return nnx.Param(value, logical_axes=axes)

        fan_in = dim + context_dim
        self.first = param(_uniform(keys[0], (fan_in, hidden), fan_in), "embed", "mlp")
        self.first_bias = param(jnp.zeros(hidden), "mlp")
        self.second = param(_uniform(keys[1], (hidden, hidden), hidden), "mlp", None)
        self.second_bias = param(jnp.zeros(hidden), None)
        self.last = param(jnp.zeros((hidden, outputs * dim)), "mlp", None)
        self.last_bias = param(jnp.zeros(outputs * dim), None)
        self.dim, self.context_dim, self.hidden, self.outputs = dim, context_dim, hidden, outputs

    def _masks(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """From the sizes, not stored: what is derived is no state."""
        inputs, units = masked_degrees(self.dim, self.hidden)
        context = np.zeros(self.context_dim, int)
        first = np.concatenate([inputs, context])[:, None] <= units[None]
        last = units[:, None] < np.tile(inputs, self.outputs)[None]
        return first, units[:, None] <= units[None], last

    def __call__(
        self, y: Float[Array, "*batch dim"], x: Float[Array, "*batch context"] | None
    ) -> Float[Array, "outputs *batch dim"]:
        """The numbers of each input, in the dtype of y."""
        first, second, last = self._masks()
        joined = y if x is None else jnp.concatenate([y, x], axis=-1)
        hidden = jax.nn.silu(_dense(joined, self.first, self.first_bias, first))
        hidden = jax.nn.silu(_dense(hidden, self.second, self.second_bias, second))
        out = _dense(hidden, self.last, self.last_bias, last)
        return jnp.stack(jnp.split(out, self.outputs, axis=-1))


class CausalLayer(nnx.Module):
    """Pre-norm transformer layer: each step attends to itself and to those before it.

    Plain arithmetic in the dtype of its input, made for horizons of tens of steps: unlike the
    attention kernels it is differentiable in both modes, and exact in float64.

    Args:
      width: Of the residual stream, a multiple of `heads`.
      heads: Attention heads.
      key: PRNG key of the initial weights.

    Source: Vaswani et al., arXiv 1706.03762, section 3.2, in pre-norm form.
    """

    def __init__(self, width: int, heads: int, *, key: Key[Array, ""]):
        check_count("heads", heads, 1)
        if width % heads:
            raise ValueError(f"width is {width}, expected a multiple of heads = {heads}")
        keys = jax.random.split(key, 3)
        self.attention_norm = RMSNorm(width, eps=1e-6)
        self.mixed = MLP((width, 3 * width), key=keys[0], zero_last=False)
        self.out = MLP((width, width), key=keys[1], zero_last=False)
        self.feed_norm = RMSNorm(width, eps=1e-6)
        self.feed = MLP((width, 2 * width, width), key=keys[2], zero_last=False)
        self.heads = heads

    def __call__(self, x: Float[Array, "*batch steps width"]) -> Float[Array, "*batch steps width"]:
        """Applies the layer."""
        steps = x.shape[-2]
        query, key, value = self._mix(x)
        logits = jnp.einsum("...qhd,...khd->...hqk", query, key) / math.sqrt(query.shape[-1])
        hidden = jnp.asarray(np.triu(np.ones((steps, steps), bool), 1))
        hidden = hidden.reshape((1,) * (logits.ndim - 2) + hidden.shape)
        weights = jax.nn.softmax(jnp.where(hidden, -jnp.inf, logits), axis=-1)
        seen = jnp.einsum("...hqk,...khd->...qhd", weights, value)
        return self._feed(x, seen.reshape(x.shape))

    def _mix(self, x: Array) -> tuple[Array, ...]:
        """Queries, keys and values, [..., heads, size] each."""
        mixed = self.mixed(self.attention_norm(x))
        mixed = mixed.reshape(*x.shape[:-1], 3, self.heads, x.shape[-1] // self.heads)
        return tuple(mixed[..., i, :, :] for i in range(3))

    def _feed(self, x: Array, seen: Array) -> Array:
        x = x + self.out(seen)
        return x + self.feed(self.feed_norm(x))

    def no_steps(self, like: Float[Array, "*batch width"], steps: int) -> tuple[Array, Array]:
        """Empty memory of keys and values for `step`, [*batch, steps, heads, size] each."""
        shape = (*like.shape[:-1], steps, self.heads, like.shape[-1] // self.heads)
        empty = jnp.broadcast_to(jnp.zeros_like(like[..., None, None, :1]), shape)
        return empty, empty

    def step(
        self, x: Float[Array, "*batch width"], memory: tuple[Array, Array], time: Array
    ) -> tuple[Float[Array, "*batch width"], tuple[Array, Array]]:
        """The layer at one time, given keys and values of the times before.

        Args:
          x: Input at this time.
          memory: Of `no_steps`, filled by the steps before.
          time: Which step this is, from 0; int32 scalar.

        Returns:
          (output at this time, memory that holds this step too).
        """
        query, *new = self._mix(x)
        keys, values = (
            jax.lax.dynamic_update_index_in_dim(old, now, time, old.ndim - 3)
            for old, now in zip(memory, new, strict=True)
        )
        logits = jnp.einsum("...hd,...khd->...hk", query, keys) / math.sqrt(query.shape[-1])
        later = jnp.arange(keys.shape[-3]) > time
        later = later.reshape((1,) * (logits.ndim - 1) + later.shape)
        weights = jax.nn.softmax(jnp.where(later, -jnp.inf, logits), axis=-1)
        seen = jnp.einsum("...hk,...khd->...hd", weights, values)
        return self._feed(x, seen.reshape(x.shape)), (keys, values)


class GRU(nnx.Module):
    """A gated recurrent unit over time that returns its last state.

    Args:
      features: Channels of the input.
      hidden: Width of the state.
      key: PRNG key of the initial weights.

    Source: Cho et al., arXiv 1406.1078, eqs. 5-8.
    """

    def __init__(self, features: int, hidden: int, *, key: Key[Array, ""]):
        check_count("features", features, 1)
        check_count("hidden", hidden, 1)
        keys = jax.random.split(key, 3)

        def param(value: Array, *axes: str | None) -> nnx.Param:
            return nnx.Param(value, logical_axes=axes)

        self.input = param(_uniform(keys[0], (features, 3 * hidden), hidden), "embed", "mlp")
        self.gates = param(_uniform(keys[1], (hidden, 2 * hidden), hidden), None, "mlp")
        self.candidate = param(_uniform(keys[2], (hidden, hidden), hidden), None, "mlp")
        self.bias = param(jnp.zeros(3 * hidden), "mlp")
        self.hidden = hidden

    def __call__(self, x: Float[Array, "*batch time features"]) -> Float[Array, "*batch hidden"]:
        """The state after the last step, in the dtype of x.

        Raises:
          ValueError: x has fewer than two axes.
        """
        if x.ndim < 2:
            check_ndim("x", x, (2,), "[*batch, time, features]")
        drive = _dense(x, self.input, self.bias)
        gates, candidate = self.gates[...].astype(x.dtype), self.candidate[...].astype(x.dtype)
        state = jnp.sum(jnp.zeros_like(drive[..., : self.hidden]), axis=-2)

        def step(state: Array, now: Array) -> tuple[Array, None]:
            size = self.hidden
            gate = jax.nn.sigmoid(now[..., : 2 * size] + state @ gates)
            reset, update = gate[..., :size], gate[..., size:]
            new = jnp.tanh(now[..., 2 * size :] + (reset * state) @ candidate)
            return update * state + (1 - update) * new, None

        return jax.lax.scan(step, state, jnp.moveaxis(drive, -2, 0))[0]
