"""Argument shapes of `attention` for tests, bench and the ahead-of-time check."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.attention import attention
from kernels_pallas.attention.scores import make_spec, pairs_in_band
from kernels_pallas.cases import Case, nbytes

__all__ = ["CASES"]


def _case(
    name: str,
    batch: int,
    queries: int,
    keys: int,
    heads: int,
    kv_heads: int,
    dim: int,
    *,
    dtype: str = "float32",
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    segments: int = 0,
    bias: tuple[int, int, int] | None = None,
    mask: tuple[int, int, int] | None = None,
    softcap: float | None = None,
    size: Literal["small", "big"] = "small",
) -> Case:
    """A case; ``bias`` and ``mask`` give the sizes of the first three axes."""
    q = jax.ShapeDtypeStruct((batch, queries, heads, dim), jnp.dtype(dtype))
    k = jax.ShapeDtypeStruct((batch, keys, kv_heads, dim), jnp.dtype(dtype))
    args, names = [q, k, k], ["q", "k", "v"]
    if bias is not None:
        args.append(jax.ShapeDtypeStruct((*bias, keys), jnp.dtype("float32")))
        names.append("bias")
    differentiable = tuple(range(len(args)))
    if mask is not None:
        args.append(jax.ShapeDtypeStruct((*mask, keys), jnp.dtype(bool)))
        names.append("mask")
    if segments:
        for who, length in (("q_segment_ids", queries), ("kv_segment_ids", keys)):
            args.append(jax.ShapeDtypeStruct((batch, length), jnp.dtype("int32")))
            names.append(who)

    def call(*arrays, implementation=None):
        return attention(
            **dict(zip(names, arrays, strict=True)),
            causal=causal,
            window=window,
            logit_softcap=softcap,
            implementation=implementation,
        )

    def draw(rng: np.random.Generator):
        arrays = []
        for who, spec in zip(names, args, strict=True):
            if who == "mask":
                arrays.append(rng.random(spec.shape) < 0.6)
            elif who.endswith("segment_ids"):
                ids = np.sort(rng.integers(1, segments + 1, spec.shape), axis=1)
                arrays.append(ids.astype(np.int32))
            else:
                arrays.append(jnp.asarray(rng.normal(size=spec.shape), spec.dtype))
        return arrays

    spec = make_spec(q.shape, k.shape, causal, window, None, softcap)
    # Segments leave about one part in `segments` of the pairs.
    products = batch * heads * pairs_in_band(spec) * dim // max(segments, 1)
    once = nbytes(*args)
    lse = 4 * batch * heads * queries
    gradients = nbytes(*(args[i] for i in differentiable))
    return Case(
        kernel="attention",
        name=name,
        args=tuple(args),
        call=call,
        draw=draw,
        differentiable=differentiable,
        flops=4 * products,
        min_bytes=once + nbytes(q),
        # Forward: operands in, output and log-sum-exp out. Backward: the same and the output's
        # gradient in, the operands' gradients out.
        vjp_flops=14 * products,
        vjp_min_bytes=2 * once + 3 * nbytes(q) + 2 * lse + gradients,
        size=size,
    )


CASES: tuple[Case, ...] = (
    _case("one", 1, 1, 1, 1, 1, 24),
    _case("decode_gqa8", 2, 1, 257, 8, 1, 80, causal=True),
    _case("odd", 2, 13, 129, 2, 2, 48),
    _case("causal_gqa3", 1, 257, 257, 9, 3, 64, causal=True),
    _case("causal_more_queries", 1, 129, 20, 2, 1, 96, causal=True),
    _case("window", 1, 300, 300, 2, 2, 64, window=(40, 9)),
    _case("segments", 2, 257, 257, 2, 1, 24, causal=True, segments=3),
    _case("softcap", 1, 129, 129, 2, 1, 128, causal=True, softcap=5.0),
    _case("bias", 2, 20, 129, 2, 1, 64, bias=(1, 2, 20)),
    _case("bias_row_mask", 2, 129, 140, 2, 1, 64, bias=(2, 1, 1), mask=(1, 2, 129)),
    _case("mask_row_bf16", 2, 129, 20, 2, 1, 128, dtype="bfloat16", mask=(2, 1, 1)),
    _case("causal_bf16", 1, 300, 300, 4, 2, 128, dtype="bfloat16", causal=True),
    _case("causal_4k", 4, 4096, 4096, 16, 16, 128, dtype="bfloat16", causal=True, size="big"),
    _case("causal_8k", 2, 8192, 8192, 16, 16, 128, dtype="bfloat16", causal=True, size="big"),
    _case("causal_16k", 1, 16384, 16384, 16, 16, 128, dtype="bfloat16", causal=True, size="big"),
    _case("gqa8_16k", 1, 16384, 16384, 32, 4, 128, dtype="bfloat16", causal=True, size="big"),
    _case("full_4k_d64", 4, 4096, 4096, 16, 16, 64, dtype="bfloat16", size="big"),
    _case(
        "window_16k", 1, 16384, 16384, 16, 16, 128,
        dtype="bfloat16", causal=True, window=(1023, 0), size="big",
    ),
    _case(
        "packed_8k", 2, 8192, 8192, 16, 4, 128,
        dtype="bfloat16", causal=True, segments=8, size="big",
    ),
    _case("causal_4k_f32", 1, 4096, 4096, 16, 16, 64, causal=True, size="big"),
)  # fmt: skip
