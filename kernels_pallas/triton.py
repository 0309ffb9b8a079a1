"""What the Triton kernels share."""

from __future__ import annotations

from jax.experimental import pallas as pl
from jaxtyping import Array, Int

__all__ = ["padded_slice"]


def padded_slice(size: int, traced: Int[Array, ""]) -> slice | pl.Slice:
    """``[0, size)`` for a masked load or store whose block is wider than the array.

    Blocks have powers of two on each side. JAX from 0.12 on refuses a static slice that reaches
    past the array even where it is masked, so that the start has to be a zero made of something
    that is known at run time only.

    Args:
      size: Width of the block.
      traced: Any integer that the kernel computes, e.g. a program id.
    """
    return pl.ds(traced * 0, size)
