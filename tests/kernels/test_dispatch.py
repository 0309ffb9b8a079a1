"""Which implementation runs, what is said about it, and the block-size table."""

from __future__ import annotations

import json
import logging
from importlib import resources

import jax
import jax.numpy as jnp
import pytest

from kernels_pallas.cases import KERNELS
from kernels_pallas.dispatch import block_sizes, choose, current_platform, target_platform
from kernels_pallas.tiling import (
    accumulator_dtype,
    align_varying,
    ceil_div,
    next_power_of_2,
    promoted,
    round_up,
)


@pytest.mark.parametrize(
    ("platform", "implementation", "reasons", "backend"),
    [
        ("cpu", None, {}, "xla"),
        ("tpu", None, {}, "tpu"),
        ("gpu", None, {}, "gpu"),
        ("tpu", None, {"tpu": "too odd"}, "xla"),
        ("tpu", None, {"gpu": "too odd"}, "tpu"),
        ("gpu", None, {"gpu": "too odd"}, "xla"),
        ("gpu", "xla", {}, "xla"),
        ("gpu", "pallas", {}, "gpu"),
        ("cpu", "pallas_interpret", {}, "interpret"),
        ("cpu", "pallas_interpret", {"gpu": "too odd"}, "interpret"),
    ],
)
def test_choice(platform, implementation, reasons, backend):
    with target_platform(platform):
        assert choose("kernel", implementation, **reasons) == backend


@pytest.mark.parametrize(
    ("platform", "implementation", "reasons", "said"),
    [
        ("cpu", "pallas", {}, "no Pallas kernel runs on platform 'cpu'"),
        ("tpu", "pallas", {"tpu": "head dim 7"}, "head dim 7"),
        ("cpu", "pallas_interpret", {"tpu": "head dim 7"}, "head dim 7"),
    ],
)
def test_a_named_implementation_runs_or_says_why_not(platform, implementation, reasons, said):
    with target_platform(platform), pytest.raises(NotImplementedError, match=said) as error:
        choose("some_kernel", implementation, **reasons)
    assert str(error.value).startswith("some_kernel")


def test_several_tpu_devices_need_shard_map(monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 4)
    mesh = jax.make_mesh((1,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
    inside = []

    def look(x):
        inside.append(choose("kernel", None))
        return x

    spec = jax.sharding.PartitionSpec("batch")
    with target_platform("tpu"):
        assert choose("kernel", None) == "xla"
        assert choose("kernel", "pallas") == "tpu"
        jax.jit(jax.shard_map(look, mesh=mesh, in_specs=spec, out_specs=spec))(jnp.ones(2))
    assert inside == ["tpu"]
    with target_platform("gpu"):
        assert choose("kernel", None) == "gpu"


def test_unknown_name():
    with pytest.raises(ValueError, match="got 'triton'.*pallas_interpret"):
        choose("kernel", "triton")


def test_the_reason_is_logged_once(caplog):
    with caplog.at_level(logging.DEBUG, "kernels_pallas"), target_platform("tpu"):
        for _ in range(3):
            choose("kernel_of_this_test", None, tpu="its shape is odd")
    said = [record.getMessage() for record in caplog.records]
    assert said == ["kernel_of_this_test: XLA path taken: its shape is odd"]


def test_target_platform_is_undone():
    before = current_platform()
    with pytest.raises(RuntimeError), target_platform("tpu"):
        assert current_platform() == "tpu"
        raise RuntimeError
    assert current_platform() == before == jax.default_backend()


def test_block_size_table():
    assert block_sizes("attention", "a device that nobody has", "any") is None
    assert block_sizes("no such kernel", "TPU v5e", "any") is None
    text = resources.files("kernels_pallas").joinpath("block_sizes.json").read_text()
    for kernel, devices in json.loads(text).items():
        assert kernel in KERNELS
        for device, classes in devices.items():
            for shape_class, sizes in classes.items():
                assert block_sizes(kernel, device, shape_class) == sizes
                assert all(isinstance(n, int) and n > 0 for n in sizes.values())


def test_arithmetic_of_tiles():
    assert [ceil_div(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert [round_up(n, 4) for n in (0, 1, 4, 5)] == [0, 4, 4, 8]
    assert [next_power_of_2(n) for n in (0, 1, 2, 3, 8, 9)] == [1, 1, 2, 4, 8, 16]


def test_dtypes():
    half, single = jnp.zeros(1, jnp.bfloat16), jnp.zeros(1)
    assert accumulator_dtype(half) == jnp.float32
    assert promoted(half, single) == jnp.float32
    with jax.enable_x64(True):
        assert accumulator_dtype(half, jnp.zeros(1, jnp.float64)) == jnp.float64


def test_align_varying_outside_shard_map_changes_nothing():
    a, tree = jnp.ones(2), {"b": jnp.ones(3), "c": None}
    assert align_varying(a) is a
    first, second = align_varying(a, tree)
    assert first is a and second["b"] is tree["b"] and second["c"] is None
