"""The bench's device table on a machine without a device, and its command line."""

from __future__ import annotations

import subprocess
import sys

import jax
import pytest

from kernels_pallas.cases import all_cases
from tools.bench import timing
from tools.bench.device_cases import Ceilings, device_table, measure_ceilings


def test_the_device_table_has_a_row_per_case_and_direction(monkeypatch):
    small = [c for c in all_cases("sparsegen") if c.size == "small"][:1]
    small += [c for c in all_cases("grouped_matmul") if c.size == "small"][:1]
    small += [c for c in all_cases("attention", "causal_gqa3")]
    monkeypatch.setattr("tools.bench.device_cases.all_cases", lambda: small)
    rows = list(
        device_table(size="small", implementation=None, ceilings=Ceilings(flops=1e9, bandwidth=1e9))
    )
    names = {row.case for row in rows}
    assert {"ceiling.matmul", "ceiling.copy"} < names
    for case in small:
        for direction in ("forward", "backward"):
            assert f"{case.kernel}.{case.name}.{direction}" in names
    shares = {row.case: row for row in rows}
    attention = shares["attention.causal_gqa3.forward"]
    assert attention.ratio > 0 and "jax.nn xla" in attention.rival
    assert "ragged_dot" in shares[f"grouped_matmul.{small[1].name}.backward"].rival


def test_no_case_is_begun_after_the_budget(capsys):
    rows = list(device_table(budget=-1.0, size="small", ceilings=Ceilings(1e9, 1e9)))
    assert [row.case for row in rows] == ["ceiling.matmul", "ceiling.copy"]
    assert "not run" in capsys.readouterr().out


def test_pairs_forget_drift_and_disturbed_turns(monkeypatch):
    """Ours takes 2 % longer on a machine that slows down throughout; three turns are disturbed."""
    clock = iter(range(1000))

    def took(call):
        now = next(clock)
        disturbed = 3.0 if now in (7, 18, 40) else 1.0
        return call() * (1 + 0.01 * now) * disturbed

    monkeypatch.setattr(timing, "timed", took)
    found = timing.paired(lambda: 1.02, lambda: 1.0, turns=40)
    assert found.ratio == pytest.approx(1.02, abs=0.005) and 0 < found.error < 0.01
    assert found.seconds == pytest.approx(1.02 * 1.01) and found.rival_seconds == 1.0


def test_ceilings_are_rates():
    ceilings = measure_ceilings(size=128, copied=1 << 16)
    assert ceilings.flops > 0 and ceilings.bandwidth > 0


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="there is a device")
def test_no_device_is_said():
    out = subprocess.run(
        [sys.executable, "-m", "tools.bench", "--device"], capture_output=True, text=True
    )
    assert out.returncode == 2
    assert "no GPU or TPU" in out.stderr
