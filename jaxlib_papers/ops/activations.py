"""Gated activations that keep little for their backward pass."""

from __future__ import annotations

import jax
from jaxtyping import Array, Float

from jaxlib_papers.ops.checks import check_shape, float_dtype

__all__ = ["swiglu"]


@jax.custom_vjp
def _swiglu(gate: Array, up: Array) -> Array:
    return _swiglu_fwd(gate, up)[0]


def _swiglu_fwd(gate: Array, up: Array) -> tuple[Array, tuple[Array, Array]]:
    wide = float_dtype(gate, up)
    act = jax.nn.silu(gate.astype(wide)) * up.astype(wide)
    return act.astype(up.dtype), (gate, up)


def _swiglu_bwd(saved: tuple[Array, Array], dact: Array) -> tuple[Array, Array]:
    gate, up = saved
    wide = float_dtype(gate, up)
    gate_, up_, dact = (a.astype(wide) for a in (gate, up, dact))
    sigmoid = jax.nn.sigmoid(gate_)
    silu = gate_ * sigmoid
    dgate = dact * up_ * (sigmoid + silu * (1 - sigmoid))
    return dgate.astype(gate.dtype), (dact * silu).astype(up.dtype)


_swiglu.defvjp(_swiglu_fwd, _swiglu_bwd)


def swiglu(gate: Float[Array, "*shape"], up: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """``silu(gate) * up``, computed in float32 or better.

    Automatic differentiation would keep four arrays of this size for the backward pass; this keeps
    the two arguments, which their matmuls have stored already.

    Args:
      gate: Goes through ``silu(x) = x / (1 + exp(-x))``.
      up: What it gates; the result has its dtype.

    Raises:
      ValueError: The shapes differ.

    Source: Shazeer, arXiv 2002.05202, eq. 6.
    """
    check_shape("up", up, gate.shape, "the shape of gate")
    return _swiglu(gate, up)
