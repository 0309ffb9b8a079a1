"""Flash attention with grouped queries, bands, segments, bias and soft cap."""

from __future__ import annotations

from typing import Literal, overload

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas.attention.reference import Masks, attention_xla
from kernels_pallas.attention.scores import make_spec
from kernels_pallas.dispatch import Implementation, choose, current_platform
from kernels_pallas.tiling import accumulator_dtype, align_varying

__all__ = ["attention"]

# Blocks of logits on the XLA path: small ones stay in a CPU core's cache, an accelerator wants
# matmuls that fill it.
_XLA_BLOCKS = {"cpu": (128, 64)}
_XLA_BLOCKS_DEFAULT = (512, 512)


def _check(
    q: Array,
    k: Array,
    v: Array,
    window: tuple[int | None, int | None] | None,
    q_segment_ids: Array | None,
    kv_segment_ids: Array | None,
    pairs: dict[str, Array | None],
) -> None:
    for name, a in (("q", q), ("k", k), ("v", v)):
        if a.ndim != 4:
            raise ValueError(
                f"attention: {name} must be [batch, length, heads, dim], got {a.shape}"
            )
        if not jnp.issubdtype(a.dtype, jnp.floating):
            raise ValueError(f"attention: {name} must be floating point, got {a.dtype}")
        if a.dtype != q.dtype:
            raise ValueError(f"attention: {name} is {a.dtype}, q is {q.dtype}; cast one of them")
    if k.shape != v.shape:
        raise ValueError(f"attention: k has shape {k.shape}, v has shape {v.shape}")
    batch, queries, heads, dim = q.shape
    if (k.shape[0], k.shape[3]) != (batch, dim):
        raise ValueError(f"attention: batch and head dim of q {q.shape} and k {k.shape} differ")
    if k.shape[2] == 0 or heads % k.shape[2]:
        raise ValueError(f"attention: {heads} query heads is no multiple of {k.shape[2]} key heads")
    for side in window or ():
        if side is not None and side < 0:
            raise ValueError(f"attention: window must not be negative, got {window}")
    if (q_segment_ids is None) != (kv_segment_ids is None):
        raise ValueError("attention: give both q_segment_ids and kv_segment_ids, or neither")
    for name, a, length in (
        ("q_segment_ids", q_segment_ids, queries),
        ("kv_segment_ids", kv_segment_ids, k.shape[1]),
    ):
        if a is not None and a.shape != (batch, length):
            raise ValueError(f"attention: {name} must be {(batch, length)}, got {a.shape}")
        if a is not None and not jnp.issubdtype(a.dtype, jnp.integer):
            raise ValueError(f"attention: {name} must be integer, got {a.dtype}")
    full = (batch, heads, queries, k.shape[1])
    for name, a in pairs.items():
        if a is not None and (
            a.ndim != 4 or any(n not in (1, m) for n, m in zip(a.shape, full, strict=True))
        ):
            raise ValueError(f"attention: {name} must broadcast to {full}, got {a.shape}")


@overload
def attention(
    q: Array, k: Array, v: Array, *, return_lse: Literal[False] = False, **options: object
) -> Array: ...


@overload
def attention(
    q: Array, k: Array, v: Array, *, return_lse: Literal[True], **options: object
) -> tuple[Array, Array]: ...


