"""A user's own table: read it, fit the graph, write JSON, GraphML and a picture."""

from __future__ import annotations

import csv
import dataclasses
import json
import re
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from experiments.pce_causal_plots import draw_graph, drivers
from jaxlib_papers.causal.pce_causal import (
    PCTCD,
    PCTCDConfig,
    graph_to_dict,
    graph_to_graphml,
)

__all__ = ["fit_table", "read_table", "split_list"]


def split_list(text: str) -> list[str]:
    """Splits at commas outside of parentheses: "T,uniform(0, 1)" has two entries."""
    return [part.strip() for part in re.split(r",(?![^(]*\))", text) if part.strip()]


def _select(path: Path, names: Sequence[str], parameters, variables) -> list[str]:
    """The columns that are needed, parameters last; ValueError where one is not there."""
    if len(set(names)) != len(names):
        raise ValueError(f"{path}: two columns have the same name; rename one")
    for name in (*parameters, *variables):
        if name not in names:
            raise ValueError(f"{path} has no column {name!r}; it has {', '.join(names)}")
    return [n for n in (variables or names) if n not in parameters] + list(parameters)


def _csv_columns(path: Path, parameters, variables) -> dict[str, np.ndarray]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = list(csv.reader(file))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text; save it as UTF-8") from error
    if len(rows) < 2:
        raise ValueError(f"{path} has {len(rows)} lines, expected a heading and rows")
    names = [name.strip() for name in rows[0]]
    columns: dict[str, np.ndarray] = {}
    for name in _select(path, names, parameters, variables):
        k = names.index(name)
        values = np.empty(len(rows) - 1)
        for line, row in enumerate(rows[1:], 2):
            if len(row) != len(names):
                raise ValueError(f"{path} line {line} has {len(row)} cells, expected {len(names)}")
            cell = row[k].strip()
            try:
                values[line - 2] = float(cell) if cell else np.nan
            except ValueError:
                raise ValueError(
                    f"{path} line {line}, column {name!r}: {cell!r} is no number; encode it or "
                    "leave the column out with --variables"
                ) from None
        columns[name] = values
    return columns


def _parquet_columns(path: Path, parameters, variables) -> dict[str, np.ndarray]:
    try:
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("Parquet needs pyarrow: pip install pyarrow") from error
    table = pyarrow.parquet.read_table(path)
    columns = {}
    for name in _select(path, table.column_names, parameters, variables):
        try:
            values = table.column(name).cast("float64").to_numpy()
        except (pyarrow.ArrowInvalid, pyarrow.ArrowNotImplementedError) as error:
            raise ValueError(
                f"{path}, column {name!r} holds no numbers; encode it or leave the column out with "
                "--variables"
            ) from error
        columns[name] = np.asarray(values, np.float64)
    return columns


def read_table(
    path: Path, parameters: Sequence[str], variables: Sequence[str] = ()
) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Observations and parameters from a file with named columns.

    Args:
        path: ``.csv`` (comma-separated, heading in the first line) or ``.parquet``.
        parameters: Names of the parameter columns.
        variables: Names of the other columns to use; empty takes all.

    Returns:
        (X, xi, names of X's columns). Empty cells become NaN.

    Raises:
        ValueError: Another ending, no such column, a cell that is no number.
    """
    readers = {".csv": _csv_columns, ".parquet": _parquet_columns}
    if path.suffix.lower() not in readers:
        raise ValueError(f"table is {path}, expected a name that ends in {' or '.join(readers)}")
    if not parameters:
        raise ValueError("parameters is empty; name the columns of the operating parameters")
    columns = readers[path.suffix.lower()](path, parameters, variables)
    names = [n for n in (variables or columns) if n not in parameters]
    if not names:
        raise ValueError(f"{path} has no column besides the parameters")
    X = np.stack([columns[n] for n in names], axis=1)
    return X, np.stack([columns[p] for p in parameters], axis=1), names


def fit_table(
    path: Path,
    parameters: str,
    families: str,
    config: PCTCDConfig,
    out: Path,
    *,
    variables: str = "",
    bootstrap: int = 200,
    drop_missing: bool = False,
) -> int:
    """Fits the graph of a table, prints its edges, and writes JSON, GraphML and PNG to `out`."""
    chosen = split_list(parameters)
    X, xi, names = read_table(path, chosen, split_list(variables))
    if drop_missing:
        whole = np.isfinite(X).all(axis=1) & np.isfinite(xi).all(axis=1)
        print(f"{int((~whole).sum())} of {len(whole)} rows left out: they have empty cells")
        X, xi = X[whole], xi[whole]
    given = split_list(families) or ["uniform"]
    config = dataclasses.replace(config, families=given * len(chosen) if len(given) == 1 else given)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        graph = PCTCD(config).fit(X, xi, names=names, parameters=chosen)
    for warning in caught:
        print(f"warning: {warning.message}", file=sys.stderr)
    resampled = graph.bootstrap(bootstrap)

    table = Table("edge", "mean strength [95 %]", "probability", "driven by", "its share", "norm")
    for edge in (content := graph_to_dict(graph, resampled))["edges"]:
        low, high = edge["mean_low"], edge["mean_high"]
        i, j = names.index(edge["effect"]), names.index(edge["cause"])
        behind = drivers(graph, i, j)
        driver = " with ".join(chosen[k] for k in behind)
        share = max(edge["sobol_first"]) if len(behind) == 1 else 1 - sum(edge["sobol_first"])
        table.add_row(
            f"{edge['cause']} → {edge['effect']}",
            f"{edge['mean_strength']:+.3f} [{low:+.3f}, {high:+.3f}]",
            f"{edge['probability']:.2f}",
            driver or "steady",
            f"{share:.0%}" if driver else "",
            f"{edge['norm']:.3f}",
        )
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 120)
    console.print(
        f"{len(X)} rows, {len(names)} variables, {len(chosen)} parameters", highlight=False
    )
    console.print(table)
    console.print(
        "Strengths are standard deviations of the effect per standard deviation of the cause."
    )
    out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False)
    (out / "graph.json").write_text(text + "\n", encoding="utf-8")
    (out / "graph.graphml").write_text(graph_to_graphml(graph, resampled), encoding="utf-8")
    draw_graph(graph).savefig(out / "graph.png", dpi=110)
    console.print(f"written to {out}: graph.json, graph.graphml, graph.png", highlight=False)
    return 0
