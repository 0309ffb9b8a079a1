"""Greedy equivalence search with BIC, which ignores the parameters.

Source: Chickering (2002), "Optimal structure identification with greedy search": the Insert and
Delete operators on equivalence classes with their conditions; Dor and Tarsi (1992) for a DAG of a
class. Written from the papers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import jax
import numpy as np
from jaxtyping import Bool, Float

from jaxlib_papers.causal._features import Gram
from jaxlib_papers.causal._graphs import meek_rules
from jaxlib_papers.causal._greedy import LocalScore
from jaxlib_papers.causal._inputs import check_observations
from jaxlib_papers.ops.checks import check_nonnegative

__all__ = ["consistent_dag", "equivalence_class", "ges"]

Graph = Bool[np.ndarray, "n n"]


def consistent_dag(mixed: Graph) -> Graph:
    """A DAG with the same skeleton and v-structures as a mixed graph.

    Args:
        mixed: [i, j] alone is j -> i, both directions is an undirected edge.

    Returns:
        bool [n, n], True at [i, j] when j -> i. A mixed graph without such a DAG (contradicting
        tests can give one) has the rest of its undirected edges pointing to the later node.

    Source: Dor and Tarsi (1992), a simple algorithm for consistent extensions.
    """
    left, out = set(range(len(mixed))), mixed & ~mixed.T
    near, und = mixed | mixed.T, mixed & mixed.T
    while left:
        for i in sorted(left):
            others = left - {i}
            if any(out[k, i] for k in others):
                continue  # no sink
            friends = [k for k in others if und[i, k]]
            around = [k for k in others if near[i, k]]
            if all(near[f, k] for f in friends for k in around if k != f):
                for f in friends:
                    out[i, f] = True
                break
        else:
            rest = und & ~(out | out.T)
            return out | np.tril(rest, -1)
        left.remove(i)
    return out


def equivalence_class(dag: Graph) -> Graph:
    """The mixed graph of all DAGs with the same skeleton and v-structures.

    Args:
        dag: True at [i, j] when j -> i.

    Returns:
        bool [n, n]: both directions where some equivalent DAG turns the edge.

    Source: Meek (1995), rules applied to the v-structures of the DAG.
    """
    near, arrow = dag | dag.T, np.zeros_like(dag)
    for k in range(len(dag)):
        for i, j in itertools.combinations(np.flatnonzero(dag[k]), 2):
            if not near[i, j]:
                arrow[k, i] = arrow[k, j] = True
    return meek_rules(near & ~arrow.T)


def _subsets(items: list[int]) -> Iterator[tuple[int, ...]]:
    for size in range(len(items) + 1):
        yield from itertools.combinations(items, size)


def _is_clique(near: Graph, nodes: set[int]) -> bool:
    return all(near[a, b] for a, b in itertools.combinations(nodes, 2))


def _blocked(g: Graph, start: int, goal: int, block: set[int]) -> bool:
    """Whether every semi-directed path start ... goal meets the block."""
    seen, stack = {start}, [start]
    while stack:
        for k in np.flatnonzero(g[:, stack.pop()]):  # -> or -
            if k == goal:
                return False
            if k not in seen and k not in block:
                seen.add(int(k))
                stack.append(int(k))
    return True


def _moves(g: Graph, insert: bool):
    """(y, x, chosen, parents without x) of every valid operator."""
    near, und, arc = g | g.T, g & g.T, g & ~g.T
    for y, x in itertools.permutations(range(len(g)), 2):
        shared = {int(k) for k in np.flatnonzero(und[y] & near[x])}
        parents = {int(k) for k in np.flatnonzero(arc[y])}
        if insert and not near[x, y]:
            free = [int(k) for k in np.flatnonzero(und[y] & ~near[x]) if k != x]
            for chosen in _subsets(free):
                base = shared | set(chosen)
                if _is_clique(near, base) and _blocked(g, y, x, base):
                    yield y, x, chosen, base | parents
        elif not insert and g[y, x]:
            for chosen in _subsets(sorted(shared)):
                base = shared - set(chosen)
                if _is_clique(near, base):
                    yield y, x, chosen, (base | parents) - {x}


def _applied(g: Graph, y: int, x: int, chosen: tuple[int, ...], insert: bool) -> Graph:
    new = g.copy()
    if insert:
        new[y, x], new[x, y] = True, False
        for t in chosen:  # t -> y
            new[t, y] = False
    else:
        new[y, x] = new[x, y] = False
        for h in chosen:  # y -> h, and x -> h where that was open
            new[y, h] = False
            if new[x, h] and new[h, x]:
                new[x, h] = False
    return equivalence_class(consistent_dag(new))


def ges(X: Float[np.ndarray, "m n"], penalty: float = 1.0) -> Graph:
    """The equivalence class that greedy insertions, then deletions, of edges arrive at.

    Args:
        X: observations.
        penalty: multiplier of BIC's ln(m) a parameter.

    Returns:
        bool [n, n] mixed graph: [i, j] alone is j -> i, both directions is an undirected edge.

    Raises:
        ValueError: NaN, constant or dependent columns, too few rows, a negative penalty.

    The operators of one step grow with two to the power of the undirected neighbours of a node:
    meant for tens of nodes.

    Source: Chickering (2002), phases one and two; BIC of linear Gaussian models.
    """
    check_nonnegative("penalty", penalty)
    X = check_observations("X", X)
    unit = (X - X.mean(axis=0)) / X.std(axis=0)
    g = np.zeros((X.shape[1],) * 2, bool)
    with jax.enable_x64(True):
        score = LocalScore(Gram(unit, np.ones((len(X), 1))), penalty)
        for insert in (True, False):
            while moves := list(_moves(g, insert)):
                jobs = []
                for y, x, _, base in moves:
                    with_x = tuple(sorted(base | {x}))
                    without = tuple(sorted(base))
                    jobs += [(y, with_x if insert else without), (y, without if insert else with_x)]
                values = score.batch(jobs).reshape(-1, 2)
                change = values[:, 0] - values[:, 1]
                best = int(np.argmin(change))
                if not change[best] < -1e-9:
                    break
                y, x, chosen, _ = moves[best]
                g = _applied(g, y, x, chosen, insert)
    return g
