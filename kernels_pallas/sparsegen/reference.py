"""Sparsegen in plain XLA: the specification of the kernels.

Both passes take ``u`` [..., E] and ``lam`` [...] in the dtype of the computation.

Entry i is in the support iff 1 - lam + k_i u_i > U_i, where k_i counts the entries not below u_i
and U_i is their sum (LD-MoLE, arXiv 2509.25684). Written as sum_j max(u_j - u_i, 0) < 1 - lam it
needs no sort and no difference of large numbers, and entries that are equal enter together.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

__all__ = ["LEAST_SLACK", "project", "project_vjp"]

LEAST_SLACK = 1e-30
"""Stands for 1 - lam where lam is 1 or more, so that the limit (the largest entries) comes out."""


def project(
    u: Float[Array, "*rows E"], lam: Float[Array, "*rows"], denom_floor: float | None
) -> Float[Array, "*rows E"]:
    """Projects ``u / (1 - lam)`` on the simplex; rows with NaN in them come out NaN."""
    one = jnp.ones((), u.dtype)
    slack = jnp.maximum(one - lam, jnp.asarray(LEAST_SLACK, u.dtype))[..., None]
    v = u - jnp.max(u, axis=-1, keepdims=True)
    above = jnp.sum(jnp.maximum(v[..., None, :] - v[..., :, None], jnp.zeros((), u.dtype)), axis=-1)
    member = above < slack
    count = jnp.sum(member, axis=-1, keepdims=True, dtype=u.dtype)
    zero = jnp.zeros((), u.dtype)
    tau = (jnp.sum(jnp.where(member, v, zero), axis=-1, keepdims=True) - slack) / count
    denom = slack
    if denom_floor is not None:
        denom = jnp.maximum(slack, jnp.asarray(denom_floor, u.dtype))
    p = jnp.where(member, jnp.maximum(v - tau, zero), zero) / denom
    # The largest entry is always a member, unless something in the row is NaN.
    return jnp.where(count > 0, p, jnp.full((), jnp.nan, u.dtype))


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
    one, zero = jnp.ones((), p.dtype), jnp.zeros((), p.dtype)
    slack = (one - lam)[..., None]
    member = p > 0
    count = jnp.maximum(jnp.sum(member, axis=-1, keepdims=True, dtype=p.dtype), one)
    g = jnp.where(member, g, zero)
    mean = jnp.sum(g, axis=-1, keepdims=True) / count
    slope = jnp.sum(g * p, axis=-1, keepdims=True) - mean
    denom = jnp.where(slack > 0, slack, one)
    if denom_floor is not None:
        floor = jnp.asarray(denom_floor, p.dtype)
        slope = jnp.where(slack < floor, -mean, slope)
        denom = jnp.maximum(denom, floor)
    alive = slack > 0
    du = jnp.where(member & alive, g - mean, zero) / denom
    dlam = jnp.where(alive, slope / denom, zero)[..., 0]
    return du, dlam
