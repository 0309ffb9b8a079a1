"""Small arithmetic on block shapes, and result types that kernels share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

__all__ = ["ceil_div", "next_power_of_2", "result_type", "round_up"]


def ceil_div(a: int, b: int) -> int:
    """``a / b`` rounded up."""
    return -(-a // b)


def round_up(a: int, b: int) -> int:
    """The smallest multiple of ``b`` that is not below ``a``."""
    return ceil_div(a, b) * b


def next_power_of_2(a: int) -> int:
    """The smallest power of two that is not below ``a`` (and not below 1)."""
    return 1 << max(a - 1, 0).bit_length()


def result_type(shape: Sequence[int], dtype: Any, *operands: jax.Array) -> jax.ShapeDtypeStruct:
    """Shape and dtype of a kernel's result, varying over the mesh axes that its operands vary over.

    Inside `jax.shard_map` a kernel has to say over which mesh axes its result differs; outside it
    the set is empty.
    """
    varying = frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in operands))
    return jax.ShapeDtypeStruct(
        tuple(shape), dtype, manual_axis_type=jax.sharding.ManualAxisType(varying=varying)
    )
