"""Triton kernels behind `router_mean`.

Each program reduces one stretch of tokens of one row and writes its partial sums; the few partial
sums are added afterwards in a fixed order, so that two runs agree bit for bit (atomics would not).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from kernels_pallas.tiling import ceil_div, next_power_of_2, result_type
from kernels_pallas.triton import padded_slice

__all__ = ["router_sums", "router_sums_vjp", "unsupported"]

_MAX_EXPERTS = 2048
_MAX_ACCUMULATOR = 32768
_BLOCK_CELLS = 4096
_STRETCH = 512


def unsupported(dtype: Any, experts: int, groups: int) -> str | None:
    """Why the kernel can't take these arguments, or None when it can."""
    if jnp.dtype(dtype) not in (jnp.dtype(d) for d in (jnp.float32, jnp.bfloat16, jnp.float16)):
        return (
            f"logits of dtype {jnp.dtype(dtype)}: the GPU kernel takes float32, bfloat16, float16"
        )
    if experts > _MAX_EXPERTS:
        return f"{experts} experts: the GPU kernel keeps all of them in registers, 2048 fit"
    if groups > 1 and _padded(groups) * _padded(experts) > _MAX_ACCUMULATOR:
        return (
            f"{groups} segments of {experts} experts: the GPU kernel's accumulator holds "
            f"{_MAX_ACCUMULATOR} numbers"
        )
    return None


def _padded(size: int) -> int:
    return max(16, next_power_of_2(size))


