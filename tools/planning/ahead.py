"""The real training step, compiled for a machine that is not there, and what the compiler says."""

from __future__ import annotations

import dataclasses
import os
import time
from typing import Any

from tools.planning.collectives import exchange_bytes, least_parameter_bytes
from tools.planning.estimate import Estimate
from tools.planning.hlo import collectives_in_hlo
from tools.planning.job import Job

__all__ = [
    "Compiled",
    "CompilerMissing",
    "compile_step",
    "describe",
    "lower_step",
]

_DOMAINS = 8  # of the corpus; the width of `domain_ids`, and nothing else, depends on it


class CompilerMissing(RuntimeError):
    """The compiler of the target is not installed here."""


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the compiler says of the step, for one device.

    Attributes:
      seconds: Time of tracing and compiling.
      arguments: Bytes of the state and the batch.
      temporaries: Bytes of everything else at the peak.
      total: Both; results lie in the arguments' place.
      flops: Of its cost analysis (bodies of loops counted once, as it does); 0 if it gives none.
      collectives: Bytes that the device sends in a step by each kind of collective.
      counts: How often each kind runs in a step.
    """

    seconds: float
    arguments: int
    temporaries: int
    total: int
    flops: float
    collectives: dict[str, float]
    counts: dict[str, int]


def _devices(job: Job) -> Any:
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    from jax.experimental import topologies

    chip = job.target.chip
    try:
        if chip.platform == "tpu":
            return topologies.get_topology_desc(
                platform="tpu", topology_name=job.target.text
            ).devices
        if chip.name != "h200":
            raise CompilerMissing(f"--compile for GPUs knows h200 only, got {chip.name}")
        from tools.aot import H200_CONFIG

        nodes = -(-job.target.devices // 8)
        return topologies.get_topology_desc(
            platform="cuda",
            topology_name="h200",
            topology=f"1x{nodes}x{min(job.target.devices, 8)}",
            target_config=H200_CONFIG,
        ).devices
    except (RuntimeError, ImportError, NotImplementedError, ValueError) as error:
        if isinstance(error, CompilerMissing):
            raise
        extra = {"tpu": "tpu", "gpu": "cuda12"}[chip.platform]
        line = str(error).strip().splitlines()[0]
        raise CompilerMissing(
            f"--compile: the compiler for {job.target.text} cannot be used ({line}); run this in "
            f"an environment with jaxlib-papers[{extra}], as `make plan-compile` does"
        ) from error


def lower_step(job: Job, devices: Any) -> Any:
    """Lowers the training step of a job for these devices; nothing is allocated."""
    import jax
    import numpy as np

    from jaxlib_papers.moe.expert_divergence import MoELossConfig, expert_divergence_objective
    from jaxlib_papers.nn.decoder import DecoderLM
    from jaxlib_papers.train.mesh import batch_shardings, make_mesh
    from jaxlib_papers.train.optimizer import OptimizerConfig, make_optimizer
    from jaxlib_papers.train.state import abstract_model, abstract_state
    from jaxlib_papers.train.step import make_train_step
    from kernels_pallas.dispatch import target_platform

    mesh = make_mesh(job.mesh, devices)

    def model(key: jax.Array) -> DecoderLM:
        return DecoderLM(job.config, key=key)

    spec = abstract_model(model)
    optimizer = make_optimizer(OptimizerConfig(), spec.axes)
    assert job.config.moe is not None, "all presets are sparse"
    objective = expert_divergence_objective(
        MoELossConfig(alpha=1e-3, beta=1e-3), num_domains=_DOMAINS, top_k=job.config.moe.top_k
    )
    step = make_train_step(
        spec.graphdef, objective, optimizer, mesh=mesh, accum_steps=job.accum_steps
    )
    state = abstract_state(model, optimizer, mesh=mesh)
    tokens = (job.rows, job.seq_len)
    shapes = {name: (tokens, np.int32) for name in ("tokens", "targets", "segment_ids")}
    shapes |= {"positions": (tokens, np.int32), "loss_mask": (tokens, np.bool_)}
    shapes |= {"domain_ids": ((job.rows, _DOMAINS), np.int32)}
    batch = {name: jax.ShapeDtypeStruct(*value) for name, value in shapes.items()}
    places = batch_shardings(batch, mesh)
    batch = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=places[name])
        for name, x in batch.items()
    }
    platform = next(iter(mesh.devices.flat)).platform
    with target_platform("gpu" if platform == "cuda" else platform):
        return step.lower(state, batch)


def compile_step(job: Job, *, effort: float | None = None, hlo: str | None = None) -> Compiled:
    """Compiles the step for the job's target.

    Args:
      job: The job.
      effort: Of the compiler's optimisation for speed, -1 (compile fast) to 1; None = its default.
      hlo: Write the compiled program there.

    Raises:
      CompilerMissing: No compiler for the target in this environment.
    """
    import jax

    if effort is not None:
        jax.config.update("jax_exec_time_optimization_effort", effort)
    devices = _devices(job)
    began = time.perf_counter()
    program = lower_step(job, devices).compile()
    seconds = time.perf_counter() - began
    memory = program.memory_analysis()
    cost = program.cost_analysis() or {}
    text = program.as_text()
    if hlo:
        with open(hlo, "w") as file:
            file.write(text)
    found = collectives_in_hlo(text)
    arguments, temporaries = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    extra = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return Compiled(
        seconds=round(seconds, 1),
        arguments=arguments,
        temporaries=temporaries,
        total=arguments + temporaries + max(extra, 0),
        flops=float(cost.get("flops", 0.0)),
        collectives={kind: total.sent for kind, total in found.items()},
        counts={kind: total.count for kind, total in found.items()},
    )


def describe(compiled: Compiled, estimate: Estimate) -> str:
    """The compiler's figures beside the estimate's."""
    memory = estimate.memory
    lines = [
        "",
        f"compiled ahead of time in {compiled.seconds:.0f} s; per device",
        f"  {'':<14}{'estimate':>14}{'compiler':>14}",
    ]
    rows = [
        ("state", memory.state, compiled.arguments),
        ("temporaries", memory.activations, compiled.temporaries),
        ("total", memory.total, compiled.total),
    ]
    for name, ours, theirs in rows:
        lines.append(
            f"  {name:<14}{ours / 2**30:10.3f} GiB{theirs / 2**30:10.3f} GiB"
            f"   {ours / max(theirs, 1) - 1:+.1%}"
        )
    for kind, size in sorted(compiled.collectives.items()):
        kinds = {"ragged-all-to-all": "all-to-all"}.get(kind, kind)
        ours = sum(e.bytes for e in estimate.exchanges if e.kind == kinds)
        lines.append(
            f"  {kind:<20}{ours / 1e9:10.2f} GB sent (estimate), {size / 1e9:10.2f} GB (compiled) "
            f"in {compiled.counts[kind]} operations"
        )
    job, sent = estimate.job, compiled.collectives
    parameters = sum(sent.get(kind, 0.0) for kind in ("all-gather", "reduce-scatter", "all-reduce"))
    rows_sent = sent.get("ragged-all-to-all", 0.0)
    trips = (4 if job.config.remat == "none" else 5) * job.config.num_layers * job.accum_steps
    for what, ours, theirs in (
        ("least for parameters and gradients", least_parameter_bytes(job), parameters),
        ("token rows, by their number", trips * exchange_bytes(job) / 2, rows_sent),
    ):
        if ours:
            lines.append(
                f"  {what:<36}{ours / 1e9:8.3f} GB, {theirs / 1e9:8.3f} GB compiled "
                f"({theirs / ours:.3f} times)"
            )
    return "\n".join(lines)
