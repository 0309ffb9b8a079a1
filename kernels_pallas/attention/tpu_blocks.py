"""Block sizes, memory limits, cost estimates and small tile operations of the TPU kernels."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from kernels_pallas.attention.scores import ScoreSpec, pairs_in_band
from kernels_pallas.dispatch import block_sizes
from kernels_pallas.tiling import ceil_div, round_up

__all__ = [
    "Blocks",
    "backward_cost",
    "choose_blocks",
    "forward_cost",
    "in_main_memory",
    "segment_column",
    "shape_class",
    "tile_rows",
    "vmem_limit",
]

_MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Tile of scores, and how many keys and queries stay in VMEM around it.

    Attributes:
      queries: Queries in a tile, a multiple of 128.
      keys: Keys in a tile, a multiple of 128.
      key_stretch: Keys in VMEM at a time, a multiple of ``keys``.
      query_stretch: Queries in VMEM at a time in the backward pass, a multiple of ``queries``.
    """

    queries: int
    keys: int
    key_stretch: int
    query_stretch: int


def vmem_limit() -> int:
    """VMEM a kernel may take, bytes: what every TPU from v5e on has, or this TPU's when smaller."""
    capacity = 64 * _MIB
    if jax.default_backend() == "tpu":
        capacity = min(capacity, pltpu.get_tpu_info().vmem_capacity_bytes)
    return capacity * 15 // 16


def shape_class(head_dim: int, length: int) -> str:
    """Key of the block-size table: head size and length, both rounded up to a power of two."""
    return f"d{1 << (head_dim - 1).bit_length()}_t{1 << max(length - 1, 0).bit_length()}"


def _even(length: int, most: int) -> int:
    """A multiple of 128 near ``most`` or below that cuts ``length`` into equal blocks."""
    return round_up(ceil_div(length, ceil_div(length, most)), 128)


def choose_blocks(
    spec: ScoreSpec,
    head_dim: int,
    itemsize: int,
    *,
    backward: bool,
    dense_bytes: int = 0,
    row_bytes: int = 0,
) -> Blocks:
    """Block sizes from the table, or by rule.

    Args:
      spec: Sizes of the problem.
      head_dim: Size of a head.
      itemsize: Bytes of an element of q, k and v.
      backward: For the backward pass rather than the forward one.
      dense_bytes: Bytes that a bias and a mask with a row for each query take per pair.
      row_bytes: Bytes that a bias and a mask with one row for all queries take per key.

    Returns:
      Blocks whose working set stays inside `vmem_limit`.
    """
    kind = jax.devices()[0].device_kind if jax.default_backend() == "tpu" else "tpu"
    name = "attention_backward" if backward else "attention"
    tuned = block_sizes(name, kind, shape_class(head_dim, max(spec.queries, spec.keys))) or {}
    most = 512 if head_dim <= 128 else 256
    queries = _even(spec.queries, tuned.get("queries", most))
    keys = _even(spec.keys, tuned.get("keys", most))

    lanes = round_up(head_dim, 128)
    budget = vmem_limit() - 12 * _MIB
    # A single row takes eight sublanes in VMEM, in two buffers; so does a row of segment ids.
    row_bytes = 16 * (row_bytes + 4)
    if backward:
        # q, o, do and dq in two buffers each, and dq's accumulator.
        per_query = lanes * (8 * itemsize + 4)
        # k and v in one buffer, dk and dv in two, and the two accumulators.
        per_key = lanes * (6 * itemsize + 8)
        query_stretch = min(
            round_up(spec.queries, queries), max(queries, 2048 // queries * queries)
        )
        if dense_bytes:
            query_stretch = queries
        per_key += row_bytes + 2 * query_stretch * dense_bytes
        budget -= query_stretch * per_query
    else:
        query_stretch = queries
        per_key = lanes * 4 * itemsize + row_bytes + 2 * queries * dense_bytes
        budget -= queries * lanes * (4 * itemsize + 12)
    stretch = max(1, budget // per_key // keys)
    blocks = ceil_div(spec.keys, keys)
    stretch = min(blocks, ceil_div(blocks, ceil_div(blocks, stretch)))
    return Blocks(queries, keys, stretch * keys, query_stretch)


def _size(array: jax.Array) -> int:
    return array.size * array.dtype.itemsize


def forward_cost(spec: ScoreSpec, blocks: Blocks, q, k, extra) -> pl.CostEstimate:
    """Operations and main-memory traffic of the forward kernel, counted as it runs."""
    batch, heads, queries, dim = q.shape
    pairs = batch * heads * pairs_in_band(spec)
    passes = 1
    if ceil_div(spec.keys, blocks.key_stretch) > 1:
        share = pairs_in_band(spec) / max(1, spec.queries * spec.keys)
        rows = ceil_div(queries, blocks.queries)
        passes = max(1, int(heads // k.shape[1] * rows * share))
    moved = 2 * _size(q) + 4 * batch * heads * queries + 2 * passes * _size(k)
    return pl.CostEstimate(
        flops=4 * pairs * dim,
        transcendentals=pairs,
        bytes_accessed=moved + sum(_size(array) for array in extra),
    )


def backward_cost(spec: ScoreSpec, blocks: Blocks, q, k, extra) -> pl.CostEstimate:
    """Operations and main-memory traffic of the backward kernel, counted as it runs."""
    batch, heads, queries, dim = q.shape
    pairs = batch * heads * pairs_in_band(spec)
    stretches = ceil_div(spec.keys, blocks.key_stretch)
    gradient = 1 if stretches == 1 else stretches * 4 / q.dtype.itemsize
    moved = int((3 * stretches + gradient) * _size(q)) + 4 * _size(k)
    moved += 8 * stretches * batch * heads * queries
    return pl.CostEstimate(
        flops=10 * pairs * dim,
        transcendentals=pairs,
        bytes_accessed=moved + sum(_size(array) for array in extra),
    )


def in_main_memory(interpret: bool, *arrays: jax.Array) -> list[jax.Array]:
    """Keeps XLA from staging whole operands in VMEM, which the kernel fills itself."""
    if interpret:
        return list(arrays)
    return [pltpu.with_memory_space_constraint(array, pltpu.HBM) for array in arrays]


def tile_rows(
    tile: Float[Array, "rows dim"], first: Int[Array, ""], length: int
) -> Float[Array, "rows dim"]:
    """Zeroes the rows past the end of the array: a ragged block has anything there."""
    row = jax.lax.broadcasted_iota(jnp.int32, tile.shape, 0)
    return jnp.where(row < length - first, tile, jnp.zeros_like(tile))


def segment_column(row: Int[Array, "1 block"]) -> Int[Array, "block 1"]:
    """Turns a row along the lanes into a column along the sublanes."""
    return jnp.broadcast_to(row, (128, row.shape[1])).T[:, :1]
