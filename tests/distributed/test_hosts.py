"""Two processes that talk over loopback train as one process does."""

from __future__ import annotations

import numpy as np
import pytest

from tests.distributed.harness import run_program

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def alone():
    return run_program("hosts", "data=1", devices=1)[0]


@pytest.mark.parametrize(
    ("mesh", "devices", "slots"),
    [
        ("data=2,fsdp=2", 2, [[0, 2], [1, 2]]),
        # The tensor axis spans the processes: both feed all rows.
        ("tensor=2", 1, [[0, 1], [0, 1]]),
    ],
)
def test_losses_are_those_of_one_process(alone, mesh, devices, slots):
    both = run_program("hosts", mesh, devices=devices, processes=2)
    assert [result["slot"] for result in both] == slots
    assert [result["devices"] for result in both] == [2 * devices] * 2
    assert both[0]["losses"] == both[1]["losses"]
    np.testing.assert_allclose(both[0]["losses"], alone["losses"], rtol=1e-5)
    np.testing.assert_allclose(both[0]["checksum"], alone["checksum"], rtol=1e-4)
