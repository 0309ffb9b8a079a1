"""Whether a fitted graph's residuals look like noise: independent of xi, and of the causes."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

__all__ = ["hsic_pvalue", "parameter_confounding"]


def parameter_confounding(
    residuals: Float[np.ndarray, "m n"], psi: Float[np.ndarray, "m P"]
) -> tuple[Float[np.ndarray, " n"], Float[np.ndarray, " n"]]:
    """Robust test of each node's residual against the basis functions of the parameters.

    The method assumes noise that is independent of xi. A control loop that sets a parameter after
    looking at a variable, or a parameter that shifts a mean, shows here.

    Args:
        residuals: of each node.
        psi: basis functions, the constant first (it is left out).

    Returns:
        (statistics, p-values), chi-squared with P - 1 degrees of freedom; (0, 1) for P = 1.

    Source: OpenReview 4bnCXOtHTm, assumption of independent parameters; the test (reconstructed).
    """
    from scipy.special import chdtrc

    m, n = residuals.shape
    P = psi.shape[1]
    if P == 1:
        return np.zeros(n), np.ones(n)
    stats = np.empty(n)
    for i in range(n):
        v = residuals[:, i, None] * psi[:, 1:]
        mean = v.mean(axis=0)
        covariance = np.atleast_2d(np.cov(v, rowvar=False))
        ridge = 1e-10 * max(np.trace(covariance) / (P - 1), 1e-300)
        stats[i] = m * mean @ np.linalg.solve(covariance + ridge * np.eye(P - 1), mean)
    return stats, chdtrc(P - 1, np.maximum(stats, 0))


def _centred_kernel(x: Float[np.ndarray, " m"]) -> Float[np.ndarray, "m m"]:
    """Gaussian kernel with the median distance as width, centred in rows and columns."""
    squares = (x[:, None] - x[None, :]) ** 2
    positive = squares[squares > 0]
    width = np.median(positive) if positive.size else 1.0
    k = np.exp(-squares / width)
    return k - k.mean(axis=0) - k.mean(axis=1)[:, None] + k.mean()


def hsic_pvalue(x: Float[np.ndarray, " m"], y: Float[np.ndarray, " m"]) -> float:
    """P-value of the Hilbert-Schmidt independence criterion, by its gamma approximation.

    Args:
        x: one variable.
        y: the other; at least 6 rows. The cost grows with the square of the rows.

    Returns:
        Probability of a value as large under independence.

    Raises:
        ValueError: fewer than 6 rows, or rows that differ.

    Source: Gretton et al. (2008) for the criterion; Zhang et al. (2011) for the gamma's moments.
    """
    from scipy.special import gammaincc

    m = len(x)
    if len(y) != m or m < 6:
        raise ValueError(f"x has {m} rows and y {len(y)}, expected the same number, at least 6")
    kernels = [_centred_kernel(np.asarray(v, float)) for v in (x, y)]
    statistic = float((kernels[0] * kernels[1]).sum())
    mean = np.trace(kernels[0]) * np.trace(kernels[1]) / m
    variance = 2 * float((kernels[0] ** 2).sum()) * float((kernels[1] ** 2).sum()) / m**2
    if not variance > 0:
        return 1.0
    return float(gammaincc(mean**2 / variance, statistic * mean / variance))
