"""What a comparison method returns, and the check that they share."""

from __future__ import annotations

from typing import NamedTuple

from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

from jaxlib_papers.ops.checks import as_float, check_ndim

__all__ = ["Regions", "as_rows"]


class Regions(NamedTuple):
    """One region for each test point.

    Attributes:
        threshold: of the nonconformity score (of each dimension or step, where there are several).
        covered: whether the region holds the test target.
        log_volume: in nats of the units of y (units^d); +inf for the whole space.
    """

    threshold: Float[Array, "..."]
    covered: Bool[Array, " batch"]
    log_volume: Float[Array, " batch"]


def as_rows(*arrays: ArrayLike) -> tuple[Array, ...]:
    out = []
    for array in arrays:
        array = as_float(array)
        check_ndim("residuals", array, (2,), "[n, d]")
        out.append(array)
    return tuple(out)
