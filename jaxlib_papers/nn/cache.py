"""Keys and values of the tokens that a decoder has seen, and attention over them.

Rows are aligned at their ends: a shorter prompt begins later. So every row's next token goes into
the same slot, which is one update in place, and what a row has before its start is masked.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxlib_papers.ops.checks import float_dtype

__all__ = ["KVCache", "LayerCache", "append", "cached_attention", "layer_caches"]

Stack = Array | tuple[Array, ...]


class KVCache(NamedTuple):
    """All layers' keys and values in slots of static number.

    Attributes:
      keys: One array [layers, batch, kv_heads, slots, head_dim], or one of it without the first
        axis for each layer; rotated already.
      values: The same.
      length: Slots that are filled, int32, the same for all rows.
      start: First slot that is a row's own, int32 [batch].
    """

    keys: Stack
    values: Stack
    length: Int[Array, ""]
    start: Int[Array, " batch"]


class LayerCache(NamedTuple):
    """One layer's part of a `KVCache`.

    Attributes:
      keys: Rotated keys.
      values: Values.
      length: As in `KVCache`.
      start: As in `KVCache`.
    """

    keys: Float[Array, "batch kv_heads slots dim"]
    values: Float[Array, "batch kv_heads slots dim"]
    length: Int[Array, ""]
    start: Int[Array, " batch"]


def layer_caches(cache: KVCache) -> list[LayerCache]:
    """The parts of a cache that has one array a layer."""
    pairs = zip(cache.keys, cache.values, strict=True)
    return [LayerCache(k, v, cache.length, cache.start) for k, v in pairs]


def append(cache: KVCache, keys: Stack, values: Stack) -> KVCache:
    """Writes the next tokens' keys and values into the slots after the filled ones.

    Args:
      cache: The cache; a slot beyond its last is the caller's mistake and overwrites the last.
      keys: Like ``cache.keys``, with as many slots as tokens are added.
      values: The same.
    """

    def write(old: Array, new: Array) -> Array:
        return lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), cache.length, -2)

    added = jax.tree.leaves(keys)[0].shape[-2]
    keys, values = (
        jax.tree.map(write, old, new) for old, new in ((cache.keys, keys), (cache.values, values))
    )
    return KVCache(keys, values, cache.length + added, cache.start)


def cached_attention(
    q: Float[Array, "batch one heads dim"],
    k: Float[Array, "batch one kv_heads dim"],
    v: Float[Array, "batch one kv_heads dim"],
    cache: LayerCache,
    *,
    window: int | None = None,
    logit_softcap: float | None = None,
) -> Float[Array, "batch one heads dim"]:
    """Attention of one new token a row over the cached tokens and itself.

    The new token's key and value need not be in the cache yet, so a layer only reads it.

    Args:
      q: Queries of the new tokens, rotated.
      k: Their keys, rotated.
      v: Their values.
      cache: What came before.
      window: Keys that a query sees, itself included.
      logit_softcap: Soft cap of the logits.
    """
    batch, _, heads, dim = q.shape
    groups = k.shape[2]
    wide = float_dtype(q)
    q = (q * (dim**-0.5)).reshape(batch, groups, heads // groups, dim)

    def scores(keys: Array) -> Array:
        out = jnp.einsum("bkgd,bksd->bkgs", q, keys, preferred_element_type=wide)
        return out if logit_softcap is None else logit_softcap * jnp.tanh(out / logit_softcap)

    own = scores(k.swapaxes(1, 2))
    past = scores(cache.keys.astype(q.dtype))
    slot = lax.broadcasted_iota(jnp.int32, (batch, 1, 1, past.shape[-1]), 3)
    seen = (slot < cache.length) & (slot >= jnp.expand_dims(cache.start, (1, 2, 3)))
    if window is not None:
        seen &= slot > cache.length - window
    past = jnp.where(seen, past, -jnp.inf)
    # A softmax over both parts; the own score is finite, so the maximum is.
    highest = jnp.maximum(jnp.max(past, -1, keepdims=True), own)
    past, own = jnp.exp(past - highest), jnp.exp(own - highest)
    total = jnp.sum(past, -1, keepdims=True) + own
    values = cache.values.astype(q.dtype)
    out = jnp.einsum(
        "bkgs,bksd->bkgd", past.astype(q.dtype), values, preferred_element_type=wide
    ) + own * v.swapaxes(1, 2).astype(wide)
    return (out / total).astype(q.dtype).reshape(batch, 1, heads, dim)
