"""What the experiments share: seeds with a result cache, criteria, and the report.

A report is a directory with ``report.json`` (configuration, environment, results of each run,
criteria), one PNG, and the table that also goes to the screen. A criterion ends in PASS or in "not
reproduced", with the figures that decided it; a run that could not be reproduced is a result, not
an error.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

__all__ = [
    "Criterion",
    "Report",
    "ResultCache",
    "environment",
    "mean_and_spread",
    "new_figure",
    "run_grid",
    "seeds_in_words",
    "write_report",
]

ROOT = Path(__file__).resolve().parent.parent
PASS, FAIL = "PASS", "not reproduced"


@dataclasses.dataclass(frozen=True)
class Criterion:
    """One condition under which the mechanism counts as reproduced.

    Attributes:
        name: The condition in words, with its threshold.
        passed: Whether it held.
        detail: The figures that decided it.
    """

    name: str
    passed: bool
    detail: str

    @property
    def verdict(self) -> str:
        return PASS if self.passed else FAIL


@dataclasses.dataclass(frozen=True)
class Report:
    """What `write_report` prints and writes.

    Attributes:
        slug: The paper's slug.
        title: Heading of the table.
        config: Whatever decided the results.
        columns: Headings of the table.
        rows: Cells of the table, already formatted.
        criteria: All conditions of this judgement.
        results: Figures of each run, by run name.
        notes: Sentences that a reader of the figures has to know.
    """

    slug: str
    title: str
    config: Mapping[str, Any]
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    criteria: Sequence[Criterion]
    results: Mapping[str, Any]
    notes: Sequence[str] = ()

    @property
    def passed(self) -> bool:
        """Whether there is a criterion and all of them held."""
        return bool(self.criteria) and all(c.passed for c in self.criteria)


def environment() -> dict[str, Any]:
    """Versions, device and cores: what a figure has to be read with."""
    import jax

    names = ("jax", "jaxlib", "flax", "optax", "numpy", "jaxlib-papers")
    versions = {}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    devices = jax.devices()
    return {
        "python": platform.python_version(),
        "versions": versions,
        "devices": f"{len(devices)} x {devices[0].device_kind}",
        "cpu_count": os.cpu_count(),
    }


def _source_fingerprint() -> str:
    """Hash of every source file that a result can depend on."""
    digest = hashlib.sha256()
    for place in ("jaxlib_papers", "kernels_pallas", "experiments"):
        for path in sorted((ROOT / place).rglob("*.py")):
            digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _plain(value: Any) -> Any:
    """JSON-able form of dataclasses, arrays and numbers; a non-finite number becomes its name."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Path):
        return str(value)
    return value


