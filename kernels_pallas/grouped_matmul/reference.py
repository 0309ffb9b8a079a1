"""Grouped matmul in plain XLA: the specification, usable at scale.

On CPU every group is multiplied by itself, in one dot of the smallest row count from a short ladder
that holds it (`jax.lax.ragged_dot` would multiply every row with every expert there). Rows of a
neighbouring group that fall into the dot are masked when the block is written, so that groups
need no padding and no alignment. On TPU and GPU it is `jax.lax.ragged_dot`.

The three products that training needs share the loop: ``x @ w[g]``, ``dy @ w[g].T`` and, for the
weights, ``x[g].T @ dy[g]``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas.dispatch import current_platform
from kernels_pallas.tiling import accumulator_dtype, align_varying, round_up

__all__ = ["grouped_matmul_dw", "grouped_matmul_forward", "grouped_matmul_xla"]

# Row counts of one dot, over the mean size of a group: fine where balanced groups lie, because rows
# past a group are multiplied in vain.
_LADDER = (1 / 16, 1 / 4, 1 / 2, 3 / 4, 7 / 8, 1, 17 / 16, 9 / 8, 5 / 4, 3 / 2, 2, 4)


def _ladder(num_rows: int, num_groups: int) -> tuple[int, ...]:
    """Heights of the blocks; a group larger than the last is cut into blocks of that one first."""
    mean = num_rows / num_groups
    return tuple(sorted({min(round_up(math.ceil(mean * rung), 8), num_rows) for rung in _LADDER}))


class _Visits(NamedTuple):
    """Blocks of rows that belong to one group, those of equal height behind one another.

    Attributes:
      group: Group of a block, int32 [visits].
      start: Its first row, int32 [visits].
      end: One past its last row, int32 [visits].
      first: Where the blocks of each height of the ladder begin, int32 [heights + 1].
    """

    group: Int[Array, " visits"]
    start: Int[Array, " visits"]
    end: Int[Array, " visits"]
    first: Int[Array, " bounds"]


def _visits(
    starts: Int[Array, " groups"], sizes: Int[Array, " groups"], ladder: tuple[int, ...], rows: int
) -> _Visits:
    """Cuts every group into blocks and sorts them by height, groups in order within each."""
    num_groups, top = sizes.shape[0], ladder[-1]
    blocks = (sizes + (top - 1)) // top
    through = jnp.cumsum(blocks, dtype=jnp.int32)
    visit = lax.iota(jnp.int32, num_groups + rows // top)
    # Each entry compared with each bound: few of both, and no scatter as in a sorting search.
    group = jnp.sum(visit[:, None] >= through[None, :], axis=1, dtype=jnp.int32)
    real = group < num_groups
    group = jnp.minimum(group, num_groups - 1)
    start = starts[group] + (visit - (through - blocks)[group]) * top
    end = jnp.minimum(starts[group] + sizes[group], start + top)
    heights = jnp.asarray(ladder, jnp.int32)
    rung = jnp.sum((end - start)[:, None] > heights[None, :], axis=1, dtype=jnp.int32)
    rung = jnp.where(real, rung, len(ladder))
    order = jnp.argsort(rung, stable=True)
    bounds = lax.iota(jnp.int32, len(ladder) + 1)
    first = jnp.sum(rung[None, :] < bounds[:, None], axis=1, dtype=jnp.int32)
    return _Visits(group[order], start[order], end[order], first)


def _for_each_block(
    group_sizes: Int[Array, " groups"],
    num_rows: int,
    body: Callable[[int, Array, Array, Bool[Array, " rows"], Any], Any],
    carry: Any,
) -> Any:
    """Covers the rows of every group by blocks from the ladder.

    ``body(rows, group, offset, own, carry)`` sees the static height of the block, its group, its
    first row (moved up where it would reach past the array) and which of its rows it answers for.
    One loop per height: a loop per group and height would spend its time on turns never taken.
    """
    ladder = _ladder(num_rows, group_sizes.shape[0])
    visits = _visits(*_bounds(group_sizes, num_rows), ladder, num_rows)
    for rung, rows in enumerate(ladder):

        def turn(visit: Array, carry: Any, rows: int = rows) -> Any:
            start, end = visits.start[visit], visits.end[visit]
            offset = jnp.minimum(start, num_rows - rows)
            row = offset + lax.iota(jnp.int32, rows)
            own = (row >= start) & (row < end)
            return body(rows, visits.group[visit], offset, own, carry)

        carry = lax.fori_loop(visits.first[rung], visits.first[rung + 1], turn, carry)
    return carry


def _block(a: Array, offset: Array, rows: int) -> Array:
    return lax.dynamic_slice(a, (offset, jnp.zeros_like(offset)), (rows, a.shape[1]))


def _where_rows(
    own: Bool[Array, " rows"], a: Float[Array, "rows n"], b: Float[Array, "rows n"]
) -> Float[Array, "rows n"]:
    return lax.select(lax.broadcast_in_dim(own, a.shape, (0,)), a, b)


def _bounds(
    group_sizes: Int[Array, " groups"], num_rows: int
) -> tuple[Int[Array, " groups"], Int[Array, " groups"]]:
    ends = jnp.minimum(jnp.cumsum(jnp.maximum(group_sizes, 0)), num_rows)
    starts = jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]])
    return starts, ends - starts


def grouped_matmul_forward(
    x: Float[Array, "m k"],
    w: Float[Array, "groups k n"],
    group_sizes: Int[Array, " groups"],
    *,
    transpose_w: bool = False,
) -> Float[Array, "m n"]:
    """``y[r] = x[r] @ w[group of r]`` (``w[g].T`` with ``transpose_w``), without a VJP."""
    num_rows, num_out = x.shape[0], w.shape[1 if transpose_w else 2]
    dtype = x.dtype
    if num_rows == 0 or w.shape[0] == 0:
        return jnp.zeros((num_rows, num_out), dtype)
    if current_platform() != "cpu":
        sizes = _bounds(group_sizes, num_rows)[1]
        rhs = jnp.swapaxes(w, 1, 2) if transpose_w else w
        out = lax.ragged_dot(x, rhs, sizes, preferred_element_type=accumulator_dtype(x, w))
        return out.astype(dtype)

    accumulator = accumulator_dtype(x, w)
    contract = (((1,), (1 if transpose_w else 0,)), ((), ()))

    def block(rows: int, group: Array, offset: Array, own: Array, y: Array) -> Array:
        # Widened by hand: XLA has no product of bfloat16 matrices for CPU, and in a loop it does
        # not always widen them itself.
        weight = lax.dynamic_index_in_dim(w, group, keepdims=False).astype(accumulator)
        out = lax.dot_general(_block(x, offset, rows).astype(accumulator), weight, contract)
        out = _where_rows(own, out.astype(dtype), _block(y, offset, rows))
        return lax.dynamic_update_slice(y, out, (offset, jnp.zeros_like(offset)))

    y, _ = align_varying(jnp.zeros((num_rows, num_out), dtype), x)
    return _for_each_block(group_sizes, num_rows, block, y)


def grouped_matmul_dw(
    x: Float[Array, "m k"],
    dy: Float[Array, "m n"],
    group_sizes: Int[Array, " groups"],
    dtype: jnp.dtype,
) -> Float[Array, "groups k n"]:
    """``dw[g] = x[rows of g].T @ dy[rows of g]``; exactly zero for an empty group."""
    num_rows, accumulator = x.shape[0], accumulator_dtype(x, dy)
    shape = (x.shape[1], dy.shape[1])
    if num_rows == 0 or group_sizes.shape[0] == 0:
        return jnp.zeros((group_sizes.shape[0], *shape), dtype)

    if current_platform() != "cpu":
        sizes = _bounds(group_sizes, num_rows)[1]
        used = (jnp.arange(num_rows) < jnp.sum(sizes))[:, None]
        out = lax.ragged_dot_general(
            jnp.where(used, x, jnp.zeros_like(x)),
            jnp.where(used, dy, jnp.zeros_like(dy)),
            sizes,
            lax.RaggedDotDimensionNumbers(
                dot_dimension_numbers=(((0,), (0,)), ((), ())),
                lhs_ragged_dimensions=[0],
                rhs_group_dimensions=[],
            ),
            preferred_element_type=accumulator,
        )
        return jnp.where((sizes > 0)[:, None, None], out, jnp.zeros_like(out)).astype(dtype)

    def block(rows: int, group: Array, offset: Array, own: Array, dw: Array) -> Array:
        def own_rows(a: Array) -> Array:
            # On both sides: 0 * NaN of a row that belongs to nobody is NaN.
            part = _block(a, offset, rows).astype(accumulator)
            return _where_rows(own, part, jnp.zeros_like(part))

        out = lax.dot_general(own_rows(x), own_rows(dy), (((0,), (0,)), ((), ())))
        at = (group, jnp.zeros_like(group), jnp.zeros_like(group))
        sum_ = lax.dynamic_slice(dw, at, (1, *shape)) + out[None]
        return lax.dynamic_update_slice(dw, sum_, at)

    dw, _ = align_varying(jnp.zeros((group_sizes.shape[0], *shape), accumulator), x)
    return _for_each_block(group_sizes, num_rows, block, dw).astype(dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def grouped_matmul_xla(
    x: Float[Array, "m k"],
    w: Float[Array, "groups k n"],
    group_sizes: Int[Array, " groups"],
    transpose_w: bool = False,
) -> Float[Array, "m n"]:
    """The XLA implementation with its own VJP; see `kernels_pallas.grouped_matmul`."""
    return grouped_matmul_forward(x, w, group_sizes, transpose_w=transpose_w)


def _fwd(
    x: Array, w: Array, group_sizes: Array, transpose_w: bool
) -> tuple[Array, tuple[Array, Array, Array]]:
    y = grouped_matmul_forward(x, w, group_sizes, transpose_w=transpose_w)
    return y, (x, w, group_sizes)


def _bwd(
    transpose_w: bool, saved: tuple[Array, Array, Array], dy: Array
) -> tuple[Array, Array, None]:
    x, w, group_sizes = saved
    dx = grouped_matmul_forward(dy, w, group_sizes, transpose_w=not transpose_w)
    left, right = (dy, x) if transpose_w else (x, dy)
    return dx.astype(x.dtype), grouped_matmul_dw(left, right, group_sizes, w.dtype), None


grouped_matmul_xla.defvjp(_fwd, _bwd)
