"""Mosaic TPU kernels behind `sparsegen`.

Tokens lie along the 128 lanes and entries along the sublanes (``u`` is passed as [B, E, T]), so
that 8 entries fill a register and every step over entries is a sublane operation.

Up to 16 entries the support comes from the pairwise form of `reference`. Its E^2 operations a token
would take longer than moving the data beyond that, so that larger E remove entries at or below
the threshold until none is left to remove: every step costs E, a handful of steps suffice, at most
E are needed, and the support is the same.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from kernels_pallas.sparsegen.reference import LEAST_SLACK
from kernels_pallas.tiling import ceil_div, result_type

__all__ = ["project", "project_vjp", "unsupported"]

_MAX_ENTRIES = 256
_PAIRWISE_ENTRIES = 16
_BLOCK_CELLS = 1 << 17


def unsupported(dtype: Any, entries: int) -> str | None:
    """Why the kernel can't take these arguments, or None when it can."""
    if jnp.dtype(dtype) not in (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)):
        return f"u of dtype {jnp.dtype(dtype)}: the TPU kernel takes float32 and bfloat16"
    if entries > _MAX_ENTRIES:
        return f"{entries} entries: the TPU kernel takes at most {_MAX_ENTRIES}"
    return None


def _block_rows(rows: int, entries: int) -> int:
    wanted = max(128, min(8192, _BLOCK_CELLS // max(entries, 8) // 128 * 128))
    return rows if rows <= wanted else wanted


def _pairwise_support(v: Array, slack: Array) -> Array:
    above = jnp.zeros_like(v)
    for j in range(v.shape[0]):
        above += jnp.maximum(v[j : j + 1] - v, 0.0)
    return jnp.where(above < slack, 1.0, 0.0)


def _threshold(v: Array, member: Array, slack: Array) -> tuple[Array, Array]:
    count = jnp.sum(member, axis=0, keepdims=True)
    inside = jnp.sum(jnp.where(member > 0, v, 0.0), axis=0, keepdims=True)
    return (inside - slack) / count, count


def _shrinking_support(v: Array, slack: Array) -> Array:
    def step(state):
        member, _ = state
        tau, count = _threshold(v, member, slack)
        kept = jnp.where(v > tau, member, 0.0)
        removed = count - jnp.sum(kept, axis=0, keepdims=True)
        return kept, jnp.max(removed)

    member = jnp.where(v > -slack, 1.0, 0.0)
    return jax.lax.while_loop(lambda state: state[1] > 0, step, (member, jnp.float32(1)))[0]


def _forward_kernel(u_ref, lam_ref, p_ref, *, rows: int, block: int, denom_floor: float | None):
    lane = pl.program_id(1) * block + jax.lax.broadcasted_iota(jnp.int32, (1, block), 1)
    u = jnp.where(lane < rows, u_ref[0].astype(jnp.float32), 0.0)
    lam = jnp.where(lane < rows, lam_ref[0], 0.0)
    slack = jnp.maximum(1.0 - lam, LEAST_SLACK)
    v = u - jnp.max(u, axis=0, keepdims=True)
    if v.shape[0] <= _PAIRWISE_ENTRIES:
        member = _pairwise_support(v, slack)
    else:
        member = _shrinking_support(v, slack)
    tau, _ = _threshold(v, member, slack)
    denom = slack if denom_floor is None else jnp.maximum(slack, denom_floor)
    p = jnp.where(member > 0, jnp.maximum(v - tau, 0.0), 0.0) / denom
    bad = (jnp.sum(jnp.where(u != u, 1.0, 0.0), axis=0, keepdims=True) > 0) | (lam != lam)
    p_ref[0] = jnp.where(bad, jnp.nan, p).astype(p_ref.dtype)


def project(
    u: Float[Array, "B T E"],
    lam: Float[Array, "B T"],
    denom_floor: float | None,
    *,
    interpret: bool = False,
) -> Float[Array, "B T E"]:
    """Same as `reference.project`, in float32 inside, with the dtype of ``u`` outside."""
    batch, rows, entries = u.shape
    block = _block_rows(rows, entries)
    operands = (jnp.swapaxes(u, 1, 2), lam[:, None])
    tile = pl.BlockSpec((1, entries, block), lambda b, i: (b, 0, i))
    p = pl.pallas_call(
        functools.partial(_forward_kernel, rows=rows, block=block, denom_floor=denom_floor),
        grid=(batch, ceil_div(rows, block)),
        in_specs=[tile, pl.BlockSpec((1, 1, block), lambda b, i: (b, 0, i))],
        out_specs=tile,
        out_shape=result_type((batch, entries, rows), u.dtype, *operands),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        cost_estimate=pl.CostEstimate(
            flops=u.size * (3 * min(entries, _PAIRWISE_ENTRIES) + 6),
            transcendentals=0,
            bytes_accessed=2 * u.size * u.dtype.itemsize + 4 * lam.size,
        ),
        interpret=interpret,
        name="sparsegen_forward",
    )(*operands)
    return jnp.swapaxes(p, 1, 2)


def _backward_kernel(p_ref, lam_ref, g_ref, du_ref, dlam_ref, *, denom_floor: float | None):
    # Rows past the end hold anything; every lane stands alone and theirs are not written.
    p = p_ref[0].astype(jnp.float32)
    slack = 1.0 - lam_ref[0]
    g = jnp.where(p > 0, g_ref[0].astype(jnp.float32), 0.0)
    count = jnp.maximum(jnp.sum(jnp.where(p > 0, 1.0, 0.0), axis=0, keepdims=True), 1.0)
    mean = jnp.sum(g, axis=0, keepdims=True) / count
    slope = jnp.sum(g * p, axis=0, keepdims=True) - mean
    denom = jnp.where(slack > 0, slack, 1.0)
    if denom_floor is not None:
        slope = jnp.where(slack < denom_floor, -mean, slope)
        denom = jnp.maximum(denom, denom_floor)
    du = jnp.where((p > 0) & (slack > 0), g - mean, 0.0) / denom
    du_ref[0] = du.astype(du_ref.dtype)
    dlam_ref[0] = jnp.where(slack > 0, slope / denom, 0.0)


def project_vjp(
    p: Float[Array, "B T E"],
    lam: Float[Array, "B T"],
    g: Float[Array, "B T E"],
    denom_floor: float | None,
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "B T E"], Float[Array, "B T"]]:
    """Same as `reference.project_vjp`."""
    batch, rows, entries = p.shape
    block = _block_rows(rows, entries)
    operands = (jnp.swapaxes(p, 1, 2), lam[:, None], jnp.swapaxes(g, 1, 2))
    tile = pl.BlockSpec((1, entries, block), lambda b, i: (b, 0, i))
    line = pl.BlockSpec((1, 1, block), lambda b, i: (b, 0, i))
    du, dlam = pl.pallas_call(
        functools.partial(_backward_kernel, denom_floor=denom_floor),
        grid=(batch, ceil_div(rows, block)),
        in_specs=[tile, line, tile],
        out_specs=[tile, line],
        out_shape=[
            result_type((batch, entries, rows), p.dtype, *operands),
            result_type((batch, 1, rows), jnp.float32, *operands),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        cost_estimate=pl.CostEstimate(
            flops=8 * p.size,
            transcendentals=0,
            bytes_accessed=(2 * p.dtype.itemsize + g.dtype.itemsize) * p.size + 8 * lam.size,
        ),
        interpret=interpret,
        name="sparsegen_backward",
    )(*operands)
    return jnp.swapaxes(du, 1, 2), dlam[:, 0]
