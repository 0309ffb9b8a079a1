"""The mixture schedule: proportions, two domains in each micro-batch, random access."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxlib_papers.data import DataError
from jaxlib_papers.data.mixture import make_schedule, normalised_weights


def micro_batches(schedule, accum_steps):
    """Chunks of each micro-batch, [micro-batches, chunks]."""
    domain = schedule.domain
    batches, rows, chunks = domain.shape
    parts = [domain[:, a::accum_steps] for a in range(accum_steps)]
    return np.stack(parts, axis=1).reshape(batches * accum_steps, rows // accum_steps * chunks)


def distinct(micro):
    return np.asarray([len(set(row)) for row in micro.tolist()])


@st.composite
def settings(draw):
    share = draw(st.lists(st.integers(1, 40), min_size=2, max_size=6))
    accum = draw(st.integers(1, 4))
    size = draw(st.integers(1, 8))
    chunks = draw(st.sampled_from([1, 1, 2, 3]))
    weights = normalised_weights(
        [f"d{i}" for i in range(len(share))], {f"d{i}": s for i, s in enumerate(share)}
    )
    return weights, accum, size * accum, chunks, draw(st.integers(0, 5))


@given(settings())
def test_proportions_and_two_domains(setting):
    weights, accum, rows, chunks, seed = setting
    share = np.asarray(list(weights.values()))
    size = rows // accum * chunks
    options = {"rows": rows, "accum_steps": accum, "chunks_per_row": chunks, "seed": seed}
    if size < 2 or share.max() > 1 - 1 / size + 1e-12:
        with pytest.raises(DataError):
            make_schedule(weights, **options)
        return
    schedule = make_schedule(weights, **options)
    total = schedule.domain.size
    counts = np.bincount(schedule.domain.reshape(-1), minlength=len(share))
    np.testing.assert_array_equal(counts, schedule.counts)
    assert np.abs(counts - total * share).max() < 1
    assert distinct(micro_batches(schedule, accum)).min() >= 2


@given(settings(), st.integers(0, 3))
def test_running_numbers_count_each_domain(setting, cycles):
    weights, accum, rows, chunks, seed = setting
    share = np.asarray(list(weights.values()))
    size = rows // accum * chunks
    if size < 2 or share.max() > 1 - 1 / size + 1e-12:
        return
    schedule = make_schedule(
        weights, rows=rows, accum_steps=accum, chunks_per_row=chunks, seed=seed
    )
    batches = len(schedule.domain)
    seen = dict.fromkeys(range(len(share)), 0)
    for step in range(2 * batches):
        domain, number = schedule.lookup(step)
        for d, n in zip(domain.reshape(-1).tolist(), number.reshape(-1).tolist(), strict=True):
            assert n == seen[d]
            seen[d] += 1
    late, _ = schedule.lookup(5 + cycles * batches)
    early, _ = schedule.lookup(5 % batches)
    if 5 < batches:
        np.testing.assert_array_equal(late, early)


def test_every_batch_is_near_its_proportions():
    weights = {"a": 0.5, "b": 0.3, "c": 0.2}
    schedule = make_schedule(weights, rows=20)
    for batch in schedule.domain:
        counts = np.bincount(batch.reshape(-1), minlength=3)
        assert np.abs(counts - [10, 6, 4]).max() <= 2


def test_equal_weights_are_exact():
    weights = normalised_weights(["a", "b", "c"], None)
    schedule = make_schedule(weights, rows=8)
    assert len(set(schedule.counts.tolist())) == 1


def test_tightest_possible_weights():
    # Micro-batches of 4 with 3/4 of one domain: exactly one row of another in each.
    schedule = make_schedule({"big": 0.75, "x": 0.15, "y": 0.1}, rows=8, accum_steps=2)
    micro = micro_batches(schedule, 2)
    np.testing.assert_array_equal((micro == 0).sum(axis=1), 3)


def test_rare_domain_is_scheduled():
    schedule = make_schedule({"a": 0.5, "b": 0.4999, "rare": 0.0001}, rows=4)
    assert schedule.counts[2] >= 1
    assert abs(schedule.counts[2] / schedule.domain.size - 1e-4) < 1 / schedule.domain.size


def test_zero_weight_never_appears_and_one_domain_is_allowed():
    schedule = make_schedule({"a": 0.0, "b": 1.0}, rows=2, accum_steps=2)
    assert set(np.unique(schedule.domain)) == {1}


def test_seed_changes_places_not_proportions():
    weights = {"a": 0.6, "b": 0.4}
    one, two = (make_schedule(weights, rows=16, seed=s) for s in (0, 1))
    assert one.digest != two.digest == make_schedule(weights, rows=16, seed=1).digest
    np.testing.assert_array_equal(one.counts, two.counts)


def test_49_domains():
    weights = normalised_weights([f"d{i}" for i in range(49)], None)
    schedule = make_schedule(weights, rows=64, accum_steps=4)
    assert distinct(micro_batches(schedule, 4)).min() >= 10


class TestErrors:
    def test_weights(self):
        domains = ["code", "prose"]
        with pytest.raises(DataError, match="unknown domain 'cod'; the corpus has 'code', 'prose'"):
            normalised_weights(domains, {"cod": 1, "prose": 1})
        with pytest.raises(DataError, match="lack domain 'prose'; give 0 to leave it out"):
            normalised_weights(domains, {"code": 1})
        with pytest.raises(DataError, match="domain 'code' must be finite and >= 0, got -1"):
            normalised_weights(domains, {"code": -1, "prose": 1})
        with pytest.raises(DataError, match="'prose' must be finite and >= 0, got nan"):
            normalised_weights(domains, {"code": 1, "prose": float("nan")})
        with pytest.raises(DataError, match="all weights are zero"):
            normalised_weights(domains, {"code": 0, "prose": 0})
        assert normalised_weights(domains, {"prose": 3, "code": 1}) == {"code": 0.25, "prose": 0.75}

    def test_micro_batch_of_one_row(self):
        with pytest.raises(DataError, match=r"has 1 row \(global_batch=4, accum_steps=4\)"):
            make_schedule({"a": 0.5, "b": 0.5}, rows=4, accum_steps=4)
        make_schedule({"a": 0.5, "b": 0.5}, rows=4, accum_steps=4, chunks_per_row=2)

    def test_one_domain_too_heavy(self):
        with pytest.raises(DataError, match="'b' has 0.9 of the weight.* at most 0.75 is possible"):
            make_schedule({"a": 0.1, "b": 0.9}, rows=8, accum_steps=2)

    def test_weight_too_small(self):
        with pytest.raises(DataError, match="'a' has 1e-08 of the weight, less than"):
            make_schedule({"a": 1e-8, "b": 0.5, "c": 0.5 - 1e-8}, rows=8)