def _block_tokens(tokens: int, width: int) -> int:
    return max(16, min(256, _BLOCK_CELLS // width, next_power_of_2(tokens)))


def _softmax(logits_ref, weight_ref, segment_ref, row, start, *, tokens, experts, block, width):
    """Softmax of one block of tokens: p [B, W], lse [B], w [B], segment [B] or None."""
    token = start + jnp.arange(block, dtype=jnp.int32)
    inside = token < tokens
    weight = plgpu.load(weight_ref.at[row, pl.ds(start, block)], mask=inside, other=0.0)
    counted = weight > 0
    column = jnp.arange(width, dtype=jnp.int32) < experts
    x = plgpu.load(
        logits_ref.at[row, pl.ds(start, block), padded_slice(width, start)],
        mask=counted[:, None] & column[None, :],
        other=0.0,
    ).astype(jnp.float32)
    x = jnp.where(column[None, :], x, -jnp.inf)
    top = jnp.max(x, axis=1)
    e = jnp.exp(x - top[:, None])
    total = jnp.sum(e, axis=1)
    segment = None
    if segment_ref is not None:
        segment = plgpu.load(segment_ref.at[row, pl.ds(start, block)], mask=counted, other=-1)
    return e / total[:, None], top + jnp.log(total), weight, segment, column


def _forward_kernel(*refs, tokens: int, experts: int, groups: int, block: int, stretch: int):
    segmented = groups > 1
    logits_ref, weight_ref, segment_ref, sums_ref, square_ref = (
        refs if segmented else (*refs[:2], None, *refs[2:])
    )
    width = _padded(experts)
    height = _padded(groups)
    row, part = pl.program_id(0), pl.program_id(1)
    group = jnp.arange(height, dtype=jnp.int32)

    def step(i, carry):
        sums, square = carry
        start = part * stretch + i * block
        p, lse, weight, segment, _ = _softmax(
            logits_ref,
            weight_ref,
            segment_ref,
            row,
            start,
            tokens=tokens,
            experts=experts,
            block=block,
            width=width,
        )
        p = weight[:, None] * p
        z = weight * lse * lse
        if not segmented:
            return sums + jnp.sum(p, axis=0), square + jnp.sum(z)
        member = segment[None, :] == group[:, None]
        one_hot = member.astype(jnp.bfloat16)
        rest = p
        # Three bfloat16 terms carry all of a float32; a tf32 product would keep 11 bits.
        for _ in range(3):
            term = rest.astype(jnp.bfloat16)
            sums = sums + plgpu.dot(one_hot, term)
            rest = rest - term.astype(jnp.float32)
        square = square + jnp.sum(jnp.where(member, z[None, :], 0.0), axis=1)
        return sums, square

    steps = stretch // block
    column = jnp.arange(width, dtype=jnp.int32) < experts
    if segmented:
        carry = (jnp.zeros((height, width), jnp.float32), jnp.zeros((height,), jnp.float32))
        sums, square = jax.lax.fori_loop(0, steps, step, carry)
        here = group < groups
        plgpu.store(
            sums_ref.at[row, part, padded_slice(height, part), padded_slice(width, part)],
            sums,
            mask=here[:, None] & column[None, :],
        )
        plgpu.store(square_ref.at[row, part, padded_slice(height, part)], square, mask=here)
    else:
        carry = (jnp.zeros((width,), jnp.float32), jnp.float32(0))
        sums, square = jax.lax.fori_loop(0, steps, step, carry)
        plgpu.store(
            sums_ref.at[row, part, pl.ds(0, 1), padded_slice(width, part)],
            sums[None],
            mask=column[None],
        )
        square_ref[row, part, 0] = square


def router_sums(
    logits: Float[Array, "R T N"],
    weight: Float[Array, "R T"],
    segment: Int[Array, "R T"] | None,
    num_segments: int,
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "R G N"], Float[Array, "R G"]]:
    """Same as `reference.router_sums`."""
    rows, tokens, experts = logits.shape
    weight, segment = _one_segment(weight, segment, num_segments)
    block = _block_tokens(tokens, _padded(experts))
    stretch = min(max(_STRETCH, block), block * next_power_of_2(ceil_div(tokens, block)))
    parts = ceil_div(tokens, stretch)
    operands = [logits, weight] if segment is None else [logits, weight, segment]
    partial = [(rows, parts, num_segments, experts), (rows, parts, num_segments)]
    sums, square = pl.pallas_call(
        functools.partial(
            _forward_kernel,
            tokens=tokens,
            experts=experts,
            groups=num_segments,
            block=block,
            stretch=stretch,
        ),
        grid=(rows, parts),
        out_shape=[result_type(shape, jnp.float32, *operands) for shape in partial],
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="router_mean_forward",
    )(*operands)
    return jnp.sum(sums, axis=1), jnp.sum(square, axis=1)


def _one_segment(weight, segment, groups):
    """Turns a lone segment into a mask: the kernel without segments is the faster one."""
    if groups == 1 and segment is not None:
        return jnp.where(segment == 0, weight, 0.0), None
    return weight, segment


def _backward_kernel(*refs, tokens: int, experts: int, groups: int, block: int):
    logits_ref, weight_ref, segment_ref, d_sums_ref, d_square_ref, grad_ref = (
        refs if groups > 1 else (*refs[:2], None, *refs[2:])
    )
    width = _padded(experts)
    row = pl.program_id(0)
    start = pl.program_id(1) * block
    p, lse, weight, segment, column = _softmax(
        logits_ref,
        weight_ref,
        segment_ref,
        row,
        start,
        tokens=tokens,
        experts=experts,
        block=block,
        width=width,
    )
    if segment is None:
        g = plgpu.load(
            d_sums_ref.at[row, pl.ds(0, 1), padded_slice(width, row)], mask=column[None], other=0.0
        )
        scale = 2.0 * d_square_ref[row, 0] * lse
    else:
        counted = weight > 0
        index = jnp.where(counted, segment, 0)
        columns = jnp.arange(width, dtype=jnp.int32)
        g = plgpu.load(
            d_sums_ref.at[row, index[:, None], columns[None, :]],
            mask=counted[:, None] & column[None, :],
            other=0.0,
        )
        scale = 2.0 * plgpu.load(d_square_ref.at[row, index], mask=counted, other=0.0) * lse
    inner = jnp.sum(g * p, axis=1)
    grad = weight[:, None] * p * ((g - inner[:, None]) + scale[:, None])
    grad = jnp.where((weight > 0)[:, None], grad, 0.0)
    inside = start + jnp.arange(block, dtype=jnp.int32) < tokens
    plgpu.store(
        grad_ref.at[row, pl.ds(start, block), padded_slice(width, start)],
        grad.astype(grad_ref.dtype),
        mask=inside[:, None] & column[None, :],
    )


def router_sums_vjp(
    logits: Float[Array, "R T N"],
    weight: Float[Array, "R T"],
    segment: Int[Array, "R T"] | None,
    d_sums: Float[Array, "R G N"],
    d_square: Float[Array, "R G"],
    *,
    interpret: bool = False,
) -> Float[Array, "R T N"]:
    """Same as `reference.router_sums_vjp`."""
    rows, tokens, experts = logits.shape
    groups = d_square.shape[1]
    weight, segment = _one_segment(weight, segment, groups)
    block = _block_tokens(tokens, _padded(experts))
    operands = [logits, weight] if segment is None else [logits, weight, segment]
    operands += [d_sums, d_square]
    return pl.pallas_call(
        functools.partial(
            _backward_kernel, tokens=tokens, experts=experts, groups=groups, block=block
        ),
        grid=(rows, ceil_div(tokens, block)),
        out_shape=result_type(logits.shape, logits.dtype, *operands),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="router_mean_backward",
    )(*operands)
