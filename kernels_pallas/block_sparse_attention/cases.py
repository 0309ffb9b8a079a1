"""Argument shapes of `block_sparse_attention` for tests, bench and the ahead-of-time check."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.block_sparse_attention import BlockPattern, block_sparse_attention
from kernels_pallas.cases import Case, nbytes

__all__ = ["CASES"]


def _random(shape: tuple[int, ...], share: float, block: int) -> BlockPattern:
    """A mask of single elements with an empty row of blocks where there are several."""
    mask = np.random.default_rng(0).random(shape) < share
    mask[..., block : 2 * block, :] = False
    return BlockPattern.from_mask(mask, block)


def _case(
    name: str,
    batch: int,
    heads: int,
    length: int,
    dim: int,
    make: Callable[[], BlockPattern],
    *,
    dtype: str = "float32",
    qk_bits: Literal[8, 16] = 16,
    size: Literal["small", "big"] = "small",
) -> Case:
    pattern = make()
    q = jax.ShapeDtypeStruct((batch, heads, length, dim), jnp.dtype(dtype))

    def call(q, k, v, *, implementation=None):
        return block_sparse_attention(
            q, k, v, pattern, qk_bits=qk_bits, implementation=implementation
        )

    def draw(rng: np.random.Generator):
        return [jnp.asarray(rng.normal(size=q.shape), dtype) for _ in range(3)]

    lists = (pattern.kv_index, pattern.partial, pattern.kv_count, pattern.elements)
    kept = np.asarray(pattern.kv_count).sum() * (heads // pattern.heads)
    products = int(batch * kept) * pattern.block**2 * dim
    lists_bytes = sum(x.nbytes for x in lists)
    lse = 4 * batch * heads * length
    return Case(
        kernel="block_sparse_attention",
        name=name,
        args=(q, q, q),
        call=call,
        draw=draw,
        differentiable=(0, 1, 2),
        flops=4 * products,
        min_bytes=4 * nbytes(q) + lists_bytes,
        # Forward: q, k, v in, output and log-sum-exp out. Backward: those and the output's
        # gradient in, dq, dk, dv out, at 16 bits always. With 8 bits the first pass is at 16 too.
        vjp_flops=14 * products,
        vjp_min_bytes=12 * nbytes(q) + 2 * lse + 2 * lists_bytes,
        size=size,
    )


_band = BlockPattern.band

CASES: tuple[Case, ...] = (
    _case("one", 1, 1, 1, 24, lambda: _band(1, 0)),
    _case("odd_random", 2, 1, 257, 48, lambda: _random((257, 257), 0.01, 128)),
    _case("per_head", 1, 2, 300, 64, lambda: _random((2, 300, 300), 0.005, 128)),
    _case("band_sink", 1, 2, 300, 80, lambda: _band(300, 40, sink=10)),
    _case("text", 1, 1, 280, 24, lambda: _band(280, 20, context=24, prompt=20)),
    _case("band_int8", 1, 2, 300, 128, lambda: _band(300, 40, sink=10), qk_bits=8),
    _case("band_bf16", 1, 2, 257, 96, lambda: _band(257, 60), dtype="bfloat16"),
    _case("band_4k", 2, 16, 4096, 128, lambda: _band(4096, 448), dtype="bfloat16", size="big"),
    _case("band_16k", 1, 8, 16384, 128, lambda: _band(16384, 1984), dtype="bfloat16", size="big"),
    _case(
        "band_16k_b256", 1, 8, 16384, 128, lambda: _band(16384, 1920, block=256),
        dtype="bfloat16", size="big",
    ),
    # Wan at 480p, 81 frames: 21 latent frames of 1560 tokens, a quarter kept.
    _case(
        "wan_480p", 1, 3, 32760, 128, lambda: _band(32760, 4352, sink=1560, block=256),
        dtype="bfloat16", size="big",
    ),
    _case(
        "band_4k_int8", 2, 16, 4096, 128, lambda: _band(4096, 448),
        dtype="bfloat16", qk_bits=8, size="big",
    ),
)  # fmt: skip
