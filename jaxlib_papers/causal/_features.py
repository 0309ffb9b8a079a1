"""Features X_k Psi_alpha, and the normal equations of any parent set gathered from one Gram matrix.

The Gram matrix of all features of all nodes is formed once. The normal equations of any regression
of a node on any parent set are then a gather of its blocks, so that scoring thousands of parent
sets touches no row of the data, and (with parent sets padded to a fixed width) compiles once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxlib_papers.ops.checks import as_float

__all__ = [
    "Gram",
    "gram_blocks",
    "interaction_features",
    "solve_refined",
    "solve_spd",
    "subset_system",
]


def interaction_features(
    X: Float[Array, "m n"], Psi: Float[Array, "m P"], cols: Sequence[int], constant: bool = False
) -> Float[Array, "m F"]:
    """The regression features of one node: every parent times every basis function.

    Args:
        X: observations.
        Psi: basis functions of the parameters at the same rows.
        cols: parents, in the order of the features.
        constant: whether the basis functions alone come first (a mean that moves with xi).

    Returns:
        [m, P (len(cols) + constant)]: parent-major, basis functions inside. No parents and no
        constant give [m, 0].

    Raises:
        ValueError: rows differ, or a column that X does not have.

    Source: OpenReview 4bnCXOtHTm, structural equations; the constant block (reconstructed).
    """
    X, Psi = as_float(X, Psi)
    if X.ndim != 2 or Psi.ndim != 2 or X.shape[0] != Psi.shape[0]:
        raise ValueError(f"X has shape {X.shape} and Psi {Psi.shape}, expected [m, n] and [m, P]")
    cols = [int(c) for c in np.asarray(cols, np.int64).reshape(-1)]
    for c in cols:
        if not 0 <= c < X.shape[1]:
            raise ValueError(f"cols has {c}, expected columns of X in 0..{X.shape[1] - 1}")
    blocks = [Psi] if constant else []
    blocks += [X[:, c, None] * Psi for c in cols]
    return jnp.concatenate([jnp.zeros((X.shape[0], 0), X.dtype), *blocks], axis=1)


def solve_spd(
    G: Float[Array, "... k k"], rhs: Float[Array, "... k r"]
) -> tuple[Float[Array, "... k r"], Float[Array, "... k k"]]:
    """Solution and Cholesky factor of a positive semi-definite system.

    A floor of a few roundings of each diagonal entry keeps exactly collinear columns from breaking
    the factorisation, whatever the columns' scales; it is far below every tolerance in float64, and
    a ridge of 1e-6 relative size in float32.
    """
    diagonal = jnp.diagonal(G, axis1=-2, axis2=-1)
    root = jnp.sqrt(jnp.where(diagonal > 0, diagonal, 1))
    floor = jnp.finfo(G.dtype).eps * max(G.shape[-1], 1)
    eye = jnp.broadcast_to(jnp.eye(G.shape[-1], dtype=G.dtype), G.shape)
    unit = G / (root[..., :, None] * root[..., None, :])
    factor = root[..., :, None] * jnp.linalg.cholesky(unit + floor * eye)
    half = jax.scipy.linalg.solve_triangular(factor, rhs, lower=True)
    return jax.scipy.linalg.solve_triangular(factor, half, lower=True, trans=1), factor


def solve_refined(
    G: Float[Array, "... k k"], rhs: Float[Array, "... k r"]
) -> tuple[Float[Array, "... k r"], Float[Array, "... k k"]]:
    """`solve_spd` with one step of iterative refinement, which removes the floor's trace."""
    x, factor = solve_spd(G, rhs)
    half = jax.scipy.linalg.solve_triangular(factor, rhs - G @ x, lower=True)
    return x + jax.scipy.linalg.solve_triangular(factor, half, lower=True, trans=1), factor


