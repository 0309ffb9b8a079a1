"""What a score goes through and which blocks of scores count, shared by the TPU and GPU kernels."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from kernels_pallas.tiling import ceil_div

__all__ = [
    "LN2",
    "LOG2E",
    "ScoreSpec",
    "block_bounds",
    "dot",
    "every_key",
    "in_band",
    "logits",
    "make_spec",
    "pairs_in_band",
    "quotient",
    "transform_slope",
]

LOG2E = math.log2(math.e)
LN2 = math.log(2.0)


@dataclasses.dataclass(frozen=True)
class ScoreSpec:
    """Static part of the map from a dot product to a logit, and the band of keys a query sees.

    Attributes:
      scale: Factor on the dot product.
      softcap: ``softcap * tanh(s / softcap)`` is applied after the scale; None leaves it out.
      left: How many keys before its own position a query sees; None is all of them.
      right: The same after its own position; 0 is causal.
      offset: Position of query 0 among the keys.
      queries: Number of queries.
      keys: Number of keys.
    """

    scale: float
    softcap: float | None
    left: int | None
    right: int | None
    offset: int
    queries: int
    keys: int


def every_key(
    pairs: Array | None, keys: int
) -> Shaped[Array, "batch_or_1 heads_or_1 queries_or_1 keys"] | None:
    """A bias or mask with its last axis in full, as the kernels read it."""
    return None if pairs is None else jnp.broadcast_to(pairs, (*pairs.shape[:3], keys))


def quotient(n: Int[Array, ""], size: int) -> Int[Array, ""]:
    """``n / size`` rounded to zero: inside a kernel floor division would test signs."""
    return jax.lax.div(n, jnp.full((), size, n.dtype))


def make_spec(
    q_shape: tuple[int, ...],
    k_shape: tuple[int, ...],
    causal: bool,
    window: int | tuple[int | None, int | None] | None,
    scale: float | None,
    softcap: float | None,
) -> ScoreSpec:
    """The static part of a call of `attention` with q [B, Tq, H, d] and k [B, Tk, K, d]."""
    left, right = (None, None) if window is None else window
    if causal:
        right = 0 if right is None else min(right, 0)
    return ScoreSpec(
        scale=q_shape[-1] ** -0.5 if scale is None else float(scale),
        softcap=None if softcap is None else float(softcap),
        left=left,
        right=right,
        offset=k_shape[1] - q_shape[1],
        queries=q_shape[1],
        keys=k_shape[1],
    )


def logits(products: Float[Array, "..."], spec: ScoreSpec) -> Float[Array, "..."]:
    """Logits in units of log2, so that ``exp2`` of them is the weight; the bias is not in yet."""
    if spec.softcap is None:
        return products * (spec.scale * LOG2E)
    return jnp.tanh(products * (spec.scale / spec.softcap)) * (spec.softcap * LOG2E)


def transform_slope(capped: Float[Array, "..."], spec: ScoreSpec) -> Float[Array, "..."] | None:
    """Derivative of the soft cap at `logits`' result ``capped``; None where it is 1."""
    if spec.softcap is None:
        return None
    ratio = capped * (1.0 / (spec.softcap * LOG2E))
    return 1.0 - ratio * ratio


def in_band(
    shape: tuple[int, int],
    query_axis: int,
    first_query: Int[Array, ""],
    first_key: Int[Array, ""],
    spec: ScoreSpec,
    *,
    check_queries: bool,
    check_keys: bool,
) -> Bool[Array, "a b"] | None:
    """Which pairs of a tile lie in the band and inside the arrays; None when that is static."""
    query = jax.lax.broadcasted_iota(jnp.int32, shape, query_axis)
    key = jax.lax.broadcasted_iota(jnp.int32, shape, 1 - query_axis)
    conditions = []
    if spec.left is not None or spec.right is not None:
        distance = (key - query) + (first_key - first_query - spec.offset)
        if spec.right is not None:
            conditions.append(distance <= spec.right)
        if spec.left is not None:
            conditions.append(distance >= -spec.left)
    if check_keys:
        conditions.append(key < spec.keys - first_key)
    if check_queries:
        conditions.append(query < spec.queries - first_query)
    allowed = None
    for condition in conditions:
        allowed = condition if allowed is None else allowed & condition
    return allowed


