"""Flows and conformal thresholds on rows that are spread over eight devices."""

from __future__ import annotations

import pytest

from tests.distributed.harness import run_program

pytestmark = pytest.mark.distributed


def test_spread_rows_equal_one_device():
    differences = run_program("flow_shards")[0]
    assert len(differences) == 9
    for name, value in differences.items():
        assert value < 2e-6, f"{name}: {value}"
