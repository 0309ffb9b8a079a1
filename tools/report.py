"""One HTML page of a training run: curves, heat maps, alarms, restarts, goodput.

  python -m tools.report runs/tiny-20261130-120000 [--out report.html]

Reads what the run wrote (config.json, metrics.jsonl, summary.json where it finished) and writes
`report.html` beside it. The page needs no network: its pictures are drawn in it.

Exit codes: 0 written; 2 no run there.
"""

from __future__ import annotations

import argparse
import html
import json
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["goodput", "main", "page"]

_WIDTH, _HEIGHT, _MARGIN = 460, 200, 44
_COLOURS = ("#1f6feb", "#d1242f", "#1a7f37", "#9a6700", "#8250df", "#57606a", "#bf3989", "#0a3069")
_STYLE = """
body{font:15px/1.45 system-ui,sans-serif;max-width:1010px;margin:2em auto;padding:0 1em}
h1{font-size:1.5em}h2{font-size:1.15em;margin-top:2em;border-bottom:1px solid #d1d9e0}
table{border-collapse:collapse;margin:.5em 0}td,th{padding:.2em .7em;text-align:right}
td:first-child,th:first-child{text-align:left}tr:nth-child(even){background:#f6f8fa}
svg{margin:.3em 1em .3em 0}.heat td{width:2.2em;text-align:center;font-size:11px;padding:.25em}
.note{color:#57606a}
"""


def _series(records: Sequence[Mapping[str, Any]], name: str) -> list[tuple[float, float]]:
    return [
        (r["step"], r[name]) for r in records if isinstance(r.get(name), int | float)
    ]  # null (not finite) is a gap


def _number(value: float) -> str:
    return f"{value:,.4g}"


