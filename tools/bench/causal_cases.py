"""Cases about the PCE causal model: whole fits, the bootstrap, and batched independence tests."""

from __future__ import annotations

import time
from collections.abc import Iterator

import jax
import numpy as np

from jaxlib_papers.causal.pce_causal import (
    PCTCD,
    PCTCDConfig,
    PCTIndependence,
    random_plant,
    reactor9,
)
from tools.bench.timing import Result

__all__ = ["causal_bootstrap", "causal_fit50", "causal_tests"]

_REACTOR = PCTCDConfig(degree=2, q=1.0)


def _loop_test(X, psi, a, b, z, ridge=1e-8, reg=1e-6) -> float:
    """One test as it is usually written: features, normal equations and covariance of its own."""
    m, P = psi.shape
    F = np.concatenate([psi, *(X[:, k, None] * psi for k in z)], axis=1)
    system = F.T @ F + ridge * m * np.eye(F.shape[1])
    beta = np.linalg.solve(system, F.T @ X[:, [a, b]])
    r = X[:, [a, b]] - F @ beta
    v = (r[:, 0] * r[:, 1])[:, None] * psi
    mean, S = v.mean(axis=0), np.cov(v, rowvar=False)
    return float(m * mean @ np.linalg.solve(S + reg * np.trace(S) / P * np.eye(P), mean))


def causal_tests() -> Iterator[Result]:
    """All tests of reactor9 given two others, m = 1000, P = 10, against a loop over tests."""
    data = reactor9(jax.random.key(0), 1000)
    graph = PCTCD(_REACTOR).fit(data.X, data.xi)
    unit, psi = graph.data.unit, graph.data.psi
    tests = np.array(
        [
            (a, b, c, d)
            for a in range(9)
            for b in range(a)
            for c in range(9)
            for d in range(c)
            if len({a, b, c, d}) == 4
        ]
    )
    a, b, z = tests[:, 0], tests[:, 1], tests[:, 2:]
    best = {"ours": np.inf, "loop": np.inf}
    with jax.enable_x64(True):
        ci = PCTIndependence(unit, psi)
        ours = ci.statistics(a, b, z)[0]
        for _ in range(5):
            start = time.perf_counter()
            ci.statistics(a, b, z)
            best["ours"] = min(best["ours"], time.perf_counter() - start)
            start = time.perf_counter()
            loop = [_loop_test(unit, psi, *t[:2], t[2:]) for t in tests]
            best["loop"] = min(best["loop"], time.perf_counter() - start)
    np.testing.assert_allclose(ours, loop, rtol=1e-6)
    yield Result(
        "causal_tests",
        seconds=best["ours"],
        rate=len(tests) / best["ours"],
        unit="tests/s",
        ratio=best["loop"] / best["ours"],
        meaning="time of a NumPy loop over tests / ours",
        rival="NumPy, one test at a time",
        target=">= 10",
        detail={"tests": len(tests), "rows": 1000, "basis": 10, "loop_seconds": best["loop"]},
    )


def causal_fit50() -> Iterator[Result]:
    """50 nodes, 3 parameters, m = 5000, N_p = 3, q = .5: everything, compilation included."""
    data = random_plant(jax.random.key(0), 5000, 50)
    X, xi = np.asarray(data.X), np.asarray(data.xi)
    start = time.perf_counter()
    graph = PCTCD(PCTCDConfig(degree=3, q=0.5)).fit(X, xi)
    seconds = time.perf_counter() - start
    yield Result(
        "causal_fit50",
        seconds=seconds,
        ratio=seconds / 180,
        meaning="seconds / 180 s",
        target="<= 1",
        detail={"tests": graph.tests, "edges": int(graph.adjacency.sum())},
    )


def causal_bootstrap() -> Iterator[Result]:
    """B = 200 with the DAG fixed on reactor9, m = 1000, compilation included."""
    data = reactor9(jax.random.key(0), 1000)
    graph = PCTCD(_REACTOR).fit(data.X, data.xi)
    start = time.perf_counter()
    graph.bootstrap(200)
    seconds = time.perf_counter() - start
    yield Result(
        "causal_bootstrap",
        seconds=seconds,
        ratio=seconds / 20,
        meaning="seconds / 20 s",
        target="<= 1",
        detail={"samples": 200},
    )
