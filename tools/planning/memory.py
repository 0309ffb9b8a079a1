"""Memory of one device in a training step.

Parameters and optimizer state are exact (shapes over shards). The rest is an estimate of what the
compiler keeps at its peak, which lies in the backward pass of a layer: gradients of all layers, the
streams that remat keeps of each layer, and the working set of one layer; `docs/scale.md` compares
it with the compiler's own figures.
"""

from __future__ import annotations

import dataclasses

from jaxlib_papers.ops.cross_entropy import chunk_length
from tools.planning.job import BYTES, Job, Parameter

__all__ = ["Memory", "estimate_memory"]


# With much memory its scheduler keeps more alive (docs/scale.md, the comparison).
_SLACK = {"v5p": 0.8 * 2**30}


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device.

    Attributes:
      parameters: Of the parameters.
      optimizer: Of the optimizer's state.
      gradients: Of the gradients, and of the accumulator where there is one.
      kept: What the forward pass keeps for the backward pass, of all layers.
      weights: One layer's weights gathered, and its gradient before it is scattered.
      working: Other arrays of one layer at the peak.
      slack: What the chip's compiler was seen to take beyond these (0 where not compared).
      head: Gathered embedding and output matrix, and one chunk of logits.
    """

    parameters: int
    optimizer: int
    gradients: int
    kept: int
    weights: int
    working: int
    head: int
    slack: int

    @property
    def state(self) -> int:
        """What lives from step to step."""
        return self.parameters + self.optimizer

    @property
    def activations(self) -> int:
        """Everything else at the peak; head and layers are not at their peak together."""
        return self.gradients + self.kept + max(self.weights + self.working, self.head) + self.slack

    @property
    def total(self) -> int:
        """All of it."""
        return self.state + self.activations


def estimate_memory(job: Job) -> Memory:
    """Estimates the memory of one device at its peak."""
    config, mesh, moe = job.config, job.mesh, job.config.moe
    wide, half = BYTES[config.param_dtype], BYTES[config.compute_dtype]
    tokens = job.tokens
    width, layers = config.embed_dim, config.num_layers
    heads = config.num_heads * config.head_dim / mesh.tensor
    kv = config.num_kv_heads * config.head_dim
    kv = kv / mesh.tensor if config.num_kv_heads % mesh.tensor == 0 else kv

    parameters = sum(p.held for p in job.parameters) * wide
    padded = sum(_padded(p, job) for p in job.parameters) * wide
    gradients = padded + (parameters if job.accum_steps > 1 else 0)

    # Streams that are kept of every layer: its input, and what the policy says.
    kept = tokens * width * half
    dots = tokens * (heads + 2 * kv + width) * half
    kept += {"full": 0, "minimal": dots, "dots": dots, "none": dots}[config.remat]
    if moe is not None:
        # Logits and probabilities leave the layer for the auxiliary losses whatever the policy.
        kept += 2 * tokens * moe.num_experts * 4
        rows = tokens * moe.top_k * job.room
        hidden = moe.expert_dim / mesh.tensor
        in_experts = rows * (width + 3 * hidden) * half
        working = rows * (2 * width + 3 * hidden) * half + rows * hidden * 4
        if mesh.expert > 1:
            # Rows as they come, sorted, results, results in the order of coming, and the gradient
            # of each; and the rows at home.
            working += 10 * rows * width * half
    else:
        hidden = config.mlp_dim / mesh.tensor
        in_experts = 3 * tokens * hidden * half
        working = 5 * tokens * hidden * half
    if config.remat in ("none", "dots"):
        kept += in_experts + tokens * 3 * width * half
    working += tokens * (3 * width + 2 * heads + 4 * kv) * half

    def of_layer(p):
        return p.layers > 1

    # Whole along fsdp, split along the other axes: in the compute dtype, and the gradient likewise.
    gathered = sum(
        p.held * (mesh.fsdp if "embed" in p.logical else 1) / p.layers
        for p in job.parameters
        if of_layer(p)
    )
    # Copies of a layer's gathered matrices at the peak: weights, gradients, sums over devices, and
    # the layouts that kernels and collectives want (6 of the first, 4 of the second, as compiled).
    weights = gathered * half * (16 / 3 if moe is not None else 2)
    tables = [p for p in job.parameters if "vocab" in p.logical]
    table = sum(p.held * (mesh.fsdp if "embed" in p.logical else 1) for p in tables)
    vocab = config.vocab_size / mesh.tensor
    chunk = chunk_length(job.micro_rows, job.seq_len, config.vocab_size)
    logits = job.micro_rows * chunk * vocab * 4
    head = table * (half + 4 + 4) + 3 * logits + 2 * tokens * width * half
    slack = _SLACK.get(job.target.chip.name, 0.0)
    return Memory(
        parameters=int(parameters),
        optimizer=int(job.optimizer_bytes),
        gradients=int(gradients),
        kept=int(kept * layers),
        weights=int(weights),
        working=int(working),
        head=int(head),
        slack=int(slack),
    )


def _padded(p: Parameter, job: Job) -> float:
    """Elements of a gradient as it lies on a TPU, whose rows are 128 wide."""
    if job.target.chip.platform != "tpu" or p.logical[-1:] != ("embed",) or p.layers == 1:
        return p.held
    row = job.config.embed_dim // job.mesh.fsdp
    return p.held * (-(-row // 128) * 128) / row
