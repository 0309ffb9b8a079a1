"""Argument shapes of `grouped_matmul` for tests, bench and the ahead-of-time check."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.cases import Case
from kernels_pallas.grouped_matmul import grouped_matmul

__all__ = ["CASES"]


def _sizes(rng: np.random.Generator, rows: int, groups: int, skew: str) -> np.ndarray:
    if skew == "one":
        return np.where(np.arange(groups) == groups // 2, rows, 0).astype(np.int32)
    if skew == "equal":
        return np.diff(np.arange(groups + 1) * rows // groups).astype(np.int32)
    # Dirichlet with a small parameter: a few groups hold most rows, some hold none.
    share = rng.dirichlet(np.full(groups, 0.3))
    used = rows if skew == "skewed" else rows * 3 // 4
    return np.diff(np.floor(np.concatenate([[0], np.cumsum(share)]) * used)).astype(np.int32)


def _case(
    name: str,
    rows: int,
    inner: int,
    outer: int,
    groups: int,
    *,
    dtype: str = "bfloat16",
    transpose_w: bool = False,
    skew: str = "skewed",
    size: str = "small",
) -> Case:
    w_shape = (groups, outer, inner) if transpose_w else (groups, inner, outer)
    args = (
        jax.ShapeDtypeStruct((rows, inner), jnp.dtype(dtype)),
        jax.ShapeDtypeStruct(w_shape, jnp.dtype(dtype)),
        jax.ShapeDtypeStruct((groups,), jnp.dtype("int32")),
    )

    def call(x, w, group_sizes, *, implementation=None):
        return grouped_matmul(
            x, w, group_sizes, transpose_w=transpose_w, implementation=implementation
        )

    def draw(rng: np.random.Generator):
        x = jnp.asarray(rng.normal(size=(rows, inner)), dtype)
        w = jnp.asarray(rng.normal(size=w_shape) / np.sqrt(inner), dtype)
        return x, w, _sizes(rng, rows, groups, skew)

    flops = 2 * rows * inner * outer
    width = jnp.dtype(dtype).itemsize
    x_bytes, y_bytes, w_bytes = (
        width * n for n in (rows * inner, rows * outer, groups * inner * outer)
    )
    return Case(
        kernel="grouped_matmul",
        name=name,
        args=args,
        call=call,
        draw=draw,
        differentiable=(0, 1),
        flops=flops,
        min_bytes=x_bytes + w_bytes + y_bytes,
        # Backward alone, as nothing of the forward pass is needed: dx reads dy and w, dw reads x
        # and dy.
        vjp_flops=2 * flops,
        vjp_min_bytes=2 * x_bytes + 2 * y_bytes + 2 * w_bytes,
        size=size,  # type: ignore[arg-type]
    )


CASES: tuple[Case, ...] = (
    _case("one", 1, 1, 1, 1, dtype="float32", skew="equal"),
    _case("odd", 257, 129, 80, 7, dtype="float32"),
    _case("odd_bf16", 129, 48, 96, 5),
    _case("empty_groups", 32, 64, 43, 18, dtype="float32", skew="one"),
    _case("tail", 300, 24, 20, 3, dtype="float32", transpose_w=True, skew="short"),
    # Experts of the mixtures of arXiv 2603.00054 (64 experts, top 4): rows = tokens x 4.
    _case("edl_3b_up", 65536, 1024, 896, 64, size="big"),
    _case("edl_15b_up", 65536, 2048, 1536, 64, size="big"),
    _case("edl_15b_down", 65536, 1536, 2048, 64, size="big"),
    _case("edl_15b_equal", 65536, 2048, 1536, 64, skew="equal", size="big"),
    _case("edl_15b_f32", 32768, 2048, 1536, 64, dtype="float32", size="big"),
    _case("wide_e8", 32768, 4096, 4096, 8, size="big"),
)
