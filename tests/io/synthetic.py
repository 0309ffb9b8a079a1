"""Tiny models in memory and on disk; their GGUF files are written by `tools.tiny_gguf`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxlib_papers.nn.config import DecoderConfig, MoEConfig
from jaxlib_papers.nn.decoder import DecoderLM
from tools.tiny_gguf import VOCABULARY_SIZE, vocabulary, write_gguf

__all__ = [
    "CONFIG",
    "QWEN",
    "SPARSE",
    "logits",
    "make",
    "read_weights",
    "tokens",
    "vocabulary",
    "write_gguf",
    "write_weights",
]

CONFIG = DecoderConfig(
    vocab_size=VOCABULARY_SIZE,
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
