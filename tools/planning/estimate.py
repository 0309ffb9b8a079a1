"""Step time and model FLOP utilisation under three ceilings, the largest batch, other meshes.

The estimate assumes that each ceiling is reached: products at the chip's peak, memory and links at
their full rates. A real step is slower; the estimate says what limits it and which layout wins.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator

from jaxlib_papers.train.flops import flops_per_token
from jaxlib_papers.train.mesh import MeshConfig
from tools.planning.chips import PlanError, Target
from tools.planning.collectives import Collective, list_collectives
from tools.planning.job import BYTES, Job, make_job
from tools.planning.memory import Memory, estimate_memory

__all__ = [
    "LARGEST_SHARE",
    "Estimate",
    "alternatives",
    "estimate",
    "largest_rows",
    "recommended",
    "require_fit",
]

# The runtime, the program and fragmentation need some.
USABLE = 0.94
# Of the step, for one kind of exchange: above it, a mesh is not recommended while others are left.
LARGEST_SHARE = 0.25


@dataclasses.dataclass(frozen=True)
class Estimate:
    """One layout under the ceilings; times in seconds per step, on one device.

    Attributes:
      job: The job.
      memory: Bytes per device.
      flops_per_token: Model FLOPs of a training step per token.
      device_flops: FLOPs that one device executes, recomputation and duplicates included.
      compute: Their time at the chip's peak.
      memory_time: Time of reading and writing state, weights and streams.
      exchanges: Collectives.
      hidden: Time of exchanges that can run under products.
      blocking: Time of those that cannot.
      seconds: max(compute, memory, hidden) + blocking.
      serial: All four one after another: nothing overlaps.
      mfu: Model FLOPs over peak FLOPs in `seconds`.
      mfu_serial: The same in `serial`.
      limit: "compute", "memory", or the collective that takes most.
    """

    job: Job
    memory: Memory
    flops_per_token: float
    device_flops: float
    compute: float
    memory_time: float
    exchanges: tuple[Collective, ...]
    hidden: float
    blocking: float
    seconds: float
    serial: float
    mfu: float
    mfu_serial: float
    limit: str

    @property
    def largest_share(self) -> float:
        """Share of the step that the largest exchange takes."""
        return max((e.seconds for e in self.exchanges), default=0.0) / self.seconds

    @property
    def fits(self) -> bool:
        """Whether the estimate leaves room in the device's memory."""
        return self.memory.total <= USABLE * self.job.target.chip.memory


def _device_flops(job: Job) -> float:
    """FLOPs of one device: what an axis does not split, each of its devices does."""
    config, mesh = job.config, job.mesh
    tokens = job.tokens * job.accum_steps
    heads = config.num_heads * config.head_dim
    projections = config.embed_dim * (2 * heads + 2 * config.num_kv_heads * config.head_dim)
    scores = heads * job.seq_len
    attention = (projections + scores) / mesh.tensor
    if config.moe is None:
        forward = 3 * config.embed_dim * config.mlp_dim / mesh.tensor
    else:
        moe = config.moe
        experts = 3 * config.embed_dim * moe.top_k * moe.expert_dim / mesh.tensor
        shared = 3 * config.embed_dim * moe.shared_expert_dim / mesh.tensor
        forward = experts + shared + config.embed_dim * moe.num_experts
    again = {"none": 3.0, "dots": 3.0 + scores / (projections + scores + forward)}
    passes = again.get(config.remat, 4.0)
    if config.remat == "minimal":  # projections of the attention are kept
        passes -= projections / mesh.tensor / (attention + forward)
    head = config.embed_dim * config.vocab_size / mesh.tensor
    return 2.0 * tokens * (config.num_layers * passes * (attention + forward) + 3 * head)


