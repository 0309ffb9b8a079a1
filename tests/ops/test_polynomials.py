"""Bases: golden values, orthonormality by quadrature, index sets, Sobol indices, domains."""

from __future__ import annotations

import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlib_papers.ops import polynomials as poly

VECTORS = np.load(Path(__file__).parents[1] / "vectors" / "pce_causal.npz")
EXPONENTS = {"jacobi": [(1.0, 2.0), (-0.5, -0.5), (0.0, 0.0), (3.0, -0.9)]}
FAMILIES = [
    (family, a, b)
    for family in ("hermite", "jacobi", "laguerre", "legendre")
    for a, b in EXPONENTS.get(family, [(0.0, 0.0)])
]


@pytest.mark.parametrize("k", range(5))
def test_golden_values_of_one_variable(k):
    family, a, b, x, psi = (VECTORS[f"uni/{k}/{n}"] for n in ("family", "a", "b", "x", "psi"))
    degree = psi.shape[1] - 1
    with jax.enable_x64(True):
        ours = poly.evaluate_family(str(family), x, degree, float(a), float(b))
        assert ours.dtype == jnp.float64
        np.testing.assert_allclose(ours, psi, rtol=1e-9, atol=1e-12)
    single = poly.evaluate_family(str(family), x.astype(np.float32), degree, float(a), float(b))
    assert single.dtype == jnp.float32
    np.testing.assert_allclose(single, psi, rtol=2e-4, atol=2e-4 * np.abs(psi).max())


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (lambda: poly.legendre(0.5, 4), (1, 0.8660254, -0.2795085, -1.1575162, -0.8671875)),
        (lambda: poly.hermite(1.0, 4), (1, 1, 0, -0.8164966, -0.4082483)),
        (lambda: poly.laguerre(2.0, 4), (1, -1, -1, -1 / 3, 1 / 3)),
        (lambda: poly.jacobi(0.5, 4, 1, 2), (1, 0.75, -0.1976424, -0.9084026, -0.6932906)),
        (lambda: poly.jacobi(0.5, 4, 0, 0), (1, 0.8660254, -0.2795085, -1.1575162, -0.8671875)),
    ],
)
def test_values_of_the_paper_sheet(values, expected):
    np.testing.assert_allclose(values(), expected, atol=5e-7)


@pytest.mark.parametrize(("family", "a", "b"), FAMILIES)
def test_orthonormal_by_twenty_point_quadrature(family, a, b):
    nodes, weights = poly.gauss_quadrature(family, 20, a, b)
    assert weights.sum() == pytest.approx(1, abs=1e-13) and (weights > 0).all()
    with jax.enable_x64(True):
        psi = np.asarray(poly.evaluate_family(family, nodes, 5, a, b))
    assert np.abs(psi.T @ (weights[:, None] * psi) - np.eye(6)).max() < 1e-12


@pytest.mark.parametrize(
    ("family", "power", "moment"), [("legendre", 4, 1 / 5), ("hermite", 6, 15), ("laguerre", 3, 6)]
)
def test_quadrature_gives_known_moments(family, power, moment):
    nodes, weights = poly.gauss_quadrature(family, 5)
    assert weights @ nodes**power == pytest.approx(moment, rel=1e-12)


def test_jacobi_quadrature_agrees_with_the_density():
    from scipy.integrate import quad

    nodes, weights = poly.gauss_quadrature("jacobi", 6, 1.5, 0.5)
    density = [lambda x, k=k: (1 - x) ** 1.5 * (1 + x) ** 0.5 * x**k for k in (0, 3)]
    total, third = (quad(f, -1, 1)[0] for f in density)
    assert weights @ nodes**3 == pytest.approx(third / total, rel=1e-7)


@pytest.mark.parametrize("k", range(5))
def test_golden_index_sets_and_bases(k):
    dim, degree, q = VECTORS[f"multi_index/{k}/args"]
    index = poly.multi_index(int(dim), int(degree), float(q))
    np.testing.assert_array_equal(index, VECTORS[f"multi_index/{k}/index"])
    with jax.enable_x64(True):
        psi = poly.pce_basis(VECTORS[f"multi_index/{k}/xi"], index, "legendre")
        np.testing.assert_allclose(psi, VECTORS[f"multi_index/{k}/psi_legendre"], atol=1e-12)


@pytest.mark.parametrize(
    ("args", "size"),
    [
        ((1, 4, 1.0), 5),
        ((2, 3, 1.0), 10),
        ((3, 4, 1.0), 35),
        ((3, 2, 1.0), 10),
        ((3, 4, 0.5), 16),
        ((3, 4, 0.75), 22),
        ((2, 5, 0.75), 16),
        ((4, 0, 1.0), 1),
    ],
)
def test_sizes_of_index_sets(args, size):
    index = poly.multi_index(*args)
    assert len(index) == size == len({tuple(row) for row in index})
    assert not index[0].any() and (np.diff(index.sum(axis=1)) >= 0).all()
    if args[2] == 1.0:
        assert size == math.comb(args[1] + args[0], args[0])


def test_sobol_indices_of_the_paper_sheet():
    index = poly.multi_index(3, 1)
    theta = np.array([0.9, 0.4, 0.0, 0.2], np.float32)
    mean, variance = poly.pce_mean_variance(theta)
    assert float(mean) == pytest.approx(0.9) and float(variance) == pytest.approx(0.2)
    first, total = poly.sobol_indices(theta, index)
    np.testing.assert_allclose(first, (0.8, 0, 0.2), rtol=1e-6)
    np.testing.assert_allclose(total, first)


