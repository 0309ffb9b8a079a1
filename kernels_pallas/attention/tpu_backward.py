"""The backward Mosaic kernels behind `attention`.

One kernel makes dq, dk and dv. It works on transposed tiles of scores [keys, queries], where the
log-sum-exp and the row sums of ``o * do`` lie along the lanes. A stretch of keys
stays in VMEM with its accumulators while the queries of every head that shares it pass by; when the
keys take more than one stretch, each makes a part of dq in float32 and XLA adds the parts. Nothing
depends on the order in which blocks happen to run, so that results repeat bit by bit.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from kernels_pallas.attention.scores import (
    LOG2E,
    ScoreSpec,
    block_bounds,
    dot,
    in_band,
    logits,
    transform_slope,
)
from kernels_pallas.attention.tpu_blocks import (
    Blocks,
    backward_cost,
    in_main_memory,
    segment_column,
    tile_rows,
    vmem_limit,
)
from kernels_pallas.tiling import ceil_div, result_type

__all__ = ["attention_backward", "clean_row", "weights_and_slopes"]


def clean_row(row, first, length: int, fill_infinite: bool):
    """Zeroes entries past the end, and infinite ones (the log-sum-exp of a row with no key)."""
    lane = jax.lax.broadcasted_iota(jnp.int32, row.shape, 1)
    keep = lane < length - first
    if fill_infinite:
        keep = keep & (row != -jnp.inf)
    return jnp.where(keep, row, 0.0)


def weights_and_slopes(
    q, do, k, v, lse, delta, q_seg, k_seg, bias, mask, first_query, first_key, spec, masked
):
    """Transposed tile of weights and of logit gradients, [keys, queries], float32.

    Operands are tiles whose rows past the end are zero when ``masked``; ``lse`` and ``delta`` are
    rows [1, queries], ``q_seg`` a row and ``k_seg`` a column, ``bias`` and ``mask`` [queries, keys]
    or [1, keys].
    """
    shape = (k.shape[0], q.shape[0])
    capped = logits(dot(k, q, 1, 1), spec)
    s = capped
    if bias is not None:
        s = s + _transposed(bias.astype(jnp.float32)) * LOG2E
    if masked:
        allowed = in_band(
            shape, 1, first_query, first_key, spec,
            check_queries=spec.queries % shape[1] != 0, check_keys=spec.keys % shape[0] != 0,
        )  # fmt: skip
        if q_seg is not None:
            same = q_seg == k_seg
            allowed = same if allowed is None else allowed & same
        if mask is not None:
            chosen = _transposed(mask.astype(jnp.int32)) != 0
            allowed = chosen if allowed is None else allowed & chosen
        if allowed is not None:
            s = jnp.where(allowed, s, -jnp.inf)
    p = jnp.exp2(s - lse * LOG2E)
    slope = transform_slope(capped, spec)
    ds = p * (dot(v, do, 1, 1) - delta)
    return p, ds, slope


def _transposed(tile):
    """[queries, keys] to [keys, queries]; a single row becomes a column."""
    if tile.shape[0] == 1:
        return jnp.broadcast_to(tile, (128, tile.shape[1])).T[:, :1]
    return tile.T


def _backward_kernel(bounds_ref, *refs, spec: ScoreSpec, blocks: Blocks, parts: tuple[bool, ...]):
    segmented, has_bias, has_mask = parts
    refs = list(refs)
    q_ref, o_ref, do_ref, lse_ref, dlse_ref, k_ref, v_ref = refs[:7]
    del refs[:7]
    q_seg_ref, k_seg_ref = (refs.pop(0), refs.pop(0)) if segmented else (None, None)
    bias_ref = refs.pop(0) if has_bias else None
    mask_ref = refs.pop(0) if has_mask else None
    dq_ref, dk_ref, dv_ref, delta_ref, dq_acc, dk_acc, dv_acc = refs

    bq, bk = blocks.queries, blocks.keys
    key_blocks, query_blocks = blocks.key_stretch // bk, blocks.query_stretch // bq
    stretch, member, part = pl.program_id(2), pl.program_id(3), pl.program_id(4)
    key_total = ceil_div(spec.keys, bk)
    bounds_row = (pl.program_id(0) if segmented else 0) * key_total
    ragged_queries, ragged_keys = spec.queries % bq != 0, spec.keys % bk != 0

    @pl.when((member == 0) & (part == 0))
    def _():
        dk_acc[...] = jnp.zeros_like(dk_acc)
        dv_acc[...] = jnp.zeros_like(dv_acc)

    dq_acc[...] = jnp.zeros_like(dq_acc)

    def row_sums(i):
        queries = pl.ds(pl.multiple_of(i * bq, bq), bq)
        product = o_ref[queries, :].astype(jnp.float32) * do_ref[queries, :].astype(jnp.float32)
        total = jnp.broadcast_to(jnp.sum(product, axis=1, keepdims=True), (bq, 128))
        delta_ref[:, queries] = total.T[:1] - dlse_ref[:, queries]

    pl.loop(0, query_blocks)(row_sums)

    def key_block(j):
        keys = pl.ds(pl.multiple_of(j * bk, bk), bk)
        first_key = stretch * blocks.key_stretch + j * bk
        base = (bounds_row + stretch * key_blocks + j) * 4
        k, v = k_ref[keys, :], v_ref[keys, :]
        if ragged_keys:
            k = tile_rows(k, first_key, spec.keys)
            v = tile_rows(v, first_key, spec.keys)
        k_seg = segment_column(k_seg_ref[:, keys]) if segmented else None

        def query_block(i, masked: bool):
            queries = pl.ds(pl.multiple_of(i * bq, bq), bq)
            first_query = part * blocks.query_stretch + i * bq
            q, do = q_ref[queries, :], do_ref[queries, :]
            if masked and ragged_queries:
                q = tile_rows(q, first_query, spec.queries)
                do = tile_rows(do, first_query, spec.queries)
            dense = []
            for ref in (bias_ref, mask_ref):
                if ref is None:
                    dense.append(None)
                else:
                    dense.append(ref[queries if ref.shape[0] > 1 else slice(None), keys])
            p, ds, slope = weights_and_slopes(
                q, do, k, v,
                clean_row(lse_ref[:, queries], first_query, spec.queries, True),
                clean_row(delta_ref[:, queries], first_query, spec.queries, False),
                q_seg_ref[:, queries] if segmented else None,
                k_seg, *dense, first_query, first_key, spec, masked,
            )  # fmt: skip
            if slope is not None:
                ds = ds * slope
            dv_acc[keys, :] += dot(p.astype(do.dtype), do, 1, 0)
            ds = ds.astype(q.dtype)
            dk_acc[keys, :] += dot(ds, q, 1, 0)
            dq_acc[queries, :] += dot(ds, k, 0, 0)

        first, first_full, end_full, end = (
            jnp.clip(bounds_ref[base + n] - part * query_blocks, 0, query_blocks) for n in range(4)
        )
        never_full = segmented or has_mask
        if never_full:
            first_full = end_full = end
        if never_full or spec.right is not None or ragged_keys:
            pl.loop(first, first_full)(functools.partial(query_block, masked=True))
        if not never_full:
            pl.loop(first_full, end_full)(functools.partial(query_block, masked=False))
            pl.loop(end_full, end)(functools.partial(query_block, masked=True))

    last = jnp.minimum(key_blocks, key_total - stretch * key_blocks)
    pl.loop(0, last)(key_block)
    dq_ref[...] = (dq_acc[...] * spec.scale).astype(dq_ref.dtype)

    @pl.when((member == pl.num_programs(3) - 1) & (part == pl.num_programs(4) - 1))
    def _():
        dk_ref[...] = (dk_acc[...] * spec.scale).astype(dk_ref.dtype)
        dv_ref[...] = dv_acc[...].astype(dv_ref.dtype)


def attention_backward(
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
    out: Float[Array, "batch heads queries dim"],
    lse: Float[Array, "batch heads queries"],
    do: Float[Array, "batch heads queries dim"],
    dlse: Float[Array, "batch heads queries"],
) -> tuple[Array, Array, Array]:
    """Gradients of q, k and v from the forward results and their gradients ``do`` and ``dlse``."""
    batch, heads, queries, dim = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    group = heads // kv_heads
    bq, stretch, part = blocks.queries, blocks.key_stretch, blocks.query_stretch
    stretches, pieces = ceil_div(keys, stretch), ceil_div(queries, part)
    segmented = q_seg is not None
    bounds = block_bounds(
        spec, blocks.keys, bq, rows_are_queries=False, row_segments=k_seg, col_segments=q_seg,
        dense_mask=mask is not None,
    )  # fmt: skip

    def of_queries(b, c, s, g, i, _):
        return b, c * group + g, i, 0

    def of_query_rows(b, c, s, g, i, _):
        return b, c * group + g, 0, i

    def of_keys(b, c, s, g, i, _):
        return b, c, s, 0

    def per_pair(array):
        bb, bh, br = (int(size > 1) for size in array.shape[:3])

        def index(b, c, s, g, i, _):
            return b * bb, (c * group + g) * bh, i * br, s

        return pl.BlockSpec((None, None, part if br else 1, stretch), index)

    query_spec = pl.BlockSpec((None, None, part, dim), of_queries)
    row_spec = pl.BlockSpec((None, None, 1, part), of_query_rows)
    key_spec = pl.BlockSpec((None, None, stretch, dim), of_keys, pipeline_mode=pl.Buffered(1))
    operands = [q, out, do, lse[:, :, None], dlse[:, :, None], k, v]
    in_specs = [query_spec] * 3 + [row_spec] * 2 + [key_spec] * 2
    if segmented:
        operands += [q_seg[:, None], k_seg[:, None]]
        in_specs += [
            pl.BlockSpec((None, 1, part), lambda b, c, s, g, i, _: (b, 0, i)),
            pl.BlockSpec((None, 1, stretch), lambda b, c, s, g, i, _: (b, 0, s)),
        ]
    extra = [array for array in (bias, mask) if array is not None]
    operands += extra
    in_specs += [per_pair(array) for array in extra]
    gradient_spec = pl.BlockSpec((None, None, stretch, dim), of_keys)
    dq, dk, dv = pl.pallas_call(
        functools.partial(
            _backward_kernel, spec=spec, blocks=blocks,
            parts=(segmented, bias is not None, mask is not None),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, kv_heads, stretches, group, pieces),
            in_specs=in_specs,
            out_specs=[
                pl.BlockSpec(
                    (None, None, None, part, dim),
                    lambda b, c, s, g, i, _: (s, b, c * group + g, i, 0),
                ),
                gradient_spec,
                gradient_spec,
            ],
            scratch_shapes=[
                pltpu.VMEM((1, part), jnp.float32),
                pltpu.VMEM((part, dim), jnp.float32),
                pltpu.VMEM((stretch, dim), jnp.float32),
                pltpu.VMEM((stretch, dim), jnp.float32),
            ],
        ),
        out_shape=[
            result_type(
                (stretches, *q.shape), q.dtype if stretches == 1 else jnp.float32, *operands
            ),
            result_type(k.shape, k.dtype, *operands),
            result_type(v.shape, v.dtype, *operands),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=vmem_limit(),
        ),
        cost_estimate=backward_cost(spec, blocks, q, k, extra),
        interpret=interpret,
        name="attention_backward",
    )(bounds.reshape(-1), *in_main_memory(interpret, *operands))  # fmt: skip
    return dq[0] if stretches == 1 else dq.sum(axis=0).astype(q.dtype), dk, dv
