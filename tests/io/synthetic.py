"""Tiny models on disk, written by the formats' own packages."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxlib_papers.nn.config import DecoderConfig, MoEConfig
from jaxlib_papers.nn.decoder import DecoderLM

CONFIG = DecoderConfig(
    vocab_size=40,
    num_layers=3,
    embed_dim=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_dim=64,
    max_positions=64,
    rope_theta=1e5,
    norm_eps=1e-5,
)
QWEN = dataclasses.replace(CONFIG, qk_norm=True, tie_embeddings=True, attention_bias=True)
SPARSE = dataclasses.replace(CONFIG, mlp_dim=0, qk_norm=True, moe=MoEConfig(4, 2, expert_dim=16))
TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


def make(config, seed=0):
    """A model drawn by NumPy, which compiles nothing; norms and biases are random too."""
    rng = np.random.default_rng(seed)

    def draw(leaf):
        mean = 1.0 if leaf.ndim == 2 and leaf.shape[0] == config.num_layers else 0.0  # norms
        return jnp.asarray(mean + 0.2 * rng.normal(size=leaf.shape), leaf.dtype)

    abstract = jax.eval_shape(lambda: DecoderLM(config, key=jax.random.key(0)))
    return jax.tree.map(draw, abstract)


def logits(model, tokens):
    return np.asarray(jax.jit(lambda m, t: m.logits(m(t).hidden))(model, tokens))


def tokens(config, rows=2, length=12, seed=1):
    shape = (rows, length)
    return np.random.default_rng(seed).integers(0, config.vocab_size, shape).astype(np.int32)


def vocabulary():
    """A byte-level vocabulary of 40 tokens, most of them single letters, and its merges."""
    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)]
    merges = [("a", "b"), ("ab", "c"), ("Ġ", "a"), ("Ġa", "b")]
    words = ["<unk>", "<s>", "</s>", "Ġ", "Ċ", "1", "2", *letters, *("".join(m) for m in merges)]
    words += [f"<extra{i}>" for i in range(40 - len(words))]
    kinds = [3 if w.startswith("<") else 1 for w in words]
    return words, merges, kinds


def interleave(array, heads):
    """Rows of query or key in the order that GGUF stores: (half, pair) -> (pair, half)."""
    return array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


NAMES = {
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


def write_gguf(path, config, weights, *, kind="F32", **metadata):
    """A GGUF file of the Llama architecture from tensors under Hugging Face's names.

    Matrices are stored as ``kind``; further metadata replaces what would be written.
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
    writer.add_chat_template(TEMPLATE)
    for key, value in metadata.items():
        writer.add_string(key.replace("__", "."), value)
    stored = gguf.GGMLQuantizationType[kind]
    for name, array in weights.items():
        for part, count in (("q_proj", config.num_heads), ("k_proj", config.num_kv_heads)):
            if f".{part}." in name:
                array = interleave(array, count)
        name = name.replace("model.layers.", "blk.")
        for ours, theirs in NAMES.items():
            name = name.replace(ours, theirs)
        name = {
            "model.embed_tokens.weight": "token_embd.weight",
            "model.norm.weight": "output_norm.weight",
            "lm_head.weight": "output.weight",
        }.get(name, name)
        array = np.ascontiguousarray(array, np.float32)
        if array.ndim == 1 or kind == "F32":
            writer.add_tensor(name, array)
        else:
            writer.add_tensor(name, gguf.quants.quantize(array, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(path)


def read_weights(folder):
    """All tensors of a folder, by the format's own package."""
    from safetensors.numpy import load_file

    found = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        found |= load_file(str(file))
    return found


def write_weights(folder, weights, config=None):
    from safetensors.numpy import save_file

    save_file(weights, str(Path(folder) / "model.safetensors"))
    if config is not None:
        (Path(folder) / "config.json").write_text(json.dumps(config))
