"""Sums behind `router_mean` in plain XLA: the specification of the kernels.

Both passes take the canonical form: ``logits`` [R, T, N]; ``weight`` [R, T] in the accumulation
dtype, zero where a token does not count; ``segment`` [R, T] int32 in 0..G-1 (ignored where the
weight is zero), or None when G is 1.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

__all__ = ["router_sums", "router_sums_vjp", "segment_weights"]

_EXACT = jax.lax.Precision.HIGHEST


def _softmax(logits: Array, weight: Array) -> tuple[Array, Array, Array]:
    """Softmax and log-sum-exp of the counted tokens; what the others hold is not looked at."""
    counted = weight > 0
    x = jnp.where(counted[..., None], logits.astype(weight.dtype), jnp.zeros((), weight.dtype))
    top = jnp.max(x, axis=-1, keepdims=True)
    e = jnp.exp(x - top)
    total = jnp.sum(e, axis=-1, keepdims=True)
    return e / total, (top + jnp.log(total))[..., 0], counted


def _one_hot(segment: Array, num_segments: int, dtype: jnp.dtype) -> Array:
    ids = jax.lax.broadcasted_iota(segment.dtype, (*segment.shape, num_segments), segment.ndim)
    return (segment[..., None] == ids).astype(dtype)


def segment_weights(
    weight: Float[Array, "R T"], segment: Int[Array, "R T"] | None, num_segments: int
) -> Float[Array, "R G"]:
    """Sum of the weights of each segment."""
    if segment is None:
        return jnp.sum(weight, axis=1)[:, None]
    return jnp.sum(_one_hot(segment, num_segments, weight.dtype) * weight[..., None], axis=1)


def router_sums(
    logits: Float[Array, "R T N"],
    weight: Float[Array, "R T"],
    segment: Int[Array, "R T"] | None,
    num_segments: int,
) -> tuple[Float[Array, "R G N"], Float[Array, "R G"]]:
    """Per segment: sum of w softmax(z) and sum of w logsumexp(z)^2."""
    p, lse, _ = _softmax(logits, weight)
    square = weight * lse * lse
    if segment is None:
        sums = jnp.einsum("rt,rtn->rn", weight, p, precision=_EXACT)
        return sums[:, None], jnp.sum(square, axis=1)[:, None]
    one_hot = _one_hot(segment, num_segments, weight.dtype)
    sums = jnp.einsum("rtg,rtn->rgn", one_hot, weight[..., None] * p, precision=_EXACT)
    return sums, jnp.einsum("rtg,rt->rg", one_hot, square, precision=_EXACT)


def router_sums_vjp(
    logits: Float[Array, "R T N"],
    weight: Float[Array, "R T"],
    segment: Int[Array, "R T"] | None,
    d_sums: Float[Array, "R G N"],
    d_square: Float[Array, "R G"],
) -> Float[Array, "R T N"]:
    """Gradient of `router_sums` with respect to the logits.

    With g the row of ``d_sums`` and c the entry of ``d_square`` of the token's segment:
    ``w (p (g - <g, p>) + 2 c logsumexp(z) p)``, exactly zero where w is zero.
    """
    p, lse, counted = _softmax(logits, weight)
    if segment is None:
        g, c = d_sums, d_square
    else:
        index = jnp.where(counted, segment, jnp.zeros((), segment.dtype))
        g = jnp.take_along_axis(d_sums, index[..., None], axis=1)
        c = jnp.take_along_axis(d_square, index, axis=1)
    inner = jnp.sum(g * p, axis=-1, keepdims=True)
    grad = weight[..., None] * p * ((g - inner) + (2 * c * lse)[..., None])
    grad = jnp.where(counted[..., None], grad, jnp.zeros((), grad.dtype))
    return grad.astype(logits.dtype)
