"""Mosaic TPU kernels of `grouped_matmul`: the product, and the gradient of the weights.

The grid walks over visits (see `visits`): tables in scalar memory say which tile of rows and which
matrix each turn reads, so that blocks are fetched ahead and a block that the next turn needs again
stays where it is. With the whole inner dimension in a block every matrix is read once per sweep,
and with the whole outer dimension too the rows are read once.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from kernels_pallas.dispatch import block_sizes
from kernels_pallas.grouped_matmul.kernel_vjp import with_vjp
from kernels_pallas.grouped_matmul.visits import output_visits, weight_visits
from kernels_pallas.tiling import ceil_div, promoted, result_type

__all__ = ["Blocks", "forward_blocks", "grouped_matmul_tpu", "weight_blocks"]

_MIB = 1 << 20
# Every TPU from v5e on has at least 64 MiB of VMEM a core.
_VMEM_LIMIT = 60 * _MIB
_VMEM_BUDGET = 44 * _MIB
# Rows that are worked on at once where a tile is cut.
_PART = 128


class Blocks(NamedTuple):
    """Block sizes of one product of [rows, inner] and [inner, outer] or its weight gradient.

    Attributes:
      rows: Height of a tile of rows.
      inner: Columns of x in a block.
      outer: Columns of the result (or of dy) in a block.
      bytes_accessed: What the kernel moves to and from main memory with these blocks.
    """

    rows: int
    inner: int
    outer: int
    bytes_accessed: int

    @property
    def cost(self) -> float:
        """Traffic, made dearer for low tiles: they wait on the matrix unit's weights."""
        return self.bytes_accessed * (1 + 64 / self.rows)


def _sizes(whole: int) -> list[int]:
    """The dimension itself, then multiples of 128 below it."""
    return [whole, *(s for s in (8192, 4096, 2048, 1024, 512, 256, 128) if s < whole)]


def _candidates(
    kernel: str, rows: int, inner: int, outer: int, groups: int
) -> list[tuple[int, int, int]]:
    """Blocks (rows, inner, outer) to choose from: the tuned ones if the table has them."""
    if jax.default_backend() == "tpu":
        kind = jax.devices()[0].device_kind
        tuned = block_sizes(kernel, kind, f"g{groups}_k{inner}_n{outer}")
        if tuned is not None:
            return [(min(tuned["rows"], rows), tuned["inner"], tuned["outer"])]
    heights = [rows] if rows <= 128 else [s for s in (512, 256, 128) if s <= rows]
    return list(itertools.product(heights, _sizes(inner), _sizes(outer)))


def forward_blocks(
    rows: int, inner: int, outer: int, groups: int, x_bytes: int, w_bytes: int, y_bytes: int
) -> Blocks:
    """Blocks with the least traffic that fit in VMEM twice (one in use, one on its way)."""
    candidates = _candidates("grouped_matmul", rows, inner, outer, groups)
    best: Blocks | None = None
    for height, bk, bn in candidates:
        vmem = 2 * (height * bk * x_bytes + bk * bn * w_bytes + height * bn * y_bytes)
        vmem += 2 * height * bn * 4
        if vmem > _VMEM_BUDGET and len(candidates) > 1:
            continue
        visits = ceil_div(rows, height) + groups
        sweeps = ceil_div(outer, bn)
        if bk == inner:
            traffic = sweeps * rows * inner * x_bytes + groups * inner * outer * w_bytes
        else:
            traffic = visits * inner * (sweeps * height * x_bytes + outer * w_bytes)
        found = Blocks(height, bk, bn, traffic + rows * outer * y_bytes)
        if best is None or found.cost < best.cost:
            best = found
    assert best is not None, "the smallest blocks fit in any VMEM"
    return best


