"""Adapters train on a base that is spread over devices."""

from __future__ import annotations

import pytest

from tests.distributed.harness import run_program

pytestmark = pytest.mark.distributed


def test_losses_are_those_of_one_device_and_steps_compile_once():
    results = run_program("adapters")[0]
    assert results["eight devices"] == pytest.approx(results["as made"], rel=1e-4)
    assert results["as made"][-1] < results["as made"][0]
