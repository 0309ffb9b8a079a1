"""Decoder language model: Llama 3, Qwen3 and Qwen3-MoE from one configuration."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int, Key

from jaxlib_papers.nn.adapters import SharedAdapters, adapter_scope
from jaxlib_papers.nn.attention import SelfAttention, SequenceInfo
from jaxlib_papers.nn.cache import LayerCache
from jaxlib_papers.nn.config import DecoderConfig
from jaxlib_papers.nn.embedding import embed_tokens
from jaxlib_papers.nn.layers import RMSNorm, SwiGLU, dropout, normal_param, stack_modules
from jaxlib_papers.nn.moe import MoELayer, RouterOutput
from jaxlib_papers.nn.partitioning import constrain
from jaxlib_papers.ops.checks import check_integer, check_ndim, check_shape, float_dtype
from jaxlib_papers.ops.rope import rope_angles

__all__ = ["DecoderLM", "DecoderLayer", "DecoderOutput"]

_STREAM = ("batch", "seq", "embed_act")

_REMAT = {
    "dots": jax.checkpoint_policies.dots_saveable,
    "minimal": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}


class DecoderOutput(NamedTuple):
    """What a forward pass returns.

    Attributes:
      hidden: Final hidden states after the last norm, compute dtype [batch, seq, embed]; the head
        is applied in chunks by the loss.
      router_logits: Float32 [layers, batch, seq, experts]; None for a dense model.
      router_probs: Their softmax over all experts.
      dropped_fraction: Share of assignments dropped, [layers]; None where none can be.
      adapter_routing: What adapters recorded, by projection, each leaf with a leading layers axis;
        None where there is nothing.
    """

    hidden: Float[Array, "batch seq embed"]
    router_logits: Float[Array, "layers batch seq experts"] | None = None
    router_probs: Float[Array, "layers batch seq experts"] | None = None
    dropped_fraction: Float[Array, " layers"] | None = None
    adapter_routing: dict[str, Any] | None = None


class DecoderLayer(nnx.Module):
    """Pre-norm residual layer: attention, then a feed-forward network or a mixture.

    Args:
      config: The decoder's configuration.
      key: PRNG key of the initial weights.
    """

    def __init__(self, config: DecoderConfig, *, key: Key[Array, ""]):
        attention_key, feed_key = jax.random.split(key)

        def norm() -> RMSNorm:
            return RMSNorm(config.embed_dim, eps=config.norm_eps, dtype=config.param_dtype)

        self.attention_norm = norm()
        self.attention = SelfAttention(config, key=attention_key)
        self.feed_forward_norm = norm()
        self.feed_forward: MoELayer | SwiGLU
        if config.moe is not None:
            self.feed_forward = MoELayer(config, key=feed_key)
        else:
            self.feed_forward = SwiGLU(config, config.mlp_dim, key=feed_key)
        self.dropout = config.dropout

    def __call__(
        self,
        x: Float[Array, "batch seq embed"],
        info: SequenceInfo,
        *,
        key: Key[Array, ""] | None = None,
    ) -> tuple[Float[Array, "batch seq embed"], RouterOutput | None]:
        """Applies the layer.

        Args:
          x: Residual stream.
          info: Angles and segments.
          key: PRNG key of dropout; None is no dropout.

        Returns:
          (residual stream, router output or None).
        """
        x, router, _ = self.run(x, info, key=key)
        return x, router

    def run(
        self,
        x: Float[Array, "batch seq embed"],
        info: SequenceInfo,
        cache: LayerCache | None = None,
        *,
        key: Key[Array, ""] | None = None,
    ) -> tuple[Float[Array, "batch seq embed"], RouterOutput | None, tuple[Array, Array]]:
        """As a call, also returning the keys and values that a cache keeps.

        Args:
          x: Residual stream; with a cache one token a row.
          info: Angles and segments.
          cache: Tokens before those of x; None is none.
          key: PRNG key of dropout; None is no dropout.

        Returns:
          (residual stream, router output or None, (keys, values)).
        """
        keys = (None, None) if key is None else jax.random.split(key)
        y, kept = self.attention.attend(self.attention_norm(x), info, cache)
        x = constrain(x + dropout(y, self.dropout, keys[0]), _STREAM)
        y, router = self.feed_forward_norm(x), None
        if isinstance(self.feed_forward, MoELayer):
            y, router = self.feed_forward(y)
        else:
            y = self.feed_forward(y)
        return constrain(x + dropout(y, self.dropout, keys[1]), _STREAM), router, kept


class DecoderLM(nnx.Module):
    """Decoder-only language model; its layers are one stacked module run by `lax.scan`.

    Args:
      config: Architecture and dtypes.
      key: PRNG key of the initial weights.
    """

    def __init__(self, config: DecoderConfig, *, key: Key[Array, ""]):
        embed_key, layer_key, head_key = jax.random.split(key, 3)
        size = (config.vocab_size, config.embed_dim)
        options = (config.init_std, config.param_dtype)
        self.embedding = normal_param(embed_key, size, ("vocab", "embed"), *options)
        keys = jax.random.split(layer_key, config.num_layers)
        self.layers = stack_modules(lambda k: DecoderLayer(config, key=k), keys)
        self.final_norm = RMSNorm(config.embed_dim, eps=config.norm_eps, dtype=config.param_dtype)
        self.head = (
            None
            if config.tie_embeddings
            else normal_param(head_key, size[::-1], ("embed", "vocab"), *options)
        )
        self.config = config
        # Of adapters (nn.lora, moe.ld_mole), what belongs to the model as a whole.
        self.adapters: SharedAdapters | None = None

    def __call__(
        self,
        tokens: Int[Array, "batch seq"],
        *,
        positions: Int[Array, "batch seq"] | None = None,
        segment_ids: Int[Array, "batch seq"] | None = None,
        key: Key[Array, ""] | None = None,
    ) -> DecoderOutput:
        """Hidden states of every token.

        Args:
          tokens: Token ids in [0, vocab_size).
          positions: Position of each token within its document; None counts from 0 in each row.
          segment_ids: Packed documents of a row; tokens see only their own. None is one document.
          key: PRNG key of dropout; None (evaluation) is no dropout.

        Raises:
          ValueError: Shapes or dtypes don't fit, or the sequence is longer than
            ``config.max_positions``.
        """
        config = self.config
        check_ndim("tokens", tokens, (2,), "[batch, seq]")
        check_integer("tokens", tokens)
        if tokens.shape[1] > config.max_positions:
            raise ValueError(
                f"tokens has {tokens.shape[1]} positions, the model has {config.max_positions}; "
                "shorten the sequence or raise DecoderConfig.max_positions"
            )
        if positions is None:
            positions = lax.broadcasted_iota(jnp.int32, tokens.shape, 1)
        check_shape("positions", positions, tokens.shape, "one position a token")
        if segment_ids is not None:
            check_shape("segment_ids", segment_ids, tokens.shape, "one segment a token")

        angles = rope_angles(positions, config.head_dim, config.rope_theta, config.rope_scaling)
        info = SequenceInfo(*angles, segment_ids)
        x = self.embed(tokens)

        def run(
            x: Array, layer_and_key: tuple[DecoderLayer, Array | None]
        ) -> tuple[Array, tuple[RouterOutput | None, dict[str, Any]]]:
            layer, layer_key = layer_and_key
            # Shared heads are closed over: one copy, whose gradient the scan sums over layers.
            with adapter_scope(self.adapters, layer_key) as scope:
                x, router = layer(x, info, key=layer_key)
            return x, (router, scope.records)

        if config.remat != "none":
            run = jax.checkpoint(run, policy=_REMAT[config.remat], prevent_cse=False)
        rates = (config.dropout, 0.0 if self.adapters is None else self.adapters.dropout)
        use_dropout = key is not None and max(rates) > 0
        keys = jax.random.split(key, config.num_layers) if use_dropout else None
        x, (router, records) = lax.scan(run, x, (self.layers, keys))
        return DecoderOutput(
            self.final_norm(x), *(router or ()), **({"adapter_routing": records} if records else {})
        )

    def embed(self, tokens: Int[Array, "batch seq"]) -> Float[Array, "batch seq embed"]:
        """Embedding of every token, in the compute dtype."""
        x = embed_tokens(self.embedding[...], tokens, self.config.compute_dtype)
        return constrain(x, _STREAM)

    def head_kernel(self) -> Float[Array, "embed vocab"]:
        """The output matrix in the compute dtype."""
        tied = self.embedding[...].T
        if self.head is None:
            kernel = tied
        elif isinstance(self.head, nnx.Variable):
            kernel = self.head[...]
        else:  # low-rank factors beside the head's own matrix or, where it is tied, the embedding
            kernel = self.head.dense(tied)
        kernel = kernel.astype(self.config.compute_dtype)
        return constrain(kernel, ("embed", "vocab_act"), name="head")

    def logits(self, hidden: Float[Array, "batch seq embed"]) -> Float[Array, "batch seq vocab"]:
        """Float32 logits of all tokens at once; for long sequences use `ops.cross_entropy`.

        Args:
          hidden: From a forward pass.
        """
        logits = lax.dot_general(
            hidden,
            constrain(self.head_kernel(), ("embed_act", "vocab_act"), name="head"),
            (((2,), (0,)), ((), ())),
            preferred_element_type=float_dtype(hidden),
        )
        cap = self.config.logit_softcap
        return logits if cap is None else cap * jnp.tanh(logits / cap)