def weight_blocks(
    rows: int, inner: int, outer: int, groups: int, x_bytes: int, dy_bytes: int, w_bytes: int
) -> Blocks:
    """The same for ``dw[g] = x[rows of g].T @ dy[rows of g]``, whose result stays in VMEM."""
    candidates = _candidates("grouped_matmul_dw", rows, inner, outer, groups)
    best: Blocks | None = None
    for height, bk, bn in candidates:
        vmem = 2 * (height * bk * x_bytes + height * bn * dy_bytes + bk * bn * w_bytes)
        vmem += 2 * bk * bn * 4 + height * (bk * x_bytes + bn * dy_bytes)
        if vmem > _VMEM_BUDGET and len(candidates) > 1:
            continue
        traffic = ceil_div(outer, bn) * rows * inner * x_bytes
        traffic += ceil_div(inner, bk) * rows * outer * dy_bytes
        found = Blocks(height, bk, bn, traffic + groups * inner * outer * w_bytes)
        if best is None or found.cost < best.cost:
            best = found
    assert best is not None, "the smallest blocks fit in any VMEM"
    return best


def _row_mask(start, end, first_row, height: int) -> Array:
    row = first_row + jax.lax.broadcasted_iota(jnp.int32, (height, 1), 0)
    return (row >= start) & (row < end)


def _zero_past(block: Array, left: Any, axis: int) -> Array:
    """Zeros what a ragged last block holds past the array's edge (it may be NaN)."""
    index = jax.lax.broadcasted_iota(jnp.int32, block.shape, axis)
    return jnp.where(index < left, block, jnp.zeros_like(block))


def _in_parts(
    run: Callable[[pl.Slice, bool], None], start: Any, end: Any, first_row: Any, height: int
) -> None:
    """Calls ``run(rows, cut)`` for a whole tile, or for the touched parts of a tile that is cut.

    A border between groups then costs the work of a part and not that of one more tile.
    """
    whole = (start <= first_row) & (end >= first_row + height)
    pl.when(whole)(lambda: run(pl.ds(0, height), False))
    step = _PART if height % _PART == 0 else height

    @pl.when((start < end) & jnp.logical_not(whole))
    def _():
        @pl.loop(0, height // step)
        def _(part):
            offset = pl.multiple_of(part * step, step)
            first = first_row + offset

            @pl.when((start < first + step) & (end > first))
            def _():
                run(pl.ds(offset, step), True)


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
    visit, k = pl.program_id(1), pl.program_id(2)
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
        # Rows before the visit's group belong to earlier visits of this tile; those after it are
        # written by later ones.
        first = first_row + rows.start

        @pl.when(start <= first)
        def _():
            y_ref[rows, :] = y.astype(y_ref.dtype)

        @pl.when(start > first)
        def _():
            own = _row_mask(start, end_of_tile, first, rows.size)
            y_ref[rows, :] = jnp.where(own, y.astype(y_ref.dtype), y_ref[rows, :])

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

    end_of_tile = first_row + blocks.rows

    @pl.when((start == end) & (k == 0) & (start < end_of_tile))
    def _():
        write(pl.ds(0, blocks.rows), jnp.zeros(y_ref.shape, jnp.float32))

    _in_parts(accumulate, start, end, first_row, blocks.rows)


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
    visits = output_visits(group_sizes, rows, blocks.rows)
    steps = ceil_div(inner, blocks.inner)

    def x_index(n, v, k, tile, group, start, end):
        return tile[v], k

    def w_index(n, v, k, tile, group, start, end):
        return (group[v], n, k) if transpose_w else (group[v], k, n)

    def y_index(n, v, k, tile, group, start, end):
        return tile[v], n

    w_block = (1, blocks.outer, blocks.inner) if transpose_w else (1, blocks.inner, blocks.outer)
    scratch = [pltpu.VMEM((blocks.rows, blocks.outer), jnp.float32)] if steps > 1 else []
    return pl.pallas_call(
        functools.partial(_forward_kernel, blocks=blocks, inner=inner, transpose_w=transpose_w),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(ceil_div(outer, blocks.outer), visits.tile.shape[0], steps),
            in_specs=[
                pl.BlockSpec((blocks.rows, blocks.inner), x_index),
                pl.BlockSpec(w_block, w_index),
            ],
            out_specs=pl.BlockSpec((blocks.rows, blocks.outer), y_index),
            scratch_shapes=scratch,
        ),
        out_shape=result_type((rows, outer), dtype, x, w, group_sizes),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=_VMEM_LIMIT,
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * rows * inner * outer,
            transcendentals=0,
            bytes_accessed=blocks.bytes_accessed,
        ),
        interpret=interpret,
        name="grouped_matmul_transposed" if transpose_w else "grouped_matmul_forward",
    )(*visits, x, w)


