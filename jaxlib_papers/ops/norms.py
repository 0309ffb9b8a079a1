"""Normalisation of the last axis."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxlib_papers.ops.checks import check_shape, float_dtype

__all__ = ["rms_norm"]


def rms_norm(
    x: Float[Array, "*batch dim"], scale: Float[Array, " dim"], eps: float = 1e-6
) -> Float[Array, "*batch dim"]:
    """``x / sqrt(mean(x^2) + eps) * scale`` over the last axis, computed in float32 or better.

    Args:
      x: Any float dtype; the result has the same.
      scale: One factor per channel.
      eps: Added to the mean square; an all-zero row gives 0.

    Raises:
      ValueError: ``scale`` has another length than the last axis of x.

    Source: Zhang and Sennrich, arXiv 1910.07467, eq. 4.
    """
    check_shape("scale", scale, x.shape[-1:], "one factor per channel")
    dtype = float_dtype(x)
    wide = x.astype(dtype)
    inverse = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    scale = jnp.expand_dims(scale.astype(dtype), tuple(range(x.ndim - 1)))
    return (wide * inverse * scale).astype(x.dtype)
