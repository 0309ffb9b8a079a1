"""Checks of arguments that every function here makes the same way, before any arithmetic.

Shapes, dtypes and Python numbers are known while a function is traced, so checking them costs
nothing at run time. Values of arrays are looked at only where they are at hand (outside `jit`).
"""

from __future__ import annotations

import math
from collections.abc import Collection
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

__all__ = [
    "as_float",
    "check_choice",
    "check_count",
    "check_integer",
    "check_labels",
    "check_ndim",
    "check_nonnegative",
    "check_positive",
    "check_shape",
    "float_dtype",
    "is_concrete",
]


def is_concrete(value: Any) -> bool:
    """Whether the numbers in `value` can be read now: not traced, and all on this host."""
    if isinstance(value, jax.Array):
        return not isinstance(value, jax.core.Tracer) and value.is_fully_addressable
    return True


def as_float(*arrays: ArrayLike) -> Any:
    """Arrays in one floating dtype: float64 if any of them has it, else float32.

    Losses and reductions are computed in what this returns, so bfloat16 input loses nothing more
    and float64 input stays float64.

    Args:
        *arrays: anything `jnp.asarray` takes; integers and booleans too.

    Returns:
        The converted array, or a tuple of them when several were given.
    """
    converted = [jnp.asarray(a) for a in arrays]
    dtype = jnp.float64 if any(a.dtype == jnp.float64 for a in converted) else jnp.float32
    converted = [a.astype(dtype) for a in converted]
    return converted[0] if len(converted) == 1 else tuple(converted)


def float_dtype(*arrays: Any) -> jnp.dtype:
    """The dtype in which sums over these arrays are formed: float64 if any has it, else float32."""
    wide = any(a.dtype == jnp.float64 for a in arrays)
    return jnp.dtype(jnp.float64 if wide else jnp.float32)


def check_shape(name: str, array: Any, expected: tuple[int, ...], meaning: str) -> None:
    """Raises ValueError unless `array` has exactly the shape `expected`, called `meaning`."""
    if jnp.shape(array) != tuple(expected):
        raise ValueError(
            f"{name} has shape {jnp.shape(array)}, expected {meaning} = {tuple(expected)}"
        )


def check_ndim(name: str, array: Any, allowed: Collection[int], meaning: str) -> None:
    """Raises ValueError unless the number of axes is one of `allowed`."""
    if jnp.ndim(array) not in allowed:
        raise ValueError(f"{name} has shape {jnp.shape(array)}, expected {meaning}")


def check_integer(name: str, array: Any) -> None:
    """Raises ValueError unless the dtype is a (signed or unsigned) integer."""
    dtype = jnp.asarray(array).dtype
    if not jnp.issubdtype(dtype, jnp.integer):
        raise ValueError(f"{name} has dtype {dtype}, expected integers; cast it with astype(int32)")


def check_count(name: str, value: int, low: int, high: int | None = None) -> None:
    """Raises ValueError unless `value` is a Python integer in low..high."""
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not whole or value < low or (high is not None and value > high):
        bounds = f">= {low}" if high is None else f"in {low}..{high}"
        raise ValueError(f"{name} is {value!r}, expected an integer {bounds}")


def check_positive(name: str, value: float) -> None:
    """Raises ValueError for a number that is not > 0 and finite; a traced value passes."""
    if is_concrete(value) and not (0 < float(value) < math.inf):
        raise ValueError(f"{name} is {value}, expected a finite number > 0")


def check_nonnegative(name: str, value: float) -> None:
    """Raises ValueError for anything but a finite number >= 0."""
    if not isinstance(value, Real) or not (0 <= float(value) < math.inf):
        raise ValueError(f"{name} is {value!r}, expected a finite number >= 0")


def check_choice(name: str, value: Any, choices: Collection[Any]) -> None:
    """Raises ValueError unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name} is {value!r}, expected one of {sorted(choices)}")


def check_labels(name: str, labels: Any, num_classes: int) -> None:
    """Raises ValueError unless labels are integers in -1..num_classes - 1 (-1 means no label).

    The range is checked only for values that are at hand: inside `jit` this says nothing, so a
    pipeline calls it on its own NumPy arrays.
    """
    check_integer(name, labels)
    if not is_concrete(labels):
        return
    values = np.asarray(labels)
    wrong = (values < -1) | (values >= num_classes)
    if wrong.any():
        where = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise ValueError(
            f"{name}{list(where)} is {int(values[where])}, expected -1 (no label) or "
            f"0..{num_classes - 1}; raise the number of classes or fix the labels"
        )
