"""Sparsegen: the simplex projection with learnable sparsity that routes LD-MoLE.

Zhuang, Shen et al., "LD-MoLE: Learnable Dynamic Routing for Mixture of LoRA Experts", ICLR 2026,
arXiv 2509.25684: p = argmin over the simplex of ||p - u||^2 - lam ||p||^2. The Jacobian is a
derivation of ours, equal to the authors' autograd off the boundary of the support.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kernels_pallas import dispatch
from kernels_pallas.sparsegen import gpu, reference, tpu

__all__ = ["sparsegen"]


def sparsegen(
    u: Float[Array, "*batch E"],
    lam: Float[Array, "*batch"] | float,
    *,
    axis: int = -1,
    denom_floor: float | None = None,
    implementation: dispatch.Implementation | None = None,
) -> Float[Array, "*batch E"]:
    """Sparse distribution p = max(u - tau, 0) / (1 - lam) over the entries of each row.

    ``lam = 0`` is sparsemax, ``lam -> 1`` puts everything on the largest entry, ``lam -> -inf`` is
    uniform; adding a constant to ``u`` changes nothing. At least one entry is positive and rows sum
    to 1. The computation runs in float32 (float64 for float64 input) and is cast back. The custom
    VJP works from p and lam and gives gradient 0 at entries with p = 0, also where u equals the
    threshold exactly.

    Degenerate input: equal entries get equal weight; E = 1 gives 1; an entry of -inf gets 0; NaN
    anywhere in a row makes the row NaN. A traced ``lam`` of 1 or more gives the limit (the largest
    entries share the mass) with zero gradients. Second derivatives are not defined.

    Args:
      u: logits, any shape; E, the size of ``axis``, from 1 to 256 for the kernels.
      lam: below 1. A scalar, or anything that broadcasts to the shape of ``u`` without ``axis``.
      axis: the axis to project over.
      denom_floor: smallest divisor of the last step. Where 1 - lam is below it, rows sum to
        (1 - lam) / denom_floor and the divisor has no gradient (the authors' code uses 1e-2, which
        their lambda head never reaches). None divides by 1 - lam.
      implementation: None (best available), "xla", "pallas" or "pallas_interpret".

    Returns:
      p with the shape and dtype of ``u``.

    Raises:
      ValueError: E is 0, u is not floating point, lam is 1 or more where its value is known, lam
        does not broadcast, or denom_floor is not positive.
      NotImplementedError: the named implementation can't take these arguments.

    Source: arXiv 2509.25684, Sparsegen projection (closed form of Laha et al., arXiv 1810.11975).
    """
    u = jnp.asarray(u)
    axis = _check(u, lam, axis, denom_floor)
    rows = jnp.moveaxis(u, axis, -1)
    *batch, entries = rows.shape
    acc = jnp.float64 if u.dtype == jnp.float64 else jnp.float32
    lam = jnp.broadcast_to(jnp.asarray(lam).astype(acc), tuple(batch))
    if u.size == 0:
        return u
    backend = dispatch.choose(
        "sparsegen",
        implementation,
        tpu=tpu.unsupported(u.dtype, entries),
        gpu=gpu.unsupported(u.dtype, entries),
    )
    # Merging a long axis of tokens with the one before it would be a copy on TPU.
    inner = batch[-1] if batch and batch[-1] >= 128 else math.prod(batch)
    outer = math.prod(batch) // inner
    p = _sparsegen(
        denom_floor, backend, rows.reshape(outer, inner, entries), lam.reshape(outer, inner)
    )
    return jnp.moveaxis(p.reshape(rows.shape), -1, axis)


def _check(u: Array, lam: Any, axis: int, denom_floor: float | None) -> int:
    if u.ndim < 1:
        raise ValueError("u: got a scalar, expected at least one axis")
    if not jnp.issubdtype(u.dtype, jnp.floating):
        raise ValueError(f"u: got dtype {u.dtype}, expected a floating-point dtype")
    if not -u.ndim <= axis < u.ndim:
        raise ValueError(f"axis: got {axis}, expected one of the {u.ndim} axes of u")
    axis %= u.ndim
    if u.shape[axis] < 1:
        raise ValueError(f"u: got shape {u.shape}, expected at least one entry along axis {axis}")
    batch = u.shape[:axis] + u.shape[axis + 1 :]
    shape = np.shape(lam)
    try:
        fits = np.broadcast_shapes(shape, batch) == batch
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(
            f"lam: got shape {shape}, expected a scalar or {batch}, the shape of u without axis "
            f"{axis}"
        )
    if not isinstance(lam, jax.core.Tracer) and np.any(np.asarray(lam) >= 1):
        raise ValueError(f"lam: got {np.max(np.asarray(lam))}, expected values below 1")
    if denom_floor is not None and not denom_floor > 0:
        raise ValueError(f"denom_floor: got {denom_floor}, expected a positive number or None")
    return axis


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _sparsegen(denom_floor: float | None, backend: dispatch.Backend, u: Array, lam: Array) -> Array:
    if backend == "xla":
        return reference.project(u.astype(lam.dtype), lam, denom_floor).astype(u.dtype)
    if backend == "gpu":
        return gpu.project(u, lam, denom_floor)
    return tpu.project(u, lam, denom_floor, interpret=backend == "interpret")


def _forward(denom_floor, backend, u, lam):
    p = _sparsegen(denom_floor, backend, u, lam)
    return p, (p, lam)


def _backward(denom_floor, backend, residuals, g):
    p, lam = residuals
    if backend == "xla":
        wide = lam.dtype
        du, dlam = reference.project_vjp(p.astype(wide), lam, g.astype(wide), denom_floor)
        return du.astype(p.dtype), dlam
    if backend == "gpu":
        return gpu.project_vjp(p, lam, g, denom_floor)
    return tpu.project_vjp(p, lam, g, denom_floor, interpret=backend == "interpret")


_sparsegen.defvjp(_forward, _backward)
