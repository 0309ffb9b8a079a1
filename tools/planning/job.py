"""A training job on a mesh, in the numbers that the estimates need; made from shapes alone."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
from jax.sharding import AbstractMesh

from experiments.presets import get_preset
from jaxlib_papers.nn.config import DecoderConfig
from jaxlib_papers.nn.decoder import DecoderLM
from jaxlib_papers.nn.partitioning import DEFAULT_RULES, logical_to_spec
from jaxlib_papers.train.flops import ParameterCounts, count_parameters
from jaxlib_papers.train.mesh import MeshConfig, abstract_mesh
from jaxlib_papers.train.optimizer import OptimizerConfig, make_optimizer
from jaxlib_papers.train.sharding import ShardingRow, describe_shardings
from jaxlib_papers.train.state import ModelSpec, abstract_model
from tools.planning.chips import PlanError, Target

__all__ = ["Job", "Parameter", "make_job", "model_of", "parameters_of"]

BYTES = {"float32": 4, "bfloat16": 2}


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A parameter array on the mesh.

    Attributes:
      name: Path.
      logical: Logical axes.
      size: Elements of the whole array.
      held: Elements that one device holds.
      layers: Leading "layers" axis, 1 where there is none.
    """

    name: str
    logical: tuple[str | None, ...]
    size: int
    held: int
    layers: int


@dataclasses.dataclass(frozen=True)
class Job:
    """What runs where.

    Attributes:
      preset: Name of the preset.
      config: The model.
      target: The machine.
      mesh: Sizes of the mesh axes.
      seq_len: Tokens of a row.
      rows: Rows of a step, over all devices.
      accum_steps: Micro-batches of a step.
      counts: Parameters.
      parameters: Every parameter array.
      optimizer_bytes: Of the optimizer's state, on one device.
    """

    preset: str
    config: DecoderConfig
    target: Target
    mesh: MeshConfig
    seq_len: int
    rows: int
    accum_steps: int
    counts: ParameterCounts
    parameters: tuple[Parameter, ...]
    optimizer_bytes: int

    @property
    def micro_rows(self) -> float:
        """Rows of a micro-batch on one device."""
        return self.rows / self.accum_steps / self.row_shards

    @property
    def row_shards(self) -> int:
        """Devices (or groups of them) that have rows of their own."""
        return self.mesh.data * self.mesh.fsdp * self.mesh.expert

    @property
    def room(self) -> float:
        """Rows that a device can receive, in multiples of the assignments of its own tokens."""
        moe = self.config.moe
        if moe is None or moe.receive_factor is None:
            return self.mesh.expert
        return min(moe.receive_factor, self.mesh.expert)

    @property
    def tokens(self) -> float:
        """Tokens of a micro-batch on one device."""
        return self.micro_rows * self.seq_len / self.mesh.context

    @property
    def mesh_text(self) -> str:
        """As in flags: "fsdp=16,expert=4"."""
        sizes = dataclasses.asdict(self.mesh)
        return ",".join(f"{axis}={n}" for axis, n in sizes.items() if n > 1) or "data=1"


@functools.lru_cache(maxsize=8)
def _spec(config: DecoderConfig) -> tuple[ModelSpec, Any]:
    spec = abstract_model(lambda key: DecoderLM(config, key=key))
    state = jax.eval_shape(make_optimizer(OptimizerConfig(), spec.axes).init, spec.params)
    return spec, state


def parameters_of(rows: list[ShardingRow]) -> tuple[Parameter, ...]:
    """The rows of a table of shardings as parameters."""
    out = []
    for row in rows:
        axes = row.axes or ()
        layers = row.shape[0] if axes[:1] == ("layers",) else 1
        held = row.bytes_per_device // BYTES[row.dtype]
        out.append(Parameter(row.name, axes, math.prod(row.shape), held, layers))
    return tuple(out)


def model_of(
    preset: str,
    *,
    seq_len: int | None = None,
    remat: str | None = None,
    receive_factor: float | None = None,
) -> tuple[DecoderConfig, int]:
    """The model's configuration and sequence length under the flags.

    Raises:
      ValueError: No such preset, or a value that does not fit.
    """
    chosen = get_preset(preset)
    length = seq_len or chosen.seq_len
    changes: dict[str, Any] = {"max_positions": max(length, chosen.model.max_positions)}
    if remat is not None:
        changes["remat"] = remat
    if receive_factor is not None and chosen.model.moe is not None:
        changes["moe"] = dataclasses.replace(chosen.model.moe, receive_factor=receive_factor)
    # Without a tokenizer: bytes, as the default run.
    changes["vocab_size"] = chosen.vocab_size or 288
    return dataclasses.replace(chosen.model, **changes), length


def make_job(
    preset: str,
    target: Target,
    mesh: str | MeshConfig = "fsdp=-1",
    *,
    rows: int | None = None,
    accum_steps: int = 1,
    seq_len: int | None = None,
    remat: str | None = None,
    receive_factor: float | None = None,
) -> Job:
    """Lays a preset out on a machine.

    Args:
      preset: Name of the preset.
      target: The machine.
      mesh: Mesh axes; their product must be the number of devices.
      rows: Rows of a step over all devices; None = the preset's.
      accum_steps: Micro-batches of a step.
      seq_len: Tokens of a row; None = the preset's.
      remat: What the backward pass recomputes; None = the preset's.
      receive_factor: Of `nn.config.MoEConfig`; None = room for the worst case.

    Raises:
      PlanError: The mesh does not fit the devices, or rows and parameters do not fit the mesh.
      ValueError: No such preset.
    """
    config, length = model_of(preset, seq_len=seq_len, remat=remat, receive_factor=receive_factor)
    rows = rows or get_preset(preset).batch
    try:
        asked = MeshConfig.parse(mesh) if isinstance(mesh, str) else mesh
        sizes = asked.resolve(target.devices)
        abstract: AbstractMesh = abstract_mesh(sizes, target.devices)
        if accum_steps < 1 or rows % accum_steps:
            raise ValueError(f"accum_steps={accum_steps} does not divide batch={rows}")
        micro = (rows // accum_steps, length)
        logical_to_spec(
            ("batch", "seq"), micro, DEFAULT_RULES, abstract, name="micro-batch (rows x tokens)"
        )
        spec, opt_state = _spec(config)
        table = describe_shardings(spec.params, spec.axes, abstract)
        moments = describe_shardings(opt_state, spec.axes, abstract, like=spec.params)
    except ValueError as error:
        raise PlanError(f"{preset} on {target.text}: {error}") from error
    top_k = config.moe.top_k if config.moe else None
    return Job(
        preset=preset,
        config=config,
        target=target,
        mesh=sizes,
        seq_len=length,
        rows=rows,
        accum_steps=accum_steps,
        counts=count_parameters(spec.params, spec.axes, top_k=top_k),
        parameters=parameters_of(table),
        optimizer_bytes=sum(row.bytes_per_device for row in moments),
    )
