"""NOTEARS for linear models: a smooth acyclicity constraint and an augmented Lagrangian.

Source: Zheng, Aragam, Ravikumar, Xing (2018), "DAGs with NO TEARS", arXiv 1803.01422. Written from
the paper. The result depends on the scale of the columns (Reisach et al. 2021, arXiv 2102.13647):
report it on raw and on standardised columns.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxlib_papers.causal._inputs import check_observations
from jaxlib_papers.ops.checks import as_float, check_count, check_nonnegative, check_positive

__all__ = ["acyclicity", "notears_linear"]


@jax.custom_jvp
def _h(W: Float[Array, "n n"]) -> Float[Array, ""]:
    n = jnp.asarray(W.shape[0], W.dtype)
    return jnp.trace(jax.scipy.linalg.expm(W * W)) - n


@_h.defjvp
def _h_jvp(primals, tangents):
    (W,), (dW,) = primals, tangents
    e = jax.scipy.linalg.expm(W * W)
    n = jnp.asarray(W.shape[0], W.dtype)
    return jnp.trace(e) - n, jnp.sum(2 * W * e.T * dW)


def acyclicity(W: Float[Array, "n n"]) -> Float[Array, ""]:
    """h(W) = tr exp(W * W) - n: zero if and only if W is the matrix of a DAG.

    Args:
        W: weights; diagonal entries count as cycles.

    Returns:
        A scalar >= 0 whose gradient is 2 W * exp(W * W)' (given in closed form, so it is cheap and
        exact); float64 for float64 input, else float32.

    Raises:
        ValueError: not a square matrix.

    Source: arXiv 1803.01422, theorem 1.
    """
    W = as_float(W)
    if W.ndim != 2 or W.shape[0] != W.shape[1]:
        raise ValueError(f"W has shape {W.shape}, expected a square matrix [n, n]")
    return _h(W)


def notears_linear(
    X: Float[np.ndarray, "m n"],
    l1: float = 0.1,
    threshold: float = 0.3,
    *,
    standardize: bool = False,
    max_iterations: int = 100,
    h_tol: float = 1e-8,
    rho_max: float = 1e16,
) -> Float[np.ndarray, "n n"]:
    """Weights of a linear DAG by continuous optimisation.

    Minimises ||X - X W||^2 / (2 m) + l1 |W| subject to h(W) = 0.

    Args:
        X: observations; centred inside.
        l1: multiplier of the absolute weights.
        threshold: smaller weights are set to 0 afterwards.
        standardize: whether columns are divided by their standard deviation first.
        max_iterations: of the outer loop.
        h_tol: at which h counts as 0.
        rho_max: penalty at which the outer loop gives up raising it.

    Returns:
        float64 NumPy [n, n] in the convention of that paper: W[i, j] is the weight of i -> j.
        Transpose it (`W.T != 0`) to compare with graphs of this library.

    Raises:
        ValueError: NaN, constant or dependent columns, too few rows, a negative setting.

    Host code: SciPy's L-BFGS-B over the positive and negative parts of W, on one thread; the data
    enter through their covariance alone.

    Source: arXiv 1803.01422, algorithm 1.
    """
    from scipy.linalg import expm
    from scipy.optimize import minimize
    from threadpoolctl import threadpool_limits

    for name, value in (("l1", l1), ("threshold", threshold)):
        check_nonnegative(name, value)
    check_count("max_iterations", max_iterations, 1)
    check_positive("h_tol", h_tol)
    check_positive("rho_max", rho_max)
    X = check_observations("X", X)
    X = X - X.mean(axis=0)
    X = X / X.std(axis=0) if standardize else X
    n = X.shape[1]
    covariance = X.T @ X / len(X)

    def objective(parts, rho, multiplier):
        W = (parts[: n * n] - parts[n * n :]).reshape(n, n)
        off = np.eye(n) - W
        e = expm(W * W)
        h = np.trace(e) - n
        value = 0.5 * np.sum(off * (covariance @ off)) + h * (0.5 * rho * h + multiplier)
        smooth = -covariance @ off + (rho * h + multiplier) * 2 * W * e.T
        gradient = np.concatenate([smooth.ravel() + l1, -smooth.ravel() + l1])
        return value + l1 * parts.sum(), gradient

    bounds = [(0, 0) if i == j else (0, None) for _ in range(2) for i in range(n) for j in range(n)]
    parts, rho, multiplier, h = np.zeros(2 * n * n), 1.0, 0.0, np.inf
    # Thousands of exponentials of small matrices: threads of BLAS would spend most of the time (on
    # a busy machine, minutes instead of a fraction of a second) waiting for each other.
    with threadpool_limits(limits=1, user_api="blas"):
        for _ in range(max_iterations):
            while True:
                found = minimize(
                    objective,
                    parts,
                    args=(rho, multiplier),
                    jac=True,
                    method="L-BFGS-B",
                    bounds=bounds,
                ).x
                W = (found[: n * n] - found[n * n :]).reshape(n, n)
                h_new = float(np.trace(expm(W * W)) - n)
                if h_new <= 0.25 * h or rho >= rho_max:
                    break
                rho *= 10
            parts, h = found, h_new
            multiplier += rho * h
            if h <= h_tol or rho >= rho_max:
                break
    W = (parts[: n * n] - parts[n * n :]).reshape(n, n)
    return np.where(np.abs(W) < threshold, 0.0, W)
