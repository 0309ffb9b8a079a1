"""Block-sparse attention in plain XLA: work and memory in proportion to the kept blocks.

A loop over blocks of queries holds a loop over the kept blocks of keys, a few at a time, with an
online softmax. The backward pass walks the same lists once and adds to dk and dv as it goes.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from kernels_pallas.block_sparse_attention.pattern import BlockPattern
from kernels_pallas.block_sparse_attention.quantize import quantize_queries_and_keys
from kernels_pallas.tiling import accumulator_dtype, ceil_div

__all__ = ["block_sparse_xla"]

# Keys handled at a time when blocks are smaller: tiles of logits that stay in a CPU cache run
# two to three times faster than wider ones.
_KEYS_AT_A_TIME = 128


class _Plan(NamedTuple):
    """Sizes: pattern maps, rows that share a map (batch, or batch and heads), blocks, block."""

    maps: int
    rows: int
    blocks: int
    block: int
    at_a_time: int


def _plan(q: Array, pattern: BlockPattern) -> _Plan:
    batch, heads = q.shape[:2]
    maps = pattern.heads
    most = pattern.kv_index.shape[2]
    at_a_time = max(1, min(most, _KEYS_AT_A_TIME // pattern.block))
    return _Plan(
        maps=maps,
        rows=batch * heads // maps,
        blocks=pattern.kv_index.shape[1],
        block=pattern.block,
        at_a_time=at_a_time,
    )


def _blocks(
    x: Float[Array, "B H L ..."], plan: _Plan
) -> Float[Array, "maps blocks rows block ..."]:
    pad = plan.blocks * plan.block - x.shape[2]
    x = jnp.pad(x, [(0, 0), (0, 0), (0, pad)] + [(0, 0)] * (x.ndim - 3))
    batch, heads = x.shape[:2]
    if plan.maps == 1:
        x = x.reshape(1, batch * heads, plan.blocks, plan.block, *x.shape[3:])
    else:
        x = x.reshape(batch, heads, plan.blocks, plan.block, *x.shape[3:]).swapaxes(0, 1)
    return x.swapaxes(1, 2)


def _unblocks(x: Array, plan: _Plan, shape: tuple[int, ...]) -> Array:
    batch, heads, length = shape[:3]
    x = x.swapaxes(1, 2)
    x = x if plan.maps == 1 else x.swapaxes(0, 1)
    return x.reshape(batch, heads, plan.blocks * plan.block, *x.shape[4:])[:, :, :length]


class _Lists(NamedTuple):
    """The pattern's lists, padded so that they can be read a few entries at a time."""

    index: Array
    number: Array
    count: Array
    tiles: Array


def _lists(pattern: BlockPattern, plan: _Plan) -> _Lists:
    most = pattern.kv_index.shape[2]
    slots = ceil_div(most, plan.at_a_time) * plan.at_a_time
    tiles = jnp.asarray(pattern.elements)
    # Number 0 is a full block, the last number a slot past the end of its list.
    tiles = jnp.concatenate([jnp.ones_like(tiles[:1]), tiles, jnp.zeros_like(tiles[:1])])
    index, number, count = (
        jnp.asarray(x) for x in (pattern.kv_index, pattern.partial, pattern.kv_count)
    )
    widths = ((0, 0), (0, 0), (0, slots - most))
    past = jnp.arange(slots, dtype=jnp.int32)[None, None] >= count[:, :, None]
    number = jnp.where(past, jnp.int32(tiles.shape[0] - 1), jnp.pad(number, widths))
    return _Lists(jnp.pad(index, widths), number, count, tiles)


def _read(x: Array, m: Array, i: Array) -> Array:
    """``x[m, i]`` of an array whose first two axes are maps and blocks."""
    return lax.dynamic_slice(x, (m, i) + (jnp.zeros_like(m),) * (x.ndim - 2), (1, 1, *x.shape[2:]))[
        0, 0
    ]


def _gather(x: Array, m: Array, entries: list[Array]) -> Array:
    """The named blocks of one map side by side: [rows, several * block, ...]."""
    return jnp.concatenate([_read(x, m, j) for j in entries], axis=1)


def _dot(a: Array, b: Array, axis_a: int, axis_b: int, dtype: jnp.dtype) -> Array:
    dims = (((axis_a,), (axis_b,)), ((0,), (0,)))
    return lax.dot_general(a, b, dims, preferred_element_type=dtype)


