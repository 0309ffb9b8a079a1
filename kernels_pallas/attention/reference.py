"""Attention in plain XLA with its own VJP: online softmax over blocks, no [Tq, Tk] array.

Queries that share a key head are rows of one matrix, so K and V are never repeated. The forward
pass saves the output and the log-sum-exp; the backward pass forms each block of weights again. The
loops visit only blocks that the causal band, the window or the segments can reach.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas.attention.scores import ScoreSpec, block_bounds
from kernels_pallas.dispatch import current_platform
from kernels_pallas.tiling import accumulator_dtype, align_varying, ceil_div

__all__ = ["Masks", "attention_xla"]


class Masks(NamedTuple):
    """Which pairs count besides the band of the `ScoreSpec`; None leaves a condition out.

    Attributes:
      q_segments: Segment id of each query, int32 [B, Tq].
      kv_segments: Segment id of each key, int32 [B, Tk].
      mask: Bool [B|1, H|1, Tq|1, Tk|1], True where the pair counts.
    """

    q_segments: Int[Array, "batch q"] | None = None
    kv_segments: Int[Array, "batch k"] | None = None
    mask: Bool[Array, "b h q k"] | None = None


class _Plan(NamedTuple):
    """Static sizes: batch, key heads, queries per key head, block heights and counts."""

    batch: int
    heads: int
    group: int
    q_block: int
    k_block: int
    q_blocks: int
    k_blocks: int


def _plan(q: Array, k: Array, q_block: int, k_block: int) -> _Plan:
    q_block, k_block = min(q_block, q.shape[1]), min(k_block, k.shape[1])
    return _Plan(
        batch=q.shape[0],
        heads=k.shape[2],
        group=q.shape[2] // k.shape[2],
        q_block=q_block,
        k_block=k_block,
        q_blocks=ceil_div(q.shape[1], q_block),
        k_blocks=ceil_div(k.shape[1], k_block),
    )


def _pad_axis(a: Array, axis: int, size: int, value: int = 0) -> Array:
    widths = [(0, 0)] * a.ndim
    widths[axis] = (0, size - a.shape[axis])
    return jnp.pad(a, widths, constant_values=value) if size != a.shape[axis] else a


def _to_rows(a: Float[Array, "B T H d"], plan: _Plan) -> Float[Array, "n B K rows d"]:
    """Queries of one block and one key head become the rows of a matrix: row = t * group + g."""
    a = _pad_axis(a, 1, plan.q_blocks * plan.q_block)
    a = a.reshape(plan.batch, plan.q_blocks, plan.q_block, plan.heads, plan.group, a.shape[3])
    a = a.transpose(1, 0, 3, 2, 4, 5)
    return a.reshape(*a.shape[:3], plan.q_block * plan.group, a.shape[5])


def _from_rows(
    a: Float[Array, "n B K rows d"], plan: _Plan, length: int
) -> Float[Array, "B T H d"]:
    a = a.reshape(*a.shape[:3], plan.q_block, plan.group, a.shape[-1])
    a = a.transpose(1, 0, 3, 2, 4, 5)
    heads = plan.heads * plan.group
    return a.reshape(plan.batch, plan.q_blocks * plan.q_block, heads, a.shape[-1])[:, :length]


def _to_columns(a: Float[Array, "B T K d"], plan: _Plan) -> Float[Array, "n B K cols d"]:
    a = _pad_axis(a, 1, plan.k_blocks * plan.k_block)
    a = a.reshape(plan.batch, plan.k_blocks, plan.k_block, plan.heads, a.shape[3])
    return a.transpose(1, 0, 3, 2, 4)


def _from_columns(a: Float[Array, "n B K cols d"], length: int) -> Float[Array, "B T K d"]:
    a = a.transpose(1, 0, 3, 2, 4)
    return a.reshape(a.shape[0], -1, *a.shape[3:])[:, :length]


def _dot(a: Array, b: Array, contract: tuple[int, int], dtype: jnp.dtype) -> Array:
    """Batched over [B, K]; contracts one of the two trailing axes of each side."""
    if current_platform() == "cpu":
        # XLA has no bfloat16 product for CPU in every arrangement that it may bring this one into.
        a, b = a.astype(dtype), b.astype(dtype)
    dims = (((contract[0],), (contract[1],)), ((0, 1), (0, 1)))
    return lax.dot_general(a, b, dims, preferred_element_type=dtype)


def _tile(a: Array, i: Array, j: Array, plan: _Plan) -> Array:
    """Block (i, j) of an array [B|1, H|1, Tq|1, Tk|1] as [B, K, rows, cols]."""
    zero = jnp.zeros_like(i)
    tall, wide = a.shape[2] > 1, a.shape[3] > 1
    start = (zero, zero, i * plan.q_block if tall else zero, j * plan.k_block if wide else zero)
    size = (*a.shape[:2], plan.q_block if tall else 1, plan.k_block if wide else 1)
    a = lax.dynamic_slice(a, start, size)
    heads = (plan.heads, plan.group) if a.shape[1] > 1 else (1, 1)
    a = a.reshape(a.shape[0], *heads, *a.shape[2:]).transpose(0, 1, 3, 2, 4)
    full = (plan.batch, plan.heads, plan.q_block, plan.group, plan.k_block)
    return jnp.broadcast_to(a, full).reshape(*full[:2], -1, plan.k_block)


def _turn(a: Array, transposed: bool) -> Array:
    return jnp.swapaxes(a, 2, 3) if transposed else a


def _pad_pairs(a: Array | None, plan: _Plan) -> Array | None:
    if a is None:
        return None
    a = _pad_axis(a, 2, plan.q_blocks * plan.q_block) if a.shape[2] > 1 else a
    return _pad_axis(a, 3, plan.k_blocks * plan.k_block) if a.shape[3] > 1 else a


class _Context(NamedTuple):
    """Everything a block of logits depends on besides q and k."""

    spec: ScoreSpec
    plan: _Plan
    masks: Masks
    bias: Array | None
    bounds: Int[Array, "q_blocks 2"]


def _context(
    spec: ScoreSpec, plan: _Plan, masks: Masks, bias: Float[Array, "b h q k"] | None
) -> _Context:
    bounds = block_bounds(
        spec,
        plan.q_block,
        plan.k_block,
        rows_are_queries=True,
        row_segments=masks.q_segments,
        col_segments=masks.kv_segments,
    )
    # One loop serves the whole batch: the union of what its rows need.
    bounds = jnp.stack([bounds[:, :, 0].min(axis=0), bounds[:, :, 3].max(axis=0)], axis=-1)
    segments = [masks.q_segments, masks.kv_segments]
    for index, (blocks, block) in enumerate(
        ((plan.q_blocks, plan.q_block), (plan.k_blocks, plan.k_block))
    ):
        if segments[index] is not None:
            segments[index] = _pad_axis(segments[index], 1, blocks * block)
    masks = Masks(segments[0], segments[1], _pad_pairs(masks.mask, plan))
    return _Context(spec, plan, masks, _pad_pairs(bias, plan), bounds)


def _allowed(
    ctx: _Context, i: Array, j: Array, transposed: bool
) -> Bool[Array, "B K rows cols"] | None:
    """Which pairs of block (i, j) count; None when all do whatever the block."""
    spec, plan, masks = ctx.spec, ctx.plan, ctx.masks
    tile = (plan.q_block * plan.group, plan.k_block)
    row_axis, col_axis = (1, 0) if transposed else (0, 1)
    tile = tile[::-1] if transposed else tile
    shape = (plan.batch, plan.heads, *tile)
    row = i * plan.q_block + lax.broadcasted_iota(jnp.int32, tile, row_axis) // plan.group
    col = j * plan.k_block + lax.broadcasted_iota(jnp.int32, tile, col_axis)
    flat, full = [], []
    distance = col - row - spec.offset
    if spec.right is not None:
        flat.append(distance <= spec.right)
    if spec.left is not None:
        flat.append(distance >= -spec.left)
    if spec.keys % plan.k_block:
        flat.append(col < spec.keys)
    if flat:
        full.append(lax.broadcast_in_dim(functools.reduce(jnp.logical_and, flat), shape, (2, 3)))
    if masks.q_segments is not None and masks.kv_segments is not None:
        zero = jnp.zeros_like(i)
        size = (plan.batch, plan.q_block)
        rows = lax.dynamic_slice(masks.q_segments, (zero, i * plan.q_block), size)
        cols = lax.dynamic_slice(
            masks.kv_segments, (zero, j * plan.k_block), (plan.batch, plan.k_block)
        )
        rows = jnp.repeat(rows, plan.group, axis=1)
        same = jnp.expand_dims(rows, 1 + col_axis) == jnp.expand_dims(cols, 1 + row_axis)
        full.append(lax.broadcast_in_dim(same, shape, (0, 2, 3)))
    if masks.mask is not None:
        full.append(_turn(_tile(masks.mask, i, j, plan), transposed))
    return functools.reduce(jnp.logical_and, full) if full else None


def _logits(
    ctx: _Context,
    q: Array,
    k: Array,
    i: Array,
    j: Array,
    dtype: jnp.dtype,
    *,
    transposed: bool = False,
) -> tuple[Array, Array | None]:
    """Logits of block (i, j), -inf where a pair doesn't count, and the soft cap's slope.

    [B, K, rows, cols], or with the last two exchanged when ``transposed``.
    """
    spec, slope = ctx.spec, None
    left, right = (k, q) if transposed else (q, k)
    s = _dot(left, right, (3, 3), dtype) * jnp.asarray(spec.scale, dtype)
    if spec.softcap is not None:
        ratio = jnp.tanh(s / jnp.asarray(spec.softcap, dtype))
        s, slope = ratio * jnp.asarray(spec.softcap, dtype), 1 - ratio * ratio
    if ctx.bias is not None:
        s = s + _turn(_tile(ctx.bias, i, j, ctx.plan), transposed).astype(dtype)
    allowed = _allowed(ctx, i, j, transposed)
    if allowed is not None:
        s = lax.select(allowed, s, jnp.full_like(s, -jnp.inf))
    return s, slope


def _finite(m: Array, other: float) -> Array:
    return jnp.where(m == -jnp.inf, jnp.full_like(m, other), m)


def _at(a: Array, index: Array) -> Array:
    return lax.dynamic_index_in_dim(a, index, 0, keepdims=False)


def _forward(ctx: _Context, qs: Array, ks: Array, vs: Array) -> tuple[Array, Array]:
    """Outputs [n, B, K, rows, d] and log-sum-exp [n, B, K, rows, 1] of all query blocks."""
    dtype = accumulator_dtype(qs)
    stat = jnp.zeros((*qs.shape[1:4], 1), dtype)

    def q_block(i: Array) -> tuple[Array, Array]:
        q = _at(qs, i)

        def k_block(j: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            total, top, out = carry
            s, _ = _logits(ctx, q, _at(ks, j), i, j, dtype)
            new_top = jnp.maximum(top, s.max(axis=3, keepdims=True))
            shift = _finite(new_top, 0.0)
            p = jnp.exp(s - shift)
            keep = jnp.exp(top - shift)
            total = total * keep + p.sum(axis=3, keepdims=True)
            out = out * keep + _dot(p.astype(vs.dtype), _at(vs, j), (3, 2), dtype)
            return total, new_top, out

        init = (
            stat,
            jnp.full_like(stat, -jnp.inf),
            jnp.zeros((*qs.shape[1:4], vs.shape[4]), dtype),
        )
        total, top, out = lax.fori_loop(
            ctx.bounds[i, 0], ctx.bounds[i, 1], k_block, align_varying(init, q)[0]
        )
        empty = total == 0
        safe = jnp.where(empty, jnp.ones_like(total), total)
        lse = jnp.where(empty, jnp.full_like(total, -jnp.inf), _finite(top, 0.0) + jnp.log(safe))
        return (out / safe).astype(qs.dtype), lse

    return lax.map(q_block, jnp.arange(qs.shape[0], dtype=jnp.int32))


def _add_at(a: Array, index: Array, update: Array) -> Array:
    return lax.dynamic_update_index_in_dim(a, _at(a, index) + update, index, 0)


def _add_pairs(dbias: Array, ds: Array, i: Array, j: Array, plan: _Plan) -> Array:
    """Adds block (i, j) of the logits' gradient to a bias gradient of any broadcast shape."""
    ds = ds.reshape(plan.batch, plan.heads, plan.q_block, plan.group, plan.k_block)
    ds = ds.transpose(0, 1, 3, 2, 4).reshape(plan.batch, -1, plan.q_block, plan.k_block)
    ds = ds.sum(axis=[a for a in range(4) if dbias.shape[a] == 1], keepdims=True)
    zero = jnp.zeros_like(i)
    start = (
        zero,
        zero,
        i * plan.q_block if dbias.shape[2] > 1 else zero,
        j * plan.k_block if dbias.shape[3] > 1 else zero,
    )
    old = lax.dynamic_slice(dbias, start, ds.shape)
    return lax.dynamic_update_slice(dbias, old + ds, start)


