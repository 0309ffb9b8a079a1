"""Sums and means over the valid entries of padded or packed arrays.

Every function is defined for empty input: a mean over nothing is 0, with gradient 0. What is
masked out never reaches the result, not even a NaN, in the value or in the gradient. Means are
over the array as the caller sees it: on a global (jit-sharded) array that is the global mean.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from jaxlib_papers.ops.checks import as_float, check_count, check_integer, check_shape

__all__ = ["divide_or_zero", "masked_mean", "masked_sum", "segment_mean", "segment_sum"]

Axis = int | tuple[int, ...] | None


def divide_or_zero(total: Float[Array, "..."], count: Float[Array, "..."]) -> Float[Array, "..."]:
    """`total / count`, and 0 with gradient 0 where `count` is 0 (shapes must broadcast)."""
    empty = count == 0
    return jnp.where(empty, jnp.zeros_like(total), total / jnp.where(empty, 1, count))


def _weights(values: Array, mask: ArrayLike | None) -> tuple[Array, Array]:
    """Values cleaned of what is masked out, and the mask as weights of the same rank."""
    if mask is None:
        return values, jnp.ones((1,) * values.ndim, values.dtype)
    mask = jnp.asarray(mask)
    if mask.shape != values.shape[: mask.ndim]:
        raise ValueError(
            f"mask has shape {mask.shape}, expected the leading axes of values {values.shape}"
        )
    weights = mask.astype(values.dtype).reshape(mask.shape + (1,) * (values.ndim - mask.ndim))
    return jnp.where(weights != 0, values, 0), weights


def masked_sum(
    values: Float[ArrayLike, "..."], mask: ArrayLike | None = None, axis: Axis = None
) -> Float[Array, "..."]:
    """Sum of `values * mask` over `axis`.

    Args:
        values: any shape; computed in float32 (float64 for float64 input).
        mask: bool or weights with the shape of the leading axes of `values`; None keeps all.
        axis: as in `jnp.sum`; None sums over everything.

    Returns:
        The sum, 0 where nothing is valid.

    Raises:
        ValueError: the shape of the mask differs.
    """
    values, weights = _weights(as_float(values), mask)
    return jnp.sum(values * weights, axis=axis)


def masked_mean(
    values: Float[ArrayLike, "..."], mask: ArrayLike | None = None, axis: Axis = None
) -> Float[Array, "..."]:
    """Mean of `values` over `axis`, weighted by `mask`; 0 with gradient 0 where nothing is valid.

    Args:
        values: any shape; computed in float32 (float64 for float64 input).
        mask: bool or weights with the shape of the leading axes of `values`; None keeps all.
        axis: as in `jnp.mean`; None averages over everything.

    Returns:
        sum(values * mask) / sum(mask).

    Raises:
        ValueError: the shape of the mask differs.
    """
    values, weights = _weights(as_float(values), mask)
    total = jnp.sum(values * weights, axis=axis)
    count = jnp.sum(jnp.broadcast_to(weights, values.shape), axis=axis)
    return divide_or_zero(total, count)


def segment_sum(
    values: Float[ArrayLike, "*layers batch seq dim"],
    segment_ids: Int[ArrayLike, "batch seq"],
    num_segments: int,
    weights: ArrayLike | None = None,
) -> tuple[Float[Array, "*layers batch segments dim"], Float[Array, "batch segments"]]:
    """Sum of each segment of packed rows, and its number (or total weight) of tokens.

    A product with the one-hot membership matrix, not a scatter: the backward pass is a product
    too, and a sharded batch axis needs no communication.

    Args:
        values: [..., B, T, D]; leading axes share the segment ids.
        segment_ids: [B, T], 1..num_segments inside a row; 0 (padding) and ids above are left out.
        num_segments: G, static.
        weights: [B, T] bool or float; None counts each token once.

    Returns:
        (sums [..., B, G, D], counts [B, G]); both 0 for a segment that is not there.

    Raises:
        ValueError: shapes disagree, ids are not integers, num_segments < 1.
    """
    values, segment_ids = as_float(values), jnp.asarray(segment_ids)
    check_count("num_segments", num_segments, 1)
    check_integer("segment_ids", segment_ids)
    check_shape("segment_ids", segment_ids, values.shape[-3:-1], "[batch, seq] of values")
    tokens = jnp.ones(segment_ids.shape, values.dtype)
    if weights is not None:
        check_shape("weights", weights, segment_ids.shape, "[batch, seq] of values")
        tokens = jnp.asarray(weights).astype(values.dtype)
    tokens = jnp.where((segment_ids > 0) & (segment_ids <= num_segments), tokens, 0)
    lead = (1,) * (values.ndim - 3)
    values = jnp.where(tokens.reshape(lead + tokens.shape + (1,)) != 0, values, 0)
    if num_segments == 1:  # one document a row: a plain weighted sum, no product needed
        sums = jnp.sum(values * tokens.reshape(lead + tokens.shape + (1,)), axis=-2, keepdims=True)
        return sums, jnp.sum(tokens, axis=-1, keepdims=True)
    member = jax.nn.one_hot(segment_ids - 1, num_segments, dtype=values.dtype) * tokens[..., None]
    sums = jnp.einsum(
        "...btd,btg->...bgd", values, member, precision=jax.lax.Precision.HIGHEST
    )  # HIGHEST: reduced precision on accelerators would blur what is compared afterwards
    return sums, jnp.sum(member, axis=-2)


def segment_mean(
    values: Float[ArrayLike, "*layers batch seq dim"],
    segment_ids: Int[ArrayLike, "batch seq"],
    num_segments: int,
    weights: ArrayLike | None = None,
) -> tuple[Float[Array, "*layers batch segments dim"], Bool[Array, "batch segments"]]:
    """Mean of each segment of packed rows, and which segments have a token at all.

    Args:
        values: [..., B, T, D]; leading axes share the segment ids.
        segment_ids: [B, T], 1..num_segments inside a row, 0 for padding.
        num_segments: G, static.
        weights: [B, T] bool or float; None counts each token once.

    Returns:
        (means [..., B, G, D], valid [B, G]); the mean of an absent segment is 0 with gradient 0.

    Raises:
        ValueError: as `segment_sum`.
    """
    sums, counts = segment_sum(values, segment_ids, num_segments, weights)
    counts = counts.reshape((1,) * (sums.ndim - 3) + counts.shape + (1,))
    return divide_or_zero(sums, counts), counts.reshape(counts.shape[-3:-1]) > 0
