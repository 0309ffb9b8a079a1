"""Mosaic TPU kernels of `grouped_matmul`.

The grid walks over visits (see `visits`): tables in scalar memory say which tile of rows and which
matrix each turn reads, so that blocks are fetched ahead and a block that the next turn needs again
stays where it is. With the whole inner dimension in a block every matrix is read once per sweep,
and with the whole outer dimension too the rows are read once. Matrices of which VMEM takes one but
not two whole have a kernel of their own, `tpu_whole`.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from kernels_pallas.grouped_matmul.kernel_vjp import with_vjp
from kernels_pallas.grouped_matmul.tpu_blocks import (
    VMEM_LIMIT,
    Blocks,
    forward_blocks,
    in_parts,
    write_rows,
)
from kernels_pallas.grouped_matmul.tpu_weights import weight_gradient
from kernels_pallas.grouped_matmul.tpu_whole import whole_matrix_product
from kernels_pallas.grouped_matmul.visits import halves_of_rows, split_visits
from kernels_pallas.tiling import ceil_div, promoted, result_type

__all__ = ["grouped_matmul_tpu"]


def _zero_past(block: Array, left: Any, axis: int) -> Array:
    """Zeros what a ragged last block holds past the array's edge (it may be NaN)."""
    index = jax.lax.broadcasted_iota(jnp.int32, block.shape, axis)
    return jnp.where(index < left, block, jnp.zeros_like(block))


def _forward_kernel(
    tile_ref,
    group_ref,
    start_ref,
    end_ref,
    x_ref,
    w_ref,
    y_ref,
    *scratch,
    blocks: Blocks,
    inner: int,
    transpose_w: bool,
):
    del group_ref  # Only the index maps read it.
    visit = pl.program_id(0) * pl.num_programs(2) + pl.program_id(2)
    k = pl.program_id(3)
    steps = ceil_div(inner, blocks.inner)
    first_row = tile_ref[visit] * blocks.rows
    start, end = start_ref[visit], end_ref[visit]

    def product(rows: pl.Slice) -> Array:
        x, w = x_ref[rows, :], w_ref[0]
        if inner % blocks.inner:
            left = inner - k * blocks.inner
            x = _zero_past(x, left, 1)
            w = _zero_past(w, left, 1 if transpose_w else 0)
        dtype = promoted(x.dtype, w.dtype)
        return jax.lax.dot_general(
            x.astype(dtype),
            w.astype(dtype),
            (((1,), (1 if transpose_w else 0,)), ((), ())),
            preferred_element_type=jnp.float32,
        )

    def write(rows: pl.Slice, y: Array) -> None:
        write_rows(y_ref, rows, slice(None), y, start, first_row)

    def accumulate(rows: pl.Slice, cut: bool) -> None:
        del cut  # Rows of other groups are not written.
        if steps == 1:
            write(rows, product(rows))
            return
        (acc_ref,) = scratch

        @pl.when(k == 0)
        def _():
            acc_ref[rows, :] = product(rows)

        @pl.when(k > 0)
        def _():
            acc_ref[rows, :] += product(rows)

        @pl.when(k == steps - 1)
        def _():
            write(rows, acc_ref[rows, :])

    @pl.when((start == end) & (k == 0) & (start < first_row + blocks.rows))
    def _():
        write(pl.ds(0, blocks.rows), jnp.zeros(y_ref.shape, jnp.float32))

    in_parts(accumulate, start, end, first_row, blocks.rows)


def _forward(
    x: Float[Array, "m k"],
    w: Float[Array, "groups k n"],
    group_sizes: Int[Array, " groups"],
    dtype: Any,
    *,
    transpose_w: bool,
    interpret: bool,
) -> Float[Array, "m n"]:
    rows, inner = x.shape
    groups, outer = w.shape[0], w.shape[1 if transpose_w else 2]
    blocks = forward_blocks(
        rows, inner, outer, groups, x.dtype.itemsize, w.dtype.itemsize, jnp.dtype(dtype).itemsize
    )
    if blocks.copy:
        return whole_matrix_product(
            x, w, group_sizes, dtype, blocks, transpose_w=transpose_w, interpret=interpret
        )
    sweeps, steps = ceil_div(outer, blocks.outer), ceil_div(inner, blocks.inner)
    # One sweep would leave a chip's second core idle; its rows are worked on in two halves.
    parts = halves_of_rows(rows, blocks.rows) if sweeps == 1 else [(0, rows)]
    visits = split_visits(group_sizes, rows, blocks.rows, parts)
    turns = visits.tile.shape[0] // len(parts)

    def x_index(p, n, v, k, tile, group, start, end):
        return tile[p * turns + v], k

    def w_index(p, n, v, k, tile, group, start, end):
        matrix = group[p * turns + v]
        return (matrix, n, k) if transpose_w else (matrix, k, n)

    def y_index(p, n, v, k, tile, group, start, end):
        return tile[p * turns + v], n

    w_block = (1, blocks.outer, blocks.inner) if transpose_w else (1, blocks.inner, blocks.outer)
    scratch = [pltpu.VMEM((blocks.rows, blocks.outer), jnp.float32)] if steps > 1 else []
    return pl.pallas_call(
        functools.partial(_forward_kernel, blocks=blocks, inner=inner, transpose_w=transpose_w),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(len(parts), sweeps, turns, steps),
            in_specs=[
                pl.BlockSpec((blocks.rows, blocks.inner), x_index),
                pl.BlockSpec(w_block, w_index),
            ],
            out_specs=pl.BlockSpec((blocks.rows, blocks.outer), y_index),
            scratch_shapes=scratch,
        ),
        out_shape=result_type((rows, outer), dtype, x, w, group_sizes),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=VMEM_LIMIT,
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * rows * inner * outer,
            transcendentals=0,
            # The matrix at the border of two halves is read in both.
            bytes_accessed=blocks.bytes_accessed
            + (len(parts) - 1) * inner * outer * w.dtype.itemsize,
        ),
        interpret=interpret,
        name="grouped_matmul_transposed" if transpose_w else "grouped_matmul_forward",
    )(*visits, x, w)


_run = with_vjp(_forward, weight_gradient)


def grouped_matmul_tpu(
    x: Float[Array, "m k"],
    w: Float[Array, "groups k n"],
    group_sizes: Int[Array, " groups"],
    *,
    transpose_w: bool = False,
    interpret: bool = False,
) -> Float[Array, "m n"]:
    """The TPU kernel with its VJP; see `kernels_pallas.grouped_matmul`.

    float32 operands meet the matrix unit at JAX's matmul precision in force, as any other dot.
    """
    return _run(transpose_w, interpret, x, w, group_sizes)
