"""Mosaic TPU kernels behind `block_sparse_attention`, with their custom VJP.

As in `kernels_pallas.attention`, a stretch of keys and values stays in VMEM while the blocks of
queries pass by, so that each operand is read from main memory once up to some 16 thousand tokens.
Each block of queries walks its list of kept blocks, which lies in scalar memory. Tiles of partial
blocks stay in VMEM when they are few, as those of a band are, and are fetched one by one when not.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from kernels_pallas.attention.scores import LN2, LOG2E, dot
from kernels_pallas.attention.tpu_blocks import in_main_memory, tile_rows, vmem_limit
from kernels_pallas.block_sparse_attention.pattern import BlockPattern
from kernels_pallas.block_sparse_attention.quantize import quantize_queries_and_keys
from kernels_pallas.block_sparse_attention.tpu_backward import block_sparse_backward
from kernels_pallas.block_sparse_attention.tpu_lists import (
    TILE_BYTES,
    Lists,
    fetch_tile,
    make_lists,
    tile_specs,
    visited_pairs,
)
from kernels_pallas.tiling import ceil_div, result_type, round_up

__all__ = ["block_sparse_tpu", "unsupported"]

_MAX_HEAD_DIM = 256
_MAX_BLOCK = 512


def unsupported(q: Array, pattern: BlockPattern) -> str | None:
    """Why the kernel can't take these arguments, or None when it can."""
    if jnp.dtype(q.dtype) not in (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)):
        return f"q of dtype {q.dtype}: the TPU kernel takes float32 and bfloat16"
    if q.shape[3] > _MAX_HEAD_DIM:
        return f"head_dim {q.shape[3]}: the TPU kernel takes at most {_MAX_HEAD_DIM}"
    if pattern.block % 128 or pattern.block > _MAX_BLOCK:
        return f"pattern block {pattern.block}: the TPU kernel takes 128, 256, 384 and {_MAX_BLOCK}"
    return None


def _codes(x: Float[Array, "rows dim"]) -> tuple[Array, Array]:
    """Int8 codes of rows and their scale [rows, 1], as `quantize_queries_and_keys` makes them."""
    scale = jnp.maximum(jnp.max(jnp.abs(x), axis=1, keepdims=True) / 127, 1e-12)
    codes = jnp.clip(jnp.round(x / scale), -127, 127)
    return codes.astype(jnp.int32).astype(jnp.int8), scale


def _quantize_keys(k_ref, codes_ref, scale_ref, mean_ref, lists: Lists) -> None:
    """Codes of all keys of a head, once, while they lie in VMEM."""
    block = lists.block

    def rows(j):
        keys = pl.ds(pl.multiple_of(j * block, block), block)
        return keys, tile_rows(k_ref[keys, :].astype(jnp.float32), j * block, lists.length)

    def add(j):
        mean_ref[...] += jnp.sum(rows(j)[1], axis=0, keepdims=True)

    def store(j):
        keys, k = rows(j)
        codes_ref[keys, :], scale = _codes(k - mean_ref[...])
        scale_ref[:, keys] = jnp.broadcast_to(scale, (block, 128)).T[:1]

    mean_ref[...] = jnp.zeros_like(mean_ref)
    pl.loop(0, lists.stretch_blocks)(add)
    mean_ref[...] = mean_ref[...] / lists.length
    pl.loop(0, lists.stretch_blocks)(store)


