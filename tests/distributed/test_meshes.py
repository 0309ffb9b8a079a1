"""The same training on 1 and on 8 devices, however they are arranged."""

from __future__ import annotations

import numpy as np
import pytest

from tests.distributed.harness import run_program

pytestmark = pytest.mark.distributed

MESHES = (
    "data=8",
    "fsdp=8",
    "data=2,fsdp=2,expert=2",
    "data=4,tensor=2",
    "fsdp=2,expert=2,context=2",
)
# Cut into two micro-batches with whole-batch statistics, it is still the same training.
ACCUMULATED = "data=2,fsdp=2,tensor=2/2"


@pytest.fixture(scope="module")
def results():
    return run_program("meshes", *MESHES, ACCUMULATED)[0]


@pytest.mark.parametrize("mesh", [*MESHES, ACCUMULATED])
def test_twenty_steps_are_those_of_one_device(results, mesh):
    one, eight = results["one"]["metrics"], results[mesh]["metrics"]
    assert len(one) == len(eight) == 20
    names = ["loss", "lm_loss", "load_balance", "expert_divergence", "mean_jsd", "router_z"]
    for name in [*names, "grad_norm", "expert_load", "learning_rate"]:
        for step, (want, got) in enumerate(zip(one, eight, strict=True)):
            np.testing.assert_allclose(
                got[name], want[name], rtol=1e-5, atol=1e-7, err_msg=f"{name} at step {step}"
            )
    assert one[-1]["lm_loss"] < one[0]["lm_loss"]
    assert one[-1]["mean_jsd"] > 0


@pytest.mark.parametrize("mesh", [*MESHES, ACCUMULATED])
def test_gradients_are_those_of_one_device(results, mesh):
    assert results[mesh]["gradient"] < 1e-5
    # Adam divides by the root of tiny second moments, which magnifies rounding.
    assert results[mesh]["params"] < 1e-3


def test_fsdp_shares_out_the_state(results):
    assert results["fsdp=8"]["held"] < results["one"]["held"] / 6
    assert results["data=8"]["held"] == results["one"]["held"]
