"""A mixture of SwiGLU experts on sorted rows, with a backward pass that keeps little.

Kept for the backward pass are the first product of each row and what the caller holds anyway
(tokens, weights, expert matrices). The gradient of the router weights needs no second product kept:
``<dy, act @ down> = <dy @ down.T, act>``, and the right side is on the way to the gradient of
``act``.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxlib_papers.ops.activations import packed_swiglu
from jaxlib_papers.ops.checks import float_dtype
from jaxlib_papers.ops.expert_dispatch import (
    Dispatch,
    combine_rows,
    expert_capacity,
    per_assignment,
    plan_dispatch,
    take_rows,
    weights_of_rows,
)
from kernels_pallas.grouped_matmul import grouped_matmul
from kernels_pallas.tiling import align_varying

__all__ = ["expert_mixture"]


class _Saved(NamedTuple):
    x: Array
    weights: Array
    gate_up: Array
    down: Array
    dispatch: Dispatch
    hidden: Array


def _product(rows: Array, matrices: Array, dispatch: Dispatch, capacity: int | None) -> Array:
    """Rows of each expert times its matrix."""
    if capacity is None:
        return grouped_matmul(rows, matrices, dispatch.group_sizes)
    slots = rows.reshape(matrices.shape[0], capacity, rows.shape[1])
    out = jnp.einsum("eci,eio->eco", slots, matrices, preferred_element_type=float_dtype(rows))
    return out.astype(rows.dtype).reshape(rows.shape[0], matrices.shape[2])


def _both(gate_up: Float[Array, "experts embed two hidden"]) -> Float[Array, "experts embed out"]:
    return gate_up.reshape(*gate_up.shape[:2], -1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _mixture(
    x: Array,
    weights: Array,
    gate_up: Array,
    down: Array,
    dispatch: Dispatch,
    capacity: int | None,
) -> Array:
    return _mixture_fwd(x, weights, gate_up, down, dispatch, capacity)[0]


def _mixture_fwd(
    x: Array,
    weights: Array,
    gate_up: Array,
    down: Array,
    dispatch: Dispatch,
    capacity: int | None,
) -> tuple[Array, _Saved]:
    hidden = _product(take_rows(x, dispatch), _both(gate_up), dispatch, capacity)
    rows = _product(packed_swiglu(hidden), down, dispatch, capacity)
    y = combine_rows(rows, weights, dispatch)
    return y, _Saved(x, weights, gate_up, down, dispatch, hidden)


def _mixture_bwd(
    capacity: int | None, saved: _Saved, dy: Array
) -> tuple[Array, Array, Array, Array, None]:
    x, weights, gate_up, down, dispatch, hidden = saved
    wide = weights.dtype
    product = functools.partial(_product, dispatch=dispatch, capacity=capacity)
    # What these pullbacks' forward passes compute is not used, so that compiled code leaves it out.
    act, swiglu_pullback = jax.vjp(packed_swiglu, hidden)
    row_weights = weights_of_rows(weights, dispatch)[:, None]
    weighted_act = (act.astype(wide) * row_weights).astype(act.dtype)
    dy_rows = take_rows(dy, dispatch)
    _, down_pullback = jax.vjp(product, weighted_act, down)
    dact, ddown = down_pullback(dy_rows)
    dact = dact.astype(wide)
    dweights = per_assignment(jnp.sum(dact * act.astype(wide), axis=-1), dispatch)
    (dhidden,) = swiglu_pullback((dact * row_weights).astype(act.dtype))
    _, first_pullback = jax.vjp(product, take_rows(x, dispatch), _both(gate_up))
    drows, dboth = first_pullback(dhidden)
    _, take_pullback = jax.vjp(lambda x: take_rows(x, dispatch), x)
    (dx,) = take_pullback(drows)
    return dx, dweights, dboth.reshape(gate_up.shape), ddown, None


_mixture.defvjp(_mixture_fwd, _mixture_bwd)


def expert_mixture(
    x: Float[Array, "tokens embed"],
    indices: Int[Array, "tokens top_k"],
    weights: Float[Array, "tokens top_k"],
    gate_up: Float[Array, "experts embed two hidden"],
    down: Float[Array, "experts hidden embed"],
    *,
    capacity_factor: float | None = None,
) -> tuple[Float[Array, "tokens embed"], Int[Array, ""]]:
    """``y_t = sum_k weights[t, k] E_{indices[t, k]}(x_t)`` with SwiGLU experts.

    Tokens are sorted by expert and multiplied group by group; moving rows is a gather forward and
    backward. Experts that no token chose get gradients of exactly 0.

    Args:
      x: Token vectors, any float dtype; matmuls are in it, accumulated in float32.
      indices: Experts of each token; one outside [0, experts) adds nothing.
      weights: Their weights, float32.
      gate_up: First matrices of the experts, gate before up.
      down: Second matrices.
      capacity_factor: None drops nothing; see `nn.config.MoEConfig`.

    Returns:
      (y [tokens, embed], number of assignments dropped, int32).

    Source: Sparsely-gated mixture of Shazeer et al., arXiv 1701.06538, eq. 1, with the SwiGLU of
      arXiv 2002.05202.
    """
    x, indices, weights, gate_up, down = align_varying(x, indices, weights, gate_up, down)
    num_tokens, top_k = indices.shape
    capacity = None
    if capacity_factor is not None:
        capacity = expert_capacity(num_tokens, gate_up.shape[0], top_k, capacity_factor)
    dispatch = plan_dispatch(indices, gate_up.shape[0], capacity=capacity)
    y: Array = _mixture(x, weights, gate_up, down, dispatch, capacity)
    if dispatch.kept is None:
        return y, jnp.zeros((), jnp.int32)
    real = (indices >= 0) & (indices < gate_up.shape[0])
    return y, jnp.sum(real & ~dispatch.kept, dtype=jnp.int32)
