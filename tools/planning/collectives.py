"""What the devices send each other in one step, by operation and mesh axis.

Bytes are those that one device sends in a ring: (n - 1) / n of the array for a gather or a scatter,
twice that for an all-reduce. The rules are those of `nn.partitioning.DEFAULT_RULES`.
"""

from __future__ import annotations

import dataclasses

from tools.planning.job import BYTES, Job

__all__ = ["Collective", "exchange_bytes", "least_parameter_bytes", "list_collectives"]


@dataclasses.dataclass(frozen=True)
class Collective:
    """One kind of exchange.

    Attributes:
      kind: As XLA calls it.
      axis: Mesh axis.
      what: What is exchanged.
      count: How often in a step.
      bytes: That one device sends, in a step.
      seconds: At the rate of the links that carry the axis.
      blocking: Whether the next product needs it, so that it can hardly be hidden.
    """

    kind: str
    axis: str
    what: str
    count: int
    bytes: float
    seconds: float
    blocking: bool


def _inner(job: Job, axis: str) -> int:
    names = ("data", "fsdp", "expert", "tensor", "context")
    product = 1
    for name in names[names.index(axis) + 1 :]:
        product *= getattr(job.mesh, name)
    return product


def _narrow(job: Job) -> bool:
    """Whether a shard of the width is no whole number of a TPU's lines of 128.

    Its compiler then gathers by summing arrays of zeros, which sends twice as much (seen in the
    compiled program of edl-15b with fsdp=64).
    """
    return job.target.chip.platform == "tpu" and job.config.embed_dim // job.mesh.fsdp % 128 != 0


def _ring(kind: str, size: int) -> float:
    return (2 if kind == "all-reduce" else 1) * (size - 1) / size


def _dense_axes(job: Job) -> int:
    """Replicas of what is no expert: their gradients are summed over so many devices."""
    return job.mesh.data * job.mesh.expert * job.mesh.context


def least_parameter_bytes(job: Job) -> float:
    """Bytes that parameters and their gradients cannot do without, per device and step.

    Fully sharded parameters arrive once for the forward and once for the backward pass of every
    micro-batch, and their gradients leave once per micro-batch, in the compute dtype. Gradients of
    replicas are summed once a micro-batch, in the parameters' dtype or narrower.
    """
    mesh, half = job.mesh, BYTES[job.config.compute_dtype]
    total = 0.0
    for p in job.parameters:
        if "embed" in p.logical and mesh.fsdp > 1:
            total += 3 * p.held * mesh.fsdp * half * _ring("all-gather", mesh.fsdp)
        replicas = _dense_axes(job)
        if "experts" in p.logical:
            replicas //= mesh.expert
        total += p.held * half * _ring("all-reduce", replicas)
    return total * job.accum_steps


def exchange_bytes(job: Job) -> float:
    """Bytes of one layer's token rows, there and back, that leave one device in a forward pass."""
    moe, size = job.config.moe, job.mesh.expert
    if moe is None or size == 1:
        return 0.0
    rows = job.tokens * moe.top_k * job.config.embed_dim * BYTES[job.config.compute_dtype]
    return 2 * rows * _ring("all-to-all", size)


def list_collectives(job: Job) -> tuple[Collective, ...]:
    """Lists what one device sends in a step."""
    config, mesh, micro = job.config, job.mesh, job.accum_steps
    half, layers = BYTES[config.compute_dtype], config.num_layers
    out: list[Collective] = []

    def add(kind: str, axis: str, what: str, count: int, each: float, blocking: bool) -> None:
        size = getattr(mesh, axis)
        if size > 1:
            sent = count * each * _ring(kind, size)
            if axis == "fsdp" and _narrow(job):
                sent *= 2
            rate = job.target.rate(_inner(job, axis), size)
            out.append(Collective(kind, axis, what, count, sent, sent / rate, blocking))

    split = [p for p in job.parameters if "embed" in p.logical]
    for what, chosen in (
        ("experts", [p for p in split if "expert_mlp" in p.logical]),
        ("tables", [p for p in split if "vocab" in p.logical]),
        ("other weights", [p for p in split if not {"expert_mlp", "vocab"} & set(p.logical)]),
    ):
        if not chosen:
            continue
        # Per layer and micro-batch, in the compute dtype: forward and recomputation, gradient.
        count = micro * sum(p.layers for p in chosen)
        whole = sum(p.held * mesh.fsdp for p in chosen) * half * micro / count
        if what == "tables":  # once for the tokens, once for the head
            uses = 2 if config.tie_embeddings else 1
            add("all-gather", "fsdp", what, uses * count, whole, False)
            add("reduce-scatter", "fsdp", "gradients of " + what, uses * count, whole, False)
            continue
        add("all-gather", "fsdp", what, 2 * count, whole, False)
        add("reduce-scatter", "fsdp", "gradients of " + what, count, whole, False)
    held = sum(p.held for p in job.parameters) * BYTES[config.param_dtype]
    dense = sum(p.held for p in job.parameters if "experts" not in p.logical)
    add("all-reduce", "data", "gradients", micro, held, False)
    add("all-reduce", "context", "gradients", micro, held, False)
    add(
        "all-reduce",
        "expert",
        "gradients (no experts)",
        micro,
        dense * BYTES[config.param_dtype],
        False,
    )
    stream = job.tokens * config.embed_dim * half
    if config.moe is not None:
        # There and back; again there where the forward pass is repeated; there and back backward.
        trips = 4 if config.remat == "none" else 5
        rows = stream * config.moe.top_k
        add("all-to-all", "expert", "token rows", trips * layers * micro, rows, True)
    add("all-reduce", "tensor", "token streams", 4 * layers * micro, stream, True)
    # Keys and values go round forward, again where it is repeated, and with their gradients.
    passes = 3 if config.remat == "none" else 4
    kv = job.tokens * config.num_kv_heads * config.head_dim * 2 * half / mesh.tensor
    ring = passes * layers * micro
    add("collective-permute", "context", "keys and values", ring, kv * mesh.context, False)
    return tuple(out)
