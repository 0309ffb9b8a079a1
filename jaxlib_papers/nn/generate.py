"""Generation: prefill, single decoding steps and a whole loop, pure functions of static shapes.

A model whose layers are stacked is decoded by a scan, which costs a copy of each layer's weights a
token. `unstack_layers` separates them once; the loop then reads each weight where it lies.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key

from jaxlib_papers.nn.adapters import adapter_scope
from jaxlib_papers.nn.attention import SequenceInfo
from jaxlib_papers.nn.cache import KVCache, LayerCache, append, layer_caches
from jaxlib_papers.nn.config import DecoderConfig
from jaxlib_papers.nn.decoder import DecoderLayer, DecoderLM
from jaxlib_papers.nn.moe import MoELayer
from jaxlib_papers.nn.partitioning import constrain
from jaxlib_papers.nn.sampling import SamplingConfig, sample_token
from jaxlib_papers.ops.checks import (
    check_count,
    check_integer,
    check_ndim,
    check_shape,
    is_concrete,
)
from jaxlib_papers.ops.rope import rope_angles

__all__ = [
    "Generated",
    "UnstackedLM",
    "decode_step",
    "generate",
    "pad_prompts",
    "prefill",
    "unstack_layers",
]

_KEPT = ("batch", "kv_heads_act", None, None)


class UnstackedLM(NamedTuple):
    """A decoder whose layers are separate modules, for generation.

    Attributes:
      outer: The decoder without its layers.
      layers: One module a layer.
    """

    outer: DecoderLM
    layers: tuple[DecoderLayer, ...]

    @property
    def config(self) -> DecoderConfig:
        """The decoder's configuration."""
        return self.outer.config


Model = DecoderLM | UnstackedLM


class Generated(NamedTuple):
    """What `generate` returns.

    Attributes:
      tokens: New tokens, int32 [batch, max_new_tokens]; the padding id after a row's end.
      log_probs: Their log-probabilities under the model, float32; 0 after a row's end.
      lengths: New tokens of each row, a stop token included.
      stopped: Whether the row ended in a stop token.
    """

    tokens: Int[Array, "batch new"]
    log_probs: Float[Array, "batch new"]
    lengths: Int[Array, " batch"]
    stopped: Bool[Array, " batch"]


def unstack_layers(model: DecoderLM) -> UnstackedLM:
    """Separates the layers once, for fast decoding; copies their weights.

    Drop ``model`` afterwards, or both are in memory.

    Args:
      model: A decoder, with or without adapters.
    """

    def one(index: int) -> DecoderLayer:
        def take(variable: nnx.Variable) -> nnx.Variable:
            axes = variable.get_metadata()["logical_axes"]
            return variable.replace(variable[...][index], logical_axes=axes[1:])

        return jax.tree.map(take, model.layers, is_leaf=lambda x: isinstance(x, nnx.Variable))

    graphdef, state = nnx.split(model)
    outer = nnx.merge(graphdef, state)
    outer.layers = None
    return UnstackedLM(outer, tuple(one(i) for i in range(model.config.num_layers)))


def _outer(model: Model) -> DecoderLM:
    return model.outer if isinstance(model, UnstackedLM) else model


def _without_dropping(layer: DecoderLayer) -> DecoderLayer:
    """A layer whose mixture drops no token: else a row would depend on those beside it."""
    mixture = layer.feed_forward
    if isinstance(mixture, MoELayer) and mixture.config.capacity_factor is not None:
        layer = nnx.merge(*nnx.split(layer))
        layer.feed_forward.config = dataclasses.replace(mixture.config, capacity_factor=None)
    return layer


def _run_layers(
    model: Model, x: Array, info: SequenceInfo, cache: KVCache | None
) -> tuple[Array, Any, Any]:
    """(residual stream, keys, values) of the new tokens, the latter two as a cache holds them."""
    adapters = _outer(model).adapters

    def run(x: Array, layer: DecoderLayer, part: LayerCache | None) -> tuple[Array, Any]:
        with adapter_scope(adapters, None):
            x, _, kept = _without_dropping(layer).run(x, info, part)
        return x, tuple(constrain(a.swapaxes(1, 2), _KEPT) for a in kept)

    if isinstance(model, UnstackedLM):
        parts = [None] * len(model.layers) if cache is None else layer_caches(cache)
        kept = []
        for layer, part in zip(model.layers, parts, strict=True):
            x, pair = run(x, layer, part)
            kept.append(pair)
        keys, values = zip(*kept, strict=True)
        return x, keys, values

    def body(x: Array, xs: tuple[DecoderLayer, tuple[Array, Array] | None]) -> tuple[Array, Any]:
        layer, pair = xs
        return run(x, layer, None if pair is None else LayerCache(*pair, cache.length, cache.start))

    pairs = None if cache is None else (cache.keys, cache.values)
    x, (keys, values) = lax.scan(body, x, (model.layers, pairs))
    return x, keys, values