def _curve(title: str, lines: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """An SVG picture of some curves; nothing where there are no points."""
    lines = {name: points for name, points in lines.items() if points}
    if not lines:
        return ""
    xs = [x for points in lines.values() for x, _ in points]
    ys = [y for points in lines.values() for _, y in points]
    left, right, low, high = min(xs), max(xs), min(ys), max(ys)
    across, up = (right - left) or 1.0, (high - low) or 1.0
    inner, tall = _WIDTH - _MARGIN - 8, _HEIGHT - 46

    def place(x: float, y: float) -> str:
        return f"{_MARGIN + inner * (x - left) / across:.1f},{24 + tall * (1 - (y - low) / up):.1f}"

    parts = [
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img" aria-label="{html.escape(title)}">'
    ]
    parts.append(f'<text x="{_MARGIN}" y="14" font-weight="600">{html.escape(title)}</text>')
    for value in (low, low + up / 2, low + up):
        y = 24 + tall * (1 - (value - low) / up)
        parts.append(
            f'<line x1="{_MARGIN}" x2="{_WIDTH - 8}" y1="{y:.1f}" y2="{y:.1f}" stroke="#d1d9e0"/>'
            f'<text x="{_MARGIN - 4}" y="{y + 4:.1f}" font-size="10" text-anchor="end">'
            f"{_number(value)}</text>"
        )
    for text, x, anchor in ((left, _MARGIN, "start"), (right, _WIDTH - 8, "end")):
        parts.append(
            f'<text x="{x}" y="{_HEIGHT - 8}" font-size="10" text-anchor="{anchor}">'
            f"{_number(text)}</text>"
        )
    for number, (name, points) in enumerate(lines.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        path = " ".join(place(x, y) for x, y in points)
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
        )
        if len(points) == 1:
            x, y = place(*points[0]).split(",")
            parts.append(f'<circle cx="{x}" cy="{y}" r="2.5" fill="{colour}"/>')
        if len(lines) > 1:
            parts.append(
                f'<text x="{_WIDTH - 12}" y="{36 + 13 * number}" font-size="11" fill="{colour}" '
                f'text-anchor="end">{html.escape(name)}</text>'
            )
    return "".join(parts) + "</svg>"


def _heat(title: str, rows: Sequence[Sequence[float]], names: Sequence[str]) -> str:
    high = max((value for row in rows for value in row), default=0.0) or 1.0
    body = []
    for name, row in zip(names, rows, strict=True):
        cells = "".join(
            f'<td style="background:rgba(31,111,235,{0.9 * value / high:.2f})">{value:.2f}</td>'
            for value in row
        )
        body.append(f"<tr><th>{html.escape(name)}</th>{cells}</tr>")
    return f'<h3>{html.escape(title)}</h3><table class="heat">{"".join(body)}</table>'


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    def line(cells: Sequence[Any], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(str(c))}</{tag}>" for c in cells) + "</tr>"

    return f"<table>{line(head, 'th')}{''.join(line(row, 'td') for row in rows)}</table>"


def goodput(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Where the time of a whole run went, all attempts and what lay between them together.

    Args:
      records: All records of ``metrics.jsonl``.

    Returns:
      ``elapsed`` (first start to last record, seconds), the seconds of each part, ``other``
      (compiling, restoring, steps that were lost, time between attempts) and ``goodput``, the part
      of the elapsed time in which steps were trained that count. Empty without timed records.
    """
    times = [r["time"] for r in records if "time" in r]
    began = [r["began"] for r in records if r.get("kind") == "attempt" and "began" in r]
    train = [r for r in records if r.get("kind") == "train"]
    if not times or not train:
        return {}
    elapsed = max(times) - min([*times, *began])
    out = {"elapsed": elapsed}
    for name in ("compute", "data_wait", "evaluate", "save"):
        out[name] = sum(r.get(f"seconds_{name}") or 0.0 for r in train)
    firsts = {r["step"] for r in records if r.get("kind") == "attempt"}
    # The first interval of an attempt holds the compilation.
    compiled = 0.0
    for step in firsts:
        after = [r for r in train if r["step"] > step]
        if after:
            first = min(after, key=lambda r: r["step"])
            rest = [r.get("seconds_compute") or 0.0 for r in train if r is not first]
            usual = sorted(rest)[len(rest) // 2] if rest else 0.0
            compiled += max(0.0, (first.get("seconds_compute") or 0.0) - usual)
    out["compute"] -= compiled
    out["other"] = max(0.0, elapsed - sum(out[n] for n in out if n != "elapsed"))
    out["goodput"] = out["compute"] / elapsed if elapsed > 0 else 0.0
    return out


def page(directory: pathlib.Path) -> str:
    """The page of a run as text.

    Raises:
      FileNotFoundError: The directory holds no metrics.
    """
    from jaxlib_papers.train.metrics import read_records

    path = directory / "metrics.jsonl"
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: no training run writes there")
    records = read_records(path)
    config = _json(directory / "config.json")
    summary = _json(directory / "summary.json")
    train = [r for r in records if r["kind"] == "train"]
    evals = [r for r in records if r["kind"] == "eval"]
    alarms = [r for r in records if r["kind"] == "alarm"]
    attempts = [r for r in records if r["kind"] == "attempt"]
    domains = config.get("domains", [])
    title = f"Run {directory.resolve().name}"
    parts = [
        "<!doctype html><html lang=en><head><meta charset=utf-8>",
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{html.escape(title)}</h1>",
        _facts(config, summary, train),
        "<h2>Losses</h2>",
        _curve("training loss", {"loss": _series(train, "loss")}),
        _curve("held-out loss", {d: _series(evals, f"loss/{d}") for d in domains}),
        _curve("gradient norm", {"norm": _series(train, "grad_norm")}),
        _curve("learning rate", {"rate": _series(train, "learning_rate")}),
        _curve("divergence of experts (JSD)", {"jsd": _series(train, "mean_jsd")}),
        _curve("tokens per second", {"tokens/s": _series(train, "tokens_per_second")}),
        "<h2>Where the time went</h2>",
        _times(goodput(records), attempts),
        "<h2>Faults and alarms</h2>",
        _faults(train, alarms, attempts),
        "<h2>Experts</h2>",
        *_experts(train, summary, domains),
        "</body></html>",
    ]
    return "\n".join(part for part in parts if part) + "\n"


def _json(path: pathlib.Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.is_file() else {}


def _facts(config: Mapping[str, Any], summary: Mapping[str, Any], train: Sequence[Any]) -> str:
    rows = [("steps", train[-1]["step"] if train else 0)]
    rows += [("finished", "yes" if summary else "no")]
    if config:
        mesh = {axis: n for axis, n in config.get("mesh", {}).items() if n > 1}
        rows.append(("preset", config.get("flags", {}).get("preset", "")))
        rows.append(("devices", " x ".join(str(x) for x in reversed(config.get("devices", [])))))
        rows.append(("mesh", ", ".join(f"{a}={n}" for a, n in mesh.items()) or "one device"))
    for name in ("mean_heldout_loss", "mean_pairwise_jsd", "tokens_per_second", "mfu", "seconds"):
        if isinstance(summary.get(name), int | float):
            rows.append((name.replace("_", " "), _number(summary[name])))
    return _table(("", ""), rows)


def _times(parts: Mapping[str, float], attempts: Sequence[Any]) -> str:
    if not parts:
        return '<p class="note">No timed records.</p>'
    names = {
        "compute": "training steps",
        "data_wait": "waiting for data",
        "evaluate": "evaluation",
        "save": "checkpoints (blocking)",
        "other": "compiling, restoring, lost steps, between attempts",
    }
    whole = parts["elapsed"] or 1.0
    rows = [(text, f"{parts[n]:.1f} s", f"{parts[n] / whole:.1%}") for n, text in names.items()]
    rows.append(("elapsed", f"{parts['elapsed']:.1f} s", ""))
    return (
        _table(("", "time", "share"), rows)
        + f"<p>Goodput {parts['goodput']:.1%} over {max(len(attempts), 1)} attempt(s).</p>"
    )


def _faults(train: Sequence[Any], alarms: Sequence[Any], attempts: Sequence[Any]) -> str:
    skipped = max((r.get("skipped") or 0 for r in train), default=0)
    text = f"<p>{len(attempts)} attempt(s); {skipped} step(s) skipped as not finite.</p>"
    if len(attempts) > 1:
        resumed = ", ".join(str(a["step"]) for a in attempts[1:])
        text += f"<p>Resumed after step {resumed}.</p>"
    if not alarms:
        return text + '<p class="note">No alarms.</p>'
    rows = [
        (
            a["step"],
            a["alarm"].replace("_", " "),
            f"layer {a['layer']}, expert {a['expert']}"
            if a["alarm"] == "dead_expert"
            else f"{a['of']} {_number(a['value'])}, median before {_number(a['median'])}",
        )
        for a in alarms
    ]
    return text + _table(("step", "alarm", "what"), rows)


def _experts(
    train: Sequence[Mapping[str, Any]], summary: Mapping[str, Any], domains: Sequence[str]
) -> list[str]:
    out = []
    load = next((r["expert_load"] for r in reversed(train) if r.get("expert_load")), None)
    if load:
        rows = [[value * len(row) / (sum(row) or 1.0) for value in row] for row in load]
        out.append(
            _heat(
                "load per layer and expert (1 = even)",
                rows,
                [f"layer {i}" for i in range(len(rows))],
            )
        )
    for layer, rows in enumerate(summary.get("routing") or []):
        out.append(_heat(f"routing by domain, layer {layer}", rows, list(domains)))
    return out or ['<p class="note">No records of experts.</p>']


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=pathlib.Path, help="run directory")
    parser.add_argument(
        "--out", type=pathlib.Path, help="default: report.html in the run directory"
    )
    flags = parser.parse_args(argv)
    try:
        text = page(flags.run)
        out = flags.out or flags.run / "report.html"
        out.write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    print(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
