"""Monotone rational-quadratic splines with linear tails, and their log-derivatives.

Inside [-B, B] the K bins of a monotone spline, outside the identity, with slope 1 at the ends so
that value and derivative are continuous. Widths, heights and slopes come unconstrained.

All K bins are walked in a loop that is unrolled while tracing, with selects in place of a search
and gathers: on vector units this is one pass over the data, and the backward pass scatters nothing.
Input that falls outside of a branch is replaced before the branch computes with it, so that no NaN
hides in a gradient.

Source: Durkan et al., "Neural Spline Flows", arXiv 1906.04032, eqs. 4-8 and section 3.1.
"""

from __future__ import annotations

import functools
import math

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


def _knots(raw: list[Array], bound: float) -> tuple[list[Array], list[Array]]:
    """Positions of the K + 1 knots and sizes of the K bins, from unconstrained numbers."""
    count = len(raw)
    top = raw[0]
    for value in raw[1:]:
        top = jnp.maximum(top, value)
    top = jax.lax.stop_gradient(jnp.where(jnp.isfinite(top), top, 0))
    powers = [jnp.exp(value - top) for value in raw]
    total = powers[0]
    for value in powers[1:]:
        total = total + value
    scale = (1 - count * MIN_BIN) / total
    knots = [jnp.full_like(top, -bound)]
    share = jnp.zeros_like(top)
    for value in powers[:-1]:
        share = share + (MIN_BIN + scale * value)
        knots.append(2 * bound * share - bound)
    knots.append(jnp.full_like(top, bound))
    return knots, [high - low for low, high in zip(knots[:-1], knots[1:], strict=True)]


def _pick(inputs: Array, knots: list[Array], *tables: list[Array]) -> list[Array]:
    """Entries of the tables for the bin that each input lies in; a knot is its bin's lower end."""
    chosen = [table[0] for table in tables]
    for index in range(1, len(knots) - 1):
        past = inputs >= knots[index]
        chosen = [jnp.where(past, t[index], c) for t, c in zip(tables, chosen, strict=True)]
    return chosen


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
    xs, widths = _knots([w[..., k] for k in range(bins)], bound)
    ys, heights = _knots([h[..., k] for k in range(bins)], bound)
    one = jnp.ones_like(at)
    raw_slopes = [one, *(d[..., k] for k in range(bins - 1)), one]
    x0, width, y0, height, raw_left, raw_right = _pick(
        at, ys if inverse else xs, xs, widths, ys, heights, raw_slopes[:-1], raw_slopes[1:]
    )
    # Softplus of the two slopes in use, not of all K - 1; outer ones are exactly 1.
    first, last = (ys[1], ys[-2]) if inverse else (xs[1], xs[-2])
    left, right = MIN_SLOPE + _softplus(raw_left), MIN_SLOPE + _softplus(raw_right)
    if bins == 1:
        left, right = one, one
    else:
        left, right = jnp.where(at >= first, left, one), jnp.where(at >= last, one, right)
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