def _last_logits(model: Model, x: Array) -> Float[Array, "batch vocab"]:
    outer = _outer(model)
    return outer.logits(outer.final_norm(x[:, -1:]))[:, 0]


def prefill(
    model: Model,
    tokens: Int[Array, "batch seq"],
    lengths: Int[Array, " batch"] | None = None,
    *,
    slots: int,
) -> tuple[Float[Array, "batch vocab"], KVCache]:
    """Runs the prompts and keeps their keys and values.

    Args:
      model: The decoder.
      tokens: Prompts, shorter ones padded on the left.
      lengths: Tokens of each prompt, at least 1; None is all of them.
      slots: Tokens that the cache has room for, the prompt's included.

    Returns:
      (float32 logits of the token after each prompt, cache).

    Raises:
      ValueError: Shapes or dtypes don't fit, an empty prompt, or more slots than the model has
        positions.
    """
    config = model.config
    check_ndim("tokens", tokens, (2,), "[batch, seq]")
    check_integer("tokens", tokens)
    batch, length = tokens.shape
    if length == 0:
        raise ValueError("tokens has no token in a row; a prompt needs at least one (bos, say)")
    check_count("slots", slots, length, config.max_positions)
    positions = lax.broadcasted_iota(jnp.int32, tokens.shape, 1)
    start, segments = jnp.zeros(batch, jnp.int32), None
    if lengths is not None:
        check_shape("lengths", lengths, (batch,), "one number a prompt")
        check_integer("lengths", lengths)
        if is_concrete(lengths):
            check_count("lengths", int(np.min(lengths)), 1)
            check_count("lengths", int(np.max(lengths)), 1, length)
        start = length - jnp.asarray(lengths, jnp.int32)
        segments = (positions >= start[:, None]).astype(jnp.int32)
        positions = jnp.maximum(positions - start[:, None], 0)
    angles = rope_angles(positions, config.head_dim, config.rope_theta, config.rope_scaling)
    x = _outer(model).embed(tokens)
    x, keys, values = _run_layers(model, x, SequenceInfo(*angles, segments), None)

    def room(a: Array) -> Array:
        return jnp.pad(a, [(0, 0)] * (a.ndim - 2) + [(0, slots - length), (0, 0)])

    keys, values = jax.tree.map(room, (keys, values))
    cache = KVCache(keys, values, jnp.asarray(length, jnp.int32), start)
    return _last_logits(model, x), cache


def decode_step(
    model: Model, tokens: Int[Array, " batch"], cache: KVCache
) -> tuple[Float[Array, "batch vocab"], KVCache]:
    """Adds one token a row.

    Args:
      model: The decoder that made the cache.
      tokens: Token ids.
      cache: With a free slot.

    Returns:
      (float32 logits of the next token, cache with this one).
    """
    config = model.config
    positions = (cache.length - cache.start)[:, None]
    angles = rope_angles(positions, config.head_dim, config.rope_theta, config.rope_scaling)
    x = _outer(model).embed(tokens[:, None])
    x, keys, values = _run_layers(model, x, SequenceInfo(*angles), cache)
    return _last_logits(model, x), append(cache, keys, values)


class _Loop(NamedTuple):
    """State of the loop: tokens drawn so far, the last of them not in the cache yet."""

    step: Int[Array, ""]
    cache: KVCache
    token: Int[Array, " batch"]
    done: Bool[Array, " batch"]
    result: Generated


