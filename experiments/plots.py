"""The pictures of a pre-training run."""

from __future__ import annotations

import itertools
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

__all__ = ["heldout_loss_figure", "jsd_figure", "routing_figure", "save_run_figures"]

_GRID = {"color": "#d9d9d9", "linewidth": 0.8}


def _axes(title: str, ylabel: str, size: tuple[float, float] = (7.2, 4.4)):
    from matplotlib.figure import Figure

    # Without pyplot: no global state, no window system.
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold")
    axes.set_xlabel("training step")
    axes.set_ylabel(ylabel)
    axes.grid(axis="y", **_GRID)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _colours(count: int):
    import matplotlib

    if count <= 10:
        return [matplotlib.colormaps["tab10"](i) for i in range(count)]
    return [matplotlib.colormaps["turbo"](x) for x in np.linspace(0.05, 0.95, count)]


def _label_ends(axes: Any, ends: Sequence[tuple[float, float, str, Any]]) -> None:
    """Writes names at the ends of lines, pushed apart where they would overlap."""
    low, high = axes.get_ylim()
    gap, floor = (high - low) * 0.052, -math.inf
    for x, y, text, colour in sorted(ends, key=lambda end: end[1]):
        floor = max(y, floor + gap)
        axes.annotate(
            text, (x, floor), xytext=(6, 0), textcoords="offset points", va="center",
            color=colour, fontsize=9, annotation_clip=False,
        )  # fmt: skip


def heldout_loss_figure(records: Sequence[Mapping[str, Any]], domains: Sequence[str]):
    """Held-out loss of each domain over the steps.

    Args:
      records: Records of the metrics file; those of kind ``eval`` are used.
      domains: Names, in the order of the colours.
    """
    records = [r for r in records if r["kind"] == "eval"]
    figure, axes = _axes("Held-out loss per domain", "loss (nats per token)")
    steps = [r["step"] for r in records]
    ends = []
    for name, colour in zip(domains, _colours(len(domains)), strict=True):
        values = [math.nan if r.get(f"loss/{name}") is None else r[f"loss/{name}"] for r in records]
        axes.plot(steps, values, color=colour, marker="o", markersize=3.5, label=name)
        if values and math.isfinite(values[-1]):
            ends.append((steps[-1], values[-1], f"{name}  {values[-1]:.2f}", colour))
    if len(domains) <= 12:
        _label_ends(axes, ends)
    else:
        axes.legend(fontsize=7, ncols=3, frameon=False)
    return figure


def jsd_figure(records: Sequence[Mapping[str, Any]], domains: Sequence[str]):
    """Jensen-Shannon divergence of each pair of domains over the steps, mean over layers."""
    records = [r for r in records if r["kind"] == "eval" and r.get("pairwise_jsd") is not None]
    figure, axes = _axes(
        "How differently domains are routed", "pairwise JS divergence (nats, mean over layers)"
    )
    steps = [r["step"] for r in records]
    values = np.array([r["pairwise_jsd"] for r in records], np.float64)
    pairs = list(itertools.combinations(range(len(domains)), 2))
    if len(pairs) <= 15:
        ends = []
        for (a, b), colour in zip(pairs, _colours(len(pairs)), strict=True):
            axes.plot(steps, values[:, a, b], color=colour, linewidth=1.2)
            ends.append((steps[-1], values[-1, a, b], f"{domains[a]} / {domains[b]}", colour))
    else:
        upper = values[:, [a for a, _ in pairs], [b for _, b in pairs]]
        low, high = np.quantile(upper, [0.1, 0.9], axis=1)
        axes.fill_between(steps, low, high, color="#9ecae1", label="10 to 90 % of pairs")
    mean = np.mean([values[:, a, b] for a, b in pairs], axis=0)
    axes.plot(steps, mean, color="black", linewidth=2.4, label="mean of all pairs")
    axes.set_ylim(bottom=0)
    if np.max(values) > 0.4:  # near enough to the bound for the bound to tell something
        axes.axhline(math.log(2), color="#666666", linewidth=1, linestyle=":")
        axes.annotate(
            "ln 2: no expert in common", (steps[0], math.log(2)), xytext=(2, -11),
            textcoords="offset points", fontsize=8, color="#666666",
        )  # fmt: skip
    if len(pairs) <= 15:
        _label_ends(axes, ends)
    axes.legend(frameon=False, loc="upper left", fontsize=9)
    return figure


