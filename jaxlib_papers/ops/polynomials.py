"""Orthonormal polynomial bases of uncertain parameters: polynomial chaos.

A function b of random parameters xi is expanded as b(xi) = sum_alpha theta_alpha Psi_alpha(xi),
with Psi_alpha(xi) = prod_k psi_{alpha_k}(xi_k) and the psi orthonormal under a probability measure.
Everything about b then reads off the coefficients: mean theta_0, variance the sum of the other
squares, norm the root of the sum of all, and Sobol indices the shares of groups of terms.

Source: Xiu and Karniadakis (2002); Sudret (2008) for the Sobol indices; OpenReview 4bnCXOtHTm, from
whose sheet the normalisation and the order of the multi-indices are taken.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxlib_papers.ops._orthonormal import (
    evaluate_family,
    gauss_quadrature,
    hermite,
    jacobi,
    laguerre,
    legendre,
)
from jaxlib_papers.ops._pce_families import Family, FamilySpec, fit_families
from jaxlib_papers.ops.checks import as_float, check_count

__all__ = [
    "Family",
    "FamilySpec",
    "SobolIndices",
    "evaluate_family",
    "fit_families",
    "gauss_quadrature",
    "hermite",
    "jacobi",
    "laguerre",
    "legendre",
    "multi_index",
    "pce_basis",
    "pce_mean_variance",
    "sobol_indices",
]


def _exponents(dim: int, budget: int):
    """Exponent tuples with total degree exactly `budget`, larger leading exponents first."""
    if dim == 1:
        yield (budget,)
        return
    for first in range(budget, -1, -1):
        for rest in _exponents(dim - 1, budget - first):
            yield (first, *rest)


def multi_index(dim: int, degree: int, q: float = 1.0) -> Int[np.ndarray, "P dim"]:
    """The set of multi-indices with (sum_k alpha_k^q)^(1/q) <= degree.

    Args:
        dim: number of parameters d.
        degree: N_p, the highest degree.
        q: 1 gives the total-degree set with C(N_p + d, d) rows; less than 1 the hyperbolic set,
            which leaves out interactions of many parameters.

    Returns:
        int64 NumPy [P, dim], ordered by total degree and then with larger leading exponents first;
        row 0 is zero (the constant). `degree` 0 gives that row alone.

    Raises:
        ValueError: `dim` < 1, `degree` < 0, or q outside of (0, 1].

    Source: OpenReview 4bnCXOtHTm, total-degree set; hyperbolic set: Blatman and Sudret (2011).
    """
    check_count("dim", dim, 1)
    check_count("degree", degree, 0)
    if not 0 < q <= 1:
        raise ValueError(f"q is {q}, expected a number in (0, 1]; 1 is the total-degree set")
    levels = (_exponents(dim, total) for total in range(degree + 1))
    rows = np.array(list(itertools.chain.from_iterable(levels)), np.int64).reshape(-1, dim)
    norms = (rows.astype(np.float64) ** q).sum(axis=1) ** (1 / q)
    return rows[norms <= degree + 1e-9]


@partial(jax.jit, static_argnames=("polynomials", "index"))
def _tensor_basis(xi, loc, scale, mixes, polynomials, index):
    """The basis in one program: the numbers of the maps are data, so new samples do not compile."""
    table = np.array(index)
    x = (xi - loc[None]) / scale[None]
    psi = jnp.ones((xi.shape[0], len(table)), xi.dtype)
    for k, (family, a, b) in enumerate(polynomials):
        values = evaluate_family(family, x[:, k], int(table[:, k].max()), a, b)
        values = values if mixes[k] is None else values @ mixes[k]
        psi = psi * values[:, table[:, k]]
    return psi


def pce_basis(
    xi: Float[Array, "m d"],
    index: Int[np.ndarray, "P d"],
    families: FamilySpec | Sequence[FamilySpec],
) -> Float[Array, "m P"]:
    """Values of the tensor-product basis Psi_alpha(xi) = prod_k psi_{alpha_k}(xi_k).

    Args:
        xi: parameters; their units are those of the family (see `fit_families`).
        index: multi-indices as from `multi_index`, on the host.
        families: one for all parameters, or one for each, as in `fit_families`. Names that read
            their numbers off the sample need a concrete `xi`; fitted `Family` objects and names of
            polynomials also work under jit.

    Returns:
        [m, P], float64 for float64 `xi`, else float32. No rows give [0, P].

    Raises:
        ValueError: shapes that do not fit, an unknown family, and (for values that are at hand)
            NaN or values outside of the domain: beyond 1 + 1e-6 in size for Legendre and Jacobi,
            below 0 for Laguerre.

    Source: OpenReview 4bnCXOtHTm, basis of the coefficient functions.
    """
    xi = as_float(xi)
    index = np.asarray(index)
    if xi.ndim != 2:
        raise ValueError(f"xi has shape {xi.shape}, expected [rows, parameters]")
    if index.ndim != 2 or index.shape[1] != xi.shape[1] or not index.size:
        raise ValueError(
            f"index has shape {index.shape}, expected [terms, {xi.shape[1]}]: one column for each "
            "column of xi"
        )
    if not np.issubdtype(index.dtype, np.integer) or index.min() < 0:
        raise ValueError("index has to hold integers >= 0; make it with multi_index")
    fitted = fit_families(xi, families, index.max(axis=0))
    for k, family in enumerate(fitted):
        family.check_domain(xi[:, k], f"xi[{{}}, {k}]")
    maps = [np.array([getattr(f, name) for f in fitted], xi.dtype) for name in ("loc", "scale")]
    polynomials = tuple((f.polynomial, f.a, f.b) for f in fitted)
    mixes = tuple(
        f.mixing(int(degree), xi.dtype) for f, degree in zip(fitted, index.max(axis=0), strict=True)
    )
    return _tensor_basis(xi, *maps, mixes, polynomials, tuple(map(tuple, index.tolist())))


def pce_mean_variance(theta: Float[Array, "... P"]) -> tuple[Array, Array]:
    """Mean and variance of the expansion: theta_0, and the sum of the other squares.

    Args:
        theta: coefficients of an orthonormal basis whose first term is the constant.

    Returns:
        (mean, variance), each [...].

    Source: Sudret (2008); OpenReview 4bnCXOtHTm, uncertainty of an edge.
    """
    theta = as_float(theta)
    return theta[..., 0], jnp.sum(theta[..., 1:] ** 2, axis=-1)


class SobolIndices(NamedTuple):
    """Shares of the variance.

    Attributes:
        first: [..., d], of the terms in parameter k alone.
        total: [..., d], of all terms in which parameter k takes part.
    """

    first: Array
    total: Array


def sobol_indices(theta: Float[Array, "... P"], index: Int[np.ndarray, "P d"]) -> SobolIndices:
    """First-order and total-order Sobol indices of an expansion.

    Args:
        theta: coefficients of an orthonormal basis.
        index: its multi-indices.

    Returns:
        `SobolIndices`. An expansion without variance has indices 0: no parameter drives it.

    Raises:
        ValueError: theta's last axis and the rows of index differ.

    Source: Sudret (2008); OpenReview 4bnCXOtHTm, dominant parameter of an edge.
    """
    theta, index = as_float(theta), np.asarray(index)
    if index.ndim != 2 or theta.shape[-1] != index.shape[0]:
        raise ValueError(
            f"theta has shape {theta.shape} and index {index.shape}, expected as many coefficients "
            "as multi-indices"
        )
    takes_part = index > 0
    alone = takes_part & (takes_part.sum(axis=1, keepdims=True) == 1)
    squares = jnp.where(jnp.asarray(takes_part.any(axis=1)), theta**2, 0)
    variance = jnp.sum(squares, axis=-1, keepdims=True)
    divisor = jnp.where(variance > 0, variance, 1)
    first, total = (squares @ jnp.asarray(t, theta.dtype) / divisor for t in (alone, takes_part))
    return SobolIndices(first, total)
