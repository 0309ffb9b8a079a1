"""Cases about the XLA paths of the kernels on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.attention import attention
from kernels_pallas.block_sparse_attention import BlockPattern, block_sparse_attention
from kernels_pallas.grouped_matmul import grouped_matmul
from kernels_pallas.sparsegen import sparsegen
from tools.bench.timing import Result, race

__all__ = ["attention_memory", "attention_speed", "block_sparse", "grouped", "sparsegen_speed"]

# Rows, and the matrices' two sizes.
_NARROW, _WIDE = (8192, 256, 512), (16384, 512, 512)


def _vjp(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(cotangent: jax.Array, *args: jax.Array) -> Any:
        return jax.vjp(function, *args)[1](cotangent)

    return jax.jit(run)


def _skewed(num_groups: int, rows: int) -> np.ndarray:
    share = 1 / np.arange(1, num_groups + 1)
    sizes = np.floor(rows * share / share.sum()).astype(np.int32)
    sizes[0] += rows - sizes.sum()
    return sizes


def _dense(x: jax.Array, w: jax.Array) -> jax.Array:
    return x @ w


def _dense_and_gradients(dy: jax.Array, x: jax.Array, w: jax.Array) -> Any:
    y, pullback = jax.vjp(_dense, x, w)
    return y, pullback(dy)


def _grouped_and_gradients(dy: jax.Array, x: jax.Array, w: jax.Array, sizes: jax.Array) -> Any:
    y, pullback = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes), x, w)
    return y, pullback(dy)


def grouped(turns: int = 9) -> Iterator[Result]:
    """Grouped matmul against one plain matmul of the same FLOPs, and against ragged_dot.

    At (8192, 256, 512) 64 groups have 128 rows each, and the copies around each dot of XLA's CPU
    loop weigh; with 256 rows each and wider matrices arithmetic decides.
    """
    for num_groups, shape in ((16, _NARROW), (64, _NARROW), (64, _WIDE)):
        yield from _against_one_matmul(num_groups, shape, turns)
    yield _against_ragged_dot(16, _NARROW, max(turns // 3, 1))


def _operands(num_groups: int, shape: tuple[int, int, int]) -> list[jax.Array]:
    """Rows [rows, width], matrices [groups, width, outer], cotangent [rows, outer]."""
    rows, width, outer = shape
    shapes = ((rows, width), (num_groups, width, outer), (rows, outer))
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]


def _against_one_matmul(
    num_groups: int, shape: tuple[int, int, int], turns: int
) -> Iterator[Result]:
    rows, width, outer = shape
    x, w, dy = _operands(num_groups, shape)
    flops = 2.0 * rows * width * outer
    forward, dense = jax.jit(grouped_matmul), jax.jit(_dense)
    forward_both, dense_both = jax.jit(_grouped_and_gradients), jax.jit(_dense_and_gradients)
    size = f"{num_groups}" + (".wide" if shape == _WIDE else "")
    equal = np.full(num_groups, rows // num_groups, np.int32)
    for name, sizes in (("equal", equal), ("skewed", _skewed(num_groups, rows))):
        sizes = jnp.asarray(sizes)
        best = race(
            {
                "forward": partial(forward, x, w, sizes),
                "dense": partial(dense, x, w[0]),
                "both": partial(forward_both, dy, x, w, sizes),
                "dense_both": partial(dense_both, dy, x, w[0]),
            },
            turns,
        )
        for ours, rival, bound, count in (
            ("forward", "dense", 1.25 if name == "equal" else 1.5, 1),
            ("both", "dense_both", 1.5 if name == "equal" else 1.8, 3),
        ):
            yield Result(
                case=f"grouped_matmul.{ours}.{name}.{size}",
                seconds=best[ours],
                rate=count * flops / best[ours] / 1e9,
                unit="GFLOP/s",
                ratio=best[ours] / best[rival],
                meaning="time over one plain matmul (with its backward pass) of equal FLOPs",
                rival=f"jnp matmul [{rows}, {width}] x [{width}, {outer}]",
                target=f"<= {bound}",
            )


def _against_ragged_dot(num_groups: int, shape: tuple[int, int, int], turns: int) -> Result:
    x, w, _ = _operands(num_groups, shape)
    args = (x, w, jnp.full(num_groups, len(x) // num_groups, jnp.int32))
    contestants = {
        "ours": partial(jax.jit(grouped_matmul), *args),
        "ragged": partial(jax.jit(jax.lax.ragged_dot), *args),
    }
    best = race(contestants, turns)
    return Result(
        case=f"grouped_matmul.ragged_dot.{num_groups}",
        seconds=best["ours"],
        ratio=best["ragged"] / best["ours"],
        meaning="times faster",
        rival="jax.lax.ragged_dot",
        target=">= 5",
    )


def _sparsegen_by_sorting(u: jax.Array, lam: jax.Array) -> jax.Array:
    """The textbook form: sort, running sums, support size, threshold."""
    entries = u.shape[-1]
    ranked = jnp.flip(jnp.sort(u, axis=-1), axis=-1)
    sums = jnp.cumsum(ranked, axis=-1)
    rank = jnp.arange(1, entries + 1, dtype=u.dtype)[None, :]
    spread = (1 - lam)[:, None]
    support = jnp.sum(spread + rank * ranked > sums, axis=-1, keepdims=True)
    total = jnp.take_along_axis(sums, support - 1, axis=-1)
    tau = (total - spread) / support.astype(u.dtype)
    return jnp.maximum(u - tau, jnp.zeros_like(u)) / spread


def sparsegen_speed(turns: int = 15) -> Iterator[Result]:
    """Sparsegen forward and backward against the sort-based form under autodiff."""
    ours, rival = _vjp(sparsegen), _vjp(_sparsegen_by_sorting)
    for entries in (8, 64):
        keys = jax.random.split(jax.random.key(0), 3)
        u = jax.random.normal(keys[0], (8192, entries))
        lam = jax.random.uniform(keys[1], (8192,), minval=-1.0, maxval=0.9)
        dp = jax.random.normal(keys[2], u.shape)
        best = race({"ours": partial(ours, dp, u, lam), "rival": partial(rival, dp, u, lam)}, turns)
        yield Result(
            case=f"sparsegen.{entries}",
            seconds=best["ours"],
            rate=u.size / best["ours"] / 1e6,
            unit="M entries/s",
            ratio=best["rival"] / best["ours"],
            meaning="times faster, forward and backward",
            rival="sort-based form under autodiff",
            target=">= 3",
        )


def _qkv(length: int, heads: int, kv_heads: int, dim: int, rows: int = 1) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    return [
        jax.random.normal(key, (rows, length, h, dim))
        for key, h in zip(keys, (heads, kv_heads, kv_heads), strict=True)
    ]


def block_sparse(turns: int = 5) -> Iterator[Result]:
    """Block-sparse attention at a quarter of the blocks against dense attention, L = 4096."""
    length, heads, dim, block = 4096, 4, 64, 128
    blocks = length // block
    rng = np.random.default_rng(0)
    kept = np.zeros((blocks, blocks), bool)
    for row in kept:
        row[rng.choice(blocks, blocks // 4, replace=False)] = True
    pattern = BlockPattern.from_mask(np.kron(kept, np.ones((block, block), bool)), block=block)
    q, k, v = (jnp.swapaxes(a, 1, 2) for a in _qkv(length, heads, heads, dim))
    sparse = jax.jit(lambda q, k, v: block_sparse_attention(q, k, v, pattern))

    def dense_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.swapaxes(attention(*(jnp.swapaxes(a, 1, 2) for a in (q, k, v))), 1, 2)

    dense = jax.jit(dense_attention)
    best = race({"sparse": lambda: sparse(q, k, v), "dense": lambda: dense(q, k, v)}, turns)
    yield Result(
        case="block_sparse_attention.25",
        seconds=best["sparse"],
        ratio=best["sparse"] / best["dense"],
        meaning="time at 25 % of the blocks over dense attention, forward",
        rival="kernels_pallas.attention on the same q, k, v",
        target="<= 0.4",
        detail={"dense_seconds": best["dense"]},
    )


def attention_speed(turns: int = 5) -> Iterator[Result]:
    """Causal attention with its backward pass against JAX's own."""
    q, k, v = _qkv(512, 8, 4, 32, rows=8)
    ours = _vjp(lambda q, k, v: attention(q, k, v, causal=True))
    rival = _vjp(lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True))
    best = race({"ours": lambda: ours(q, q, k, v), "rival": lambda: rival(q, q, k, v)}, turns)
    yield Result(
        case="attention.causal.512",
        seconds=best["ours"],
        ratio=best["rival"] / best["ours"],
        meaning="times faster, forward and backward, [8, 512, 8 heads on 4, 32]",
        rival="jax.nn.dot_product_attention (xla)",
    )


def attention_memory() -> Iterator[Result]:
    """Temporary memory of attention forward and backward at 1k, 4k and 16k tokens."""
    sizes = {}
    step = _vjp(lambda q, k, v: attention(q, k, v, causal=True))
    for length in (1024, 4096, 16384):
        q, k, v = jax.eval_shape(lambda n=length: _qkv(n, 8, 4, 64))
        analysis = step.lower(q, q, k, v).compile().memory_analysis()
        sizes[length] = analysis.temp_size_in_bytes / 2**20
    slope = (sizes[16384] - sizes[4096]) / (sizes[4096] - sizes[1024])
    yield Result(
        case="attention_memory",
        rate=sizes[16384],
        unit="MiB at 16k",
        ratio=slope / 4,
        meaning="growth from 4k to 16k over four times the growth from 1k to 4k (1 is linear)",
        target="<= 1.1",
        detail={f"{n}_mib": round(size, 1) for n, size in sizes.items()},
    )