def _weight_kernel(
    tile_ref, group_ref, start_ref, end_ref, x_ref, dy_ref, dw_ref, acc_ref, *, blocks: Blocks
):
    visit = pl.program_id(2)
    last = pl.num_programs(2) - 1
    group = group_ref[visit]
    first_row = tile_ref[visit] * blocks.rows
    start, end = start_ref[visit], end_ref[visit]
    opens = (visit == 0) | (group_ref[jnp.maximum(visit - 1, 0)] != group)
    closes = (visit == last) | (group_ref[jnp.minimum(visit + 1, last)] != group)

    @pl.when(opens)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)

    def add(rows: pl.Slice, cut: bool) -> None:
        x, dy = x_ref[rows, :], dy_ref[rows, :]
        if cut:
            # Both sides: zero times the NaN of a row that belongs to nobody is NaN.
            own = _row_mask(start, end, first_row + rows.start, rows.size)
            x, dy = (jnp.where(own, a, jnp.zeros_like(a)) for a in (x, dy))
        dtype = promoted(x.dtype, dy.dtype)
        acc_ref[...] += jax.lax.dot_general(
            x.astype(dtype),
            dy.astype(dtype),
            (((0,), (0,)), ((), ())),
            preferred_element_type=jnp.float32,
        )

    _in_parts(add, start, end, first_row, blocks.rows)

    @pl.when(closes)
    def _():
        dw_ref[0] = acc_ref[...].astype(dw_ref.dtype)


def _weight_gradient(
    x: Float[Array, "m k"],
    dy: Float[Array, "m n"],
    group_sizes: Int[Array, " groups"],
    dtype: Any,
    *,
    interpret: bool,
) -> Float[Array, "groups k n"]:
    rows, inner = x.shape
    outer, groups = dy.shape[1], group_sizes.shape[0]
    blocks = weight_blocks(
        rows, inner, outer, groups, x.dtype.itemsize, dy.dtype.itemsize, jnp.dtype(dtype).itemsize
    )
    visits = weight_visits(group_sizes, rows, blocks.rows)
    return pl.pallas_call(
        functools.partial(_weight_kernel, blocks=blocks),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(
                ceil_div(inner, blocks.inner),
                ceil_div(outer, blocks.outer),
                visits.tile.shape[0],
            ),
            in_specs=[
                pl.BlockSpec((blocks.rows, blocks.inner), lambda k, n, v, tile, *_: (tile[v], k)),
                pl.BlockSpec((blocks.rows, blocks.outer), lambda k, n, v, tile, *_: (tile[v], n)),
            ],
            out_specs=pl.BlockSpec(
                (1, blocks.inner, blocks.outer),
                lambda k, n, v, tile, group, start, end: (group[v], k, n),
            ),
            scratch_shapes=[pltpu.VMEM((blocks.inner, blocks.outer), jnp.float32)],
        ),
        out_shape=result_type((groups, inner, outer), dtype, x, dy, group_sizes),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=_VMEM_LIMIT,
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * rows * inner * outer,
            transcendentals=0,
            bytes_accessed=blocks.bytes_accessed,
        ),
        interpret=interpret,
        name="grouped_matmul_weights",
    )(*visits, x, dy)


_run = with_vjp(_forward, _weight_gradient)


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
