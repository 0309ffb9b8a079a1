"""Coefficients, scores and natural-gradient steps: golden values, convergence, the Jensen gap."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlib_papers.causal._features import Gram
from jaxlib_papers.causal.pce_causal import (
    LocalScore,
    fit_coefficients,
    interaction_features,
    natural_gradient_step,
    node_rss,
    pce_basis,
    pct_bic,
)
from tests.causal.data import VECTORS, legendre_basis

NODES = [(k, node) for k in (0, 1) for node in (3, 8)]


@pytest.mark.parametrize(("k", "node"), NODES)
def test_golden_vectors(k, node):
    X, xi, index = (VECTORS[f"ci/{k}/{n}"] for n in ("X", "xi", "index"))
    parents, theta0, eta1, half, ols, rss, bic = (
        VECTORS[f"ci/{k}/node{node}/{n}"]
        for n in ("parents", "theta0", "theta_eta1", "theta_eta05_x5", "ols", "rss", "bic")
    )
    close = lambda ours, theirs: np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-12)  # noqa: E731
    with jax.enable_x64(True):
        psi = pce_basis(xi, index, "legendre")
        F, x = interaction_features(X, psi, parents, False), X[:, node]
        close(natural_gradient_step(theta0, F, x, 1.0, 1e-3), eta1)
        close(fit_coefficients(F, x, theta0=theta0, eta=0.5, e_reg=1e-3, steps=5), half)
        close(fit_coefficients(F, x), ols)
        close(node_rss(F, x), rss)
        close(node_rss(F, x, ols), rss)
        close(pct_bic(node_rss(F, x), len(X), len(index), len(parents)), bic)
        # The batched way through one Gram matrix gives the same score.
        score = LocalScore(Gram(jnp.asarray(X), psi))
        close(score(node, parents), bic)
        close(score.batch([(node, tuple(parents)), (0, ())])[0], bic)


def regression(m=200, F=12, seed=0):
    r = np.random.default_rng(seed)
    features = r.normal(size=(m, F)) @ r.normal(size=(F, F))
    return features, features @ r.normal(size=F) + r.normal(size=m), r.normal(size=F)


def test_a_full_step_is_least_squares_and_half_steps_halve_the_error():
    features, x, theta0 = regression()
    ols = np.linalg.lstsq(features, x, rcond=None)[0]
    with jax.enable_x64(True):
        np.testing.assert_allclose(natural_gradient_step(theta0, features, x), ols, atol=1e-9)
        theta = fit_coefficients(features, x, theta0=theta0, eta=0.5, steps=5)
        np.testing.assert_allclose(theta - ols, (theta0 - ols) / 32, atol=1e-9)
        theta = fit_coefficients(features, x, theta0=theta0, eta=1.999, steps=2)
        np.testing.assert_allclose(theta - ols, (theta0 - ols) * 0.999**2, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("eta", (2.0, 0.0, -0.1, 2.5, math.nan))
def test_steps_that_do_not_converge_are_refused(eta):
    features, x, theta0 = regression()
    with pytest.raises(ValueError, match="eta"):
        natural_gradient_step(theta0, features, x, eta)


def test_single_precision_jit_and_gradient():
    features, x, theta0 = (v.astype(np.float32) for v in regression())
    step = jax.jit(natural_gradient_step)(theta0, features, x)
    assert step.dtype == jnp.float32
    gradient = jax.grad(lambda f: node_rss(f, x))(jnp.asarray(features))
    assert bool(jnp.isfinite(gradient).all())


def test_no_parents_and_too_few_rows():
    empty = np.zeros((5, 0), np.float32)
    x = np.arange(5, dtype=np.float32)
    assert float(node_rss(empty, x)) == 30 and fit_coefficients(empty, x).shape == (0,)
    with pytest.raises(ValueError, match="at least 6 rows"):
        fit_coefficients(np.ones((5, 5)), x)
    assert np.isfinite(pct_bic(np.float32(0), 10, 2, 1))
    for arguments in ((1.0, 0, 1, 1), (1.0, 5, 0, 1), (1.0, 5, 1, -1), (1.0, 5, 1, 1, -1.0)):
        with pytest.raises(ValueError):
            pct_bic(*arguments)


def test_duplicate_features_do_not_break_the_fit():
    features, x, _ = regression()
    with jax.enable_x64(True):
        twice = np.concatenate([features, features], axis=1)
        rss = float(node_rss(twice, x))
        assert rss == pytest.approx(float(node_rss(features, x)), rel=1e-6)


def test_constant_basis_is_ordinary_bic():
    features, x, _ = regression(F=3)
    with jax.enable_x64(True):
        data = np.concatenate([x[:, None], features], axis=1)
        score = LocalScore(Gram(data, np.ones((len(x), 1))))(0, (1, 2, 3))
    residual = x - features @ np.linalg.lstsq(features, x, rcond=None)[0]
    m = len(x)
    assert score == pytest.approx(m * np.log(residual @ residual / m) + 3 * np.log(m), rel=1e-9)


def test_jensen_gap_makes_gaussian_noise_orientable():
    """X1 -> X2 with strength sqrt(3) xi: the reverse model loses ln 2 + ln(pi / (3 sqrt 3))."""
    m, r = 100_000, np.random.default_rng(0)
    xi = r.uniform(-1, 1, (m, 1))
    x1, e = r.normal(size=(2, m))
    X = np.stack([x1, np.sqrt(3) * xi[:, 0] * x1 + e], axis=1)
    with jax.enable_x64(True):
        gram = Gram(X, legendre_basis(xi, 10))
        rss = gram.rss([(0, ()), (1, (0,)), (1, ()), (0, (1,))])
    forward, backward = np.log(rss / m).reshape(2, 2).sum(axis=1)
    expected = math.log(2) + math.log(math.pi / (3 * math.sqrt(3)))
    assert expected == pytest.approx(0.189959, abs=1e-6)
    assert backward - forward == pytest.approx(expected, abs=0.01)