def _memory_time(job: Job) -> float:
    """Least traffic: the state read and written once, weights and streams of each layer."""
    config, chip = job.config, job.target.chip
    half = BYTES[config.compute_dtype]
    held = sum(p.held for p in job.parameters)
    state = held * 4 * 7  # parameter, two moments: read and written; gradient: read
    gathered = sum(p.held * (job.mesh.fsdp if "embed" in p.logical else 1) for p in job.parameters)
    weights = 4 * gathered * half * job.accum_steps  # forward, again, backward, and the gradient
    streams = 0.0
    if config.moe is not None:
        # Moving rows and activations touch the rows that stay empty too; products leave them out.
        rows = job.tokens * config.moe.top_k * job.room
        streams = rows * (4 * config.embed_dim + 6 * config.moe.expert_dim / job.mesh.tensor)
    streams += job.tokens * config.embed_dim * 16
    streams *= 3 * config.num_layers * half * job.accum_steps
    return (state + weights + streams) / chip.memory_rate


def estimate(job: Job) -> Estimate:
    """Estimates memory, step time and MFU of a job."""
    chip = job.target.chip
    per_token = flops_per_token(job.config, job.seq_len)
    flops = _device_flops(job)
    compute, memory_time = flops / chip.flops, _memory_time(job)
    exchanges = list_collectives(job)
    hidden = sum(e.seconds for e in exchanges if not e.blocking)
    blocking = sum(e.seconds for e in exchanges if e.blocking)
    overlapped = max(compute, memory_time, hidden)
    seconds = overlapped + blocking
    serial = compute + memory_time + hidden + blocking
    model = per_token * job.rows * job.seq_len / job.target.devices / chip.flops
    candidates = {"compute": compute, "memory": memory_time}
    for e in exchanges:
        candidates[f"{e.kind} over {e.axis} ({e.what})"] = e.seconds
    if hidden >= overlapped and hidden > 0:  # the sum of several collectives
        del candidates["compute"], candidates["memory"]
    return Estimate(
        job=job,
        memory=estimate_memory(job),
        flops_per_token=per_token,
        device_flops=flops,
        compute=compute,
        memory_time=memory_time,
        exchanges=exchanges,
        hidden=hidden,
        blocking=blocking,
        seconds=seconds,
        serial=serial,
        mfu=model / seconds,
        mfu_serial=model / serial,
        limit=max(candidates, key=lambda name: candidates[name]),
    )


