"""Greedy search over directed acyclic graphs with a score that is a sum over nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool, Float

from jaxlib_papers.causal._features import Gram
from jaxlib_papers.causal._graphs import as_graph, check_dag, descendants
from jaxlib_papers.ops.checks import check_choice, check_count

__all__ = ["LocalScore", "greedy_dag", "greedy_trace"]

SCORES = ("bic", "ls")


class LocalScore:
    """Local scores of one data set, cached and computed in batches; lower is better.

    Args:
        gram: its `Gram`.
        lam: multiplier of the penalty.
        kind: "bic": m ln(RSS/m) + lam ln(m) P |PA|; "ls": RSS/(2 s2) + lam |PA|.
        noise: [n] noise variances s2, for "ls".
        max_parents: a larger parent set scores inf.
    """

    def __init__(
        self,
        gram: Gram,
        lam: float = 1.0,
        kind: Literal["bic", "ls"] = "bic",
        noise: Float[np.ndarray, " n"] | None = None,
        max_parents: int | None = None,
    ):
        check_choice("kind", kind, SCORES)
        # A fit that leaves no degrees of freedom has a score of minus infinity, and no meaning.
        most = (gram.rows - 2) // gram.basis - gram.intercept
        self.gram, self.lam, self.kind, self.noise = gram, lam, kind, noise
        self.max_parents = most if max_parents is None else min(most, max_parents)
        self._cache: dict[tuple[int, frozenset[int]], float] = {}

    def __call__(self, i: int, parents: Sequence[int]) -> float:
        """Score of one node with these parents."""
        return float(self.batch([(i, tuple(parents))])[0])

    def batch(self, jobs: Sequence[tuple[int, tuple[int, ...]]]) -> Float[np.ndarray, " jobs"]:
        """Scores of many (node, parents) pairs."""
        keys = [(int(i), frozenset(map(int, parents))) for i, parents in jobs]
        new = [k for k in dict.fromkeys(keys) if k not in self._cache]
        small = [k for k in new if len(k[1]) <= self.max_parents]
        self._cache.update((k, np.inf) for k in new if len(k[1]) > self.max_parents)
        if small:
            rss = self.gram.rss([(i, sorted(parents)) for i, parents in small])
            sizes = np.array([len(parents) for _, parents in small])
            m, P = self.gram.rows, self.gram.basis
            if self.kind == "bic":
                floor = np.finfo(np.float64).tiny
                values = m * np.log(np.maximum(rss, floor) / m) + self.lam * np.log(m) * P * sizes
            else:
                s2 = self.noise[[i for i, _ in small]]
                values = rss / (2 * s2) + self.lam * sizes
            self._cache.update(zip(small, map(float, values), strict=True))
        return np.array([self._cache[k] for k in keys])


def _evaluate(score: Callable[..., Any], jobs: list[tuple[int, tuple[int, ...]]]) -> list[float]:
    if hasattr(score, "batch"):
        return [float(v) for v in score.batch(jobs)]
    return [float(score(i, parents)) for i, parents in jobs]


def greedy_trace(
    A0: Bool[np.ndarray, "n n"],
    score: Callable[..., Any],
    candidates: Bool[np.ndarray, "n n"] | Literal["all"] = "all",
    *,
    max_moves: int = 200,
) -> tuple[Bool[np.ndarray, "n n"], list[float]]:
    """`greedy_dag`, with the total score before the search and after each move.

    Source: OpenReview 4bnCXOtHTm, stage 4 (moves and stopping reconstructed).
    """
    a = check_dag("A0", A0).copy()
    n = len(a)
    check_count("max_moves", max_moves, 0)
    if isinstance(candidates, str):
        check_choice("candidates", candidates, ("all",))
        allowed = ~np.eye(n, dtype=bool)
    else:
        allowed = as_graph("candidates", candidates)
        if allowed.shape != a.shape:
            raise ValueError(f"candidates has shape {allowed.shape}, expected that of A0 {a.shape}")
    allowed = allowed | allowed.T | a | a.T
    known: dict[tuple[int, tuple[int, ...]], float] = {}

    def parents_of(i: int, toggled: int | None = None) -> tuple[int, ...]:
        row = a[i].copy()
        if toggled is not None:
            row[toggled] = ~row[toggled]
        return tuple(np.flatnonzero(row).tolist())

    def local(jobs: list[tuple[int, tuple[int, ...]]]) -> list[float]:
        new = [job for job in dict.fromkeys(jobs) if job not in known]
        known.update(zip(new, _evaluate(score, new), strict=True) if new else ())
        return [known[job] for job in jobs]

    current = np.array(local([(i, parents_of(i)) for i in range(n)]), float).reshape(n)
    change = np.full((n, n), np.inf)  # of node i's score when parent j is toggled
    totals, stale = [float(current.sum())], set(range(n))
    for _ in range(max_moves):
        pairs = [(i, int(j)) for i in sorted(stale) for j in np.flatnonzero(allowed[i])]
        values = local([(i, parents_of(i, j)) for i, j in pairs])
        for (i, j), value in zip(pairs, values, strict=True):
            change[i, j] = value - current[i] if np.isfinite(value) else np.inf
        reach = descendants(a)
        best, move = -1e-9, None
        for i, j in np.argwhere(allowed):
            if a[i, j]:
                options = [(change[i, j], False)]
                others = a[i].copy()
                others[j] = False
                if not (others & reach[:, j]).any():  # no second path j -> ... -> i
                    options.append((change[i, j] + change[j, i], True))
            elif a[j, i] or reach[j, i]:
                continue
            else:
                options = [(change[i, j], False)]
            for delta, turn in options:
                if delta < best:
                    best, move = delta, (int(i), int(j), turn)
        if move is None:
            break
        i, j, turn = move
        a[i, j] = ~a[i, j]
        if turn:
            a[j, i] = True
        stale = {i, j} if turn else {i}
        for node in stale:
            current[node] = local([(node, parents_of(node))])[0]
        totals.append(float(current.sum()))
    return a, totals


def greedy_dag(
    A0: Bool[np.ndarray, "n n"],
    score: Callable[..., Any],
    candidates: Bool[np.ndarray, "n n"] | Literal["all"] = "all",
    *,
    max_moves: int = 200,
) -> Bool[np.ndarray, "n n"]:
    """Improves a DAG by the best single addition, deletion or reversal until none improves it.

    Moves that would make a cycle are not considered, so the result is acyclic by construction and
    there is no acyclicity penalty. Each move lowers the total strictly.

    Args:
        A0: the start, A[i, j] True when j -> i.
        score: (i, parents) -> local score of node i, lower is better; parents is a sorted tuple.
            If it also has `batch(list of (i, parents)) -> scores`, that is called instead.
        candidates: pairs that may be joined, in either direction (a skeleton); "all" for every
            pair. Edges of A0 may always be turned or removed.
        max_moves: accepted moves after which the search stops.

    Returns:
        bool NumPy [n, n].

    Raises:
        ValueError: A0 is cyclic (the cycle is named) or not square; candidates of another shape.

    Source: OpenReview 4bnCXOtHTm, stage 4 (moves and stopping reconstructed).
    """
    return greedy_trace(A0, score, candidates, max_moves=max_moves)[0]
