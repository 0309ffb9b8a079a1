"""Mosaic TPU kernels behind `router_mean`.

The kernels see the logits as [R, N, T]: tokens lie along the 128 lanes and experts along the
sublanes, so that 8 or 64 experts fill whole registers and the softmax reduces over sublanes. Where
the logits come out of a matmul, XLA writes them in that order at no cost.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from kernels_pallas.tiling import ceil_div, result_type, round_up

__all__ = ["router_sums", "router_sums_vjp", "unsupported"]

_MAX_EXPERTS = 2048
_MAX_SEGMENTS = 1024
_BLOCK_BYTES = 1 << 20


def unsupported(dtype: Any, experts: int, groups: int) -> str | None:
    """Why the kernel can't take these arguments, or None when it can."""
    if jnp.dtype(dtype) not in (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)):
        return f"logits of dtype {jnp.dtype(dtype)}: the TPU kernel takes float32 and bfloat16"
    if experts > _MAX_EXPERTS:
        return f"{experts} experts: the TPU kernel keeps all of them in a block, {_MAX_EXPERTS} fit"
    if groups > _MAX_SEGMENTS:
        return f"{groups} segments: the TPU kernel takes at most {_MAX_SEGMENTS}"
    return None


def _block_tokens(tokens: int, experts: int, groups: int) -> int:
    """Tokens a block: about 1 MiB of float32 logits, whole lanes, or the whole row."""
    rows = max(round_up(experts, 8), round_up(groups, 8))
    wanted = max(128, min(4096, _BLOCK_BYTES // (4 * rows) // 128 * 128))
    return tokens if tokens <= wanted else wanted


def _three_terms(x: Array) -> tuple[Array, Array, Array]:
    """Splits float32 into three bfloat16 whose sum is ``x`` to float32 accuracy.

    A product with zeros and ones then needs three passes of the matrix unit, not six.
    """
    high = x.astype(jnp.bfloat16)
    rest = x - high.astype(jnp.float32)
    middle = rest.astype(jnp.bfloat16)
    low = (rest - middle.astype(jnp.float32)).astype(jnp.bfloat16)
    return high, middle, low


def _dot_one_hot(x: Array, one_hot: Array, contract: tuple[int, int]) -> Array:
    dims = (((contract[0],), (contract[1],)), ((), ()))
    terms = [
        jax.lax.dot_general(term, one_hot, dims, preferred_element_type=jnp.float32)
        for term in _three_terms(x)
    ]
    return (terms[2] + terms[1]) + terms[0]


def _softmax(logits_ref, weight_ref, tokens: int, block: int):
    """Softmax over sublanes of the tokens that count: p [N, B], lse [1, B], w [1, B]."""
    lane = pl.program_id(1) * block + jax.lax.broadcasted_iota(jnp.int32, (1, block), 1)
    weight = weight_ref[0]
    counted = (lane < tokens) & (weight > 0)
    weight = jnp.where(counted, weight, 0.0)
    x = jnp.where(counted, logits_ref[0].astype(jnp.float32), 0.0)
    top = jnp.max(x, axis=0, keepdims=True)
    e = jnp.exp(x - top)
    total = jnp.sum(e, axis=0, keepdims=True)
    return e / total, top + jnp.log(total), weight, counted


def _one_hot(segment_ref, counted: Array, groups: int) -> Array:
    ids = jax.lax.broadcasted_iota(jnp.int32, (groups, counted.shape[1]), 0)
    return (segment_ref[0] == ids) & counted


def _forward_kernel(*refs, tokens: int, block: int, groups: int):
    if groups > 1:
        logits_ref, weight_ref, segment_ref, sums_ref, square_ref = refs
    else:
        logits_ref, weight_ref, sums_ref, square_ref = refs

    @pl.when(pl.program_id(1) == 0)
    def _():
        sums_ref[...] = jnp.zeros_like(sums_ref)
        square_ref[...] = jnp.zeros_like(square_ref)

    p, lse, weight, counted = _softmax(logits_ref, weight_ref, tokens, block)
    square = weight * lse * lse
    if groups > 1:
        member = _one_hot(segment_ref, counted, groups)
        sums_ref[0] += _dot_one_hot(weight * p, member.astype(jnp.bfloat16), (1, 1))
        square = jnp.where(member, square, 0.0)
    else:
        sums_ref[0] += jnp.sum(weight * p, axis=1, keepdims=True)
    square_ref[0] += jnp.sum(square, axis=1, keepdims=True)


def _specs(experts: int, block: int, groups: int) -> list[pl.BlockSpec]:
    row = pl.BlockSpec((1, 1, block), lambda r, t: (r, 0, t))
    logits = pl.BlockSpec((1, experts, block), lambda r, t: (r, 0, t))
    return [logits, row, row] if groups > 1 else [logits, row]


def _operands(logits: Array, weight: Array, segment: Array | None) -> list[Array]:
    operands = [jnp.swapaxes(logits, 1, 2), weight[:, None]]
    return operands if segment is None else [*operands, segment[:, None]]


def router_sums(
    logits: Float[Array, "R T N"],
    weight: Float[Array, "R T"],
    segment: Int[Array, "R T"] | None,
    num_segments: int,
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "R G N"], Float[Array, "R G"]]:
    """Same as `reference.router_sums`; blocks of tokens accumulate in order."""
    rows, tokens, experts = logits.shape
    if num_segments == 1 and segment is not None:
        weight = jnp.where(segment == 0, weight, 0.0)
        segment = None
    block = _block_tokens(tokens, experts, num_segments)
    operands = _operands(logits, weight, segment)
    cells = rows * tokens * experts
    sums, square = pl.pallas_call(
        functools.partial(_forward_kernel, tokens=tokens, block=block, groups=num_segments),
        grid=(rows, ceil_div(tokens, block)),
        in_specs=_specs(experts, block, num_segments),
        out_specs=[
            pl.BlockSpec((1, experts, num_segments), lambda r, t: (r, 0, 0)),
            pl.BlockSpec((1, num_segments, 1), lambda r, t: (r, 0, 0)),
        ],
        out_shape=[
            result_type((rows, experts, num_segments), jnp.float32, *operands),
            result_type((rows, num_segments, 1), jnp.float32, *operands),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=6 * cells,
            transcendentals=cells,
            bytes_accessed=sum(x.size * x.dtype.itemsize for x in operands)
            + 4 * rows * num_segments * (experts + 1),
        ),
        interpret=interpret,
        name="router_mean_forward",
    )(*operands)
    return jnp.swapaxes(sums, 1, 2), square[..., 0]


def _backward_kernel(*refs, tokens: int, block: int, groups: int):
    if groups > 1:
        logits_ref, weight_ref, segment_ref, d_sums_ref, d_square_ref, grad_ref = refs
    else:
        logits_ref, weight_ref, d_sums_ref, d_square_ref, grad_ref = refs
    p, lse, weight, counted = _softmax(logits_ref, weight_ref, tokens, block)
    if groups > 1:
        member = _one_hot(segment_ref, counted, groups)
        g = _dot_one_hot(d_sums_ref[0], member.astype(jnp.bfloat16), (1, 0))
        c = jnp.sum(jnp.where(member, d_square_ref[0], 0.0), axis=0, keepdims=True)
    else:
        g, c = d_sums_ref[0], d_square_ref[0]
    inner = jnp.sum(g * p, axis=0, keepdims=True)
    grad = weight * p * ((g - inner) + 2.0 * c * lse)
    grad_ref[0] = jnp.where(counted, grad, 0.0).astype(grad_ref.dtype)


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
    if groups == 1 and segment is not None:
        weight = jnp.where(segment == 0, weight, 0.0)
        segment = None
    block = _block_tokens(tokens, experts, groups)
    operands = [
        *_operands(logits, weight, segment),
        jnp.swapaxes(d_sums, 1, 2),
        d_square[..., None],
    ]
    cells = rows * tokens * experts
    grad = pl.pallas_call(
        functools.partial(_backward_kernel, tokens=tokens, block=block, groups=groups),
        grid=(rows, ceil_div(tokens, block)),
        in_specs=[
            *_specs(experts, block, groups),
            pl.BlockSpec((1, experts, groups), lambda r, t: (r, 0, 0)),
            pl.BlockSpec((1, groups, 1), lambda r, t: (r, 0, 0)),
        ],
        out_specs=pl.BlockSpec((1, experts, block), lambda r, t: (r, 0, t)),
        out_shape=result_type((rows, experts, tokens), logits.dtype, *operands),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        cost_estimate=pl.CostEstimate(
            flops=10 * cells,
            transcendentals=cells,
            bytes_accessed=sum(x.size * x.dtype.itemsize for x in operands)
            + cells * logits.dtype.itemsize,
        ),
        interpret=interpret,
        name="router_mean_backward",
    )(*operands)
    return jnp.swapaxes(grad, 1, 2)
