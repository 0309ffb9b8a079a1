"""Auxiliary losses of a mixture-of-experts router: load balance, z-loss, variation of load.

A convention for all of them: the mean is over the valid tokens of the arrays given. On a global
(jit-sharded) array that is the global batch, on a micro-batch it is that micro-batch; inside
`shard_map` pass `axis_name` for the global batch, otherwise the value is local to the shard. A
leading fourth axis is a stack of layers: each layer has its own loss, and their mean is returned.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from jaxlib_papers.ops.checks import as_float, check_count, check_ndim, check_shape, is_concrete
from jaxlib_papers.ops.masked import divide_or_zero, masked_sum

__all__ = [
    "active_experts",
    "cv_squared_loss",
    "expert_counts",
    "load_balancing_loss",
    "router_z_loss",
]

AxisName = str | tuple[str, ...] | None


def _layered(name: str, array: Array, mask: ArrayLike | None) -> tuple[Array, Array]:
    """The array as [layers, tokens, experts] and the mask as float [tokens]."""
    check_ndim(name, array, (2, 3, 4), "[tokens, n], [batch, seq, n] or [layers, batch, seq, n]")
    array = array if array.ndim == 4 else array[None]
    layers, *tokens, num_experts = array.shape
    mask = jnp.ones(tokens, bool) if mask is None else jnp.asarray(mask)
    check_shape("mask", mask, tuple(tokens), "one entry a token")
    return array.reshape(layers, -1, num_experts), mask.astype(array.dtype).reshape(-1)


def _all_reduce(value: Array, axis_name: AxisName) -> Array:
    return value if axis_name is None else jax.lax.psum(value, axis_name)


def _chosen(scores: Array, weights: Array, top_k: int) -> Array:
    """How often each expert is among a token's top_k: [layers, experts]."""
    check_count("top_k", top_k, 1, scores.shape[-1])
    _, index = jax.lax.top_k(jax.lax.stop_gradient(scores), top_k)
    hit = jax.nn.one_hot(index, scores.shape[-1], dtype=scores.dtype)
    return jnp.sum(jnp.sum(hit, axis=-2) * weights[None, :, None], axis=1)


def active_experts(p: Float[ArrayLike, "*tokens experts"]) -> Int[Array, "*tokens"]:
    """Number of experts with positive weight, for every token.

    Args:
        p: weights of all experts, [..., N].

    Returns:
        int32 [...]; 0 where no weight is positive (NaN counts as none). No gradient.

    Source: arXiv 2509.25684, number of activated experts.
    """
    return jnp.sum(jnp.asarray(p) > 0, axis=-1, dtype=jnp.int32)


def expert_counts(
    scores: Float[ArrayLike, "*layers_tokens experts"], top_k: int, mask: ArrayLike | None = None
) -> Float[Array, "*layers experts"]:
    """How many valid tokens have each expert among their `top_k` (ties go to the lower index).

    Additive over shards and micro-batches; divided by its own sum it is the load share that
    `load_balancing_loss` takes. No gradient.

    Args:
        scores: probabilities or logits, [T, N], [B, T, N] or [L, B, T, N].
        top_k: experts per token.
        mask: bool or 0/1, one entry a token; None counts all.

    Returns:
        [N], or [L, N] for a stack of layers; sums to top_k times the number of valid tokens.

    Raises:
        ValueError: top_k not in 1..N, mask of another shape.
    """
    scores = as_float(scores)
    stacked = scores.ndim == 4
    counts = _chosen(*_layered("scores", scores, mask), top_k)
    return counts if stacked else counts[0]


