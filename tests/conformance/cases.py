"""How to make and call each public `nnx.Module` class, small enough for a sweep over all."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxlib_papers.nn.attention import SelfAttention, SequenceInfo
from jaxlib_papers.nn.config import DecoderConfig, MoEConfig
from jaxlib_papers.nn.decoder import DecoderLayer, DecoderLM
from jaxlib_papers.nn.layers import RMSNorm, SwiGLU
from jaxlib_papers.nn.moe import MoELayer
from jaxlib_papers.ops.rope import rope_angles
from tests.conformance import adapter_cases, flow_cases

__all__ = ["CASES", "Case"]


class Case(NamedTuple):
    """One way to make and call one class.

    Attributes:
        cls: The class.
        make: (key, compute dtype) -> module, parameters in float32.
        call: (module, key, compute dtype) -> tree of arrays, stochastic parts switched on.
        without_gradient: Parts of parameter paths that this call does not reach.
        eager_dtypes: Where jit is compared with eager execution, which is slow for whole models.
    """

    cls: type[nnx.Module]
    make: Callable[[jax.Array, str], nnx.Module]
    call: Callable[[Any, jax.Array, str], Any]
    without_gradient: tuple[str, ...] = ()
    eager_dtypes: tuple[str, ...] = ("float32", "bfloat16")


ROWS, LENGTH, WIDTH = 2, 12, 16
DENSE = DecoderConfig(
    vocab_size=29,
    num_layers=2,
    embed_dim=WIDTH,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_dim=24,
    max_positions=LENGTH,
    dropout=0.1,
    init_std=0.2,
)
SPARSE = dataclasses.replace(
    DENSE, mlp_dim=0, qk_norm=True, tie_embeddings=True, moe=MoEConfig(4, 2, expert_dim=8)
)
# Everything that is off by default, at once.
EVERYTHING = dataclasses.replace(
    SPARSE,
    tie_embeddings=False,
    attention_bias=True,
    attention_softcap=5.0,
    logit_softcap=10.0,
    sliding_window=5,
    remat="full",
    moe=MoEConfig(4, 2, expert_dim=8, shared_expert_dim=8, capacity_factor=1.0, router_std=0.5),
)


def stream(dtype: str) -> jax.Array:
    return jax.random.normal(jax.random.key(7), (ROWS, LENGTH, WIDTH)).astype(dtype)


def segments() -> jax.Array:
    """Two documents and padding in the first row, one document in the second."""
    return jnp.array([[1] * 5 + [2] * 5 + [0] * 2, [1] * LENGTH], jnp.int32)


def sequence_info() -> SequenceInfo:
    positions = jnp.broadcast_to(jnp.arange(LENGTH, dtype=jnp.int32), (ROWS, LENGTH))
    return SequenceInfo(*rope_angles(positions, DENSE.head_dim, 1e4, None), segments())


def on_stream(
    cls: type[nnx.Module], config: DecoderConfig, *extra: Any, info: bool = False
) -> Case:
    """A layer that maps the residual stream to itself."""

    def make(key: jax.Array, dtype: str) -> nnx.Module:
        return cls(dataclasses.replace(config, compute_dtype=dtype), *extra, key=key)

    def call(module: Any, key: jax.Array, dtype: str) -> Any:
        if cls is DecoderLayer:
            return module(stream(dtype), sequence_info(), key=key)
        return module(stream(dtype), sequence_info()) if info else module(stream(dtype))

    return Case(cls, make, call)


def language_model(config: DecoderConfig) -> Case:
    def make(key: jax.Array, dtype: str) -> nnx.Module:
        return DecoderLM(dataclasses.replace(config, compute_dtype=dtype), key=key)

    def call(module: DecoderLM, key: jax.Array, dtype: str) -> Any:
        tokens = jax.random.randint(jax.random.key(5), (ROWS, LENGTH), 0, config.vocab_size)
        out = module(tokens, segment_ids=segments(), key=key)
        return out, module.logits(out.hidden)

    return Case(DecoderLM, make, call, eager_dtypes=("float32",))


CASES: dict[str, Case] = {
    "RMSNorm": Case(
        RMSNorm,
        lambda key, dtype: RMSNorm(WIDTH, eps=1e-6),
        lambda module, key, dtype: module(stream(dtype)),
    ),
    "SwiGLU": on_stream(SwiGLU, DENSE, 24),
    "SelfAttention": on_stream(SelfAttention, DENSE, info=True),
    "SelfAttention with everything": on_stream(SelfAttention, EVERYTHING, info=True),
    "MoELayer": on_stream(MoELayer, SPARSE),
    "MoELayer with everything": on_stream(MoELayer, EVERYTHING),
    "DecoderLayer dense": on_stream(DecoderLayer, DENSE),
    "DecoderLM sparse": language_model(SPARSE),
    "DecoderLM with everything": language_model(EVERYTHING),
}
for _name in (*flow_cases.FLOWS, *flow_cases.NETWORKS):
    CASES[_name] = Case(
        getattr(flow_cases, _name),
        flow_cases.make(_name),
        flow_cases.call_flow if _name in flow_cases.FLOWS else flow_cases.call_network(_name),
        eager_dtypes=("float32",),
    )
CASES |= {
    name: Case(*parts, eager_dtypes=("float32",)) for name, parts in adapter_cases.ADAPTERS.items()
}
