"""Monotone rational-quadratic splines with linear tails, and their log-derivatives.

Inside [-B, B] the K bins of a monotone spline, outside the identity, with slope 1 at the ends so
that value and derivative are continuous. Widths, heights and slopes come unconstrained.

Forward, the K bins are walked in a loop that is unrolled while tracing, with selects in place of a
search and gathers: on vector units this is one pass over the data. The derivative of the bin's
edges is written out, since one knot moves with all raw widths alike: three numbers a point times
the softmax give the gradient of all K, where the derivative of the loop would pad and add K times.
Input that falls outside of a branch is replaced before the branch computes with it, so that no NaN
hides in a gradient.

Source: Durkan et al., "Neural Spline Flows", arXiv 1906.04032, eqs. 4-8 and section 3.1.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jaxlib_papers.ops.checks import as_float, check_positive, check_shape

__all__ = ["MIN_BIN", "MIN_SLOPE", "identity_slope", "rational_quadratic_spline"]

MIN_BIN = 1e-3
"""Least width and height of a bin, as a share of the interval."""
MIN_SLOPE = 1e-3
"""Least slope at a knot."""


def identity_slope() -> float:
    """The raw slope whose constrained value is 1: log(exp(1 - MIN_SLOPE) - 1).

    With it, and equal widths and heights, the spline is the identity.

    Source: arXiv 1906.04032, section 3.1.
    """
    return math.log(math.expm1(1 - MIN_SLOPE))


def _softplus(v: Array) -> Array:
    return jnp.maximum(v, 0) + jnp.log1p(jnp.exp(-jnp.abs(v)))


def _top(raw: list[Array]) -> Array:
    """Largest of the raw numbers, which exponentials are taken relative to."""
    top = functools.reduce(jnp.maximum, raw)
    return jnp.where(jnp.isfinite(top), top, 0)


def _knots(raw: list[Array], bound: float) -> list[Array]:
    """Positions of the K + 1 knots, from unconstrained sizes of the K bins."""
    count, top = len(raw), _top(raw)
    powers = [jnp.exp(value - top) for value in raw]
    scale = (1 - count * MIN_BIN) / functools.reduce(jnp.add, powers)
    knots = [jnp.full_like(top, -bound)]
    share = jnp.zeros_like(top)
    for value in powers[:-1]:
        share = share + (MIN_BIN + scale * value)
        knots.append(2 * bound * share - bound)
    return [*knots, jnp.full_like(top, bound)]


def _columns(table: Array) -> list[Array]:
    return [table[..., k] for k in range(table.shape[-1])]


class _Bin(NamedTuple):
    """The bin that a point lies in: its number (a float), edges, and raw slopes at the edges."""

    index: Array
    x0: Array
    x1: Array
    y0: Array
    y1: Array
    raw_left: Array
    raw_right: Array


@functools.partial(jax.custom_jvp, nondiff_argnums=(4, 5))
def _locate(at: Array, w: Array, h: Array, d: Array, bound: float, inverse: bool) -> _Bin:
    """The bin of each point; a knot is its bin's lower end."""
    xs, ys = _knots(_columns(w), bound), _knots(_columns(h), bound)
    one = jnp.ones_like(at)
    slopes = [one, *_columns(d), one]
    index = jnp.zeros_like(at)
    chosen = [xs[0], xs[1], ys[0], ys[1], slopes[0], slopes[1]]
    for k in range(1, w.shape[-1]):
        past = at >= (ys if inverse else xs)[k]
        index = jnp.where(past, k, index)
        tables = (xs[k], xs[k + 1], ys[k], ys[k + 1], slopes[k], slopes[k + 1])
        chosen = [jnp.where(past, t, c) for t, c in zip(tables, chosen, strict=True)]
    return _Bin(index, *chosen)


def _places(table: Array) -> Array:
    return jax.lax.broadcasted_iota(jnp.int32, table.shape, table.ndim - 1).astype(table.dtype)


def _edges_dot(
    raw: Array, dot: Array, index: Array, low: Array, high: Array, bound: float
) -> tuple[Array, Array]:
    """How both edges of the bin move with the raw sizes.

    With p the softmax, P its sum up to an edge and s = 1 - K MIN_BIN,
    d edge / d raw_k = 2 B s p_k ([k is below the edge] - P).
    """
    rest = 1 - raw.shape[-1] * MIN_BIN
    below = ((low + bound) / (2 * bound) - index * MIN_BIN) / rest
    up_to = ((high + bound) / (2 * bound) - (index + 1) * MIN_BIN) / rest
    columns = _columns(raw)
    top = _top(columns)
    log_sum = top + jnp.log(functools.reduce(jnp.add, [jnp.exp(v - top) for v in columns]))
    # Both barriers keep the work of a point from being done anew for each of its K numbers.
    log_sum, below, up_to = jax.lax.optimization_barrier((log_sum, below, up_to))
    moved = (2 * bound * rest) * jnp.exp(raw - log_sum[..., None]) * dot
    places, here = _places(raw), index[..., None]
    before, within, total = jax.lax.optimization_barrier(
        (
            jnp.sum(jnp.where(places < here, moved, 0), axis=-1),
            jnp.sum(jnp.where(places == here, moved, 0), axis=-1),
            jnp.sum(moved, axis=-1),
        )
    )
    return before - below * total, before + within - up_to * total


