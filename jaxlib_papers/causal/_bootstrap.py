"""Resampling the rows of a fitted graph."""

from __future__ import annotations

import dataclasses
import warnings
from typing import TYPE_CHECKING

import jax
import numpy as np

from jaxlib_papers.causal._fit import bootstrap_fits

if TYPE_CHECKING:
    from jaxlib_papers.causal._result import CausalGraph

__all__ = ["bootstrap_fixed", "bootstrap_full"]


def bootstrap_fixed(graph: CausalGraph, samples: int, seed: int):
    """(theta_0 [B, n, n], edge significant [B, n, n]) with the graph as it is."""
    from scipy.special import chdtrc

    unit, psi, config = graph.data.unit, graph.data.psi, graph.config
    m, n = unit.shape
    P = psi.shape[1]
    rng = np.random.default_rng(seed)
    counts = rng.multinomial(m, np.full(m, 1 / m), size=samples).astype(np.float64)
    children = np.flatnonzero(graph.adjacency.any(axis=1))
    strength, found = np.zeros((samples, n, n)), np.zeros((samples, n, n), bool)
    if not len(children):
        return strength, found
    sets = [np.flatnonzero(graph.adjacency[i]).tolist() for i in children]
    extra = [n] * config.intercept
    width = max(map(len, sets)) + len(extra)
    parents = np.array([s + extra + [n + 1] * (width - len(s) - len(extra)) for s in sets])
    with jax.enable_x64(True):
        columns = np.concatenate([unit, np.ones((m, 1)), np.zeros((m, 1))], axis=1)
        theta, wald = bootstrap_fits(
            columns, psi, counts, children.astype(np.int32), parents.astype(np.int32)
        )
        theta, wald = np.asarray(theta), np.asarray(wald)
    for c, i in enumerate(children):
        for k, j in enumerate(sets[c]):
            block = theta[:, c, k * P : (k + 1) * P]
            strength[:, i, j] = block[:, 0]
            significant = chdtrc(P, np.maximum(wald[:, c, k], 0)) <= config.prune_alpha
            found[:, i, j] = significant & (np.linalg.norm(block, axis=1) >= config.min_norm)
    return strength, found


def bootstrap_full(graph: CausalGraph, samples: int, seed: int):
    """(theta_0 [B, n, n], edge found [B, n, n]) with the whole search on each sample."""
    m, n = graph.data.X.shape
    # The maps of the parameters stay those of the whole sample, or theta would not compare.
    config = dataclasses.replace(graph.config, families=graph.families, mi_check=False)
    rng = np.random.default_rng(seed)
    strength, found = np.zeros((samples, n, n)), np.zeros((samples, n, n), bool)
    for b in range(samples):
        rows = rng.integers(0, m, m)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # said once, for the fit itself
            fit = graph.data.refit(config, graph.data.X[rows], graph.data.xi[rows])
        strength[b], found[b] = fit.theta[:, :, 0], fit.adjacency
    return strength, found
