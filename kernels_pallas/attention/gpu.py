"""Triton kernels behind `attention`, with their custom VJP.

They read [batch, tokens, heads, head_dim] as it lies in memory. The forward pass and dq take one
block of queries a program, dk and dv one block of keys and all query heads that share it, so that
no two programs add to the same element and results repeat bit by bit. Head sizes that are no power
of two are filled up with zeros on load.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas.attention.gpu_backward import bias_gradient, key_gradients, query_gradient
from kernels_pallas.attention.gpu_blocks import choose_tile
from kernels_pallas.attention.gpu_forward import attention_forward
from kernels_pallas.attention.scores import every_key, make_spec

__all__ = ["attention_gpu", "unsupported"]

_MAX_HEAD_DIM = 256


def unsupported(dtype: Any, head_dim: int) -> str | None:
    """Why the kernel can't take these arguments, or None when it can."""
    allowed = (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
    if jnp.dtype(dtype) not in allowed:
        return f"q of dtype {jnp.dtype(dtype)}: the GPU kernel takes float32, bfloat16 and float16"
    if head_dim > _MAX_HEAD_DIM:
        return f"head_dim {head_dim}: the GPU kernel takes at most {_MAX_HEAD_DIM}"
    return None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(spec, interpret, q, k, v, bias, mask, q_seg, k_seg):
    tile = choose_tile("attention", spec, q.shape[-1], q.dtype)
    return attention_forward(spec, tile, interpret, q, k, v, bias, mask, q_seg, k_seg)


def _attend_fwd(spec, interpret, q, k, v, bias, mask, q_seg, k_seg):
    out, lse = _attend(spec, interpret, q, k, v, bias, mask, q_seg, k_seg)
    return (out, lse), (q, k, v, bias, mask, q_seg, k_seg, out, lse)


def _attend_bwd(spec, interpret, residuals, cotangents):
    q, k, v, bias, mask, q_seg, k_seg, out, lse = residuals
    do, dlse = cotangents
    do = do.astype(q.dtype)
    delta = jnp.sum(out.astype(jnp.float32) * do.astype(jnp.float32), axis=-1)
    delta = delta.transpose(0, 2, 1) - dlse
    operands = (q, k, v, bias, mask, q_seg, k_seg, lse, delta, do)
    tile = functools.partial(choose_tile, spec=spec, head_dim=q.shape[-1], dtype=q.dtype)
    dq = query_gradient(spec, tile("attention_dq"), interpret, *operands)
    dk, dv = key_gradients(spec, tile("attention_dkv"), interpret, *operands)
    dbias = None
    if bias is not None:
        dbias = bias_gradient(spec, tile("attention_dq"), interpret, *operands)
    return dq, dk, dv, dbias, None, None, None


_attend.defvjp(_attend_fwd, _attend_bwd)


def attention_gpu(
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
    """The GPU kernel for checked arguments; see `kernels_pallas.attention.attention`.

    Returns:
      The output and the log-sum-exp of each row; both have gradients.
    """
    spec = make_spec(q.shape, k.shape, causal, window, scale, logit_softcap)
    bias, mask = (every_key(pairs, k.shape[1]) for pairs in (bias, mask))
    if mask is not None:
        mask = mask.astype(jnp.int8)
    if q_segment_ids is not None:
        q_segment_ids = q_segment_ids.astype(jnp.int32)
        kv_segment_ids = kv_segment_ids.astype(jnp.int32)
    return _attend(spec, interpret, q, k, v, bias, mask, q_segment_ids, kv_segment_ids)
