"""How to make and call each public `nnx.Module` class, small enough for a sweep over all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from flax import nnx

__all__ = ["CASES", "Case"]


class Case(NamedTuple):
    """One class of the sweep.

    Attributes:
        make: (key, compute dtype) -> module, parameters in float32.
        call: (module, key) -> tree of arrays, stochastic parts switched on.
        without_gradient: Parts of parameter paths that this call does not reach.
    """

    make: Callable[[jax.Array, str], nnx.Module]
    call: Callable[[Any, jax.Array], Any]
    without_gradient: tuple[str, ...] = ()


CASES: dict[str, Case] = {}
