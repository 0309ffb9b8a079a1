"""The forward Mosaic kernel behind `attention`.

The kernels see [batch, heads, tokens, head_dim], the order a projection can write at no cost. A
stretch of keys and values as long as VMEM allows (all of them up to some 16 thousand tokens) stays
there while the query blocks of the heads that share it pass by, so that each operand is read from
main memory once. Which key blocks a query block visits, and which of them need no mask, is
computed outside and prefetched as scalars.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from kernels_pallas.attention.scores import (
    LN2,
    LOG2E,
    ScoreSpec,
    block_bounds,
    dot,
    in_band,
    logits,
    quotient,
)
from kernels_pallas.attention.tpu_blocks import (
    Blocks,
    forward_cost,
    in_main_memory,
    segment_column,
    tile_rows,
    vmem_limit,
)
from kernels_pallas.tiling import ceil_div, result_type

__all__ = ["attention_forward"]


def _forward_kernel(bounds_ref, *refs, spec: ScoreSpec, blocks: Blocks, parts: tuple[bool, ...]):
    segmented, has_bias, has_mask = parts
    refs = list(refs)
    q_ref, k_ref, v_ref = refs[:3]
    del refs[:3]
    q_seg_ref, k_seg_ref = (refs.pop(0), refs.pop(0)) if segmented else (None, None)
    bias_ref = refs.pop(0) if has_bias else None
    mask_ref = refs.pop(0) if has_mask else None
    o_ref, lse_ref, m_ref, l_ref, acc_ref = refs

    bq, bk = blocks.queries, blocks.keys
    per_stretch = blocks.key_stretch // bk
    row, stretch = pl.program_id(2), pl.program_id(3)
    first_query = row * bq

    @pl.when(stretch == 0)
    def _():
        m_ref[...] = jnp.full_like(m_ref, -jnp.inf)
        l_ref[...] = jnp.zeros_like(l_ref)
        acc_ref[...] = jnp.zeros_like(acc_ref)

    q = q_ref[...]
    if segmented:
        q_seg = segment_column(q_seg_ref[...])

    def visit(block, masked: bool):
        keys = pl.ds(pl.multiple_of(block * bk, bk), bk)
        first_key = stretch * blocks.key_stretch + block * bk
        k, v = k_ref[keys, :], v_ref[keys, :]
        s = logits(dot(q, k, 1, 1), spec)
        if has_bias:
            s = s + bias_ref[:, keys].astype(jnp.float32) * LOG2E
        if masked:
            allowed = in_band(
                (bq, bk), 0, first_query, first_key, spec,
                check_queries=False, check_keys=spec.keys % bk != 0,
            )  # fmt: skip
            if segmented:
                same = q_seg == k_seg_ref[:, keys]
                allowed = same if allowed is None else allowed & same
            if has_mask:
                chosen = mask_ref[:, keys].astype(jnp.int32) != 0
                allowed = chosen if allowed is None else allowed & chosen
            if allowed is not None:
                s = jnp.where(allowed, s, -jnp.inf)
            if spec.keys % bk:
                v = tile_rows(v, first_key, spec.keys)
        m_old = m_ref[...]
        m_new = jnp.maximum(m_old, jnp.max(s, axis=1, keepdims=True))
        m_safe = jnp.where(m_new == -jnp.inf, 0.0, m_new)
        p = jnp.exp2(s - m_safe[:, :1])
        keep = jnp.exp2(m_old - m_safe)
        l_ref[...] = keep * l_ref[...] + jnp.sum(p, axis=1, keepdims=True)
        m_ref[...] = m_new
        acc_ref[...] = keep[:, :1] * acc_ref[...] + dot(p.astype(v.dtype), v, 1, 0)

    base = ((pl.program_id(0) if segmented else 0) * pl.num_programs(2) + row) * 4
    first, first_full, end_full, end = (
        jnp.clip(bounds_ref[base + i] - stretch * per_stretch, 0, per_stretch) for i in range(4)
    )
    never_full = segmented or has_mask
    if never_full:
        first_full = end_full = end
    if never_full or spec.left is not None:
        pl.loop(first, first_full)(functools.partial(visit, masked=True))
    if not never_full:
        pl.loop(first_full, end_full)(functools.partial(visit, masked=False))
        if spec.right is not None or spec.left is not None or spec.keys % bk:
            pl.loop(end_full, end)(functools.partial(visit, masked=True))

    @pl.when(stretch == pl.num_programs(3) - 1)
    def _():
        total = l_ref[...]
        inverse = jnp.where(total == 0.0, 0.0, 1.0 / jnp.where(total == 0.0, 1.0, total))
        o_ref[...] = (acc_ref[...] * inverse[:, :1]).astype(o_ref.dtype)
        lse = jnp.where(total == 0.0, -jnp.inf, m_ref[...] * LN2 + jnp.log(total))
        lse_ref[...] = lse.T[:1]


def attention_forward(
    spec: ScoreSpec,
    blocks: Blocks,
    interpret: bool,
    q: Float[Array, "batch heads queries dim"],
    k: Float[Array, "batch kv_heads keys dim"],
    v: Float[Array, "batch kv_heads keys dim"],
    bias: Float[Array, "batch_or_1 heads_or_1 queries_or_1 keys"] | None,
    mask: Int[Array, "batch_or_1 heads_or_1 queries_or_1 keys"] | None,
    q_seg: Int[Array, "batch queries"] | None,
    k_seg: Int[Array, "batch keys"] | None,
) -> tuple[Float[Array, "batch heads queries dim"], Float[Array, "batch heads queries"]]:
    """Output and float32 log-sum-exp of each row; 0 and -inf for a row that sees no key."""
    batch, heads, queries, dim = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    group = heads // kv_heads
    bq, bk, stretch = blocks.queries, blocks.keys, blocks.key_stretch
    rows, stretches, per_stretch = ceil_div(queries, bq), ceil_div(keys, stretch), stretch // bk
    segmented = q_seg is not None
    bounds = block_bounds(
        spec, bq, bk, rows_are_queries=True, row_segments=q_seg, col_segments=k_seg,
        dense_mask=mask is not None,
    )  # fmt: skip

    def visited(b, i, j, bounds_ref):
        if stretches == 1:
            return j
        base = ((b if segmented else 0) * rows + i) * 4
        first, end = bounds_ref[base], bounds_ref[base + 3]
        low = jnp.minimum(quotient(first, per_stretch), stretches - 1)
        return jnp.clip(j, low, jnp.maximum(quotient(end - 1, per_stretch), low))

    def of_keys(b, h, i, j, bounds_ref):
        return b, quotient(h, group), visited(b, i, j, bounds_ref), 0

    def per_pair(array):
        bb, bh, br = (int(size > 1) for size in array.shape[:3])

        def index(b, h, i, j, bounds_ref):
            return b * bb, h * bh, i * br, visited(b, i, j, bounds_ref)

        return pl.BlockSpec((None, None, bq if br else 1, stretch), index)

    operands = [q, k, v]
    in_specs = [
        pl.BlockSpec((None, None, bq, dim), lambda b, h, i, j, _: (b, h, i, 0)),
        pl.BlockSpec((None, None, stretch, dim), of_keys),
        pl.BlockSpec((None, None, stretch, dim), of_keys),
    ]
    if segmented:
        operands += [q_seg[:, None], k_seg[:, None]]
        in_specs += [
            pl.BlockSpec((None, 1, bq), lambda b, h, i, j, _: (b, 0, i)),
            pl.BlockSpec((None, 1, stretch), lambda b, h, i, j, ref: (b, 0, visited(b, i, j, ref))),
        ]
    for array in (bias, mask):
        if array is not None:
            operands.append(array)
            in_specs.append(per_pair(array))
    out, lse = pl.pallas_call(
        functools.partial(
            _forward_kernel, spec=spec, blocks=blocks,
            parts=(segmented, bias is not None, mask is not None),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, heads, rows, stretches),
            in_specs=in_specs,
            out_specs=[
                pl.BlockSpec((None, None, bq, dim), lambda b, h, i, j, _: (b, h, i, 0)),
                pl.BlockSpec((None, None, 1, bq), lambda b, h, i, j, _: (b, h, 0, i)),
            ],
            scratch_shapes=[
                pltpu.VMEM((bq, 128), jnp.float32),
                pltpu.VMEM((bq, 128), jnp.float32),
                pltpu.VMEM((bq, dim), jnp.float32),
            ],
        ),
        out_shape=[
            result_type(q.shape, q.dtype, *operands),
            result_type((batch, heads, 1, queries), jnp.float32, *operands),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=vmem_limit(),
        ),
        cost_estimate=forward_cost(spec, blocks, q, k, operands[3:]),
        interpret=interpret,
        name="attention_forward",
    )(bounds.reshape(-1), *in_main_memory(interpret, *operands))  # fmt: skip
    return out, lse[:, :, 0]
