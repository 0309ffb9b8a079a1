"""Graphs as boolean matrices on the host: A[i, j] is True when j -> i (row = child)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

__all__ = [
    "GraphMetrics",
    "check_dag",
    "descendants",
    "graph_metrics",
    "is_acyclic",
    "meek_rules",
    "orient_along",
    "orient_v_structures",
    "topological_order",
]

Sepsets = Mapping[tuple[int, int], tuple[int, ...]]


class GraphMetrics(NamedTuple):
    """How an estimated graph differs from the true one.

    Attributes:
        tp: directed edges that both have.
        fp: estimated edges that are not there (a reversed edge is one of them).
        fn: true edges that were not found with their direction.
        precision: tp / (tp + fp), 0 if nothing was estimated.
        recall: tp / (tp + fn), 0 if there is no true edge.
        f1: harmonic mean of both, 0 if both are 0; 1 for two empty graphs.
        shd: edges to add, delete or reverse; a reversed edge counts 1.
    """

    tp: int
    fp: int
    fn: int
    precision: float
    recall: float
    f1: float
    shd: int


def as_graph(name: str, matrix) -> Bool[np.ndarray, "n n"]:
    """The matrix as a boolean adjacency matrix without self-loops, or ValueError."""
    a = np.asarray(matrix)
    if a.ndim != 2 or a.shape[0] != a.shape[1]:
        raise ValueError(f"{name} has shape {a.shape}, expected a square matrix [n, n]")
    a = a != 0
    if a.diagonal().any():
        raise ValueError(f"{name} has an edge from node {int(a.diagonal().argmax())} to itself")
    return a


def graph_metrics(estimated: Bool[np.ndarray, "n n"], truth: Bool[np.ndarray, "n n"]):
    """Counts and scores of the directed edges of one graph against another.

    Args:
        estimated: A[i, j] True when j -> i.
        truth: the same of the true graph.

    Returns:
        `GraphMetrics`.

    Raises:
        ValueError: not square, different sizes, or a self-loop.

    Source: OpenReview 4bnCXOtHTm, evaluation; structural Hamming distance with reversals as 1.
    """
    a, t = as_graph("estimated", estimated), as_graph("truth", truth)
    if a.shape != t.shape:
        raise ValueError(f"estimated has shape {a.shape} and truth {t.shape}, expected the same")
    tp, fp, fn = int((a & t).sum()), int((a & ~t).sum()), int((~a & t).sum())
    reversed_edges = int((a & ~t & t.T & ~a.T).sum())
    precision = tp / (tp + fp) if tp + fp else 0.0
    recall = tp / (tp + fn) if tp + fn else 0.0
    f1 = 2 * tp / (2 * tp + fp + fn) if tp + fp + fn else 1.0
    return GraphMetrics(tp, fp, fn, precision, recall, f1, fp + fn - reversed_edges)


def find_cycle(a: Bool[np.ndarray, "n n"]) -> list[int]:
    """Nodes of one directed cycle, or nothing."""
    left = set(range(len(a)))
    while removable := [i for i in left if not any(a[i, j] for j in left)]:
        left -= set(removable)
    if not left:
        return []
    trail = [min(left)]
    while True:  # every node that is left has a parent that is left
        parent = next(j for j in sorted(left) if a[trail[-1], j])
        if parent in trail:
            return trail[trail.index(parent) :]
        trail.append(parent)


def is_acyclic(a: Bool[np.ndarray, "n n"]) -> bool:
    """Whether the directed graph has no cycle."""
    return not find_cycle(a)


def check_dag(name: str, matrix) -> Bool[np.ndarray, "n n"]:
    """The matrix as boolean, or ValueError naming a cycle."""
    a = as_graph(name, matrix)
    if cycle := find_cycle(a):
        path = " <- ".join(map(str, [*cycle, cycle[0]]))
        raise ValueError(f"{name} has the cycle {path}; remove or reverse one of these edges")
    return a


def topological_order(a: Bool[np.ndarray, "n n"]) -> Int[np.ndarray, " n"]:
    """Nodes with every parent before its children; smallest index first where there is choice."""
    a, order = check_dag("graph", a), []
    while len(order) < len(a):
        done = np.isin(np.arange(len(a)), order)
        order.append(next(i for i in range(len(a)) if not done[i] and not (a[i] & ~done).any()))
    return np.array(order, np.int64)


def descendants(a: Bool[np.ndarray, "n n"]) -> Bool[np.ndarray, "n n"]:
    """R[i, j] True when a directed path leads from j to i."""
    reach = a.copy()
    for k in range(len(a)):
        reach |= reach[:, k : k + 1] & reach[k : k + 1, :]
    return reach


def orient_along(skeleton: Bool[np.ndarray, "n n"], order) -> Bool[np.ndarray, "n n"]:
    """The skeleton with each edge pointing from the earlier node of the order to the later one."""
    rank = np.argsort(np.asarray(order))
    return skeleton & (rank[None, :] < rank[:, None])


def orient_v_structures(
    skeleton: Bool[np.ndarray, "n n"], sepsets: Sepsets
) -> Bool[np.ndarray, "n n"]:
    """Marks i -> k <- j for unshielded i - k - j with k outside of the separating set.

    Returns a mixed graph: an edge True in both directions is undirected. Where two v-structures
    disagree about an edge, it stays undirected.
    """
    n = len(skeleton)
    arrow = np.zeros_like(skeleton)
    for k in range(n):
        for i, j in itertools.combinations(np.flatnonzero(skeleton[k]), 2):
            if not skeleton[i, j] and k not in sepsets.get((int(i), int(j)), ()):
                arrow[k, i] = arrow[k, j] = True
    conflict = arrow & arrow.T
    arrow &= ~conflict
    return skeleton & ~arrow.T


def meek_rules(mixed: Bool[np.ndarray, "n n"]) -> Bool[np.ndarray, "n n"]:
    """Applies rules R1 to R4 until nothing more follows.

    Args:
        mixed: True in both directions: undirected; in one, [i, j]: j -> i.

    Returns:
        The mixed graph with every direction that the given ones imply.

    Source: Meek (1995), rules 1 to 4.
    """
    g = mixed.copy()
    while True:
        und, arc = g & g.T, g & ~g.T  # arc[i, j]: j -> i
        near = g | g.T
        found = None
        for i, j in zip(*np.nonzero(und), strict=True):  # would j -> i follow?
            into_j = arc[j]  # nodes k -> j
            r1 = (into_j & ~near[i]).any()
            r2 = (arc[:, j] & arc[i]).any()  # j -> k -> i
            between = np.flatnonzero(und[j] & arc[i])  # j - k -> i
            r3 = any(not near[k, m] for k, m in itertools.combinations(between, 2))
            r4 = any(  # j - k -> m -> i with k and i not adjacent, j and m adjacent
                near[j, m] and not near[k, i]
                for m in np.flatnonzero(arc[i])
                for k in np.flatnonzero(arc[m] & und[j])
            )
            if r1 or r2 or r3 or r4:
                found = (i, j)
                break
        if found is None:
            return g
        g[found[1], found[0]] = False


def complete_along(mixed: Bool[np.ndarray, "n n"], order) -> Bool[np.ndarray, "n n"]:
    """A DAG: undirected edges follow the order, the rules being applied after each.

    Arrows that already make a cycle (contradicting tests) lose against the order altogether.
    """
    skeleton = mixed | mixed.T
    if not is_acyclic(mixed & ~mixed.T):
        return orient_along(skeleton, order)
    rank = np.argsort(np.asarray(order))
    g = meek_rules(mixed)
    while (pairs := np.argwhere(g & g.T & (rank[None, :] < rank[:, None]))).size:
        child, parent = min(pairs, key=lambda p: (rank[p[1]], rank[p[0]]))
        arcs = g & ~g.T
        if descendants(arcs)[parent, child]:
            child, parent = parent, child
        g[parent, child] = False
        g = meek_rules(g)
    return g if is_acyclic(g) else orient_along(skeleton, order)
