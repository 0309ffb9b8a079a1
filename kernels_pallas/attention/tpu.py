"""Mosaic TPU kernels behind `attention`, with their custom VJP.

The kernels see [batch, heads, tokens, head_dim], the order a projection can write at no cost. A
stretch of keys and values as long as VMEM allows (all of them up to some 16 thousand tokens) stays
there while the query blocks of the heads that share it pass by, so that each operand is read from
main memory once. Which key blocks a query block visits, and which of them need no mask, is
computed outside and prefetched as scalars.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas.attention.scores import ScoreSpec, every_key, make_spec
from kernels_pallas.attention.tpu_backward import attention_backward
from kernels_pallas.attention.tpu_bias import bias_gradient
from kernels_pallas.attention.tpu_blocks import choose_blocks
from kernels_pallas.attention.tpu_forward import attention_forward

__all__ = ["attention_tpu", "unsupported"]

_MAX_HEAD_DIM = 512


def unsupported(dtype: Any, head_dim: int) -> str | None:
    """Why the kernel can't take these arguments, or None when it can."""
    if jnp.dtype(dtype) not in (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)):
        return f"q of dtype {jnp.dtype(dtype)}: the TPU kernel takes float32 and bfloat16"
    if head_dim > _MAX_HEAD_DIM:
        return f"head_dim {head_dim}: the TPU kernel takes at most {_MAX_HEAD_DIM}"
    return None


def _blocks(spec: ScoreSpec, q, bias, mask, *, backward: bool):
    dense = [array for array in (bias, mask) if array is not None]
    return choose_blocks(
        spec,
        q.shape[-1],
        q.dtype.itemsize,
        backward=backward,
        dense_bytes=sum(array.dtype.itemsize for array in dense if array.shape[2] > 1),
        row_bytes=sum(array.dtype.itemsize for array in dense if array.shape[2] == 1),
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(spec, interpret, q, k, v, bias, mask, q_seg, k_seg):
    blocks = _blocks(spec, q, bias, mask, backward=False)
    return attention_forward(spec, blocks, interpret, q, k, v, bias, mask, q_seg, k_seg)


def _attend_fwd(spec, interpret, q, k, v, bias, mask, q_seg, k_seg):
    out, lse = _attend(spec, interpret, q, k, v, bias, mask, q_seg, k_seg)
    return (out, lse), (q, k, v, bias, mask, q_seg, k_seg, out, lse)


def _attend_bwd(spec, interpret, residuals, cotangents):
    q, k, v, bias, mask, q_seg, k_seg, out, lse = residuals
    do, dlse = cotangents
    do = do.astype(q.dtype)
    blocks = _blocks(spec, q, bias, mask, backward=True)
    operands = (q, k, v, bias, mask, q_seg, k_seg)
    dq, dk, dv = attention_backward(spec, blocks, interpret, *operands, out, lse, do, dlse)
    dbias = None
    if bias is not None:
        delta = jnp.sum(out.astype(jnp.float32) * do.astype(jnp.float32), axis=-1) - dlse
        dbias = bias_gradient(spec, blocks, interpret, *operands, lse, delta, do)
    return dq, dk, dv, dbias, None, None, None


_attend.defvjp(_attend_fwd, _attend_bwd)


def attention_tpu(
    q: Float[Array, "batch queries heads dim"],
    k: Float[Array, "batch keys kv_heads dim"],
    v: Float[Array, "batch keys kv_heads dim"],
    *,
    causal: bool = False,
    window: Any = None,
    q_segment_ids: Int[Array, "batch queries"] | None = None,
    kv_segment_ids: Int[Array, "batch keys"] | None = None,
    bias: Float[Array, "batch_or_1 heads_or_1 queries_or_1 keys"] | None = None,
    mask: Bool[Array, "batch_or_1 heads_or_1 queries_or_1 keys"] | None = None,
    scale: float | None = None,
    logit_softcap: float | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "batch queries heads dim"], Float[Array, "batch heads queries"]]:
    """The TPU kernel for checked arguments; see `kernels_pallas.attention.attention`.

    Returns:
      The output and the log-sum-exp of each row; both have gradients.
    """
    spec = make_spec(q.shape, k.shape, causal, window, scale, logit_softcap)
    bias, mask = (every_key(pairs, k.shape[1]) for pairs in (bias, mask))
    if mask is not None:
        # A one-byte tile has 32 rows: a single row travels as int32.
        mask = mask.astype(jnp.int8 if mask.shape[2] > 1 else jnp.int32)
    if q_segment_ids is not None:
        q_segment_ids = q_segment_ids.astype(jnp.int32)
        kv_segment_ids = kv_segment_ids.astype(jnp.int32)
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
    out, lse = _attend(spec, interpret, q, k, v, bias, mask, q_segment_ids, kv_segment_ids)
    return out.transpose(0, 2, 1, 3), lse
