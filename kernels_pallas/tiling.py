"""Small arithmetic on block shapes, and result types that kernels share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

__all__ = [
    "accumulator_dtype",
    "align_varying",
    "ceil_div",
    "next_power_of_2",
    "promoted",
    "result_type",
    "round_up",
]


def accumulator_dtype(*arrays: Any) -> jnp.dtype:
    """float32, or float64 when any of the arrays is; whatever promotion rules are in force."""
    wide = any(a.dtype == jnp.float64 for a in arrays)
    return jnp.dtype(jnp.float64 if wide else jnp.float32)


def ceil_div(a: int, b: int) -> int:
    """``a / b`` rounded up."""
    return -(-a // b)


def round_up(a: int, b: int) -> int:
    """The smallest multiple of ``b`` that is not below ``a``."""
    return ceil_div(a, b) * b


def next_power_of_2(a: int) -> int:
    """The smallest power of two that is not below ``a`` (and not below 1)."""
    return 1 << max(a - 1, 0).bit_length()


def promoted(*dtypes: Any) -> Any:
    """The dtype these promote to, also where implicit promotion is switched off."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(*dtypes)


def _varying(*arrays: Any) -> frozenset[str]:
    axes = (jax.typeof(a).manual_axis_type.varying for a in arrays if a is not None)
    return frozenset().union(*axes)


def align_varying(*trees: Any) -> Any:
    """Marks arrays as varying over every mesh axis that one of them varies over.

    Inside `jax.shard_map` a loop's carry has to start with the type that it ends with, and a custom
    VJP has to return gradients of its arguments' types; both hold once all arguments have the same.
    The gradient of an array that is the same on several devices is then summed over them. Does
    nothing outside `jax.shard_map`.

    Args:
      *trees: Arrays, None, or pytrees of them.

    Returns:
      The trees (one alone is not wrapped in a tuple).
    """
    axes = _varying(*jax.tree.leaves(trees))

    def align(a: jax.Array) -> jax.Array:
        missing = tuple(sorted(axes - _varying(a)))
        return jax.lax.pcast(a, missing, to="varying") if missing else a

    aligned = jax.tree.map(align, trees) if axes else trees
    return aligned[0] if len(aligned) == 1 else aligned


def result_type(shape: Sequence[int], dtype: Any, *operands: jax.Array) -> jax.ShapeDtypeStruct:
    """Shape and dtype of a kernel's result, varying over the mesh axes that its operands vary over.

    Inside `jax.shard_map` a kernel has to say over which mesh axes its result differs; outside it
    the set is empty.
    """
    varying = _varying(*operands)
    return jax.ShapeDtypeStruct(
        tuple(shape), dtype, manual_axis_type=jax.sharding.ManualAxisType(varying=varying)
    )
