"""Pictures of a causal graph whose edges are functions of operating parameters."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from experiments import harness
from jaxlib_papers.causal.pce_causal import CausalGraph

__all__ = ["draw_graph", "drivers"]

COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown")
STEADY = "0.45"


def drivers(graph: CausalGraph, i: int, j: int) -> tuple[int, ...]:
    """Parameters behind an edge: none, the dominant one, or two that only act together."""
    sobol = graph.sobol(i, j)
    if sobol.dominant < 0:
        return ()
    if sobol.first.sum() >= 0.5:
        return (sobol.dominant,)
    return tuple(int(k) for k in np.argsort(-sobol.total)[:2])


def _places(graph: CausalGraph) -> dict[int, tuple[float, float]]:
    """Causes on the left, effects to the right of all their causes."""
    a, n = graph.adjacency, len(graph.adjacency)
    depth = np.zeros(n, int)
    for _ in range(n):
        for i in range(n):
            if a[i].any():
                depth[i] = depth[a[i]].max() + 1
    places: dict[int, tuple[float, float]] = {}
    for level in range(depth.max() + 1):
        nodes = np.flatnonzero(depth == level)
        # Near the middle of their causes, so that arrows cross less.
        aim = {i: np.mean([places[j][1] for j in np.flatnonzero(a[i])] or [0.0]) for i in nodes}
        nodes = sorted(nodes, key=lambda i: (aim[i], i))
        for k, i in enumerate(nodes):
            lift = 0.35 * (level % 2) if len(nodes) == 1 else 0.0
            places[int(i)] = (float(level), (len(nodes) - 1) / 2 - k + lift)
    return places


def _colour(graph: CausalGraph, i: int, j: int) -> str:
    behind = drivers(graph, i, j)
    return COLOURS[behind[0] % len(COLOURS)] if len(behind) == 1 else STEADY


def _draw_arrows(ax, graph: CausalGraph) -> None:
    places = _places(graph)
    top = max(
        (np.linalg.norm(graph.theta[i, j]) for i, j in np.argwhere(graph.adjacency)), default=1
    )
    for i, j in np.argwhere(graph.adjacency):
        norm = float(np.linalg.norm(graph.theta[i, j]))
        ax.annotate(
            "",
            xy=places[i],
            xytext=places[j],
            arrowprops=dict(
                arrowstyle="-|>",
                color=_colour(graph, i, j),
                lw=0.8 + 3.2 * norm / top,
                shrinkA=15,
                shrinkB=15,
                mutation_scale=13,
                connectionstyle="arc3,rad=0.08",
            ),
        )
    for i, (x, y) in places.items():
        ax.text(
            x, y, graph.names[i], ha="center", va="center", fontsize=9,
            bbox=dict(boxstyle="round,pad=0.35", fc="white", ec="0.3"),
        )  # fmt: skip
    xs, ys = np.array(list(places.values())).T
    ax.set(xlim=(xs.min() - 0.5, xs.max() + 0.5), ylim=(ys.min() - 0.7, ys.max() + 0.7))
    ax.axis("off")
    handles = [
        ax.plot([], [], color=COLOURS[k % len(COLOURS)], lw=3, label=f"driven by {name}")[0]
        for k, name in enumerate(graph.parameters)
    ]
    handles += ax.plot([], [], color=STEADY, lw=3, label="by several together, or steady")
    ax.legend(handles=handles, loc="lower center", ncols=len(handles), frameon=False, fontsize=9)
    ax.set_title(
        "cause → effect; width: strength, colour: the parameter that drives it", fontsize=10
    )


def draw_graph(
    graph: CausalGraph,
    truth: Callable[[int, int, np.ndarray], np.ndarray] | None = None,
    *,
    most: int = 16,
) -> Any:
    """One figure: the graph, and below it each edge's strength over its main parameter.

    The other parameters are held at the middle of what was observed. The band is the pointwise
    95 % interval, given the graph.

    Args:
        graph: the fitted graph.
        truth: (effect, cause, settings [k, d]) -> true strength in data units, drawn dashed.
        most: edges that get a panel, the strongest first.

    Returns:
        A matplotlib figure.
    """
    edges = [(int(i), int(j)) for i, j in np.argwhere(graph.adjacency)]
    edges.sort(key=lambda e: -float(np.linalg.norm(graph.theta[e])))
    shown = edges[:most]
    columns = 4
    rows = max(1, math.ceil(len(shown) / columns))
    figure, axes = harness.new_figure(
        rows + 2, columns, figsize=(3.1 * columns, 2.3 * rows + 4.4), squeeze=False
    )
    grid = axes[0, 0].get_gridspec()
    for ax in axes[:2].ravel():
        ax.remove()
    _draw_arrows(figure.add_subplot(grid[:2, :]), graph)
    xi = graph.data.xi
    units = "standard" if truth is None else "data"
    for k, ax in enumerate(axes[2:].ravel()):
        if k >= len(shown):
            ax.axis("off")
            continue
        i, j = shown[k]
        main, *others = drivers(graph, i, j) or (0,)
        settings = np.tile(np.median(xi, axis=0), (81, 1))
        settings[:, main] = np.linspace(xi[:, main].min(), xi[:, main].max(), 81)
        ax.axhline(0, color="0.7", lw=0.8)
        title, colour = f"{graph.names[j]} → {graph.names[i]}", _colour(graph, i, j)
        for level, share in ((0.05, 0.3), (0.95, 1.0)) if others else ((0.5, 1.0),):
            at = settings.copy()
            if others:
                at[:, others[0]] = np.quantile(xi[:, others[0]], level)
            band = graph.bands(i, j, at, units=units)
            ax.fill_between(at[:, main], band.lower, band.upper, color=colour, alpha=0.25, lw=0)
            ax.plot(at[:, main], band.strength, color=colour, lw=1.0 + share)
            if truth is not None and (true := truth(i, j, at)) is not None:
                ax.plot(at[:, main], true, "k--", lw=0.9)
        if others:
            title += f"\n{graph.parameters[others[0]]} low: thin, high: thick"
        ax.set_title(title, fontsize=9)
        ax.set_xlabel(graph.parameters[main], fontsize=8)
        ax.tick_params(labelsize=7)
        if k % columns == 0:
            ax.set_ylabel("strength" if truth is not None else "strength (SD per SD)", fontsize=8)
    return figure
