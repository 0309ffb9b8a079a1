"""What a pre-training run says: at its start, on the way, and at the end."""

from __future__ import annotations

import json
import math
import os
import pathlib
import sys
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from experiments import plots
from jaxlib_papers.train.evaluate import Evaluation
from jaxlib_papers.train.metrics import read_records

if TYPE_CHECKING:
    from experiments.pretrain_run import Run

__all__ = ["alarm_line", "announce", "evaluation_line", "finish", "former_summary", "note"]


def _print(*lines: Any) -> None:
    from rich.console import Console

    if jax.process_index() == 0:
        width = None if sys.stdout.isatty() else 100
        for line in lines:
            Console(width=width).print(line, highlight=False, soft_wrap=isinstance(line, str))


def announce(run: Run) -> None:
    """Says what will be trained, on what and where."""
    settings, counts = run.settings, run.parameters()
    moe, pipeline = settings.model.moe, settings.pipeline
    axes = ", ".join(f"{axis}={size}" for axis, size in dict(run.mesh.shape).items() if size > 1)
    _print(
        f"model    {counts['total'] / 1e6:,.2f} M parameters, "
        f"{counts['active'] / 1e6:,.2f} M active; "
        f"{settings.model.num_layers} layers x {moe.num_experts} experts, top-{moe.top_k}",
        f"data     {run.flags.data.data}: {', '.join(run.corpus.domains)}; "
        f"{pipeline.global_batch} rows x {pipeline.seq_len} tokens a step",
        f"loss     alpha {settings.loss.alpha:g}, beta {settings.loss.beta:g}"
        + (f", gamma_z {settings.loss.gamma_z:g}" if settings.loss.gamma_z else ""),
        f"devices  {jax.device_count()} x {jax.devices()[0].device_kind}"
        + (f" ({axes})" if axes else ""),
        f"run      {run.directory}"
        + (f", resumed after step {run.start_step}" if run.start_step else ""),
    )


def note(values: dict[str, Any]) -> str:
    """The text beside the progress bar."""
    parts = [f"loss {values['loss']:.3f}"]
    if "mean_jsd" in values:
        parts.append(f"JSD {values['mean_jsd']:.3f}")
    if "tokens_per_second" in values:
        parts.append(f"{values['tokens_per_second']:,.0f} tokens/s")
    if "mfu" in values:
        parts.append(f"MFU {values['mfu']:.1%}")
    if values.get("skipped"):
        parts.append(f"{values['skipped']} skipped")
    return "  ".join(parts)


def evaluation_line(step: int, evaluation: Evaluation) -> str:
    """One line for an evaluation on the way."""
    losses = list(evaluation.losses.items())[:8]
    text = f"held-out after step {step}: " + ", ".join(f"{n} {v:.3f}" for n, v in losses)
    return text if evaluation.mean_jsd is None else f"{text}; mean JSD {evaluation.mean_jsd:.4f}"


def alarm_line(step: int, alarm: dict[str, Any]) -> str:
    """One line for an alarm."""
    if alarm["alarm"] == "dead_expert":
        return f"step {step}: nothing reaches expert {alarm['expert']} of layer {alarm['layer']}"
    return (
        f"step {step}: {alarm['of']} jumped to {alarm['value']:.4g} "
        f"(median before {alarm['median']:.4g})"
    )


def former_summary(directory: pathlib.Path, names: Collection[str]) -> dict[str, Any]:
    """Times and rates that a finished run wrote, so that looking at it again keeps them."""
    path = directory / "summary.json"
    former = json.loads(path.read_text()) if path.exists() else {}
    wanted = {*names, "tokens_per_second", "mfu"}
    return {name: value for name, value in former.items() if name in wanted}


def finish(run: Run, evaluation: Evaluation, summary: dict[str, Any]) -> None:
    """Writes summary.json and the pictures, and prints the table."""
    if jax.process_index() != 0:
        return
    records = read_records(run.directory / "metrics.jsonl")
    first = next((r for r in records if r["kind"] == "eval"), {})
    initial = {name: first.get(f"loss/{name}") for name in evaluation.domains}
    content = summary | {
        "parameters": run.parameters(),
        "initial_heldout_loss": initial,
        "heldout_loss": evaluation.losses,
        "heldout_tokens": evaluation.tokens,
        "mean_heldout_loss": evaluation.loss,
        "mean_pairwise_jsd": evaluation.mean_jsd,
        "pairwise_jsd": _list(evaluation.pairwise_jsd),
        "expert_load": _list(evaluation.expert_load),
        "routing": _list(evaluation.routing),
        "domains": list(evaluation.domains),
    }
    new = run.directory / "summary.json.new"
    new.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(new, run.directory / "summary.json")
    try:
        pictures = plots.save_run_figures(
            run.directory, records, evaluation.domains, evaluation.routing
        )
        names = ", ".join(path.name for path in pictures)
    except ImportError:
        names = "no pictures: matplotlib is not installed (pip install matplotlib)"
    _print(*_tables(evaluation, initial))
    _print(*_figures(evaluation, summary))
    _print(f"written  {run.directory}: summary.json, metrics.jsonl, {names}")


def _list(array: np.ndarray | None) -> Any:
    return None if array is None else np.round(array, 6).tolist()


def _tables(evaluation: Evaluation, initial: dict[str, float | None]) -> list[Any]:
    from rich.table import Table

    losses = Table(title="Held-out loss (nats per token)", title_justify="left")
    for name in ("domain", "at the start", "now", "perplexity", "tokens"):
        losses.add_column(name, justify="left" if name == "domain" else "right")
    for name, value in evaluation.losses.items():
        before = initial[name]
        losses.add_row(
            name,
            "-" if before is None else f"{before:.4f}",
            f"{value:.4f}",
            f"{math.exp(min(value, 700)):,.2f}",
            f"{evaluation.tokens[name]:,}",
        )
    load = evaluation.expert_load
    if load is None:
        return [losses]
    title = "Load per expert (1 = even share)"
    table = Table(title=title, title_justify="left")
    table.add_column("layer", justify="right")
    if load.shape[1] <= 16:
        for expert in range(load.shape[1]):
            table.add_column(str(expert), justify="right")
        for layer, row in enumerate(load):
            table.add_row(str(layer), *(f"{value:.2f}" for value in row))
    else:
        for name in ("least", "median", "most"):
            table.add_column(name, justify="right")
        for layer, row in enumerate(load):
            shown = (row.min(), np.median(row), row.max())
            table.add_row(str(layer), *(f"{value:.2f}" for value in shown))
    return [losses, table]


def _figures(evaluation: Evaluation, summary: dict[str, Any]) -> list[str]:
    lines = []
    if evaluation.mean_jsd is not None:
        lines.append(
            f"mean pairwise JSD  {evaluation.mean_jsd:.4f} nats (at most ln 2 = {math.log(2):.4f})"
        )
    if "tokens_per_second" in summary:
        lines.append(f"tokens/s           {summary['tokens_per_second']:,.0f}")
    if "mfu" in summary:
        peak = f"{summary['peak_flops'] / 1e12:,.3g} TFLOP/s ({summary['peak_source']} peak)"
        lines.append(f"MFU                {summary['mfu']:.1%} of {peak}; attention counted half")
    seconds, first = summary["seconds"], summary["compile_seconds"]
    lines.append(
        f"time               {seconds:.0f} s, of which {first:.0f} s for compiling the first step"
    )
    return lines