def _write_whole(path: Path, text: str) -> None:
    """Writes so that a reader finds the old file or the new one, never half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


class ResultCache:
    """Results of finished runs, so that an interrupted experiment goes on where it stopped.

    A result is found again only for the same configuration, the same sources of this repository and
    the same library versions: anything else is a new run.

    Args:
        directory: Where results lie, one JSON file a run; None keeps nothing.
    """

    def __init__(self, directory: Path | None):
        self._directory = directory
        self._sources = _source_fingerprint() if directory else ""

    def _path(self, key: Any) -> Path | None:
        if self._directory is None:
            return None
        about = [_plain(key), self._sources, environment()["versions"]]
        text = json.dumps(about, sort_keys=True)
        return self._directory / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"

    def get(self, key: Any) -> dict[str, Any] | None:
        """The stored result of `key`, or None; a file that cannot be read counts as absent."""
        path = self._path(key)
        if path is None or not path.is_file():
            return None
        try:
            return json.loads(path.read_text(encoding="utf-8"))["result"]
        except (ValueError, KeyError, TypeError):
            return None

    def put(self, key: Any, result: Mapping[str, Any]) -> dict[str, Any]:
        """Stores `result` and returns it in the form in which `get` will."""
        plain = _plain(result)
        path = self._path(key)
        if path is not None:
            _write_whole(path, json.dumps({"key": _plain(key), "result": plain}, indent=1))
        return plain


def run_grid(
    run: Callable[[str, int], Mapping[str, Any]],
    variants: Sequence[str],
    seeds: Sequence[int],
    *,
    config: Any,
    cache: ResultCache,
    say: Callable[[str], None] = print,
) -> dict[str, dict[int, dict[str, Any]]]:
    """Runs every variant with every seed, taking finished runs from the cache.

    Args:
        run: Called with (variant, seed), returns the figures of that run.
        variants: Names of the variants.
        seeds: Seeds, each used by every variant, so that variants can be compared pair by pair.
        config: What the results depend on besides variant, seed and sources.
        cache: Where finished runs are kept.
        say: Receives one line a run.

    Returns:
        Figures by variant and seed.
    """
    results: dict[str, dict[int, dict[str, Any]]] = {variant: {} for variant in variants}
    for seed in seeds:
        for variant in variants:
            key = {"config": config, "variant": variant, "seed": seed}
            result = cache.get(key)
            if result is None:
                start = time.perf_counter()
                result = cache.put(key, run(variant, seed))
                say(f"{variant}, seed {seed}: {time.perf_counter() - start:.0f} s")
            else:
                say(f"{variant}, seed {seed}: taken from an earlier run")
            results[variant][seed] = result
    return results


def seeds_in_words(seeds: Sequence[int]) -> str:
    """Three or more seeds in a row as "0 to 8", any others one by one: "0, 2, 5"."""
    if len(seeds) > 2 and list(seeds) == list(range(seeds[0], seeds[0] + len(seeds))):
        return f"{seeds[0]} to {seeds[-1]}"
    return ", ".join(map(str, seeds))


def mean_and_spread(values: Sequence[float], digits: int = 3) -> str:
    """Mean and standard deviation over seeds, as text; the mean alone for one or infinite values.

    A report keeps what is not finite as a word, so that the words count as their numbers here.
    """
    values = [float(value) for value in values]
    mean = statistics.fmean(values)
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return f"{mean:.{digits}f}"
    return f"{mean:.{digits}f} ± {statistics.stdev(values):.{digits}f}"


def new_figure(rows: int = 1, columns: int = 1, **kwargs: Any):
    """Figure and axes of matplotlib without a display; import happens here, not at start-up."""
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            'pictures need matplotlib: pip install "jaxlib-papers[plot]"'
        ) from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt.subplots(rows, columns, layout="constrained", **kwargs)


def write_report(report: Report, directory: Path, figure: Any = None) -> Path:
    """Prints the table and the verdicts, and writes the report directory.

    Args:
        report: What to show.
        directory: Made if missing; files of an earlier report in it are replaced.
        figure: A matplotlib figure, saved as ``<slug>.png`` and closed, or None.

    Returns:
        Path of ``report.json``.
    """
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 120)
    table = Table(title=report.title, title_justify="left")
    for index, column in enumerate(report.columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    for row in report.rows:
        table.add_row(*row)
    console.print(table)
    for note in report.notes:
        console.print(f"[dim]{note}[/dim]")
    for criterion in report.criteria:
        colour = "green" if criterion.passed else "red"
        console.print(f"[{colour}]{criterion.verdict}[/{colour}]  {criterion.name}")
        console.print(f"      {criterion.detail}", highlight=False)
    held = sum(c.passed for c in report.criteria)
    verdict = PASS if report.passed else FAIL
    console.print(f"{report.slug}: {verdict} ({held} of {len(report.criteria)} criteria held)")

    path = directory / "report.json"
    content = dataclasses.asdict(report) | {
        "passed": report.passed,
        "verdict": verdict,
        "environment": environment(),
    }
    _write_whole(path, json.dumps(_plain(content), indent=1, ensure_ascii=False) + "\n")
    if figure is not None:
        figure.savefig(directory / f"{report.slug}.png", dpi=130)
        import matplotlib.pyplot as plt

        plt.close(figure)
    console.print(f"written to {directory}", highlight=False)
    return path
