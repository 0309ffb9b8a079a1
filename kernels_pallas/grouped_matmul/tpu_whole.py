"""The product of `grouped_matmul` on TPU where VMEM takes one whole matrix, but not two.

Everything is then read once. The kernel fetches the matrices itself, some columns at a time, into a
ring that holds one matrix and one part more. The last tile of a group hands the place of each part
that it is done with to the next group's matrix, so that the change of matrix hides behind the
products of that tile. The rows are split into two halves that share nothing, for chips with two
cores.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from kernels_pallas.grouped_matmul.tpu_blocks import VMEM_LIMIT, Blocks, in_parts, write_rows
from kernels_pallas.grouped_matmul.visits import group_bounds, halves_of_rows, split_visits
from kernels_pallas.tiling import promoted, result_type

__all__ = ["whole_matrix_product"]


class _Tables(NamedTuple):
    """Flat int32 tables in scalar memory, those of the first half and then those of the second.

    Attributes:
      tile, group, start, end: As in `Visits`, [halves * visits].
      used: Groups that have rows, in order, [halves * groups].
      rank: Place of each group among those, [halves * groups].
      count: How many they are, [halves].
    """

    tile: Int[Array, " visits"]
    group: Int[Array, " visits"]
    start: Int[Array, " visits"]
    end: Int[Array, " visits"]
    used: Int[Array, " groups"]
    rank: Int[Array, " groups"]
    count: Int[Array, " halves"]


def _tables(
    group_sizes: Int[Array, " groups"], num_rows: int, height: int, halves: list[tuple[int, int]]
) -> _Tables:
    """Visits of each half, and the matrices that it needs."""
    starts, ends = group_bounds(group_sizes, num_rows)
    parts = []
    for first, past in halves:
        needed = jnp.minimum(ends, past) > jnp.maximum(starts, first)
        used = jnp.argsort(jnp.logical_not(needed), stable=True).astype(jnp.int32)
        through = jnp.cumsum(needed, dtype=jnp.int32)
        parts.append((used, through - needed.astype(jnp.int32), through[-1:]))
    needs = (jnp.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return _Tables(*split_visits(group_sizes, num_rows, height, halves), *needs)


def _kernel(
    tile_ref,
    group_ref,
    start_ref,
    end_ref,
    used_ref,
    rank_ref,
    count_ref,
    x_ref,
    w_ref,
    y_ref,
    ring_ref,
    sems,
    *,
    blocks: Blocks,
    transpose_w: bool,
):
    half, turn = pl.program_id(0), pl.program_id(1)
    turns = pl.num_programs(1)
    parts, slots = blocks.outer // blocks.copy, ring_ref.shape[0]
    first_group = half * w_ref.shape[0]
    visit = half * turns + turn
    group = group_ref[visit]
    first_row = tile_ref[visit] * blocks.rows
    start, end = start_ref[visit], end_ref[visit]
    after = visit + (turn < turns - 1).astype(jnp.int32)
    opens = (turn == 0) | (group_ref[jnp.maximum(visit - 1, 0)] != group)
    # Turns without rows name a matrix too.
    closes = (after == visit) | (group_ref[after] != group) | (start_ref[after] == end_ref[after])

    # Parts of matrices are counted in the order in which this half uses them.
    def fetch(entry: Any) -> Any:
        matrix = used_ref[first_group + jax.lax.div(entry, parts)]
        first = pl.multiple_of(jax.lax.rem(entry, parts) * blocks.copy, blocks.copy)
        columns, slot = pl.ds(first, blocks.copy), jax.lax.rem(entry, slots)
        part = w_ref.at[matrix, columns, :] if transpose_w else w_ref.at[matrix, :, columns]
        return pltpu.make_async_copy(part, ring_ref.at[slot], sems.at[slot])

    def start_fetch(entry: Any) -> None:
        pl.when(entry < count_ref[half] * parts)(lambda: fetch(entry).start())

    pl.when(turn == 0)(lambda: pl.loop(0, slots)(start_fetch))

    @pl.when((start == end) & (start < first_row + blocks.rows))
    def _():
        zeros = jnp.zeros(y_ref.shape, jnp.float32)
        write_rows(y_ref, pl.ds(0, blocks.rows), slice(None), zeros, start, first_row)

    @pl.when(start < end)
    def _():
        first_entry = rank_ref[first_group + group] * parts

        @pl.loop(0, parts)
        def _(part):
            entry = first_entry + part
            pl.when(opens)(lambda: fetch(entry).wait())
            columns = pl.ds(pl.multiple_of(part * blocks.copy, blocks.copy), blocks.copy)

            def multiply(rows: pl.Slice, cut: bool) -> None:
                del cut  # Rows of other groups are not written.
                x, w = x_ref[rows, :], ring_ref[jax.lax.rem(entry, slots)]
                dtype = promoted(x.dtype, w.dtype)
                y = jax.lax.dot_general(
                    x.astype(dtype),
                    w.astype(dtype),
                    (((1,), (1 if transpose_w else 0,)), ((), ())),
                    preferred_element_type=jnp.float32,
                )
                write_rows(y_ref, rows, columns, y, start, first_row)

            in_parts(multiply, start, end, first_row, blocks.rows)
            pl.when(closes)(lambda: start_fetch(entry + slots))


def whole_matrix_product(
    x: Float[Array, "m k"],
    w: Float[Array, "groups k n"],
    group_sizes: Int[Array, " groups"],
    dtype: Any,
    blocks: Blocks,
    *,
    transpose_w: bool,
    interpret: bool,
) -> Float[Array, "m n"]:
    """Multiplies each group of rows with its matrix.

    Args:
      x: Rows [m, k], sorted by group.
      w: Matrices [groups, k, n], or [groups, n, k] with ``transpose_w``.
      group_sizes: Rows of each group.
      dtype: Of the result.
      blocks: Sizes with ``copy``: k is ``inner``, and n is ``outer``, a multiple of ``copy``.
      transpose_w: Contract over the last axis of w.
      interpret: Run step by step instead of compiled.

    Returns:
      [m, n]; rows past the last group are 0.
    """
    (rows, inner), outer = x.shape, blocks.outer
    halves = halves_of_rows(rows, blocks.rows)
    tables = _tables(group_sizes, rows, blocks.rows, halves)
    turns = tables.tile.shape[0] // len(halves)
    slots = outer // blocks.copy + 1
    part = (blocks.copy, inner) if transpose_w else (inner, blocks.copy)
    return pl.pallas_call(
        functools.partial(_kernel, blocks=blocks, transpose_w=transpose_w),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(tables),
            grid=(len(halves), turns),
            in_specs=[
                pl.BlockSpec((blocks.rows, inner), lambda h, v, tile, *_: (tile[h * turns + v], 0)),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=pl.BlockSpec(
                (blocks.rows, outer), lambda h, v, tile, *_: (tile[h * turns + v], 0)
            ),
            scratch_shapes=[
                pltpu.VMEM((slots, *part), w.dtype),
                pltpu.SemaphoreType.DMA((slots,)),
            ],
        ),
        out_shape=result_type((rows, outer), dtype, x, w, group_sizes),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=VMEM_LIMIT,
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * rows * inner * outer,
            transcendentals=0,
            bytes_accessed=blocks.bytes_accessed,
        ),
        interpret=interpret,
        name="grouped_matmul_transposed" if transpose_w else "grouped_matmul_forward",
    )(*tables, x, w)
