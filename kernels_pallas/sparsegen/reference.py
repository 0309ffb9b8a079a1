"""Sparsegen in plain XLA: the specification of the kernels.

Both passes take ``u`` [..., E] and ``lam`` [...] in the dtype of the computation.

Entry i is in the support iff 1 - lam + k_i u_i > U_i, where k_i counts the entries not below u_i
and U_i is their sum (LD-MoLE, arXiv 2509.25684). Written as sum_j max(u_j - u_i, 0) < 1 - lam it
needs no sort and no difference of large numbers, and entries that are equal enter together.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float

__all__ = ["LEAST_SLACK", "project", "project_vjp"]

# Up to so many entries, each is an array of its own over all rows: plain arithmetic on whole
# vectors, which compiles to few loops, where a reduction over 8 numbers would leave most of a
# vector empty.
_FEW = 16

LEAST_SLACK = 1e-30
"""Stands for 1 - lam where lam is 1 or more, so that the limit (the largest entries) comes out."""


def project(
    u: Float[Array, "*rows E"], lam: Float[Array, "*rows"], denom_floor: float | None
) -> Float[Array, "*rows E"]:
    """Projects ``u / (1 - lam)`` on the simplex; rows with NaN in them come out NaN."""
    one, zero = jnp.ones((), u.dtype), jnp.zeros((), u.dtype)
    slack = jnp.maximum(one - lam, jnp.asarray(LEAST_SLACK, u.dtype))
    denom = slack
    if denom_floor is not None:
        denom = jnp.maximum(slack, jnp.asarray(denom_floor, u.dtype))

    def weight(member: Array, v: Array, tau: Array, count: Array, denom: Array) -> Array:
        p = jnp.where(member, jnp.maximum(v - tau, zero), zero) / denom
        # The largest entry is always a member, unless something in the row is NaN.
        return jnp.where(count > 0, p, jnp.full((), jnp.nan, u.dtype))

    if u.shape[-1] <= _FEW:
        entries = _entries(u)
        top = functools.reduce(jnp.maximum, entries)
        vs = [entry - top for entry in entries]
        members = [_sum([jnp.maximum(other - v, zero) for other in vs]) < slack for v in vs]
        count = _sum([member.astype(u.dtype) for member in members])
        inside = [jnp.where(member, v, zero) for member, v in zip(members, vs, strict=True)]
        tau = (_sum(inside) - slack) / count
        pairs = zip(members, vs, strict=True)
        return jnp.stack([weight(member, v, tau, count, denom) for member, v in pairs], axis=-1)

    slack, denom = slack[..., None], denom[..., None]
    v = u - jnp.max(u, axis=-1, keepdims=True)
    above = jnp.sum(jnp.maximum(v[..., None, :] - v[..., :, None], zero), axis=-1)
    member = above < slack
    count = jnp.sum(member, axis=-1, keepdims=True, dtype=u.dtype)
    tau = (jnp.sum(jnp.where(member, v, zero), axis=-1, keepdims=True) - slack) / count
    return weight(member, v, tau, count, denom)


def _entries(a: Float[Array, "*rows E"]) -> list[Float[Array, "*rows"]]:
    return [a[..., entry] for entry in range(a.shape[-1])]


def _sum(terms: Sequence[Array]) -> Array:
    return functools.reduce(operator.add, terms)


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
    slack, few = one - lam, p.shape[-1] <= _FEW
    if few:
        ps = _entries(p)
        gs = [jnp.where(a > 0, b, zero) for a, b in zip(ps, _entries(g), strict=True)]
        count = _sum([(a > 0).astype(p.dtype) for a in ps])
        total = _sum(gs)
        slope = _sum([a * b for a, b in zip(ps, gs, strict=True)])
    else:
        ps, gs = p, jnp.where(p > 0, g, zero)
        count = jnp.sum(p > 0, axis=-1, dtype=p.dtype)
        total, slope = jnp.sum(gs, axis=-1), jnp.sum(gs * p, axis=-1)
    mean = total / jnp.maximum(count, one)
    slope = slope - mean
    alive = slack > 0
    denom = jnp.where(alive, slack, one)
    if denom_floor is not None:
        floor = jnp.asarray(denom_floor, p.dtype)
        slope = jnp.where(slack < floor, -mean, slope)
        denom = jnp.maximum(denom, floor)
    dlam = jnp.where(alive, slope / denom, zero)

    def slope_of_entry(p: Array, g: Array, mean: Array, denom: Array, alive: Array) -> Array:
        return jnp.where((p > 0) & alive, g - mean, zero) / denom

    if few:
        du = [slope_of_entry(a, b, mean, denom, alive) for a, b in zip(ps, gs, strict=True)]
        return jnp.stack(du, axis=-1), dlam
    return slope_of_entry(p, gs, *(a[..., None] for a in (mean, denom, alive))), dlam
