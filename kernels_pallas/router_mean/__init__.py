"""Mean router distribution of each sequence or segment, and the router's z-loss, in one pass.

The input of the expert-divergence loss and of load balancing: Li et al., "Expert Divergence
Learning for MoE-based Language Models", ICLR 2026, arXiv 2603.00054, method step 2 (sequence means
of the softmax over all experts; masked mean over valid tokens is reconstructed). The z-loss is the
squared log-sum-exp of Zoph et al., "ST-MoE", arXiv 2202.08906.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas import dispatch
from kernels_pallas.router_mean import gpu, reference, tpu

__all__ = ["RouterMean", "router_mean"]


class RouterMean(NamedTuple):
    """What `router_mean` returns; ``G`` is there only when segments were given.

    Attributes:
      mean: Mean of softmax(logits) over the counted tokens; rows sum to 1, or are 0 where no token
        counts.
      weight: Sum of the mask (number of counted tokens for a boolean mask).
      z_loss_sum: Sum over the counted tokens of logsumexp(logits) squared.
    """

    mean: Float[Array, "*rows N"] | Float[Array, "*rows G N"]
    weight: Float[Array, "*rows"] | Float[Array, "*rows G"]
    z_loss_sum: Float[Array, "*rows"] | Float[Array, "*rows G"]


def router_mean(
    logits: Float[Array, "*rows T N"],
    mask: Bool[Array, "*rows T"] | Float[Array, "*rows T"] | None = None,
    *,
    segment_ids: Int[Array, "*rows T"] | None = None,
    num_segments: int | None = None,
    implementation: dispatch.Implementation | None = None,
) -> RouterMean:
    """Masked mean of softmax(logits) over the tokens of each row or segment, with the z-loss sum.

    Softmax and sums run in float32 (float64 for float64 logits) whatever the dtype of the logits,
    and no array of probabilities is kept for the backward pass, which recomputes the softmax. The
    gradient is that with respect to ``logits`` only: masks and segments are data.

    Degenerate input: a row or segment without counted tokens gives mean 0, weight 0, z-loss 0 and
    gradient 0. What the logits hold at tokens that don't count (NaN too) has no influence. A logit
    of -inf is a router entry of probability 0; a counted token with all logits -inf gives NaN.

    Args:
      logits: router logits, before top-k. Usually [S, T, N]; any number of leading dimensions.
      mask: True (or a non-negative weight) where a token counts. Its shape is [..., T], the last
        dimensions of the logits' shape without N: a mask [S, T] serves logits [L, S, T, N]. None
        counts all.
      segment_ids: segment of each token, 1..num_segments; other ids (0 is padding) don't count.
        Shape as for ``mask``.
      num_segments: G, static; needed with ``segment_ids``.
      implementation: None (best available), "xla", "pallas" or "pallas_interpret".

    Returns:
      `RouterMean` of float32 arrays (float64 for float64 logits): mean [*rows, N], weight and
      z_loss_sum [*rows]; with segments mean [*rows, G, N], the others [*rows, G].

    Raises:
      ValueError: wrong rank, shape or dtype, or one of the two segment arguments missing.
      NotImplementedError: the named implementation can't take these arguments.

    Source: arXiv 2603.00054, method step 2; z-loss of arXiv 2202.08906.
    """
    _check(logits, mask, segment_ids, num_segments)
    *rows, tokens, experts = logits.shape
    count = math.prod(rows)
    acc = jnp.float64 if logits.dtype == jnp.float64 else jnp.float32
    weight = jnp.ones((*rows, tokens), acc)
    if mask is not None:
        weight = jnp.broadcast_to(jnp.asarray(mask).astype(acc), weight.shape)
    segment = None
    groups = 1
    if segment_ids is not None and num_segments is not None:
        groups = num_segments
        ids = jnp.broadcast_to(jnp.asarray(segment_ids), weight.shape)
        weight = jnp.where((ids >= 1) & (ids <= groups), weight, jnp.zeros((), acc))
        segment = ids.astype(jnp.int32).reshape(count, tokens) - jnp.int32(1)
    if logits.size == 0:
        backend = "xla"
    else:
        backend = dispatch.choose(
            "router_mean",
            implementation,
            tpu=tpu.unsupported(logits.dtype, experts, groups),
            gpu=gpu.unsupported(logits.dtype, experts, groups),
        )
    weight = jax.lax.stop_gradient(weight.reshape(count, tokens))
    sums, square = _router_sums(
        groups, backend, logits.reshape(count, tokens, experts), weight, segment
    )
    total = reference.segment_weights(weight, segment, groups)
    safe = jnp.where(total > 0, total, jnp.ones((), acc))
    mean = sums / safe[..., None]
    if segment is None:
        return RouterMean(mean.reshape(*rows, experts), total.reshape(rows), square.reshape(rows))
    return RouterMean(
        mean.reshape(*rows, groups, experts),
        total.reshape(*rows, groups),
        square.reshape(*rows, groups),
    )


def _check(
    logits: Array, mask: Array | None, segment_ids: Array | None, num_segments: int | None
) -> None:
    if logits.ndim < 2:
        raise ValueError(f"logits: got shape {logits.shape}, expected [*rows, T, N]")
    if not jnp.issubdtype(logits.dtype, jnp.floating):
        raise ValueError(f"logits: got dtype {logits.dtype}, expected a floating-point dtype")
    if logits.shape[-1] < 1:
        raise ValueError(f"logits: got shape {logits.shape}, expected at least one expert")
    for name, value in (("mask", mask), ("segment_ids", segment_ids)):
        if value is None:
            continue
        full = logits.shape[:-1]
        shape = np.shape(value)
        if not shape or full[-len(shape) :] != shape:
            raise ValueError(
                f"{name}: got shape {shape}, expected {full} or its last dimensions "
                f"(logits have shape {logits.shape})"
            )
    if mask is not None and jnp.issubdtype(jnp.asarray(mask).dtype, jnp.complexfloating):
        raise ValueError("mask: got a complex dtype, expected bool or weights")
    if (segment_ids is None) != (num_segments is None):
        raise ValueError("segment_ids and num_segments: got only one of the two, expected both")
    if segment_ids is not None and not jnp.issubdtype(jnp.asarray(segment_ids).dtype, jnp.integer):
        raise ValueError(
            f"segment_ids: got dtype {jnp.asarray(segment_ids).dtype}, expected integers"
        )
    if num_segments is not None and num_segments < 1:
        raise ValueError(f"num_segments: got {num_segments}, expected at least 1")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _router_sums(
    groups: int,
    backend: dispatch.Backend,
    logits: Array,
    weight: Array,
    segment: Array | None,
) -> tuple[Array, Array]:
    if backend == "xla":
        return reference.router_sums(logits, weight, segment, groups)
    if backend == "gpu":
        return gpu.router_sums(logits, weight, segment, groups)
    return tpu.router_sums(logits, weight, segment, groups, interpret=backend == "interpret")


def _forward(groups, backend, logits, weight, segment):
    return _router_sums(groups, backend, logits, weight, segment), (logits, weight, segment)


def _backward(groups, backend, residuals, cotangents):
    logits, weight, segment = residuals
    d_sums, d_square = cotangents
    if backend == "xla":
        grad = reference.router_sums_vjp(logits, weight, segment, d_sums, d_square)
    elif backend == "gpu":
        grad = gpu.router_sums_vjp(logits, weight, segment, d_sums, d_square)
    else:
        grad = tpu.router_sums_vjp(
            logits, weight, segment, d_sums, d_square, interpret=backend == "interpret"
        )
    return grad, jnp.zeros_like(weight), None


_router_sums.defvjp(_forward, _backward)
