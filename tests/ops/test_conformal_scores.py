"""Scores and volumes against golden vectors, closed forms and by hand."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chi2

from jaxlib_papers.ops import conformal_scores as scores
from jaxlib_papers.ops import regions
from jaxlib_papers.ops.conformal import conformal_threshold

VECTORS = np.load(Path(__file__).parents[1] / "vectors" / "japan.npz")


def golden(group: str, k: int) -> dict[str, np.ndarray]:
    prefix = f"{group}/{k}/"
    return {n[len(prefix) :]: VECTORS[n] for n in VECTORS.files if n.startswith(prefix)}


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


class TestGolden:
    @pytest.mark.parametrize("k", range(2))
    def test_hpd(self, k, x64):
        case = golden("ecdf", k)
        ours = scores.hpd_score(case["points"], case["samples"])
        # The reference forms its share in float32.
        np.testing.assert_allclose(ours, case["cdf"], atol=1e-7)
        np.testing.assert_allclose(1 - ours, case["hpd_score"], atol=1e-7)

    @pytest.mark.parametrize("k", range(2))
    def test_pcp(self, k, x64):
        case = golden("pcp", k)
        y, samples, fresh = case["y"], case["ref_samples"], case["mc_samples"]
        alpha = float(case["alpha"])
        np.testing.assert_allclose(scores.pcp_score(y, samples), case["pcp"], atol=1e-10)
        cp2 = scores.cp2_pcp_score(y, samples, fresh, alpha)
        np.testing.assert_allclose(cp2, case["cp2_pcp"], atol=1e-10)
        c_pcp = scores.c_pcp_score(y, samples, fresh)
        np.testing.assert_allclose(c_pcp, case["c_pcp"], atol=1e-7)

    @pytest.mark.parametrize("k", range(2))
    def test_volume(self, k, x64):
        case = golden("volume", k)
        ours = np.asarray(regions.log_volume_importance(case["log_prob"], case["inside"]))
        assert ours[0] == -np.inf and np.isneginf(case["log_volume"][0])
        np.testing.assert_allclose(ours[1:], case["log_volume"][1:], atol=1e-10)


class TestScores:
    def test_hpd_counts_ties(self):
        got = scores.hpd_score(jnp.array([0.0, 1.0]), jnp.array([[0.0, 2.0], [-1.0, 1.5]]))
        assert list(got) == [1.0, 0.0]

    def test_radius_and_its_gradient_at_the_origin(self):
        z = jnp.array([[3.0, 4.0], [0.0, 0.0]])
        assert list(scores.latent_radius_score(z)) == [5.0, 0.0]
        grad = jax.grad(lambda v: jnp.sum(scores.latent_radius_score(v)))(z)
        assert np.isfinite(grad).all()

    @pytest.mark.parametrize("many", [3, 64, 65, 200])
    def test_nearest_of_many(self, many):
        rng = np.random.default_rng(0)
        samples, y = rng.standard_normal((many, 5, 3)), rng.standard_normal((5, 3))
        wanted = np.linalg.norm(samples - y, axis=-1).min(0)
        np.testing.assert_allclose(scores.pcp_score(y, samples), wanted, rtol=1e-5)

    def test_samples_that_are_the_centres(self):
        y, same = jnp.zeros((2, 2)), jnp.zeros((3, 2, 2))
        got = scores.cp2_pcp_score(y + jnp.array([[0.0], [1.0]]), same, same, 0.1)
        assert list(got) == [1.0, np.inf]

    def test_hd_pcp_keeps_the_most_likely(self):
        samples = jnp.arange(10.0)[:, None, None] * jnp.ones((1, 2, 1))
        log_prob = jnp.stack([jnp.arange(10.0), -jnp.arange(10.0)], axis=1)
        kept = scores.hd_pcp_samples(samples, log_prob, 0.1)
        assert kept.shape == (9, 2, 1)
        assert set(kept[:, 0, 0].tolist()) == set(range(1, 10))
        assert set(kept[:, 1, 0].tolist()) == set(range(9))

    def test_mahalanobis_against_solve(self):
        rng = np.random.default_rng(0)
        root, r = rng.standard_normal((3, 3)), rng.standard_normal((7, 3))
        cov = root @ root.T + np.eye(3)
        wanted = np.einsum("bi,ij,bj->b", r, np.linalg.inv(cov), r)
        np.testing.assert_allclose(scores.mahalanobis_score(r, cov), wanted, rtol=1e-4)
        each = np.broadcast_to(cov, (7, 3, 3))
        np.testing.assert_allclose(scores.mahalanobis_score(r, each), wanted, rtol=1e-4)

    def test_cqr_by_hand(self):
        y, low, high = jnp.array([[0.0, 5.0], [1.0, 1.0]]), jnp.zeros((2, 2)), jnp.full((2, 2), 3.0)
        assert list(scores.cqr_score(y, low, high)) == [2.0, -1.0]

    def test_normalised_residual_by_hand(self):
        r = jnp.array([[1.0, -4.0], [3.0, 0.0]])
        got = scores.max_normalised_residual_score(r, jnp.array([1.0, 2.0]))
        assert list(got) == [2.0, 3.0]
        assert list(scores.linf_score(r)) == [4.0, 3.0]

    @pytest.mark.parametrize(
        ("call", "match"),
        [
            (lambda: scores.hpd_score(jnp.zeros(3), jnp.zeros((0, 3))), "M >= 1"),
            (lambda: scores.hpd_score(jnp.zeros(3), jnp.zeros((4, 2))), "log_prob_samples"),
            (
                lambda: scores.pcp_score(jnp.zeros((3, 2)), jnp.zeros((4, 3, 1))),
                "samples has shape",
            ),
            (lambda: scores.pcp_score(jnp.zeros((3, 2)), jnp.zeros((0, 3, 2))), "at least one"),
            (lambda: scores.pcp_score(jnp.zeros(3), jnp.zeros((4, 3, 2))), "y has shape"),
            (
                lambda: scores.mahalanobis_score(jnp.zeros((3, 2)), jnp.eye(3)),
                "covariance has shape",
            ),
            (lambda: scores.mahalanobis_score(jnp.zeros(2), jnp.ones((2, 2))), "positive definite"),
            (lambda: scores.cqr_score(jnp.zeros(2), jnp.zeros(3), jnp.zeros(2)), "lower"),
            (
                lambda: scores.max_normalised_residual_score(jnp.zeros(2), jnp.zeros(2)),
                "sigma holds",
            ),
            (lambda: scores.latent_radius_score(jnp.float32(1)), "z has shape"),
        ],
    )
    def test_bad_input(self, call, match):
        with pytest.raises(ValueError, match=match):
            call()


class TestVolumes:
    @pytest.mark.parametrize("scale", [0.5, 1.0, 3.0])
    def test_gaussian_ellipse(self, scale):
        """Volume of the 90 % region of N(0, s^2 I_2) is pi chi2 s^2."""
        y = scale * jax.random.normal(jax.random.key(0), (20_000, 2))
        log_prob = -0.5 * jnp.sum((y / scale) ** 2, 1) - jnp.log(2 * jnp.pi * scale**2)
        tau = -0.5 * chi2.ppf(0.9, 2) - np.log(2 * np.pi * scale**2)
        inside = log_prob >= tau
        volume = float(jnp.exp(regions.log_volume_importance(log_prob, inside)))
        wanted = 14.467568 * scale**2
        error = np.sqrt((np.exp(-tau) * wanted - wanted**2) / len(y))
        assert abs(volume - wanted) < 3 * error
        half = 3.5 * scale
        grid = jax.random.uniform(jax.random.key(1), (50_000, 2), minval=-half, maxval=half)
        hit = jnp.sum((grid / scale) ** 2, 1) <= chi2.ppf(0.9, 2)
        box = float(regions.volume_box(hit[:, None], jnp.full(2, -half), jnp.full(2, half))[0])
        assert box == pytest.approx(wanted, rel=0.02)

    def test_no_overflow_in_many_dimensions(self):
        log_prob = jnp.full((8, 1), -400.0)
        inside = jnp.ones((8, 1), bool)
        assert float(regions.log_volume_importance(log_prob, inside)[0]) == pytest.approx(400)

    def test_samples_on_another_axis(self):
        log_prob = jax.random.normal(jax.random.key(0), (5, 9))
        inside = log_prob > 0
        a = regions.log_volume_importance(log_prob, inside)
        b = regions.log_volume_importance(log_prob.T, inside.T, axis=1)
        np.testing.assert_allclose(a, b, rtol=1e-6)

    def test_balls(self):
        centres = jnp.array([[[0.0, 0.0]], [[10.0, 0.0]], [[0.0, 0.0]]])
        got = regions.log_volume_of_balls(jax.random.key(0), centres, jnp.ones(1), 2000)
        assert float(jnp.exp(got[0])) == pytest.approx(2 * np.pi, rel=0.03)
        extremes = jnp.broadcast_to(centres, (3, 2, 2))
        got = regions.log_volume_of_balls(jax.random.key(0), extremes, jnp.array([0.0, jnp.inf]))
        assert list(got) == [-np.inf, np.inf]
        assert float(jnp.exp(regions.log_ball_volume(3, 0.0))) == pytest.approx(4 * np.pi / 3)

    @pytest.mark.parametrize(
        ("call", "match"),
        [
            (
                lambda: regions.log_volume_importance(jnp.zeros((3, 2)), jnp.ones((2, 3), bool)),
                "inside has shape",
            ),
            (lambda: regions.log_volume_importance(jnp.zeros(3), jnp.ones(3)), "inside has dtype"),
            (
                lambda: regions.volume_box(jnp.ones((3, 1), bool), jnp.ones(2), jnp.ones(2)),
                "high is not above low",
            ),
            (lambda: regions.coverage(jnp.zeros(0, bool)), "covered has shape"),
            (lambda: regions.coverage(jnp.ones(3, bool), jnp.zeros(3, bool)), "mask selects"),
            (lambda: regions.connected_components_2d(np.ones((2, 2))), "mask has dtype"),
            (
                lambda: regions.worst_slab_coverage(np.ones((9, 1)), np.ones(9, bool), delta=0),
                "delta",
            ),
            (
                lambda: regions.worst_slab_coverage(np.full((9, 1), np.nan), np.ones(9, bool)),
                "x holds NaN",
            ),
        ],
    )
    def test_bad_input(self, call, match):
        with pytest.raises(ValueError, match=match):
            call()


class TestMetrics:
    def test_coverage(self):
        covered = jnp.array([True, False, True, True])
        assert float(regions.coverage(covered)) == 0.75
        assert float(regions.coverage(covered, jnp.array([True, True, False, False]))) == 0.5

    def test_worst_slab_against_all_slabs(self):
        rng = np.random.default_rng(0)
        x, covered = rng.standard_normal((60, 1)), rng.random(60) < 0.8
        ordered = covered[np.argsort(x[:, 0])]
        wanted = min(ordered[a:b].mean() for a in range(60) for b in range(a + 12, 61))
        assert regions.worst_slab_coverage(x, covered) == pytest.approx(wanted)
        assert regions.worst_slab_coverage(x, covered, delta=1.0) == pytest.approx(covered.mean())

    def test_worst_slab_finds_the_bad_direction(self):
        rng = np.random.default_rng(1)
        x = rng.standard_normal((2000, 3))
        covered = rng.random(2000) < np.where(x[:, 1] > 0.8, 0.5, 0.95)
        assert 0.4 < regions.worst_slab_coverage(x, covered, M=300) < 0.62
        held = regions.worst_slab_coverage(x, covered, M=300, holdout=True)
        assert 0.4 < held < 0.75
        assert regions.worst_slab_coverage(x, np.ones(2000, bool), M=20) == 1.0

    def test_components(self):
        mask = np.array([[1, 0, 1], [0, 1, 1], [1, 0, 0]], bool)
        assert regions.connected_components_2d(mask) == 3  # corners do not touch
        labels, count = regions.label_components_2d(mask)
        assert count == 3 and labels.max() == 3 and (labels > 0).sum() == mask.sum()
        assert regions.connected_components_2d(np.zeros((4, 4), bool)) == 0

    def test_two_modes_on_a_line(self):
        key = jax.random.key(0)
        side = jnp.where(jax.random.bernoulli(key, 0.5, (5000,)), 3.0, -3.0)
        y = side + 0.5 * jax.random.normal(jax.random.key(1), (5000,))

        def log_prob(y):
            parts = jnp.stack([-2 * (y - 3) ** 2, -2 * (y + 3) ** 2])
            return jax.nn.logsumexp(parts, axis=0) - jnp.log(2 * 0.5 * jnp.sqrt(2 * jnp.pi))

        tau = conformal_threshold(log_prob(y), 0.1)
        mask = np.asarray(log_prob(jnp.linspace(-6, 6, 601)) >= tau)[None]
        assert regions.connected_components_2d(mask) == 2
