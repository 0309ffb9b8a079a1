"""Orthonormal polynomials of one variable by their three-term recurrence, and Gauss quadrature.

For a probability measure with orthonormal polynomials psi_k,

    x psi_k = beta_{k+1} psi_{k+1} + alpha_k psi_k + beta_k psi_{k-1},    psi_0 = 1,

so one pair of coefficient tables gives values (forward recurrence, which is stable on the support)
and, as the eigenvalues of the tridiagonal matrix, the Gauss nodes. Expanding into monomials would
lose a digit a degree.

Source: Xiu and Karniadakis (2002), the Wiener-Askey scheme; Golub and Welsch (1969).
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jaxlib_papers.ops.checks import as_float, check_choice, check_count, is_concrete

__all__ = [
    "POLYNOMIALS",
    "evaluate_family",
    "gauss_quadrature",
    "hermite",
    "jacobi",
    "laguerre",
    "legendre",
]

POLYNOMIALS = ("hermite", "jacobi", "laguerre", "legendre")


def check_jacobi(a: float, b: float) -> None:
    """Raises ValueError unless the Jacobi density (1 - x)^a (1 + x)^b can be normalised."""
    for name, value in (("a", a), ("b", b)):
        if is_concrete(value) and not (-1 < float(value) < math.inf):
            raise ValueError(
                f"{name} is {value}, expected a finite number > -1: the density "
                "(1 - x)^a (1 + x)^b has no integral otherwise"
            )


def recurrence(family: str, degree: int, a: float = 0.0, b: float = 0.0):
    """(alpha_0..alpha_degree, beta_1..beta_degree) of one family, in float64 NumPy."""
    k = np.arange(degree + 1, dtype=np.float64)
    n = k[1:]
    if family == "legendre":
        return np.zeros_like(k), n / np.sqrt(4 * n * n - 1)
    if family == "hermite":
        return np.zeros_like(k), np.sqrt(n)
    if family == "laguerre":
        return 2 * k + 1, -n  # the sign is that of L_k, whose leading coefficient alternates
    check_jacobi(a, b)
    s = a + b
    alpha = np.full_like(k, (b - a) / (s + 2))
    alpha[1:] = (b * b - a * a) / ((2 * n + s) * (2 * n + s + 2))
    beta2 = np.empty_like(n)
    if degree > 0:  # the general form is 0/0 at k = 1 and a + b = -1
        beta2[0] = 4 * (1 + a) * (1 + b) / ((2 + s) ** 2 * (3 + s))
    n = n[1:]
    beta2[1:] = 4 * n * (n + a) * (n + b) * (n + s) / ((2 * n + s) ** 2 * ((2 * n + s) ** 2 - 1))
    return alpha, np.sqrt(beta2)


def evaluate_family(
    family: str, x: Float[ArrayLike, "..."], degree: int, a: float = 0.0, b: float = 0.0
) -> Float[Array, "... degree+1"]:
    """Values of psi_0..psi_degree of one of `POLYNOMIALS` (a, b: Jacobi's exponents)."""
    check_choice("family", family, POLYNOMIALS)
    check_count("degree", degree, 0)
    alpha, beta = recurrence(family, degree, float(a), float(b))
    x = as_float(x)
    values = [jnp.ones_like(x)]
    for k in range(degree):
        step = (x - jnp.asarray(alpha[k], x.dtype)) * values[k]
        if k:
            step = step - jnp.asarray(beta[k - 1], x.dtype) * values[k - 1]
        values.append(step / jnp.asarray(beta[k], x.dtype))
    return jnp.stack(values, axis=-1)


def legendre(x: Float[ArrayLike, "..."], degree: int) -> Float[Array, "... degree+1"]:
    """Legendre polynomials, orthonormal under U(-1, 1): sqrt(2k+1) P_k.

    Args:
        x: points, on [-1, 1] where the recurrence is stable.
        degree: highest degree.

    Returns:
        psi_0..psi_degree along a new last axis; float64 for float64 input, else float32.

    Raises:
        ValueError: `degree` < 0.

    Source: Xiu and Karniadakis (2002), Wiener-Askey scheme; OpenReview 4bnCXOtHTm, basis table.
    """
    return evaluate_family("legendre", x, degree)


def hermite(x: Float[ArrayLike, "..."], degree: int) -> Float[Array, "... degree+1"]:
    """Hermite polynomials of probabilists, orthonormal under N(0, 1): He_k / sqrt(k!).

    Args:
        x: points.
        degree: highest degree.

    Returns:
        psi_0..psi_degree along a new last axis; float64 for float64 input, else float32.

    Raises:
        ValueError: `degree` < 0.

    Source: Xiu and Karniadakis (2002), Wiener-Askey scheme; OpenReview 4bnCXOtHTm, basis table.
    """
    return evaluate_family("hermite", x, degree)


def laguerre(x: Float[ArrayLike, "..."], degree: int) -> Float[Array, "... degree+1"]:
    """Laguerre polynomials L_k, orthonormal under Exp(1).

    Args:
        x: points >= 0.
        degree: highest degree.

    Returns:
        psi_0..psi_degree along a new last axis; float64 for float64 input, else float32.

    Raises:
        ValueError: `degree` < 0.

    Source: Xiu and Karniadakis (2002), Wiener-Askey scheme; OpenReview 4bnCXOtHTm, basis table.
    """
    return evaluate_family("laguerre", x, degree)


def jacobi(
    x: Float[ArrayLike, "..."], degree: int, a: float = 0.0, b: float = 0.0
) -> Float[Array, "... degree+1"]:
    """Jacobi polynomials, orthonormal under the density proportional to (1-x)^a (1+x)^b.

    Args:
        x: points, on [-1, 1] where the recurrence is stable.
        degree: highest degree.
        a: exponent of 1 - x, > -1.
        b: exponent of 1 + x, > -1. With a = b = 0 this is `legendre`.

    Returns:
        psi_0..psi_degree along a new last axis; float64 for float64 input, else float32.

    Raises:
        ValueError: `degree` < 0, or an exponent <= -1.

    Source: Xiu and Karniadakis (2002), Wiener-Askey scheme; an extension of OpenReview 4bnCXOtHTm.
    """
    check_jacobi(a, b)
    return evaluate_family("jacobi", x, degree, a, b)


def gauss_quadrature(
    family: str, points: int, a: float = 0.0, b: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights that integrate polynomials to degree 2 points - 1 under the measure.

    Args:
        family: "legendre", "hermite", "laguerre" or "jacobi".
        points: number of nodes.
        a: Jacobi's exponent of 1 - x.
        b: Jacobi's exponent of 1 + x.

    Returns:
        (nodes, weights), float64 NumPy [points]; the weights sum to 1.

    Raises:
        ValueError: an unknown family, `points` < 1, an exponent <= -1.

    Source: Golub and Welsch (1969), eigenvalues of the tridiagonal recurrence matrix.
    """
    check_choice("family", family, POLYNOMIALS)
    check_count("points", points, 1)
    alpha, beta = recurrence(family, points - 1, a, b)
    from scipy.linalg import eigh_tridiagonal  # heavy, and needed here only

    nodes, vectors = eigh_tridiagonal(alpha, np.abs(beta))
    return nodes, vectors[0] ** 2
