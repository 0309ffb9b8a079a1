"""A polynomial-chaos surrogate: a scalar response of uncertain parameters, fitted to a sample.

Source: Xiu and Karniadakis (2002) for the expansion; Sudret (2008) for moments and Sobol indices
from its coefficients; Blatman and Sudret (2011) for the hyperbolic index set and the leave-one-out
error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxlib_papers.ops.checks import as_float, check_nonnegative, is_concrete
from jaxlib_papers.ops.polynomials import (
    Family,
    FamilySpec,
    SobolIndices,
    fit_families,
    multi_index,
    pce_basis,
    sobol_indices,
)

__all__ = ["PCESurrogate", "fit_pce"]


@dataclasses.dataclass(frozen=True)
class PCESurrogate:
    """A fitted expansion of a response; made by `fit_pce`.

    Attributes:
        coefficients: [P], in the response's units.
        index: [P, d] multi-indices.
        families: one `Family` a parameter, with the numbers of its map.
        loo_error: mean squared leave-one-out residual over the response's variance; near 0 is
            good, 1 is no better than the mean.
    """

    coefficients: Float[Array, " P"]
    index: Int[np.ndarray, "P d"]
    families: tuple[Family, ...]
    loo_error: float

    def __call__(self, xi: Float[Array, "m d"]) -> Float[Array, " m"]:
        """Predicted response at parameters in their own units."""
        psi = pce_basis(xi, self.index, self.families)
        return psi @ self.coefficients.astype(psi.dtype)

    @property
    def mean(self) -> float:
        """Mean of the response under the families' measures."""
        return float(self.coefficients[0])

    @property
    def variance(self) -> float:
        """Variance of the response under the families' measures."""
        return float(np.sum(np.asarray(self.coefficients)[1:] ** 2))

    @property
    def sobol(self) -> SobolIndices:
        """First-order and total-order Sobol indices, [d] each."""
        with jax.enable_x64(self.coefficients.dtype == jnp.float64):
            return sobol_indices(self.coefficients, self.index)


@jax.jit
def _solve(psi: Array, y: Array, ridge: Array) -> tuple[Array, Array]:
    """Ridge coefficients and leave-one-out residuals, by the singular values of the design."""
    u, s, vt = jnp.linalg.svd(psi, full_matrices=False)
    tiny = jnp.finfo(psi.dtype).eps * psi.shape[0] * s[0]
    shrink = jnp.where(s > tiny, s / (s * s + ridge * psi.shape[0]), 0)
    theta = vt.T @ (shrink * (u.T @ y))
    leverage = jnp.sum(u * u * (shrink * s)[None, :], axis=1)
    return theta, (y - psi @ theta) / jnp.maximum(1 - leverage, jnp.finfo(psi.dtype).eps)


def fit_pce(
    xi: Float[Array, "m d"],
    y: Float[Array, " m"],
    *,
    degree: int,
    q: float = 1.0,
    families: FamilySpec | Sequence[FamilySpec] = "uniform",
    ridge: float = 0.0,
) -> PCESurrogate:
    """Fits a surrogate by least squares, or by ridge regression.

    Args:
        xi: sample of the parameters, in their own units.
        y: response at each row.
        degree: highest degree N_p.
        q: hyperbolic truncation in (0, 1]; 1 keeps the total-degree set.
        families: as in `fit_families`.
        ridge: penalty on the squared coefficients, in units of the mean squared residual; 0 is
            least squares, which needs more rows than terms.

    Returns:
        The `PCESurrogate`, with float64 coefficients for float64 input, else float32.

    Raises:
        ValueError: rows differ, something is not finite, or (without ridge) too few rows; the
            number of rows needed is named.

    Source: Xiu and Karniadakis (2002); Blatman and Sudret (2011).
    """
    xi, y = as_float(xi, y)
    check_nonnegative("ridge", ridge)
    if y.ndim != 1 or xi.ndim != 2 or xi.shape[0] != y.shape[0]:
        raise ValueError(f"xi has shape {xi.shape} and y {y.shape}, expected [m, d] and [m]")
    index = multi_index(xi.shape[1], degree, q)
    if ridge == 0 and xi.shape[0] <= len(index):
        raise ValueError(
            f"xi has {xi.shape[0]} rows for {len(index)} terms; bring more than {len(index)} rows, "
            "lower degree or q, or set ridge > 0"
        )
    if is_concrete(y) and not bool(jnp.isfinite(y).all()):
        raise ValueError("y has values that are not finite; drop those rows")
    fitted = fit_families(xi, families, degree)
    psi = pce_basis(xi, index, fitted)
    theta, residual = _solve(psi, y, jnp.asarray(ridge, psi.dtype))
    spread = float(jnp.var(y))
    loo = float(jnp.mean(residual**2)) / spread if spread > 0 else 0.0
    return PCESurrogate(theta, index, fitted, loo)
