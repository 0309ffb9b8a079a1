"""Pretrain a sparse mixture-of-experts language model with the Expert Divergence objective.

Without flags: a tiny model on text that every installation has, about two minutes on two CPU cores,
ending in runs/<preset>-<time>/ with pictures, metrics and checkpoints. The same command with flags
is the launch at scale: one process per host, on whatever devices there are.

Examples:
  python -m experiments.pretrain
  python -m experiments.pretrain --preset edl-15b --mesh fsdp=8,expert=32 --dry-run
  python -m experiments.pretrain --preset edl-3b --mesh fsdp=8,expert=32 --data jsonl:/data/corpus
  --tokenizer tokenizer.json --run-dir /checkpoints/edl-3b

Exit codes: 0 finished; 75 stopped by a signal after saving (start again to go on); 76 another
process of the run is gone or did not come (start all again to go on); 2 wrong flags, data or
directory; 1 failed while training.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

if TYPE_CHECKING:
    from jaxlib_papers.train.peers import PeerWatch

__all__ = [
    "DataFlags",
    "LaunchFlags",
    "ModelFlags",
    "PretrainFlags",
    "ReportFlags",
    "TrainFlags",
    "main",
    "parse",
]


def _optional(metavar: str):
    return tyro.conf.arg(metavar=metavar, help_behavior_hint="")


def _preset(metavar: str):
    return tyro.conf.arg(metavar=metavar, help_behavior_hint="(default: the preset's)")


OptionalStr = Annotated[str | None, _optional("TEXT")]
OptionalInt = Annotated[int | None, _optional("INT")]
OptionalFloat = Annotated[float | None, _optional("FLOAT")]
PresetInt = Annotated[int | None, _preset("INT")]
PresetFloat = Annotated[float | None, _preset("FLOAT")]


@dataclasses.dataclass(frozen=True)
class DataFlags:
    """Text, and how it is cut into batches."""

    data: str = "embedded"
    """embedded | text:DIR (a sub-folder a domain) | jsonl:DIR (text and domain) | tfds:NAME."""
    tokenizer: OptionalStr = None
    """A Hugging Face tokenizer.json or its folder; bytes if not given."""
    weights: OptionalStr = None
    """Share of each domain in the rows, e.g. code=2,prose=1,numbers=0; equal if not given."""
    seq_len: PresetInt = None
    """Tokens per row."""
    batch: PresetInt = None
    """Rows per step over all devices."""
    accum_steps: int = 1
    """Micro-batches per step (gradient accumulation)."""
    chunks_per_row: int = 1
    """Chunks of a row, each from a domain of its own."""
    heldout: float = 0.1
    """Share of each domain's documents that is held out for evaluation."""
    cache_dir: OptionalStr = None
    """Where prepared data are kept; the user's cache folder if not given."""


@dataclasses.dataclass(frozen=True)
class ModelFlags:
    """Changes to the preset's model."""

    layers: PresetInt = None
    """Number of layers."""
    embed_dim: PresetInt = None
    """Width."""
    num_experts: PresetInt = None
    """Experts per layer."""
    top_k: PresetInt = None
    """Experts per token."""
    receive_factor: PresetFloat = None
    """Room for tokens from other devices, in multiples of a device's own; what is past it is
    dropped and counted. Not given: room for all of them."""
    vocab_size: PresetInt = None
    """Rows of the embedding; tiny and small take as many as the tokenizer needs."""
    max_positions: PresetInt = None
    """Longest sequence."""
    dropout: PresetFloat = None
    """Dropout rate."""
    dtype: Annotated[Literal["float32", "bfloat16"] | None, _preset("float32|bfloat16")] = None
    """Compute dtype; parameters, routers, norms and losses stay float32."""
    remat: Annotated[
        Literal["none", "minimal", "dots", "full"] | None, _preset("none|minimal|dots|full")
    ] = None
    """What the backward pass recomputes."""


@dataclasses.dataclass(frozen=True)
class TrainFlags:
    """Objective and optimizer (AdamW)."""

    steps: PresetInt = None
    """Optimizer steps of the whole run."""
    learning_rate: PresetFloat = None
    """Peak learning rate."""
    warmup_steps: PresetInt = None
    """Steps of linear warm-up, at most a tenth of all steps if not given."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """Learning rate after the warm-up."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices."""
    clip_norm: float = 1.0
    """Largest gradient norm; 0 = no clipping."""
    alpha: PresetFloat = None
    """Coefficient of the load-balancing loss."""
    beta: PresetFloat = None
    """Coefficient of the expert divergence loss; 0 trains the baseline."""
    gamma_z: float = 0.0
    """Coefficient of the router z-loss."""
    exact_statistics: bool = False
    """With accumulation: auxiliary losses of the whole batch, by a second forward pass."""
    seed: int = 0
    """Seed of initialisation, dropout and data order."""