def test_sobol_total_counts_interactions_and_constants_have_none():
    index = poly.multi_index(2, 2)  # 1, x, y, xx, xy, yy
    theta = np.array([[5, 1, 2, 0, 2, 0], [3, 0, 0, 0, 0, 0]], np.float32)
    first, total = poly.sobol_indices(theta, index)
    np.testing.assert_allclose(first, [[1 / 9, 4 / 9], [0, 0]], rtol=1e-6)
    np.testing.assert_allclose(total, [[5 / 9, 8 / 9], [0, 0]], rtol=1e-6)
    grad = jax.grad(lambda t: jnp.sum(poly.sobol_indices(t, index)[0]))(jnp.zeros(6))
    assert bool(jnp.isfinite(grad).all())


@pytest.mark.parametrize(
    ("family", "sample"),
    [
        ("uniform", lambda r: r.uniform(20, 80, 4000)),
        ("normal", lambda r: r.normal(300, 12, 4000)),
        ("exponential", lambda r: 5 + r.exponential(2, 4000)),
        ("empirical", lambda r: r.beta(0.4, 3, 4000)),
        ("uniform(20, 80)", lambda r: r.uniform(20, 80, 4000)),
        ("normal(300, 12)", lambda r: r.normal(300, 12, 4000)),
        ("jacobi(1, 1)", lambda r: 2 * r.beta(2, 2, 4000) - 1),
    ],
)
def test_distributions_are_mapped_to_their_polynomials(family, sample):
    xi = sample(np.random.default_rng(0))[:, None]
    with jax.enable_x64(True):
        psi = np.asarray(poly.pce_basis(xi, poly.multi_index(1, 3), [family]))
    gram = psi.T @ psi / len(psi)
    # The empirical basis is orthonormal on the very sample, the others up to sampling error.
    assert np.abs(gram - np.eye(4))[:3, :3].max() < (1e-10 if family == "empirical" else 0.35)


def test_fitted_families_evaluate_new_points_and_work_under_jit():
    r = np.random.default_rng(1)
    xi = np.stack([r.uniform(0, 9, 300), r.gamma(2, 1, 300)], axis=1).astype(np.float32)
    index = poly.multi_index(2, 3)
    fitted = poly.fit_families(xi, ["uniform", "empirical"], 3)
    whole = poly.pce_basis(xi, index, fitted)
    part = jax.jit(lambda x: poly.pce_basis(x, index, fitted))(jnp.asarray(xi[40:50]))
    np.testing.assert_allclose(part, whole[40:50], atol=1e-5)
    with pytest.raises(ValueError, match=r"xi\[1, 0\].*domain"):
        poly.pce_basis(np.array([[1.0, 1.0], [20.0, 1.0]]), index, fitted)
    with pytest.raises(ValueError, match="traced"):
        jax.jit(lambda x: poly.pce_basis(x, index, "empirical"))(xi)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: poly.legendre(0.1, -1), "degree"),
        (lambda: poly.jacobi(0.1, 2, -1.0, 0.0), "a is"),
        (lambda: poly.jacobi(0.1, 2, 0.0, -1.5), "b is"),
        (lambda: poly.multi_index(0, 2), "dim"),
        (lambda: poly.multi_index(2, 2, 0.0), "q is"),
        (lambda: poly.multi_index(2, 2, 1.5), "q is"),
        (lambda: poly.pce_basis([[1.1]], poly.multi_index(1, 1), "legendre"), r"xi\[0, 0\].*1.1"),
        (lambda: poly.pce_basis([[-1.1]], poly.multi_index(1, 1), "jacobi(1,1)"), "domain"),
        (lambda: poly.pce_basis([[-0.1]], poly.multi_index(1, 1), "laguerre"), "domain"),
        (lambda: poly.pce_basis([[np.nan]], poly.multi_index(1, 1), "hermite"), "nan"),
        (lambda: poly.pce_basis([[0.1]], poly.multi_index(2, 1), "legendre"), "index"),
        (lambda: poly.pce_basis([[0.1, 0.2]], poly.multi_index(2, 1), ["legendre"]), "families"),
        (lambda: poly.pce_basis([[0.1]], poly.multi_index(1, 1), "gauss"), "unknown"),
        (lambda: poly.pce_basis([[0.1]], poly.multi_index(1, 1), "uniform(3, 1)"), "low < high"),
        (lambda: poly.pce_basis([[2.0]] * 5, poly.multi_index(1, 1), "uniform"), "constant"),
        (lambda: poly.pce_basis([[0.0], [1.0]] * 5, poly.multi_index(1, 2), "empirical"), "dist"),
        (lambda: poly.sobol_indices(np.ones(3), poly.multi_index(1, 3)), "theta"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_domain_has_a_tolerance_of_rounding():
    psi = poly.pce_basis([[1 + 5e-7]], poly.multi_index(1, 2), "legendre")
    assert np.isfinite(psi).all()


def test_basis_is_differentiable_and_takes_no_rows():
    index = poly.multi_index(2, 4)
    grad = jax.grad(lambda x: jnp.sum(poly.pce_basis(x, index, "hermite")))(jnp.zeros((3, 2)))
    assert bool(jnp.isfinite(grad).all())
    assert poly.pce_basis(np.zeros((0, 2), np.float32), index, "hermite").shape == (0, 15)
