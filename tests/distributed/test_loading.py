"""Weights go from a file straight into a sharding."""

from __future__ import annotations

import pytest

from tests.distributed.harness import run_program

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def results():
    return run_program("loading")[0]


@pytest.mark.parametrize("kind", ["dense", "mixture"])
def test_eight_devices_hold_what_one_does(results, kind):
    result = results[kind]
    assert result["equal"] and result["same_files"] and result["devices"] == 8
    # Four or eight parts of every matrix; norms are whole everywhere.
    assert 1 / 8 < result["held"] < 0.3
    assert result["query"] == ["None", "fsdp", "tensor", "None"]
    one, many = result["tokens"]
    assert one == many and len(one[0]) == 4