@dataclasses.dataclass(frozen=True)
class ReportFlags:
    """How often what is recorded."""

    log_every: PresetInt = None
    """Steps between records of metrics."""
    eval_every: PresetInt = None
    """Steps between evaluations, 0 = first and last only."""
    save_every: PresetInt = None
    """Steps between checkpoints, 0 = last only."""
    eval_batches: PresetInt = None
    """Held-out batches per domain."""
    keep_last: int = 2
    """Newest checkpoints to keep."""
    keep_period: OptionalInt = None
    """Keep checkpoints at multiples of this for ever."""
    max_skipped: int = 10
    """Steps in a row with non-finite loss or gradient that end the run."""
    profile: int = 0
    """Steps to trace for TensorBoard's profiler, after the first two; 0 = none."""
    peak_tflops: OptionalFloat = None
    """Peak of one device, for MFU; known accelerators have a table, others are measured."""


@dataclasses.dataclass(frozen=True)
class LaunchFlags:
    """Several processes. SLURM, Open MPI, Kubernetes and TPU pods are detected."""

    distributed: Literal["auto", "on", "off"] = "auto"
    """auto = several processes where the environment shows them."""
    coordinator: OptionalStr = None
    """host:port of process 0, where nothing can be detected."""
    num_processes: OptionalInt = None
    """Number of processes, with --coordinator; SLURM and Open MPI tell it."""
    process_id: OptionalInt = None
    """Number of this process, with --coordinator; SLURM and Open MPI tell it."""
    connect_timeout: int = 300
    """Seconds to wait at the start until all processes are connected."""


@dataclasses.dataclass(frozen=True)
class PretrainFlags:
    """Everything that can be set."""

    preset: str = "tiny"
    """Model size and defaults: tiny | small | edl-3b | edl-8b | edl-15b."""
    mesh: str = "auto"
    """Devices on data, fsdp, expert, tensor, context: e.g. fsdp=8,expert=32; auto = all on data."""
    run_dir: OptionalStr = None
    """Where results go; by default a new runs/<preset>-<time>, or with --resume the newest one."""
    resume: Annotated[Literal["auto", "never", "must"] | None, _optional("auto|never|must")] = None
    """Start from the last complete checkpoint: if there is one, never (former results are set
    aside), or else fail. Default: auto with --run-dir, never without."""
    dry_run: bool = False
    """Print parameter counts, memory per device and sharding, and allocate nothing."""
    data: DataFlags = DataFlags()
    model: ModelFlags = ModelFlags()
    train: TrainFlags = TrainFlags()
    report: ReportFlags = ReportFlags()
    launch: LaunchFlags = LaunchFlags()


def parse(argv: Sequence[str] | None = None) -> PretrainFlags:
    """Reads a command line; ends the process on --help and on flags that do not exist."""
    return tyro.cli(
        PretrainFlags,
        prog="python -m experiments.pretrain",
        description=__doc__,
        args=argv,
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    flags = parse(argv)
    _quiet()
    # Imported after parsing: --help should not wait for JAX.
    from experiments import pretrain_hosts, pretrain_plan
    from jaxlib_papers.train.checkpoint import CheckpointError
    from jaxlib_papers.train.host_memory import keep_freed_memory

    keep_freed_memory()
    try:
        if flags.dry_run:
            print(pretrain_plan.describe(flags))
            return 0
        with pretrain_hosts.connected(flags.launch) as watch:
            return _run(flags, watch)
    except (ValueError, OSError, CheckpointError, ImportError) as error:
        return _fail(error, 2)


def _run(flags: PretrainFlags, watch: PeerWatch | None) -> int:
    """Trains; with several processes it ends this one if the others cannot end with it."""
    import jax

    from experiments import pretrain_hosts, pretrain_run
    from jaxlib_papers.train.checkpoint import CheckpointError
    from jaxlib_papers.train.loop import NonFiniteError
    from jaxlib_papers.train.preemption import PREEMPTED_EXIT_CODE

    try:
        run = pretrain_run.prepare(flags)
    except (ValueError, OSError, CheckpointError, ImportError) as error:
        code = _fail(error, 2)
        pretrain_hosts.leave(code, watch)
        return code
    try:
        finished = run.train()
    except (CheckpointError, NonFiniteError, OSError, jax.errors.JaxRuntimeError) as error:
        if jax.process_count() > 1 and pretrain_hosts.lost_process(error):
            pretrain_hosts.leave_alone(error, watch)
        if isinstance(error, jax.errors.JaxRuntimeError):
            raise
        code = _fail(error, 1)
        pretrain_hosts.leave(code, watch)
        return code
    return 0 if finished else PREEMPTED_EXIT_CODE


def _fail(error: Exception, code: int) -> int:
    print(f"pretrain: {error}", file=sys.stderr)
    return code


def _quiet() -> None:
    """Keeps the chatter of libraries off the screen; our own errors say what matters."""
    for name in ("absl", "asyncio"):  # Orbax's tracebacks of a failed write
        logging.getLogger(name).setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", category=DeprecationWarning)


if __name__ == "__main__":
    sys.exit(main())
