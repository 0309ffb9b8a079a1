"""The PC algorithm with Fisher's z test of partial correlations, which ignores the parameters.

Source: Spirtes, Glymour and Scheines (2000); Colombo and Maathuis (2014) for the stable skeleton;
Meek (1995) for the rules.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float

from jaxlib_papers.causal._graphs import meek_rules, orient_v_structures
from jaxlib_papers.causal._inputs import check_observations
from jaxlib_papers.causal._skeleton import pc_skeleton

__all__ = ["FisherZ", "pc_fisher_z"]


class FisherZ:
    """Tests of zero partial correlation, for `pc_skeleton`.

    Args:
        X: [m, n] observations.

    Raises:
        ValueError: NaN, constant or dependent columns, too few rows.
    """

    def __init__(self, X: Float[np.ndarray, "m n"]):
        X = check_observations("X", X)
        self._rows = len(X)
        self._correlation = np.corrcoef(X, rowvar=False)

    def __call__(self, a: int, b: int, z: tuple[int, ...] = ()) -> float:
        """P-value of one test."""
        return float(self.batch(np.array([a]), np.array([b]), np.array([z], np.int64))[0])

    def batch(self, a, b, z) -> Float[np.ndarray, " T"]:
        """P-values of many tests with equally many conditioning variables, z [T, k]."""
        from scipy.special import ndtr

        z = np.asarray(z, np.int64).reshape(len(a), -1)
        freedom = self._rows - z.shape[1] - 3
        if freedom < 1:
            raise ValueError(
                f"X has {self._rows} rows, expected at least {z.shape[1] + 4} to condition on "
                f"{z.shape[1]} variables"
            )
        nodes = np.concatenate([np.stack([a, b], axis=1), z], axis=1)
        precision = np.linalg.inv(self._correlation[nodes[:, :, None], nodes[:, None, :]])
        r = -precision[:, 0, 1] / np.sqrt(precision[:, 0, 0] * precision[:, 1, 1])
        statistic = np.sqrt(freedom) * np.abs(np.arctanh(np.clip(r, -1 + 1e-15, 1 - 1e-15)))
        return 2 * ndtr(-statistic)


def pc_fisher_z(
    X: Float[np.ndarray, "m n"], alpha: float = 0.05, max_cond: int = 3
) -> Bool[np.ndarray, "n n"]:
    """The equivalence class of graphs that linear Gaussian tests allow.

    Args:
        X: observations.
        alpha: level of the tests.
        max_cond: largest conditioning set.

    Returns:
        bool [n, n] mixed graph: [i, j] alone is j -> i, both directions is an undirected edge.

    Raises:
        ValueError: NaN, constant or dependent columns, too few rows.

    Source: Spirtes, Glymour and Scheines (2000).
    """
    test = FisherZ(X)
    skeleton, sepsets = pc_skeleton(test, len(test._correlation), alpha, max_cond)
    return meek_rules(orient_v_structures(skeleton, sepsets))
