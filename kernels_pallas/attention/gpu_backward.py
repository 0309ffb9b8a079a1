"""The backward Triton kernels behind `attention`."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from kernels_pallas.attention.gpu_blocks import (
    Pairs,
    Tile,
    View,
    load_line,
    load_rows,
    store_rows,
    visit_blocks,
)
from kernels_pallas.attention.gpu_forward import pair_specs, pairs_of
from kernels_pallas.attention.scores import (
    LOG2E,
    ScoreSpec,
    block_bounds,
    dot,
    logits,
    quotient,
    transform_slope,
)
from kernels_pallas.tiling import ceil_div, result_type

__all__ = ["bias_gradient", "key_gradients", "query_gradient"]


def _rows_of_queries(
    q: View, do: View, lse: View, delta: View, first: Int[Array, ""], tile: Tile, length: int
) -> tuple[Array, Array, Array, Array]:
    """Queries, output gradients, log-sum-exp in units of log2 and row sums of one block."""
    lse = load_line(lse, first, tile.queries, length)
    lse = jnp.where(lse == -jnp.inf, 0.0, lse * LOG2E)
    q, do = (load_rows(view, first, tile.queries, length, True) for view in (q, do))
    return q, do, lse, load_line(delta, first, tile.queries, length)


def _weights_and_slopes(
    q, do, lse, delta, k, v, first_query, first_key, pairs: Pairs, spec, tile, masked, transposed
):
    """Weights and logit gradients of a tile, [queries, keys] or transposed, and the cap's slope."""
    products = dot(k, q, 1, 1) if transposed else dot(q, k, 1, 1)
    capped = logits(products, spec)
    s = capped
    if pairs.bias is not None:
        s = s + pairs.bias_tile(first_query, first_key, tile, spec, transposed) * LOG2E
    if masked:
        allowed = pairs.allowed(first_query, first_key, tile, spec, transposed)
        if allowed is not None:
            s = jnp.where(allowed, s, -jnp.inf)
    per_row = (lambda x: x[None, :]) if transposed else (lambda x: x[:, None])
    p = jnp.exp2(s - per_row(lse))
    slopes = dot(v, do, 1, 1) if transposed else dot(do, v, 1, 1)
    return p, p * (slopes - per_row(delta)), transform_slope(capped, spec)


def _query_kernel(
    bounds_ref, q_ref, do_ref, lse_ref, delta_ref, k_ref, v_ref,
    bias_ref, mask_ref, q_seg_ref, k_seg_ref, dq_ref, *, spec: ScoreSpec, tile: Tile,
):  # fmt: skip
    pairs = pairs_of(bias_ref, mask_ref, q_seg_ref, k_seg_ref)
    rows = pl.num_programs(0)
    row = rows - 1 - pl.program_id(0)
    batch = pl.program_id(2)
    first_query = row * tile.queries
    q, do, lse, delta = _rows_of_queries(
        View(q_ref), View(do_ref), View(lse_ref), View(delta_ref), first_query, tile, spec.queries
    )

    def visit(block, dq, masked: bool):
        first_key = block * tile.keys
        k = load_rows(View(k_ref), first_key, tile.keys, spec.keys, masked)
        v = load_rows(View(v_ref), first_key, tile.keys, spec.keys, masked)
        _, ds, slope = _weights_and_slopes(
            q, do, lse, delta, k, v, first_query, first_key, pairs, spec, tile, masked, False
        )
        if slope is not None:
            ds = ds * slope
        return dq + dot(ds.astype(k.dtype), k, 1, 0)

    dq = visit_blocks(
        bounds_ref, (batch if q_seg_ref is not None else 0) * rows + row, visit,
        jnp.zeros(q.shape, jnp.float32),
        head_masked=spec.left is not None, full=mask_ref is None and q_seg_ref is None,
        tail_masked=(
            spec.left is not None or spec.right is not None or spec.keys % tile.keys != 0
        ),
    )  # fmt: skip
    store_rows(View(dq_ref), first_query, dq * spec.scale, spec.queries)


