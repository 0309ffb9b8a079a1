"""Flows and the networks inside them, for the sweep over all modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from jaxlib_papers.nn.flows.autoregressive import ConditionalMAF
from jaxlib_papers.nn.flows.base import Chain, Flow, Permutation, StandardisedFlow
from jaxlib_papers.nn.flows.coupling import ConditionalRealNVP, ConditionalSplineFlow
from jaxlib_papers.nn.flows.networks import GRU, MLP, CausalLayer, MaskedMLP
from jaxlib_papers.nn.flows.trajectory import TrajectoryFlow

__all__ = ["FLOWS", "NETWORKS", "call_flow", "call_network", "make"]

ROWS = 3


def _moved(module: nnx.Module, key: jax.Array) -> nnx.Module:
    """Away from the identity that flows start as, where half of the parameters have no gradient."""
    graphdef, params, rest = nnx.split(module, nnx.Param, ...)
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(key, max(len(leaves), 1))
    leaves = [a + 0.2 * jax.random.normal(k, a.shape) for a, k in zip(leaves, keys, strict=False)]
    return nnx.merge(graphdef, jax.tree.unflatten(tree, leaves), rest)


def _standardised(key: jax.Array) -> Flow:
    flow = ConditionalRealNVP(3, 2, layers=2, hidden=4, key=key)
    # One number for all columns: what is not drawn from the key has to look like it.
    return StandardisedFlow(flow, [0.5] * 3, [2.0] * 3, [-1.0] * 2, [0.5] * 2)


def _chain(key: jax.Array) -> Flow:
    keys = jax.random.split(key)
    return Chain(
        [
            ConditionalRealNVP(3, 2, layers=2, hidden=4, key=keys[0]),
            Permutation((1, 2, 0)),
            ConditionalMAF(3, 2, layers=1, hidden=4, key=keys[1]),
        ]
    )


def _trajectory(key: jax.Array) -> Flow:
    options = dict(blocks=2, width=4, heads=2, attention_layers=1)
    return TrajectoryFlow(3, 2, features=2, steps=4, **options, key=key)


FLOWS: dict[str, Callable[[jax.Array], nnx.Module]] = {
    "ConditionalRealNVP": lambda k: ConditionalRealNVP(3, 2, layers=2, hidden=4, key=k),
    "ConditionalSplineFlow": lambda k: ConditionalSplineFlow(
        3, 2, layers=2, hidden=4, bins=3, key=k
    ),
    "ConditionalMAF": lambda k: ConditionalMAF(3, 2, layers=2, hidden=4, key=k),
    "TrajectoryFlow": _trajectory,
    "StandardisedFlow": _standardised,
    "Chain": _chain,
    "Permutation": lambda k: Permutation((2, 0, 1)),
}
NETWORKS: dict[str, tuple[Callable[[jax.Array], nnx.Module], tuple[int, ...]]] = {
    "MLP": (lambda k: MLP((4, 6, 3), key=k), (ROWS, 4)),
    "MaskedMLP": (lambda k: MaskedMLP(4, 0, 8, 2, key=k), (ROWS, 4)),
    "CausalLayer": (lambda k: CausalLayer(4, 2, key=k), (ROWS, 5, 4)),
    "GRU": (lambda k: GRU(4, 3, key=k), (ROWS, 5, 4)),
}


def make(name: str) -> Callable[[jax.Array, str], nnx.Module]:
    build = FLOWS[name] if name in FLOWS else NETWORKS[name][0]

    def made(key: jax.Array, dtype: str) -> nnx.Module:
        keys = jax.random.split(key)
        return _moved(build(keys[0]), keys[1])

    return made


def call_flow(flow: Any, key: jax.Array, dtype: str) -> Any:
    """Density and samples at once; samples are made by the inverse."""
    keys = jax.random.split(jax.random.key(3), 2)
    y = jax.random.normal(keys[0], (ROWS, *flow.event_shape)).astype(dtype)
    shape = flow.context_shape
    x = None if shape is None else jax.random.normal(keys[1], (ROWS, *shape)).astype(dtype)
    return flow.log_prob(y, x), flow.sample_and_log_prob(key, x, 2)


def call_network(name: str) -> Callable[[Any, jax.Array, str], Any]:
    def call(network: Any, key: jax.Array, dtype: str) -> Any:
        values = jax.random.normal(jax.random.key(3), NETWORKS[name][1]).astype(dtype)
        return network(values, None) if name == "MaskedMLP" else network(values)

    return call
