"""Graphs on the host, the skeleton, the greedy search: exact answers on small cases."""

from __future__ import annotations

import itertools

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxlib_papers.causal._graphs import (
    complete_along,
    descendants,
    find_cycle,
    is_acyclic,
    meek_rules,
    orient_along,
    orient_v_structures,
    topological_order,
)
from jaxlib_papers.causal._greedy import greedy_trace
from jaxlib_papers.causal.baselines.ges import consistent_dag, equivalence_class
from jaxlib_papers.causal.pce_causal import graph_metrics, greedy_dag, pc_skeleton


def graph(n, *edges):
    """Edges as (cause, effect)."""
    a = np.zeros((n, n), bool)
    for j, i in edges:
        a[i, j] = True
    return a


def random_dag(n, seed, chance=0.4):
    r = np.random.default_rng(seed)
    order = r.permutation(n)
    a = np.zeros((n, n), bool)
    for place, i in enumerate(order):
        for j in order[:place]:
            a[i, j] = r.random() < chance
    return a


def separated(a, i, j, given):
    """d-separation by the moralised ancestral graph."""
    below = descendants(a) | np.eye(len(a), dtype=bool)
    keep = np.flatnonzero(below[[i, j, *given]].any(axis=0))
    moral = np.zeros_like(a)
    for k in keep:
        parents = [p for p in np.flatnonzero(a[k]) if p in keep]
        for p, q in itertools.combinations([k, *parents], 2):
            moral[p, q] = moral[q, p] = True
    seen, stack = {i}, [i]
    while stack:
        for k in np.flatnonzero(moral[stack.pop()]):
            if k not in seen and k not in given:
                seen.add(int(k))
                stack.append(int(k))
    return j not in seen


def test_metrics_count_a_reversal_once():
    truth = graph(4, (0, 1), (1, 2), (2, 3))
    m = graph_metrics(graph(4, (0, 1), (2, 1), (0, 3)), truth)
    assert (m.tp, m.fp, m.fn, m.shd) == (1, 2, 2, 3)
    assert m.precision == m.recall == m.f1 == pytest.approx(1 / 3)
    assert graph_metrics(truth, truth)[3:] == (1, 1, 1, 0)
    empty = graph(3)
    assert graph_metrics(empty, empty).f1 == 1 and graph_metrics(empty, graph(3, (0, 1))).f1 == 0
    assert graph_metrics(graph(3, (0, 1)), empty).precision == 0
    with pytest.raises(ValueError, match="truth"):
        graph_metrics(empty, truth)
    with pytest.raises(ValueError, match="itself"):
        graph_metrics(np.eye(3), empty)


def test_cycles_orders_and_descendants():
    a = graph(4, (0, 1), (1, 2), (2, 3))
    assert is_acyclic(a) and topological_order(a).tolist() == [0, 1, 2, 3]
    assert descendants(a)[3].tolist() == [True, True, True, False]
    cyclic = a | graph(4, (3, 1))
    assert sorted(find_cycle(cyclic)) == [1, 2, 3] and not is_acyclic(cyclic)
    with pytest.raises(ValueError, match="cycle"):
        topological_order(cyclic)


@given(st.integers(0, 10_000), st.integers(2, 7))
def test_skeleton_and_orientation_from_an_oracle(seed, n):
    truth = random_dag(n, seed)
    oracle = lambda a, b, z: 1.0 if separated(truth, a, b, z) else 0.0  # noqa: E731
    skeleton, sepsets = pc_skeleton(oracle, n, 0.05, n)
    np.testing.assert_array_equal(skeleton, truth | truth.T)
    assert set(sepsets) == {tuple(map(int, p)) for p in np.argwhere(~skeleton) if p[0] != p[1]}
    mixed = meek_rules(orient_v_structures(skeleton, sepsets))
    np.testing.assert_array_equal(mixed, equivalence_class(truth))
    np.testing.assert_array_equal(equivalence_class(consistent_dag(mixed)), mixed)
    order = np.random.default_rng(seed).permutation(n)
    done = complete_along(mixed, order)
    assert is_acyclic(done)
    np.testing.assert_array_equal(equivalence_class(done), mixed)
    np.testing.assert_array_equal(orient_along(skeleton, topological_order(truth)), truth)