def routing_figure(
    routing: np.ndarray, domains: Sequence[str], layers: Sequence[int] | None = None
):
    """Which experts each domain is routed to, one heat map per layer.

    Args:
      routing: [layers, domains, experts] mean router distributions.
      domains: Names of the domains.
      layers: Which layers to draw; by default at most 8, evenly spread.
    """
    from matplotlib.figure import Figure

    count, _, experts = routing.shape
    if layers is None:
        layers = sorted({round(x) for x in np.linspace(0, count - 1, min(count, 8))})
    columns = min(len(layers), 2 if experts > 12 else 3)
    rows = math.ceil(len(layers) / columns)
    cell_width = 0.42 if experts <= 16 else 0.12
    cell_height = 0.36 if len(domains) <= 12 else 0.18
    width = columns * (max(experts * cell_width, 2.4) + 0.5) + 1.6
    height = rows * (max(len(domains) * cell_height, 1.2) + 0.75) + 0.9
    figure = Figure(figsize=(width, height), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharey=True)
    # Relative to even use, so that maps of 8 and of 64 experts read alike.
    values = routing * experts
    top = max(2.0, float(np.max(values)))
    for axes, layer in itertools.zip_longest(grid.flat, layers):
        if layer is None:
            axes.set_visible(False)
            continue
        image = axes.imshow(values[layer], cmap="viridis", vmin=0, vmax=top, aspect="auto")
        axes.set_title(f"layer {layer}", loc="left", fontsize=10)
        axes.set_xlabel("expert", fontsize=9)
        step = 1 if experts <= 16 else 8
        axes.set_xticks(range(0, experts, step))
        axes.set_yticks(range(len(domains)), domains)
        axes.tick_params(length=0, labelsize=8 if len(domains) <= 24 else 6)
        if experts <= 16 and len(domains) <= 12:
            for (i, j), value in np.ndenumerate(values[layer]):
                colour = "black" if value > 0.6 * top else "white"
                axes.text(j, i, f"{value:.1f}", ha="center", va="center", fontsize=7, color=colour)
    bar = figure.colorbar(image, ax=grid, shrink=0.8, pad=0.02, aspect=12 + 8 * rows)
    bar.set_label("router probability / even share", fontsize=9)
    figure.suptitle("Where the router sends each domain", x=0.01, ha="left", fontweight="bold")
    return figure


def save_run_figures(
    directory: str | pathlib.Path,
    records: Sequence[Mapping[str, Any]],
    domains: Sequence[str],
    routing: np.ndarray | None,
) -> list[pathlib.Path]:
    """Writes the pictures of a run.

    Args:
      directory: Run directory.
      records: Records of its metrics file.
      domains: Names of the domains.
      routing: [layers, domains, experts] of the last evaluation, None for a dense model.

    Returns:
      The files: ``heldout_loss.png``, and for a sparse model ``routing.png`` and (with two domains
      or more) ``jsd.png``.

    Raises:
      ImportError: matplotlib is not installed.
    """
    figures = {"heldout_loss.png": heldout_loss_figure(records, domains)}
    if routing is not None:
        figures["routing.png"] = routing_figure(routing, domains)
        if len(domains) > 1:
            figures["jsd.png"] = jsd_figure(records, domains)
    paths = []
    for name, figure in figures.items():
        paths.append(pathlib.Path(directory) / name)
        figure.savefig(paths[-1], dpi=140)
    return paths
