"""Gated activations that keep little for their backward pass."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxlib_papers.ops.checks import check_shape, float_dtype

__all__ = ["packed_swiglu", "swiglu"]


@jax.custom_vjp
def _swiglu(gate: Array, up: Array) -> Array:
    return _swiglu_fwd(gate, up)[0]


def _swiglu_fwd(gate: Array, up: Array) -> tuple[Array, tuple[Array, Array]]:
    wide = float_dtype(gate, up)
    act = jax.nn.silu(gate.astype(wide)) * up.astype(wide)
    return act.astype(up.dtype), (gate, up)


def _slopes(gate: Array, up: Array, dact: Array) -> tuple[Array, Array]:
    """Gradients of gate and up, in float32 or better."""
    wide = float_dtype(gate, up)
    gate, up, dact = (a.astype(wide) for a in (gate, up, dact))
    sigmoid = jax.nn.sigmoid(gate)
    silu = gate * sigmoid
    return dact * up * (sigmoid + silu * (1 - sigmoid)), dact * silu


def _swiglu_bwd(saved: tuple[Array, Array], dact: Array) -> tuple[Array, Array]:
    gate, up = saved
    dgate, dup = _slopes(gate, up, dact)
    return dgate.astype(gate.dtype), dup.astype(up.dtype)


_swiglu.defvjp(_swiglu_fwd, _swiglu_bwd)


def swiglu(gate: Float[Array, "*shape"], up: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """``silu(gate) * up``, computed in float32 or better.

    Automatic differentiation would keep what lies between as well; for the backward pass this keeps
    the two arguments alone.

    Args:
      gate: Goes through ``silu(x) = x / (1 + exp(-x))``, any shape.
      up: What it gates, of the same shape.

    Returns:
      The shape of both, the dtype of ``up``.

    Raises:
      ValueError: The shapes differ.

    Source: Shazeer, arXiv 2002.05202, eq. 6.
    """
    check_shape("up", up, gate.shape, "the shape of gate")
    return _swiglu(gate, up)


def _halves(hidden: Array) -> tuple[Array, Array]:
    gate, up = jnp.split(hidden, 2, axis=-1)
    return gate, up


@jax.custom_vjp
def _packed(hidden: Array) -> Array:
    return _swiglu(*_halves(hidden))


def _packed_fwd(hidden: Array) -> tuple[Array, Array]:
    return _packed(hidden), hidden


def _packed_bwd(hidden: Array, dact: Array) -> tuple[Array]:
    # Chosen by index and not concatenated: both halves are then written where they belong in one
    # pass, where XLA for CPU would form each and copy it.
    shape = (*hidden.shape[:-1], 2, hidden.shape[-1] // 2)
    is_gate = lax.broadcasted_iota(jnp.int32, shape, len(shape) - 2) == 0
    keep = (*range(hidden.ndim - 1), len(shape) - 1)
    dgate, dup = (
        lax.broadcast_in_dim(half.astype(hidden.dtype), shape, keep)
        for half in _slopes(*_halves(hidden), dact)
    )
    return (lax.select(is_gate, dgate, dup).reshape(hidden.shape),)


_packed.defvjp(_packed_fwd, _packed_bwd)


def packed_swiglu(hidden: Float[Array, "*batch two_hidden"]) -> Float[Array, "*batch hidden"]:
    """`swiglu` of the two halves of the last axis, gate before up.

    Args:
      hidden: Result of one product with both matrices, [..., 2 * hidden].

    Returns:
      [..., hidden] in the dtype of ``hidden``.

    Raises:
      ValueError: The last axis has an odd length.

    Source: Shazeer, arXiv 2002.05202, eq. 6.
    """
    if hidden.ndim < 1 or hidden.shape[-1] % 2:
        raise ValueError(f"hidden has shape {hidden.shape}, expected an even last axis")
    return _packed(hidden)
