"""Modules with adapters for the sweep: what `cases` turns into its own cases."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from jaxlib_papers.moe import ld_mole
from jaxlib_papers.nn.adapters import AdapterParam, SharedAdapters, adapter_scope
from jaxlib_papers.nn.config import DecoderConfig
from jaxlib_papers.nn.decoder import DecoderLM
from jaxlib_papers.nn.lora import LoRAConfig, LoRAProjection, inject_lora
from jaxlib_papers.train.state import merge_model, split_model

ROWS, LENGTH, WIDTH = 2, 6, 16
CONFIG = DecoderConfig(
    vocab_size=29,
    num_layers=2,
    embed_dim=WIDTH,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    mlp_dim=24,
    init_std=0.2,
    tie_embeddings=True,
)
MOLE = ld_mole.MoLEConfig(
    num_experts=3, rank=2, alpha=4.0, hidden=8, dropout=0.2, hidden_bias_init=0.5
)


def stream(dtype: str) -> jax.Array:
    return jax.random.normal(jax.random.key(7), (ROWS, LENGTH, WIDTH)).astype(dtype)


def _trained(model: Any, key: jax.Array) -> Any:
    """With factors that are not zero, so that gradients reach both of a product."""
    graphdef, params, rest = split_model(model, AdapterParam)
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(key, len(leaves))
    leaves = [
        leaf + 0.3 * jax.random.normal(k, leaf.shape) for leaf, k in zip(leaves, keys, strict=True)
    ]
    return merge_model(graphdef, jax.tree.unflatten(tree, leaves), rest)


def make_lora_model(key: jax.Array, dtype: str) -> DecoderLM:
    model = DecoderLM(dataclasses.replace(CONFIG, compute_dtype=dtype), key=key)
    config = LoRAConfig(rank=2, dropout=0.2, targets=("query", "out", "down", "head"))
    return _trained(inject_lora(model, config, key=key), key)


def make_mole_model(key: jax.Array, dtype: str) -> DecoderLM:
    model = DecoderLM(dataclasses.replace(CONFIG, compute_dtype=dtype), key=key)
    return _trained(ld_mole.with_mole(model, ld_mole.inject_mole(model, MOLE, key=key), MOLE), key)


def call_model(model: DecoderLM, key: jax.Array, dtype: str) -> Any:
    tokens = jax.random.randint(jax.random.key(5), (ROWS, LENGTH), 0, CONFIG.vocab_size)
    out = model(tokens, key=key)
    return out, model.logits(out.hidden)


def make_lora(key: jax.Array, dtype: str) -> LoRAProjection:
    """The first layer's query of a model."""
    model = make_lora_model(key, dtype)
    return jax.tree.map(
        lambda v: v.replace(v[...][0], logical_axes=v.get_metadata()["logical_axes"][1:]),
        model.layers.attention.query,
        is_leaf=lambda x: isinstance(x, nnx.Variable),
    )


def call_lora(module: LoRAProjection, key: jax.Array, dtype: str) -> Any:
    with adapter_scope(key=key):
        return module.project(stream(dtype))


def make_head(key: jax.Array, dtype: str) -> ld_mole.LambdaHead:
    return ld_mole.LambdaHead(8, WIDTH, hidden_bias_init=0.5, key=key)


def make_shared(key: jax.Array, dtype: str) -> SharedAdapters:
    return SharedAdapters({str(WIDTH): make_head(key, dtype)}, dropout=0.1)


def make_linear(key: jax.Array, dtype: str) -> ld_mole.MoLELinear:
    linear = ld_mole.MoLELinear(
        WIDTH, 5, num_experts=3, rank=2, alpha=4.0, dropout=0.2, use_bias=True, key=key
    )
    linear.B = linear.B.replace(jax.random.normal(key, linear.B[...].shape))
    return linear


def call_linear(module: ld_mole.MoLELinear, key: jax.Array, dtype: str) -> Any:
    head = make_head(jax.random.key(3), dtype)
    return module(stream(dtype), head, key=key)


# Name: (class, make, call).
ADAPTERS: dict[str, tuple[type[nnx.Module], Callable, Callable]] = {
    "LoRAProjection": (LoRAProjection, make_lora, call_lora),
    "SharedAdapters": (
        SharedAdapters,
        make_shared,
        lambda module, key, dtype: module.heads[str(WIDTH)](stream(dtype)),
    ),
    "LambdaHead": (
        ld_mole.LambdaHead,
        make_head,
        lambda module, key, dtype: module(stream(dtype)),
    ),
    "MoLELinear": (ld_mole.MoLELinear, make_linear, call_linear),
    "DecoderLM with LoRA": (DecoderLM, make_lora_model, call_model),
    "DecoderLM with LD-MoLE": (DecoderLM, make_mole_model, call_model),
}
