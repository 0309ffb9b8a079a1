"""Triton kernels behind `block_sparse_attention`, with their custom VJP.

A program takes some queries of one block (in the backward pass also some keys of one block) and
walks its list of kept blocks. Lists and tiles are read from main memory where they are needed; a
full block's tile is not read. No two programs add to the same element, so that results repeat bit
by bit.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float

from kernels_pallas.attention.gpu_blocks import View, load_line, load_rows, store_rows
from kernels_pallas.attention.scores import LN2, LOG2E, dot, quotient
from kernels_pallas.block_sparse_attention.pattern import BlockPattern
from kernels_pallas.block_sparse_attention.quantize import quantize_queries_and_keys
from kernels_pallas.tiling import ceil_div, next_power_of_2, result_type

__all__ = ["block_sparse_gpu", "unsupported"]

_MAX_HEAD_DIM = 256


def unsupported(q: Array, pattern: BlockPattern) -> str | None:
    """Why the kernel can't take these arguments, or None when it can."""
    allowed = (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
    if jnp.dtype(q.dtype) not in allowed:
        return f"q of dtype {q.dtype}: the GPU kernel takes float32, bfloat16 and float16"
    if q.shape[3] > _MAX_HEAD_DIM:
        return f"head_dim {q.shape[3]}: the GPU kernel takes at most {_MAX_HEAD_DIM}"
    block = pattern.block
    if block < 16 or block & (block - 1):
        return f"pattern block {block}: the GPU kernel takes powers of two from 16 on"
    return None


@dataclasses.dataclass(frozen=True)
class _Walk:
    """Static sizes of a program.

    Attributes:
      block: Side of a block of the pattern, tokens.
      length: Tokens.
      rows: Tokens of its own side that a program takes; divides ``block``.
      cols: Tokens of the listed side in a step; divides ``block``.
      most: Entries of a list.
    """

    block: int
    length: int
    rows: int
    cols: int
    most: int


def _walk(pattern: BlockPattern, head_dim: int, dtype: Any, *, backward: bool, most: int):
    """Tile sizes that fit 100 KiB of shared memory, and how Triton runs them."""
    wide = next_power_of_2(max(head_dim, 16))
    small = wide > 128 or jnp.dtype(dtype).itemsize > 2
    rows, cols = (64, 64) if backward else (128, 64)
    warps, stages = (8 if wide >= 128 else 4), 2
    if small:
        rows, cols, warps, stages = (32, 32, 4, 1) if backward else (64, 32, 4, 2)
    block = pattern.block
    walk = _Walk(block, pattern.length, min(rows, block), min(cols, block), most)
    return walk, plgpu.CompilerParams(num_warps=warps, num_stages=stages)


def _steps(index_ref, number_ref, count_ref, walk: _Walk, body, carry):
    """Runs ``body(first listed token, offset in its block, tile number, carry)`` over a list."""
    own = quotient(pl.program_id(0), walk.block // walk.rows)
    per_block = walk.block // walk.cols

    def step(n, carry):
        t = quotient(n, per_block)
        offset = (n - t * per_block) * walk.cols
        entry = own * walk.most + t
        return body(index_ref[entry] * walk.block + offset, offset, number_ref[entry], carry)

    return jax.lax.fori_loop(0, count_ref[own] * per_block, step, carry)


def _elements(
    tiles_ref, number, own_offset, offset, walk: _Walk, transposed: bool
) -> Bool[Array, "rows cols"]:
    """Which pairs of a tile count; a full block (number 0) is not read."""
    shape = (walk.rows, walk.cols)
    tile = jnp.maximum(number - 1, 0)
    own, listed = pl.ds(own_offset, walk.rows), pl.ds(offset, walk.cols)
    ref = tiles_ref.at[tile, listed, own] if transposed else tiles_ref.at[tile, own, listed]
    read = jnp.broadcast_to(number > 0, shape[::-1] if transposed else shape)
    value = plgpu.load(ref, mask=read, other=jnp.ones((), tiles_ref.dtype))
    return (value.T if transposed else value) != 0


def _forward_kernel(
    index_ref, number_ref, count_ref, q_ref, k_ref, v_ref, q_scale_ref, k_scale_ref, tiles_ref,
    o_ref, lse_ref, *, walk: _Walk,
):  # fmt: skip
    program = pl.program_id(0)
    first_query = program * walk.rows
    own_offset = first_query - quotient(program, walk.block // walk.rows) * walk.block
    length, dim = walk.length, q_ref.shape[1]
    q = load_rows(View(q_ref), first_query, walk.rows, length, True)
    if q_scale_ref is not None:
        q_scale = load_line(View(q_scale_ref), first_query, walk.rows, length) * LOG2E

    def body(first_key, offset, number, carry):
        top, total, out = carry
        k = load_rows(View(k_ref), first_key, walk.cols, length, True)
        if q_scale_ref is None:
            s = dot(q, k, 1, 1) * (dim**-0.5 * LOG2E)
        else:
            s = jax.lax.dot_general(
                q, k, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32
            )
            k_scale = load_line(View(k_scale_ref), first_key, walk.cols, length)
            s = s.astype(jnp.float32) * q_scale[:, None] * k_scale[None, :]
        s = jnp.where(_elements(tiles_ref, number, own_offset, offset, walk, False), s, -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(s, axis=1))
        shift = jnp.where(new_top == -jnp.inf, 0.0, new_top)
        p = jnp.exp2(s - shift[:, None])
        keep = jnp.exp2(top - shift)
        v = load_rows(View(v_ref), first_key, walk.cols, length, True)
        out = out * keep[:, None] + dot(p.astype(v.dtype), v, 1, 0)
        return new_top, total * keep + jnp.sum(p, axis=1), out

    carry = (
        jnp.full((walk.rows,), -jnp.inf, jnp.float32),
        jnp.zeros((walk.rows,), jnp.float32),
        jnp.zeros((walk.rows, q.shape[1]), jnp.float32),
    )
    top, total, out = _steps(index_ref, number_ref, count_ref, walk, body, carry)
    empty = total == 0.0
    total = jnp.where(empty, 1.0, total)
    store_rows(View(o_ref), first_query, out / total[:, None], length)
    lse = jnp.where(empty, -jnp.inf, top * LN2 + jnp.log(total))
    plgpu.store(
        lse_ref.at[pl.ds(first_query, walk.rows)], lse,
        mask=jnp.arange(walk.rows) < length - first_query,
    )  # fmt: skip


def _load_lse(ref, first, size: int, length: int):
    lse = load_line(View(ref), first, size, length)
    return jnp.where(lse == -jnp.inf, 0.0, lse * LOG2E)


def _query_kernel(
    index_ref, number_ref, count_ref, q_ref, do_ref, lse_ref, delta_ref, k_ref, v_ref, tiles_ref,
    dq_ref, *, walk: _Walk,
):  # fmt: skip
    program = pl.program_id(0)
    first_query = program * walk.rows
    own_offset = first_query - quotient(program, walk.block // walk.rows) * walk.block
    length, dim = walk.length, q_ref.shape[1]
    q, do = (load_rows(View(ref), first_query, walk.rows, length, True) for ref in (q_ref, do_ref))
    lse = _load_lse(lse_ref, first_query, walk.rows, length)
    delta = load_line(View(delta_ref), first_query, walk.rows, length)

    def body(first_key, offset, number, dq):
        k, v = (load_rows(View(ref), first_key, walk.cols, length, True) for ref in (k_ref, v_ref))
        s = dot(q, k, 1, 1) * (dim**-0.5 * LOG2E)
        s = jnp.where(_elements(tiles_ref, number, own_offset, offset, walk, False), s, -jnp.inf)
        p = jnp.exp2(s - lse[:, None])
        ds = p * (dot(do, v, 1, 1) - delta[:, None])
        return dq + dot(ds.astype(k.dtype), k, 1, 0)

    zero = jnp.zeros(q.shape, jnp.float32)
    dq = _steps(index_ref, number_ref, count_ref, walk, body, zero)
    store_rows(View(dq_ref), first_query, dq * dim**-0.5, length)


def _key_kernel(
    index_ref, number_ref, count_ref, q_ref, do_ref, lse_ref, delta_ref, k_ref, v_ref, tiles_ref,
    dk_ref, dv_ref, *, walk: _Walk,
):  # fmt: skip
    program = pl.program_id(0)
    first_key = program * walk.rows
    own_offset = first_key - quotient(program, walk.block // walk.rows) * walk.block
    length, dim = walk.length, q_ref.shape[1]
    k, v = (load_rows(View(ref), first_key, walk.rows, length, True) for ref in (k_ref, v_ref))

    def body(first_query, offset, number, carry):
        dk, dv = carry
        q, do = (
            load_rows(View(ref), first_query, walk.cols, length, True) for ref in (q_ref, do_ref)
        )
        lse = _load_lse(lse_ref, first_query, walk.cols, length)
        delta = load_line(View(delta_ref), first_query, walk.cols, length)
        s = dot(k, q, 1, 1) * (dim**-0.5 * LOG2E)
        s = jnp.where(_elements(tiles_ref, number, own_offset, offset, walk, True), s, -jnp.inf)
        p = jnp.exp2(s - lse[None, :])
        ds = p * (dot(v, do, 1, 1) - delta[None, :])
        return dk + dot(ds.astype(q.dtype), q, 1, 0), dv + dot(p.astype(do.dtype), do, 1, 0)

    zero = jnp.zeros(k.shape, jnp.float32)
    dk, dv = _steps(index_ref, number_ref, count_ref, walk, body, (zero, zero))
    store_rows(View(dk_ref), first_key, dk * dim**-0.5, length)
    store_rows(View(dv_ref), first_key, dv, length)


def _call(kernel, name, walk, params, interpret, pattern, lists, operands, results):
    """Runs a kernel with the lists of its map, its (batch, head) of each operand, and the tiles."""
    index, number, count = (jnp.asarray(x) for x in lists)
    maps, blocks, most = index.shape
    index, number = (x.reshape(maps, blocks * most) for x in (index, number))
    per_map = int(maps > 1)
    batch, heads = results[0].shape[:2]

    def of_list(x):
        return pl.BlockSpec((None, x.shape[1]), lambda i, h, b: (h * per_map, 0))

    def of_head(x):
        if x is None:
            return None
        zeros = (0,) * (len(x.shape) - 2)
        return pl.BlockSpec((None, None, *x.shape[2:]), lambda i, h, b: (b, h, *zeros))

    tiles = jnp.asarray(pattern.elements).astype(jnp.int8)
    present = [x for x in operands if x is not None]
    return pl.pallas_call(
        functools.partial(kernel, walk=walk),
        grid=(ceil_div(walk.length, walk.rows), heads, batch),
        in_specs=[
            of_list(index), of_list(number), of_list(count),
            *(of_head(x) for x in operands),
            pl.BlockSpec(tiles.shape, lambda i, h, b: (0, 0, 0)),
        ],
        out_specs=[of_head(x) for x in results],
        out_shape=[result_type(x.shape, x.dtype, *present) for x in results],
        compiler_params=params,
        interpret=interpret,
        name=name,
    )(index, number, count, *operands, tiles)  # fmt: skip


def _forward(interpret: bool, bits: int, q, k, v, pattern: BlockPattern):
    lists = (pattern.kv_index, pattern.partial, pattern.kv_count)
    walk, params = _walk(
        pattern, q.shape[3], q.dtype, backward=False, most=pattern.kv_index.shape[2]
    )
    operands, constant = (q, k, v, None, None), None
    if bits == 8:
        q_codes, q_scale, k_codes, k_scale, constant = quantize_queries_and_keys(q, k)
        operands = (q_codes, k_codes, v, q_scale, k_scale)
    results = [q, jax.ShapeDtypeStruct(q.shape[:3], jnp.float32)]
    out, lse = _call(
        _forward_kernel, "block_sparse_forward", walk, params, interpret, pattern, lists,
        operands, results,
    )  # fmt: skip
    return out, lse if constant is None else lse + constant


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(interpret, bits, q, k, v, pattern):
    return _forward(interpret, bits, q, k, v, pattern)


def _attend_fwd(interpret, bits, q, k, v, pattern):
    out, lse = _forward(interpret, bits, q, k, v, pattern)
    return (out, lse), (q, k, v, pattern, out, lse)


def _attend_bwd(interpret, bits, saved, cotangents):
    q, k, v, pattern, out, lse = saved
    do, dlse = cotangents
    do = do.astype(q.dtype)
    if bits == 8:
        # The gradient is that of the attention at 16 bits, so its weights must be too.
        out, lse = _forward(interpret, 16, q, k, v, pattern)
    delta = jnp.sum(out.astype(jnp.float32) * do.astype(jnp.float32), axis=-1) - dlse
    operands = (q, do, lse, delta, k, v)
    walk = functools.partial(_walk, pattern, q.shape[3], q.dtype, backward=True)
    (dq,) = _call(
        _query_kernel, "block_sparse_dq", *walk(most=pattern.kv_index.shape[2]), interpret, pattern,
        (pattern.kv_index, pattern.partial, pattern.kv_count), operands, [q],
    )  # fmt: skip
    dk, dv = _call(
        _key_kernel, "block_sparse_dkv", *walk(most=pattern.q_index.shape[2]), interpret, pattern,
        (pattern.q_index, pattern.q_partial, pattern.q_count), operands, [k, v],
    )  # fmt: skip
    return dq, dk, dv, None


_attend.defvjp(_attend_fwd, _attend_bwd)


def block_sparse_gpu(
    q: Float[Array, "batch heads length dim"],
    k: Float[Array, "batch heads length dim"],
    v: Float[Array, "batch heads length dim"],
    pattern: BlockPattern,
    qk_bits: int,
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "batch heads length dim"], Float[Array, "batch heads length"]]:
    """The GPU kernel for checked arguments; returns output and log-sum-exp."""
    return _attend(interpret, qk_bits, q, k, v, pattern)
