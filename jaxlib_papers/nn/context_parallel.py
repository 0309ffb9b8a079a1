"""Causal attention over a sequence that is split over devices.

For use inside `jax.shard_map`: each device has one run of consecutive tokens. Two ways:

* The ring. Of 2n equal chunks device i takes chunks i and 2n-1-i, so that every device has the same
  number of visible pairs; keys and values then go round, and partial results are merged by their
  log-sum-exps. After the first step every step is two unmasked products of one chunk of queries
  with one of keys, whatever the device, so that the program is the same everywhere.
* The halo, for a sliding window: a query needs no more than the tokens that lie just before its
  device's own; those alone are sent.

Source: Ring Attention, Liu et al., arXiv 2310.01889; the balanced order is Striped Attention's aim
(Brandon et al., arXiv 2311.09431) with pairs of chunks.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from kernels_pallas.attention import attention
from kernels_pallas.tiling import accumulator_dtype, align_varying

__all__ = ["context_parallel_attention"]

AxisNames = str | tuple[str, ...]


def context_parallel_attention(
    q: Float[Array, "batch part heads dim"],
    k: Float[Array, "batch part kv_heads dim"],
    v: Float[Array, "batch part kv_heads dim"],
    segment_ids: Int[Array, "batch part"] | None = None,
    *,
    axis_name: AxisNames,
    window: int | None = None,
    logit_softcap: float | None = None,
) -> Float[Array, "batch part heads dim"]:
    """Causal attention of this device's queries to the whole sequence.

    Call it inside `jax.shard_map`. No device ever holds all keys, except where a window is as wide.

    Args:
      q: Queries of this device's part of the sequence.
      k: Keys of the same part.
      v: Values.
      segment_ids: Segment of each token of the part, not negative; None is one segment.
      axis_name: Mesh axis (or axes) that the sequence is split over.
      window: Keys that a query sees, itself included; None is all before it.
      logit_softcap: Soft cap of the logits.

    Returns:
      The result for this device's queries, in the dtype of q.

    Raises:
      ValueError: Without a window, a part of odd length (it is cut into two chunks).
    """
    if lax.axis_size(axis_name) == 1 or window is not None:
        return _halo(q, k, v, segment_ids, axis_name, window, logit_softcap)
    if q.shape[1] % 2:
        raise ValueError(
            f"context_parallel_attention: a device has {q.shape[1]} tokens of the sequence, "
            "expected an even number; choose a length that is a multiple of twice the context axis"
        )
    return _ring(q, k, v, segment_ids, axis_name, logit_softcap)


def _halo(
    q: Array,
    k: Array,
    v: Array,
    segments: Array | None,
    axis_name: AxisNames,
    window: int | None,
    softcap: float | None,
) -> Array:
    size, part = lax.axis_size(axis_name), q.shape[1]
    sides = None if window is None else (window - 1, None)
    attend = functools.partial(attention, causal=True, window=sides, logit_softcap=softcap)
    before = 0 if size == 1 or window is None else min(-(-(window - 1) // part), size - 1)
    if before == 0:
        return attend(q, k, v, q_segment_ids=segments, kv_segment_ids=segments)
    if segments is None:
        segments, _ = align_varying(jnp.zeros(q.shape[:2], jnp.int32), q)
    assert window is not None
    me = lax.axis_index(axis_name)
    keys, values, ids = [k], [v], [segments]
    for back in range(1, before + 1):
        # Of the farthest device only the end can be seen.
        rows = min(part, window - 1 - (back - 1) * part)
        send = functools.partial(
            lax.ppermute,
            axis_name=axis_name,
            perm=[(i, i + back) for i in range(size - back)],
        )
        keys.insert(0, send(k[:, part - rows :]))
        values.insert(0, send(v[:, part - rows :]))
        far = send(segments[:, part - rows :])
        ids.insert(0, jnp.where(me >= back, far, jnp.full_like(far, -1)))
    k, v, kv_segments = (jnp.concatenate(parts, axis=1) for parts in (keys, values, ids))
    return attend(q, k, v, q_segment_ids=segments, kv_segment_ids=kv_segments)


def _chunk_moves(size: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """From consecutive to balanced parts: where each device's first and second chunk goes."""

    def owner(chunk: int) -> int:
        return min(chunk, 2 * size - 1 - chunk)

    first = [(i, owner(2 * i)) for i in range(size)]
    return first, [(i, owner(2 * i + 1)) for i in range(size)]


def _balance(a: Array, axis_name: AxisNames) -> Array:
    """[batch, part, ...]: chunks 2i and 2i+1 are given away, i and 2n-1-i come."""
    first, second = _chunk_moves(lax.axis_size(axis_name))
    one, two = jnp.split(a, 2, axis=1)
    one, two = lax.ppermute(one, axis_name, first), lax.ppermute(two, axis_name, second)
    # The even chunk came by the first way; it is the lower one on devices of even number.
    even = lax.axis_index(axis_name) % 2 == 0
    return jnp.concatenate([jnp.where(even, one, two), jnp.where(even, two, one)], axis=1)


