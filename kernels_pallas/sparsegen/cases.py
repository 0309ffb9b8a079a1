"""Argument shapes of `sparsegen` for tests, bench and the ahead-of-time check."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.cases import Case
from kernels_pallas.sparsegen import sparsegen

__all__ = ["CASES"]


def _case(
    name: str,
    batch: tuple[int, ...],
    entries: int,
    *,
    dtype: str = "float32",
    denom_floor: float | None = None,
    size: str = "small",
) -> Case:
    shape = (*batch, entries)
    args = (
        jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)),
        jax.ShapeDtypeStruct(batch, jnp.dtype("float32")),
    )

    def call(u, lam, *, implementation=None):
        return sparsegen(u, lam, denom_floor=denom_floor, implementation=implementation)

    def draw(rng: np.random.Generator):
        # The lambda head of LD-MoLE starts near -1.6 and stays below 0.99.
        lam = 0.99 - rng.exponential(1.5, size=batch)
        return jnp.asarray(rng.normal(size=shape) * 2, dtype), lam.astype(np.float32)

    rows = int(np.prod(batch, dtype=np.int64))
    cells = rows * entries
    width = jnp.dtype(dtype).itemsize
    return Case(
        kernel="sparsegen",
        name=name,
        args=args,
        call=call,
        draw=draw,
        differentiable=(0, 1),
        flops=10 * cells,
        min_bytes=2 * cells * width + 4 * rows,
        # Forward and backward: read u and lam, write p; read p, lam and g, write du and dlam.
        vjp_flops=18 * cells,
        vjp_min_bytes=5 * cells * width + 12 * rows,
        size=size,  # type: ignore[arg-type]
    )


CASES: tuple[Case, ...] = (
    _case("one", (1,), 1),
    _case("odd", (13, 20), 7),
    _case("odd_bf16", (257,), 24, dtype="bfloat16"),
    _case("floor", (129,), 8, denom_floor=1e-2),
    _case("wide", (20,), 256),
    _case("ldmole_e8", (8, 8192), 8, size="big"),
    _case("ldmole_e8_bf16", (8, 8192), 8, dtype="bfloat16", size="big"),
    _case("e64", (8, 8192), 64, size="big"),
    _case("e256", (8, 8192), 256, size="big"),
)
