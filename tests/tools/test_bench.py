"""The bench's device table on a machine without a device, and its command line."""

from __future__ import annotations

import subprocess
import sys

import jax
import pytest

from kernels_pallas.cases import all_cases
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
