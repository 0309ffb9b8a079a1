"""Plans a training run for a machine that need not be there.

  python -m tools.plan --preset edl-15b --target v5p:4x4x8 --mesh fsdp=128
  python -m tools.plan --preset edl-3b --target h200:8 --remat full --json plan.json
  python -m tools.plan --preset edl-8b --target v6e:4x8 --mesh fsdp=32 --compile

Prints memory per device, FLOPs per token, what the devices send each other in a step, the step's
expected time under the ceilings of compute, memory and links, the largest micro-batch that fits,
and other meshes, the best first. Nothing is allocated and no accelerator is needed.

`--compile` also compiles the real training step ahead of time for the target (TPU: an environment
with `jax[tpu]`; GPU: one with `jax[cuda12]`) and puts the compiler's figures beside the estimate.

Exit codes: 0 planned; 2 the target, the mesh or the flags do not fit, or the preset does not fit in
memory (by how much, and what would).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

__all__ = ["describe", "main", "record"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.plan",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--preset", default="edl-15b", help="model size")
    parser.add_argument("--target", default="v5p:4x4x8", help="v5p:4x4x4, v6e:16x16, h200:64 ...")
    parser.add_argument(
        "--mesh", help="e.g. fsdp=16,expert=4 (-1: the rest); not given: the first of the list"
    )
    parser.add_argument("--batch", type=int, help="rows of a step over all devices")
    parser.add_argument("--accum-steps", type=int, default=1, help="micro-batches of a step")
    parser.add_argument("--seq-len", type=int, help="tokens of a row")
    parser.add_argument("--remat", choices=("none", "minimal", "dots", "full"))
    parser.add_argument(
        "--receive-factor",
        type=float,
        help="room for tokens from other devices, in multiples of a device's own assignments "
        "(what is past it is dropped); not given: for the worst case",
    )
    parser.add_argument("--alternatives", type=int, default=6, help="how many other meshes")
    parser.add_argument("--compile", action="store_true", help="compile the step for the target")
    parser.add_argument("--effort", type=float, help="of the compiler, -1 (fast) to 1; TPU")
    parser.add_argument("--json", metavar="PATH", help="write the plan there as JSON too")
    flags = parser.parse_args(argv)
    # Planning computes nothing on a device, and compilers must not look for theirs.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

    from tools.planning import chips, estimate, job

    try:
        target = chips.parse_target(flags.target)
        make = functools.partial(
            job.make_job,
            flags.preset,
            target,
            rows=flags.batch,
            accum_steps=flags.accum_steps,
            seq_len=flags.seq_len,
            remat=flags.remat,
            receive_factor=flags.receive_factor,
        )
        plan = make(flags.mesh) if flags.mesh else estimate.recommended(make, target)
        estimate.require_fit(plan)
    except ValueError as error:
        print(f"plan: {error}", file=sys.stderr)
        return 2
    result = estimate.estimate(plan)
    others = estimate.alternatives(plan, most=flags.alternatives) if flags.alternatives else []
    print(describe(result, estimate.largest_rows(plan), others))
    content = record(result, estimate.largest_rows(plan), others)
    if flags.compile:
        from tools.planning import ahead

        try:
            compiled = ahead.compile_step(plan, effort=flags.effort)
        except ahead.CompilerMissing as error:
            print(f"plan: {error}", file=sys.stderr)
            return 2
        print(ahead.describe(compiled, result))
        content["compiled"] = dataclasses.asdict(compiled)
    if flags.json:
        with open(flags.json, "w") as file:
            json.dump(content, file, indent=1)
    return 0


def _gib(count: float) -> str:
    return f"{count / 2**30:10.3f} GiB"


def describe(result: Any, largest: int, others: Sequence[Any]) -> str:
    """The plan as text."""
    job, memory = result.job, result.memory
    chip, micro = job.target.chip, job.rows // job.accum_steps
    lines = [
        f"preset {job.preset} on {job.target.text} ({job.target.devices} devices), "
        f"mesh {job.mesh_text}, remat {job.config.remat}",
        f"parameters {job.counts.total / 1e9:.2f} B, {job.counts.active / 1e9:.2f} B active; "
        f"{result.flops_per_token:.3e} FLOPs per token; "
        f"{job.rows} rows x {job.seq_len} tokens a step, {job.accum_steps} x {micro} rows",
        "",
        f"memory per device (of {chip.memory / 2**30:.0f} GiB)",
    ]
    for field in dataclasses.fields(memory):
        lines.append(f"  {field.name:<12}{_gib(getattr(memory, field.name))}")
    lines += [
        f"  {'total':<12}{_gib(memory.total)}",
        f"  largest micro-batch that fits: {largest} rows a device",
        "",
        "sent by one device in a step",
    ]
    for e in result.exchanges:
        share = e.seconds / result.seconds
        lines.append(
            f"  {e.kind:<15}{e.axis:<8}{e.bytes / 1e9:10.2f} GB {1e3 * e.seconds:9.1f} ms "
            f"({share:4.0%})  {e.count} x {e.what}{', blocking' if e.blocking else ''}"
        )
    lines += [] if result.exchanges else ["  nothing"]
    lines += [
        "",
        "step time under the ceilings",
        f"  compute     {1e3 * result.compute:9.1f} ms",
        f"  memory      {1e3 * result.memory_time:9.1f} ms",
        f"  links       {1e3 * (result.hidden + result.blocking):9.1f} ms",
        f"  step        {1e3 * result.seconds:9.1f} ms, MFU {result.mfu:.1%} "
        f"(nothing overlapped: {1e3 * result.serial:.1f} ms, {result.mfu_serial:.1%})",
        f"  limited by  {result.limit}",
    ]
    if others:
        lines += ["", "meshes for the same step, the best first"]
        for e in others:
            lines.append(
                f"  {e.job.mesh_text:<32}accum {e.job.accum_steps:<3}{1e3 * e.seconds:9.1f} ms  "
                f"MFU {e.mfu:6.1%} ({e.mfu_serial:.1%})  {e.memory.total / 2**30:6.1f} GiB  "
                f"{e.limit}"
            )
    return "\n".join(lines)


def record(result: Any, largest: int, others: Sequence[Any]) -> dict[str, Any]:
    """The plan as JSON values."""

    def one(e: Any) -> dict[str, Any]:
        return {
            "preset": e.job.preset,
            "target": e.job.target.text,
            "mesh": e.job.mesh_text,
            "accum_steps": e.job.accum_steps,
            "memory": dataclasses.asdict(e.memory) | {"total": e.memory.total},
            "flops_per_token": e.flops_per_token,
            "exchanges": [dataclasses.asdict(x) for x in e.exchanges],
            "seconds": {
                "compute": e.compute,
                "memory": e.memory_time,
                "links": e.hidden + e.blocking,
                "step": e.seconds,
                "serial": e.serial,
            },
            "mfu": e.mfu,
            "mfu_serial": e.mfu_serial,
            "limit": e.limit,
        }

    return one(result) | {"largest_rows": largest, "alternatives": [one(e) for e in others]}


if __name__ == "__main__":
    sys.exit(main())
