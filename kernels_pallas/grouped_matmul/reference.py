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
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas.dispatch import current_platform
from kernels_pallas.tiling import accumulator_dtype, align_varying, round_up

__all__ = ["grouped_matmul_dw", "grouped_matmul_forward", "grouped_matmul_xla"]

# Row counts of one dot, over the mean size of a group: fine where balanced groups lie, because rows
# past a group are multiplied in vain.
_LADDER = (1 / 16, 1 / 4, 1 / 2, 3 / 4, 1, 9 / 8, 5 / 4, 3 / 2, 2, 4)


def _ladder(num_rows: int, num_groups: int) -> tuple[int, ...]:
    """Heights of the blocks; a group larger than the last is walked in blocks of that one first."""
    mean = num_rows / num_groups
    return tuple(sorted({min(round_up(math.ceil(mean * rung), 8), num_rows) for rung in _LADDER}))


def _for_each_block(
    num_rows: int,
    num_groups: int,
    start: Int[Array, ""],
    size: Int[Array, ""],
    body: Callable[[int, Int[Array, ""], Bool[Array, " rows"], Any], Any],
    carry: Any,
) -> Any:
    """Covers rows [start, start + size) by blocks from the ladder.

    ``body(rows, offset, own, carry)`` sees the static height of the block, its first row (moved up
    where it would reach past the array) and which of its rows it answers for.
    """

    # The position travels in the carry: XLA would hoist a dot that depends on nothing the loop
    # changes, and do every rung's work at every turn.
    def walk(rows: int, turns: Array, carry: tuple[Array, Any]) -> tuple[Array, Any]:
        def turn(_: Array, carry: tuple[Array, Any]) -> tuple[Array, Any]:
            position, inner = carry
            offset = jnp.minimum(position, num_rows - rows)
            row = offset + jnp.arange(rows, dtype=offset.dtype)
            return position + rows, body(rows, offset, (row >= position) & (row < end), inner)

        return lax.fori_loop(0, turns, turn, carry)

    ladder = _ladder(num_rows, num_groups)
    end = start + size
    whole = jnp.maximum(size - 1, 0) // ladder[-1]
    rest = size - whole * ladder[-1]
    carry = walk(ladder[-1], whole, (start, carry))
    for below, rows in zip((0, *ladder), ladder, strict=False):
        # At most one of these loops makes its single turn: a branch that keeps buffers in place.
        carry = walk(rows, ((rest > below) & (rest <= rows)).astype(jnp.int32), carry)
    return carry[1]


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

    def group(y: Array, operand: tuple[Array, Array, Array]) -> tuple[Array, None]:
        weight, start, size = operand

        def block(rows: int, offset: Array, own: Array, y: Array) -> Array:
            out = lax.dot_general(
                _block(x, offset, rows), weight, contract, preferred_element_type=accumulator
            )
            out = _where_rows(own, out.astype(dtype), _block(y, offset, rows))
            return lax.dynamic_update_slice(y, out, (offset, jnp.zeros_like(offset)))

        return _for_each_block(num_rows, w.shape[0], start, size, block, y), None

    y, _ = align_varying(jnp.zeros((num_rows, num_out), dtype), x)
    y, _ = lax.scan(group, y, (w, *_bounds(group_sizes, num_rows)))
    return y


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
    starts, sizes = _bounds(group_sizes, num_rows)

    if current_platform() != "cpu":
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

    def group(dw: Array, operand: tuple[Array, Array, Array]) -> tuple[Array, None]:
        index, start, size = operand
        zero = jnp.zeros_like(index)

        def block(rows: int, offset: Array, own: Array, dw: Array) -> Array:
            def own_rows(a: Array) -> Array:
                # On both sides: 0 * NaN of a row that belongs to nobody is NaN.
                part = _block(a, offset, rows)
                return _where_rows(own, part, jnp.zeros_like(part))

            out = lax.dot_general(
                own_rows(x), own_rows(dy), (((0,), (0,)), ((), ())), preferred_element_type=dw.dtype
            )
            at = (index, zero, zero)
            sum_ = lax.dynamic_slice(dw, at, (1, *shape)) + out[None]
            return lax.dynamic_update_slice(dw, sum_, at)

        return _for_each_block(num_rows, group_sizes.shape[0], start, size, block, dw), None

    index = jnp.arange(group_sizes.shape[0], dtype=starts.dtype)
    dw, _ = align_varying(jnp.zeros((index.shape[0], *shape), accumulator), x)
    return lax.scan(group, dw, (index, starts, sizes))[0].astype(dtype)


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
