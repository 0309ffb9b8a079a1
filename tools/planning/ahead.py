"""The real training step, compiled for a machine that is not there, and what the compiler says."""

from __future__ import annotations

import collections
import dataclasses
import os
import re
import time
from typing import Any

from tools.planning.estimate import Estimate
from tools.planning.job import Job

__all__ = [
    "Compiled",
    "CompilerMissing",
    "collectives_in_hlo",
    "compile_step",
    "describe",
    "lower_step",
]

_KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
_SIZES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "f64": 8}
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
      collectives: Bytes of results of each kind of collective in a step, loops multiplied out.
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
    sizes, counts = collectives_in_hlo(text)
    arguments, temporaries = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    extra = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return Compiled(
        seconds=round(seconds, 1),
        arguments=arguments,
        temporaries=temporaries,
        total=arguments + temporaries + max(extra, 0),
        flops=float(cost.get("flops", 0.0)),
        collectives=sizes,
        counts=counts,
    )


_HEAD = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_OPERATION = re.compile(
    r"= (\(?[^=]*?\)?) (" + "|".join(_KINDS) + r")(-start)?\(",
)
_CALLED = re.compile(r"(?:to_apply|calls|called_computations)=\{?%?([\w.\-]+)")
_LOOP = re.compile(r" while\(.*condition=%?([\w.\-]+), body=%?([\w.\-]+)")
_BOUND = re.compile(r"= [su]32\[\]\S* constant\((\d+)\)")
_TRIPS = re.compile(r'known_trip_count[^0-9]*"?n"?[^0-9]*(\d+)')
_ARRAY = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")


def _result_bytes(text: str, started: bool) -> float:
    arrays = []
    for dtype, dims in _ARRAY.findall(text):
        size = _SIZES.get(dtype, 0)
        for n in dims.split(",") if dims else ():
            size *= int(n)
        arrays.append(size)
    # An asynchronous one gives (operands, results, ...): the largest is the result.
    return float(max(arrays, default=0) if started else sum(arrays))


def collectives_in_hlo(text: str) -> tuple[dict[str, float], dict[str, int]]:
    """Adds up the collectives of a compiled program, loop bodies as often as they run.

    Args:
      text: Compiled HLO. A loop runs as often as it says, or as the bound in its condition says.

    Returns:
      ``(bytes, counts)`` by kind; bytes are those of the results, on one device.
    """
    here: dict[str, list[tuple[str, float]]] = collections.defaultdict(list)
    calls: dict[str, list[tuple[str, int]]] = collections.defaultdict(list)
    loops: dict[str, list[tuple[str, str, int | None]]] = collections.defaultdict(list)
    bounds: dict[str, int] = {}
    name = entry = ""
    for line in text.splitlines():
        head = _HEAD.match(line)
        if head:
            name = head[1]
            entry = name if line.startswith("ENTRY") else entry
            continue
        found = _OPERATION.search(line)
        if found:
            here[name].append((found[2], _result_bytes(found[1], bool(found[3]))))
        bound = _BOUND.search(line)
        if bound:
            bounds[name] = max(bounds.get(name, 1), int(bound[1]))
        loop = _LOOP.search(line)
        if loop:
            trips = _TRIPS.search(line)
            loops[name].append((loop[2], loop[1], int(trips[1]) if trips else None))
        for called in _CALLED.findall(line):
            calls[name].append((called, 1))
    for caller, found_loops in loops.items():
        for body, condition, trips in found_loops:
            calls[caller].append((body, trips or bounds.get(condition, 1)))
    sizes: dict[str, float] = collections.defaultdict(float)
    counts: dict[str, int] = collections.defaultdict(int)

    def walk(computation: str, times: int, depth: int = 0) -> None:
        for kind, size in here.get(computation, ()):
            sizes[kind] += times * size
            counts[kind] += times
        for called, trips in calls.get(computation, ()) if depth < 50 else ():
            walk(called, times * trips, depth + 1)

    walk(entry, 1)
    return dict(sizes), dict(counts)


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
        ours = sum(e.bytes for e in estimate.exchanges if e.kind == kind)
        lines.append(
            f"  {kind:<20}{ours / 1e9:10.2f} GB sent (estimate), {size / 1e9:10.2f} GB of results "
            f"in {compiled.counts[kind]} operations"
        )
    return "\n".join(lines)
