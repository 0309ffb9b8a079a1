"""Entropy and divergences between discrete distributions, exact where the textbook form is not.

With m = (p + q) / 2 and the contrast d = (p - q) / (p + q), both divergences are sums of terms
that cannot be negative:

    JS(p, q) = sum m phi(d),    phi(d) = d artanh(d) + ln(1 - d^2) / 2
    KL(p, q) = sum 2 m kappa(d), kappa(d) = (1 + d) artanh(d) - d

so nothing cancels when p and q nearly agree. The textbook sum p ln(p / q) has lost every digit in
float32 once the logits differ by 1e-3, and then turns negative. Contrasts below the rounding error
of p and q themselves count as 0: equal distributions computed in two orders have divergence 0 and
gradient 0, not noise. All values are in nats and in float32 (float64 for float64 input).
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from jaxlib_papers.ops.checks import (
    as_float,
    check_count,
    check_integer,
    check_positive,
    check_shape,
)
from jaxlib_papers.ops.masked import divide_or_zero

__all__ = ["entropy", "entropy_decomposition", "js_divergence", "kl_divergence"]

_NOISE = 8  # contrasts below this many units of rounding are 0


def _mean_and_contrast(p: Array, q: Array) -> tuple[Array, Array]:
    """The mean m = (p + q) / 2 and the contrast d = (p - q) / (p + q), 0 where p and q agree."""
    total, difference = p + q, p - q
    same = jnp.abs(difference) <= _NOISE * jnp.finfo(p.dtype).eps * total
    return total / 2, jnp.where(same, 0, difference / jnp.where(same, 1, total))


def _log_ratio(p: Array, q: Array, contrast: Array) -> Array:
    """ln(p / q) with every digit near p = q, and finite where one of them is 0."""
    tiny = jnp.finfo(p.dtype).tiny
    near = jnp.abs(contrast) < 0.5
    far = jnp.log(jnp.maximum(p, tiny)) - jnp.log(jnp.maximum(q, tiny))
    return jnp.where(near, 2 * jnp.arctanh(jnp.where(near, contrast, 0)), far)


def _pair(p: ArrayLike, q: ArrayLike) -> tuple[Array, Array]:
    try:
        shape = jnp.broadcast_shapes(jnp.shape(p), jnp.shape(q))
    except ValueError as error:
        raise ValueError(
            f"p has shape {jnp.shape(p)} and q {jnp.shape(q)}, expected shapes that broadcast"
        ) from error
    p, q = as_float(p, q)
    return jnp.broadcast_to(p, shape), jnp.broadcast_to(q, shape)


# custom_jvp rather than custom_vjp: JAX transposes it, so forward and reverse mode both work.
@jax.custom_jvp
def _js_terms(p: Array, q: Array) -> Array:
    mean, contrast = _mean_and_contrast(p, q)
    size = jnp.abs(contrast)
    near = size < 0.5
    inner = jnp.where(near, size, 0)
    phi_near = inner * jnp.arctanh(inner) + jnp.log1p(-inner * inner) / 2
    rest = jnp.maximum(1 - size, jnp.finfo(p.dtype).tiny)  # 0 ln 0 = 0
    phi_far = ((1 + size) * jnp.log1p(size) + rest * jnp.log(rest)) / 2
    return mean * jnp.where(near, phi_near, phi_far)


@_js_terms.defjvp
def _js_terms_jvp(primals, tangents):
    p, q = primals
    mean, contrast = _mean_and_contrast(p, q)
    toward_p = _log_ratio(p, mean, contrast / (2 + contrast)) / 2  # (p - m) / (p + m)
    toward_q = _log_ratio(q, mean, -contrast / (2 - contrast)) / 2
    return _js_terms(p, q), toward_p * tangents[0] + toward_q * tangents[1]


def js_divergence(
    p: Float[ArrayLike, "... n"], q: Float[ArrayLike, "... n"], axis: int = -1
) -> Float[Array, "..."]:
    """Jensen-Shannon divergence with equal weights, in nats.

    Args:
        p: distributions along `axis` (non-negative, summing to 1).
        q: the same; shapes broadcast.
        axis: the axis that is summed.

    Returns:
        JS in [0, ln 2], exactly 0 for equal and ln 2 for disjoint distributions.

    Raises:
        ValueError: the shapes do not broadcast.

    Numerics: relative error of a few roundings of p - q at any distance. The gradient is
    ln(p / m) / 2, with p clamped at the smallest normal number inside the logarithm: finite at
    zeros, so that a softmax pullback (which multiplies by p) gives 0 there and never NaN; exactly
    0 at p = q. An entry with p = q = 0 adds nothing.

    Source: Lin (1991); phi form and closed gradient: arXiv 2603.00054 sheet, (reconstructed).
    """
    return jnp.sum(_js_terms(*_pair(p, q)), axis=axis)


@jax.custom_jvp
def _kl_terms(p: Array, q: Array) -> Array:
    mean, contrast = _mean_and_contrast(p, q)
    small = jnp.abs(contrast) < 0.1
    d = jnp.where(small, contrast, 0)
    d2 = d * d
    # artanh(d) - d by its series: the difference of the two would cancel.
    tail = d * d2 * (1 / 3 + d2 * (1 / 5 + d2 * (1 / 7 + d2 * (1 / 9 + d2 * (1 / 11 + d2 / 13)))))
    near = 2 * mean * (d * (d + tail) + tail)
    far = p * _log_ratio(p, q, contrast) - (p - q)
    return jnp.where(small, near, jnp.maximum(far, 0))


@_kl_terms.defjvp
def _kl_terms_jvp(primals, tangents):
    p, q = primals
    _, contrast = _mean_and_contrast(p, q)
    toward_p = _log_ratio(p, q, contrast)
    toward_q = jnp.where(contrast == 0, 0, (q - p) / jnp.maximum(q, jnp.finfo(p.dtype).tiny))
    return _kl_terms(p, q), toward_p * tangents[0] + toward_q * tangents[1]


def kl_divergence(
    p: Float[ArrayLike, "... n"],
    q: Float[ArrayLike, "... n"],
    axis: int = -1,
    *,
    floor: float = 1e-12,
) -> Float[Array, "..."]:
    """Kullback-Leibler divergence KL(p || q), in nats.

    Args:
        p: distributions along `axis` (non-negative, summing to 1).
        q: the same; shapes broadcast.
        axis: the axis that is summed.
        floor: an entry of q below it counts as `floor` (as p, where p is smaller still), so that
            the value is at most ln(1 / floor) where the true one is infinite.

    Returns:
        KL >= 0, exactly 0 for equal distributions. For inputs that do not sum to 1 this is the
        generalised divergence sum p ln(p / q) - p + q.

    Raises:
        ValueError: the shapes do not broadcast.

    Numerics: the gradients ln(p / q) and 1 - p / q are finite at every zero and exactly 0 at
    p = q; p is clamped at the smallest normal number, and a q that was raised gets gradient 0.

    Source: Kullback and Leibler (1951).
    """
    check_positive("floor", floor)
    p, q = _pair(p, q)
    low = jax.lax.stop_gradient(jnp.minimum(p, floor))
    return jnp.sum(_kl_terms(p, jnp.where(q < low, low, q)), axis=axis)


def entropy(p: Float[ArrayLike, "... n"], axis: int = -1) -> Float[Array, "..."]:
    """Shannon entropy of distributions along `axis`, in nats; 0 ln 0 = 0, with a finite gradient.

    Args:
        p: distributions along `axis`.
        axis: the axis that is summed.

    Returns:
        H in [0, ln n].
    """
    p = as_float(p)
    safe = jnp.maximum(p, jnp.finfo(p.dtype).tiny)
    return -jnp.sum(p * jnp.log(safe), axis=axis)


def entropy_decomposition(
    rows: Float[ArrayLike, "rows n"],
    group_ids: Int[ArrayLike, " rows"],
    num_groups: int,
) -> tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""]]:
    """Splits the diversity of a set of distributions into between and within groups.

    total = H(mean of all rows) - mean of H(row); inter and intra are its parts between the group
    means and inside the groups (groups weighted by their size). Each is computed as a mean of
    divergences KL(row || mean), which equals the difference of entropies but loses nothing to
    cancellation when all rows nearly agree.

    Args:
        rows: [S, N] distributions.
        group_ids: [S] in 0..num_groups - 1; a row with any other id is left out.
        num_groups: static.

    Returns:
        (total, inter, intra) in nats, each >= 0, total = inter + intra <= ln N up to rounding; all
        0 when no row is left.

    Raises:
        ValueError: shapes disagree, ids are not integers, num_groups < 1.

    Source: arXiv 2603.00054, the total / inter / intra statement; definitions (reconstructed).
    """
    rows = as_float(rows)
    check_count("num_groups", num_groups, 1)
    check_integer("group_ids", group_ids)
    check_shape("group_ids", group_ids, rows.shape[:1], "[rows]")
    member = jax.nn.one_hot(group_ids, num_groups, dtype=rows.dtype)
    kept = jnp.sum(member, axis=-1)
    rows = jnp.where(kept[:, None] > 0, rows, 0)
    product = partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
    sizes = jnp.sum(member, axis=0)
    weight = divide_or_zero(kept, jnp.sum(kept, keepdims=True))
    group_mean = divide_or_zero(product(member.T, rows), sizes[:, None])
    overall = product(weight[None, :], rows)
    own_mean = product(member, group_mean)
    tiny = float(jnp.finfo(rows.dtype).tiny)  # a mean is above 0 wherever one of its rows is
    total = jnp.sum(weight * kl_divergence(rows, overall, floor=tiny))
    intra = jnp.sum(weight * kl_divergence(rows, own_mean, floor=tiny))
    share = divide_or_zero(sizes, jnp.sum(sizes, keepdims=True))
    inter = jnp.sum(share * kl_divergence(group_mean, overall, floor=tiny))
    return total, inter, intra