def dot(
    a: Float[Array, "..."], b: Float[Array, "..."], axis_a: int, axis_b: int
) -> Float[Array, "..."]:
    """Matrix product over the given axes, accumulated in float32; float32 operands keep theirs."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        a,
        b,
        (((axis_a,), (axis_b,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )


def _segment_range(
    segments: Int[Array, "batch length"], block: int
) -> tuple[Int[Array, "batch blocks"], Int[Array, "batch blocks"]]:
    blocks = ceil_div(segments.shape[1], block)
    padding = blocks * block - segments.shape[1]
    padded = jnp.pad(segments, ((0, 0), (0, padding)), mode="edge")
    padded = padded.reshape(segments.shape[0], blocks, block)
    return padded.min(axis=2), padded.max(axis=2)


def block_bounds(
    spec: ScoreSpec,
    block_rows: int,
    block_cols: int,
    *,
    rows_are_queries: bool,
    row_segments: Int[Array, "batch rows"] | None = None,
    col_segments: Int[Array, "batch cols"] | None = None,
    dense_mask: bool = False,
) -> Int[Array, "segmented row_blocks four"]:
    """For each block of rows, which blocks of columns to visit.

    The four numbers are ``first <= first_full <= end_full <= end``: blocks in ``[first, end)`` hold
    every pair that counts, and those in ``[first_full, end_full)`` hold no pair that doesn't, so no
    mask is needed there. Segments are compared by their smallest and largest id in a block, which
    is exact for packed rows and safe for any order.

    Args:
      spec: The band and the sizes.
      block_rows: Rows in a block.
      block_cols: Columns in a block.
      rows_are_queries: Whether rows are queries and columns keys, or the other way round.
      row_segments: Segment id of each row.
      col_segments: Segment id of each column.
      dense_mask: Whether an element mask is applied on top, so that no block is full.

    Returns:
      Bounds with a leading axis of size 1, or of the batch when there are segments.
    """
    if rows_are_queries:
        rows, cols, before, after, offset = (
            spec.queries, spec.keys, spec.left, spec.right, spec.offset,
        )  # fmt: skip
    else:
        rows, cols, before, after, offset = (
            spec.keys, spec.queries, spec.right, spec.left, -spec.offset,
        )  # fmt: skip
    count = ceil_div(rows, block_rows)
    blocks = ceil_div(cols, block_cols)
    top = jnp.arange(count, dtype=jnp.int32) * block_rows
    bottom = jnp.minimum(top + block_rows, rows) - 1 + offset
    top = top + offset
    zero = jnp.zeros_like(top)
    first, first_full = zero, zero
    end = jnp.full_like(top, blocks)
    end_full = jnp.full_like(top, cols // block_cols)
    if before is not None:
        first = (top - before) // block_cols
        first_full = (bottom - before + block_cols - 1) // block_cols
    if after is not None:
        end = (bottom + after) // block_cols + 1
        end_full = jnp.minimum(end_full, (top + after + 1) // block_cols)
    if dense_mask or row_segments is not None:
        end_full = zero
    if rows % block_rows and not rows_are_queries:
        # The last block of keys must be masked everywhere: its padding would enter dq.
        end_full = jnp.where(jnp.arange(count) == count - 1, 0, end_full)
    first = jnp.clip(first, 0, blocks)[None]
    end = jnp.clip(end, 0, blocks)[None]
    if row_segments is not None and col_segments is not None:
        row_low, row_high = _segment_range(row_segments, block_rows)
        col_low, col_high = _segment_range(col_segments, block_cols)
        meet = (row_low[:, :, None] <= col_high[:, None, :]) & (
            row_high[:, :, None] >= col_low[:, None, :]
        )
        index = jnp.arange(blocks, dtype=jnp.int32)
        first = jnp.maximum(first, jnp.where(meet, index, blocks).min(axis=2))
        end = jnp.minimum(end, jnp.where(meet, index + 1, 0).max(axis=2))
    end = jnp.maximum(end, first)
    first_full = jnp.clip(first_full[None], first, end)
    end_full = jnp.clip(end_full[None], first_full, end)
    return jnp.stack([first, first_full, end_full, end], axis=-1).astype(jnp.int32)


def pairs_in_band(spec: ScoreSpec) -> int:
    """Number of (query, key) pairs that the band allows."""
    position = np.arange(spec.queries, dtype=np.int64) + spec.offset
    low = np.zeros_like(position) if spec.left is None else position - spec.left
    high = np.full_like(position, spec.keys - 1) if spec.right is None else position + spec.right
    return int(np.clip(np.minimum(high, spec.keys - 1) - np.maximum(low, 0) + 1, 0, None).sum())
