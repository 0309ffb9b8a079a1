"""The Mosaic kernel for the gradient of `attention`'s bias.

It stands apart from the other gradients so that a program that doesn't ask for it doesn't run it,
and so that a bias that broadcasts over batch, heads or queries is summed on the way out.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from kernels_pallas.attention.scores import ScoreSpec, block_bounds, quotient
from kernels_pallas.attention.tpu_backward import clean_row, weights_and_slopes
from kernels_pallas.attention.tpu_blocks import (
    Blocks,
    in_main_memory,
    segment_column,
    tile_rows,
    vmem_limit,
)
from kernels_pallas.tiling import ceil_div, result_type

__all__ = ["bias_gradient"]


def _bias_kernel(bounds_ref, *refs, spec: ScoreSpec, blocks: Blocks, parts: tuple[bool, ...], axes):
    segmented, has_mask = parts
    refs = list(refs)
    q_ref, do_ref, lse_ref, delta_ref, k_ref, v_ref = refs[:6]
    del refs[:6]
    q_seg_ref, k_seg_ref = (refs.pop(0), refs.pop(0)) if segmented else (None, None)
    bias_ref = refs.pop(0)
    mask_ref = refs.pop(0) if has_mask else None
    (out_ref,) = refs
    batch_id, row, column = pl.program_id(axes[0]), pl.program_id(axes[1]), pl.program_id(3)
    bq, bk = blocks.queries, blocks.keys

    @pl.when((pl.program_id(4) == 0) & (pl.program_id(5) == 0) & (pl.program_id(6) == 0))
    def _():
        out_ref[...] = jnp.zeros_like(out_ref)

    rows = ceil_div(spec.queries, bq)
    base = ((batch_id if segmented else 0) * rows + row) * 4

    @pl.when((column >= bounds_ref[base]) & (column < bounds_ref[base + 3]))
    def _():
        first_query, first_key = row * bq, column * bk
        q, do, k, v = q_ref[...], do_ref[...], k_ref[...], v_ref[...]
        if spec.queries % bq:
            q, do = (tile_rows(x, first_query, spec.queries) for x in (q, do))
        if spec.keys % bk:
            k, v = (tile_rows(x, first_key, spec.keys) for x in (k, v))
        _, ds, _ = weights_and_slopes(
            q, do, k, v,
            clean_row(lse_ref[...], first_query, spec.queries, True),
            clean_row(delta_ref[...], first_query, spec.queries, False),
            q_seg_ref[...] if segmented else None,
            segment_column(k_seg_ref[...]) if segmented else None,
            bias_ref[...], None if mask_ref is None else mask_ref[...],
            first_query, first_key, spec, True,
        )  # fmt: skip
        if out_ref.shape[0] == 1:
            column_sum = jnp.sum(ds, axis=1, keepdims=True)
            out_ref[...] += jnp.broadcast_to(column_sum, (bk, 128)).T[:1]
        else:
            out_ref[...] += ds.T


def bias_gradient(
    spec: ScoreSpec,
    blocks: Blocks,
    interpret: bool,
    q: Float[Array, "batch heads queries dim"],
    k: Float[Array, "batch kv_heads keys dim"],
    v: Float[Array, "batch kv_heads keys dim"],
    bias: Float[Array, "batch_or_1 heads_or_1 queries_or_1 keys"],
    mask: Int[Array, "batch_or_1 heads_or_1 queries_or_1 keys"] | None,
    q_seg: Int[Array, "batch queries"] | None,
    k_seg: Int[Array, "batch keys"] | None,
    lse: Float[Array, "batch heads queries"],
    delta: Float[Array, "batch heads queries"],
    do: Float[Array, "batch heads queries dim"],
) -> Float[Array, "batch_or_1 heads_or_1 queries_or_1 keys"]:
    """Gradient of the bias, summed over the axes that it broadcasts along.

    ``delta`` is the row sum of o * do less the gradient of lse.
    """
    batch, heads, queries, dim = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    group = heads // kv_heads
    bq, bk = blocks.queries, blocks.keys
    rows = ceil_div(queries, bq)
    segmented = q_seg is not None
    bounds = block_bounds(
        spec, bq, bk, rows_are_queries=True, row_segments=q_seg, col_segments=k_seg,
        dense_mask=True,
    )  # fmt: skip
    per_batch, per_head, per_row = (size > 1 for size in bias.shape[:3])
    # Axes 0 to 3 of the grid own a block of the result; axes 4 to 6 add to it.
    grid = (
        batch if per_batch else 1, heads if per_head else 1, rows if per_row else 1,
        ceil_div(keys, bk),
        1 if per_batch else batch, 1 if per_head else heads, 1 if per_row else rows,
    )  # fmt: skip

    def place(g):
        b, h, i = (
            g[n] if own else g[n + 4] for n, own in enumerate((per_batch, per_head, per_row))
        )
        return b, h, i, g[3]

    def spec_of(shape, index):
        return pl.BlockSpec(shape, lambda *g: index(*place(g)))

    def per_pair(array):
        bb, bh, br = (int(size > 1) for size in array.shape[:3])
        return spec_of(
            (None, None, bq if br else 1, bk), lambda b, h, i, j: (b * bb, h * bh, i * br, j)
        )

    query_spec = spec_of((None, None, bq, dim), lambda b, h, i, j: (b, h, i, 0))
    row_spec = spec_of((None, None, 1, bq), lambda b, h, i, j: (b, h, 0, i))
    key_spec = spec_of((None, None, bk, dim), lambda b, h, i, j: (b, quotient(h, group), j, 0))
    operands = [q, do, lse[:, :, None], delta[:, :, None], k, v]
    in_specs = [query_spec, query_spec, row_spec, row_spec, key_spec, key_spec]
    if segmented:
        operands += [q_seg[:, None], k_seg[:, None]]
        in_specs += [
            spec_of((None, 1, bq), lambda b, h, i, j: (b, 0, i)),
            spec_of((None, 1, bk), lambda b, h, i, j: (b, 0, j)),
        ]
    operands.append(bias)
    in_specs.append(per_pair(bias))
    if mask is not None:
        operands.append(mask)
        in_specs.append(per_pair(mask))
    out = pl.pallas_call(
        functools.partial(
            _bias_kernel, spec=spec, blocks=blocks, parts=(segmented, mask is not None),
            axes=(0 if per_batch else 4, 2 if per_row else 6),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=grid,
            in_specs=in_specs,
            out_specs=per_pair(bias),
        ),
        out_shape=result_type(bias.shape, jnp.float32, *operands),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",) * 4 + ("arbitrary",) * 3,
            vmem_limit_bytes=vmem_limit(),
        ),
        interpret=interpret,
        name="attention_bias_gradient",
    )(bounds.reshape(-1), *in_main_memory(interpret, *operands))  # fmt: skip
    return out.astype(bias.dtype)
