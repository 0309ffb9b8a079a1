"""Attention that visits only the kept blocks of a static pattern."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels_pallas.block_sparse_attention.pattern import BlockPattern
from kernels_pallas.block_sparse_attention.reference import block_sparse_xla
from kernels_pallas.dispatch import Implementation, choose
from kernels_pallas.tiling import align_varying

__all__ = ["BlockPattern", "block_sparse_attention"]


def _check(q: Array, k: Array, v: Array, pattern: BlockPattern, qk_bits: int) -> None:
    if not isinstance(pattern, BlockPattern):
        raise ValueError(
            f"pattern: got {type(pattern).__name__}, expected a BlockPattern; make one with "
            "BlockPattern.from_mask or BlockPattern.band"
        )
    for name, a in (("q", q), ("k", k), ("v", v)):
        if a.ndim != 4:
            raise ValueError(f"{name}: got shape {a.shape}, expected [batch, heads, length, dim]")
        if not jnp.issubdtype(a.dtype, jnp.floating):
            raise ValueError(f"{name}: got dtype {a.dtype}, expected a floating-point one")
        if a.shape != q.shape or a.dtype != q.dtype:
            raise ValueError(
                f"{name}: got {a.dtype}{list(a.shape)}, expected the shape and dtype of q, "
                f"{q.dtype}{list(q.shape)}"
            )
    if pattern.length != q.shape[2]:
        raise ValueError(
            f"pattern: made for length {pattern.length}, q has length {q.shape[2]}; build it anew"
        )
    if pattern.heads not in (1, q.shape[1]):
        raise ValueError(
            f"pattern: has {pattern.heads} maps, expected 1 or one for each of {q.shape[1]} heads"
        )
    if qk_bits not in (8, 16):
        raise ValueError(f"qk_bits: got {qk_bits}, expected 8 or 16")


def block_sparse_attention(
    q: Float[Array, "batch heads length dim"],
    k: Float[Array, "batch heads length dim"],
    v: Float[Array, "batch heads length dim"],
    pattern: BlockPattern,
    *,
    qk_bits: Literal[8, 16] = 16,
    return_lse: bool = False,
    implementation: Implementation | None = None,
) -> Float[Array, "batch heads length dim"] | tuple[Array, Array]:
    """Softmax attention over the pairs that ``pattern`` keeps, with work in proportion to them.

    Logits are ``q . k * dim ** -0.5``; softmax and sums are in float32 (float64 for float64 input).
    A query that sees no key gives 0, log-sum-exp -inf and zero gradients.

    With ``qk_bits=8`` the mean of k over the tokens is taken off (softmax doesn't see it), then
    q and k become symmetric int8 codes with one scale a token, as in QuantSparse (arXiv 2509.23681,
    after SageAttention; low-level conventions reconstructed). The product with v stays at 16 bits,
    and so does the backward pass: the gradient is that of ``qk_bits=16`` at the same arguments.

    Args:
      q: Queries [batch, heads, length, dim], any float dtype.
      k: Keys, shaped as q.
      v: Values, shaped as q.
      pattern: Kept blocks, for all heads or one map a head; concrete or passed through jit.
      qk_bits: Precision of the product of queries and keys.
      return_lse: Also return the log-sum-exp of the logits, which has a gradient too.
      implementation: See `kernels_pallas.dispatch`. The kernels' tile is the pattern's block: 128
        suits a GPU, 256 or 512 a TPU.

    Returns:
      [batch, heads, length, dim] in the dtype of q, and with ``return_lse`` the log-sum-exp
      [batch, heads, length] in float32.

    Raises:
      ValueError: Ranks, shapes or dtypes don't fit, the pattern is for another length or number of
        heads, or ``qk_bits`` is neither 8 nor 16.
      NotImplementedError: The named implementation can't take these arguments.
    """
    _check(q, k, v, pattern, qk_bits)
    if q.size == 0:
        lse = jnp.full(q.shape[:3], -jnp.inf, jnp.float32)
        return (jnp.zeros_like(q), lse) if return_lse else jnp.zeros_like(q)
    q, k, v = align_varying(q, k, v)
    reasons = _unsupported(q, pattern)
    backend = choose("block_sparse_attention", implementation, **reasons)
    if backend == "xla":
        out, lse = block_sparse_xla(q, k, v, pattern, qk_bits)
    elif backend == "gpu":
        from kernels_pallas.block_sparse_attention.gpu import block_sparse_gpu

        out, lse = block_sparse_gpu(q, k, v, pattern, qk_bits)
    else:
        from kernels_pallas.block_sparse_attention.tpu import block_sparse_tpu

        out, lse = block_sparse_tpu(q, k, v, pattern, qk_bits, interpret=backend == "interpret")
    return (out, lse) if return_lse else out


def _unsupported(q: Array, pattern: BlockPattern) -> dict[str, str | None]:
    from kernels_pallas.block_sparse_attention import gpu, tpu

    return {name: m.unsupported(q, pattern) for name, m in (("tpu", tpu), ("gpu", gpu))}
