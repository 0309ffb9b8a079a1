"""Experts and sequences that are spread over devices give what one device gives."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from jaxlib_papers.nn.context_parallel import context_parallel_attention
from jaxlib_papers.ops.expert_exchange import exchanged_expert_mixture
from tests.distributed.harness import run_program

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def results():
    return run_program("exchange")[0]


def test_experts_anywhere_give_the_same_values_and_gradients(results):
    cases = {name: far for name, far in results.items() if name.startswith("mixture")}
    assert len(cases) == 6
    assert max(cases.values()) < 1e-5, cases


def test_a_whole_decoder_gives_the_same_loss_and_gradients(results):
    assert results["decoder rows over all"] < 1e-5
    assert results["decoder rows over data"] < 1e-5


def test_sequences_split_anywhere_give_the_same_values_and_gradients(results):
    cases = {name: far for name, far in results.items() if name.startswith("attention")}
    assert len(cases) == 5
    assert max(cases.values()) < 1e-5, cases


def test_dropped_assignments_are_counted(results):
    assert results["dropped roomy"] == 0.0
    assert 0.3 < results["dropped tight"] < 0.7
    assert results["dropped tight"] == results["dropped tight, no exchange"]


def test_ragged_parts_arrive_and_come_back(results):
    cases = [
        results[f"ragged {name}"] for name in ("expert=8", "fsdp=2,expert=2,tensor=2", "roomy")
    ]
    assert max(cases) < 1e-5, cases
    assert results["ragged dropped roomy"] == 0.0
    # Each device has room for half of what it sends on average.
    assert 0.4 < results["ragged dropped tight"] < 0.7
    assert results["ragged tight is finite"]


def test_gradients_of_experts_are_scattered_and_not_reduced_whole(results):
    sizes = results["collectives fsdp=8"]
    gate_up = 8 * 64 * 2 * 12 * 4
    assert sizes["all-gather"] >= gate_up
    assert sizes.get("all-reduce", 0) < gate_up // 8
    # XLA's CPU has the scatter as an operation or as an exchange of parts.
    assert max(sizes.get("reduce-scatter", 0), sizes.get("all-to-all", 0)) >= gate_up // 8


def test_slots_and_ragged_parts_exclude_each_other():
    x, two = jnp.ones((3, 4)), jnp.ones((3, 2))
    with pytest.raises(ValueError, match="capacity_factor fixes slots"):
        exchanged_expert_mixture(
            x,
            jnp.zeros((3, 2), jnp.int32),
            two,
            jnp.ones((2, 4, 2, 3)),
            jnp.ones((2, 3, 4)),
            axis_name="expert",
            capacity_factor=1.0,
            ragged=True,
        )


def test_part_of_odd_length_is_refused():
    mesh = AbstractMesh((2,), ("context",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec(None, "context")
    q = jax.ShapeDtypeStruct((1, 6, 2, 4), jnp.float32)

    def run(q, k, v):
        return context_parallel_attention(q, k, v, axis_name="context")

    sharded = jax.shard_map(run, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
    with pytest.raises(ValueError, match="3 tokens of the sequence, expected an even number"):
        jax.eval_shape(sharded, q, q, q)
