"""Int8 codes of queries and keys, shared by all implementations."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int8

from kernels_pallas.tiling import accumulator_dtype

__all__ = ["quantize_queries_and_keys"]

_LARGEST = 127
_SMALLEST_SCALE = 1e-12


def _codes(x: Float[Array, "... dim"]) -> tuple[Int8[Array, "... dim"], Float[Array, "..."]]:
    """Symmetric codes in [-127, 127], round half to even, and the scale of each token."""
    scale = jnp.max(jnp.abs(x), axis=-1) / _LARGEST
    scale = jnp.maximum(scale, jnp.asarray(_SMALLEST_SCALE, x.dtype))
    codes = jnp.clip(jnp.round(x / scale[..., None]), -_LARGEST, _LARGEST)
    return codes.astype(jnp.int8), scale


def quantize_queries_and_keys(
    q: Float[Array, "batch heads length dim"], k: Float[Array, "batch heads length dim"]
) -> tuple[Array, Array, Array, Array, Array]:
    """Codes and scales whose integer product stands for the logits less a constant a row.

    The mean of the keys over the tokens is taken off first: softmax doesn't see it, and what is
    left needs fewer bits. The factor dim ** -0.5 is in the scales of the queries.

    Returns:
      Codes of q and their scales, codes of k and their scales, and the constant of each row, which
      the log-sum-exp has to get back.
    """
    dtype = accumulator_dtype(q)
    mean = jnp.mean(k.astype(dtype), axis=2, keepdims=True)
    scaled = q.astype(dtype) * jnp.asarray(q.shape[-1] ** -0.5, dtype)
    q_codes, q_scale = _codes(scaled)
    k_codes, k_scale = _codes(k.astype(dtype) - mean)
    return q_codes, q_scale, k_codes, k_scale, jnp.sum(scaled * mean, axis=-1)
