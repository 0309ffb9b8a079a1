"""Matmul of groups of rows with one matrix per group (a sparse mixture's expert layer)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kernels_pallas.dispatch import Implementation, choose
from kernels_pallas.grouped_matmul.reference import grouped_matmul_xla
from kernels_pallas.tiling import align_varying

__all__ = ["grouped_matmul"]


def _check(x: Array, w: Array, group_sizes: Array, transpose_w: bool) -> None:
    if x.ndim != 2 or w.ndim != 3 or group_sizes.ndim != 1:
        raise ValueError(
            "grouped_matmul: expected x [m, k], w [groups, k, n] and group_sizes [groups], got "
            f"{x.shape}, {w.shape} and {group_sizes.shape}"
        )
    for name, array in (("x", x), ("w", w)):
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"grouped_matmul: {name} must be floating point, got {array.dtype}")
    if x.dtype != w.dtype:
        raise ValueError(f"grouped_matmul: x is {x.dtype} and w is {w.dtype}; cast one of them")
    if not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise ValueError(f"grouped_matmul: group_sizes must be integer, got {group_sizes.dtype}")
    if group_sizes.shape[0] != w.shape[0]:
        raise ValueError(
            f"grouped_matmul: group_sizes has {group_sizes.shape[0]} groups, w has {w.shape[0]}"
        )
    inner = w.shape[2 if transpose_w else 1]
    if x.shape[1] != inner:
        raise ValueError(
            f"grouped_matmul: x has {x.shape[1]} columns, w contracts over {inner} "
            f"(w {w.shape}, transpose_w={transpose_w})"
        )
    if not isinstance(group_sizes, jax.core.Tracer):
        sizes = np.asarray(group_sizes)
        if sizes.size and sizes.min() < 0:
            raise ValueError(f"grouped_matmul: group_sizes has a negative entry: {sizes.min()}")
        if sizes.sum() > x.shape[0]:
            raise ValueError(
                f"grouped_matmul: group_sizes sums to {sizes.sum()}, x has only {x.shape[0]} rows"
            )


def grouped_matmul(
    x: Float[Array, "m k"],
    w: Float[Array, "groups k n"],
    group_sizes: Int[Array, " groups"],
    *,
    transpose_w: bool = False,
    implementation: Implementation | None = None,
) -> Float[Array, "m n"]:
    """Multiplies consecutive groups of rows, each with its own matrix.

    The first ``group_sizes[0]`` rows of ``x`` meet ``w[0]``, the next ``group_sizes[1]`` rows
    ``w[1]``, and so on: the semantics of `jax.lax.ragged_dot`. Groups have any size and need no
    padding.

    Args:
      x: rows sorted by group, [m, k], any float dtype.
      w: one matrix per group in the same dtype, [groups, k, n] ([groups, n, k] with
        ``transpose_w``).
      group_sizes: rows per group, integer [groups]. Under jit a negative size counts as 0 and rows
        past ``m`` are clipped.
      transpose_w: contract over the last axis of ``w`` instead of the middle one.
      implementation: see `kernels_pallas.dispatch`.

    Returns:
      [m, n] in the dtype of x and w, accumulated in float32 (float64 for float64 input).
      Rows past ``sum(group_sizes)`` are zero, whatever x holds there. Gradients: the weight of an
      empty group gets exactly 0, and so do the rows of x that belong to no group.

    Raises:
      ValueError: wrong rank or dtype, shapes that don't fit, or (when concrete) sizes that are
        negative or sum past m.
      NotImplementedError: the named implementation can't take these arguments.
    """
    _check(x, w, group_sizes, transpose_w)
    # Their sum must not wrap round: neither in a narrow dtype nor for sizes far past the rows.
    group_sizes = jnp.clip(jnp.asarray(group_sizes).astype(jnp.int32), 0, x.shape[0])
    x, w, group_sizes = align_varying(x, w, group_sizes)
    backend = choose("grouped_matmul", implementation, **_unsupported(x, w))
    if backend == "xla":
        return grouped_matmul_xla(x, w, group_sizes, transpose_w)
    if backend == "gpu":
        from kernels_pallas.grouped_matmul.gpu import grouped_matmul_gpu

        return grouped_matmul_gpu(x, w, group_sizes, transpose_w=transpose_w)
    from kernels_pallas.grouped_matmul.tpu import grouped_matmul_tpu

    interpret = backend == "interpret"
    return grouped_matmul_tpu(x, w, group_sizes, transpose_w=transpose_w, interpret=interpret)


def _unsupported(x: Array, w: Array) -> dict[str, str | None]:
    if x.dtype == jnp.float64 or w.dtype == jnp.float64:
        return dict.fromkeys(("tpu", "gpu"), "float64 runs on the XLA path only")
    if 0 in (*x.shape, *w.shape):
        return dict.fromkeys(("tpu", "gpu"), f"empty operand: x {x.shape}, w {w.shape}")
    return {"tpu": None, "gpu": None}
