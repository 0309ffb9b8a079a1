"""DirectLiNGAM: a linear causal order from non-Gaussian noise, one exogenous variable at a time.

Source: Shimizu et al. (2011), "DirectLiNGAM"; the pairwise measure is the likelihood ratio of
Hyvarinen and Smith (2013) with their approximation of entropy. Written from the papers. Pruning by
t-tests instead of the adaptive lasso (reconstructed).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from jaxlib_papers.causal._inputs import check_observations

__all__ = ["LingamResult", "direct_lingam"]


class LingamResult(NamedTuple):
    """What `direct_lingam` finds.

    Attributes:
        order: [n] nodes, causes first.
        weights: [n, n] coefficient of j -> i at [i, j], in data units, 0 where pruned.
        adjacency: bool [n, n], True at [i, j] when j -> i.
    """

    order: Int[np.ndarray, " n"]
    weights: Float[np.ndarray, "n n"]
    adjacency: Bool[np.ndarray, "n n"]


def _entropy(u: Float[np.ndarray, "... m"]) -> Float[np.ndarray, "..."]:
    """Approximate differential entropy of variables with variance 1."""
    log_cosh = np.logaddexp(u, -u) - np.log(2)
    first = 79.047 * (log_cosh.mean(axis=-1) - 0.37457) ** 2
    second = 7.4129 * (u * np.exp(-u * u / 2)).mean(axis=-1) ** 2
    return (1 + np.log(2 * np.pi)) / 2 - first - second


def _unit(u):
    sd = u.std(axis=-1, keepdims=True)
    return u / np.where(sd > 0, sd, 1)


def _residuals(R: Float[np.ndarray, "k m"], i: int) -> Float[np.ndarray, "k m"]:
    """Every row regressed on row i."""
    return R - np.outer(R @ R[i] / (R[i] @ R[i]), R[i])


def _next(R: Float[np.ndarray, "k m"]) -> int:
    """The most exogenous row: the one that loses fewest likelihood ratios against the others."""
    k = len(R)
    own = _entropy(R)
    of_residual = np.stack([_entropy(_unit(_residuals(R, i))) for i in range(k)])  # [cause, effect]
    # Positive where "row before column" explains the pair better.
    ratio = own[None, :] + of_residual.T - own[:, None] - of_residual
    np.fill_diagonal(ratio, 0)
    return int(np.argmin((np.minimum(ratio, 0) ** 2).sum(axis=1)))


def direct_lingam(
    X: Float[np.ndarray, "m n"], alpha: float = 0.01, min_weight: float = 0.05
) -> LingamResult:
    """Causal order and weights of a linear non-Gaussian model.

    Args:
        X: observations.
        alpha: a coefficient stays when its t-test has a p-value below this.
        min_weight: and when it is at least this large on columns of variance 1.

    Returns:
        `LingamResult`.

    Raises:
        ValueError: NaN, constant or dependent columns, too few rows, alpha outside (0, 1).

    Source: Shimizu et al. (2011); Hyvarinen and Smith (2013); pruning (reconstructed).
    """
    from scipy.special import stdtr

    if not 0 < alpha < 1:
        raise ValueError(f"alpha is {alpha}, expected a level in (0, 1)")
    X = check_observations("X", X)
    m, n = X.shape
    scale = X.std(axis=0)
    unit = (X - X.mean(axis=0)) / scale
    R, names, order = unit.T.copy(), list(range(n)), []
    while len(names) > 1:
        chosen = _next(_unit(R))
        R = np.delete(_residuals(R, chosen), chosen, axis=0)
        order.append(names.pop(chosen))
    order = np.array([*order, *names], np.int64)
    weights = np.zeros((n, n))
    for place in range(1, n):
        i, before = order[place], order[:place]
        inverse = np.linalg.inv(unit[:, before].T @ unit[:, before])
        b = inverse @ unit[:, before].T @ unit[:, i]
        freedom = m - place - 1
        noise = np.sum((unit[:, i] - unit[:, before] @ b) ** 2) / freedom
        p = 2 * stdtr(freedom, -np.abs(b) / np.sqrt(noise * np.diag(inverse)))
        weights[i, before] = np.where((p < alpha) & (np.abs(b) >= min_weight), b, 0)
    return LingamResult(order, weights * scale[:, None] / scale[None, :], weights != 0)
