"""From router logits to rows sorted by expert, and back.

Moving rows is a gather in both directions: each function has a custom VJP that gathers with the
inverse table, so that no scatter is left in the backward pass.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxlib_papers.ops.checks import check_count, check_ndim, check_positive, float_dtype

__all__ = [
    "Dispatch",
    "Routing",
    "combine_rows",
    "expert_capacity",
    "per_assignment",
    "plan_dispatch",
    "route_top_k",
    "sum_rows",
    "take_rows",
    "weights_of_rows",
]


class Routing(NamedTuple):
    """What a top-k router decided.

    Attributes:
      probs: Softmax over all experts, float32 [tokens, experts].
      indices: The chosen experts, most probable first, int32 [tokens, top_k].
      weights: Their weights, float32 [tokens, top_k].
    """

    probs: Float[Array, "tokens experts"]
    indices: Int[Array, "tokens top_k"]
    weights: Float[Array, "tokens top_k"]


def route_top_k(
    logits: Float[Array, "tokens experts"], top_k: int, *, renormalize: bool = True
) -> Routing:
    """Softmax over all experts, then the ``top_k`` most probable of each token.

    Args:
      logits: Router logits; computed on in float32 or better.
      top_k: Experts per token.
      renormalize: Divide the chosen probabilities by their sum.

    Returns:
      The routing. Ties go to the lower index. The weights' gradient reaches the logits of the
      chosen experts (and through the softmax all others) without a scatter.

    Raises:
      ValueError: logits not [tokens, experts], or top_k not in 1..experts.
    """
    check_ndim("logits", logits, (2,), "[tokens, experts]")
    check_count("top_k", top_k, 1, logits.shape[-1])
    dtype = float_dtype(logits)
    probs = jax.nn.softmax(logits.astype(dtype), axis=-1)
    _, indices = lax.top_k(lax.stop_gradient(probs), top_k)
    # Slots first: the backward pass then sums over a leading axis, plain additions of whole arrays.
    chosen = jax.nn.one_hot(indices.T, probs.shape[-1], dtype=dtype)
    weights = jnp.sum(probs[None] * chosen, axis=-1).T
    if renormalize:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return Routing(probs, indices.astype(jnp.int32), weights)


class Dispatch(NamedTuple):
    """Tables between tokens and the rows that the experts work on.

    Attributes:
      source: Which assignment (``token * top_k + slot``) fills a row, int32 [rows].
      row: Which row an assignment went to, int32 [tokens, top_k].
      group_sizes: Rows of each expert, int32 [experts]; rows past their sum belong to none.
      kept: Whether an assignment got a row; None when all did.
      filled: Whether a row holds an assignment; None when all do.
    """

    source: Int[Array, " rows"]
    row: Int[Array, "tokens top_k"]
    group_sizes: Int[Array, " experts"]
    kept: Bool[Array, "tokens top_k"] | None = None
    filled: Bool[Array, " rows"] | None = None


def expert_capacity(num_tokens: int, num_experts: int, top_k: int, factor: float) -> int:
    """Rows per expert: ``factor`` times the balanced load, rounded up, at least 1."""
    check_positive("capacity_factor", factor)
    return max(1, math.ceil(factor * num_tokens * top_k / num_experts))


def plan_dispatch(
    indices: Int[Array, "tokens top_k"], num_experts: int, *, capacity: int | None = None
) -> Dispatch:
    """Sorts assignments by expert, tokens in order within each.

    Args:
      indices: The chosen experts; an index outside [0, num_experts) gets no expert: its row lies
        past every group.
      num_experts: Number of experts.
      capacity: Rows that each expert has. None: as many as it needs, no assignment is dropped and
        rows are packed tightly. A number: ``num_experts * capacity`` rows, and an expert's
        assignments past it are dropped, later tokens first.

    Returns:
      The tables.

    Raises:
      ValueError: indices not [tokens, top_k], num_experts or capacity below 1.
    """
    check_ndim("indices", indices, (2,), "[tokens, top_k]")
    check_count("num_experts", num_experts, 1)
    flat = indices.reshape(-1)
    outside = (flat < 0) | (flat >= num_experts)
    flat = jnp.where(outside, jnp.full_like(flat, num_experts), flat)
    source, row = _sort_stably(flat, num_experts)
    sorted_, row = _gather(flat, source), row.reshape(indices.shape)
    # Binary search: the method "sort" would scatter.
    bounds = jnp.arange(num_experts + 1, dtype=flat.dtype)
    edges = jnp.searchsorted(sorted_, bounds, method="scan_unrolled")
    edges = edges.astype(jnp.int32)
    sizes = edges[1:] - edges[:-1]
    if capacity is None:
        return Dispatch(source, row, sizes)

    check_count("capacity", capacity, 1)
    rank = row - edges[flat].reshape(indices.shape)
    kept = (rank < capacity) & ~outside.reshape(indices.shape)
    slot = indices.astype(jnp.int32) * capacity + rank
    place = lax.iota(jnp.int32, capacity)[None, :]
    filled = place < sizes[:, None]
    at = jnp.minimum(edges[:-1, None] + place, max(flat.size - 1, 0))
    return Dispatch(
        source=_gather(source, at.reshape(-1)),
        row=jnp.where(kept, slot, jnp.zeros_like(slot)),
        group_sizes=jnp.minimum(sizes, capacity),
        kept=kept,
        filled=filled.reshape(-1),
    )


def _sort_stably(keys: Int[Array, " n"], high: int) -> tuple[Array, Array]:
    """The permutation that sorts keys in 0..high, and its inverse.

    The inverse comes from a second sort: a scatter is slow on every accelerator. Key and place
    travel in one integer while they fit, which sorts faster than pairs do.
    """
    n, keys = keys.size, keys.astype(jnp.int32)
    place = lax.iota(jnp.int32, n)
    largest = jnp.iinfo(jnp.int32).max
    if n == 0:
        return place, place
    if (high + 1) * n > largest:
        source = lax.sort_key_val(keys, place, is_stable=True)[1]
    else:
        source = lax.sort(keys * n + place, is_stable=False) % n
    if n * n > largest:
        return source, lax.sort_key_val(source, place)[1]
    return source, lax.sort(source * n + place, is_stable=False) % n


def _gather(a: Array, index: Array) -> Array:
    """Entries of the first axis; zeros from an empty one, which has nothing to clip to."""
    if a.shape[0] == 0:
        return jnp.zeros((*index.shape, *a.shape[1:]), a.dtype)
    return jnp.take(a, index, axis=0, mode="clip")


def _mask(a: Array, mask: Array | None) -> Array:
    if mask is None:
        return a
    return jnp.where(mask[..., None], a, jnp.zeros_like(a))


def _rows_of_tokens(a: Array, dispatch: Dispatch) -> Array:
    """Row r <- the token of its assignment."""
    top_k = dispatch.row.shape[1]
    return _mask(_gather(a, dispatch.source // top_k), dispatch.filled)


def _sum_of_slots(rows: Array, dispatch: Dispatch, weights: Array | None = None) -> Array:
    """[tokens, dim] <- the rows of each token's assignments, with their weights, summed.

    Slot by slot, so that no [tokens, top_k, dim] is stored. In float32 or better.
    """
    total = None
    for slot in range(dispatch.row.shape[1]):
        kept = None if dispatch.kept is None else dispatch.kept[:, slot]
        part = _mask(_gather(rows, dispatch.row[:, slot]), kept).astype(float_dtype(rows))
        if weights is not None:
            part = part.astype(weights.dtype) * weights[:, slot, None]
        total = part if total is None else total + part
    assert total is not None, "top_k is at least 1"
    return total


def weights_of_rows(weights: Float[Array, "tokens top_k"], dispatch: Dispatch) -> Array:
    """The router weight that belongs to each row.

    Args:
      weights: Router weights, [tokens, top_k].
      dispatch: From `plan_dispatch`.

    Returns:
      [rows] in the dtype of ``weights``; 0 where a row holds no assignment.
    """
    of_row = _gather(weights.reshape(-1), dispatch.source)
    if dispatch.filled is None:
        return of_row
    return jnp.where(dispatch.filled, of_row, jnp.zeros_like(of_row))


def per_assignment(of_row: Float[Array, " rows"], dispatch: Dispatch) -> Array:
    """Numbers that belong to rows, laid out by assignment: the inverse of `weights_of_rows`.

    Args:
      of_row: One number a row, [rows].
      dispatch: From `plan_dispatch`.

    Returns:
      [tokens, top_k] in the dtype of ``of_row``; 0 where an assignment was dropped.
    """
    values = _gather(of_row, dispatch.row)
    if dispatch.kept is None:
        return values
    return jnp.where(dispatch.kept, values, jnp.zeros_like(values))


@jax.custom_vjp
def take_rows(x: Float[Array, "tokens dim"], dispatch: Dispatch) -> Float[Array, "rows dim"]:
    """Copies tokens into the rows of the experts that they go to.

    Args:
      x: Token vectors.
      dispatch: From `plan_dispatch`.

    Returns:
      Rows sorted by expert, zeros where a row holds no assignment.
    """
    return _rows_of_tokens(x, dispatch)


def _take_fwd(x: Array, dispatch: Dispatch) -> tuple[Array, Dispatch]:
    return _rows_of_tokens(x, dispatch), dispatch


def _take_bwd(dispatch: Dispatch, dy: Array) -> tuple[Array, None]:
    return _sum_of_slots(dy, dispatch).astype(dy.dtype), None


take_rows.defvjp(_take_fwd, _take_bwd)


@jax.custom_vjp
def sum_rows(rows: Float[Array, "rows dim"], dispatch: Dispatch) -> Float[Array, "tokens dim"]:
    """Sums each token's rows, which are weighted already: the transpose of `take_rows`.

    Args:
      rows: The experts' weighted results.
      dispatch: The tables that the rows were taken with.

    Returns:
      Token vectors in the dtype of ``rows``, summed in float32 or better.
    """
    return _sum_of_slots(rows, dispatch).astype(rows.dtype)


def _sum_fwd(rows: Array, dispatch: Dispatch) -> tuple[Array, Dispatch]:
    return sum_rows(rows, dispatch), dispatch


def _sum_bwd(dispatch: Dispatch, dy: Array) -> tuple[Array, None]:
    return _rows_of_tokens(dy, dispatch), None


sum_rows.defvjp(_sum_fwd, _sum_bwd)


@jax.custom_vjp
def combine_rows(
    rows: Float[Array, "rows dim"], weights: Float[Array, "tokens top_k"], dispatch: Dispatch
) -> Float[Array, "tokens dim"]:
    """Sums each token's rows with its weights; dropped assignments add nothing.

    Args:
      rows: The experts' results.
      weights: Router weights in float32 or better; products and sums are in this dtype.
      dispatch: The tables that the rows were taken with.

    Returns:
      Token vectors in the dtype of ``rows``.
    """
    return _sum_of_slots(rows, dispatch, weights).astype(rows.dtype)


def _combine_fwd(
    rows: Array, weights: Array, dispatch: Dispatch
) -> tuple[Array, tuple[Array, Array, Dispatch]]:
    return combine_rows(rows, weights, dispatch), (rows, weights, dispatch)


def _combine_bwd(saved: tuple[Array, Array, Dispatch], dy: Array) -> tuple[Array, Array, None]:
    rows, weights, dispatch = saved
    wide = weights.dtype
    dy_of_row = _rows_of_tokens(dy, dispatch).astype(wide)
    drows = dy_of_row * weights_of_rows(weights, dispatch)[:, None]
    dweights = per_assignment(jnp.sum(dy_of_row * rows.astype(wide), axis=-1), dispatch)
    return drows.astype(rows.dtype), dweights, None


combine_rows.defvjp(_combine_fwd, _combine_bwd)
