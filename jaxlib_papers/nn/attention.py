"""Causal self-attention with grouped queries, rotary positions and optional per-head norms."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, Key

from jaxlib_papers.nn.cache import LayerCache, cached_attention
from jaxlib_papers.nn.config import DecoderConfig
from jaxlib_papers.nn.context_parallel import context_parallel_attention
from jaxlib_papers.nn.layers import RMSNorm, normal_param, project
from jaxlib_papers.nn.partitioning import constrain, current_sharding, logical_to_spec
from jaxlib_papers.ops.rope import apply_rope
from kernels_pallas.attention import attention

__all__ = ["SelfAttention", "SequenceInfo", "sharded_attention"]


class SequenceInfo(NamedTuple):
    """What attention needs to know of the tokens, the same in every layer.

    Attributes:
      cos: From `ops.rope.rope_angles`, float32 [batch, seq, head_dim / 2].
      sin: The same.
      segment_ids: Tokens see only tokens of their own segment; None is one segment per row.
    """

    cos: Float[Array, "batch seq half"]
    sin: Float[Array, "batch seq half"]
    segment_ids: Int[Array, "batch seq"] | None = None


def sharded_attention(
    q: Float[Array, "batch seq heads dim"],
    k: Float[Array, "batch seq kv_heads dim"],
    v: Float[Array, "batch seq kv_heads dim"],
    segment_ids: Int[Array, "batch seq"] | None,
    *,
    window: int | None = None,
    logit_softcap: float | None = None,
) -> Float[Array, "batch seq heads dim"]:
    """Causal attention, each device on its own rows, heads and part of the sequence.

    Inside `nn.partitioning.use_sharding` the kernel runs in `jax.shard_map` (a kernel can't be
    partitioned automatically); where a context axis splits the sequence, keys and values go round
    (`nn.context_parallel`). Key heads that the tensor axis does not divide are repeated.

    Args:
      q: Queries.
      k: Keys.
      v: Values.
      segment_ids: Segment of each token.
      window: Keys that a query sees, itself included.
      logit_softcap: Soft cap of the logits.
    """
    segments = () if segment_ids is None else (segment_ids, segment_ids)

    def local(q: Array, k: Array, v: Array, *segments: Array) -> Array:
        q_segments, kv_segments = segments or (None, None)
        return attention(
            q,
            k,
            v,
            causal=True,
            window=None if window is None else (window - 1, None),
            q_segment_ids=q_segments,
            kv_segment_ids=kv_segments,
            logit_softcap=logit_softcap,
        )

    context = current_sharding()
    if context is None or context[0].size == 1:
        return local(q, k, v, *segments)
    mesh, rules = context
    q_spec = logical_to_spec(("batch", "seq", "heads_act", None), q.shape, rules, mesh, name="q")
    names = ("batch", "seq", "kv_heads_act", None)
    if logical_to_spec(names, k.shape, rules, mesh, name="k")[2] != q_spec[2]:
        k, v = (jnp.repeat(a, q.shape[2] // k.shape[2], axis=2) for a in (k, v))
    rows, along = PartitionSpec(*q_spec[:2]), q_spec[1]

    def part(q: Array, k: Array, v: Array, *segments: Array) -> Array:
        return context_parallel_attention(
            q,
            k,
            v,
            segments[0] if segments else None,
            axis_name=along,
            window=window,
            logit_softcap=logit_softcap,
        )

    return jax.shard_map(
        local if along is None else part,
        mesh=mesh,
        in_specs=(q_spec, q_spec, q_spec, *(rows for _ in segments)),
        out_specs=q_spec,
    )(q, k, v, *segments)


class SelfAttention(nnx.Module):
    """Grouped-query self-attention of one layer.

    Args:
      config: Sizes, norms, biases and dtypes.
      key: PRNG key of the initial weights.
    """

    def __init__(self, config: DecoderConfig, *, key: Key[Array, ""]):
        keys = jax.random.split(key, 4)
        embed, dim = config.embed_dim, config.head_dim
        heads, kv_heads = config.num_heads, config.num_kv_heads
        options = (config.init_std, config.param_dtype)
        query_axes = ("embed", "heads", "head_dim")
        key_axes = ("embed", "kv_heads", "head_dim")
        self.query = normal_param(keys[0], (embed, heads, dim), query_axes, *options)
        self.key = normal_param(keys[1], (embed, kv_heads, dim), key_axes, *options)
        self.value = normal_param(keys[2], (embed, kv_heads, dim), key_axes, *options)
        self.out = normal_param(keys[3], (heads, dim, embed), (*query_axes[1:], "embed"), *options)

        def bias(shape: tuple[int, ...], axes: tuple[str, ...]) -> nnx.Param | None:
            if not config.attention_bias:
                return None
            return nnx.Param(jnp.zeros(shape, config.param_dtype), logical_axes=axes)

        self.query_bias = bias((heads, dim), query_axes[1:])
        self.key_bias = bias((kv_heads, dim), key_axes[1:])
        self.value_bias = bias((kv_heads, dim), key_axes[1:])
        self.out_bias = bias((embed,), ("norm",))

        def norm() -> RMSNorm | None:
            if not config.qk_norm:
                return None
            return RMSNorm(dim, eps=config.norm_eps, dtype=config.param_dtype)

        self.query_norm, self.key_norm = norm(), norm()
        self.window = config.sliding_window
        self.softcap = config.attention_softcap

    def __call__(
        self, x: Float[Array, "batch seq embed"], info: SequenceInfo
    ) -> Float[Array, "batch seq embed"]:
        """Attends causally within each segment.

        Args:
          x: Normalised residual stream.
          info: Angles and segments.
        """
        return self.attend(x, info)[0]

    def attend(
        self,
        x: Float[Array, "batch seq embed"],
        info: SequenceInfo,
        cache: LayerCache | None = None,
    ) -> tuple[Float[Array, "batch seq embed"], tuple[Array, Array]]:
        """As a call, with the keys and values that a cache keeps.

        Args:
          x: Normalised residual stream; with a cache one token a row.
          info: Angles and segments.
          cache: Tokens before those of x; None is none.

        Returns:
          (result, (rotated keys [batch, seq, kv_heads, head_dim], values)).
        """
        q = project(x, self.query, self.query_bias)
        k = project(x, self.key, self.key_bias)
        v = project(x, self.value, self.value_bias)
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        q, k = (apply_rope(a, info.cos, info.sin) for a in (q, k))
        q = constrain(q, ("batch", "seq", "heads_act", None))
        k, v = (constrain(a, ("batch", "seq", "kv_heads_act", None)) for a in (k, v))
        limits = {"window": self.window, "logit_softcap": self.softcap}
        if cache is not None:
            out = cached_attention(q, k, v, cache, **limits)
        else:
            out = sharded_attention(q, k, v, info.segment_ids, **limits)
        return project(out, self.out, self.out_bias), (k, v)