def _key_kernel(
    bounds_ref, q_ref, do_ref, lse_ref, delta_ref, k_ref, v_ref,
    bias_ref, mask_ref, q_seg_ref, k_seg_ref, dk_ref, dv_ref,
    *, spec: ScoreSpec, tile: Tile, group: int,
):  # fmt: skip
    row, batch = pl.program_id(0), pl.program_id(2)
    rows = pl.num_programs(0)
    first_key = row * tile.keys
    k = load_rows(View(k_ref), first_key, tile.keys, spec.keys, True)
    v = load_rows(View(v_ref), first_key, tile.keys, spec.keys, True)

    def member(g, carry):
        def head_of(ref):
            return None if ref is None else View(ref, (g if ref.shape[0] > 1 else g * 0,))

        pairs = dataclasses.replace(
            pairs_of(None, None, q_seg_ref, k_seg_ref),
            bias=head_of(bias_ref), bias_line=bias_ref is not None and len(bias_ref.shape) == 2,
            mask=head_of(mask_ref), mask_line=mask_ref is not None and len(mask_ref.shape) == 2,
        )  # fmt: skip

        def visit(block, carry, masked: bool):
            dk, dv = carry
            first_query = block * tile.queries
            q, do, lse, delta = _rows_of_queries(
                View(q_ref, (), (g,)), View(do_ref, (), (g,)), View(lse_ref, (g,)),
                View(delta_ref, (g,)),
                first_query, tile, spec.queries,
            )  # fmt: skip
            p, ds, slope = _weights_and_slopes(
                q, do, lse, delta, k, v, first_query, first_key, pairs, spec, tile, masked, True
            )
            if slope is not None:
                ds = ds * slope
            dv = dv + dot(p.astype(do.dtype), do, 1, 0)
            return dk + dot(ds.astype(q.dtype), q, 1, 0), dv

        return visit_blocks(
            bounds_ref, (batch if q_seg_ref is not None else 0) * rows + row, visit, carry,
            head_masked=spec.right is not None or spec.keys % tile.keys != 0,
            full=mask_ref is None and q_seg_ref is None,
            tail_masked=True,
        )  # fmt: skip

    zero = jnp.zeros(k.shape, jnp.float32)
    dk, dv = jax.lax.fori_loop(0, group, member, (zero, zero))
    store_rows(View(dk_ref), first_key, dk * spec.scale, spec.keys)
    store_rows(View(dv_ref), first_key, dv, spec.keys)


def _split(n: Int[Array, ""], size: int) -> tuple[Int[Array, ""], Int[Array, ""]]:
    """Quotient and remainder of a number that isn't negative."""
    whole = quotient(n, size)
    return whole, n - whole * size


