"""Cross-entropy of a language-model head that never holds all logits.

Logits exist for one chunk of positions at a time. The gradient of a chunk is formed together with
its loss, so that the backward pass only scales what was saved and no logits are computed twice.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxlib_papers.ops.checks import (
    check_count,
    check_integer,
    check_nonnegative,
    check_positive,
    check_shape,
    float_dtype,
)
from kernels_pallas.tiling import align_varying

__all__ = ["chunk_length", "chunked_cross_entropy", "token_log_probs"]

# Logits in one chunk: 16 MiB of float32, or so many tokens where the vocabulary is huge. With fewer
# tokens, reading the output matrix and adding to its gradient takes longer than the products.
_CHUNK_LOGITS = 1 << 22
_CHUNK_TOKENS = 512


class _Static(NamedTuple):
    z_coef: float
    softcap: float | None
    chunk: int


def chunk_length(batch: int, length: int, vocab: int) -> int:
    """Positions whose logits exist at a time by default.

    Args:
      batch: Rows that have them at once.
      length: Positions of a row.
      vocab: Logits of a token.

    Returns:
      From 1 to ``length``: 16 MiB of float32 logits, or 512 tokens where that is more.

    Source: no paper; bounds of our own.
    """
    batch = max(batch, 1)
    chunk = max(-(-_CHUNK_TOKENS // batch), _CHUNK_LOGITS // max(batch * vocab, 1))
    return max(1, min(length, chunk))


def _chunk_length(chunk: int | None, batch: int, length: int, vocab: int) -> int:
    if chunk is None:
        return chunk_length(batch, length, vocab)
    check_count("chunk", chunk, 1)
    return max(1, min(length, chunk))


def _flat_batch(hidden: Array, *per_token: Array) -> tuple[Array, ...]:
    length, dim = hidden.shape[-2:]
    batch = math.prod(hidden.shape[:-2])
    return hidden.reshape(batch, length, dim), *(a.reshape(batch, length) for a in per_token)


def _chunks(a: Array, chunk: int) -> Array:
    """[batch, length, ...] -> [chunks, batch, chunk, ...], padded with zeros."""
    pad = -a.shape[1] % chunk
    a = jnp.pad(a, ((0, 0), (0, pad)) + ((0, 0),) * (a.ndim - 2))
    count = a.shape[1] // chunk
    return jnp.moveaxis(a.reshape(a.shape[0], count, chunk, *a.shape[2:]), 1, 0)


def _unchunk(a: Array, length: int) -> Array:
    a = jnp.moveaxis(a, 0, 1)
    return a.reshape(a.shape[0], a.shape[1] * a.shape[2], *a.shape[3:])[:, :length]


def _logits(x: Array, kernel: Array, softcap: float | None) -> tuple[Array, Array | None]:
    """Float32 logits [..., vocab] and the slope of the soft cap (None without one)."""
    dtype = float_dtype(kernel)
    dims = (((x.ndim - 1,), (0,)), ((), ()))
    logits = lax.dot_general(x, kernel, dims, preferred_element_type=dtype)
    if softcap is None:
        return logits, None
    ratio = jnp.tanh(logits / softcap)
    return ratio * softcap, 1 - ratio * ratio


def _target_logit(logits: Array, targets: Array) -> tuple[Array, Array]:
    """The target's logit and where it stands (one-hot, as bool)."""
    at_target = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1) == targets[..., None]
    return jnp.sum(jnp.where(at_target, logits, jnp.zeros_like(logits)), axis=-1), at_target


def _statistics(logits: Array) -> tuple[Array, Array, Array]:
    """exp(logits - max), its sum and the log-sum-exp."""
    top = lax.stop_gradient(logits.max(axis=-1, keepdims=True))
    weights = jnp.exp(logits - top)
    total = weights.sum(axis=-1)
    return weights, total, jnp.log(total) + top[..., 0]


