"""Lowering for accelerators that this machine lacks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from kernels_pallas.dispatch import target_platform

__all__ = ["lowering_for"]


@contextlib.contextmanager
def lowering_for(platform: str) -> Iterator[None]:
    """Kernels are chosen, and lowered, for a "tpu" or "gpu" that need not be there.

    Newer JAX asks for a GPU's kind when it lowers a Triton kernel, here an H200.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(target_platform(platform))
        if platform == "gpu":
            device = AbstractDevice("NVIDIA H200", None, platform="gpu")
            stack.enter_context(use_abstract_mesh(AbstractMesh((), (), abstract_device=device)))
        yield
