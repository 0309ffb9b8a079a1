"""Small GGUF files of the Llama architecture, written by the format's own package."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from jaxlib_papers.nn.config import DecoderConfig

__all__ = ["VOCABULARY_SIZE", "vocabulary", "write_gguf"]

VOCABULARY_SIZE = 40
_TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def vocabulary() -> tuple[list[str], list[tuple[str, str]], list[int]]:
    """A byte-level vocabulary, most of it single letters.

    Returns:
      (tokens, merges, kinds of the tokens in GGUF's numbers: 1 is normal, 3 is control).
    """
    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)]
    merges = [("a", "b"), ("ab", "c"), ("Ġ", "a"), ("Ġa", "b")]
    words = ["<unk>", "<s>", "</s>", "Ġ", "Ċ", "1", "2", *letters, *("".join(m) for m in merges)]
    words += [f"<extra{i}>" for i in range(VOCABULARY_SIZE - len(words))]
    kinds = [3 if w.startswith("<") else 1 for w in words]
    return words, merges, kinds


def _interleave(array: np.ndarray, heads: int) -> np.ndarray:
    """Rows of query or key in the order that GGUF stores: (half, pair) -> (pair, half)."""
    return array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def write_gguf(
    path: str | os.PathLike[str],
    config: DecoderConfig,
    weights: Mapping[str, np.ndarray],
    *,
    kind: str | Callable[[str], str] = "F32",
    **metadata: str,
) -> Path:
    """Writes a model with the vocabulary above.

    Args:
      path: The file.
      config: Of a Llama with `VOCABULARY_SIZE` tokens.
      weights: Tensors under Hugging Face's names; names that it doesn't know are kept.
      kind: How matrices are stored ("F32", "F16", "Q8_0", ...), or a function from the name of the
        tensor; vectors are float32.
      **metadata: Strings that replace what would be written, with "__" for the dots of a key.

    Returns:
      The path.
    """
    import gguf

    writer = gguf.GGUFWriter(str(path), "llama")
    words, merges, kinds = vocabulary()
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.embed_dim)
    writer.add_feed_forward_length(config.mlp_dim)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(words)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(_TEMPLATE)
    for key, value in metadata.items():
        writer.add_string(key.replace("__", "."), value)
    for name, array in weights.items():
        for part, count in (("q_proj", config.num_heads), ("k_proj", config.num_kv_heads)):
            if f".{part}." in name:
                array = _interleave(array, count)
        stored = name
        for theirs, ours in _NAMES.items():
            stored = stored.replace(theirs, ours)
        array = np.ascontiguousarray(array, np.float32)
        wanted = kind if isinstance(kind, str) else kind(name)
        form = gguf.GGMLQuantizationType["F32" if array.ndim == 1 else wanted]
        if form == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(stored, array)
        else:
            writer.add_tensor(stored, gguf.quants.quantize(array, form), raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(path)
