"""What adapters of a decoder share: their variable types, and the scope in which they run.

A projection that carries an adapter stands where its kernel stood (`nn.layers.project` hands over
to it). What such a projection needs besides its input (heads shared by the whole model, a dropout
key) and what it has to say besides its output (how it routed) goes through a scope that the decoder
opens around each layer while it is traced; the results leave the layer as values.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Key

__all__ = ["AdapterParam", "AdapterScope", "SharedAdapters", "adapter_scope", "current_scope"]


class AdapterParam(nnx.Param):
    """A parameter of an adapter: `split_model(model, AdapterParam)` trains these and no other."""


class SharedAdapters(nnx.Module):
    """What belongs to the adapters of a model as a whole, once in its tree.

    Args:
      heads: Modules by name, for instance LD-MoLE's lambda heads by input width; empty for LoRA.
      dropout: Rate on the adapters' input.
    """

    def __init__(self, heads: dict[str, nnx.Module] | None = None, *, dropout: float = 0.0):
        self.heads = nnx.Dict(heads or {})
        self.dropout = dropout


class AdapterScope:
    """What the adapters of one layer see while it is traced.

    Args:
      shared: The model's shared part, or None.
      key: PRNG key of dropout in this layer; None is no dropout.
    """

    def __init__(self, shared: SharedAdapters | None, key: Key[Array, ""] | None):
        self.shared, self._key, self._draws = shared, key, 0
        self.records: dict[str, Any] = {}

    def dropout_key(self) -> Key[Array, ""] | None:
        """A new key at each call; None where nothing is dropped."""
        if self._key is None:
            return None
        self._draws += 1
        # Apart from the layer's own dropout keys, which come from splitting the same key.
        return jax.random.fold_in(jax.random.fold_in(self._key, 0xADA), self._draws)


_CURRENT: ContextVar[AdapterScope | None] = ContextVar("jaxlib_papers_adapters", default=None)


@contextmanager
def adapter_scope(
    shared: SharedAdapters | None = None, key: Key[Array, ""] | None = None
) -> Iterator[AdapterScope]:
    """Opens the scope of one layer; enter it inside the function that is traced.

    Args:
      shared: The model's shared part (`DecoderLM.adapters`).
      key: PRNG key of the adapters' dropout.

    Yields:
      The scope; after the layer has run, `records` holds what its projections recorded by name.
    """
    scope = AdapterScope(shared, key)
    token = _CURRENT.set(scope)
    try:
        yield scope
    finally:
        _CURRENT.reset(token)


def current_scope() -> AdapterScope | None:
    """The innermost open scope, or None."""
    return _CURRENT.get()