@functools.partial(jax.jit, static_argnames=("max_new_tokens", "sampling", "stop_ids", "pad_id"))
def _generate(
    model: Model,
    tokens: Array,
    lengths: Array | None,
    key: Array | None,
    *,
    max_new_tokens: int,
    sampling: SamplingConfig,
    stop_ids: tuple[int, ...],
    pad_id: int,
) -> Generated:
    batch = tokens.shape[0]
    logits, cache = prefill(model, tokens, lengths, slots=tokens.shape[1] + max_new_tokens)
    result = Generated(
        jnp.full((batch, max_new_tokens), pad_id, jnp.int32),
        jnp.zeros((batch, max_new_tokens), jnp.float32),
        jnp.zeros(batch, jnp.int32),
        jnp.zeros(batch, bool),
    )

    def draw(
        step: Array, logits: Array, done: Array, result: Generated
    ) -> tuple[Array, Array, Generated]:
        step_key = None if key is None else jax.random.fold_in(key, step)
        token, log_prob = sample_token(logits, sampling, step_key)
        token = jnp.where(done, pad_id, token)
        log_prob = jnp.where(done, 0.0, log_prob.astype(jnp.float32))
        stop = jnp.zeros(batch, bool)
        for stop_id in stop_ids:
            stop |= token == stop_id
        stop &= ~done
        place = (jnp.zeros((), step.dtype), step)
        result = Generated(
            lax.dynamic_update_slice(result.tokens, token[:, None], place),
            lax.dynamic_update_slice(result.log_probs, log_prob[:, None], place),
            result.lengths + jnp.where(done, 0, 1),
            result.stopped | stop,
        )
        return token, done | stop, result

    zero = jnp.zeros((), jnp.int32)
    token, done, result = draw(zero, logits, jnp.zeros(batch, bool), result)

    def body(loop: _Loop) -> _Loop:
        logits, cache = decode_step(model, loop.token, loop.cache)
        token, done, result = draw(loop.step, logits, loop.done, loop.result)
        return _Loop(loop.step + 1, cache, token, done, result)

    def unfinished(loop: _Loop) -> Array:
        return (loop.step < max_new_tokens) & ~jnp.all(loop.done)

    return lax.while_loop(unfinished, body, _Loop(zero + 1, cache, token, done, result)).result


def generate(
    model: Model,
    tokens: Int[Array, "batch seq"],
    lengths: Int[Array, " batch"] | None = None,
    *,
    max_new_tokens: int,
    sampling: SamplingConfig | None = None,
    stop_ids: Sequence[int] = (),
    pad_id: int = 0,
    key: Key[Array, ""] | None = None,
) -> Generated:
    """Continues prompts; compiled once for each shape and setting.

    A row gives what it would give alone, up to rounding. A mixture drops no token here, whatever
    its capacity factor.

    Args:
      model: A decoder, or for speed `unstack_layers` of it.
      tokens: Prompts [batch, seq], shorter ones padded on the left (`pad_prompts`).
      lengths: Tokens of each prompt; None is all of them.
      max_new_tokens: Most tokens to add, static.
      sampling: How to choose; None is greedy.
      stop_ids: Tokens after which a row ends.
      pad_id: Token after a row's end.
      key: PRNG key for a temperature above 0.

    Raises:
      ValueError: Shapes or dtypes don't fit, a prompt is empty, prompt and new tokens are more than
        the model has positions, or a key is missing.
    """
    check_count("max_new_tokens", max_new_tokens, 1)
    check_ndim("tokens", tokens, (2,), "[batch, seq]")
    length, most = tokens.shape[1], model.config.max_positions
    if length + max_new_tokens > most:
        raise ValueError(
            f"a prompt of {length} tokens and max_new_tokens={max_new_tokens} are more than the "
            f"model's context of {most}; shorten the prompt or generate fewer tokens"
        )
    if lengths is not None and is_concrete(lengths):
        check_shape("lengths", lengths, (tokens.shape[0],), "one number a prompt")
        check_count("lengths", int(np.min(lengths)), 1)
        check_count("lengths", int(np.max(lengths)), 1, length)
    return _generate(
        model,
        jnp.asarray(tokens),
        None if lengths is None else jnp.asarray(lengths),
        key,
        max_new_tokens=max_new_tokens,
        sampling=SamplingConfig() if sampling is None else sampling,
        stop_ids=tuple(int(i) for i in stop_ids),
        pad_id=int(pad_id),
    )


def pad_prompts(
    prompts: Sequence[Sequence[int]], *, pad_id: int = 0, multiple: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """Prompts of different lengths as one array, padded on the left.

    Args:
      prompts: Token ids.
      pad_id: What to pad with.
      multiple: Length to round up to, so that near lengths share one compilation.

    Returns:
      (tokens int32 [batch, seq], lengths int32 [batch]), as `generate` takes them.

    Raises:
      ValueError: No prompt, or an empty one.
    """
    check_count("multiple", multiple, 1)
    lengths = np.asarray([len(prompt) for prompt in prompts], np.int32)
    if lengths.size == 0 or lengths.min() == 0:
        raise ValueError("prompts must hold at least one prompt, and each at least one token")
    width = -(-int(lengths.max()) // multiple) * multiple
    tokens = np.full((len(prompts), width), pad_id, np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[width - len(prompt) :] = prompt
    return tokens, lengths