def _loss_of_chunk(
    x: Array, kernel: Array, targets: Array, mask: Array, static: _Static
) -> tuple[Array, Array, tuple[Array, Array]]:
    """Sum of the losses over valid tokens, and the two factors of its gradient.

    Returns:
      The sum, the gradient of the sum with respect to x, and (x, gradient of the logits), whose
      product is the gradient with respect to the kernel.
    """
    logits, slope = _logits(x, kernel, static.softcap)
    weights, total, lse = _statistics(logits)
    target, at_target = _target_logit(logits, targets)
    losses = lse - target + static.z_coef * lse * lse
    # A masked token counts nothing, even when its hidden state is not finite.
    valid = mask != 0
    loss = jnp.sum(jnp.where(valid, losses * mask, jnp.zeros_like(losses)))
    factor = jnp.where(valid, mask, jnp.zeros_like(mask))
    share = factor * (1 + 2 * static.z_coef * lse) / total
    dlogits = weights * share[..., None]
    dlogits = dlogits - jnp.where(at_target, factor[..., None], jnp.zeros_like(dlogits))
    if slope is not None:
        dlogits = dlogits * slope
    dlogits = jnp.where(valid[..., None], dlogits, jnp.zeros_like(dlogits)).astype(x.dtype)
    dims = (((dlogits.ndim - 1,), (1,)), ((), ()))
    dx = lax.dot_general(dlogits, kernel, dims, preferred_element_type=losses.dtype)
    return loss, dx, (jnp.where(valid[..., None], x, jnp.zeros_like(x)), dlogits)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _nll_sum(
    hidden: Float[Array, "batch length dim"],
    kernel: Float[Array, "dim vocab"],
    targets: Int[Array, "batch length"],
    mask: Float[Array, "batch length"],
    static: _Static,
) -> Float[Array, ""]:
    def step(total: Array, chunk: tuple[Array, Array, Array]) -> tuple[Array, None]:
        x, target, valid = chunk
        return total + _loss_of_chunk(x, kernel, target, valid, static)[0], None

    xs = tuple(_chunks(a, static.chunk) for a in (hidden, targets, mask))
    total, _ = align_varying(jnp.zeros((), mask.dtype), hidden)
    return lax.scan(step, total, xs)[0]


def _nll_sum_fwd(
    hidden: Array, kernel: Array, targets: Array, mask: Array, static: _Static
) -> tuple[Array, tuple[Array, Array]]:
    def step(
        carry: tuple[Array, Array], chunk: tuple[Array, Array, Array]
    ) -> tuple[tuple[Array, Array], Array]:
        total, dkernel = carry
        x, target, valid = chunk
        loss, dx, (left, right) = _loss_of_chunk(x, kernel, target, valid, static)
        # Turned by hand, behind a barrier: XLA would fold it into the dot, which on CPU then packs
        # its operands by columns and loses a fifth of its speed.
        left = lax.optimization_barrier(left.reshape(-1, left.shape[-1]).T)
        right = right.reshape(-1, right.shape[-1])
        dims = (((1,), (0,)), ((), ()))
        dkernel = dkernel + lax.dot_general(left, right, dims, preferred_element_type=dkernel.dtype)
        return (total + loss, dkernel), dx.astype(hidden.dtype)

    # Inside shard_map a loop's carry starts as device-dependent as it ends.
    init = (jnp.zeros((), mask.dtype), jnp.zeros(kernel.shape, mask.dtype))
    init, _ = align_varying(init, hidden)
    xs = tuple(_chunks(a, static.chunk) for a in (hidden, targets, mask))
    (total, dkernel), dhidden = lax.scan(step, init, xs)
    return total, (_unchunk(dhidden, hidden.shape[1]), dkernel.astype(kernel.dtype))


def _nll_sum_bwd(
    static: _Static, saved: tuple[Array, Array], cotangent: Array
) -> tuple[Array, Array, None, None]:
    dhidden, dkernel = saved
    return (
        dhidden * cotangent.astype(dhidden.dtype),
        dkernel * cotangent.astype(dkernel.dtype),
        None,
        None,
    )


_nll_sum.defvjp(_nll_sum_fwd, _nll_sum_bwd)


