"""What the devices send each other in one step, by operation and mesh axis.

Bytes are those that one device sends in a ring: (n - 1) / n of the array for a gather or a scatter,
twice that for an all-reduce. The rules are those of `nn.partitioning.DEFAULT_RULES`.
"""

from __future__ import annotations

import dataclasses

from tools.planning.job import BYTES, Job

__all__ = ["Collective", "list_collectives", "least_fsdp_bytes"]


@dataclasses.dataclass(frozen=True)
class Collective:
    """One kind of exchange.

    Attributes:
      kind: "all-gather", "reduce-scatter" or "all-reduce".
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


def _ring(kind: str, size: int) -> float:
    return (2 if kind == "all-reduce" else 1) * (size - 1) / size


def least_fsdp_bytes(job: Job) -> float:
    """Bytes that fully sharded parameters cannot do without, per device and step.

    Each parameter arrives once for the forward and once for the backward pass of every micro-batch,
    and its gradient leaves once per micro-batch, in the compute dtype.
    """
    size, half = job.mesh.fsdp, BYTES[job.config.compute_dtype]
    if size == 1:
        return 0.0
    whole = sum(p.held * size for p in job.parameters if "embed" in p.logical)
    return 3 * job.accum_steps * whole * half * _ring("all-gather", size)


def list_collectives(job: Job) -> tuple[Collective, ...]:
    """Lists what one device sends in a step."""
    config, mesh, micro = job.config, job.mesh, job.accum_steps
    half, layers = BYTES[config.compute_dtype], config.num_layers
    out: list[Collective] = []

    def add(kind: str, axis: str, what: str, count: int, each: float, blocking: bool) -> None:
        size = getattr(mesh, axis)
        if size > 1:
            sent = count * each * _ring(kind, size)
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
        if what == "tables":  # looked up in the parameters' dtype, multiplied in the other
            uses = 2 if config.tie_embeddings else 1
            each = whole * (BYTES[config.param_dtype] / half + uses - 1) / uses
            add("all-gather", "fsdp", what, uses * count, each, False)
            add("all-reduce", "fsdp", "gradients of " + what, uses * count, each, False)
            continue
        add("all-gather", "fsdp", what, 2 * count, whole, False)
        # The sum over rows of what `shard_map` gets whole is an all-reduce (seen in compiled HLO).
        kind = "all-reduce" if what == "experts" else "reduce-scatter"
        add(kind, "fsdp", "gradients of " + what, count, whole, False)
    held = sum(p.held for p in job.parameters) * BYTES[config.param_dtype]
    add("all-reduce", "data", "gradients", micro, held, False)
    stream = job.tokens * config.embed_dim * half
    if config.moe is not None:
        # Each device runs its own experts on the same tokens; the sums meet forward and backward.
        passes = 2 if config.remat == "none" else 3
        add("all-reduce", "expert", "token streams", passes * layers * micro, stream, True)
    add("all-reduce", "tensor", "token streams", 4 * layers * micro, stream, True)
    kv = job.config.num_kv_heads * config.head_dim * 2
    add(
        "all-gather",
        "context",
        "keys, values and queries",
        3 * layers * micro,
        job.tokens * mesh.context * (kv + config.num_heads * config.head_dim) * half / mesh.tensor,
        True,
    )
    return tuple(out)