@_locate.defjvp
def _locate_jvp(bound: float, inverse: bool, primals: tuple, tangents: tuple) -> tuple[_Bin, _Bin]:
    at, w, h, d = primals
    _, w_dot, h_dot, d_dot = tangents
    out = _locate(at, w, h, d, bound, inverse)
    x0, x1 = _edges_dot(w, w_dot, out.index, out.x0, out.x1, bound)
    y0, y1 = _edges_dot(h, h_dot, out.index, out.y0, out.y1, bound)
    places, here = _places(d), out.index[..., None]
    left, right = jax.lax.optimization_barrier(
        (
            jnp.sum(jnp.where(places == here - 1, d_dot, 0), axis=-1),
            jnp.sum(jnp.where(places == here, d_dot, 0), axis=-1),
        )
    )
    return out, _Bin(jnp.zeros_like(out.index), x0, x1, y0, y1, left, right)


def rational_quadratic_spline(
    x: Float[ArrayLike, "*batch"],
    w: Float[ArrayLike, "*batch bins"],
    h: Float[ArrayLike, "*batch bins"],
    d: Float[ArrayLike, "*batch knots"],
    inverse: bool = False,
    tail_bound: float = 5.0,
) -> tuple[Float[Array, "*batch"], Float[Array, "*batch"]]:
    """Applies one monotone spline per element, or its inverse.

    Args:
        x: input of the map (output, for the inverse).
        w: unconstrained widths; softmax, then at least `MIN_BIN` of the interval each.
        h: unconstrained heights, likewise.
        d: unconstrained slopes at the K - 1 inner knots; MIN_SLOPE + softplus. Outer slopes are 1.
        inverse: apply the inverse map.
        tail_bound: B, half the interval; outside of [-B, B] the map is the identity.

    Returns:
        (y, logdet): same shape as x, float32 (float64 for float64 input); logdet is log |dy/dx| of
        the map that was applied. Finite with finite gradients for finite input of any size, at
        knots and at +-B too; NaN in x stays NaN.

    Raises:
        ValueError: K * 1e-3 >= 1, d without K - 1 entries, shapes that differ, B not > 0.

    Source: arXiv 1906.04032, eqs. 4-8; the inverse's root in the form that does not cancel.
    """
    check_positive("tail_bound", tail_bound)
    x, w, h, d = as_float(x, w, h, d)
    bins = w.shape[-1] if w.ndim else 0
    if bins < 1 or bins * MIN_BIN >= 1:
        raise ValueError(
            f"w has shape {w.shape}: {bins} bins of at least {MIN_BIN} of the interval each, "
            f"expected 1..{math.ceil(1 / MIN_BIN) - 1} bins"
        )
    check_shape("w", w, (*x.shape, bins), "[*x.shape, bins]")
    check_shape("h", h, w.shape, "the shape of w")
    check_shape("d", d, (*x.shape, bins - 1), "[*x.shape, bins - 1], slopes at inner knots")
    return _spline(x, w, h, d, inverse=bool(inverse), bound=float(tail_bound))


@functools.partial(jax.jit, static_argnames=("inverse", "bound"))
def _spline(
    x: Array, w: Array, h: Array, d: Array, *, inverse: bool, bound: float
) -> tuple[Array, Array]:
    """The map itself; compiled as one, since its small operations cost most one by one."""
    bins = w.shape[-1]
    inside = (x >= -bound) & (x <= bound)
    at = jnp.where(inside, x, jnp.zeros_like(x))
    index, x0, x1, y0, y1, raw_left, raw_right = _locate(at, w, h, d, bound, inverse)
    width, height = x1 - x0, y1 - y0
    one = jnp.ones_like(at)
    # Softplus of the two slopes in use, not of all K - 1; outer ones are exactly 1.
    left = jnp.where(index == 0, one, MIN_SLOPE + _softplus(raw_left))
    right = jnp.where(index == bins - 1, one, MIN_SLOPE + _softplus(raw_right))
    mean = height / width
    bend = left + right - 2 * mean

    if inverse:
        rise = at - y0
        a = rise * bend + height * (mean - left)
        b = height * left - rise * bend
        c = -mean * rise
        # Positive for a monotone bin but for rounding; sqrt has no gradient at 0.
        root = jnp.sqrt(jnp.maximum(b * b - 4 * a * c, jnp.finfo(at.dtype).tiny))
        theta = jnp.clip(2 * c / (-b - root), 0, 1)
        value = theta * width + x0
    else:
        theta = (at - x0) / width
        value = None
    mixed = theta * (1 - theta)
    below = mean + bend * mixed
    if value is None:
        value = y0 + height * (mean * theta * theta + left * mixed) / below
    slope = right * theta * theta + 2 * mean * mixed + left * (1 - theta) * (1 - theta)
    logdet = 2 * (jnp.log(mean) - jnp.log(below)) + jnp.log(slope)
    if inverse:
        logdet = -logdet
    return jnp.where(inside, value, x), jnp.where(inside, logdet, jnp.zeros_like(logdet))
