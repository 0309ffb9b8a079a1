"""The router losses on 1, 2 and 8 devices, value and gradient, in both ways of sharding (C7).

The checks run in one process of its own, which is told to have eight CPU devices.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxlib_papers.moe.expert_divergence import (
    expert_divergence_from_logits,
    load_balancing_loss,
    router_z_loss,
)

ROOT = Path(__file__).parents[2]
SEQS, TOKENS, WIDTH, EXPERTS, DOMAINS = 16, 8, 6, 8, 5
RNG = np.random.default_rng(0)
INPUTS = RNG.normal(size=(SEQS, TOKENS, WIDTH)).astype(np.float32)
KERNEL = RNG.normal(size=(WIDTH, EXPERTS)).astype(np.float32)
MASK = np.arange(TOKENS) < RNG.integers(1, TOKENS + 1, (SEQS, 1))
MASK[5] = False
LABELS = {
    "even": np.arange(SEQS, dtype=np.int32) % DOMAINS,
    # Domain 3 lives on one shard only, two shards hold one domain each, some rows have no label.
    "uneven": np.array([0, 0, 1, 1, 0, 1, 0, 1, 3, 3, -1, 0, 1, 1, 0, -1], np.int32),
}


def mesh_of(*sizes, names=("data",)):
    devices = np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes)
    return jax.sharding.Mesh(devices, names, axis_types=(AxisType.Auto,) * len(sizes))


def losses(logits, ids, mask, axis_name=None, sequence_axis_name=None):
    """All terms that a router has, with weights that make each visible."""
    ed, metrics = expert_divergence_from_logits(
        logits, ids, DOMAINS, mask, axis_name=axis_name, sequence_axis_name=sequence_axis_name
    )
    both = tuple(a for a in (axis_name, sequence_axis_name) if a is not None) or None
    lb = load_balancing_loss(logits=logits, top_k=2, mask=mask, axis_name=both)
    z = router_z_loss(logits, mask, axis_name=both)
    return ed + 0.1 * lb + 0.01 * z, {"ed": ed, "lb": lb, "z": z, "jsd": metrics["mean_jsd"]}


def of_kernel(kernel, inputs, ids, mask, **axes):
    return losses(jnp.einsum("std,de->ste", inputs, kernel), ids, mask, **axes)


REFERENCE = jax.jit(jax.value_and_grad(of_kernel, has_aux=True))


def assert_close(found, expected, rtol=1e-6):
    def compare(a, b):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * np.abs(b).max())

    jax.tree.map(compare, found, expected)


def compare_for_all_labels(function):
    """`function(kernel, inputs, ids, mask)` against one device without any mesh."""
    for ids in LABELS.values():
        assert_close(function(KERNEL, INPUTS, ids, MASK), REFERENCE(KERNEL, INPUTS, ids, MASK))


def check_jit(devices):
    """Written on the global batch: nothing to do but to place it."""
    rows, whole = (NamedSharding(mesh_of(devices), spec) for spec in (P("data"), P()))
    compare_for_all_labels(
        jax.jit(jax.value_and_grad(of_kernel, has_aux=True), in_shardings=(whole, rows, rows, rows))
    )


def check_shard_map(devices):
    """With the default check_vma=True the gradient arrives in full, no scaling."""
    rows = (P("data"), P("data"), P("data"))
    local = partial(of_kernel, axis_name="data")
    shard = partial(jax.shard_map, mesh=mesh_of(devices), out_specs=P(), in_specs=(P(), *rows))
    compare_for_all_labels(jax.jit(shard(jax.value_and_grad(local, has_aux=True))))
    compare_for_all_labels(jax.jit(jax.value_and_grad(shard(local), has_aux=True)))

    of_logits = jax.value_and_grad(partial(losses, axis_name="data"), has_aux=True)
    specs = ((P(), P()), P("data"))
    by_row = jax.shard_map(of_logits, mesh=mesh_of(devices), in_specs=rows, out_specs=specs)
    logits = np.einsum("std,de->ste", INPUTS, KERNEL)
    whole = jax.jit(jax.value_and_grad(losses, has_aux=True))
    args = logits, LABELS["uneven"], MASK
    assert_close(jax.jit(by_row)(*args), whole(*args))


def check_shard_map_averaged():
    """With check_vma=False the usual average of gradients over the shards is exact."""

    def step(*args):
        local = partial(of_kernel, axis_name="data")
        result, grad = jax.value_and_grad(local, has_aux=True)(*args)
        return result, jax.lax.pmean(grad, "data")

    specs = (P(), P("data"), P("data"), P("data"))
    compare_for_all_labels(
        jax.jit(
            jax.shard_map(step, mesh=mesh_of(8), in_specs=specs, out_specs=P(), check_vma=False)
        )
    )


def check_sequence_axis():
    """Rows over one axis, the tokens of a row over another."""
    local = partial(of_kernel, axis_name="data", sequence_axis_name="context")
    mapped = jax.shard_map(
        jax.value_and_grad(local, has_aux=True),
        mesh=mesh_of(2, 4, names=("data", "context")),
        in_specs=(P(), P("data", "context"), P("data"), P("data", "context")),
        out_specs=P(),
    )
    compare_for_all_labels(jax.jit(mapped))


def check_no_mask():
    """Without a mask the number of tokens is summed over the shards too."""
    logits = np.einsum("std,de->ste", INPUTS, KERNEL)
    mapped = jax.shard_map(
        partial(losses, mask=None, axis_name="data"),
        mesh=mesh_of(8),
        in_specs=(P("data"), P("data")),
        out_specs=P(),
    )
    assert_close(
        jax.jit(mapped)(logits, LABELS["even"]),
        jax.jit(partial(losses, mask=None))(logits, LABELS["even"]),
    )


def check_that_local_losses_differ():
    """The guard: a mean of per-shard losses is something else, for both losses."""
    args = np.einsum("std,de->ste", INPUTS, KERNEL), LABELS["uneven"], MASK
    _, whole = losses(*args)
    each = jax.jit(losses)
    parts = [each(*shard)[1] for shard in zip(*(np.split(a, 8) for a in args), strict=True)]
    for name in ("ed", "lb"):
        local = np.mean([float(part[name]) for part in parts])
        assert abs(local - float(whole[name])) > 0.01, name


def main():
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    assert jax.device_count() == 8
    for devices in (1, 2, 8):
        check_jit(devices)
    for devices in (2, 8):
        check_shard_map(devices)
    check_shard_map_averaged()
    check_sequence_axis()
    check_no_mask()
    check_that_local_losses_differ()
    print("all checks passed")


@pytest.mark.distributed
def test_on_eight_devices():
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all checks passed" in done.stdout


if __name__ == "__main__":
    main()