def test_skeleton_takes_results_and_batches_and_bounds_the_level():
    truth = graph(4, (0, 1), (1, 2), (2, 3))

    class Oracle:
        calls = 0

        def __call__(self, a, b, z):
            return type("Result", (), {"pvalue": float(separated(truth, a, b, z))})()

        def batch(self, a, b, z):
            self.calls += 1
            tests = zip(a, b, z, strict=True)
            return np.array([float(separated(truth, i, j, k.tolist())) for i, j, k in tests])

    oracle = Oracle()
    batched = pc_skeleton(oracle, 4, 0.05, 3)
    single = pc_skeleton(lambda *t: oracle(*t), 4, 0.05, 3)
    np.testing.assert_array_equal(batched[0], single[0])
    assert batched[1] == single[1] and 0 < oracle.calls < 10
    assert pc_skeleton(oracle, 4, 0.05, 0)[0].sum() == 12  # nothing is marginally independent
    assert pc_skeleton(oracle, 0, 0.05, 3)[0].shape == (0, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((-1,), "n is"), ((3, 0.0), "alpha"), ((3, 0.05, -1), "max_cond")],
)
def test_bad_skeleton_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        pc_skeleton(lambda *_: 1.0, *arguments)
    with pytest.raises(ValueError, match="NaN"):
        pc_skeleton(lambda *_: float("nan"), 3)


def additive_score(target):
    """Zero for the target's parents, more for every wrong one."""
    return lambda i, parents: float(len(set(parents) ^ set(np.flatnonzero(target[i]).tolist())))


@given(st.integers(0, 10_000), st.integers(2, 7))
def test_greedy_never_makes_a_cycle_and_always_improves(seed, n):
    r = np.random.default_rng(seed)
    table = {}

    def score(i, parents):
        return table.setdefault((i, parents), float(r.normal()))

    a, totals = greedy_trace(random_dag(n, seed + 1), score, "all")
    assert is_acyclic(a) and (np.diff(totals) < 0).all()
    final = sum(table[i, tuple(np.flatnonzero(a[i]).tolist())] for i in range(n))
    assert totals[-1] == pytest.approx(final)


def test_greedy_finds_the_target_inside_the_candidates():
    target = graph(5, (0, 1), (1, 2), (0, 3), (3, 4), (1, 4))
    found = greedy_dag(np.zeros((5, 5), bool), additive_score(target), "all")
    np.testing.assert_array_equal(found, target)
    turned = greedy_dag(target.T, additive_score(target), target | target.T)
    np.testing.assert_array_equal(turned, target)
    fewer = target.copy()
    fewer[4, 1] = False
    np.testing.assert_array_equal(
        greedy_dag(np.zeros((5, 5), bool), additive_score(target), fewer), fewer
    )
    assert greedy_dag(target.T, additive_score(target), "all", max_moves=0).tolist() == (
        target.T.tolist()
    )


def test_greedy_refuses_bad_starts():
    cyclic = graph(3, (0, 1), (1, 2), (2, 0))
    with pytest.raises(ValueError, match="cycle"):
        greedy_dag(cyclic, lambda i, p: 0.0, "all")
    with pytest.raises(ValueError, match="candidates"):
        greedy_dag(np.zeros((3, 3)), lambda i, p: 0.0, np.zeros((2, 2)))
    with pytest.raises(ValueError, match="candidates"):
        greedy_dag(np.zeros((3, 3)), lambda i, p: 0.0, "some")
    assert jax.config.jax_enable_x64 is False
