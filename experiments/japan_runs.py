"""One run of the JAPAN experiment: one density, all methods on it, and what they cover."""

from __future__ import annotations

import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import japan_data as data
from jaxlib_papers.nn.flows.training import FitConfig, fit_flow
from jaxlib_papers.uncertainty import japan

__all__ = ["compare", "compare_trajectories", "log_ratio"]

SCORES = {"JAPAN": "conditional", "JAPAN hpd": "hpd", "JAPAN tau(x)": "tau_adaptive"}
SCORES |= {"CONTRA": "latent"}


def log_ratio(a: np.ndarray, b: np.ndarray) -> float:
    """Ratio of mean volumes, without leaving logarithms before the last step."""
    means = [np.logaddexp.reduce(v) - np.log(len(v)) for v in (np.asarray(a), np.asarray(b))]
    return float(np.exp(means[0] - means[1]))


def _summary(covered, log_volume, x_test, seconds: float) -> dict[str, Any]:
    covered, log_volume = np.asarray(covered), np.asarray(log_volume, np.float64)
    mean = np.logaddexp.reduce(log_volume) - np.log(len(log_volume))
    return {
        "coverage": float(covered.mean()),
        "area": float(np.exp(mean)),
        "median_area": float(np.exp(np.median(log_volume))),
        "seconds": seconds,
        "worst_slab": japan.worst_slab_coverage(x_test, covered, M=200),
    }


@functools.partial(jax.jit, static_argnames=("draws",))
def _samples(flow, x, key, draws):
    return flow.sample_and_log_prob(key, x, draws)


@functools.partial(jax.jit, static_argnames=("eps",))
def _from_samples(parts, key, eps: float) -> dict[str, japan.Regions]:
    """Every method that needs the density's samples or residuals only."""
    (x_train, x_cal, x_test), (y_train, y_cal, y_test), draws, own = parts
    means = [jnp.mean(y, axis=0) for y, _ in draws]
    r_train, r_cal, r_test = (y - m for y, m in zip((y_train, y_cal, y_test), means, strict=True))
    centres = [y[:40] for y, _ in draws[1:]]
    weights = [p[:40] for _, p in draws[1:]]
    fresh = [y[40:140] for y, _ in draws[1:]]
    band = [tuple(jnp.quantile(y, q, axis=0) for q in (eps / 2, 1 - eps / 2)) for y, _ in draws[1:]]
    balls = dict(y_cal=y_cal, samples_cal=centres[0], y_test=y_test, samples_test=centres[1])
    balls |= dict(eps=eps, key=key)
    levels = [
        1 - japan.hpd_score(log_prob, p[:100])
        for log_prob, (_, p) in zip(own, draws[1:], strict=True)
    ]
    return {
        "l2": japan.residual_regions(r_cal, r_test, eps),
        "box": japan.residual_regions(r_cal, r_test, eps, "linf"),
        "RCP": japan.rcp_regions(r_train, r_cal, r_test, eps),
        "NLE": japan.nle_regions(x_train, r_train, x_cal, r_cal, x_test, r_test, eps),
        "CQR": japan.cqr_regions(y_cal, band[0], y_test, band[1], eps, joint=False),
        "MCQR": japan.cqr_regions(y_cal, band[0], y_test, band[1], eps),
        "PCP": japan.pcp_regions(**balls),
        "HD-PCP": japan.pcp_regions(**balls, kind="hd_pcp", log_prob=tuple(weights)),
        "CP2-PCP": japan.pcp_regions(**balls, kind="cp2_pcp", fresh=tuple(fresh)),
        "C-PCP": japan.pcp_regions(**balls, kind="c_pcp", fresh=tuple(fresh)),
        "HDR": japan.hdr_regions(*levels, draws[2][1], eps),
    }


