"""The stop-watch counts training time only, and MFU follows from it."""

from __future__ import annotations

import jax
import pytest

from jaxlib_papers.train.throughput import PeakFlops, Throughput, peak_flops


def test_stopped_time_does_not_count_and_laps_are_apart():
    now = [0.0]
    watch = Throughput(flops_per_token=1e6, peak=PeakFlops(1e9, "given"))
    watch._clock = lambda: now[0]

    def steps(tokens, seconds):
        watch.start()
        now[0] += seconds
        watch.add(tokens)

    assert watch.lap() == {} == watch.total()
    steps(1000, 2.0)
    watch.stop()
    now[0] += 100.0  # evaluation, a save
    steps(1000, 2.0)
    assert watch.lap() == {"tokens_per_second": 500.0, "mfu": 0.5}
    steps(100, 1.0)
    assert watch.lap() == {"tokens_per_second": 100.0, "mfu": 0.1}
    assert watch.total() == {"tokens_per_second": 420.0, "mfu": pytest.approx(0.42)}


def test_without_flops_or_peak_there_is_no_mfu():
    watch = Throughput()
    watch.start()
    watch.add(10)
    assert set(watch.lap()) == {"tokens_per_second"}


def test_peak_is_given_or_from_the_table_or_measured(monkeypatch):
    assert peak_flops(per_device=1e12) == PeakFlops(1e12 * jax.device_count(), "given")
    measured = peak_flops("float32")
    assert measured.source == "measured" and 1e8 < measured.total < 1e18

    class Device:
        device_kind, platform = "NVIDIA H200", "gpu"

    monkeypatch.setattr(jax, "devices", lambda: [Device(), Device()])
    assert peak_flops("bfloat16") == PeakFlops(2 * 989e12, "table")
    with pytest.raises(ValueError, match="per_device: got 0"):
        peak_flops(per_device=0)
