"""The forward Triton kernel behind `attention`."""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from kernels_pallas.attention.gpu_blocks import (
    Pairs,
    Tile,
    View,
    load_rows,
    store_rows,
    visit_blocks,
)
from kernels_pallas.attention.scores import (
    LN2,
    LOG2E,
    ScoreSpec,
    block_bounds,
    dot,
    logits,
    quotient,
)
from kernels_pallas.tiling import ceil_div, result_type

__all__ = ["attention_forward", "pair_specs", "pairs_of"]


def pair_specs(group_of, bias, mask, q_seg, k_seg):
    """Block specs that hand a program the bias, mask and segments of its batch and head.

    Args:
      group_of: Maps the grid position to (batch, head).
      bias: [B|1, H|1, Tq|1, Tk] or None.
      mask: The same.
      q_seg: [B, Tq] or None.
      k_seg: [B, Tk] or None.
    """
    specs = []
    for array in (bias, mask):
        if array is None:
            specs.append(None)
            continue
        per_batch, per_head = (int(size > 1) for size in array.shape[:2])

        def index(*grid, per_batch=per_batch, per_head=per_head):
            b, h = group_of(*grid)
            return b * per_batch, h * per_head, 0, 0

        rows = None if array.shape[2] == 1 else array.shape[2]
        specs.append(pl.BlockSpec((None, None, rows, array.shape[3]), index))
    for array in (q_seg, k_seg):
        specs.append(
            None
            if array is None
            else pl.BlockSpec((None, array.shape[1]), lambda *grid: (group_of(*grid)[0], 0))
        )
    return specs


def pairs_of(bias_ref, mask_ref, q_seg_ref, k_seg_ref) -> Pairs:
    """The refs that `pair_specs` makes, as `Pairs`."""
    views = (
        None if ref is None else View(ref) for ref in (bias_ref, mask_ref, q_seg_ref, k_seg_ref)
    )
    lines = (ref is not None and len(ref.shape) == 1 for ref in (bias_ref, mask_ref))
    return Pairs(*views, *lines)


def _forward_kernel(
    bounds_ref, q_ref, k_ref, v_ref, bias_ref, mask_ref, q_seg_ref, k_seg_ref, o_ref, lse_ref,
    *, spec: ScoreSpec, tile: Tile,
):  # fmt: skip
    pairs = pairs_of(bias_ref, mask_ref, q_seg_ref, k_seg_ref)
    rows = pl.num_programs(0)
    # The last rows see the most keys of a causal band: they start first.
    row = rows - 1 - pl.program_id(0)
    batch = pl.program_id(2)
    first_query = row * tile.queries
    q = load_rows(View(q_ref), first_query, tile.queries, spec.queries, True)

    def visit(block, carry, masked: bool):
        top, total, out = carry
        first_key = block * tile.keys
        k = load_rows(View(k_ref), first_key, tile.keys, spec.keys, masked)
        s = logits(dot(q, k, 1, 1), spec)
        if bias_ref is not None:
            s = s + pairs.bias_tile(first_query, first_key, tile, spec, False) * LOG2E
        if masked:
            allowed = pairs.allowed(first_query, first_key, tile, spec, False)
            if allowed is not None:
                s = jnp.where(allowed, s, -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(s, axis=1))
        shift = jnp.where(new_top == -jnp.inf, 0.0, new_top)
        p = jnp.exp2(s - shift[:, None])
        keep = jnp.exp2(top - shift)
        v = load_rows(View(v_ref), first_key, tile.keys, spec.keys, masked)
        out = out * keep[:, None] + dot(p.astype(v.dtype), v, 1, 0)
        return new_top, total * keep + jnp.sum(p, axis=1), out

    carry = (
        jnp.full((tile.queries,), -jnp.inf, jnp.float32),
        jnp.zeros((tile.queries,), jnp.float32),
        jnp.zeros((tile.queries, q.shape[1]), jnp.float32),
    )
    never_full = mask_ref is not None or q_seg_ref is not None
    top, total, out = visit_blocks(
        bounds_ref, (batch if q_seg_ref is not None else 0) * rows + row, visit, carry,
        head_masked=spec.left is not None, full=not never_full,
        tail_masked=(
            spec.left is not None or spec.right is not None or spec.keys % tile.keys != 0
        ),
    )  # fmt: skip
    empty = total == 0.0
    total = jnp.where(empty, 1.0, total)
    store_rows(View(o_ref), first_query, out / total[:, None], spec.queries)
    lse = jnp.where(empty, -jnp.inf, top * LN2 + jnp.log(total))
    plgpu.store(
        lse_ref.at[pl.ds(first_query, tile.queries)], lse,
        mask=jnp.arange(tile.queries) < spec.queries - first_query,
    )  # fmt: skip


def attention_forward(
    spec: ScoreSpec,
    tile: Tile,
    interpret: bool,
    q: Float[Array, "batch queries heads dim"],
    k: Float[Array, "batch keys kv_heads dim"],
    v: Float[Array, "batch keys kv_heads dim"],
    bias: Float[Array, "batch_or_1 heads_or_1 queries_or_1 keys"] | None,
    mask: Int[Array, "batch_or_1 heads_or_1 queries_or_1 keys"] | None,
    q_seg: Int[Array, "batch queries"] | None,
    k_seg: Int[Array, "batch keys"] | None,
) -> tuple[Float[Array, "batch queries heads dim"], Float[Array, "batch heads queries"]]:
    """Output and float32 log-sum-exp of each row; 0 and -inf for a row that sees no key."""
    batch, queries, heads, dim = q.shape
    keys, kv_heads = k.shape[1:3]
    group = heads // kv_heads
    bounds = block_bounds(
        spec, tile.queries, tile.keys, rows_are_queries=True, row_segments=q_seg,
        col_segments=k_seg, dense_mask=mask is not None,
    ).reshape(-1)  # fmt: skip
    of_query = pl.BlockSpec((None, queries, None, dim), lambda i, h, b: (b, 0, h, 0))
    of_key = pl.BlockSpec((None, keys, None, dim), lambda i, h, b: (b, 0, quotient(h, group), 0))
    operands = (bounds, q, k, v, bias, mask, q_seg, k_seg)
    present = [array for array in operands if array is not None]
    return pl.pallas_call(
        functools.partial(_forward_kernel, spec=spec, tile=tile),
        grid=(ceil_div(queries, tile.queries), heads, batch),
        in_specs=[
            pl.BlockSpec(bounds.shape, lambda i, h, b: (0,)),
            of_query,
            of_key,
            of_key,
            *pair_specs(lambda i, h, b: (b, h), bias, mask, q_seg, k_seg),
        ],
        out_specs=[of_query, pl.BlockSpec((None, None, queries), lambda i, h, b: (b, h, 0))],
        out_shape=[
            result_type(q.shape, q.dtype, *present),
            result_type((batch, heads, queries), jnp.float32, *present),
        ],
        compiler_params=tile.params(),
        interpret=interpret,
        name="attention_forward",
    )(*operands)
