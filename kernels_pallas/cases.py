"""Named argument shapes of a kernel, shared by the tests, the bench and the ahead-of-time check.

Every kernel folder has a ``cases.py`` with a tuple ``CASES`` of `Case`. A case knows how to call
the public function, how to draw arguments, and what the algorithm can't do with less of:
floating-point operations and bytes moved to and from main memory.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["KERNELS", "Case", "all_cases", "nbytes"]

KERNELS: tuple[str, ...] = (
    "attention",
    "block_sparse_attention",
    "sparsegen",
    "grouped_matmul",
    "router_mean",
)
"""Folders that hold a kernel and its ``cases.py``."""


def nbytes(*specs: jax.ShapeDtypeStruct) -> int:
    """Bytes of arrays of these shapes and dtypes, with no padding."""
    return sum(int(np.prod(s.shape, dtype=np.int64)) * jnp.dtype(s.dtype).itemsize for s in specs)


@dataclasses.dataclass(frozen=True)
class Case:
    """One named use of a kernel.

    Attributes:
      kernel: Name of the kernel's folder.
      name: Name of the case, unique within the kernel.
      args: Shapes and dtypes of the array arguments, in order.
      call: ``call(*arrays, implementation=...)`` runs the public function; returns an array or a
        pytree of arrays.
      draw: ``draw(rng)`` returns numpy arrays (or jax arrays) that fit ``args``.
      differentiable: Positions in ``args`` with a gradient.
      flops: Floating-point operations that the forward pass needs (a multiply-add is 2).
      min_bytes: Bytes that the forward pass must move: each operand read and each result written
        once.
      vjp_flops: The same for forward and backward together, as `Case.vjp` runs them.
      vjp_min_bytes: The same for forward and backward together.
      size: "small" cases (odd and degenerate shapes) run in tests; "big" ones have the shapes of
        real models and are only compiled or timed on a device.
    """

    kernel: str
    name: str
    args: tuple[jax.ShapeDtypeStruct, ...]
    call: Callable[..., Any]
    draw: Callable[[np.random.Generator], Sequence[Any]]
    differentiable: tuple[int, ...]
    flops: int
    min_bytes: int
    vjp_flops: int
    vjp_min_bytes: int
    size: Literal["small", "big"] = "small"

    def forward(self, implementation: str | None) -> Callable[..., Any]:
        """The forward pass as a function of ``args``."""

        def run(*arrays: Any) -> Any:
            return self.call(*arrays, implementation=implementation)

        return run

    def vjp(self, implementation: str | None) -> Callable[..., Any]:
        """Forward and backward as a function of ``(*args, cotangents)``; returns the gradients.

        ``cotangents`` has the structure of the floating-point results, see `cotangents`.
        """

        def run(*arrays_and_cotangents: Any) -> Any:
            *arrays, cotangents = arrays_and_cotangents

            def of_differentiable(*chosen: Any) -> Any:
                full = list(arrays)
                for position, value in zip(self.differentiable, chosen, strict=True):
                    full[position] = value
                return self.call(*full, implementation=implementation)

            _, pullback = jax.vjp(of_differentiable, *(arrays[i] for i in self.differentiable))
            return pullback(cotangents)

        return run

    def cotangents(self) -> Any:
        """Shapes and dtypes of the cotangents that `vjp` takes."""
        return jax.eval_shape(self.forward("xla"), *self.args)


def all_cases(kernel: str | None = None, name: str | None = None) -> list[Case]:
    """Cases of every kernel, or of one kernel, or the one of this name.

    Raises:
      ValueError: no such kernel or case.
    """
    if kernel is not None and kernel not in KERNELS:
        raise ValueError(f"kernel: got {kernel!r}, expected one of {KERNELS}")
    found: list[Case] = []
    for folder in KERNELS if kernel is None else (kernel,):
        found.extend(importlib.import_module(f"kernels_pallas.{folder}.cases").CASES)
    if name is not None:
        chosen = [case for case in found if case.name == name]
        if not chosen:
            raise ValueError(f"name: got {name!r}, expected one of {[c.name for c in found]}")
        return chosen
    return found