@jax.jit
def gram_blocks(X: Float[Array, "m n"], Psi: Float[Array, "m P"]) -> Float[Array, "n2 n2 P P"]:
    """Blocks sum_t X_k X_l Psi Psi' of all pairs, with two more "nodes".

    Node n is the constant 1 (its features are the basis alone), node n + 1 is 0: the padding.
    """
    m, n = X.shape
    extended = jnp.concatenate([X, jnp.ones((m, 1), X.dtype)], axis=1)
    features = (extended[:, :, None] * Psi[:, None, :]).reshape(m, -1)
    gram = (features.T @ features).reshape(n + 1, Psi.shape[1], n + 1, Psi.shape[1])
    return jnp.pad(gram.transpose(0, 2, 1, 3), ((0, 1), (0, 1), (0, 0), (0, 0)))


def subset_system(
    blocks: Float[Array, "n2 n2 P P"], parents: Int[Array, " K"], targets: Int[Array, " r"]
) -> tuple[Float[Array, "KP KP"], Float[Array, "KP r"], Float[Array, " r"], Float[Array, " KP"]]:
    """Normal equations of nodes on one padded parent set.

    Returns:
        (Phi'Phi with 1 on the diagonal of padding, Phi'x, x'x, mask of real features).
    """
    K, P = parents.shape[0], blocks.shape[2]
    real = jnp.repeat(parents < blocks.shape[0] - 1, P).astype(blocks.dtype)
    system = blocks[parents[:, None], parents[None, :]].transpose(0, 2, 1, 3).reshape(K * P, K * P)
    rhs = blocks[parents[:, None], targets[None, :], :, 0].transpose(0, 2, 1).reshape(K * P, -1)
    squares = blocks[targets, targets, 0, 0]
    return system + jnp.diag(1 - real), rhs, squares, real


@partial(jax.jit, static_argnames="ridge")
def _rss_batch(blocks, nodes, parents, ridge: float):
    def one(node, chosen):
        system, rhs, square, _ = subset_system(blocks, chosen, node[None])
        system = system + ridge * jnp.eye(system.shape[0], dtype=system.dtype)
        theta, _ = solve_spd(system, rhs)
        explained = jnp.sum(theta * (2 * rhs - system @ theta))
        return square[0] - explained

    return jax.vmap(one)(nodes, parents)


class Gram:
    """All parent sets' least squares for one data set, batched over padded parent sets.

    Args:
        X: [m, n], centred.
        Psi: [m, P].
        intercept: whether every regression also has the basis alone.
    """

    BATCH = 64

    def __init__(self, X, Psi, *, intercept: bool = False):
        self.rows, self.nodes = X.shape
        self.basis = Psi.shape[1]
        self.intercept = intercept
        self.blocks = gram_blocks(X, Psi)

    def pad(self, parents: Sequence[int], width: int) -> list[int]:
        """Parents, the constant where there is one, then padding to the width."""
        chosen = [*parents, *([self.nodes] if self.intercept else [])]
        return chosen + [self.nodes + 1] * (width - len(chosen))

    def width(self, count: int) -> int:
        """The padded width of a parent set: a power of two, so that few programs are compiled."""
        return max(2, 1 << (count + self.intercept - 1).bit_length())

    def rss(self, jobs: Sequence[tuple[int, Sequence[int]]]) -> Float[np.ndarray, " jobs"]:
        """Residual sums of squares of (node, parents) pairs."""
        out = np.empty(len(jobs))
        widths = [self.width(len(parents)) for _, parents in jobs]
        for width in sorted(set(widths)):
            mine = [k for k, w in enumerate(widths) if w == width]
            for start in range(0, len(mine), self.BATCH):
                part = mine[start : start + self.BATCH]
                filler = [part[0]] * (self.BATCH - len(part))
                rows = [*part, *filler]
                nodes = np.array([jobs[k][0] for k in rows], np.int32)
                sets = np.array([self.pad(jobs[k][1], width) for k in rows], np.int32)
                values = _rss_batch(self.blocks, nodes, sets, 0.0)
                out[part] = np.asarray(values)[: len(part)]
        return out
