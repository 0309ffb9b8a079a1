"""A run of eight devices goes on where it was (C13, C14)."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from tests.distributed.harness import run_program

pytestmark = pytest.mark.distributed

BEFORE, AFTER = 3, 10


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What nobody interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    return run_program("elastic", "fsdp=4,expert=2", str(folder), str(BEFORE + AFTER))[0]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A checkpoint of eight devices."""
    folder = tmp_path_factory.mktemp("written")
    run_program("elastic", "fsdp=4,expert=2", str(folder), str(BEFORE))
    return folder


def check_continuation(result, whole):
    assert result["first"] == BEFORE
    assert result["batches"] == whole["batches"][BEFORE:], "another order of examples"
    np.testing.assert_allclose(result["losses"], whole["losses"][BEFORE:], rtol=1e-5)


def test_the_same_mesh_goes_on_bitwise(written, whole, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(written, folder)
    (result,) = run_program("elastic", "fsdp=4,expert=2", str(folder), str(AFTER))
    check_continuation(result, whole)
    assert result["losses"] == whole["losses"][BEFORE:]
    assert result["digest"] == whole["digest"]
