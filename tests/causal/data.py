"""What the tests of the causal methods share."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from jaxlib_papers.causal.pce_causal import PCTCD, PCTCDConfig, multi_index, pce_basis

VECTORS = np.load(Path(__file__).parents[1] / "vectors" / "pce_causal.npz")
SMALL = PCTCDConfig(degree=2, q=1.0)


def linear_sem(m: int, seed: int = 0, noise: str = "laplace"):
    """(X, B) of a linear model with five nodes; B[i, j] is the coefficient of j -> i."""
    B = np.zeros((5, 5))
    B[1, 0], B[2, 1], B[3, 2], B[4, 0], B[4, 3] = 0.9, -0.8, 0.7, 0.6, -0.9
    e = getattr(np.random.default_rng(seed), noise)(size=(m, 5))
    return e @ np.linalg.inv(np.eye(5) - B).T, B


def legendre_basis(xi: np.ndarray, degree: int, q: float = 1.0) -> np.ndarray:
    return np.asarray(pce_basis(xi, multi_index(xi.shape[1], degree, q), "legendre"))


def fit(data, config: PCTCDConfig = SMALL):
    return PCTCD(config).fit(data.X, data.xi)
