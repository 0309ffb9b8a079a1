"""Small building blocks: parameters with logical axes, norm, projection, dropout, feed-forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from jaxlib_papers.nn.config import DecoderConfig
from jaxlib_papers.nn.partitioning import constrain
from jaxlib_papers.ops.activations import swiglu
from jaxlib_papers.ops.norms import rms_norm

__all__ = ["RMSNorm", "SwiGLU", "dropout", "normal_param", "project", "stack_modules"]

Module = TypeVar("Module", bound=nnx.Module)


def normal_param(
    key: Key[Array, ""],
    shape: Sequence[int],
    axes: Sequence[str | None],
    std: float,
    dtype: str,
) -> nnx.Param:
    """A parameter drawn from N(0, std^2), with one logical axis name per dimension."""
    return nnx.Param(std * jax.random.normal(key, tuple(shape), dtype), logical_axes=tuple(axes))


def stack_modules(make: Callable[[Key[Array, ""]], Module], keys: Key[Array, " n"]) -> Module:
    """Builds one module per key, stacked: each leaf has a leading axis named "layers".

    Run it by `jax.lax.scan` over the module itself.
    """
    stacked = jax.vmap(make)(keys)

    def name(variable: nnx.Variable) -> nnx.Variable:
        axes = variable.get_metadata()["logical_axes"]
        return variable.replace(variable[...], logical_axes=("layers", *axes))

    return jax.tree.map(name, stacked, is_leaf=lambda x: isinstance(x, nnx.Variable))


def project(
    x: Float[Array, "batch seq *inner"],
    kernel: nnx.Param | nnx.Module,
    bias: nnx.Param | None = None,
) -> Float[Array, "batch seq *outer"]:
    """Contracts the trailing axes of x with the leading axes of a kernel, in the dtype of x.

    How many: the kernel's rank tells, since one side of every projection is the residual stream:
    [embed, ...] contracts one axis, [heads, head_dim, embed] two. A projection with an adapter (a
    module in the kernel's place) does it by its own `project`.
    """
    if not isinstance(kernel, nnx.Variable):
        return kernel.project(x, bias)
    weight = kernel[...].astype(x.dtype)
    contracted = x.ndim - 2
    inner = tuple(range(contracted))
    out = jax.lax.dot_general(x, weight, ((tuple(a + 2 for a in inner), inner), ((), ())))
    if bias is not None:
        out = out + jnp.expand_dims(bias[...].astype(x.dtype), (0, 1))
    return out


def dropout(x: Float[Array, "..."], rate: float, key: Key[Array, ""] | None) -> Float[Array, "..."]:
    """Zeroes entries with probability ``rate`` and scales the others; no key is no dropout."""
    if key is None or rate == 0:
        return x
    keep = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(keep, x * (1 / (1 - rate)), jnp.zeros_like(x))


class RMSNorm(nnx.Module):
    """`ops.norms.rms_norm` with its scale.

    Args:
      dim: Channels.
      eps: Added to the mean square.
      dtype: Of the scale.
    """

    def __init__(self, dim: int, *, eps: float, dtype: str = "float32"):
        self.scale = nnx.Param(jnp.ones(dim, dtype), logical_axes=("norm",))
        self.eps = eps

    def __call__(self, x: Float[Array, "*batch dim"]) -> Float[Array, "*batch dim"]:
        """Normalises the last axis; computed in float32, returned in the dtype of x."""
        return rms_norm(x, self.scale[...], self.eps)


class SwiGLU(nnx.Module):
    """Gated feed-forward network ``(silu(x W_gate) * (x W_up)) W_down``.

    Args:
      config: Width, dtypes and initial scale.
      hidden_dim: Hidden width.
      key: PRNG key of the initial weights.

    Source: Shazeer, arXiv 2002.05202, eq. 6.
    """

    def __init__(self, config: DecoderConfig, hidden_dim: int, *, key: Key[Array, ""]):
        keys = jax.random.split(key, 3)
        into, out = (config.embed_dim, hidden_dim), (hidden_dim, config.embed_dim)
        options = (config.init_std, config.param_dtype)
        self.gate = normal_param(keys[0], into, ("embed", "mlp"), *options)
        self.up = normal_param(keys[1], into, ("embed", "mlp"), *options)
        self.down = normal_param(keys[2], out, ("mlp", "embed"), *options)

    def __call__(self, x: Float[Array, "batch seq embed"]) -> Float[Array, "batch seq embed"]:
        """Applies the network to every token."""
        hidden = swiglu(project(x, self.gate), project(x, self.up))
        return project(constrain(hidden, ("batch", "seq", "mlp_act")), self.down)
