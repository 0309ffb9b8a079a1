"""The surrogate: Ishigami's closed form, exact recovery, ridge, bad input."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxlib_papers.ops.pce_surrogate import fit_pce


def ishigami(xi, a=7.0, b=0.1):
    return np.sin(xi[:, 0]) + a * np.sin(xi[:, 1]) ** 2 + b * xi[:, 2] ** 4 * np.sin(xi[:, 0])


def test_ishigami_moments_and_sobol_indices():
    xi = np.random.default_rng(0).uniform(-np.pi, np.pi, (1500, 3))
    with jax.enable_x64(True):
        bounds = f"uniform({-np.pi}, {np.pi})"
        fit = fit_pce(xi, ishigami(xi), degree=10, families=bounds)
        new = np.random.default_rng(1).uniform(-np.pi, np.pi, (200, 3))
        predicted = np.asarray(fit(new))
    pi4, pi8 = np.pi**4, np.pi**8
    variance = 49 / 8 + 0.1 * pi4 / 5 + 0.01 * pi8 / 18 + 0.5
    first = np.array([0.5 * (1 + 0.1 * pi4 / 5) ** 2, 49 / 8, 0]) / variance
    shared = 8 * 0.01 * pi8 / 225 / variance
    assert fit.mean == pytest.approx(3.5, abs=0.01)
    assert fit.variance == pytest.approx(variance, rel=0.01)
    np.testing.assert_allclose(fit.sobol.first, first, atol=0.01)
    np.testing.assert_allclose(fit.sobol.total, first + np.array([shared, 0, shared]), atol=0.01)
    assert 0 < fit.loo_error < 1e-4
    assert np.abs(predicted - ishigami(new)).max() < 0.05


def test_a_polynomial_is_recovered_exactly_and_ridge_shrinks():
    r = np.random.default_rng(2)
    xi = np.stack([r.uniform(10, 20, 60), r.normal(0, 3, 60)], axis=1)
    y = 2 + 0.3 * (xi[:, 0] - 15) + 0.5 * xi[:, 1] * (xi[:, 0] - 15)
    families = ["uniform(10, 20)", "normal(0, 3)"]
    with jax.enable_x64(True):
        fit = fit_pce(xi, y, degree=2, families=families)
        shrunk = fit_pce(xi, y, degree=2, families=families, ridge=1.0)
    assert fit.mean == pytest.approx(2, abs=1e-9) and fit.loo_error < 1e-20
    assert fit.variance == pytest.approx(0.09 * 25 / 3 + 0.25 * 9 * 25 / 3)
    assert 0 < shrunk.variance < fit.variance and shrunk.loo_error > 0.01
    few = fit_pce(xi[:4].astype(np.float32), y[:4], degree=2, families=families, ridge=0.1)
    assert np.isfinite(few.coefficients).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y": np.ones(19)}, "xi has shape"),
        ({"y": np.full(20, np.nan)}, "not finite"),
        ({"degree": 5}, "bring more than 21 rows"),
        ({"ridge": -1.0}, "ridge"),
    ],
)
def test_bad_input_is_named(changes, message):
    xi = np.random.default_rng(0).uniform(size=(20, 2))
    kwargs = {"xi": xi, "y": xi[:, 0], "degree": 2} | changes
    with pytest.raises(ValueError, match=message):
        fit_pce(kwargs.pop("xi"), kwargs.pop("y"), **kwargs)


def test_constant_response_has_no_variance():
    xi = np.random.default_rng(0).uniform(size=(20, 1))
    fit = fit_pce(xi, np.full(20, 3.0), degree=2)
    assert fit.mean == pytest.approx(3) and fit.variance < 1e-9 and fit.loo_error == 0