def _forward_kernel(
    bounds_ref, index_ref, number_ref, starts_ref, *refs, lists: Lists, bits: int, quantize: bool
):
    del bounds_ref  # for the index maps
    refs = list(refs)
    q_ref, k_ref, v_ref = refs[:3]
    del refs[:3]
    given = bits == 8 and not quantize
    q_scale_ref, k_scale_ref = (refs.pop(0), refs.pop(0)) if given else (None, None)
    tiles_ref, o_ref, lse_ref, m_ref, l_ref, acc_ref, *fetched = refs
    if quantize:
        codes_ref, k_scale_ref, mean_ref, *fetched = fetched
        pl.when(pl.program_id(2) == 0)(
            functools.partial(_quantize_keys, k_ref, codes_ref, k_scale_ref, mean_ref, lists)
        )
        k_ref = codes_ref
    stretch = pl.program_id(3)
    block, dim = lists.block, q_ref.shape[1]
    factor = dim**-0.5 * LOG2E

    @pl.when(stretch == 0)
    def _():
        m_ref[...] = jnp.full_like(m_ref, -jnp.inf)
        l_ref[...] = jnp.zeros_like(l_ref)
        acc_ref[...] = jnp.zeros_like(acc_ref)

    q = q_ref[...]
    if given:
        q_scale = jnp.broadcast_to(q_scale_ref[...], (128, block)).T[:, :1] * LOG2E
    elif quantize:
        scaled = q.astype(jnp.float32) * dim**-0.5
        q, q_scale = _codes(scaled)
        q_scale = q_scale * LOG2E

    def visit(t):
        j = index_ref[0, t]
        number = number_ref[0, t]
        keys = pl.ds(pl.multiple_of((j - stretch * lists.stretch_blocks) * block, block), block)
        if bits == 8:
            s = jax.lax.dot_general(
                q, k_ref[keys, :], (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32
            )
            s = s.astype(jnp.float32) * q_scale * k_scale_ref[:, keys]
        else:
            s = dot(q, k_ref[keys, :], 1, 1) * factor
        v = v_ref[keys, :]
        if lists.length % block:
            v = tile_rows(v, j * block, lists.length)

        def update(s):
            m_old = m_ref[...]
            m_new = jnp.maximum(m_old, jnp.max(s, axis=1, keepdims=True))
            m_safe = jnp.where(m_new == -jnp.inf, 0.0, m_new)
            p = jnp.exp2(s - m_safe[:, :1])
            keep = jnp.exp2(m_old - m_safe)
            l_ref[...] = keep * l_ref[...] + jnp.sum(p, axis=1, keepdims=True)
            m_ref[...] = m_new
            acc_ref[...] = keep[:, :1] * acc_ref[...] + dot(p.astype(v.dtype), v, 1, 0)

        @pl.when(number == 0)
        def _():
            update(s)

        @pl.when(number > 0)
        def _():
            tile = fetch_tile(tiles_ref, fetched, number - 1)
            update(jnp.where(tile, s, -jnp.inf))

    pl.loop(starts_ref[0, stretch], starts_ref[0, stretch + 1])(visit)

    @pl.when(stretch == pl.num_programs(3) - 1)
    def _():
        total = l_ref[...]
        inverse = jnp.where(total == 0.0, 0.0, 1.0 / jnp.where(total == 0.0, 1.0, total))
        o_ref[...] = (acc_ref[...] * inverse[:, :1]).astype(o_ref.dtype)
        lse = m_ref[...] * LN2 + jnp.log(total)
        if quantize:
            lse = lse + jnp.sum(scaled * mean_ref[...], axis=1, keepdims=True)
        lse = jnp.where(total == 0.0, -jnp.inf, lse)
        lse_ref[...] = lse.T[:1]


def _stretch_blocks(block: int, blocks: int, dim: int, itemsize: int, tiles: int) -> int:
    """Blocks of keys in VMEM at a time: k and v in two buffers each, beside the tiles."""
    budget = vmem_limit() - 2 * min(tiles, TILE_BYTES) - (14 << 20)
    fit = max(1, budget // (4 * itemsize * round_up(dim, 128) * block))
    return ceil_div(blocks, ceil_div(blocks, fit))


def _forward(interpret: bool, bits: int, q, k, v, pattern: BlockPattern):
    batch, heads, length, dim = q.shape
    block, blocks = pattern.block, pattern.kv_index.shape[1]
    stretch_blocks = _stretch_blocks(block, blocks, dim, v.dtype.itemsize, pattern.elements.size)
    lists = Lists(block, length, stretch_blocks)
    stretches = ceil_div(blocks, lists.stretch_blocks)
    tables = make_lists(pattern.kv_index, pattern.partial, pattern.kv_count, blocks, lists)
    per_map = int(pattern.heads > 1)

    def visited(h, i, s, bounds_ref):
        if stretches == 1:
            return s
        base = (h * per_map * blocks + i) * 2
        return jnp.clip(s, bounds_ref[base], bounds_ref[base + 1])

    of_query = pl.BlockSpec((None, None, block, dim), lambda b, h, i, s, _: (b, h, i, 0))
    of_row = pl.BlockSpec((None, None, 1, block), lambda b, h, i, s, _: (b, h, 0, i))
    keys = lists.stretch_blocks * block
    of_key = pl.BlockSpec(
        (None, None, keys, dim), lambda b, h, i, s, ref: (b, h, visited(h, i, s, ref), 0)
    )
    in_specs, operands, constant = [of_query, of_key, of_key], [q, k, v], None
    # Where all keys are in VMEM at once the kernel makes the codes, else XLA does beforehand.
    quantize = bits == 8 and stretches == 1
    codes = []
    if quantize:
        codes = [
            pltpu.VMEM((keys, dim), jnp.int8),
            pltpu.VMEM((1, keys), jnp.float32),
            pltpu.VMEM((1, dim), jnp.float32),
        ]
    elif bits == 8:
        q_codes, q_scale, k_codes, k_scale, constant = quantize_queries_and_keys(q, k)
        operands = [q_codes, k_codes, v, q_scale[:, :, None], k_scale[:, :, None]]
        in_specs += [
            of_row,
            pl.BlockSpec(
                (None, None, 1, keys), lambda b, h, i, s, ref: (b, h, 0, visited(h, i, s, ref))
            ),
        ]
    tiles = jnp.asarray(pattern.elements).astype(jnp.int8)
    tiles_spec, fetched = tile_specs(tiles)
    most = tables.index.shape[-1]
    of_list = pl.BlockSpec(
        (None, None, 1, most), lambda b, h, i, s, _: (h * per_map, i, 0, 0), memory_space=pltpu.SMEM
    )
    of_starts = pl.BlockSpec(
        (None, None, 1, stretches + 1),
        lambda b, h, i, s, _: (h * per_map, i, 0, 0),
        memory_space=pltpu.SMEM,
    )
    moved = sum(x.size * x.dtype.itemsize for x in (*operands, q)) + 4 * batch * heads * length
    if stretches > 1:
        moved += (blocks - 1) * 2 * k.size * k.dtype.itemsize
    pairs = batch * heads * visited_pairs(pattern)
    out, lse = pl.pallas_call(
        functools.partial(_forward_kernel, lists=lists, bits=bits, quantize=quantize),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, heads, blocks, stretches),
            in_specs=[of_list, of_list, of_starts, *in_specs, tiles_spec],
            out_specs=[of_query, of_row],
            scratch_shapes=[
                pltpu.VMEM((block, 128), jnp.float32),
                pltpu.VMEM((block, 128), jnp.float32),
                pltpu.VMEM((block, dim), jnp.float32),
                *codes,
                *fetched,
            ],
        ),
        out_shape=[
            result_type(q.shape, v.dtype, *operands),
            result_type((batch, heads, 1, length), jnp.float32, *operands),
        ],
        compiler_params=pltpu.CompilerParams(
            # The codes of the keys are made at a head's first block of queries.
            dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=vmem_limit(),
        ),
        cost_estimate=pl.CostEstimate(
            flops=4 * pairs * dim, transcendentals=pairs, bytes_accessed=moved
        ),
        interpret=interpret,
        name="block_sparse_forward",
    )(
        tables.bounds,
        tables.index,
        tables.number,
        tables.starts,
        *in_main_memory(interpret, *operands, tiles),
    )
    lse = lse[:, :, 0]
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
    if bits == 8:
        # The gradient is that of the attention at 16 bits, so its weights must be too.
        out, lse = _forward(interpret, 16, q, k, v, pattern)
    gradients = block_sparse_backward(
        interpret, q, k, v, out, lse, do.astype(q.dtype), dlse, pattern
    )
    return *gradients, None


_attend.defvjp(_attend_fwd, _attend_bwd)


def block_sparse_tpu(
    q: Float[Array, "batch heads length dim"],
    k: Float[Array, "batch heads length dim"],
    v: Float[Array, "batch heads length dim"],
    pattern: BlockPattern,
    qk_bits: int,
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "batch heads length dim"], Float[Array, "batch heads length"]]:
    """The TPU kernel for checked arguments; returns output and log-sum-exp."""
    return _attend(interpret, qk_bits, q, k, v, pattern)
