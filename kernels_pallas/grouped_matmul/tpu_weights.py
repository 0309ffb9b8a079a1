"""The Mosaic TPU kernel behind the weights' gradient of `grouped_matmul`.

The sum over a group's rows stays in VMEM in float32 while they pass by. Either the pipeline writes
the result, from two buffers of its whole size, or the kernel does, through a small buffer: each
part of the sum leaves when the next group's first tile wants its place, so that the copies run
beside the products.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from kernels_pallas.grouped_matmul.tpu_blocks import (
    VMEM_LIMIT,
    Blocks,
    in_parts,
    row_mask,
    weight_blocks,
)
from kernels_pallas.grouped_matmul.visits import weight_visits
from kernels_pallas.tiling import ceil_div, promoted, result_type

__all__ = ["weight_gradient"]


def _kernel(
    tile_ref,
    group_ref,
    start_ref,
    end_ref,
    x_ref,
    dy_ref,
    dw_ref,
    acc_ref,
    *staging,
    blocks: Blocks,
):
    # Positions are read here: interpret mode knows them only outside of branches.
    k, n, visit = (pl.program_id(axis) for axis in range(3))
    last = pl.num_programs(2) - 1
    group = group_ref[visit]
    first_row = tile_ref[visit] * blocks.rows
    start, end = start_ref[visit], end_ref[visit]
    opens = (visit == 0) | (group_ref[jnp.maximum(visit - 1, 0)] != group)
    closes = (visit == last) | (group_ref[jnp.minimum(visit + 1, last)] != group)

    def add(down: pl.Slice, rows: pl.Slice, cut: bool) -> None:
        x, dy = x_ref[rows, down], dy_ref[rows, :]
        if cut:
            # Both sides: zero times the NaN of a row that belongs to nobody is NaN.
            own = row_mask(start, end, first_row + rows.start, rows.size)
            x, dy = (jnp.where(own, a, jnp.zeros_like(a)) for a in (x, dy))
        dtype = promoted(x.dtype, dy.dtype)
        acc_ref[down, :] += jax.lax.dot_general(
            x.astype(dtype),
            dy.astype(dtype),
            (((0,), (0,)), ((), ())),
            preferred_element_type=jnp.float32,
        )

    if not blocks.copy:

        @pl.when(opens)
        def _():
            acc_ref[...] = jnp.zeros_like(acc_ref)

        whole = pl.ds(0, blocks.inner)
        in_parts(functools.partial(add, whole), start, end, first_row, blocks.rows)

        @pl.when(closes)
        def _():
            dw_ref[0] = acc_ref[...].astype(dw_ref.dtype)

        return

    stage_ref, sems = staging
    parts = blocks.inner // blocks.copy

    def copy_out(group: Any, part: Any) -> Any:
        first = pl.multiple_of(k * blocks.inner + part * blocks.copy, blocks.copy)
        column = pl.multiple_of(n * blocks.outer, blocks.outer)
        slot = jax.lax.rem(part, 2)
        place = dw_ref.at[group, pl.ds(first, blocks.copy), pl.ds(column, blocks.outer)]
        return pltpu.make_async_copy(stage_ref.at[slot], place, sems.at[slot])

    def send(group: Any, part: Any, down: pl.Slice) -> None:
        copy = copy_out(group, part)
        # The copy that left this half of the buffer before, if there was one.
        pl.when((group > 0) | (part > 1))(copy.wait)
        stage_ref[jax.lax.rem(part, 2)] = acc_ref[down, :].astype(stage_ref.dtype)
        copy.start()

    @pl.loop(0, parts)
    def _(part):
        down = pl.ds(pl.multiple_of(part * blocks.copy, blocks.copy), blocks.copy)

        @pl.when(opens)
        def _():
            # Groups come in order and each has a visit, an empty one too.
            pl.when(group > 0)(lambda: send(group - 1, part, down))
            acc_ref[down, :] = jnp.zeros((blocks.copy, blocks.outer), jnp.float32)

        in_parts(functools.partial(add, down), start, end, first_row, blocks.rows)
        pl.when(visit == last)(lambda: send(group, part, down))

    @pl.when(visit == last)
    def _():
        for part in range(min(2, parts)):
            copy_out(group, jnp.int32(part)).wait()


def weight_gradient(
    x: Float[Array, "m k"],
    dy: Float[Array, "m n"],
    group_sizes: Int[Array, " groups"],
    dtype: Any,
    *,
    interpret: bool,
) -> Float[Array, "groups k n"]:
    """``x[rows of g].T @ dy[rows of g]`` of every group g, summed in float32.

    Args:
      x: Rows [m, k]; those past the last group may hold anything.
      dy: Rows [m, n], likewise.
      group_sizes: Rows of each group, in order.
      dtype: Of the result.
      interpret: Run step by step instead of compiled.

    Returns:
      [groups, k, n]; zeros for an empty group.
    """
    rows, inner = x.shape
    outer, groups = dy.shape[1], group_sizes.shape[0]
    blocks = weight_blocks(
        rows, inner, outer, groups, x.dtype.itemsize, dy.dtype.itemsize, jnp.dtype(dtype).itemsize
    )
    visits = weight_visits(group_sizes, rows, blocks.rows)
    scratch: list[Any] = [pltpu.VMEM((blocks.inner, blocks.outer), jnp.float32)]
    if blocks.copy:
        out_spec = pl.BlockSpec(memory_space=pl.ANY)
        scratch += [
            pltpu.VMEM((2, blocks.copy, blocks.outer), dtype),
            pltpu.SemaphoreType.DMA((2,)),
        ]
    else:
        out_spec = pl.BlockSpec(
            (1, blocks.inner, blocks.outer),
            lambda k, n, v, tile, group, start, end: (group[v], k, n),
        )
    return pl.pallas_call(
        functools.partial(_kernel, blocks=blocks),
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
            out_specs=out_spec,
            scratch_shapes=scratch,
        ),
        out_shape=result_type((groups, inner, outer), dtype, x, dy, group_sizes),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=VMEM_LIMIT,
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * rows * inner * outer,
            transcendentals=0,
            bytes_accessed=blocks.bytes_accessed,
        ),
        interpret=interpret,
        name="grouped_matmul_weights",
    )(*visits, x, dy)