def _check(hidden: Array, kernel: Array, targets: Array, softcap: float | None) -> None:
    if hidden.ndim < 2 or kernel.ndim != 2 or hidden.shape[-1] != kernel.shape[0]:
        raise ValueError(
            "hidden and kernel: expected [..., length, dim] and [dim, vocab], got "
            f"{hidden.shape} and {kernel.shape}"
        )
    if hidden.dtype != kernel.dtype:
        raise ValueError(f"hidden is {hidden.dtype} and kernel is {kernel.dtype}; cast one of them")
    check_shape("targets", targets, hidden.shape[:-1], "one target a token")
    check_integer("targets", targets)
    if softcap is not None:
        check_positive("softcap", softcap)


def chunked_cross_entropy(
    hidden: Float[Array, "*batch length dim"],
    kernel: Float[Array, "dim vocab"],
    targets: Int[Array, "*batch length"],
    mask: Bool[Array, "*batch length"] | Float[Array, "*batch length"] | None = None,
    *,
    z_coef: float = 0.0,
    softcap: float | None = None,
    chunk: int | None = None,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Sum of next-token losses, and the weight that it is a sum over.

    ``sum_t mask_t (lse_t - logit_t[target_t] + z_coef lse_t^2)`` with logits
    ``hidden @ kernel`` (through ``softcap tanh(logits / softcap)`` when given).

    Args:
      hidden: Final hidden states, float32 or bfloat16 (matmuls in that dtype, accumulated in
        float32).
      kernel: Output matrix in the same dtype.
      targets: Token ids in [0, vocab); an id outside has no target logit (loss = lse).
      mask: Weight of each token, bool or float, without gradient; None counts every token.
      z_coef: Coefficient of the squared log-sum-exp, >= 0.
      softcap: Bound of the logits' magnitude.
      chunk: Positions whose logits exist at a time, `chunk_length` by default. Memory is
        ``chunk * batch * vocab``, plus one gradient of the kernel.

    Returns:
      (sum, weight) in float32 (float64 for float64 input). Both are 0 when nothing counts; a
      masked token adds nothing to value or gradients, even if its hidden state is not finite.

    Raises:
      ValueError: Shapes, dtypes or coefficients don't fit.

    Source: Standard cross-entropy; z-loss as in Chowdhery et al., arXiv 2204.02311, section 5.
    """
    _check(hidden, kernel, targets, softcap)
    check_nonnegative("z_coef", z_coef)
    dtype = float_dtype(hidden)
    if mask is None:
        mask = jnp.ones(targets.shape, dtype)
    check_shape("mask", mask, targets.shape, "one weight a token")
    mask = lax.stop_gradient(mask.astype(dtype))
    hidden, targets, flat_mask = _flat_batch(hidden, targets, mask)
    chunk = _chunk_length(chunk, *targets.shape, kernel.shape[1])
    static = _Static(float(z_coef), softcap, chunk)
    return _nll_sum(hidden, kernel, targets, flat_mask, static), jnp.sum(mask)


def token_log_probs(
    hidden: Float[Array, "*batch length dim"],
    kernel: Float[Array, "dim vocab"],
    targets: Int[Array, "*batch length"],
    *,
    softcap: float | None = None,
    chunk: int | None = None,
) -> Float[Array, "*batch length"]:
    """Log-probability of each target token, chunk by chunk.

    Args:
      hidden: Final hidden states [..., length, dim].
      kernel: Output matrix [dim, vocab] in the same dtype.
      targets: Token ids in [0, vocab), integer [..., length].
      softcap: Bound of the logits' magnitude.
      chunk: Positions whose logits exist at a time.

    Returns:
      Natural-log probabilities [..., length], float32 (float64 for float64 input), differentiable
      (each chunk's logits are formed again in the backward pass).

    Raises:
      ValueError: Shapes or dtypes don't fit.
    """
    _check(hidden, kernel, targets, softcap)
    shape = targets.shape
    hidden, targets = _flat_batch(hidden, targets)
    chunk = _chunk_length(chunk, *targets.shape, kernel.shape[1])

    @jax.checkpoint
    def of_chunk(x: Array, target: Array) -> Array:
        logits, _ = _logits(x, kernel, softcap)
        return _target_logit(logits, target)[0] - _statistics(logits)[2]

    xs = (_chunks(hidden, chunk), _chunks(targets, chunk))
    log_probs = lax.map(lambda chunk: of_chunk(*chunk), xs)
    return _unchunk(log_probs, shape[-1]).reshape(shape)