def _bias_kernel(
    bounds_ref, q_ref, do_ref, lse_ref, delta_ref, k_ref, v_ref,
    bias_ref, mask_ref, q_seg_ref, k_seg_ref, db_ref,
    *, spec: ScoreSpec, tile: Tile, group: int, sums: tuple[int, int, int],
):  # fmt: skip
    own_batch, own_head = pl.program_id(1), pl.program_id(2)
    batches, heads, row_blocks = sums
    columns = ceil_div(spec.keys, tile.keys)
    own_row, column = _split(pl.program_id(0), columns)
    first_key = column * tile.keys
    rows = ceil_div(spec.queries, tile.queries)
    single_row = bias_ref.shape[2] == 1

    def add(n, total):
        n, row = _split(n, row_blocks)
        b, h = _split(n, heads)
        b = b if batches > 1 else own_batch
        h = h if heads > 1 else own_head
        row = row if row_blocks > 1 else own_row
        first_query = row * tile.queries

        def of_pair(ref):
            if ref is None:
                return None
            lead = (b if ref.shape[0] > 1 else b * 0, h if ref.shape[1] > 1 else h * 0)
            return View(ref, lead if ref.shape[2] > 1 else (*lead, b * 0))

        def of_batch(ref):
            return None if ref is None else View(ref, (b,))

        base = ((b if q_seg_ref is not None else 0) * rows + row) * 4

        def compute():
            pairs = Pairs(
                of_pair(bias_ref), of_pair(mask_ref), of_batch(q_seg_ref), of_batch(k_seg_ref),
                bias_line=bias_ref.shape[2] == 1,
                mask_line=mask_ref is not None and mask_ref.shape[2] == 1,
            )  # fmt: skip
            q, do, lse, delta = _rows_of_queries(
                View(q_ref, (b,), (h,)), View(do_ref, (b,), (h,)), View(lse_ref, (b, h)),
                View(delta_ref, (b, h)),
                first_query, tile, spec.queries,
            )  # fmt: skip
            k = load_rows(
                View(k_ref, (b,), (quotient(h, group),)), first_key, tile.keys, spec.keys, True
            )
            v = load_rows(
                View(v_ref, (b,), (quotient(h, group),)), first_key, tile.keys, spec.keys, True
            )
            _, ds, _ = _weights_and_slopes(
                q, do, lse, delta, k, v, first_query, first_key, pairs, spec, tile, True, False
            )
            if single_row:
                inside = jnp.arange(tile.queries)[:, None] < spec.queries - first_query
                return jnp.sum(jnp.where(inside, ds, 0.0), axis=0)
            return ds

        seen = (column >= bounds_ref[base]) & (column < bounds_ref[base + 3])
        return total + jax.lax.cond(seen, compute, lambda: jnp.zeros_like(total))

    shape = (tile.keys,) if single_row else (tile.queries, tile.keys)
    total = jax.lax.fori_loop(0, batches * heads * row_blocks, add, jnp.zeros(shape, jnp.float32))
    columns_inside = jnp.arange(tile.keys) < spec.keys - first_key
    if single_row:
        plgpu.store(db_ref.at[pl.ds(first_key, tile.keys)], total, mask=columns_inside)
    else:
        first_query = own_row * tile.queries
        inside = jnp.arange(tile.queries)[:, None] < spec.queries - first_query
        plgpu.store(
            db_ref.at[pl.ds(first_query, tile.queries), pl.ds(first_key, tile.keys)], total,
            mask=inside & columns_inside[None, :],
        )  # fmt: skip


def query_gradient(
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
    lse: Float[Array, "batch heads queries"],
    delta: Float[Array, "batch heads queries"],
    do: Float[Array, "batch queries heads dim"],
) -> Float[Array, "batch queries heads dim"]:
    """Gradient of q; ``delta`` is the row sum of o * do less the gradient of the log-sum-exp."""
    batch, queries, heads, dim = q.shape
    keys, kv_heads = k.shape[1:3]
    group = heads // kv_heads
    bounds = block_bounds(
        spec, tile.queries, tile.keys, rows_are_queries=True, row_segments=q_seg,
        col_segments=k_seg, dense_mask=mask is not None,
    ).reshape(-1)  # fmt: skip
    of_query = pl.BlockSpec((None, queries, None, dim), lambda i, h, b: (b, 0, h, 0))
    of_row = pl.BlockSpec((None, None, queries), lambda i, h, b: (b, h, 0))
    of_key = pl.BlockSpec((None, keys, None, dim), lambda i, h, b: (b, 0, quotient(h, group), 0))
    operands = (bounds, q, do, lse, delta, k, v, bias, mask, q_seg, k_seg)
    return pl.pallas_call(
        functools.partial(_query_kernel, spec=spec, tile=tile),
        grid=(ceil_div(queries, tile.queries), heads, batch),
        in_specs=[
            pl.BlockSpec(bounds.shape, lambda i, h, b: (0,)),
            of_query, of_query, of_row, of_row, of_key, of_key,
            *pair_specs(lambda i, h, b: (b, h), bias, mask, q_seg, k_seg),
        ],
        out_specs=of_query,
        out_shape=result_type(q.shape, q.dtype, *(x for x in operands if x is not None)),
        compiler_params=tile.params(),
        interpret=interpret,
        name="attention_dq",
    )(*operands)  # fmt: skip