def _backward(
    ctx: _Context, qs: Array, ks: Array, vs: Array, dos: Array, lse: Array, delta: Array
) -> tuple[Array, Array, Array, Array | None]:
    """Gradients of q, k, v (in blocks, accumulator dtype) and of the padded bias."""
    dtype = lse.dtype
    lse = _finite(lse, jnp.inf)  # a row that sees nothing has weights exp(-inf) = 0
    scale = jnp.asarray(ctx.spec.scale, dtype)
    lse, delta = jnp.swapaxes(lse, 3, 4), jnp.swapaxes(delta, 3, 4)

    # Blocks stand transposed, [cols, rows], and so does dq: the products that contract over a
    # block's side then read it in its own order, which on CPU is twice as fast.
    kts = jnp.swapaxes(ks, 3, 4)

    def q_block(carry: tuple[Array, Array, Array | None], i: Array) -> tuple[tuple, Array]:
        q, do, row_lse, row_delta = _at(qs, i), _at(dos, i), _at(lse, i), _at(delta, i)

        def k_block(j: Array, carry: tuple) -> tuple:
            dq, dk, dv, dbias = carry
            k, v = _at(ks, j), _at(vs, j)
            s, slope = _logits(ctx, q, k, i, j, dtype, transposed=True)
            p = jnp.exp(s - row_lse)
            dv = _add_at(dv, j, _dot(p.astype(do.dtype), do, (3, 2), dtype))
            ds = p * (_dot(v, do, (3, 3), dtype) - row_delta)
            if dbias is not None:
                dbias = _add_pairs(dbias, jnp.swapaxes(ds, 2, 3), i, j, ctx.plan)
            ds = ds * scale if slope is None else ds * (slope * scale)
            ds = ds.astype(qs.dtype)
            dk = _add_at(dk, j, _dot(ds, q, (3, 2), dtype))
            return dq + _dot(_at(kts, j), ds, (3, 2), dtype), dk, dv, dbias

        turned = (*q.shape[:2], q.shape[3], q.shape[2])
        start = align_varying((jnp.zeros(turned, dtype), *carry), q)[0]
        dq, *rest = lax.fori_loop(ctx.bounds[i, 0], ctx.bounds[i, 1], k_block, start)
        return tuple(rest), jnp.swapaxes(dq, 2, 3)

    dbias = None if ctx.bias is None else jnp.zeros(ctx.bias.shape, dtype)
    init = (jnp.zeros(ks.shape, dtype), jnp.zeros(vs.shape, dtype), dbias)
    init, _ = align_varying(init, qs)
    (dk, dv, dbias), dq = lax.scan(q_block, init, jnp.arange(qs.shape[0], dtype=jnp.int32))
    return dq, dk, dv, dbias


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def attention_xla(
    q: Float[Array, "B Tq H d"],
    k: Float[Array, "B Tk K d"],
    v: Float[Array, "B Tk K dv"],
    bias: Float[Array, "b h q k"] | None,
    masks: Masks,
    spec: ScoreSpec,
    blocks: tuple[int, int],
) -> tuple[Float[Array, "B Tq H dv"], Float[Array, "B H Tq"]]:
    """Outputs and log-sum-exp; see `kernels_pallas.attention` for the meaning of the arguments.

    Args:
      q: Queries.
      k: Keys.
      v: Values.
      bias: Added to the logits, [B|1, H|1, Tq|1, Tk|1].
      masks: Segments and element mask.
      spec: Scale, soft cap and band.
      blocks: Queries and keys in one block of logits.
    """
    return _attention_fwd(q, k, v, bias, masks, spec, blocks)[0]


