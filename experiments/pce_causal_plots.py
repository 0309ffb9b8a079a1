"""Pictures of a causal graph whose edges are functions of operating parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from experiments import harness
from jaxlib_papers.causal.pce_causal import CausalGraph

__all__ = ["draw_graph", "drivers"]

COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown")
STEADY = "0.45"
LEVEL = 0.01  # of the test of whether an edge's strength varies
FEW = 6  # settings of a parameter that are drawn as points, not joined by a curve


def drivers(graph: CausalGraph, i: int, j: int) -> tuple[int, ...]:
    """Parameters behind an edge: none (steady), the dominant one, or two that only act together."""
    sobol = graph.sobol(i, j)
    if sobol.dominant < 0 or graph.variation_pvalue(i, j) > LEVEL:
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


def _colour(graph: CausalGraph, i: int, j: int, settings: np.ndarray | None = None) -> str:
    """By driving parameter; with named settings, by the sign that the strength has in them."""
    if settings is not None:
        lower, _, upper = graph.bands(i, j, settings)
        return COLOURS[0] if (lower > 0).all() else COLOURS[1] if (upper < 0).all() else STEADY
    behind = drivers(graph, i, j)
    return COLOURS[behind[0] % len(COLOURS)] if len(behind) == 1 else STEADY


def _draw_arrows(ax, graph: CausalGraph, settings: np.ndarray | None) -> None:
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
                color=_colour(graph, i, j, settings),
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
    if settings is None:
        labels = {
            f"driven by {name}": COLOURS[k % len(COLOURS)]
            for k, name in enumerate(graph.parameters)
        } | {"by several together, or steady": STEADY}
        meaning = "colour: the parameter that drives it"
    else:
        signs = ("raises", "lowers", "not clearly the same sign in all")
        labels = dict(zip(signs, (*COLOURS[:2], STEADY), strict=True))
        meaning = "colour: its sign in the settings below"
    handles = [ax.plot([], [], color=c, lw=3, label=name)[0] for name, c in labels.items()]
    ax.legend(handles=handles, loc="lower center", ncols=min(len(handles), 4), frameon=False)
    ax.set_title(f"cause → effect; width: strength, {meaning}", fontsize=10)


def _draw_named(ax, graph: CausalGraph, edge, settings: np.ndarray, units: str) -> None:
    """Strength of one edge in each setting, with its 95 % interval."""
    band = graph.bands(*edge, settings, units=units)
    places = np.arange(len(settings))
    ax.errorbar(
        places,
        band.strength,
        yerr=[band.strength - band.lower, band.upper - band.strength],
        fmt="o",
        ms=4,
        capsize=3,
        color=_colour(graph, *edge, settings),
    )
    ax.set_xticks(places)
    ax.set_xlim(-0.5, len(settings) - 0.5)


def _draw_curve(ax, graph: CausalGraph, edge, truth, units: str) -> str:
    """Strength of one edge over its main parameter; returns a second line for the title."""
    xi = graph.data.xi
    main, *others = drivers(graph, *edge) or (0,)
    distinct = np.unique(xi[:, main])
    few = len(distinct) <= FEW
    places = distinct if few else np.linspace(distinct[0], distinct[-1], 81)
    settings = np.tile(np.median(xi, axis=0), (len(places), 1))
    settings[:, main] = places
    colour = _colour(graph, *edge)
    for level, width in ((0.05, 1.3), (0.95, 2.2)) if others else ((0.5, 2.0),):
        at = settings.copy()
        if others:
            at[:, others[0]] = np.quantile(xi[:, others[0]], level)
        band = graph.bands(*edge, at, units=units)
        if few:
            error = [band.strength - band.lower, band.upper - band.strength]
            ax.errorbar(places, band.strength, error, fmt="o", ms=2.5 * width, capsize=3, c=colour)
        else:
            ax.fill_between(places, band.lower, band.upper, color=colour, alpha=0.25, lw=0)
            ax.plot(places, band.strength, color=colour, lw=width)
        if truth is not None and (true := truth(*edge, at)) is not None:
            ax.plot(places, true, "k--", lw=0.9)
    if few:
        ax.set_xticks(places)
    else:
        ax.locator_params(axis="x", nbins=5)
    ax.set_xlabel(graph.parameters[main], fontsize=8)
    return f"\n{graph.parameters[others[0]]} low: thin, high: thick" if others else ""


def draw_graph(
    graph: CausalGraph,
    truth: Callable[[int, int, np.ndarray], np.ndarray] | None = None,
    *,
    named: Mapping[str, np.ndarray] | None = None,
    most: int = 16,
) -> Any:
    """One figure: the graph, and below it each edge's strength over its main parameter.

    The other parameters are held at the middle of what was observed. The band is the pointwise
    95 % interval, given the graph.

    Args:
        graph: the fitted graph.
        truth: (effect, cause, settings [k, d]) -> true strength in data units, drawn dashed.
        named: settings [d] of all parameters by name (conditions, recipes): panels then show the
            strength in each of these, for parameters that are labels.
        most: edges that get a panel, the strongest first.

    Returns:
        A matplotlib figure.
    """
    edges = [(int(i), int(j)) for i, j in np.argwhere(graph.adjacency)]
    edges.sort(key=lambda e: -float(np.linalg.norm(graph.theta[e])))
    shown = edges[:most]
    settings = None if named is None else np.stack(list(named.values()))
    columns = 4
    rows = max(1, math.ceil(len(shown) / columns))
    figure, axes = harness.new_figure(
        rows + 2, columns, figsize=(3.1 * columns, 2.3 * rows + 4.4), squeeze=False
    )
    grid = axes[0, 0].get_gridspec()
    for ax in axes[:2].ravel():
        ax.remove()
    _draw_arrows(figure.add_subplot(grid[:2, :]), graph, settings)
    units = "standard" if truth is None else "data"
    for k, ax in enumerate(axes[2:].ravel()):
        if k >= len(shown):
            ax.axis("off")
            continue
        i, j = shown[k]
        ax.axhline(0, color="0.7", lw=0.8)
        title = f"{graph.names[j]} → {graph.names[i]}"
        ax.tick_params(labelsize=7)
        if settings is None:
            title += _draw_curve(ax, graph, (i, j), truth, units)
        else:
            _draw_named(ax, graph, (i, j), settings, units)
            last = k + columns >= len(shown)  # nothing below it
            ax.set_xticklabels(list(named) if last else [], rotation=90, fontsize=7)
        ax.set_title(title, fontsize=9)
        if k % columns == 0:
            ax.set_ylabel("strength" if truth is not None else "strength (SD per SD)", fontsize=8)
    band = "bars" if named is not None else "bands"
    dashed = "" if truth is None else "; dashed: the true function"
    left_out = f"; the {most} strongest of {len(edges)} edges" if len(edges) > most else ""
    figure.supxlabel(f"{band}: 95 % interval, given the graph{dashed}{left_out}", fontsize=9)
    return figure
