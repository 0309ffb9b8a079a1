"""Triton kernels of `grouped_matmul`: the product, and the gradient of the weights.

A program owns one visit (see `visits`) and one tile of columns, loops over the inner dimension and
stores the rows of its own group, so that no two programs write the same place. For the weights a
program owns one tile of one group's matrix and loops over the group's rows.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from kernels_pallas.dispatch import block_sizes
from kernels_pallas.grouped_matmul.kernel_vjp import with_vjp
from kernels_pallas.grouped_matmul.visits import group_bounds, output_visits
from kernels_pallas.tiling import ceil_div, next_power_of_2, promoted, result_type

__all__ = ["grouped_matmul_gpu"]


def _fit(size: int, most: int) -> int:
    """A power of two that covers ``size`` or is ``most``; a Triton dot wants 16 or more."""
    return max(16, min(most, next_power_of_2(size)))


def _blocks(
    kernel: str, rows: int, inner: int, outer: int, groups: int, itemsize: int
) -> dict[str, int]:
    """Block sizes and launch options from the table, or by rule."""
    rule = {
        "rows": _fit(rows, 128),
        "inner": _fit(inner, 64 if itemsize <= 2 else 32),
        "outer": _fit(outer, 128),
        "num_warps": 4,
        "num_stages": 4,
    }
    if kernel == "grouped_matmul_dw":
        rule |= {"rows": _fit(rows, 64 if itemsize <= 2 else 32), "inner": _fit(inner, 128)}
    if jax.default_backend() in ("gpu", "cuda"):
        kind = jax.devices()[0].device_kind
        rule |= dict(block_sizes(kernel, kind, f"g{groups}_k{inner}_n{outer}") or {})
    if rule["outer"] * max(rule["rows"], rule["inner"]) < 128 * 128:
        rule["num_stages"] = min(rule["num_stages"], 3)
    return rule


def _params(blocks: dict[str, int]) -> plgpu.CompilerParams:
    return plgpu.CompilerParams(num_warps=blocks["num_warps"], num_stages=blocks["num_stages"])


def _dot(x: Array, w: Array, **transposed: bool) -> Array:
    """Product in float32; float32 operands in TF32 unless JAX is told to be exact, as XLA does."""
    dtype = promoted(x.dtype, w.dtype)
    exact = jax.config.jax_default_matmul_precision in ("highest", "float32")
    tf32 = {"allow_tf32": not exact} if dtype == jnp.float32 else {}
    return plgpu.dot(x.astype(dtype), w.astype(dtype), **transposed, **tf32)


def _forward_kernel(
    tile_ref,
    group_ref,
    start_ref,
    end_ref,
    x_ref,
    w_ref,
    y_ref,
    *,
    blocks: dict[str, int],
    transpose_w: bool,
):
    height, bk, bn = blocks["rows"], blocks["inner"], blocks["outer"]
    num_rows, inner = x_ref.shape
    outer = y_ref.shape[1]
    visit, n = pl.program_id(0), pl.program_id(1)
    first_row, group = tile_ref[visit] * height, group_ref[visit]
    start, end = start_ref[visit], end_ref[visit]
    row = first_row + jnp.arange(height, dtype=jnp.int32)
    column = n * bn + jnp.arange(bn, dtype=jnp.int32)
    mine = ((row >= start) & (row < end))[:, None]
    inside = (column < outer)[None, :]

    def step(i, acc):
        depth = i * bk + jnp.arange(bk, dtype=jnp.int32) < inner
        x = plgpu.load(
            x_ref.at[pl.ds(first_row, height), pl.ds(i * bk, bk)],
            mask=mine & depth[None, :],
            other=0.0,
        )
        if transpose_w:
            w = plgpu.load(
                w_ref.at[group, pl.ds(n * bn, bn), pl.ds(i * bk, bk)],
                mask=(column < outer)[:, None] & depth[None, :],
                other=0.0,
            )
        else:
            w = plgpu.load(
                w_ref.at[group, pl.ds(i * bk, bk), pl.ds(n * bn, bn)],
                mask=depth[:, None] & inside,
                other=0.0,
            )
        return acc + _dot(x, w, trans_b=transpose_w)

    steps = jax.lax.select(start < end, jnp.int32(ceil_div(inner, bk)), jnp.int32(0))
    acc = jax.lax.fori_loop(0, steps, step, jnp.zeros((height, bn), jnp.float32))
    # A visit without a group writes the zeros of the rows past the last group.
    writes = mine | ((start == end) & (row >= start) & (row < num_rows))[:, None]
    plgpu.store(
        y_ref.at[pl.ds(first_row, height), pl.ds(n * bn, bn)],
        acc.astype(y_ref.dtype),
        mask=writes & inside,
    )


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
    itemsize = max(x.dtype.itemsize, w.dtype.itemsize)
    blocks = _blocks("grouped_matmul", rows, inner, outer, groups, itemsize)
    visits = output_visits(group_sizes, rows, blocks["rows"])
    return pl.pallas_call(
        functools.partial(_forward_kernel, blocks=blocks, transpose_w=transpose_w),
        grid=(visits.tile.shape[0], ceil_div(outer, blocks["outer"])),
        out_shape=result_type((rows, outer), dtype, x, w, group_sizes),
        compiler_params=_params(blocks),
        interpret=interpret,
        name="grouped_matmul_transposed" if transpose_w else "grouped_matmul_forward",
    )(*visits, x, w)


def _weight_kernel(start_ref, end_ref, x_ref, dy_ref, dw_ref, *, blocks: dict[str, int]):
    height, bk, bn = blocks["rows"], blocks["inner"], blocks["outer"]
    inner, outer = x_ref.shape[1], dy_ref.shape[1]
    group, k, n = (pl.program_id(axis) for axis in range(3))
    start, end = start_ref[group], end_ref[group]
    down = k * bk + jnp.arange(bk, dtype=jnp.int32) < inner
    across = n * bn + jnp.arange(bn, dtype=jnp.int32) < outer

    def step(i, acc):
        first = start + i * height
        mine = (first + jnp.arange(height, dtype=jnp.int32) < end)[:, None]
        x = plgpu.load(
            x_ref.at[pl.ds(first, height), pl.ds(k * bk, bk)],
            mask=mine & down[None, :],
            other=0.0,
        )
        dy = plgpu.load(
            dy_ref.at[pl.ds(first, height), pl.ds(n * bn, bn)],
            mask=mine & across[None, :],
            other=0.0,
        )
        return acc + _dot(x, dy, trans_a=True)

    steps = jax.lax.div(end - start + jnp.int32(height - 1), jnp.int32(height))
    acc = jax.lax.fori_loop(0, steps, step, jnp.zeros((bk, bn), jnp.float32))
    plgpu.store(
        dw_ref.at[group, pl.ds(k * bk, bk), pl.ds(n * bn, bn)],
        acc.astype(dw_ref.dtype),
        mask=down[:, None] & across[None, :],
    )


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
    itemsize = max(x.dtype.itemsize, dy.dtype.itemsize)
    blocks = _blocks("grouped_matmul_dw", rows, inner, outer, groups, itemsize)
    return pl.pallas_call(
        functools.partial(_weight_kernel, blocks=blocks),
        grid=(groups, ceil_div(inner, blocks["inner"]), ceil_div(outer, blocks["outer"])),
        out_shape=result_type((groups, inner, outer), dtype, x, dy, group_sizes),
        compiler_params=_params(blocks),
        interpret=interpret,
        name="grouped_matmul_weights",
    )(*group_bounds(group_sizes, rows), x, dy)


_run = with_vjp(_forward, _weight_gradient)


def grouped_matmul_gpu(
    x: Float[Array, "m k"],
    w: Float[Array, "groups k n"],
    group_sizes: Int[Array, " groups"],
    *,
    transpose_w: bool = False,
    interpret: bool = False,
) -> Float[Array, "m n"]:
    """The GPU kernel with its VJP; see `kernels_pallas.grouped_matmul`."""
    return _run(transpose_w, interpret, x, w, group_sizes)
