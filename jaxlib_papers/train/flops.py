"""Parameter counts and model FLOPs, under one stated convention.

Convention: a product [m, k] x [k, n] is 2mnk FLOPs; the backward pass is twice the forward pass;
causal attention counts half of the full score matrix; of the experts only the `top_k` that a token
uses count, and the router counts; the embedding look-up is free, the output head is not. Norms,
rotations, softmaxes, the optimizer and anything computed twice (rematerialisation) do not count.
So these are the FLOPs of the model, not of an implementation, as model FLOP utilisation wants.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

if TYPE_CHECKING:
    from jaxlib_papers.nn.config import DecoderConfig

__all__ = ["ParameterCounts", "count_parameters", "flops_per_token", "forward_flops_per_token"]

PyTree = Any


class ParameterCounts(NamedTuple):
    """Numbers of parameters.

    Attributes:
      total: All of them.
      active: Those that one token uses: all but the experts it isn't sent to.
      embedding: Those of look-up tables (first logical axis "vocab"), part of both others.
    """

    total: int
    active: int
    embedding: int


def count_parameters(params: PyTree, axes: PyTree, *, top_k: int | None = None) -> ParameterCounts:
    """Counts the parameters of a model from shapes and logical axes; nothing is allocated.

    An array stacked over "experts" (its first axis but for "layers") is used by a token for `top_k`
    of the experts; a router has "experts" as its last axis and is used whole.

    Args:
      params: Nested dict of arrays or ShapeDtypeStructs (`ModelSpec.params`).
      axes: Logical axes of the same structure (`ModelSpec.axes`).
      top_k: Experts per token; None counts all experts as active.
    """
    total = active = embedding = 0
    names = jax.tree.leaves(axes, is_leaf=lambda x: x is None or isinstance(x, tuple))
    for leaf, logical in zip(jax.tree.leaves(params), names, strict=True):
        size = math.prod(leaf.shape)
        inner = [(n, s) for n, s in zip(logical or (), leaf.shape, strict=False) if n != "layers"]
        total += size
        embedding += size if inner and inner[0][0] == "vocab" else 0
        if top_k is not None and inner and inner[0][0] == "experts":
            size = size // inner[0][1] * top_k
        active += size
    return ParameterCounts(total, active, embedding)


def forward_flops_per_token(config: DecoderConfig, seq_len: int) -> float:
    """Returns the FLOPs of a forward pass per token, at sequences of `seq_len` tokens.

    With a sliding window of W < T tokens a token attends to W - W^2 / 2T others on average.
    Documents packed into one row are counted as one sequence.

    Args:
      config: The decoder.
      seq_len: Tokens per row, T.

    Raises:
      ValueError: If seq_len < 1.
    """
    if seq_len < 1:
        raise ValueError(f"seq_len={seq_len}; expected >= 1")
    width, heads = config.embed_dim, config.num_heads * config.head_dim
    projections = width * (2 * heads + 2 * config.num_kv_heads * config.head_dim)
    window = min(config.sliding_window or seq_len, seq_len)
    context = window - window**2 / (2 * seq_len)
    scores = 2 * heads * context  # q k^T, and the product with v
    if config.moe is None:
        feed_forward = 3 * width * config.mlp_dim
    else:
        moe = config.moe
        feed_forward = width * (
            3 * (moe.top_k * moe.expert_dim + moe.shared_expert_dim) + moe.num_experts
        )
    layer = projections + scores + feed_forward
    return 2.0 * (config.num_layers * layer + width * config.vocab_size)


def flops_per_token(config: DecoderConfig, seq_len: int) -> float:
    """Returns the FLOPs of a training step per token: three times the forward pass.

    Args:
      config: The decoder.
      seq_len: Tokens per row.

    Raises:
      ValueError: If seq_len < 1.
    """
    return 3.0 * forward_flops_per_token(config, seq_len)
