"""Regions cover at their exact rate, are as small as theory says, and refuse what they must."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy.stats import chi2, norm

from jaxlib_papers.uncertainty import _scores, japan
from jaxlib_papers.uncertainty.japan import FitConfig, JapanRegressor

KEY = jax.random.key(0)
FAST = FitConfig(steps=30, batch_size=32)
REPEATS = 2000


class Gaussian:
    """N(x, s^2 I) as any other library might offer it: NumPy, no flow."""

    def __init__(self, scale: float = 1.0, dim: int = 2):
        self.scale, self.dim = scale, dim

    def log_prob(self, y, x):
        y, x = np.asarray(y), np.asarray(x)
        square = ((y - x[:, :1]) / self.scale) ** 2
        return -0.5 * square.sum(1) - self.dim * np.log(self.scale * np.sqrt(2 * np.pi))

    def sample(self, key, x, n):
        noise = np.asarray(jax.random.normal(key, (n, len(x), self.dim)))
        return np.asarray(x)[None, :, :1] + self.scale * noise


def rows(count: int, seed: int = 0, scale: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((count, 2)).astype(np.float32)
    y = x[:, :1] + scale * rng.standard_normal((count, 2))
    return x, y.astype(np.float32)


def small_flow(dim: int = 2, context: int = 2, layers: int = 2) -> japan.ConditionalRealNVP:
    """Random couplings: coverage must not depend on a good density."""
    return japan.ConditionalRealNVP(
        dim, context, layers=layers, hidden=4, zero_last=False, key=jax.random.key(3)
    )


@pytest.fixture(scope="module")
def ready() -> JapanRegressor:
    x, y = rows(600)
    model = JapanRegressor(small_flow(), fit_config=FAST, num_samples=200)
    return model.fit(x[:300], y[:300]).calibrate(x[300:], y[300:])


class TestCoverage:
    """Monte-Carlo coverage of 2,000 repetitions against what exchangeability makes exact.

    With n calibration points, rank k and no ties, the coverage of one repetition is
    Beta(k, n + 1 - k); with m test points the count of hits is beta-binomial, and the mean over R
    repetitions is normal to within what matters at R = 2,000.
    """

    @staticmethod
    def check(hits: jax.Array, n: int, eps: float, ties: bool = False) -> None:
        repeats, m = hits.shape
        k = min(japan.conformal_rank(n, eps), n + 1)
        mean = k / (n + 1)
        variance = mean * (1 - mean) / (n + 2) * (n + 1 + m) / m  # beta-binomial, over m
        band = norm.ppf(0.9995) * np.sqrt(variance / repeats) + 1e-9
        got = float(np.asarray(hits, np.float64).mean())
        assert got > mean - band
        assert ties or got < mean + band

    @staticmethod
    def repetitions(
        score, sizes: tuple[int, ...], m: int = 20, eps: float = 0.1
    ) -> list[jax.Array]:
        """Hits [repetitions, m] at each calibration size, for score(x, y) of fresh rows."""
        most = max(sizes)

        def once(key):
            a, b = jax.random.split(key)
            x = jax.random.normal(a, (most + m, 2))
            y = x[:, :1] + (0.5 + jnp.abs(x[:, 1:])) * jax.random.normal(b, (most + m, 2))
            values = score(x, y)
            taus = [japan.conformal_threshold(values[:n], eps) for n in sizes]
            return [values[most:] >= tau for tau in taus]

        keys = jax.random.split(jax.random.key(most), REPEATS)
        return jax.jit(lambda keys: jax.lax.map(once, keys, batch_size=100))(keys)

    @pytest.mark.parametrize("kind", japan.SCORES)
    def test_every_score(self, kind):
        """An untrained random flow covers as exactly as the true density would."""
        parts = {
            "flow": small_flow(),
            "marginal": small_flow(context=0),
            "reverse": japan.ConditionalRealNVP(
                2, 2, layers=2, hidden=4, zero_last=False, key=jax.random.key(4)
            ),
            "head": _Head(),
        }

        def score(x, y):
            y = y - 0.5 * x if kind == "residual" else y
            aux = _scores.prepare(kind, parts, x, KEY, 25)
            return _scores.evaluate(kind, parts, y, x, aux)

        sizes = (9, 50, 199)
        for n, hits in zip(sizes, self.repetitions(score, sizes), strict=True):
            self.check(hits, n, 0.1, ties=kind == "hpd")

    def test_sheet_line(self):
        """n = 99, eps = 0.1: 0.900 +- 0.002 over 2,000 repetitions."""
        (hits,) = self.repetitions(lambda x, y: jnp.sum(y, axis=1), (99,), m=100)
        assert abs(float(hits.mean()) - 0.9) < 0.002

    @pytest.mark.parametrize("n", [9, 50, 199])
    def test_every_baseline(self, n):
        m, eps, k = 20, 0.1, 12

        def once(key):
            keys = jax.random.split(key, 8)
            x = jax.random.normal(keys[0], (n + m, 2))
            y = x[:, :1] + jax.random.normal(keys[1], (n + m, 2))
            samples = x[None, :, :1] + 1.3 * jax.random.normal(keys[2], (k, n + m, 2))
            fresh = x[None, :, :1] + 1.3 * jax.random.normal(keys[3], (k, n + m, 2))
            log_prob = -jnp.sum((samples - x[None, :, :1]) ** 2, axis=-1)
            own = -jnp.sum((y - x[:, :1]) ** 2, axis=-1)
            r, x_train = y - 0.7 * x[:, :1], jax.random.normal(keys[4], (40, 2))
            r_train = jax.random.normal(keys[5], (40, 2))
            band = (x[:, :1] - 1.0 + 0 * y, x[:, :1] + 1.0 + 0 * y)
            cal, test = slice(None, n), slice(n, None)
            steps = r[:, :, None]
            balls = (y[cal], samples[:, cal], y[test], samples[:, test], eps)
            pair = (fresh[:, cal], fresh[:, test])
            weights = (log_prob[:, cal], log_prob[:, test])
            level = 1 - japan.hpd_score(own, log_prob)
            out = {
                "l2": japan.residual_regions(r[cal], r[test], eps),
                "linf": japan.residual_regions(r[cal], r[test], eps, "linf"),
                "rcp": japan.rcp_regions(r_train, r[cal], r[test], eps),
                "nle": japan.nle_regions(x_train, r_train, x[cal], r[cal], x[test], r[test], eps),
                "mcqr": japan.cqr_regions(
                    y[cal], [b[cal] for b in band], y[test], [b[test] for b in band], eps
                ),
                "cqr": japan.cqr_regions(
                    y[cal], [b[cal] for b in band], y[test], [b[test] for b in band], eps, False
                ),
                "cfrnn": japan.cfrnn_regions(steps[cal], steps[test], eps),
                "copula": japan.copula_cpts_regions(steps[cal], steps[test], eps),
                "janet": japan.janet_regions(r[cal], r[test], eps),
                "contra": japan.contra_regions(
                    r[cal], r[test], samples[:, test], log_prob[:, test], eps
                ),
                "pcp": japan.pcp_regions(*balls, key=KEY),
                "hd_pcp": japan.pcp_regions(*balls, key=KEY, kind="hd_pcp", log_prob=weights),
                "cp2_pcp": japan.pcp_regions(*balls, key=KEY, kind="cp2_pcp", fresh=pair),
                "c_pcp": japan.pcp_regions(*balls, key=KEY, kind="c_pcp", fresh=pair),
                "hdr": japan.hdr_regions(level[cal], level[test], log_prob[:, test], eps),
            }
            return {name: region.covered for name, region in out.items()}

        keys = jax.random.split(jax.random.key(n), REPEATS)
        out = jax.jit(lambda keys: jax.lax.map(once, keys, batch_size=100))(keys)
        halves = {"copula": n - n // 2, "janet": n - n // 2}
        conservative = {"cqr", "cfrnn", "copula", "c_pcp", "hdr"}  # unions of sets, or ties
        for name, hits in out.items():
            self.check(hits, halves.get(name, n), eps, ties=name in conservative)


class _Head(nnx.Module):
    """A fixed quantile head."""

    def __call__(self, x):
        return jnp.sin(x[:, :1])


class TestBaselineVolumes:
    """Each log-volume against what the same sets hold of a grid."""

    def test_closed_forms(self):
        rng = np.random.default_rng(0)
        r = [rng.standard_normal((n, 2)).astype(np.float32) for n in (400, 99, 50)]
        ball = japan.residual_regions(r[1], r[2], 0.1)
        np.testing.assert_allclose(np.exp(ball.log_volume), np.pi * ball.threshold**2, rtol=1e-5)
        cube = japan.residual_regions(r[1], r[2], 0.1, "linf")
        np.testing.assert_allclose(np.exp(cube.log_volume), 4 * cube.threshold**2, rtol=1e-5)
        ellipse = japan.rcp_regions(r[0], r[1], r[2], 0.1)
        wanted = np.pi * ellipse.threshold * np.sqrt(np.linalg.det(np.cov(r[0].T)))
        np.testing.assert_allclose(np.exp(ellipse.log_volume), wanted, rtol=1e-3)
        x = [rng.standard_normal((len(a), 1)).astype(np.float32) for a in r]
        local = japan.nle_regions(x[0], r[0], x[1], r[1], x[2], r[2], 0.1)
        assert np.isfinite(local.log_volume).all() and np.ptp(local.log_volume) > 0.01
        steps = [a[:, :, None] for a in r]
        radii = japan.cfrnn_regions(steps[1], steps[2], 0.1)
        wanted = np.prod(2 * radii.threshold)
        np.testing.assert_allclose(np.exp(radii.log_volume), wanted, rtol=1e-5)
        joint = japan.copula_cpts_regions(steps[1], steps[2], 0.1)
        np.testing.assert_allclose(np.exp(joint.log_volume), np.prod(2 * joint.threshold), 1e-5)
        sides = japan.janet_regions(r[1], r[2], 0.1)
        scale = np.sqrt((r[1][:49] ** 2).mean(0))
        wanted = np.prod(2 * float(sides.threshold) * scale)
        np.testing.assert_allclose(np.exp(sides.log_volume), wanted, rtol=1e-4)
        band = [np.full_like(a, -1.0) for a in r[1:]], [np.full_like(a, 1.0) for a in r[1:]]
        box = japan.cqr_regions(r[1], (band[0][0], band[1][0]), r[2], (band[0][1], band[1][1]), 0.1)
        wanted = (2 + 2 * float(box.threshold[0])) ** 2
        np.testing.assert_allclose(np.exp(box.log_volume), wanted, rtol=1e-4)

    def test_of_samples(self):
        """For N(0, I) balls of codes and density levels are the same ellipse."""
        keys = jax.random.split(KEY, 5)
        y_cal, y_test = (jax.random.normal(k, (n, 2)) for k, n in zip(keys, (999, 5), strict=False))
        samples = jax.random.normal(keys[2], (3000, 5, 2))
        log_prob = -0.5 * jnp.sum(samples**2, -1) - jnp.log(2 * jnp.pi)
        latent = japan.contra_regions(y_cal, y_test, samples, log_prob, 0.1)
        level = [1 - jnp.exp(-0.5 * jnp.sum(y**2, -1)) for y in (y_cal, y_test)]
        dense = japan.hdr_regions(*level, log_prob, 0.1)
        for region in (latent, dense):
            np.testing.assert_allclose(np.exp(region.log_volume), 14.4676, rtol=0.15)
        cal = jax.random.normal(keys[3], (40, 999, 2))
        pair = (jax.random.normal(keys[4], (60, 999, 2)), samples[100:200])
        for kind in ("pcp", "cp2_pcp", "c_pcp"):
            region = japan.pcp_regions(
                y_cal, cal, y_test, samples[:40], 0.1, key=KEY, kind=kind, fresh=pair
            )
            volume = np.exp(region.log_volume)
            assert (12 < volume).all() and (volume < 32).all(), kind

    @pytest.mark.parametrize(
        ("call", "match"),
        [
            (lambda r: japan.residual_regions(r, r, 0.1, "l1"), "norm is"),
            (lambda r: japan.residual_regions(r[:, 0], r, 0.1), "residuals has shape"),
            (lambda r: japan.cfrnn_regions(r, r, 0.1), "residuals has shape"),
            (lambda r: japan.janet_regions(r[:1], r, 0.1), "at least 2"),
            (lambda r: japan.pcp_regions(r, r[None], r, r[None], 0.1, key=KEY, kind="x"), "kind"),
            (
                lambda r: japan.pcp_regions(r, r[None], r, r[None], 0.1, key=KEY, kind="c_pcp"),
                "fresh is None",
            ),
        ],
    )
    def test_bad_input(self, call, match):
        with pytest.raises(ValueError, match=match):
            call(jnp.ones((20, 2)) * jnp.arange(20.0)[:, None])


class TestVolume:
    @pytest.mark.parametrize("scale", [0.5, 2.0])
    def test_oracle_ellipse_from_any_density(self, scale):
        x, y = rows(4000, scale=scale)
        model = JapanRegressor(Gaussian(scale), num_samples=4000, chunk_size=20_000)
        model.fit(x[:10], y[:10]).calibrate(x, y)
        tau = -0.5 * chi2.ppf(0.9, 2) - 2 * np.log(scale * np.sqrt(2 * np.pi))
        assert float(model.threshold_) == pytest.approx(tau, abs=0.15)
        volume = np.exp(np.asarray(model.log_volume(x[:7])))
        wanted = 14.467568 * scale**2
        np.testing.assert_allclose(volume, wanted, rtol=0.12)
        box = ([-30.0] * 2, [30.0] * 2)
        boxed = np.exp(model.log_volume(x[:7], method="box", box=box, num_samples=20_000))
        np.testing.assert_allclose(boxed.mean(), volume.mean(), rtol=0.2)
        samples = model.sample_region(x[:3], 50)
        assert samples.y.shape == (50, 3, 2) and bool(samples.valid.all())
        for i in range(3):
            inside = model.contains(np.repeat(x[i : i + 1], 50, 0), samples.y[:, i])
            assert bool(inside.all())

    def test_units(self, ready):
        x, y = rows(600)
        big = JapanRegressor(small_flow(), fit_config=FAST, num_samples=200)
        big.fit(x[:300], 10 * y[:300]).calibrate(x[300:], 10 * y[300:])
        gain = np.asarray(big.log_volume(x[:20])) - np.asarray(ready.log_volume(x[:20]))
        np.testing.assert_allclose(gain, 2 * np.log(10), atol=2e-2)
        same = big.log_volume(x[:20], standardised=True)
        np.testing.assert_allclose(same, ready.log_volume(x[:20], standardised=True), atol=2e-2)

    def test_chunks_bound_memory_and_leave_the_mean(self, ready):
        x, _ = rows(50, seed=5)
        whole = np.exp(np.asarray(ready.log_volume(x, num_samples=2000))).mean()
        ready.set_params(chunk_size=2500)
        parts = np.exp(np.asarray(ready.log_volume(x, num_samples=2000))).mean()
        ready.set_params(chunk_size=65536)
        assert parts == pytest.approx(whole, rel=0.05)

    def test_no_features_and_a_level_in_single_precision(self):
        """Contexts of width 0 are no contexts; float32 0.7 is not a little less than 0.7."""
        _, y = rows(19)
        x = np.zeros((19, 0), np.float32)
        model = JapanRegressor(small_flow(context=0), eps=np.float32(0.7), prefit=True)
        model.fit(x, y).calibrate(x, y)
        assert int((model.calibration_scores_ < model.threshold_).sum()) == 13
        volumes = np.asarray(model.log_volume(x[:3], num_samples=50))
        assert volumes.shape == (3,) and np.isfinite(volumes).all()
        assert model.sample_region(x[:3], 4).y.shape == (4, 3, 2)
        assert model.predict(x[:3]).shape == (3, 2)

    def test_importance_and_box_agree(self, ready):
        x, _ = rows(20, seed=6)
        a = np.exp(np.asarray(ready.log_volume(x, num_samples=4000))).mean()
        box = ([-9.0] * 2, [9.0] * 2)
        options = dict(method="box", box=box, num_samples=20_000)
        assert np.exp(np.asarray(ready.log_volume(x, **options))).mean() == pytest.approx(
            a, rel=0.1
        )


class TestRegions:
    def test_nesting(self, ready):
        x, y = rows(400, seed=7)
        held = [np.asarray(ready.contains(x, y, eps=e)) for e in (0.05, 0.1, 0.3)]
        assert not (held[1] & ~held[0]).any() and not (held[2] & ~held[1]).any()
        assert held[0].sum() > held[1].sum() > held[2].sum()

    def test_increasing_transform_of_the_score_changes_nothing(self, ready):
        x, y = rows(300, seed=8)
        score = lambda x, y: jnp.exp(0.1 * ready.flow_.log_prob(y, x))  # noqa: E731
        other = JapanRegressor(ready.flow_, score, prefit=True).fit(*rows(20))
        other.calibrate(*(a[300:] for a in rows(600)))
        np.testing.assert_array_equal(other.contains(x, y), ready.contains(x, y))

    def test_constant_jacobian_makes_latent_and_conditional_equal(self):
        """One coupling of a standardised flow with zero scales is a shift."""
        flow = japan.ConditionalRealNVP(2, 2, layers=2, hidden=4, key=KEY)
        x, y = rows(300)
        held = []
        for score in ("conditional", "latent"):
            model = JapanRegressor(flow, score, prefit=True).fit(x[:9], y[:9])
            held.append(np.asarray(model.calibrate(x[9:150], y[9:150]).contains(x[150:], y[150:])))
        np.testing.assert_array_equal(*held)

    def test_two_modes_on_a_line(self):
        class Modes:
            def log_prob(self, y, x):
                parts = [-2 * (np.asarray(y)[:, 0] - c) ** 2 for c in (-3, 3)]
                return np.logaddexp(*parts) - np.log(2 * 0.5 * np.sqrt(2 * np.pi))

            def sample(self, key, x, n):
                side = np.where(jax.random.bernoulli(key, 0.5, (n, len(x), 1)), 3.0, -3.0)
                return side + 0.5 * np.asarray(jax.random.normal(key, (n, len(x), 1)))

        x = np.zeros((500, 1), np.float32)
        y = Modes().sample(jax.random.key(2), x, 1)[0]
        model = JapanRegressor(Modes()).fit(x, y[:, 0]).calibrate(x, y[:, 0])
        region = model.region_mask_2d(x[:2], grid=400)
        assert region.mask.shape == (2, 1, 400) and list(region.components) == [2, 2]

    def test_mask_in_two_dimensions(self, ready):
        x, _ = rows(2)
        region = ready.region_mask_2d(x, grid=60, low=[-8, -8], high=[8, 8])
        cell = (region.first[1] - region.first[0]) * (region.second[1] - region.second[0])
        area = region.mask.sum((1, 2)) * cell
        volume = np.exp(np.asarray(ready.log_volume(x, num_samples=4000)))
        np.testing.assert_allclose(area, volume, rtol=0.2)
        assert (region.components >= 1).all()

    def test_too_few_points_are_the_whole_space(self):
        x, y = rows(60)
        model = JapanRegressor(small_flow(), prefit=True).fit(x, y)
        with pytest.warns(UserWarning, match="expected at least 9"):
            model.calibrate(x[:8], y[:8])
        assert float(model.threshold_) == -np.inf
        assert bool(model.contains(x, y + 1e6).all())
        assert np.isposinf(model.log_volume(x[:3])).all()
        model.calibrate(x[:9], y[:9])
        assert np.isfinite(float(model.threshold_))

    def test_ties_cover_enough(self):
        x, y = rows(200)
        model = JapanRegressor(small_flow(), lambda x, y: jnp.round(y[:, 0]), prefit=True)
        model.fit(x, y).calibrate(x[:99], y[:99])
        assert float(np.mean(model.contains(x, y))) >= 0.9


class TestScores:
    @pytest.mark.parametrize("score", japan.SCORES)
    def test_all_run_from_names(self, score):
        x, y = rows(240)
        model = JapanRegressor(score=score, fit_config=FAST, num_samples=100, score_samples=20)
        model.fit(x[:100], y[:100]).calibrate(x[100:200], y[100:200])
        assert 0.7 < float(np.mean(model.contains(x[200:], y[200:]))) <= 1
        volume = model.log_volume(x[200:])
        # Of a region that no sample falls into the volume is 0. The density of x given y says
        # nothing of where y is likely, so that a few samples may all lie outside.
        assert np.isfinite(volume[volume > -np.inf]).all() and not np.isnan(volume).any()
        assert float(np.mean(volume == -np.inf)) < (0.5 if score == "posterior" else 1e-9)
        assert model.predict(x[:3]).shape == (3, 2)

    def test_hpd_is_its_definition(self):
        flow, (x, y) = small_flow(), rows(6)
        parts = {"flow": flow}
        aux = _scores.prepare("hpd", parts, jnp.asarray(x), KEY, 30)
        ours = _scores.evaluate("hpd", parts, jnp.asarray(y), jnp.asarray(x), aux)
        samples, log_prob = _scores.sample_with_log_prob(flow, KEY, jnp.asarray(x), 30)
        np.testing.assert_allclose(log_prob, flow.log_prob(samples, x), atol=1e-4)
        np.testing.assert_array_equal(ours, japan.hpd_score(flow.log_prob(y, x), log_prob))

    def test_black_box_is_the_context(self):
        x, y = rows(300)
        flow = japan.ConditionalRealNVP(2, 2, layers=2, hidden=4, key=KEY)
        predictor = lambda x: np.repeat(np.asarray(x)[:, :1], 2, axis=1)  # noqa: E731
        model = JapanRegressor(flow, "base_prediction", predictor=predictor, fit_config=FAST)
        model.fit(x[:150], y[:150]).calibrate(x[150:], y[150:])
        moved = x.copy()
        moved[:, 1] = 99.0  # what the predictor does not read
        np.testing.assert_array_equal(model.contains(x, y), model.contains(moved, y))


class TestForecasting:
    def test_trajectories(self):
        rng = np.random.default_rng(0)
        x = rng.standard_normal((60, 3, 1)).cumsum(1)
        y = x[:, -1:] + rng.standard_normal((60, 4, 1)).cumsum(1)
        options = dict(blocks=1, width=4, heads=1, attention_layers=1)
        key = jax.random.key(0, impl="unsafe_rbg")  # compiles in a tenth of the default's time
        flow = jax.jit(
            lambda: japan.TrajectoryFlow(4, 1, features=1, steps=3, **options, key=key)
        )()
        model = JapanRegressor(flow, fit_config=FitConfig(steps=4, batch_size=8), num_samples=20)
        model.fit(x[:20], y[:20]).calibrate(x[20:50], y[20:50])
        assert model.contains(x[50:], y[50:]).shape == (10,)
        assert np.isfinite(model.log_volume(x[50:])).all()
        assert model.predict(x[50:]).shape == (10, 4, 1)
        with pytest.raises(ValueError, match="one long series"):
            JapanRegressor(flow).fit(x[:1], y[:1])
        with pytest.raises(ValueError, match="one long series"):
            JapanRegressor("trajectory").fit(x[:, :, 0], y[:, 0])
        with pytest.raises(ValueError, match="expected histories"):
            JapanRegressor("trajectory").fit(x[..., None], y)
        series = np.arange(24.0)
        windows = np.stack([series[i : i + 4] for i in range(20)])[..., None]
        with pytest.warns(UserWarning, match="overlapping windows"):
            JapanRegressor(flow, fit_config=FitConfig(steps=0)).fit(x[:20], windows)


class TestScikitLearnHabits:
    def test_clone_and_parameters(self):
        base = pytest.importorskip("sklearn.base")
        model = JapanRegressor("spline", eps=0.2, fit_config=FAST)
        copy = base.clone(model)
        assert copy is not model and copy.get_params() == model.get_params()
        assert base.clone(JapanRegressor(small_flow())).get_params()["flow"] is not None
        assert model.set_params(eps=0.3).eps == 0.3 and base.is_regressor(model)
        assert "eps=0.3" in repr(model)
        with pytest.raises(ValueError, match="no parameter"):
            model.set_params(alpha=0.1)

    def test_last_step_of_a_pipeline(self):
        pipeline = pytest.importorskip("sklearn.pipeline")
        scaling = pytest.importorskip("sklearn.preprocessing")
        x, y = rows(200)
        model = JapanRegressor(small_flow(), fit_config=FAST, calibration_fraction=0.5)
        pipe = pipeline.make_pipeline(scaling.StandardScaler(), model).fit(x, y)
        assert pipe.predict(x).shape == (200, 2)
        assert len(pipe[-1].calibration_scores_) == 100
        assert float(np.mean(pipe[-1].contains(pipe[:-1].transform(x), y))) > 0.75

    def test_same_seed_same_numbers(self):
        x, y = rows(100)
        runs = []
        for seed in (0, 0, 1):
            model = JapanRegressor(small_flow(), fit_config=FAST, random_state=seed)
            model.fit(x[:50], y[:50]).calibrate(x[50:], y[50:])
            runs.append((float(model.threshold_), np.asarray(model.log_volume(x[:5]))))
        assert runs[0][0] == runs[1][0] and np.array_equal(runs[0][1], runs[1][1])
        assert runs[0][0] != runs[2][0]


class TestBadInput:
    @pytest.mark.parametrize(
        ("change", "match"),
        [
            (lambda x, y: (x, y * np.nan), r"y\[0, 0\] is nan"),
            (lambda x, y: (x, np.where(y > 2, np.inf, y)), "is inf"),
            (lambda x, y: (x + np.inf, y), r"x\[0, 0\] is inf"),
            (lambda x, y: (x, y * np.array([1, 0])), "constant in column"),
            (lambda x, y: (x[:-1], y), "same number"),
            (lambda x, y: (x[:, 0], y), "x has shape"),
            (lambda x, y: (x, y[:, :, None]), "y has shape"),
        ],
    )
    def test_rows(self, change, match):
        with pytest.raises(ValueError, match=match):
            JapanRegressor(fit_config=FAST).fit(*change(*rows(50)))

    @pytest.mark.parametrize(
        ("options", "match"),
        [
            (dict(eps=0.0), "eps is"),
            (dict(eps=1.0), "eps is"),
            (dict(score="density"), "score is"),
            (dict(flow="glow"), "flow is"),
            (dict(flow=3), "flow is a int"),
            (dict(calibration_fraction=1.0), "calibration_fraction"),
            (dict(num_samples=0), "num_samples"),
            (dict(prefit=True), "prefit"),
        ],
    )
    def test_settings(self, options, match):
        with pytest.raises(ValueError, match=match):
            JapanRegressor(**options).fit(*rows(50))

    def test_order_of_calls(self):
        x, y = rows(20)
        model = JapanRegressor(small_flow(), prefit=True)
        with pytest.raises(ValueError, match="call fit first"):
            model.calibrate(x, y)
        with pytest.raises(japan.NotCalibratedError, match="call calibrate first"):
            model.fit(x, y).contains(x, y)

    def test_widths_and_targets_after_fit(self, ready):
        x, y = rows(5)
        with pytest.raises(ValueError, match="x has shape"):
            ready.contains(np.ones((5, 3)), y)
        with pytest.raises(ValueError, match="y has shape"):
            ready.contains(x, np.ones((5, 3)))
        with pytest.raises(ValueError, match="is nan"):
            ready.contains(x, y * np.nan)
        with pytest.raises(ValueError, match="takes contexts of shape"):
            JapanRegressor(small_flow(context=5)).fit(*rows(30))
        with pytest.raises(ValueError, match="method is"):
            ready.log_volume(x, method="grid")

    def test_nan_scores_do_not_calibrate(self):
        x, y = rows(30)
        model = JapanRegressor(small_flow(), lambda x, y: y[:, 0] * jnp.nan, prefit=True)
        with pytest.raises(ValueError, match="NaN"):
            model.fit(x, y).calibrate(x, y)
