"""Compiled parts of `JapanRegressor`: scores and volumes of one chunk of rows, and their forms."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxlib_papers.nn.flows.base import Flow
from jaxlib_papers.ops.regions import log_volume_importance, volume_box
from jaxlib_papers.uncertainty import _scores

__all__ = [
    "NotCalibratedError",
    "RegionMask",
    "RegionSamples",
    "importance",
    "importance_jit",
    "in_box",
    "in_box_jit",
    "score_rows",
]


class NotCalibratedError(ValueError, AttributeError):
    """A region was asked for before `fit` or `calibrate` made one."""


class RegionMask(NamedTuple):
    """Which cells of a grid lie in each region.

    Attributes:
        mask: bool [B, rows, columns]; `mask[b, i, j]` is for y = (first[i], second[j]). One target
            makes one row: y = second[j].
        first: Grid of the first target.
        second: Grid of the second (or only) target.
        components: Parts that hang together over four neighbours, int [B].
    """

    mask: Bool[np.ndarray, "batch rows columns"]
    first: Float[np.ndarray, " rows"]
    second: Float[np.ndarray, " columns"]
    components: Int[np.ndarray, " batch"]


class RegionSamples(NamedTuple):
    """Points of each region.

    Attributes:
        y: [n, B, *event], drawn from the density and kept where they lie inside.
        valid: bool [n, B]; false for places that no sample inside was found for (their y lies
            outside).
    """

    y: Float[Array, "n batch *event"]
    valid: Bool[Array, "n batch"]


@functools.partial(jax.jit, static_argnames=("kind", "samples"))
def score_rows(kind, parts, y, x, key, *, samples):
    """Scores of rows."""
    aux = _scores.prepare(kind, parts, x, key, samples)
    return _scores.evaluate(kind, parts, y, x, aux)


def importance(kind, parts, x, tau, shift, key, score_key, *, samples, draws):
    """Log-volumes of one chunk, from draws of the density that the score goes with."""
    free = kind in ("unconditional", "residual")
    proposal = parts["marginal" if free else "flow"]
    context = None if free else x
    if isinstance(proposal, Flow):
        y, log_prob = proposal.sample_and_log_prob(key, context, draws)
    else:
        y, log_prob = _scores.sample_with_log_prob(proposal, key, context, draws)
    if free:  # one set, moved about by the prediction, which leaves its volume
        volume = log_volume_importance(log_prob, log_prob >= tau)
        return jnp.broadcast_to(volume, x.shape[:1])
    aux = _scores.prepare(kind, parts, x, score_key, samples)
    score = _scores.evaluate(kind, parts, y, x, aux, log_prob)
    return log_volume_importance(log_prob, score >= tau)


importance_jit = jax.jit(importance, static_argnames=("kind", "samples", "draws"))


def in_box(kind, parts, x, tau, shift, low, high, key, score_key, *, samples, draws):
    """Log-volumes of one chunk, from uniform points of a box."""
    unit = jax.random.uniform(key, (draws, x.shape[0], low.shape[0]), low.dtype)
    y = low[None, None] + (high - low)[None, None] * unit
    aux = _scores.prepare(kind, parts, x, score_key, samples)
    score = _scores.evaluate(kind, parts, y if shift is None else y - shift[None], x, aux)
    return jnp.log(volume_box(score >= tau, low, high))


in_box_jit = jax.jit(in_box, static_argnames=("kind", "samples", "draws"))
