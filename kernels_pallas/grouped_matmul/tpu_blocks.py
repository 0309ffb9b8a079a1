"""Block sizes of the grouped-matmul kernels for TPU, and what their kernels share.

A model of the memory traffic chooses the blocks. Two kernels exist for each product: one whose
blocks all come and go by Pallas' pipeline, in two buffers each, and one that keeps its largest
operand (a matrix of `forward_blocks`, the result of `weight_blocks`) in VMEM once and moves it in
parts by copies of its own. The second is taken where it moves fewer bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

from kernels_pallas.dispatch import block_sizes
from kernels_pallas.tiling import ceil_div

__all__ = [
    "VMEM_LIMIT",
    "Blocks",
    "forward_blocks",
    "in_parts",
    "row_mask",
    "weight_blocks",
    "write_rows",
]

_MIB = 1 << 20
# Every TPU from v5e on has at least 64 MiB of VMEM a core.
VMEM_LIMIT = 60 * _MIB
_PIPELINE_BUDGET = 44 * _MIB
# Where the largest operand moves in parts, what the compiler adds is small too.
_PARTS_BUDGET = 52 * _MIB
# Columns of a matrix, or rows of a weight gradient, that one copy moves.
_COPY = 256
# Rows that are worked on at once where a tile is cut.
_PART = 128


class Blocks(NamedTuple):
    """Block sizes of one product of [rows, inner] and [inner, outer] or its weight gradient.

    Attributes:
      rows: Height of a tile of rows.
      inner: Columns of x in a block.
      outer: Columns of the result (or of dy) in a block.
      bytes_accessed: What the kernel moves to and from main memory with these blocks.
      copy: Columns of a matrix (rows of a weight gradient) that the kernel copies at a time by
        itself, or 0 where the pipeline moves whole blocks.
    """

    rows: int
    inner: int
    outer: int
    bytes_accessed: int
    copy: int = 0

    @property
    def cost(self) -> float:
        """Traffic, made dearer for low tiles: they wait on the matrix unit's weights."""
        return self.bytes_accessed * (1 + 64 / self.rows)


def _sizes(whole: int) -> list[int]:
    """The dimension itself, then multiples of 128 below it."""
    return [whole, *(s for s in (8192, 4096, 2048, 1024, 512, 256, 128) if s < whole)]


def _heights(rows: int) -> list[int]:
    return [rows] if rows <= 128 else [s for s in (512, 256, 128) if s <= rows]


def _tuned(kernel: str, rows: int, inner: int, outer: int, groups: int):
    """The table's blocks (rows, inner, outer), or None."""
    if jax.default_backend() != "tpu":
        return None
    kind = jax.devices()[0].device_kind
    found = block_sizes(kernel, kind, f"g{groups}_k{inner}_n{outer}")
    return None if found is None else (min(found["rows"], rows), found["inner"], found["outer"])


def _split_bytes(*itemsizes: int) -> int:
    """Bytes of an operand's element in the three bfloat16 terms of an exact float32 product."""
    return 6 if max(itemsizes) > 2 else 0


def _best(candidates: list[Blocks], others: list[Blocks]) -> Blocks:
    """The cheapest candidate, or the cheapest of ``others`` if that moves fewer bytes."""
    best = min(candidates, key=lambda blocks: blocks.cost)
    others = [o for o in others if o.bytes_accessed < best.bytes_accessed and o.cost < best.cost]
    return min(others, key=lambda blocks: blocks.cost) if others else best


