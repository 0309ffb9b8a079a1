"""Frozen configuration of decoder language models."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

from jaxlib_papers.ops.checks import (
    check_choice,
    check_count,
    check_nonnegative,
    check_positive,
)
from jaxlib_papers.ops.rope import RopeScaling, rope_frequencies

__all__ = ["DecoderConfig", "MoEConfig", "RematPolicy", "RopeScaling"]

RematPolicy = Literal["none", "dots", "minimal", "full"]
Dtype = Literal["float32", "bfloat16", "float64"]


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """A sparse mixture in place of each layer's feed-forward network.

    Attributes:
      num_experts: Experts per layer.
      top_k: Experts that a token goes to.
      expert_dim: Hidden width of one expert.
      renormalize: Divide the weights of a token's experts by their sum.
      shared_expert_dim: Hidden width of an expert that every token uses; 0 is none.
      capacity_factor: None drops no token. A number gives every expert that many times its
        balanced load (counted on each device's own tokens) and drops what is past it.
      receive_factor: Where tokens travel to experts on other devices (TPU, GPU), a device has room
        for that many times the assignments of its own tokens and drops what is past it. None: for
        the worst case, so that none is dropped.
      router_std: Standard deviation of the router's initial weights; None is the model's
        ``init_std``.
    """

    num_experts: int
    top_k: int
    expert_dim: int
    renormalize: bool = True
    shared_expert_dim: int = 0
    capacity_factor: float | None = None
    receive_factor: float | None = None
    router_std: float | None = None

    def __post_init__(self) -> None:
        """Checks the numbers."""
        check_count("MoEConfig.num_experts", self.num_experts, 1)
        check_count("MoEConfig.top_k", self.top_k, 1, self.num_experts)
        check_count("MoEConfig.expert_dim", self.expert_dim, 1)
        check_count("MoEConfig.shared_expert_dim", self.shared_expert_dim, 0)
        for name in ("capacity_factor", "receive_factor"):
            if getattr(self, name) is not None:
                check_positive(f"MoEConfig.{name}", getattr(self, name))
        if self.router_std is not None:
            check_nonnegative("MoEConfig.router_std", self.router_std)


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """A decoder of today's open families.

    Llama 3: the defaults with its sizes, ``rope_theta=5e5`` and llama3 scaling. Qwen3:
    ``qk_norm=True``. Qwen3-MoE: also ``moe=MoEConfig(...)`` and ``mlp_dim=0``.

    Attributes:
      vocab_size: Tokens.
      num_layers: Layers.
      embed_dim: Width of the residual stream.
      num_heads: Query heads, a multiple of ``num_kv_heads``.
      num_kv_heads: Key and value heads.
      head_dim: Size of a head, even.
      mlp_dim: Hidden width of the SwiGLU feed-forward network; 0 with ``moe``.
      max_positions: Longest sequence.
      rope_theta: Base of the rotary frequencies (half-split form).
      rope_scaling: Extension of the context.
      norm_eps: Epsilon of every RMS norm.
      qk_norm: RMS norm of each query and key head over its ``head_dim`` channels.
      tie_embeddings: The output matrix is the embedding.
      attention_bias: Biases on the four attention projections.
      attention_softcap: Soft cap of the attention logits.
      logit_softcap: Soft cap of the output logits.
      sliding_window: Keys that a query sees, itself included; None is all before it.
      moe: A mixture in place of the feed-forward networks.
      dropout: Rate on the output of each attention and feed-forward block.
      init_std: Standard deviation of initial weights.
      param_dtype: Of the parameters.
      compute_dtype: Of matmuls and activations; norms, softmaxes, routers and losses are computed
        in float32 whatever this is.
      remat: What a layer keeps for its backward pass. "none" keeps everything, "dots" all matmul
        results, "minimal" those of projections only, "full" its input alone.
    """

    vocab_size: int
    num_layers: int
    embed_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_dim: int = 0
    max_positions: int = 4096
    rope_theta: float = 1e4
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-6
    qk_norm: bool = False
    tie_embeddings: bool = False
    attention_bias: bool = False
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    sliding_window: int | None = None
    moe: MoEConfig | None = None
    dropout: float = 0.0
    init_std: float = 0.02
    param_dtype: Dtype = "float32"
    compute_dtype: Dtype = "float32"
    remat: RematPolicy = "none"

    def __post_init__(self) -> None:
        """Checks that the numbers make a model."""
        for name in (
            "vocab_size",
            "num_layers",
            "embed_dim",
            "num_heads",
            "num_kv_heads",
            "max_positions",
        ):
            check_count(f"DecoderConfig.{name}", getattr(self, name), 1)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"DecoderConfig.num_heads is {self.num_heads}, expected a multiple of "
                f"num_kv_heads = {self.num_kv_heads}"
            )
        rope_frequencies(self.head_dim, self.rope_theta, self.rope_scaling)
        check_count("DecoderConfig.mlp_dim", self.mlp_dim, 0)
        if (self.mlp_dim > 0) == (self.moe is not None):
            raise ValueError(
                f"DecoderConfig.mlp_dim is {self.mlp_dim} and moe is {self.moe}; set mlp_dim > 0 "
                "for a dense model, or moe with mlp_dim = 0 for a mixture"
            )
        check_positive("DecoderConfig.norm_eps", self.norm_eps)
        check_nonnegative("DecoderConfig.init_std", self.init_std)
        for name in ("attention_softcap", "logit_softcap"):
            if getattr(self, name) is not None:
                check_positive(f"DecoderConfig.{name}", getattr(self, name))
        if self.sliding_window is not None:
            check_count("DecoderConfig.sliding_window", self.sliding_window, 1)
        if not 0 <= self.dropout < 1:
            raise ValueError(f"DecoderConfig.dropout is {self.dropout}, expected a rate in [0, 1)")
        check_choice("DecoderConfig.remat", self.remat, get_args(RematPolicy))
        check_choice("DecoderConfig.param_dtype", self.param_dtype, get_args(Dtype))
        check_choice("DecoderConfig.compute_dtype", self.compute_dtype, get_args(Dtype))