def key_gradients(
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
    lse: Float[Array, "batch heads queries"],
    delta: Float[Array, "batch heads queries"],
    do: Float[Array, "batch queries heads dim"],
) -> tuple[Float[Array, "batch keys kv_heads dim"], Float[Array, "batch keys kv_heads dim"]]:
    """Gradients of k and v, summed over the query heads that share them."""
    batch, queries, heads, dim = q.shape
    keys, kv_heads = k.shape[1:3]
    group = heads // kv_heads
    bounds = block_bounds(
        spec, tile.keys, tile.queries, rows_are_queries=False, row_segments=k_seg,
        col_segments=q_seg, dense_mask=mask is not None,
    ).reshape(-1)  # fmt: skip
    of_query = pl.BlockSpec((None, queries, group, dim), lambda j, c, b: (b, 0, c, 0))
    of_row = pl.BlockSpec((None, group, queries), lambda j, c, b: (b, c, 0))
    of_key = pl.BlockSpec((None, keys, None, dim), lambda j, c, b: (b, 0, c, 0))

    def of_pairs(array):
        if array is None:
            return None
        per_batch, per_head = (int(size > 1) for size in array.shape[:2])
        rows = None if array.shape[2] == 1 else array.shape[2]
        shape = (None, group if per_head else 1, rows, array.shape[3])
        return pl.BlockSpec(shape, lambda j, c, b: (b * per_batch, c * per_head, 0, 0))

    segments = pair_specs(lambda j, c, b: (b, c), None, None, q_seg, k_seg)[2:]
    operands = (bounds, q, do, lse, delta, k, v, bias, mask, q_seg, k_seg)
    present = [array for array in operands if array is not None]
    return pl.pallas_call(
        functools.partial(_key_kernel, spec=spec, tile=tile, group=group),
        grid=(ceil_div(keys, tile.keys), kv_heads, batch),
        in_specs=[
            pl.BlockSpec(bounds.shape, lambda j, c, b: (0,)),
            of_query, of_query, of_row, of_row, of_key, of_key,
            of_pairs(bias), of_pairs(mask), *segments,
        ],
        out_specs=[of_key, of_key],
        out_shape=[result_type(x.shape, x.dtype, *present) for x in (k, v)],
        compiler_params=tile.params(),
        interpret=interpret,
        name="attention_dkv",
    )(*operands)  # fmt: skip


def bias_gradient(
    spec: ScoreSpec,
    tile: Tile,
    interpret: bool,
    q: Float[Array, "batch queries heads dim"],
    k: Float[Array, "batch keys kv_heads dim"],
    v: Float[Array, "batch keys kv_heads dim"],
    bias: Float[Array, "batch_or_1 heads_or_1 queries_or_1 keys"],
    mask: Int[Array, "batch_or_1 heads_or_1 queries_or_1 keys"] | None,
    q_seg: Int[Array, "batch queries"] | None,
    k_seg: Int[Array, "batch keys"] | None,
    lse: Float[Array, "batch heads queries"],
    delta: Float[Array, "batch heads queries"],
    do: Float[Array, "batch queries heads dim"],
) -> Float[Array, "batch_or_1 heads_or_1 queries_or_1 keys"]:
    """Gradient of the bias, summed over the axes that it broadcasts along."""
    batch, queries, heads, _ = q.shape
    keys, kv_heads = k.shape[1:3]
    rows = ceil_div(queries, tile.queries)
    bounds = block_bounds(
        spec, tile.queries, tile.keys, rows_are_queries=True, row_segments=q_seg,
        col_segments=k_seg, dense_mask=True,
    ).reshape(-1)  # fmt: skip
    per_batch, per_head, per_row = (size > 1 for size in bias.shape[:3])
    operands = (bounds, q, do, lse, delta, k, v, bias, mask, q_seg, k_seg)

    def whole(array):
        if array is None:
            return None
        return pl.BlockSpec(array.shape, lambda *grid, rank=array.ndim: (0,) * rank)

    out = pl.pallas_call(
        functools.partial(
            _bias_kernel, spec=spec, tile=tile, group=heads // kv_heads,
            sums=(1 if per_batch else batch, 1 if per_head else heads, 1 if per_row else rows),
        ),
        grid=((rows if per_row else 1) * ceil_div(keys, tile.keys), *bias.shape[:2]),
        in_specs=[whole(array) for array in operands],
        out_specs=pl.BlockSpec(
            (None, None, bias.shape[2] if per_row else None, keys), lambda ij, b, h: (b, h, 0, 0)
        ),
        out_shape=result_type(
            bias.shape, jnp.float32, *(x for x in operands if x is not None)
        ),
        compiler_params=tile.params(),
        interpret=interpret,
        name="attention_bias_gradient",
    )(*operands)  # fmt: skip
    return out.astype(bias.dtype)
