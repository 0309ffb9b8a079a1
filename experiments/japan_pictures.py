"""Pictures of the JAPAN experiment: regions as contours of the score at its threshold."""

from __future__ import annotations

from typing import Any

import numpy as np

from experiments import harness
from jaxlib_papers.uncertainty import japan

__all__ = ["picture", "shown"]


def shown(models: dict[str, Any], x: np.ndarray, y: np.ndarray, points: int = 3) -> dict[str, Any]:
    """Scores above their thresholds on a grid at a few test points, and the targets near them.

    Args:
        models: calibrated; the first one's parts are counted.
        x: features of test points.
        y: their targets.
        points: how many of them are shown.
    """
    order = np.argsort(x[:, 0])
    chosen = x[order[(np.linspace(0.1, 0.9, points) * len(order)).astype(int)]]
    near = np.argsort(np.linalg.norm(x - chosen[:, None], axis=-1), axis=1)[:, :60]
    drawn = {"x": chosen, "y": y[near], "levels": {}}
    for index, (name, model) in enumerate(models.items()):
        region = model.region_mask_2d(chosen, grid=120)
        cells = np.stack(np.meshgrid(region.first, region.second, indexing="ij"), axis=-1)
        levels = [
            model.score_samples_of(
                np.broadcast_to(one, (cells[..., 0].size, len(one))), cells.reshape(-1, 2)
            )
            for one in chosen
        ]
        levels = np.stack(levels).reshape(region.mask.shape) - float(model.threshold_)
        drawn["levels"][name] = np.round(np.clip(levels, -9, 9), 3)
        if index == 0:
            # Slivers of a few cells are no parts worth a mention.
            sizes = [np.bincount(japan.label_components_2d(m)[0].ravel())[1:] for m in region.mask]
            drawn["parts"] = [int((s >= 0.02 * s.sum()).sum()) for s in sizes]
            drawn |= {"first": region.first, "second": region.second}
    return drawn


def picture(results: dict[str, dict[int, dict]], seed: int):
    """Regions with their thresholds as contours: disjoint parts that turn with x."""
    rows = [
        (f"{part}, {flow}", results[part][seed][key])
        for part, key, flow in (
            ("A", "picture", "affine flow"),
            ("A", "larger", "spline flow"),
            ("B", "picture", "affine flow"),
        )
        if key in results[part][seed]
    ]
    figure, axes = harness.new_figure(len(rows), 3, figsize=(9, 3.2 * len(rows)), squeeze=False)
    for row, (name, drawn) in enumerate(rows):
        grid = np.meshgrid(drawn["first"], drawn["second"], indexing="ij")
        levels = {method: np.asarray(v) for method, v in drawn["levels"].items()}
        some = np.argwhere((levels["JAPAN"] >= 0).any(axis=0))
        limits = [np.asarray(drawn[axis])[some[:, i]] for i, axis in enumerate(("first", "second"))]
        for column in range(3):
            ax, level = axes[row, column], levels["JAPAN"][column]
            ax.contourf(*grid, level, levels=[0, 99], colors=["tab:red"], alpha=0.25)
            ax.contour(*grid, level, levels=[0], colors="tab:red", linewidths=1.2)
            if "CONTRA" in levels:
                latent = levels["CONTRA"][column]
                ax.contour(*grid, latent, levels=[0], colors="tab:gray", linewidths=1)
            points = np.asarray(drawn["y"][column])
            ax.plot(points[:, 0], points[:, 1], "k.", ms=3, alpha=0.7)
            count = drawn["parts"][column]
            parts = f"{count} part" + "s" * (count != 1)
            ax.set_title(f"{name}\nx = {drawn['x'][column][0]:.2f}: {parts}", fontsize=9)
            ax.set_aspect("equal")
            for limit, put in zip(limits, (ax.set_xlim, ax.set_ylim), strict=True):
                if len(limit):
                    put(limit.min() - 0.5, limit.max() + 0.5)
    figure.suptitle("Regions at the calibrated threshold: JAPAN red, CONTRA grey; targets near x")
    return figure
