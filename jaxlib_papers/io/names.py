"""Which stored tensors make up which parameter, and how they are turned, for both directions."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxlib_papers.nn.config import DecoderConfig

__all__ = ["Piece", "fused_expert_names", "parameter_pieces", "split_expert_names"]

Path = tuple[str, ...]


class Piece(NamedTuple):
    """The part of one parameter that one stored tensor fills.

    Attributes:
      name: The stored tensor, as Hugging Face names it.
      where: Index of the part in the parameter.
      view: Shape into which the stored tensor is split.
      order: Permutation of the view's axes that gives the part.
      stored_shape: Shape of the stored tensor.
    """

    name: str
    where: tuple[int | slice, ...]
    view: tuple[int, ...]
    order: tuple[int, ...]
    stored_shape: tuple[int, ...]

    def to_part(self, stored: np.ndarray) -> np.ndarray:
        """The stored tensor in the layout of the parameter (a view)."""
        return stored.reshape(self.view).transpose(self.order)

    def to_stored(self, part: np.ndarray) -> np.ndarray:
        """The part of a parameter as it is stored."""
        return part.transpose(np.argsort(self.order)).reshape(self.stored_shape)


def _matrix(name: str, where: tuple[int | slice, ...], rows: int, columns: int) -> Piece:
    """Stored [out, in], ours [in, out]."""
    return Piece(name, where, (rows, columns), (1, 0), (rows, columns))


def _vector(name: str, where: tuple[int | slice, ...], *view: int) -> Piece:
    """A norm's scale or a bias, per head where ``view`` says so."""
    return Piece(name, where, view, tuple(range(len(view))), (int(np.prod(view)),))


def _attention(config: DecoderConfig, layer: int) -> dict[Path, list[Piece]]:
    embed, dim, at = config.embed_dim, config.head_dim, (layer,)
    prefix = f"model.layers.{layer}.self_attn."
    heads = {"query": config.num_heads, "key": config.num_kv_heads, "value": config.num_kv_heads}
    found: dict[Path, list[Piece]] = {}
    for part, count in heads.items():
        name = f"{prefix}{part[0]}_proj"
        found[(part,)] = [
            Piece(f"{name}.weight", at, (count, dim, embed), (2, 0, 1), (count * dim, embed))
        ]
        if config.attention_bias:
            found[(f"{part}_bias",)] = [_vector(f"{name}.bias", at, count, dim)]
    name, count = f"{prefix}o_proj", config.num_heads
    found[("out",)] = [
        Piece(f"{name}.weight", at, (embed, count, dim), (1, 2, 0), (embed, count * dim))
    ]
    if config.attention_bias:
        found[("out_bias",)] = [_vector(f"{name}.bias", at, embed)]
    if config.qk_norm:
        found[("query_norm", "scale")] = [_vector(f"{prefix}q_norm.weight", at, dim)]
        found[("key_norm", "scale")] = [_vector(f"{prefix}k_norm.weight", at, dim)]
    return found


def fused_expert_names(layer: int) -> tuple[str, str]:
    """Names of all experts' first and second matrices where they are stored as one tensor each."""
    prefix = f"model.layers.{layer}.mlp.experts."
    return f"{prefix}gate_up_proj", f"{prefix}down_proj"


def split_expert_names(layer: int, expert: int) -> tuple[str, str, str]:
    """Names of one expert's gate, up and down matrix."""
    prefix = f"model.layers.{layer}.mlp.experts.{expert}."
    return tuple(f"{prefix}{part}_proj.weight" for part in ("gate", "up", "down"))  # type: ignore[return-value]


def _feed_forward(config: DecoderConfig, layer: int, fused: bool) -> dict[Path, list[Piece]]:
    embed, at, moe = config.embed_dim, (layer,), config.moe
    prefix = f"model.layers.{layer}.mlp."
    if moe is None:
        hidden = config.mlp_dim
        return {
            ("gate",): [_matrix(f"{prefix}gate_proj.weight", at, hidden, embed)],
            ("up",): [_matrix(f"{prefix}up_proj.weight", at, hidden, embed)],
            ("down",): [_matrix(f"{prefix}down_proj.weight", at, embed, hidden)],
        }
    count, hidden = moe.num_experts, moe.expert_dim
    router = [_matrix(f"{prefix}gate.weight", at, count, embed)]
    if fused:
        first, second = fused_expert_names(layer)
        gate_up = [
            Piece(
                first,
                at,
                (count, 2, hidden, embed),
                (0, 3, 1, 2),
                (count, 2 * hidden, embed),
            )
        ]
        down = [Piece(second, at, (count, embed, hidden), (0, 2, 1), (count, embed, hidden))]
        return {("router",): router, ("gate_up",): gate_up, ("down",): down}
    gate_up, down = [], []
    for expert in range(count):
        gate, up, out = split_expert_names(layer, expert)
        for index, name in enumerate((gate, up)):
            gate_up.append(_matrix(name, (layer, expert, slice(None), index), hidden, embed))
        down.append(_matrix(out, (layer, expert), embed, hidden))
    return {("router",): router, ("gate_up",): gate_up, ("down",): down}


def parameter_pieces(
    config: DecoderConfig, *, fused_experts: bool = False
) -> dict[Path, list[Piece]]:
    """Every parameter of a `DecoderLM` by its path in the tree, with the tensors it is made of.

    Args:
      config: The decoder's configuration.
      fused_experts: All experts of a layer are stored as one tensor, not one each.

    Raises:
      ValueError: The model has a shared expert, which none of these families stores.
    """
    if config.moe is not None and config.moe.shared_expert_dim:
        raise ValueError(
            f"config.moe.shared_expert_dim is {config.moe.shared_expert_dim}; the families that "
            "can be read and written (Llama, Qwen3, Qwen3-MoE) have no shared expert: use 0"
        )
    size = (config.vocab_size, config.embed_dim)
    found: dict[Path, list[Piece]] = {
        ("embedding",): [Piece("model.embed_tokens.weight", (), size, (0, 1), size)],
        ("final_norm", "scale"): [_vector("model.norm.weight", (), config.embed_dim)],
    }
    if not config.tie_embeddings:
        found[("head",)] = [_matrix("lm_head.weight", (), *size)]
    for layer in range(config.num_layers):
        prefix, at = f"model.layers.{layer}.", (layer,)
        parts: dict[Path, list[Piece]] = {
            ("attention_norm", "scale"): [
                _vector(f"{prefix}input_layernorm.weight", at, config.embed_dim)
            ],
            ("feed_forward_norm", "scale"): [
                _vector(f"{prefix}post_attention_layernorm.weight", at, config.embed_dim)
            ],
        }
        for part, pieces in _attention(config, layer).items():
            parts[("attention", *part)] = pieces
        for part, pieces in _feed_forward(config, layer, fused_experts).items():
            parts[("feed_forward", *part)] = pieces
        for part, pieces in parts.items():
            found.setdefault(("layers", *part), []).extend(pieces)
    return found
