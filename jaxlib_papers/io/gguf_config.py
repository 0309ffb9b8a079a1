"""The decoder that a GGUF file of the Llama architecture describes in its metadata."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from jaxlib_papers.io.errors import FormatError
from jaxlib_papers.io.gguf import GGUFFile
from jaxlib_papers.io.limits import MAX_HEAD_DIM, MAX_LAYERS
from jaxlib_papers.nn.config import DecoderConfig, RopeScaling
from jaxlib_papers.ops.rope import rope_frequencies

__all__ = ["config_from_gguf"]

_MISSING = object()
# Llama 3.1 and 3.2 store their stretched frequencies as a tensor and not the numbers behind it.
_LLAMA3 = [RopeScaling("llama3", factor, 8192) for factor in (8.0, 32.0)]


class _Metadata:
    def __init__(self, file: GGUFFile):
        self.file = file

    def fail(self, what: str) -> FormatError:
        return FormatError(f"{self.file.path}: {what}")

    def number(self, name: str, default: Any = _MISSING, *, kind: type = int) -> Any:
        value = self.file.metadata.get(f"llama.{name}", default)
        if value is _MISSING:
            raise self.fail(f"metadata llama.{name} is missing")
        allowed = (int,) if kind is int else (int, float)
        if value is not None and (isinstance(value, bool) or not isinstance(value, allowed)):
            raise self.fail(f"metadata llama.{name} is not a plain number; not implemented")
        if value is not None and not (math.isfinite(value) and abs(value) < 2**40):
            raise self.fail(f"metadata llama.{name} is {value}, no number of a model")
        if isinstance(value, float):  # stored as float32: 1e-05, not 9.999999747e-06
            value = float(str(np.float32(value)))
        return None if value is None else kind(value)


def _scaling(data: _Metadata, head_dim: int, theta: float) -> RopeScaling | None:
    metadata, file = data.file.metadata, data.file
    kind = metadata.get("llama.rope.scaling.type", "none")
    original = data.number("rope.scaling.original_context_length", None)
    if "rope_freqs.weight" in file.tensors:
        divisors = file.read("rope_freqs.weight").reshape(-1)
        plain, _ = rope_frequencies(head_dim, theta)
        for scaling in _LLAMA3:
            stretched, _ = rope_frequencies(head_dim, theta, scaling)
            if divisors.shape == plain.shape and np.allclose(
                plain / divisors, stretched, rtol=1e-3
            ):
                return scaling
        raise data.fail(
            "tensor 'rope_freqs.weight' holds frequencies that are not those of Llama 3.1 or 3.2; "
            "load the model from its Hugging Face folder"
        )
    if kind == "none":
        return None
    factor = data.number("rope.scaling.factor", None, kind=float)
    if kind not in ("linear", "yarn") or factor is None or (kind == "yarn" and original is None):
        raise data.fail(f"rope scaling {kind!r} with factor {factor} is not implemented")
    options = {} if original is None else {"original_max_positions": original}
    return RopeScaling(kind, factor, **options)


def config_from_gguf(file: GGUFFile) -> DecoderConfig:
    """Reads the configuration out of a GGUF file.

    Args:
      file: An opened file.

    Raises:
      FormatError: Another architecture than Llama, a mixture of experts, rope scaling that is not
        implemented, a missing or impossible number.
    """
    data = _Metadata(file)
    architecture = file.metadata.get("general.architecture")
    if architecture != "llama":
        raise data.fail(
            f"general.architecture is {architecture!r}, only 'llama' is read from GGUF; load the "
            "model from its Hugging Face folder"
        )
    if data.number("expert_count", 0):
        raise data.fail("a mixture of experts (llama.expert_count) is not read from GGUF")
    embed, heads = data.number("embedding_length"), data.number("attention.head_count")
    if heads < 1 or embed < 1:
        raise data.fail(f"embedding_length {embed} and head_count {heads}, expected both positive")
    head_dim = data.number("attention.key_length", embed // heads)
    layers = data.number("block_count")
    for name, value, most in (
        ("block_count", layers, MAX_LAYERS),
        ("attention.key_length", head_dim, MAX_HEAD_DIM),
    ):
        if not 1 <= value <= most:
            raise data.fail(f"metadata llama.{name} is {value}, expected 1..{most}")
    if data.number("rope.dimension_count", head_dim) != head_dim:
        raise data.fail("rotary positions on a part of each head are not implemented")
    table = file.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise data.fail("tensor 'token_embd.weight' is missing or no matrix")
    theta = data.number("rope.freq_base", 1e4, kind=float)
    try:
        return DecoderConfig(
            vocab_size=table.shape[0],
            num_layers=layers,
            embed_dim=embed,
            num_heads=heads,
            num_kv_heads=data.number("attention.head_count_kv", heads),
            head_dim=head_dim,
            mlp_dim=data.number("feed_forward_length"),
            max_positions=data.number("context_length"),
            rope_theta=theta,
            rope_scaling=_scaling(data, head_dim, theta),
            norm_eps=data.number("attention.layer_norm_rms_epsilon", kind=float),
            tie_embeddings="output.weight" not in file.tensors,
            attention_bias="blk.0.attn_q.bias" in file.tensors,
        )
    except FormatError:
        raise
    except ValueError as error:
        raise data.fail(str(error)) from error