def _entries(lists: _Lists, plan: _Plan, m: Array, i: Array, c: Array):
    """Block indices of chunk ``c`` of a row of blocks, and the elements that count."""
    start, size = (m, i, c * plan.at_a_time), (1, 1, plan.at_a_time)
    index = lax.dynamic_slice(lists.index, start, size)[0, 0]
    number = lax.dynamic_slice(lists.number, start, size)[0, 0]
    allowed = jnp.take(lists.tiles, number, axis=0)
    allowed = allowed.swapaxes(0, 1).reshape(plan.block, plan.at_a_time * plan.block)
    return [index[t] for t in range(plan.at_a_time)], allowed


def _masked(s: Array, allowed: Array) -> Array:
    allowed = lax.broadcast_in_dim(allowed, s.shape, (1, 2))
    return lax.select(allowed, s, jnp.full_like(s, -jnp.inf))


def _chunks(lists: _Lists, plan: _Plan, m: Array, i: Array) -> Array:
    count = lax.dynamic_slice(lists.count, (m, i), (1, 1))[0, 0]
    return (count + (plan.at_a_time - 1)) // plan.at_a_time


def _forward(
    plan: _Plan,
    lists: _Lists,
    qs: tuple[Array, ...],
    ks: tuple[Array, ...],
    vs: Array,
    scale: float,
) -> tuple[Array, Array]:
    """Outputs and log-sum-exp in blocks; q and k are arrays, or codes with their scales."""
    dtype = accumulator_dtype(vs)

    def row(at: Array) -> tuple[Array, Array]:
        m, i = at[0], at[1]
        q = [_read(x, m, i) for x in qs]

        def chunk(c: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            top, total, out = carry
            entries, allowed = _entries(lists, plan, m, i, c)
            k = [_gather(x, m, entries) for x in ks]
            if len(q) == 2:
                # Whole numbers below 2 ** 24: a float32 product is exact, and CPUs have it.
                s = _dot(q[0].astype(dtype), k[0].astype(dtype), 2, 2, dtype)
                s = s * q[1][:, :, None] * k[1][:, None, :]
            else:
                s = _dot(q[0], k[0], 2, 2, dtype) * jnp.asarray(scale, dtype)
            s = _masked(s, allowed)
            new_top = jnp.maximum(top, s.max(axis=2))
            shift = jnp.where(new_top == -jnp.inf, jnp.zeros_like(top), new_top)
            p = jnp.exp(s - shift[:, :, None])
            keep = jnp.exp(top - shift)
            out = out * keep[:, :, None]
            out = out + _dot(p.astype(vs.dtype), _gather(vs, m, entries), 2, 1, dtype)
            return new_top, total * keep + p.sum(axis=2), out

        stat = jnp.zeros((plan.rows, plan.block), dtype)
        init = (stat - jnp.inf, stat, jnp.zeros((plan.rows, plan.block, vs.shape[-1]), dtype))
        top, total, out = lax.fori_loop(0, _chunks(lists, plan, m, i), chunk, init)
        empty = total == 0
        total = jnp.where(empty, jnp.ones_like(total), total)
        lse = jnp.where(empty, jnp.full_like(total, -jnp.inf), top + jnp.log(total))
        return (out / total[:, :, None]).astype(vs.dtype), lse

    out, lse = lax.map(row, _positions(plan))
    fold = (plan.maps, plan.blocks)
    return out.reshape(*fold, *out.shape[1:]), lse.reshape(*fold, *lse.shape[1:])


def _positions(plan: _Plan) -> Array:
    m, i = jnp.meshgrid(
        jnp.arange(plan.maps, dtype=jnp.int32),
        jnp.arange(plan.blocks, dtype=jnp.int32),
        indexing="ij",
    )
    return jnp.stack([m.reshape(-1), i.reshape(-1)], axis=1)


def _add(x: Array, m: Array, j: Array, update: Array) -> Array:
    start = (m, j) + (jnp.zeros_like(m),) * (x.ndim - 2)
    return lax.dynamic_update_slice(x, (_read(x, m, j) + update)[None, None], start)


def _backward(
    plan: _Plan, lists: _Lists, scale: float, qs: Array, ks: Array, vs: Array, dos: Array,
    lse: Array, delta: Array,
) -> tuple[Array, Array, Array]:  # fmt: skip
    dtype = lse.dtype
    lse = jnp.where(lse == -jnp.inf, jnp.zeros_like(lse), lse)
    factor = jnp.asarray(scale, dtype)

    def row(carry: tuple[Array, Array], at: Array) -> tuple[tuple[Array, Array], Array]:
        m, i = at[0], at[1]
        q, do, row_lse, row_delta = (_read(x, m, i) for x in (qs, dos, lse, delta))

        def chunk(c: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            dq, dk, dv = carry
            entries, allowed = _entries(lists, plan, m, i, c)
            k, v = _gather(ks, m, entries), _gather(vs, m, entries)
            s = _masked(_dot(q, k, 2, 2, dtype) * factor, allowed)
            p = jnp.exp(s - row_lse[:, :, None])
            ds = p * (_dot(do, v, 2, 2, dtype) - row_delta[:, :, None]) * factor
            ds = ds.astype(q.dtype)
            more_dv = _dot(p.astype(do.dtype), do, 1, 1, dtype)
            more_dk = _dot(ds, q, 1, 1, dtype)
            for t, j in enumerate(entries):
                part = slice(t * plan.block, (t + 1) * plan.block)
                dk = _add(dk, m, j, more_dk[:, part])
                dv = _add(dv, m, j, more_dv[:, part])
            return dq + _dot(ds, k, 2, 1, dtype), dk, dv

        start = (jnp.zeros(q.shape, dtype), *carry)
        dq, *rest = lax.fori_loop(0, _chunks(lists, plan, m, i), chunk, start)
        return tuple(rest), dq

    init = (jnp.zeros(ks.shape, dtype), jnp.zeros(vs.shape, dtype))
    (dk, dv), dq = lax.scan(row, init, _positions(plan))
    return dq.reshape(plan.maps, plan.blocks, *dq.shape[1:]), dk, dv


def _attend(
    q: Array, k: Array, v: Array, pattern: BlockPattern, qk_bits: int
) -> tuple[Array, Array]:
    plan = _plan(q, pattern)
    lists = _lists(pattern, plan)
    scale = q.shape[-1] ** -0.5
    constant = None
    if qk_bits == 8:
        q_codes, q_scale, k_codes, k_scale, constant = quantize_queries_and_keys(q, k)
        qs = (_blocks(q_codes, plan), _blocks(q_scale, plan))
        ks = (_blocks(k_codes, plan), _blocks(k_scale, plan))
    else:
        qs, ks = (_blocks(q, plan),), (_blocks(k, plan),)
    out, lse = _forward(plan, lists, qs, ks, _blocks(v, plan), scale)
    out, lse = (_unblocks(x, plan, q.shape) for x in (out, lse))
    return out, lse if constant is None else lse + constant


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def block_sparse_xla(
    q: Float[Array, "batch heads length dim"],
    k: Float[Array, "batch heads length dim"],
    v: Float[Array, "batch heads length dim"],
    pattern: BlockPattern,
    qk_bits: int,
) -> tuple[Float[Array, "batch heads length dim"], Float[Array, "batch heads length"]]:
    """Output and log-sum-exp; see `kernels_pallas.block_sparse_attention`.

    Args:
      q: Queries.
      k: Keys.
      v: Values.
      pattern: Kept blocks.
      qk_bits: 16 or 8.
    """
    return _attend(q, k, v, pattern, qk_bits)


def _fwd(q, k, v, pattern, qk_bits):
    out, lse = _attend(q, k, v, pattern, qk_bits)
    return (out, lse), (q, k, v, pattern, out, lse)


def _bwd(qk_bits, saved, cotangents):
    q, k, v, pattern, out, lse = saved
    do, dlse = cotangents
    if qk_bits == 8:
        # The gradient is that of the attention at 16 bits, so its weights must be too.
        out, lse = _attend(q, k, v, pattern, 16)
    plan = _plan(q, pattern)
    delta = jnp.sum(out.astype(lse.dtype) * do.astype(lse.dtype), axis=-1) - dlse
    blocked = (_blocks(x, plan) for x in (q, k, v, do.astype(q.dtype), lse, delta))
    gradients = _backward(plan, _lists(pattern, plan), q.shape[-1] ** -0.5, *blocked)
    dq, dk, dv = (_unblocks(x, plan, q.shape).astype(q.dtype) for x in gradients)
    return dq, dk, dv, None


block_sparse_xla.defvjp(_fwd, _bwd)
