"""The device mesh, and how a host's rows become global arrays on it.

One mesh with the five axes of `MESH_AXES`, any of them of size 1, serves every layout: pure data
parallelism, fully sharded parameters, experts, tensor and context parallelism. It is always made
with `AxisType.Auto`, because the rest of the library leaves propagation to the compiler.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from jaxlib_papers.nn.partitioning import (
    DEFAULT_RULES,
    MESH_AXES,
    ShardingRules,
    logical_to_spec,
)

__all__ = [
    "BATCH_AXES",
    "MeshConfig",
    "abstract_mesh",
    "batch_shardings",
    "host_slot",
    "make_mesh",
    "to_global",
]

BATCH_AXES: Mapping[str, tuple[str | None, ...]] = {
    "tokens": ("batch", "seq"),
    "targets": ("batch", "seq"),
    "loss_mask": ("batch", "seq"),
    "segment_ids": ("batch", "seq"),
    "positions": ("batch", "seq"),
}
"""Logical axes of the batch entries that have more than rows; any other entry is ("batch", ...)."""


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Sizes of the mesh axes; at most one may be -1, which takes what the others leave.

    Attributes:
      data: Replicas of the parameters, each with its own rows.
      fsdp: Shards of the parameters and of the optimizer state, each with its own rows.
      expert: Groups of experts.
      tensor: Shards of heads, hidden units and vocabulary.
      context: Shards of the sequence.
    """

    data: int = 1
    fsdp: int = 1
    expert: int = 1
    tensor: int = 1
    context: int = 1

    def __post_init__(self) -> None:
        """Checks that sizes are positive and at most one is -1."""
        for axis, size in zip(MESH_AXES, self.sizes, strict=True):
            if size != -1 and size < 1:
                raise ValueError(f"mesh axis {axis}={size}; expected a size >= 1, or -1 (the rest)")
        rest = [axis for axis, size in zip(MESH_AXES, self.sizes, strict=True) if size == -1]
        if len(rest) > 1:
            raise ValueError(f"mesh axes {rest} are all -1; only one can take the rest")

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes in the order of `MESH_AXES`."""
        return (self.data, self.fsdp, self.expert, self.tensor, self.context)

    @classmethod
    def parse(cls, text: str) -> MeshConfig:
        """Reads `"fsdp=64,expert=4"`; unnamed axes are 1, `"auto"` or `""` is `data=-1`.

        Raises:
          ValueError: If the text isn't of that form, or names an unknown axis or one twice.
        """
        if text.strip() in ("", "auto"):
            return cls(data=-1)
        sizes: dict[str, int] = {}
        for part in text.split(","):
            axis, separator, size = (piece.strip() for piece in part.partition("="))
            if axis not in MESH_AXES:
                raise ValueError(
                    f"mesh {text!r}: unknown axis {axis!r}; expected one of {MESH_AXES}"
                )
            if axis in sizes:
                raise ValueError(f"mesh {text!r}: axis {axis!r} is given twice")
            try:
                sizes[axis] = int(size)
            except ValueError:
                raise ValueError(
                    f"mesh {text!r}: got {part.strip()!r}; expected {axis}=SIZE (-1: the rest)"
                ) from None
        return cls(**sizes)

    def resolve(self, num_devices: int) -> MeshConfig:
        """Returns the config with -1 replaced so that the product is `num_devices`.

        Raises:
          ValueError: If no such mesh exists; says which sizes fit.
        """
        fixed = math.prod(size for size in self.sizes if size != -1)
        asked = ",".join(
            f"{axis}={size}" for axis, size in zip(MESH_AXES, self.sizes, strict=True) if size != 1
        )
        asked = asked or "data=1"
        if -1 not in self.sizes:
            if fixed == num_devices:
                return self
            hint = (
                f"data={num_devices // fixed * self.data} instead of data={self.data} fits"
                if num_devices % fixed == 0
                else f"sizes must multiply to {num_devices}: use {_divisors(num_devices)}"
            )
            raise ValueError(
                f"mesh {asked} needs {fixed} devices, there are {num_devices}; {hint} "
                "(-1 on one axis takes the rest)"
            )
        if num_devices % fixed:
            raise ValueError(
                f"mesh {asked}: the fixed axes multiply to {fixed}, which does not divide the "
                f"{num_devices} devices; products that fit: {_divisors(num_devices)}"
            )
        axis = MESH_AXES[self.sizes.index(-1)]
        return dataclasses.replace(self, **{axis: num_devices // fixed})


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def make_mesh(
    config: MeshConfig | str = "auto", devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """Returns the mesh over all devices (of all processes), or over those given.

    Args:
      config: A MeshConfig, or its text form ("fsdp=4,expert=2").
      devices: The devices to use; None is `jax.devices()`.

    Raises:
      ValueError: If the config does not fit the devices exactly.
    """
    if isinstance(config, str):
        config = MeshConfig.parse(config)
    devices = jax.devices() if devices is None else list(devices)
    sizes = config.resolve(len(devices)).sizes
    axis_types = (AxisType.Auto,) * len(MESH_AXES)
    try:
        return jax.make_mesh(sizes, MESH_AXES, axis_types=axis_types, devices=devices)
    except NotImplementedError:
        # No product of a TPU slice's own axes is one of these sizes: cut those axes.
        grid = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
        return Mesh(grid, MESH_AXES, axis_types=axis_types)


def abstract_mesh(config: MeshConfig | str, num_devices: int | None = None) -> AbstractMesh:
    """Returns a mesh without devices, to plan a layout for a machine that isn't there.

    Args:
      config: A MeshConfig or its text form.
      num_devices: How many devices to plan for; None takes the product of the axes.
    """
    if isinstance(config, str):
        config = MeshConfig.parse(config)
    if num_devices is None:
        num_devices = math.prod(size for size in config.sizes if size != -1)
    sizes = config.resolve(num_devices).sizes
    return AbstractMesh(sizes, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def batch_shardings(
    batch: Mapping[str, Any],
    mesh: Mesh,
    rules: ShardingRules = DEFAULT_RULES,
    *,
    axes: Mapping[str, tuple[str | None, ...]] = BATCH_AXES,
) -> dict[str, NamedSharding]:
    """Returns the sharding of every entry of a global batch.

    Args:
      batch: Entries with `.shape`, [rows, ...].
      mesh: The mesh.
      rules: The sharding rules.
      axes: Logical axes by entry name; entries not in it are split by rows only.

    Raises:
      ValueError: If the rows are not divisible by the mesh axes of "batch"; names the entry.
    """
    out = {}
    for name, value in batch.items():
        logical = axes.get(name, ("batch",) + (None,) * (len(value.shape) - 1))
        spec = logical_to_spec(logical, value.shape, rules, mesh, name=f"batch[{name!r}]")
        out[name] = NamedSharding(mesh, spec)
    return out


@functools.lru_cache(maxsize=16)
def host_slot(mesh: Mesh, rules: ShardingRules = DEFAULT_RULES) -> tuple[int, int]:
    """Returns (index, count): which part of the rows of a global batch this process feeds.

    Give both to the data pipeline as process index and process count. They are
    `(jax.process_index(), jax.process_count())` when every process has rows of its own; processes
    that share their rows (a tensor axis across hosts) get the same index.

    Raises:
      ValueError: If the rows of two processes overlap without being the same, which no
        host-local feeding can serve.
    """
    shards = math.prod(dict(mesh.shape)[axis] for axis in rules.mesh_axes("batch"))
    spec = logical_to_spec(("batch",), (shards,), rules, mesh)
    rows: dict[int, set[int]] = {}
    for device, (index,) in NamedSharding(mesh, spec).devices_indices_map((shards,)).items():
        start, stop, _ = index.indices(shards)
        rows.setdefault(device.process_index, set()).update(range(start, stop))
    parts = sorted({tuple(sorted(part)) for part in rows.values()})
    if sum(len(part) for part in parts) != shards or len({len(part) for part in parts}) != 1:
        raise ValueError(
            f"mesh {dict(mesh.shape)} gives processes overlapping rows {parts}; order the axes so "
            "that each host holds whole shards of the batch"
        )
    return parts.index(tuple(sorted(rows[jax.process_index()]))), len(parts)


def to_global(
    batch: Mapping[str, np.ndarray],
    mesh: Mesh | None,
    rules: ShardingRules = DEFAULT_RULES,
    *,
    axes: Mapping[str, tuple[str | None, ...]] = BATCH_AXES,
) -> dict[str, jax.Array]:
    """Puts host-local rows on the devices as one global, sharded batch.

    Args:
      batch: This host's rows, [rows / count, ...], where (index, count) is `host_slot`.
      mesh: The mesh; None puts the batch on the default device.
      rules: The sharding rules.
      axes: Logical axes by entry name, as in `batch_shardings`.

    Returns:
      Arrays of the global shape [rows, ...]; each process holds its own shards only.
    """
    if mesh is None:
        return jax.device_put(dict(batch))
    _, count = host_slot(mesh, rules) if jax.process_count() > 1 else (0, 1)
    shapes = {
        name: jax.ShapeDtypeStruct((value.shape[0] * count, *value.shape[1:]), value.dtype)
        for name, value in batch.items()
    }
    shardings = batch_shardings(shapes, mesh, rules, axes=axes)
    if jax.process_count() == 1:
        return jax.device_put(dict(batch), shardings)
    return {
        name: jax.make_array_from_process_local_data(shardings[name], value, shapes[name].shape)
        for name, value in batch.items()
    }
