"""PC-stable: the undirected skeleton from conditional independence tests, a level at a time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from jaxtyping import Bool

from jaxlib_papers.ops.checks import check_count

__all__ = ["pc_skeleton"]


def _subsets(near_i: list[int], near_j: list[int], size: int) -> Iterator[tuple[int, ...]]:
    """Subsets of the neighbours of either end, each once."""
    seen = set()
    for near in (near_i, near_j):
        for subset in itertools.combinations(near, size):
            key = frozenset(subset)
            if key not in seen:
                seen.add(key)
                yield subset


def _pvalues(ci: Callable[..., Any], tests: list[tuple[int, int, tuple[int, ...]]]) -> np.ndarray:
    if hasattr(ci, "batch"):
        a, b, z = zip(*tests, strict=True)
        return np.asarray(ci.batch(np.array(a), np.array(b), np.array(z, np.int64)))
    results = (ci(i, j, subset) for i, j, subset in tests)
    return np.array([float(getattr(r, "pvalue", r)) for r in results])


def pc_skeleton(
    ci: Callable[..., Any],
    n: int,
    alpha: float = 0.05,
    max_cond: int = 3,
) -> tuple[Bool[np.ndarray, "n n"], dict[tuple[int, int], tuple[int, ...]]]:
    """The skeleton: an edge goes when some set of neighbours makes its ends independent.

    Neighbours are those at the start of a level, so that the result does not depend on the order
    of the tests. An edge that has gone is not tested again within the level.

    Args:
        ci: (a, b, z) -> p-value, or anything with a `pvalue`; z is a tuple of nodes. If it also
            has `batch(a [T], b [T], z [T, k]) -> p-values [T]`, tests are run many at a time.
        n: number of nodes; 0 or 1 give an empty graph.
        alpha: an edge goes when p > alpha.
        max_cond: largest conditioning set.

    Returns:
        (symmetric adjacency matrix, separating sets): the set of a removed pair is found under
        (i, j) and (j, i).

    Raises:
        ValueError: n or max_cond < 0, alpha outside of (0, 1), or a p-value that is NaN.

    Source: Colombo and Maathuis (2014), PC-stable; OpenReview 4bnCXOtHTm, stage 2; max_cond
    (reconstructed).
    """
    check_count("n", n, 0)
    check_count("max_cond", max_cond, 0)
    if not 0 < alpha < 1:
        raise ValueError(f"alpha is {alpha}, expected a level in (0, 1)")
    adjacent = ~np.eye(n, dtype=bool)
    sepsets: dict[tuple[int, int], tuple[int, ...]] = {}
    strength = np.zeros((n, n))  # of the marginal association: strong neighbours are tried first
    for level in range(max_cond + 1):
        near = [
            sorted(np.flatnonzero(adjacent[i]).tolist(), key=lambda k, i=i: (strength[i, k], k))
            for i in range(n)
        ]
        open_pairs = {}
        for i, j in itertools.combinations(range(n), 2):
            if adjacent[i, j]:
                others = ([k for k in near[i] if k != j], [k for k in near[j] if k != i])
                if max(map(len, others)) >= level:
                    open_pairs[i, j] = _subsets(*others, level)
        if level and not open_pairs:
            break
        count = 4
        while open_pairs:
            tests = [
                (i, j, subset)
                for (i, j), subsets in open_pairs.items()
                for subset in itertools.islice(subsets, count)
            ]
            tried = {(i, j) for i, j, _ in tests}
            open_pairs = {pair: rest for pair, rest in open_pairs.items() if pair in tried}
            if not tests:
                break
            for (i, j, subset), p in zip(tests, _pvalues(ci, tests), strict=True):
                if np.isnan(p):
                    raise ValueError(f"ci gave NaN for nodes {i} and {j} given {subset}")
                if level == 0:
                    strength[i, j] = strength[j, i] = p
                if p > alpha and adjacent[i, j]:
                    adjacent[i, j] = adjacent[j, i] = False
                    sepsets[i, j] = sepsets[j, i] = tuple(int(k) for k in subset)
                    open_pairs.pop((i, j), None)
            count *= 2
    return adjacent, sepsets