def _unbalance(a: Array, axis_name: AxisNames) -> Array:
    """The inverse of `_balance`."""
    first, second = _chunk_moves(lax.axis_size(axis_name))
    low, high = jnp.split(a, 2, axis=1)
    even = lax.axis_index(axis_name) % 2 == 0
    one, two = jnp.where(even, low, high), jnp.where(even, high, low)
    one = lax.ppermute(one, axis_name, [(b, a) for a, b in first])
    two = lax.ppermute(two, axis_name, [(b, a) for a, b in second])
    return jnp.concatenate([one, two], axis=1)


def _merge(out: Array, lse: Array, more: Array, more_lse: Array) -> tuple[Array, Array]:
    """Two softmax means over different keys as one; lse [batch, heads, q] of `out` is finite."""
    difference = more_lse - lse
    share = jax.nn.sigmoid(difference).swapaxes(1, 2)[..., None]
    return out + (more - out) * share, lse + jax.nn.softplus(difference)


def _ring(
    q: Array,
    k: Array,
    v: Array,
    segments: Array | None,
    axis_name: AxisNames,
    softcap: float | None,
) -> Array:
    size, dtype = lax.axis_size(axis_name), q.dtype
    wide = accumulator_dtype(q)
    q, k, v = (_balance(a, axis_name) for a in (q, k, v))
    if segments is not None:
        segments = _balance(segments, axis_name)
    me = lax.axis_index(axis_name)

    def attend(q: Array, k: Array, v: Array, q_ids: Array | None, k_ids: Array | None, **options):
        out, lse = attention(
            q,
            k,
            v,
            q_segment_ids=q_ids,
            kv_segment_ids=k_ids,
            logit_softcap=softcap,
            return_lse=True,
            **options,
        )
        return out.astype(wide), lse

    # Both chunks of this device in their order: an ordinary causal sequence.
    out, lse = attend(q, k, v, segments, segments, causal=True)
    out, lse = jnp.split(out, 2, axis=1), jnp.split(lse, 2, axis=2)
    low_q, high_q = jnp.split(q, 2, axis=1)
    low_ids, high_ids = (None, None) if segments is None else jnp.split(segments, 2, axis=1)
    perm = [(i, (i + 1) % size) for i in range(size)]

    def move(arrays: tuple[Array | None, ...]) -> tuple[Array | None, ...]:
        return tuple(None if a is None else lax.ppermute(a, axis_name, perm) for a in arrays)

    def step(sums, arrays, distance: Array):
        """Adds the keys of device ``me - distance``; its low chunk lies before our high one."""
        (low, low_lse), (high, high_lse) = sums
        k, v, ids = arrays
        earlier = me >= distance

        def both(a: Array) -> Array:
            # Its low chunk; and again it (for our low chunk) if its owner comes earlier, else its
            # high chunk (for our high chunk).
            first, second = jnp.split(a, 2, axis=1)
            return jnp.concatenate([first, jnp.where(earlier, first, second)], axis=0)

        def queries(low: Array, high: Array) -> Array:
            return jnp.concatenate([high, jnp.where(earlier, low, high)], axis=0)

        q_ids = None if ids is None else queries(low_ids, high_ids)
        k_ids = None if ids is None else both(ids)
        more, more_lse = attend(queries(low_q, high_q), both(k), both(v), q_ids, k_ids)
        more, more_lse = jnp.split(more, 2, axis=0), jnp.split(more_lse, 2, axis=0)
        high, high_lse = _merge(high, high_lse, more[0], more_lse[0])
        chosen = jnp.where(earlier, low, high), jnp.where(earlier, low_lse, high_lse)
        merged, merged_lse = _merge(*chosen, more[1], more_lse[1])
        low = jnp.where(earlier, merged, low), jnp.where(earlier, merged_lse, low_lse)
        high = jnp.where(earlier, high, merged), jnp.where(earlier, high_lse, merged_lse)
        return low, high

    sums = tuple(zip(out, lse, strict=True))
    arrays = move((k, v, segments))

    def body(carry, distance: Array):
        sums, arrays = carry
        # Sent on before they are used, so that the next ones arrive meanwhile.
        return (step(sums, arrays, distance), move(arrays)), None

    if size > 2:
        (sums, arrays), _ = lax.scan(body, (sums, arrays), jnp.arange(1, size - 1, dtype=jnp.int32))
    (low, _), (high, _) = step(sums, arrays, jnp.int32(size - 1))
    return _unbalance(jnp.concatenate([low, high], axis=1).astype(dtype), axis_name)