def forward_blocks(
    rows: int, inner: int, outer: int, groups: int, x_bytes: int, w_bytes: int, y_bytes: int
) -> Blocks:
    """Blocks with the least traffic that fit in VMEM.

    Args:
      rows: Rows of x.
      inner: Columns of x.
      outer: Columns of the result.
      groups: Matrices.
      x_bytes: Bytes of an element of x.
      w_bytes: Bytes of an element of w.
      y_bytes: Bytes of an element of the result.
    """

    def pipelined(height: int, bk: int, bn: int) -> Blocks:
        visits, sweeps = ceil_div(rows, height) + groups, ceil_div(outer, bn)
        if bk == inner:
            traffic = sweeps * rows * inner * x_bytes + groups * inner * outer * w_bytes
        else:
            traffic = visits * inner * (sweeps * height * x_bytes + outer * w_bytes)
        return Blocks(height, bk, bn, traffic + rows * outer * y_bytes)

    tuned = _tuned("grouped_matmul", rows, inner, outer, groups)
    if tuned is not None:
        return pipelined(*tuned)
    candidates = []
    for height, bk, bn in itertools.product(_heights(rows), _sizes(inner), _sizes(outer)):
        vmem = 2 * (height * bk * x_bytes + bk * bn * w_bytes + height * bn * y_bytes)
        if vmem + 2 * height * bn * 4 <= _PIPELINE_BUDGET:
            candidates.append(pipelined(height, bk, bn))
    others = []
    for height in _heights(rows) if inner % 128 == 0 and outer % _COPY == 0 else ():
        # The matrix and one more part, x and the result twice, the product of a part.
        vmem = inner * (outer + _COPY) * w_bytes
        vmem += 2 * height * (inner * x_bytes + outer * y_bytes) + 2 * height * _COPY * 4
        vmem += inner * (height + _COPY) * _split_bytes(x_bytes, w_bytes)
        if vmem <= _PARTS_BUDGET:
            # A group that lies across the two halves of the rows has its matrix read twice.
            moved = rows * inner * x_bytes + rows * outer * y_bytes
            moved += (groups + 1) * inner * outer * w_bytes
            others.append(Blocks(height, inner, outer, moved, _COPY))
    return _best(candidates, others)


def weight_blocks(
    rows: int, inner: int, outer: int, groups: int, x_bytes: int, dy_bytes: int, w_bytes: int
) -> Blocks:
    """The same for ``dw[g] = x[rows of g].T @ dy[rows of g]``, whose result stays in VMEM."""

    def blocks(height: int, bk: int, bn: int, copy: int = 0) -> Blocks:
        traffic = ceil_div(outer, bn) * rows * inner * x_bytes
        traffic += ceil_div(inner, bk) * rows * outer * dy_bytes
        return Blocks(height, bk, bn, traffic + groups * inner * outer * w_bytes, copy)

    tuned = _tuned("grouped_matmul_dw", rows, inner, outer, groups)
    if tuned is not None:
        return blocks(*tuned)
    candidates, others = [], []
    for height, bk, bn in itertools.product(_heights(rows), _sizes(inner), _sizes(outer)):
        operands = height * (bk * x_bytes + bn * dy_bytes)
        if 3 * operands + 2 * bk * bn * (4 + w_bytes) <= _PIPELINE_BUDGET:
            candidates.append(blocks(height, bk, bn))
        # The accumulator once, a part of it in two buffers on its way out, a part's operands.
        vmem = 2 * operands + 4 * bk * bn + _COPY * bn * (4 + 2 * w_bytes)
        vmem += height * (_COPY + bn) * (_split_bytes(x_bytes, dy_bytes) or 2)
        aligned = inner % bk == 0 and bk % _COPY == 0 and outer % bn == 0 and bn % 128 == 0
        if aligned and vmem <= _PARTS_BUDGET:
            others.append(blocks(height, bk, bn, _COPY))
    return _best(candidates, others)


def row_mask(start, end, first_row, height: int) -> Array:
    """Which of ``height`` rows from ``first_row`` on lie in [start, end): [height, 1]."""
    row = first_row + jax.lax.broadcasted_iota(jnp.int32, (height, 1), 0)
    return (row >= start) & (row < end)


def in_parts(
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


def write_rows(
    y_ref: Any, rows: pl.Slice, columns: Any, y: Array, start: Any, first_row: Any
) -> None:
    """Writes the rows of a tile from row ``start`` (of all rows) on.

    Rows before the visit's group belong to earlier visits of this tile; those after it are written
    by later ones.
    """
    first = first_row + rows.start

    @pl.when(start <= first)
    def _():
        y_ref[rows, columns] = y.astype(y_ref.dtype)

    @pl.when(start > first)
    def _():
        own = row_mask(start, first + rows.size, first, rows.size)
        y_ref[rows, columns] = jnp.where(own, y.astype(y_ref.dtype), y_ref[rows, columns])
