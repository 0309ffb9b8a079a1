"""A real case: protein signalling (Sachs et al. 2005), the experimental condition as parameter.

The data are the 7,466 pooled cells and the 18 edges of the package cdt (Apache-2.0); nothing is
gated on them, since the reference network is itself under debate.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from experiments.pce_causal_plots import draw_graph
from experiments.pce_causal_table import read_table
from jaxlib_papers.causal.baselines.ges import consistent_dag, ges
from jaxlib_papers.causal.baselines.pc import pc_fisher_z
from jaxlib_papers.causal.pce_causal import (
    PCTCD,
    CausalGraph,
    PCTCDConfig,
    direct_lingam,
    graph_metrics,
    graph_to_dict,
    notears_linear,
)

__all__ = ["CONDITIONS", "SachsStudy", "condition_indicators", "run_sachs"]

# Rows of each condition in the order of the pooled file.
CONDITIONS = {
    "CD3/CD28": 853,
    "+ ICAM-2": 902,
    "+ Akt inhibitor": 911,
    "+ G0076": 723,
    "+ psitectorigenin": 810,
    "+ U0126": 799,
    "+ LY294002": 848,
    "PMA": 913,
    "β2cAMP": 707,
}


def condition_indicators() -> np.ndarray:
    """[rows, 8] indicators of every condition but the first."""
    return np.repeat(np.eye(len(CONDITIONS))[:, 1:], list(CONDITIONS.values()), axis=0)


@dataclasses.dataclass(frozen=True)
class SachsStudy:
    """What was found.

    Attributes:
        metrics: by method, `graph_metrics` against the reference network, and "skeleton_f1".
        graph: of the method with the condition as parameter.
        truth: the reference network, True at [i, j] when j -> i.
    """

    metrics: dict[str, dict[str, Any]]
    graph: CausalGraph
    truth: np.ndarray

    def as_dict(self) -> dict[str, Any]:
        """Metrics, and the graph with each edge's standing in the reference network."""
        content = graph_to_dict(self.graph)
        names = content["variables"]
        for edge in content["edges"]:
            i, j = names.index(edge["effect"]), names.index(edge["cause"])
            edge["reference"] = (
                "same" if self.truth[i, j] else "reversed" if self.truth[j, i] else "absent"
            )
        return {"metrics": self.metrics, "graph": content}

    def picture(self) -> Any:
        """The graph, and each edge's strength in the nine conditions."""
        settings = np.eye(len(CONDITIONS))[:, 1:]
        return draw_graph(self.graph, named=dict(zip(CONDITIONS, settings, strict=True)))


def _read(directory: Path) -> tuple[np.ndarray, list[str], np.ndarray]:
    """(logarithms, names, reference network)."""
    X, first, names = read_table(directory / "cyto_full_data.csv", ["praf"])
    X, names = np.column_stack([first, X]), ["praf", *names]
    lines = (directory / "cyto_full_target.csv").read_text(encoding="utf-8").split()[1:]
    truth = np.zeros((len(names),) * 2, bool)
    for line in lines:
        cause, effect = (name.strip('"') for name in line.split(","))
        truth[names.index(effect), names.index(cause)] = True
    rows = sum(CONDITIONS.values())
    if len(X) != rows:
        raise ValueError(f"{directory} has {len(X)} rows, expected the {rows} of the study")
    return np.log(X), names, truth


def run_sachs(directory: Path, base: PCTCDConfig, l1: float) -> SachsStudy:
    """Fits all methods to the logarithms.

    Args:
        directory: with cyto_full_data.csv and cyto_full_target.csv.
        base: level and penalty are taken from here.
        l1: NOTEARS' penalty on standardised columns.

    Returns:
        `SachsStudy`.

    Raises:
        FileNotFoundError, ValueError: the files are not there, or not these.
    """
    logs, names, truth = _read(directory)
    # Conditions are labels: one indicator each, degree 1, and means that may move.
    ours = dataclasses.replace(base, degree=1, q=1.0, families="empirical", intercept=True)
    xi, parameters = condition_indicators(), list(CONDITIONS)[1:]
    graph = PCTCD(ours).fit(logs, xi, names=names, parameters=parameters)
    static = PCTCD(dataclasses.replace(ours, degree=0)).fit(logs, xi, names=names)
    found = {
        "PCT-CD": graph.adjacency,
        "PCT-CD without parameters": static.adjacency,
        "NOTEARS, unit SD": notears_linear(logs, l1, 0.1, standardize=True).T != 0,
        "DirectLiNGAM": direct_lingam(logs).adjacency,
        "PC, Fisher z": consistent_dag(pc_fisher_z(logs, base.alpha)),
        "GES, BIC": consistent_dag(ges(logs)),
    }
    metrics = {}
    for method, a in found.items():
        skeleton = graph_metrics(np.triu(a | a.T), np.triu(truth | truth.T))
        metrics[method] = graph_metrics(a, truth)._asdict() | {"skeleton_f1": skeleton.f1}
    return SachsStudy(metrics, graph, truth)