def largest_rows(job: Job) -> int:
    """Largest micro-batch, in rows on one device, that the estimate fits; 0 if none does."""
    shards = job.row_shards

    def fits(rows: int) -> bool:
        part = dataclasses.replace(job, rows=rows * shards * job.accum_steps)
        return estimate_memory(part).total <= USABLE * job.target.chip.memory

    if not fits(1):
        return 0
    low, high = 1, 2
    while fits(high) and high < 1 << 16:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _meshes(devices: int, *, context: bool) -> Iterator[MeshConfig]:
    divisors = [d for d in range(1, devices + 1) if devices % d == 0]
    for tensor in (d for d in divisors if d <= 8):
        for expert in (d for d in divisors if devices % (tensor * d) == 0 and d <= 64):
            for ctx in (d for d in divisors if devices % (tensor * expert * d) == 0 and d <= 16):
                if ctx > 1 and not context:
                    continue
                rest = devices // (tensor * expert * ctx)
                for data in (d for d in divisors if rest % d == 0):
                    yield MeshConfig(data, rest // data, expert, tensor, ctx)


def _fitting(job: Job) -> Iterator[Estimate]:
    """Meshes for the same step, each with the fewest micro-batches that fit in memory."""
    parts = [a for a in (1, 2, 4, 8, 16, 32, 64) if job.rows % a == 0]
    for mesh in _meshes(job.target.devices, context=job.seq_len >= 16384 or job.mesh.context > 1):
        for accum in parts:
            try:
                other = make_job(
                    job.preset,
                    job.target,
                    mesh,
                    rows=job.rows,
                    accum_steps=accum,
                    seq_len=job.seq_len,
                    remat=job.config.remat,
                    receive_factor=job.config.moe.receive_factor if job.config.moe else None,
                )
            except PlanError:
                break  # more micro-batches have fewer rows: they divide no better
            result = estimate(other)
            if result.fits:
                yield result
                break


def alternatives(job: Job, *, most: int = 8) -> list[Estimate]:
    """Other meshes (and numbers of micro-batches) for the same step, the best first.

    First those of which no exchange takes more than `LARGEST_SHARE` of the step, and among them
    those that take least time when nothing overlaps: what overlaps depends on the compiler.

    Args:
      job: Preset, machine, rows and sequence length.
      most: How many to return.
    """
    return sorted(_fitting(job), key=lambda e: (e.largest_share > LARGEST_SHARE, e.serial))[:most]


def recommended(make: Callable[[MeshConfig], Job], target: Target) -> Job:
    """The job on the first of `alternatives`.

    Args:
      make: `make_job` with everything but the mesh.
      target: The machine.

    Raises:
      PlanError: No mesh divides rows and parameters, or none fits in memory.
    """
    refused: PlanError | None = None
    for mesh in (MeshConfig(fsdp=target.devices), *_meshes(target.devices, context=True)):
        try:
            job = make(mesh)
        except PlanError as error:
            refused = refused or error
            continue
        best = alternatives(job, most=1)
        return make(best[0].job.mesh) if best else job
    assert refused is not None
    raise refused


def require_fit(job: Job) -> None:
    """Refuses a job that cannot fit.

    Raises:
      PlanError: Says by how much, and names changes that would make it fit.
    """
    memory, chip = estimate_memory(job), job.target.chip
    usable = USABLE * chip.memory
    if memory.total <= usable:
        return
    missing = (memory.total - usable) / 2**30
    ideas = []
    for accum in (a for a in (2, 4, 8, 16, 32, 64, 128, 256) if a > job.accum_steps):
        rows = job.rows / accum / job.row_shards
        if job.rows % accum or rows < 1 or rows % 1:
            continue
        if estimate_memory(dataclasses.replace(job, accum_steps=accum)).total <= usable:
            ideas.append(f"--accum-steps {accum}")
            break
    if job.config.remat != "full":
        config = dataclasses.replace(job.config, remat="full")
        if estimate_memory(dataclasses.replace(job, config=config)).total <= usable:
            ideas.append("--remat full")
    best = alternatives(job, most=1)
    if best and best[0].job.mesh != job.mesh:
        accum = best[0].job.accum_steps
        ideas.append(f"--mesh {best[0].job.mesh_text} --accum-steps {accum}")
    if not ideas:
        ideas.append(_more_devices(job, usable))
    raise PlanError(
        f"{job.preset} on {job.target.text} with {job.mesh_text} needs "
        f"{memory.total / 2**30:.1f} GiB a device, {missing:.1f} GiB more than the usable "
        f"{usable / 2**30:.1f} GiB of {chip.name}; what would fit: " + "; or ".join(ideas)
    )


def _more_devices(job: Job, usable: float) -> str:
    config = dataclasses.replace(job.config, remat="full")
    shapes = job.target.chip.shapes
    counts = [(f"{job.target.chip.name}:{s}", math.prod(map(int, s.split("x")))) for s in shapes]
    counts = counts or [(f"{job.target.chip.name}:{n}", n) for n in (1, 2, 4, 8, 16, 32, 64, 128)]
    for name, devices in counts:
        if devices <= job.target.devices or job.config.embed_dim % devices:
            continue
        target = Target(name, job.target.chip, devices)
        try:
            wide = make_job(
                job.preset, target, MeshConfig(fsdp=devices), rows=devices, seq_len=job.seq_len
            )
        except PlanError:
            continue
        if estimate_memory(dataclasses.replace(wide, config=config)).total <= usable:
            return f"--target {name} --mesh fsdp={devices} --remat full, one row a micro-batch"
    return "no larger machine of this chip; choose a smaller preset or one with more memory"
