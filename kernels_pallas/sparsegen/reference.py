"""Sparsegen in plain XLA: the specification of the kernels.

Both passes take ``u`` [..., E] and ``lam`` [...] in the dtype of the computation.

Entry i is in the support iff 1 - lam + k_i u_i > U_i, where k_i counts the entries not below u_i
and U_i is their sum (LD-MoLE, arXiv 2509.25684). Written as sum_j max(u_j - u_i, 0) < 1 - lam it
needs no sort and no difference of large numbers, and entries that are equal enter together.
"""

from __future__ import annotations

import functools
import operator

import jax.numpy as jnp
from jaxtyping import Array, Float

__all__ = ["LEAST_SLACK", "project", "project_vjp"]

# Up to so many entries, rows are laid along the last axis: arithmetic on whole vectors of rows,
# where a reduction over 8 numbers would leave most of a vector empty.
_FEW = 16

LEAST_SLACK = 1e-30
"""Stands for 1 - lam where lam is 1 or more, so that the limit (the largest entries) comes out."""


def project(
    u: Float[Array, "*rows E"], lam: Float[Array, "*rows"], denom_floor: float | None
) -> Float[Array, "*rows E"]:
    """Projects ``u / (1 - lam)`` on the simplex; rows with NaN in them come out NaN."""
    shape, axis = u.shape, _entry_axis(u)
    if axis == 0:
        u, lam = u.reshape(-1, shape[-1]).T, lam.reshape(-1)
    one, zero = jnp.ones((), u.dtype), jnp.zeros((), u.dtype)
    slack = jnp.maximum(one - lam, jnp.asarray(LEAST_SLACK, u.dtype))
    slack = jnp.expand_dims(slack, axis)
    v = u - jnp.max(u, axis=axis, keepdims=True)
    if axis == 0:
        above = functools.reduce(operator.add, (jnp.maximum(row[None] - v, zero) for row in v))
    else:
        above = jnp.sum(jnp.maximum(v[..., None, :] - v[..., :, None], zero), axis=-1)
    member = above < slack
    count = jnp.sum(member, axis=axis, keepdims=True, dtype=u.dtype)
    tau = (jnp.sum(jnp.where(member, v, zero), axis=axis, keepdims=True) - slack) / count
    denom = slack
    if denom_floor is not None:
        denom = jnp.maximum(slack, jnp.asarray(denom_floor, u.dtype))
    p = jnp.where(member, jnp.maximum(v - tau, zero), zero) / denom
    # The largest entry is always a member, unless something in the row is NaN.
    p = jnp.where(count > 0, p, jnp.full((), jnp.nan, u.dtype))
    return p.T.reshape(shape) if axis == 0 else p


def _entry_axis(u: Float[Array, "*rows E"]) -> int:
    return 0 if u.shape[-1] <= _FEW else u.ndim - 1


def project_vjp(
    p: Float[Array, "*rows E"],
    lam: Float[Array, "*rows"],
    g: Float[Array, "*rows E"],
    denom_floor: float | None,
) -> tuple[Float[Array, "*rows E"], Float[Array, "*rows"]]:
    """Cotangents of u and lam from the result, for the cotangent ``g`` of p.

    On the support S with k entries: du = (g - mean_S g) / (1 - lam) and
    dlam = sum_S g (p - 1/k) / (1 - lam); an entry with p = 0 gets 0. Below the floor the
    denominator is a constant: dlam = -sum_S g / (k floor). Where lam is 1 or more both are 0.
    """
    shape, axis = p.shape, _entry_axis(p)
    if axis == 0:
        p, g = (a.reshape(-1, shape[-1]).T for a in (p, g))
        lam = lam.reshape(-1)
    one, zero = jnp.ones((), p.dtype), jnp.zeros((), p.dtype)
    slack = jnp.expand_dims(one - lam, axis)
    member = p > 0
    count = jnp.maximum(jnp.sum(member, axis=axis, keepdims=True, dtype=p.dtype), one)
    g = jnp.where(member, g, zero)
    mean = jnp.sum(g, axis=axis, keepdims=True) / count
    slope = jnp.sum(g * p, axis=axis, keepdims=True) - mean
    denom = jnp.where(slack > 0, slack, one)
    if denom_floor is not None:
        floor = jnp.asarray(denom_floor, p.dtype)
        slope = jnp.where(slack < floor, -mean, slope)
        denom = jnp.maximum(denom, floor)
    alive = slack > 0
    du = jnp.where(member & alive, g - mean, zero) / denom
    dlam = jnp.squeeze(jnp.where(alive, slope / denom, zero), axis).reshape(shape[:-1])
    return du.T.reshape(shape) if axis == 0 else du, dlam
