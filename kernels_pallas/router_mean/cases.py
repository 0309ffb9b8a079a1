"""Argument shapes of `router_mean` for tests, bench and the ahead-of-time check."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.cases import Case
from kernels_pallas.router_mean import router_mean

__all__ = ["CASES"]


def _case(
    name: str,
    rows: int,
    tokens: int,
    experts: int,
    *,
    segments: int | None = None,
    dtype: str = "float32",
    size: str = "small",
) -> Case:
    args = [
        jax.ShapeDtypeStruct((rows, tokens, experts), jnp.dtype(dtype)),
        jax.ShapeDtypeStruct((rows, tokens), jnp.dtype(bool)),
    ]
    if segments is not None:
        args.append(jax.ShapeDtypeStruct((rows, tokens), jnp.dtype("int32")))

    def call(logits, mask, segment_ids=None, *, implementation=None):
        return router_mean(
            logits,
            mask,
            segment_ids=segment_ids,
            num_segments=segments,
            implementation=implementation,
        )

    def draw(rng: np.random.Generator):
        arrays = [
            jnp.asarray(rng.normal(size=(rows, tokens, experts)) * 3, dtype),
            rng.random((rows, tokens)) < 0.8,
        ]
        if segments is not None:
            ids = np.sort(rng.integers(0, segments + 1, (rows, tokens)), axis=1)
            arrays.append(ids.astype(np.int32))
        return arrays

    cells = rows * tokens * experts
    logits = cells * jnp.dtype(dtype).itemsize
    results = 4 * rows * (segments or 1) * (experts + 2)
    per_token = rows * tokens * (1 if segments is None else 5)
    return Case(
        kernel="router_mean",
        name=name,
        args=tuple(args),
        call=call,
        draw=draw,
        differentiable=(0,),
        flops=6 * cells,
        min_bytes=logits + per_token + results,
        vjp_flops=14 * cells,
        # The backward pass alone: it recomputes the softmax and needs only the token counts, which
        # come from the mask.
        vjp_min_bytes=2 * logits + per_token + results,
        size=size,  # type: ignore[arg-type]
    )


CASES: tuple[Case, ...] = (
    _case("one", 1, 1, 1),
    _case("odd", 3, 257, 5),
    _case("odd_segments", 2, 129, 7, segments=3),
    _case("bf16", 2, 20, 64, dtype="bfloat16"),
    _case("many_segments", 2, 300, 24, segments=20),
    _case("edl_e64", 64, 4096, 64, size="big"),
    _case("edl_e64_bf16", 64, 4096, 64, dtype="bfloat16", size="big"),
    _case("edl_e64_packed", 64, 4096, 64, segments=16, size="big"),
    _case("e8", 64, 4096, 8, size="big"),
)
