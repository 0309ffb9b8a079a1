"""The schedules' values at their corners."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxlib_papers.train.schedules import constant, warmup_cosine, warmup_stable_decay


def values(schedule, steps):
    return np.array([float(schedule(step)) for step in range(steps)])


def test_cosine_rises_linearly_and_ends_at_its_minimum():
    rates = values(warmup_cosine(2.0, warmup_steps=4, total_steps=20, min_ratio=0.1), 25)
    np.testing.assert_allclose(rates[:4], [0.5, 1.0, 1.5, 2.0], rtol=1e-6)
    assert rates[4] == pytest.approx(2.0)
    assert np.all(np.diff(rates[4:20]) < 0)
    np.testing.assert_allclose(rates[19:], 0.2, rtol=1e-6)
    # Half way down the cosine is the mean of its ends.
    middle = warmup_cosine(2.0, warmup_steps=0, total_steps=21, min_ratio=0.1)
    assert float(middle(10)) == pytest.approx(1.1, rel=1e-6)


def test_wsd_has_a_plateau_and_a_linear_fall():
    schedule = warmup_stable_decay(
        1.0, warmup_steps=2, total_steps=10, decay_fraction=0.4, min_ratio=0.2
    )
    want = [0.5, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2]
    np.testing.assert_allclose(values(schedule, 12), want, rtol=1e-6)


def test_constant_after_warmup():
    np.testing.assert_allclose(values(constant(3.0, warmup_steps=3), 5), [1, 2, 3, 3, 3], rtol=1e-6)
    np.testing.assert_allclose(values(constant(3.0), 2), [3, 3])


def test_no_decay_and_all_decay_are_defined():
    none = warmup_stable_decay(1.0, warmup_steps=0, total_steps=4, decay_fraction=0.0)
    np.testing.assert_allclose(values(none, 4), 1.0)
    every = warmup_stable_decay(1.0, warmup_steps=0, total_steps=4, decay_fraction=1.0)
    np.testing.assert_allclose(values(every, 4), [0.75, 0.5, 0.25, 0.0], atol=1e-7)


def test_schedules_are_float32_under_jit_and_equal_eager():
    schedule = warmup_cosine(1e-3, warmup_steps=3, total_steps=9)
    count = np.int32(5)
    assert jax.jit(schedule)(count).dtype == np.float32
    np.testing.assert_allclose(jax.jit(schedule)(count), schedule(count), rtol=1e-6)


@pytest.mark.parametrize(
    "make",
    [
        lambda: warmup_cosine(1.0, warmup_steps=11, total_steps=10),
        lambda: warmup_cosine(1.0, warmup_steps=-1, total_steps=10),
        lambda: warmup_stable_decay(1.0, warmup_steps=6, total_steps=10, decay_fraction=0.5),
        lambda: warmup_stable_decay(1.0, warmup_steps=0, total_steps=10, decay_fraction=1.5),
        lambda: constant(1.0, warmup_steps=-2),
    ],
)
def test_impossible_lengths_are_refused(make):
    with pytest.raises(ValueError, match="steps"):
        make()
