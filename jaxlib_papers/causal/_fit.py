"""Coefficients of one node: least squares by natural-gradient steps, its score, and its spread."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxlib_papers.causal._features import Gram, solve_refined, solve_spd, subset_system
from jaxlib_papers.ops.checks import as_float, check_count, check_nonnegative

__all__ = [
    "fit_coefficients",
    "natural_gradient_step",
    "node_rss",
    "pct_bic",
]


def _check_features(features, x):
    if features.ndim != 2 or x.shape != features.shape[:1]:
        raise ValueError(
            f"features has shape {features.shape} and x {x.shape}, expected [m, F] and [m]"
        )


def natural_gradient_step(
    theta: Float[Array, " F"],
    features: Float[Array, "m F"],
    x: Float[Array, " m"],
    eta: float = 1.0,
    e_reg: float = 0.0,
) -> Float[Array, " F"]:
    """One step theta - eta (Phi'Phi + e_reg I)^-1 Phi'(Phi theta - x).

    The Fisher information of a node is the whole block Phi'Phi, not its diagonal: features of one
    node share xi and are correlated. With e_reg = 0 each step multiplies the distance to least
    squares by exactly 1 - eta, so eta = 1 arrives at once.

    Args:
        theta: coefficients.
        features: Phi, as from `interaction_features`.
        x: the node's observations.
        eta: step size in (0, 2), where the iteration converges.
        e_reg: added to the diagonal.

    Returns:
        The new coefficients.

    Raises:
        ValueError: eta outside of (0, 2), e_reg < 0, shapes that do not fit.

    Source: OpenReview 4bnCXOtHTm, stage 4, natural gradient.
    """
    theta, features, x = as_float(theta, features, x)
    _check_features(features, x)
    if theta.shape != features.shape[1:]:
        raise ValueError(f"theta has shape {theta.shape}, expected {features.shape[1:]}")
    if not 0 < eta < 2:
        raise ValueError(f"eta is {eta}, expected a step in (0, 2): others do not converge")
    check_nonnegative("e_reg", e_reg)
    if features.shape[1] == 0:
        return theta
    numbers = (jnp.asarray(v, theta.dtype) for v in (eta, e_reg))
    return _step(theta, features, x, *numbers)


@jax.jit
def _step(theta, features, x, eta, e_reg):
    system = features.T @ features + e_reg * jnp.eye(features.shape[1], dtype=features.dtype)
    gradient = features.T @ (features @ theta - x)
    return theta - eta * solve_spd(system, gradient[:, None])[0][:, 0]


def fit_coefficients(
    features: Float[Array, "m F"],
    x: Float[Array, " m"],
    *,
    theta0: Float[Array, " F"] | None = None,
    eta: float = 1.0,
    e_reg: float = 0.0,
    steps: int = 2,
) -> Float[Array, " F"]:
    """Coefficients of one node after some natural-gradient steps.

    Args:
        features: Phi, [m, F] with m > F.
        x: the node's observations.
        theta0: start; None is 0.
        eta: step size in (0, 2).
        e_reg: added to the diagonal of Phi'Phi.
        steps: number of steps. With eta = 1 and e_reg = 0 the first gives least squares, and a
            second removes most of its rounding error.

    Returns:
        [F]; no features give [0].

    Raises:
        ValueError: eta outside of (0, 2), fewer than F + 1 rows, shapes that do not fit.

    Source: OpenReview 4bnCXOtHTm, stage 4, natural gradient.
    """
    features, x = as_float(features, x)
    _check_features(features, x)
    check_count("steps", steps, 1)
    if features.shape[0] <= features.shape[1]:
        raise ValueError(
            f"features has {features.shape[0]} rows for {features.shape[1]} coefficients; bring "
            f"at least {features.shape[1] + 1} rows, or lower the degree or the number of parents"
        )
    theta = jnp.zeros(features.shape[1], x.dtype) if theta0 is None else jnp.asarray(theta0)
    for _ in range(steps):
        theta = natural_gradient_step(theta, features, x, eta, e_reg)
    return theta


def node_rss(
    features: Float[Array, "m F"],
    x: Float[Array, " m"],
    theta: Float[Array, " F"] | None = None,
) -> Float[Array, ""]:
    """Residual sum of squares of a node, of given coefficients or of least squares.

    Args:
        features: Phi, [m, F].
        x: the node's observations.
        theta: coefficients; None fits them.

    Returns:
        A scalar; without features it is x'x.

    Raises:
        ValueError: shapes that do not fit; fewer than F + 1 rows when fitting.

    Source: OpenReview 4bnCXOtHTm, stage 4, local score.
    """
    features, x = as_float(features, x)
    _check_features(features, x)
    theta = fit_coefficients(features, x) if theta is None else jnp.asarray(theta, x.dtype)
    return jnp.sum((x - features @ theta) ** 2)


def pct_bic(
    rss: Float[Array, "..."], m: int, basis: int, num_parents: int, lam: float = 1.0
) -> Float[Array, "..."]:
    """Local score m ln(RSS/m) + lam ln(m) P |PA|; lower is better.

    Args:
        rss: residual sum of squares, > 0.
        m: rows.
        basis: P, coefficients of one edge; the penalty has to grow with it, or a high degree
            over-fits.
        num_parents: |PA|.
        lam: multiplier of the penalty.

    Returns:
        The score, in the shape of `rss`. RSS = 0 counts as the smallest positive number: very low,
        but finite.

    Raises:
        ValueError: m or basis < 1, num_parents < 0, lam < 0.

    Source: OpenReview 4bnCXOtHTm, stage 4; scaling (reconstructed).
    """
    check_count("m", m, 1)
    check_count("basis", basis, 1)
    check_count("num_parents", num_parents, 0)
    check_nonnegative("lam", lam)
    rss = as_float(rss)
    penalty = lam * float(np.log(m)) * basis * num_parents
    log_rss = jnp.log(jnp.maximum(rss, jnp.finfo(rss.dtype).tiny))
    return m * (log_rss - float(np.log(m))) + penalty


@jax.jit
def _node_fits(blocks, nodes, parents):
    """Coefficients [n, K P], RSS [n], inverses of the systems [n, K P, K P]; padding is 0."""

    def one(node, chosen):
        system, rhs, square, real = subset_system(blocks, chosen, node[None])
        theta, factor = solve_refined(system, rhs)
        inverse = jax.scipy.linalg.cho_solve((factor, True), jnp.diag(real))
        rss = square[0] - jnp.sum(theta * (2 * rhs - system @ theta))
        return theta[:, 0] * real, rss, inverse * real[None, :]

    return jax.vmap(one)(nodes, parents)


class GraphFit:
    """Least squares of every node of a DAG.

    Attributes:
        theta: [n, n, P] coefficients of edge j -> i at [i, j], 0 elsewhere.
        intercept: [n, P] coefficients of the basis alone (0 without intercept).
        noise: [n] residual variances RSS / (m - number of coefficients).
        covariance: [P, P] by (i, j): of the estimates of one edge.
    """

    def __init__(self, gram: Gram, a: np.ndarray):
        n, P = gram.nodes, gram.basis
        self.theta, self.intercept = np.zeros((n, n, P)), np.zeros((n, P))
        sets = [np.flatnonzero(row).tolist() for row in a]
        width = gram.width(max(map(len, sets)))
        parents = np.array([gram.pad(s, width) for s in sets], np.int32)
        theta, rss, inverse = map(
            np.asarray, _node_fits(gram.blocks, np.arange(n, dtype=np.int32), parents)
        )
        free = np.array([gram.rows - P * (len(s) + gram.intercept) for s in sets])
        self.noise = rss / np.maximum(free, 1)
        self.covariance = {}
        for i, chosen in enumerate(sets):
            for k, j in enumerate(chosen):
                block = slice(k * P, (k + 1) * P)
                self.theta[i, j] = theta[i, block]
                self.covariance[i, j] = self.noise[i] * inverse[i, block, block]
            if gram.intercept:
                self.intercept[i] = theta[i, len(chosen) * P : (len(chosen) + 1) * P]

    def wald(self) -> dict[tuple[int, int], tuple[float, float, float]]:
        """(statistic, p-value, norm) of each edge; chi-squared with P degrees of freedom."""
        from scipy.special import chdtrc

        out = {}
        for (i, j), covariance in self.covariance.items():
            theta = self.theta[i, j]
            stat = float(theta @ np.linalg.pinv(covariance, hermitian=True) @ theta)
            p = float(chdtrc(len(theta), max(stat, 0.0)))
            out[i, j] = (stat, p, float(np.linalg.norm(theta)))
        return out


@partial(jax.jit, static_argnames="batch")
def bootstrap_fits(X1, Psi, counts, nodes, parents, *, batch: int = 8):
    """Coefficients [B, n, K P] and the Wald statistic of each edge block [B, n, K], rows weighted.

    Args:
        X1: [m, n + 2] columns, then ones, then zeros (padding).
        Psi: [m, P].
        counts: [B, m] how often each row was drawn.
        nodes: [n].
        parents: [n, K] padded parent sets.
        batch: bootstrap samples that are computed at once.
    """
    P, K, pad = Psi.shape[1], parents.shape[1], X1.shape[1] - 1
    real = jnp.repeat(parents < pad, P, axis=1).astype(X1.dtype)
    m = jnp.asarray(X1.shape[0], X1.dtype)
    used = jnp.sum(real, axis=1)

    def one(weights):
        def node(i, chosen, mask, used):
            phi = (X1[:, chosen][:, :, None] * Psi[:, None, :]).reshape(-1, K * P)
            weighted = phi * weights[:, None]
            system = weighted.T @ phi + jnp.diag(1 - mask)
            rhs = (weighted.T @ X1[:, i])[:, None]
            theta, factor = solve_spd(system, rhs)
            rss = jnp.sum(weights * (X1[:, i] - phi @ theta[:, 0]) ** 2)
            inverse = jax.scipy.linalg.cho_solve((factor, True), jnp.eye(K * P, dtype=X1.dtype))
            blocks = inverse.reshape(K, P, K, P)[jnp.arange(K), :, jnp.arange(K)]
            edge = theta.reshape(K, P, 1)
            wald = jnp.sum(edge * solve_spd(blocks, edge)[0], axis=(1, 2))
            return theta[:, 0] * mask, wald * jnp.maximum(m - used, 1) / rss

        return jax.vmap(node)(nodes, parents, real, used)

    return jax.lax.map(one, counts, batch_size=batch)
