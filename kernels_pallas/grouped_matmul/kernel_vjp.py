"""The VJP that the TPU and GPU kernels share; both products of its backward pass are kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array

from kernels_pallas.tiling import promoted

__all__ = ["with_vjp"]


def with_vjp(
    forward: Callable[..., Array], weight_gradient: Callable[..., Array]
) -> Callable[..., Array]:
    """Makes ``run(transpose_w, interpret, x, w, group_sizes)`` differentiable in x and w.

    Args:
      forward: ``forward(x, w, group_sizes, dtype, transpose_w=, interpret=)``.
      weight_gradient: ``weight_gradient(x, dy, group_sizes, dtype, interpret=)``.
    """

    @functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
    def run(transpose_w: bool, interpret: bool, x: Array, w: Array, group_sizes: Array) -> Array:
        dtype = promoted(x.dtype, w.dtype)
        return forward(x, w, group_sizes, dtype, transpose_w=transpose_w, interpret=interpret)

    def run_forward(transpose_w, interpret, x, w, group_sizes):
        return run(transpose_w, interpret, x, w, group_sizes), (x, w, group_sizes)

    def run_backward(transpose_w, interpret, saved, dy) -> tuple[Any, ...]:
        x, w, sizes = saved
        dx = forward(dy, w, sizes, x.dtype, transpose_w=not transpose_w, interpret=interpret)
        left, right = (dy, x) if transpose_w else (x, dy)
        dw = weight_gradient(left, right, sizes, w.dtype, interpret=interpret)
        return dx, dw, None

    run.defvjp(run_forward, run_backward)
    return run
