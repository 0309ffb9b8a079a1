"""Triton kernels behind `sparsegen`: a block of rows in registers, entries along the last axis.

The support is found by removing entries at or below the threshold until none is left to remove,
which takes a handful of row reductions (at most E) and no sort; the pairwise form of `reference`
gives the same support at E^2 operations a row, more than a GPU does while it moves the data.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float

from kernels_pallas.sparsegen.reference import LEAST_SLACK
from kernels_pallas.tiling import ceil_div, next_power_of_2, result_type
from kernels_pallas.triton import padded_slice

__all__ = ["project", "project_vjp", "unsupported"]

_MAX_ENTRIES = 256
_BLOCK_CELLS = 2048


def unsupported(dtype: Any, entries: int) -> str | None:
    """Why the kernel can't take these arguments, or None when it can."""
    if jnp.dtype(dtype) not in (jnp.dtype(d) for d in (jnp.float32, jnp.bfloat16, jnp.float16)):
        return f"u of dtype {jnp.dtype(dtype)}: the GPU kernel takes float32, bfloat16, float16"
    if entries > _MAX_ENTRIES:
        return f"{entries} entries: the GPU kernel takes at most {_MAX_ENTRIES}"
    return None


def _blocks(rows: int, entries: int) -> tuple[int, int]:
    width = next_power_of_2(entries)
    return min(256, _BLOCK_CELLS // width, next_power_of_2(rows)), width


def _tile(rows: int, entries: int, block: int, width: int):
    start = pl.program_id(0) * block
    row = start + jnp.arange(block, dtype=jnp.int32) < rows
    column = jnp.arange(width, dtype=jnp.int32) < entries
    return start, row, row[:, None] & column[None, :], column


def _forward_kernel(u_ref, lam_ref, p_ref, *, rows, entries, block, width, denom_floor):
    start, row, inside, column = _tile(rows, entries, block, width)
    at = (pl.ds(start, block), padded_slice(width, start))
    u = plgpu.load(u_ref.at[at], mask=inside, other=0.0).astype(jnp.float32)
    u = jnp.where(column[None, :], u, -jnp.inf)
    lam = plgpu.load(lam_ref.at[pl.ds(start, block)], mask=row, other=0.0)
    slack = jnp.maximum(1.0 - lam, LEAST_SLACK)
    v = u - jnp.max(u, axis=1)[:, None]

    def threshold(member):
        count = jnp.sum(member, axis=1)
        total = jnp.sum(jnp.where(member > 0, v, 0.0), axis=1)
        return (total - slack) / count, count

    def step(state):
        member, _ = state
        tau, count = threshold(member)
        kept = jnp.where(v > tau[:, None], member, 0.0)
        return kept, jnp.max(count - jnp.sum(kept, axis=1))

    member = jnp.where(v > -slack[:, None], 1.0, 0.0)
    member, _ = jax.lax.while_loop(lambda state: state[1] > 0, step, (member, jnp.float32(1)))
    tau, _ = threshold(member)
    denom = slack if denom_floor is None else jnp.maximum(slack, denom_floor)
    p = jnp.where(member > 0, jnp.maximum(v - tau[:, None], 0.0), 0.0) / denom[:, None]
    # Maxima on a GPU pass NaN over, so it is put back by hand.
    bad = (jnp.sum(jnp.where(u != u, 1.0, 0.0), axis=1) > 0) | (lam != lam)
    p = jnp.where(bad[:, None], jnp.nan, p)
    plgpu.store(p_ref.at[at], p.astype(p_ref.dtype), mask=inside)


def project(
    u: Float[Array, "B T E"],
    lam: Float[Array, "B T"],
    denom_floor: float | None,
    *,
    interpret: bool = False,
) -> Float[Array, "B T E"]:
    """Same as `reference.project`, in float32 inside, with the dtype of ``u`` outside."""
    shape = u.shape
    u, lam = u.reshape(-1, shape[-1]), lam.reshape(-1)
    rows, entries = u.shape
    block, width = _blocks(rows, entries)
    p = pl.pallas_call(
        functools.partial(
            _forward_kernel,
            rows=rows,
            entries=entries,
            block=block,
            width=width,
            denom_floor=denom_floor,
        ),
        grid=(ceil_div(rows, block),),
        out_shape=result_type(u.shape, u.dtype, u, lam),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="sparsegen_forward",
    )(u, lam)
    return p.reshape(shape)


def _backward_kernel(
    p_ref, lam_ref, g_ref, du_ref, dlam_ref, *, rows, entries, block, width, denom_floor
):
    start, row, inside, _ = _tile(rows, entries, block, width)
    at = (pl.ds(start, block), padded_slice(width, start))
    p = plgpu.load(p_ref.at[at], mask=inside, other=0.0).astype(jnp.float32)
    g = plgpu.load(g_ref.at[at], mask=inside, other=0.0).astype(jnp.float32)
    slack = 1.0 - plgpu.load(lam_ref.at[pl.ds(start, block)], mask=row, other=0.0)
    member = p > 0
    g = jnp.where(member, g, 0.0)
    count = jnp.maximum(jnp.sum(jnp.where(member, 1.0, 0.0), axis=1), 1.0)
    mean = jnp.sum(g, axis=1) / count
    slope = jnp.sum(g * p, axis=1) - mean
    denom = jnp.where(slack > 0, slack, 1.0)
    if denom_floor is not None:
        slope = jnp.where(slack < denom_floor, -mean, slope)
        denom = jnp.maximum(denom, denom_floor)
    alive = slack > 0
    du = jnp.where(member & alive[:, None], g - mean[:, None], 0.0) / denom[:, None]
    plgpu.store(du_ref.at[at], du.astype(du_ref.dtype), mask=inside)
    dlam = jnp.where(alive, slope / denom, 0.0)
    plgpu.store(dlam_ref.at[pl.ds(start, block)], dlam, mask=row)


def project_vjp(
    p: Float[Array, "B T E"],
    lam: Float[Array, "B T"],
    g: Float[Array, "B T E"],
    denom_floor: float | None,
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "B T E"], Float[Array, "B T"]]:
    """Same as `reference.project_vjp`."""
    shape = p.shape
    p, lam, g = p.reshape(-1, shape[-1]), lam.reshape(-1), g.reshape(-1, shape[-1])
    rows, entries = p.shape
    block, width = _blocks(rows, entries)
    du, dlam = pl.pallas_call(
        functools.partial(
            _backward_kernel,
            rows=rows,
            entries=entries,
            block=block,
            width=width,
            denom_floor=denom_floor,
        ),
        grid=(ceil_div(rows, block),),
        out_shape=[
            result_type(p.shape, p.dtype, p, lam, g),
            result_type(lam.shape, jnp.float32, p, lam, g),
        ],
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="sparsegen_backward",
    )(p, lam, g)
    return du.reshape(shape), dlam.reshape(shape[:-1])