def compare(
    x: np.ndarray,
    y: np.ndarray,
    seed: int,
    *,
    layers: int,
    hidden: int,
    fit: FitConfig,
    eps: float,
    draws: int = 1000,
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """All methods on one split, sharing one affine RealNVP.

    Returns:
        (figures by method, what the pictures and the conditional coverage need).
    """
    split = data.split_rows(x, y, seed)
    (x_train, x_cal, x_test), (y_train, y_cal, y_test) = split
    start = time.perf_counter()
    flow = japan.ConditionalRealNVP(
        y.shape[1], x.shape[1], layers=layers, hidden=hidden, key=jax.random.key(seed)
    )
    flow, _ = fit_flow(flow, y_train, x_train, fit, key=jax.random.key(seed + 1000))
    jax.block_until_ready(jax.tree.leaves(flow))
    fitting = time.perf_counter() - start
    results, kept = {}, {"fit_seconds": fitting}
    for name, score in SCORES.items():
        begin = time.perf_counter()
        model = japan.JapanRegressor(
            flow, score, eps, prefit=True, fit_config=fit, num_samples=draws, random_state=seed
        )
        model.fit(x_train, y_train).calibrate(x_cal, y_cal)
        covered = np.asarray(model.contains(x_test, y_test))
        volume = model.log_volume(x_test)
        seconds = time.perf_counter() - begin
        results[name] = _summary(covered, volume, x_test, seconds)
        kept[name] = {"covered": covered, "model": model}
    begin = time.perf_counter()
    key = jax.random.key(seed + 2000)
    drawn = [
        _samples(flow, part, jax.random.fold_in(key, i), draws=200)
        for i, part in enumerate(split.x)
    ]
    own = [flow.log_prob(y_cal, x_cal), flow.log_prob(y_test, x_test)]
    regions = _from_samples((split.x, split.y, drawn, own), key, eps)
    jax.block_until_ready(regions)
    seconds = (time.perf_counter() - begin) / len(regions)
    for name, region in regions.items():
        results[name] = _summary(region.covered, region.log_volume, x_test, seconds)
    return results, kept | {"x_test": x_test, "y_test": y_test, "split": split}


def compare_trajectories(
    seed: int, *, rows: int, width: int, blocks: int, fit: FitConfig, eps: float
) -> dict[str, dict[str, Any]]:
    """JAPAN and the trajectory methods on branching walks, one trajectory flow for all."""
    histories, futures = data.branching_walks(seed, rows)
    cuts = [rows // 2, rows // 2 + rows // 4]
    (x_train, x_cal, x_test), (y_train, y_cal, y_test) = (
        [part.astype(np.float32) for part in np.split(a, cuts)] for a in (histories, futures)
    )
    flow = japan.TrajectoryFlow(
        *y_train.shape[1:],
        steps=x_train.shape[1],
        features=1,
        blocks=blocks,
        width=width,
        heads=2,
        attention_layers=1,
        key=jax.random.key(seed),
    )
    start = time.perf_counter()
    model = japan.JapanRegressor(flow, eps=eps, fit_config=fit, random_state=seed, num_samples=500)
    model.fit(x_train, y_train).calibrate(x_cal, y_cal)
    covered = model.contains(x_test, y_test)
    volume = model.log_volume(x_test)
    jax.block_until_ready(volume)
    history = x_test.reshape(len(x_test), -1)
    results = {"JAPAN": _summary(covered, volume, history, time.perf_counter() - start)}
    # The same density's mean is the forecast whose residuals the others use.
    start = time.perf_counter()
    means = [
        jnp.mean(_samples(model.flow_, x, jax.random.key(seed + i), draws=50)[0], axis=0)
        for i, x in enumerate((x_cal, x_test))
    ]
    r_cal, r_test = y_cal - means[0], y_test - means[1]
    flat = [r.reshape(len(r), -1) for r in (r_cal, r_test)]
    regions = {
        "CFRNN": japan.cfrnn_regions(r_cal, r_test, eps),
        "CopulaCPTS": japan.copula_cpts_regions(r_cal, r_test, eps),
        "JANET": japan.janet_regions(*flat, eps),
    }
    jax.block_until_ready(regions)
    seconds = (time.perf_counter() - start) / len(regions)
    for name, region in regions.items():
        results[name] = _summary(region.covered, region.log_volume, history, seconds)
    return results
