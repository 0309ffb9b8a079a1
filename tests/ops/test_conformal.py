"""Conformal quantiles: exact ranks, infinite thresholds, weights, groups, folds, bad input."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxlib_papers.ops.conformal import (
    conformal_p_value,
    conformal_quantile,
    conformal_rank,
    conformal_threshold,
    cross_conformal_contains,
    cv_plus_interval,
    fold_ids,
    group_conformal_quantile,
    localised_conformal_quantile,
    split_sizes,
    weighted_conformal_quantile,
)

VECTORS = np.load(Path(__file__).parents[1] / "vectors" / "japan.npz")
LEVELS = ("0.5", "0.68", "0.8", "0.9", "0.95", "0.99")


def exact_rank(n: int, level: str) -> int:
    return math.ceil(Fraction(level) * (n + 1))


@pytest.mark.parametrize("level", LEVELS)
def test_ranks_are_those_of_exact_fractions(level):
    alphas = (1 - float(level), float(1 - Fraction(level)))  # as computed, and as written
    for n in range(1, 2001):
        for alpha in alphas:
            assert conformal_rank(n, alpha) == exact_rank(n, level)


@pytest.mark.parametrize(
    ("n", "alpha", "rank"),
    [(99, 0.1, 90), (100, 0.1, 91), (8, 0.1, 9), (9, 0.1, 9), (37, 0.2, 31), (59, 0.05, 57)]
    + [(74, 0.32, 51), (39, 0.05, 38), (29, 0.1, 27), (2, 1 / 3, 2)],
)
def test_ranks_of_the_table(n, alpha, rank):
    assert conformal_rank(n, alpha) == rank
    scores = np.random.default_rng(n).permutation(n).astype(np.float32)
    quantile = float(conformal_quantile(scores, alpha))
    assert quantile == (np.inf if rank > n else rank - 1)
    assert float(conformal_threshold(-scores, alpha)) == -quantile


@pytest.mark.parametrize("k", range(6))
def test_golden_quantiles(k):
    with jax.enable_x64(True):
        get = {name: VECTORS[f"quantile/{k}/{name}"] for name in ("scores", "alpha", "k", "q")}
        alpha = float(get["alpha"])
        assert conformal_rank(len(get["scores"]), alpha) == int(get["k"])
        ours = conformal_quantile(get["scores"], alpha)
        assert float(ours) == get["q"]
        assert float(conformal_threshold(-get["scores"], alpha)) == -get["q"]


def test_reference_function_that_is_off_by_one_is_not_matched():
    """`higher` interpolation on n + 1 points takes the next order statistic."""
    differ = [k for k in range(6) if VECTORS[f"quantile/{k}/q"] != VECTORS[f"quantile/{k}/q_moc"]]
    assert differ == [0, 1, 4, 5]
    for k in differ:
        scores = np.sort(np.append(VECTORS[f"quantile/{k}/scores"], np.inf))
        at = int(VECTORS[f"quantile/{k}/k"])
        assert scores[at] == VECTORS[f"quantile/{k}/q_moc"]  # rank k + 1, from 1


@pytest.mark.parametrize("n", [1, 5, 8])
def test_too_few_points_give_the_whole_space(n):
    scores = jnp.arange(n, dtype=jnp.float32)
    assert float(conformal_quantile(scores, 0.1)) == np.inf
    assert float(conformal_threshold(scores, 0.1)) == -np.inf


def test_nine_points_give_the_largest_score():
    scores = jnp.array([3.0, 1, 9, 2, 5, 7, 4, 8, 6])
    assert float(conformal_quantile(scores, 0.1)) == 9
    assert float(conformal_threshold(scores, 0.1)) == 1


@given(
    n=st.integers(1, 60),
    level=st.sampled_from(LEVELS),
    seed=st.integers(0, 2**31),
    ties=st.booleans(),
)
def test_set_holds_enough_of_all_n_plus_one_points(n, level, seed, ties):
    """Leave-one-out over n + 1 points is the coverage under exchangeability, exactly."""
    alpha = float(1 - Fraction(level))
    rng = np.random.default_rng(seed)
    points = rng.integers(0, 4, n + 1) if ties else rng.permutation(n + 1)
    points = points.astype(np.float32)
    held = sum(
        points[i] <= np.sort(np.append(np.delete(points, i), np.inf))[conformal_rank(n, alpha) - 1]
        for i in range(n + 1)
    )
    wanted = min(exact_rank(n, level), n + 1)
    assert held >= wanted if ties else held == wanted


def test_any_increasing_transform_keeps_the_set():
    scores = jax.random.normal(jax.random.key(0), (77,))
    test = jax.random.normal(jax.random.key(1), (500,))
    plain = test <= conformal_quantile(scores, 0.2)
    moved = jnp.exp(3 * test) <= conformal_quantile(jnp.exp(3 * scores), 0.2)
    np.testing.assert_array_equal(plain, moved)
    p = conformal_p_value(scores, test)
    np.testing.assert_array_equal(plain, p > 0.2 + 1e-6)


def test_jit_vmap_and_nan_inside_jit():
    scores = jax.random.normal(jax.random.key(0), (7, 99))
    many = jax.jit(jax.vmap(lambda s: conformal_quantile(s, 0.1)))(scores)
    np.testing.assert_array_equal(many, [conformal_quantile(s, 0.1) for s in scores])
    broken = scores.at[:, :10].set(jnp.nan)
    assert np.isinf(jax.jit(jax.vmap(lambda s: conformal_quantile(s, 0.1)))(broken)).all()
    assert np.isinf(jax.jit(jax.vmap(lambda s: conformal_threshold(s, 0.1)))(broken)).all()


def test_bfloat16_and_integers_are_taken():
    assert float(conformal_quantile(jnp.arange(99, dtype=jnp.bfloat16), jnp.float32(0.1))) == 89
    assert conformal_quantile(np.arange(99), np.float32(0.1)).dtype == jnp.float32


class TestWeighted:
    @pytest.mark.parametrize("n", [8, 9, 99, 100, 1999])
    def test_equal_weights_give_the_plain_quantile(self, n):
        scores = jax.random.normal(jax.random.key(n), (n,))
        levels = (0.5, 0.32, 0.2, 0.1, 0.05, 0.01)

        @jax.jit
        def both(w, own):
            weighted = [weighted_conformal_quantile(scores, w, own, a) for a in levels]
            return jnp.stack(weighted), jnp.stack([conformal_quantile(scores, a) for a in levels])

        for weight in (1.0, 0.3):
            np.testing.assert_array_equal(*both(jnp.full(n, weight), jnp.float32(weight)))

    def test_by_hand(self):
        scores, w = jnp.array([3.0, 1.0, 2.0]), jnp.array([1.0, 2.0, 4.0])
        # Cumulative shares of 8: 2/8 at 1, 6/8 at 2, 7/8 at 3.
        values = [float(weighted_conformal_quantile(scores, w, 1.0, a)) for a in (0.75, 0.25, 0.2)]
        assert values == [1, 2, 3]
        assert float(weighted_conformal_quantile(scores, w, 1.0, 0.1)) == np.inf

    def test_weight_zero_is_leaving_out(self):
        scores = jax.random.normal(jax.random.key(0), (50,))
        w = jnp.where(jnp.arange(50) < 30, 1.0, 0.0)
        kept = conformal_quantile(scores[:30], 0.1)
        assert float(weighted_conformal_quantile(scores, w, 1.0, 0.1)) == float(kept)

    def test_batch_of_test_weights(self):
        scores, w = jnp.arange(20.0), jnp.ones(20)
        own = jnp.array([[0.0, 1.0, 5.0]])
        got = weighted_conformal_quantile(scores, w, own, 0.2)
        assert got.shape == (1, 3) and list(got[0]) == [15, 16, 19]

    def test_coverage_under_covariate_shift(self):
        """Calibration at x ~ U(0, 1), test at density 2x, noise growing with x."""

        def once(key):
            a, b, c, d = jax.random.split(key, 4)
            x = jax.random.uniform(a, (200,))
            score = x * jnp.abs(jax.random.normal(b, (200,)))
            x_test = jnp.sqrt(jax.random.uniform(c, (20,)))
            test = x_test * jnp.abs(jax.random.normal(d, (20,)))
            plain = test <= conformal_quantile(score, 0.1)
            q = weighted_conformal_quantile(score, x, x_test, 0.1)
            return jnp.mean(plain), jnp.mean(test <= q)

        plain, ours = jax.jit(jax.vmap(once))(jax.random.split(jax.random.key(0), 2000))
        assert float(plain.mean()) < 0.865
        assert 0.895 < float(ours.mean()) < 0.925

    @pytest.mark.parametrize(
        ("w", "own", "match"),
        [
            ([1.0, -1.0, 1.0], 1.0, "w holds -1"),
            ([0.0, 0.0, 0.0], 0.0, "sum to 0"),
            ([1.0, 1.0], 1.0, "w has shape"),
            ([1.0, np.nan, 1.0], 1.0, "w holds nan"),
            ([1.0, 1.0, 1.0], -2.0, "w_test holds -2"),
        ],
    )
    def test_bad_weights(self, w, own, match):
        with pytest.raises(ValueError, match=match):
            weighted_conformal_quantile(jnp.arange(3.0), jnp.array(w), own, 0.1)

    def test_bad_weights_inside_jit_give_the_whole_space(self):
        f = jax.jit(lambda w: weighted_conformal_quantile(jnp.arange(9.0), w, 1.0, 0.5))
        for bad in (jnp.full(9, jnp.nan), -jnp.ones(9)):
            assert float(f(bad)) == np.inf


class TestLocalised:
    def test_follows_local_noise_and_covers(self):
        def once(key, centre_key):
            a, b, c, d = jax.random.split(key, 4)
            x, x_test = jax.random.uniform(a, (200, 1)), jax.random.uniform(b, (20, 1))
            score = (0.1 + x[:, 0]) * jnp.abs(jax.random.normal(c, (200,)))
            test = (0.1 + x_test[:, 0]) * jnp.abs(jax.random.normal(d, (20,)))
            q = localised_conformal_quantile(score, x, x_test, 0.1, 0.1, key=centre_key)
            return test <= q, x_test[:, 0] > 0.5, q

        keys = jax.random.split(jax.random.key(0), 500)
        hit, high, q = jax.jit(jax.vmap(once))(keys, jax.random.split(jax.random.key(1), 500))
        assert 0.89 < float(hit.mean()) < 0.92
        assert float(jnp.median(q[high])) > 1.5 * float(jnp.median(q[~high]))

    def test_chunks_change_nothing(self):
        scores, x = jnp.arange(40.0), jnp.linspace(0, 1, 40)[:, None]
        whole, parts = (
            localised_conformal_quantile(scores, x, x[:7], 0.3, 0.2, chunk_size=size)
            for size in (100, 3)
        )
        np.testing.assert_array_equal(whole, parts)

    def test_far_away_is_infinite_or_finite_but_never_nan(self):
        scores, x = jnp.arange(40.0), jnp.linspace(0, 1, 40)[:, None]
        q = localised_conformal_quantile(scores, x, jnp.array([[1e4], [0.5]]), 0.01, 0.1)
        assert not np.isnan(q).any() and float(q[0]) == np.inf

    def test_bad_bandwidth(self):
        with pytest.raises(ValueError, match="bandwidth"):
            localised_conformal_quantile(
                jnp.arange(3.0), jnp.ones((3, 1)), jnp.ones((1, 1)), 0, 0.1
            )


class TestGroups:
    def test_each_group_has_its_own_exact_rank(self):
        rng = np.random.default_rng(0)
        groups = rng.integers(-1, 5, 300).astype(np.int32)
        scores = rng.standard_normal(300).astype(np.float32)
        got = jax.jit(lambda s, g: group_conformal_quantile(s, g, 6, 0.1))(scores, groups)
        for group in range(5):
            assert float(got[group]) == float(conformal_quantile(scores[groups == group], 0.1))
        assert float(got[5]) == np.inf

    def test_small_group_is_infinite(self):
        got = group_conformal_quantile(jnp.arange(17.0), jnp.arange(17) // 9, 2, 0.1)
        assert [float(v) for v in got] == [8, np.inf]

    def test_bad_groups(self):
        with pytest.raises(ValueError, match="groups has dtype"):
            group_conformal_quantile(jnp.arange(3.0), jnp.ones(3), 2, 0.1)
        with pytest.raises(ValueError, match="groups has shape"):
            group_conformal_quantile(jnp.arange(3.0), jnp.ones(2, jnp.int32), 2, 0.1)


class TestFolds:
    def test_sizes_and_folds(self):
        assert split_sizes(10, (0.5, 0.25, 0.25)) == (5, 2, 3)
        assert split_sizes(2400, (0.5, 0.25, 0.25)) == (1200, 600, 600)
        counts = np.bincount(fold_ids(jax.random.key(0), 23, 5))
        assert sorted(counts) == [4, 4, 5, 5, 5]
        with pytest.raises(ValueError, match="fractions"):
            split_sizes(10, (0.5, 0.6))
        with pytest.raises(ValueError, match="num_folds"):
            fold_ids(jax.random.key(0), 4, 5)

    def test_one_model_gives_the_split_set(self):
        """Where all folds share a model, cross-conformal is split conformal."""
        scores = jax.random.normal(jax.random.key(0), (60,))
        test = jax.random.normal(jax.random.key(1), (200,))
        folds = fold_ids(jax.random.key(2), 60, 4)
        got = cross_conformal_contains(scores, folds, jnp.broadcast_to(test, (4, 200)), 0.1)
        np.testing.assert_array_equal(got, test <= conformal_quantile(scores, 0.1))

    def test_interval_agrees_with_the_set_and_covers(self):
        """Folds of a mean: 5 models, and every point calibrates."""

        def once(key):
            a, b, c = jax.random.split(key, 3)
            y, y_test = jax.random.normal(a, (40,)), jax.random.normal(b, (10,))
            folds = fold_ids(c, 40, 5)
            out = (jnp.arange(5)[:, None] != folds[None]).astype(jnp.float32)
            means = jnp.sum(out * y[None], axis=1) / jnp.sum(out, axis=1)
            scores = jnp.abs(y - means[folds])
            predicted = jnp.broadcast_to(means[:, None], (5, 10))
            low, high = cv_plus_interval(scores, folds, predicted, 0.1)
            held = cross_conformal_contains(scores, folds, jnp.abs(y_test[None] - predicted), 0.1)
            return (low <= y_test) & (y_test <= high), held

        inside, held = jax.jit(jax.vmap(once))(jax.random.split(jax.random.key(0), 2000))
        assert 0.885 < float(inside.mean()) < 0.93
        assert bool((inside | ~held).all())  # the set lies within the interval

    def test_too_few_points(self):
        folds = jnp.arange(5, dtype=jnp.int32)
        low, high = cv_plus_interval(jnp.ones(5), folds, jnp.zeros((5, 3)), 0.1)
        assert np.isneginf(low).all() and np.isposinf(high).all()
        assert bool(cross_conformal_contains(jnp.ones(5), folds, jnp.full((5, 3), 9.0), 0.1).all())

    def test_negative_residuals(self):
        with pytest.raises(ValueError, match="residuals"):
            cv_plus_interval(-jnp.ones(5), jnp.arange(5), jnp.zeros((5, 3)), 0.1)


@pytest.mark.parametrize("function", [conformal_quantile, conformal_threshold])
class TestBadInput:
    @pytest.mark.parametrize("alpha", [0.0, 1.0, -0.1, 1.5, float("nan"), None, "0.1"])
    def test_level(self, function, alpha):
        with pytest.raises(ValueError, match="(alpha|eps) is"):
            function(jnp.arange(20.0), alpha)

    def test_empty(self, function):
        with pytest.raises(ValueError, match="scores is empty"):
            function(jnp.zeros(0), 0.1)

    def test_nan(self, function):
        with pytest.raises(ValueError, match=r"scores\[2\] is NaN"):
            function(jnp.array([0.0, 1.0, jnp.nan]), 0.1)

    def test_infinities(self, function):
        """One side is refused, the other warned of."""
        good = jnp.inf if function is conformal_threshold else -jnp.inf
        with pytest.raises(ValueError, match=r"scores\[1\] is"):
            function(jnp.array([0.0, good]), 0.5)
        with pytest.warns(UserWarning, match="outside of every finite set"):
            function(jnp.array([0.0, -good]), 0.5)

    def test_rank(self, function):
        with pytest.raises(ValueError, match="scores has shape"):
            function(jnp.ones((2, 3)), 0.1)

    def test_traced_level(self, function):
        with pytest.raises(ValueError, match="static"):
            jax.jit(function)(jnp.arange(20.0), 0.1)
