"""The backward Mosaic kernel behind `block_sparse_attention`.

It works as that of `kernels_pallas.attention`: transposed tiles [keys, queries], a stretch of keys
with its accumulators in VMEM while the queries pass by, and a part of dq in float32 for each
stretch when there are several. Each block of keys walks the list of the query blocks that keep it.

Where that saves a stretch, dk and dv leave VMEM in slices, in turns of the grid after the last
queries, so that their buffers are small.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from kernels_pallas.attention.scores import LOG2E, dot
from kernels_pallas.attention.tpu_backward import clean_row
from kernels_pallas.attention.tpu_blocks import in_main_memory, tile_rows, vmem_limit
from kernels_pallas.block_sparse_attention.pattern import BlockPattern
from kernels_pallas.block_sparse_attention.tpu_lists import (
    TILE_BYTES,
    Lists,
    fetch_tile,
    make_lists,
    tile_specs,
    visited_pairs,
)
from kernels_pallas.tiling import ceil_div, result_type, round_up

__all__ = ["block_sparse_backward"]

# Scalar memory that the lists of one stretch of keys may take, bytes.
_LIST_BYTES = 192 << 10
# Queries in VMEM at a time; those and the keys whose gradients are written at a time in slices.
_QUERIES = 2048
_SLICE = 1024


def _backward_kernel(
    index_ref, number_ref, starts_ref, q_ref, o_ref, do_ref, lse_ref, dlse_ref, k_ref, v_ref,
    tiles_ref, dq_ref, dk_ref, dv_ref, delta_ref, dq_acc, dk_acc, dv_acc, *fetched, lists: Lists,
    key_blocks: int, slices: int,
):  # fmt: skip
    stretch, turn = pl.program_id(2), pl.program_id(3)
    parts = pl.num_programs(3) - (slices - 1)
    # The turns after the last part only write.
    part = jnp.minimum(turn, parts - 1)
    block, length, dim = lists.block, lists.length, q_ref.shape[1]
    blocks = ceil_div(length, block)
    ragged = length % block != 0

    @pl.when(turn == 0)
    def _():
        dk_acc[...] = jnp.zeros_like(dk_acc)
        dv_acc[...] = jnp.zeros_like(dv_acc)

    def row_sums(i):
        rows = pl.ds(pl.multiple_of(i * block, block), block)
        product = o_ref[rows, :].astype(jnp.float32) * do_ref[rows, :].astype(jnp.float32)
        total = jnp.broadcast_to(jnp.sum(product, axis=1, keepdims=True), (block, 128))
        delta_ref[:, rows] = total.T[:1] - dlse_ref[:, rows]

    def key_block(j):
        keys = pl.ds(pl.multiple_of(j * block, block), block)
        k, v = k_ref[keys, :], v_ref[keys, :]
        if ragged:
            first = (stretch * key_blocks + j) * block
            k, v = tile_rows(k, first, length), tile_rows(v, first, length)

        def query_block(t):
            i = index_ref[j, t]
            number = number_ref[j, t]
            rows = pl.ds(pl.multiple_of((i - part * lists.stretch_blocks) * block, block), block)
            q, do = q_ref[rows, :], do_ref[rows, :]
            if ragged:
                q, do = (tile_rows(x, i * block, length) for x in (q, do))
            lse = clean_row(lse_ref[:, rows], i * block, length, True)
            delta = clean_row(delta_ref[:, rows], i * block, length, False)
            s = dot(k, q, 1, 1) * (dim**-0.5 * LOG2E)
            slopes = dot(v, do, 1, 1) - delta

            def update(s):
                p = jnp.exp2(s - lse * LOG2E)
                dv_acc[keys, :] += dot(p.astype(do.dtype), do, 1, 0)
                ds = (p * slopes).astype(q.dtype)
                dk_acc[keys, :] += dot(ds, q, 1, 0)
                dq_acc[rows, :] += dot(ds, k, 0, 0)

            @pl.when(number == 0)
            def _():
                update(s)

            @pl.when(number > 0)
            def _():
                update(jnp.where(fetch_tile(tiles_ref, fetched, number - 1), s, -jnp.inf))

        pl.loop(starts_ref[j, part], starts_ref[j, part + 1])(query_block)

    @pl.when(turn < parts)
    def _():
        dq_acc[...] = jnp.zeros_like(dq_acc)
        pl.loop(0, lists.stretch_blocks)(row_sums)
        pl.loop(0, jnp.minimum(key_blocks, blocks - stretch * key_blocks))(key_block)
        dq_ref[...] = (dq_acc[...] * dim**-0.5).astype(dq_ref.dtype)

    height = dk_ref.shape[0]
    slice_ = turn - (parts - 1)
    first = (stretch * slices + slice_) * height

    # A stretch that the sequence doesn't fill has slices past its end.
    @pl.when((slice_ >= 0) & (first < blocks * block))
    def _():
        rows = pl.ds(pl.multiple_of(slice_ * height, height), height)
        dk_ref[...] = (dk_acc[rows, :] * dim**-0.5).astype(dk_ref.dtype)
        dv_ref[...] = dv_acc[rows, :].astype(dv_ref.dtype)


class _Sizes(NamedTuple):
    """What is in VMEM at a time, in blocks of the pattern.

    Attributes:
      keys: Keys with their gradients' sums.
      queries: Queries.
      slice: Keys whose gradients are written at a time; divides ``keys``.
    """

    keys: int
    queries: int
    slice: int


def _sizes(pattern: BlockPattern, head_dim: int, itemsize: int) -> _Sizes:
    """Sizes that fit in VMEM and need the fewest stretches of keys."""
    block, blocks = pattern.block, pattern.kv_index.shape[1]
    row = round_up(head_dim, 128) * block
    most = max(1, _LIST_BYTES // (8 * round_up(pattern.q_index.shape[2], 128)))
    limit = vmem_limit() - 2 * min(pattern.elements.size, TILE_BYTES)

    def stretch(queries: int, slice_blocks: int, spare: int) -> int:
        # q, o, do and dq in two buffers each, and dq's accumulator.
        budget = limit - spare - queries * row * (8 * itemsize + 4)
        # k and v in one buffer, the two accumulators, and dk and dv in two buffers.
        each = row * (2 * itemsize + 8)
        if slice_blocks:
            budget -= slice_blocks * row * 4 * itemsize
        else:
            each += row * 4 * itemsize
        return min(max(1, budget // each), most)

    queries = min(blocks, max(1, _QUERIES // block))
    keys = stretch(queries, 0, 12 << 20)
    # A block of the lists has whole tiles of eight rows, or all rows.
    keys = blocks if keys >= blocks else min(blocks, max(8, keys // 8 * 8))
    found = _Sizes(keys, queries, keys)
    part = max(1, _SLICE // block)
    queries = min(blocks, part)
    # The products' operands and results: five arrays of a tile's size or so.
    keys = stretch(queries, part, (2 << 20) + 20 * block**2)
    step = math.lcm(8, part)
    whole = blocks if blocks % part == 0 else round_up(blocks, step)
    keys = whole if keys >= whole else keys // step * step
    if part < keys and ceil_div(blocks, keys) < ceil_div(blocks, found.keys):
        found = _Sizes(keys, queries, part)
    return found


def block_sparse_backward(
    interpret: bool,
    q: Float[Array, "batch heads length dim"],
    k: Float[Array, "batch heads length dim"],
    v: Float[Array, "batch heads length dim"],
    out: Float[Array, "batch heads length dim"],
    lse: Float[Array, "batch heads length"],
    do: Float[Array, "batch heads length dim"],
    dlse: Float[Array, "batch heads length"],
    pattern: BlockPattern,
) -> tuple[Array, Array, Array]:
    """Gradients of q, k and v from the forward results and their gradients."""
    batch, heads, length, dim = q.shape
    block, blocks = pattern.block, pattern.kv_index.shape[1]
    most = pattern.q_index.shape[2]
    itemsize = q.dtype.itemsize
    key_blocks, piece, slice_blocks = _sizes(pattern, dim, itemsize)
    slices = key_blocks // slice_blocks
    lists = Lists(block, length, piece)
    stretches, pieces = ceil_div(blocks, key_blocks), ceil_div(blocks, piece)
    tables = make_lists(pattern.q_index, pattern.q_partial, pattern.q_count, blocks, lists)
    per_map = int(pattern.heads > 1)

    def part(turn):
        return jnp.minimum(turn, pieces - 1)

    def written(s, turn):
        # The last slice that has keys: it stays where it is while there is nothing to write.
        last = ceil_div(blocks, slice_blocks) - 1
        return jnp.minimum(s * slices + jnp.maximum(turn - (pieces - 1), 0), last)

    of_query = pl.BlockSpec((None, None, piece * block, dim), lambda b, h, s, i: (b, h, part(i), 0))
    of_row = pl.BlockSpec((None, None, 1, piece * block), lambda b, h, s, i: (b, h, 0, part(i)))
    of_key = pl.BlockSpec(
        (None, None, key_blocks * block, dim),
        lambda b, h, s, i: (b, h, s, 0),
        pipeline_mode=pl.Buffered(1),
    )
    of_key_gradient = pl.BlockSpec(
        (None, None, slice_blocks * block, dim), lambda b, h, s, i: (b, h, written(s, i), 0)
    )

    def of_list(width):
        return pl.BlockSpec(
            (None, key_blocks, width),
            lambda b, h, s, i: (h * per_map, s, 0),
            memory_space=pltpu.SMEM,
        )

    # Stored keys by queries, as the kernel's tiles are.
    tiles = jnp.asarray(pattern.elements).astype(jnp.int8).swapaxes(1, 2)
    tiles_spec, fetched = tile_specs(tiles)
    operands = [q, out, do, lse[:, :, None], dlse[:, :, None], k, v]
    size = q.size * itemsize
    gradient = size if stretches == 1 else stretches * 4 * q.size
    pairs = batch * heads * visited_pairs(pattern)
    dq, dk, dv = pl.pallas_call(
        functools.partial(_backward_kernel, lists=lists, key_blocks=key_blocks, slices=slices),
        grid=(batch, heads, stretches, pieces + slices - 1),
        in_specs=[
            of_list(most), of_list(most), of_list(pieces + 1),
            of_query, of_query, of_query, of_row, of_row, of_key, of_key, tiles_spec,
        ],
        out_specs=[
            pl.BlockSpec(
                (None, None, None, piece * block, dim), lambda b, h, s, i: (s, b, h, part(i), 0)
            ),
            of_key_gradient,
            of_key_gradient,
        ],
        out_shape=[
            result_type(
                (stretches, *q.shape), q.dtype if stretches == 1 else jnp.float32, *operands
            ),
            result_type(k.shape, k.dtype, *operands),
            result_type(v.shape, v.dtype, *operands),
        ],
        scratch_shapes=[
            pltpu.VMEM((1, piece * block), jnp.float32),
            pltpu.VMEM((piece * block, dim), jnp.float32),
            pltpu.VMEM((key_blocks * block, dim), jnp.float32),
            pltpu.VMEM((key_blocks * block, dim), jnp.float32),
            *fetched,
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=vmem_limit(),
        ),
        cost_estimate=pl.CostEstimate(
            flops=10 * pairs * dim,
            transcendentals=pairs,
            bytes_accessed=3 * stretches * size + gradient + 4 * size + 8 * stretches * lse.size,
        ),
        interpret=interpret,
        name="block_sparse_backward",
    )(
        tables.index[:, :, 0],
        tables.number[:, :, 0],
        tables.starts[:, :, 0],
        *in_main_memory(interpret, *operands, tiles),
    )  # fmt: skip
    return dq[0] if stretches == 1 else dq.sum(axis=0).astype(q.dtype), dk, dv