def attention(
    q: Float[Array, "batch q heads dim"],
    k: Float[Array, "batch k kv_heads dim"],
    v: Float[Array, "batch k kv_heads dim"],
    *,
    causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    q_segment_ids: Int[Array, "batch q"] | None = None,
    kv_segment_ids: Int[Array, "batch k"] | None = None,
    bias: Float[Array, "#batch #heads #q #k"] | None = None,
    mask: Bool[Array, "#batch #heads #q #k"] | None = None,
    scale: float | None = None,
    logit_softcap: float | None = None,
    return_lse: bool = False,
    implementation: Implementation | None = None,
) -> Float[Array, "batch q heads dim"] | tuple[Array, Array]:
    """Softmax attention that never holds a [q, k] array, forward or backward.

    The logit of a pair is ``softcap(scale * q . k) + bias``, ``softcap(s) = cap tanh(s / cap)``.
    Query i stands at key position ``i + (Tk - Tq)``: the last query sees the last key.

    Args:
      q: Queries [batch, Tq, heads, dim], any float dtype.
      k: Keys [batch, Tk, kv_heads, dim]; ``heads`` is a multiple of ``kv_heads``, and consecutive
        query heads share a key head.
      v: Values, shaped as k.
      causal: A query sees no key after its own position.
      window: How many keys before and after its own position a query sees besides that one: a pair
        (None is no limit), or one number for both sides.
      q_segment_ids: Integer [batch, Tq]; a pair counts only where the two ids agree.
      kv_segment_ids: Integer [batch, Tk].
      bias: Added to the logits, each axis full or 1; it gets a gradient of its own shape.
      mask: True where a pair counts, each axis full or 1.
      scale: Factor on the dot products, ``dim ** -0.5`` by default.
      logit_softcap: Bound of the logits' magnitude (before the bias).
      return_lse: Also return the log-sum-exp of the logits.
      implementation: See `kernels_pallas.dispatch`.

    Returns:
      [batch, Tq, heads, dim] in the dtype of q, and with ``return_lse`` the log-sum-exp
      [batch, heads, Tq] in float32 (float64 for float64 input), which has a gradient too. Softmax
      and sums are in float32 or better. A query that sees no key gives 0, log-sum-exp -inf and
      zero gradients.

    Raises:
      ValueError: Ranks, dtypes, head counts, segments, bias or mask don't fit.
      NotImplementedError: The named implementation can't take these arguments.
    """
    if isinstance(window, int):
        window = (window, window)
    pairs = {"bias": bias, "mask": mask}
    _check(q, k, v, window, q_segment_ids, kv_segment_ids, pairs)
    if mask is not None and mask.dtype != jnp.bool_:
        raise ValueError(f"attention: mask must be bool, got {mask.dtype}")
    if q.size == 0 or k.size == 0:
        lse = jnp.full((q.shape[0], q.shape[2], q.shape[1]), -jnp.inf, accumulator_dtype(q))
        return (jnp.zeros_like(q), lse) if return_lse else jnp.zeros_like(q)

    q, k, v, bias, mask, q_segment_ids, kv_segment_ids = align_varying(
        q, k, v, bias, mask, q_segment_ids, kv_segment_ids
    )
    reasons = _unsupported(q)
    backend = choose("attention", implementation, **reasons)
    options = {
        "causal": causal,
        "window": window,
        "q_segment_ids": q_segment_ids,
        "kv_segment_ids": kv_segment_ids,
        "bias": bias,
        "mask": mask,
        "scale": scale,
        "logit_softcap": logit_softcap,
    }
    if backend == "xla":
        spec = make_spec(q.shape, k.shape, causal, window, scale, logit_softcap)
        blocks = _XLA_BLOCKS.get(current_platform(), _XLA_BLOCKS_DEFAULT)
        masks = Masks(q_segment_ids, kv_segment_ids, mask)
        out, lse = attention_xla(q, k, v, bias, masks, spec, blocks)
    elif backend == "gpu":
        from kernels_pallas.attention.gpu import attention_gpu

        out, lse = attention_gpu(q, k, v, **options)
    else:
        from kernels_pallas.attention.tpu import attention_tpu

        out, lse = attention_tpu(q, k, v, **options, interpret=backend == "interpret")
    return (out, lse) if return_lse else out


def _unsupported(q: Array) -> dict[str, str | None]:
    from kernels_pallas.attention import gpu, tpu

    return {name: m.unsupported(q.dtype, q.shape[3]) for name, m in (("tpu", tpu), ("gpu", gpu))}