def _attention_fwd(
    q: Array, k: Array, v: Array, bias: Array | None, masks: Masks, spec: ScoreSpec, blocks: tuple
) -> tuple[tuple[Array, Array], tuple]:
    plan = _plan(q, k, *blocks)
    ctx = _context(spec, plan, masks, bias)
    rows, lse = _forward(ctx, _to_rows(q, plan), _to_columns(k, plan), _to_columns(v, plan))
    out = _from_rows(rows, plan, q.shape[1])
    public_lse = _from_rows(lse, plan, q.shape[1])[..., 0].transpose(0, 2, 1)
    return (out, public_lse), (q, k, v, bias, masks, out, lse)


def _attention_bwd(
    spec: ScoreSpec, blocks: tuple[int, int], saved: tuple, cotangents: tuple[Array, Array]
) -> tuple[Array, Array, Array, Array | None, None]:
    q, k, v, bias, masks, out, lse = saved
    do, dlse = cotangents
    plan = _plan(q, k, *blocks)
    ctx = _context(spec, plan, masks, bias)
    dtype = lse.dtype
    delta = jnp.sum(do.astype(dtype) * out.astype(dtype), axis=-1) - dlse.transpose(0, 2, 1)
    dq, dk, dv, dbias = _backward(
        ctx,
        _to_rows(q, plan),
        _to_columns(k, plan),
        _to_columns(v, plan),
        _to_rows(do, plan),
        lse,
        _to_rows(delta[..., None], plan),
    )
    if bias is not None and dbias is not None:
        dbias = dbias[:, :, : bias.shape[2], : bias.shape[3]].astype(bias.dtype)
    return (
        _from_rows(dq, plan, q.shape[1]).astype(q.dtype),
        _from_columns(dk, k.shape[1]).astype(k.dtype),
        _from_columns(dv, v.shape[1]).astype(v.dtype),
        dbias,
        None,
    )


attention_xla.defvjp(_attention_fwd, _attention_bwd)