def load_balancing_loss(
    probs: Float[ArrayLike, "*layers_tokens experts"] | None = None,
    top_k: int | None = None,
    mask: ArrayLike | None = None,
    *,
    logits: Float[ArrayLike, "*layers_tokens experts"] | None = None,
    load_shares: Float[ArrayLike, "*layers experts"] | None = None,
    axis_name: AxisName = None,
) -> Float[Array, ""]:
    """Switch / GShard load-balancing loss: 1 at perfect balance, N at collapse onto one expert.

    loss = N sum_i share_i P_i, where share_i is the part of all expert choices that went to
    expert i (no gradient) and P_i the mean probability of expert i, both over the valid tokens.
    Shares sum to 1 whatever top_k is: several public implementations leave the division by top_k
    out and report a loss top_k times as large.

    Args:
        probs: full softmax over all N experts, [T, N], [B, T, N] or [L, B, T, N]. Values that do
            not sum to 1 are refused where they can be read (outside `jit`).
        top_k: experts per token; not needed with `load_shares`.
        mask: bool or 0/1, one entry a token; padding counts nowhere.
        logits: the same shapes, before the softmax; give exactly one of `probs` and `logits`.
        load_shares: [N] or [L, N] shares counted elsewhere, in place of those of these tokens:
            for example of the global batch (the loss is then linear in the tokens, so the
            token-weighted mean over micro-batches is the global-batch loss), or of a router that
            chooses a varying number of experts.
        axis_name: mapped axis, inside `shard_map`, over which counts and probabilities are summed
            first, so that the value is the global batch's and equal on each shard.

    Returns:
        A scalar, the mean over layers; 0 when no token is valid. Finite value and gradient for
        any router, also uniform, one-hot or all zero.

    Raises:
        ValueError: not exactly one of probs and logits, top_k not in 1..N or missing, shapes
            that disagree.

    Source: Fedus et al., arXiv 2101.03961, eq. 4-6; division by top_k as in arXiv 2603.00054
    sheet (reconstructed).
    """
    if (probs is None) == (logits is None):
        raise ValueError("give exactly one of probs (after the softmax) and logits (before it)")
    if load_shares is None and top_k is None:
        raise ValueError("top_k is needed to count which experts the tokens chose")
    if logits is not None:
        logits, weights = _layered("logits", as_float(logits), mask)
        logits = jnp.where(weights[None, :, None] != 0, logits, 0)
        scores, probs = logits, jax.nn.softmax(logits, axis=-1)
    else:
        _check_distributions(probs, mask)
        probs, weights = _layered("probs", as_float(probs), mask)
        scores = probs = jnp.where(weights[None, :, None] != 0, probs, 0)
    num_experts = probs.shape[-1]
    if load_shares is None:
        counts = _all_reduce(_chosen(scores, weights, top_k), axis_name)
        load_shares = divide_or_zero(counts, jnp.sum(counts, axis=-1, keepdims=True))
    else:
        load_shares = jnp.asarray(load_shares).astype(probs.dtype)
        load_shares = load_shares[None] if load_shares.ndim == 1 else load_shares
        check_shape("load_shares", load_shares, (probs.shape[0], num_experts), "[layers, experts]")
    tokens = _all_reduce(jnp.sum(weights), axis_name)
    sums = _all_reduce(jnp.sum(probs * weights[None, :, None], axis=1), axis_name)
    mean = divide_or_zero(sums, tokens.reshape(1, 1))
    return num_experts * jnp.mean(jnp.sum(jax.lax.stop_gradient(load_shares) * mean, axis=-1))


def _check_distributions(probs: ArrayLike, mask: ArrayLike | None) -> None:
    """Refuses logits passed as probabilities, where the values are at hand."""
    if not (is_concrete(probs) and is_concrete(mask)):
        return
    rows = np.asarray(probs, np.float64)
    sums = rows.sum(-1)
    wrong = ((np.abs(sums - 1) > 0.05) & (sums != 0)) | (rows.min(-1) < 0)
    if mask is not None and np.shape(mask) == sums.shape[sums.ndim - np.ndim(mask) :]:
        wrong &= np.asarray(mask) != 0
    if wrong.any():
        raise ValueError(
            f"probs has a row that sums to {sums[wrong][0]:.4g} or has a negative entry, expected "
            "distributions over all experts; pass router logits as logits="
        )


def router_z_loss(
    logits: Float[ArrayLike, "*layers_tokens experts"],
    mask: ArrayLike | None = None,
    *,
    axis_name: AxisName = None,
) -> Float[Array, ""]:
    """Mean over valid tokens of (logsumexp of the router logits)^2, which keeps logits small.

    Args:
        logits: [T, N], [B, T, N] or [L, B, T, N], before the softmax.
        mask: bool or 0/1, one entry a token; padding counts nowhere.
        axis_name: mapped axis over which sum and count are summed, inside `shard_map`.

    Returns:
        A scalar, the mean over layers; 0 when no token is valid.

    Raises:
        ValueError: mask of another shape.

    Source: Zoph et al., arXiv 2202.08906, eq. 5.
    """
    logits, weights = _layered("logits", as_float(logits), mask)
    logits = jnp.where(weights[None, :, None] != 0, logits, 0)
    square = jnp.square(jax.nn.logsumexp(logits, axis=-1))
    total = _all_reduce(jnp.sum(square * weights[None, :], axis=-1), axis_name)
    tokens = _all_reduce(jnp.sum(weights, keepdims=True), axis_name)
    return jnp.mean(divide_or_zero(total, tokens))


def cv_squared_loss(
    probs: Float[ArrayLike, "tokens experts"], mask: ArrayLike | None = None
) -> Float[Array, ""]:
    """Squared coefficient of variation of the experts' importance (their summed probability).

    Written with the variance, never as the square of std / mean: the standard deviation has no
    finite gradient at exact balance, where a zero-initialised router starts.

    Args:
        probs: [..., N] probabilities or gate weights.
        mask: bool or 0/1 of shape [...]; None keeps all.

    Returns:
        var(importance) / mean(importance)^2 in [0, N - 1]; 0 at balance and for no valid token.

    Raises:
        ValueError: mask of another shape.

    Source: Shazeer et al., arXiv 1701.06538, eq. 6-7.
    """
    probs = as_float(probs)
    if mask is not None:
        check_shape("mask", mask, probs.shape[:-1], "one entry a token")
    importance = masked_sum(probs, mask, axis=tuple(range(probs.ndim - 1)))
    return divide_or_zero(jnp.var(importance), jnp.square(jnp.mean(importance)))
