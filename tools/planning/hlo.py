"""The collectives of a compiled program: how often they run, and what a device sends for them."""

from __future__ import annotations

import collections
import dataclasses
import math
import re

__all__ = ["Total", "collectives_in_hlo"]

_KINDS = (
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    "ragged-all-to-all",
    "all-to-all",
    "collective-permute",
)
_SIZES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "f64": 8}

_HEAD = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_DEFINED = re.compile(r"^\s*(?:ROOT )?%([\w.\-]+) = (\(?[^=]*?\)?) [\w\-]+\(")
_OPERATION = re.compile(
    r"= (\(?[^=]*?\)?) (" + "|".join(_KINDS) + r")(-start)?\(%?([\w.\-]+)",
)
_CALLED = re.compile(r"(?:to_apply|calls|called_computations)=\{?%?([\w.\-]+)")
_LOOP = re.compile(r" while\(.*condition=%?([\w.\-]+), body=%?([\w.\-]+)")
_BOUND = re.compile(r"= [su]32\[\]\S* constant\((\d+)\)")
_TRIPS = re.compile(r'known_trip_count[^0-9]*"?n"?[^0-9]*(\d+)')
_ARRAY = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")
_COMMENT = re.compile(r"/\*index=\d+\*/")
# Groups of devices: listed, counted, or named axes of a mesh.
_LISTED = re.compile(r"replica_groups=\{\{([\d,]+)\}")
_COUNTED = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=")
_NAMED = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\S*\))?\s*\{([^}]*)\}")


@dataclasses.dataclass(frozen=True)
class Total:
    """One kind of collective in a step, loops multiplied out.

    Attributes:
      count: How often it runs.
      results: Bytes of its results on one device.
      sent: Bytes that one device sends, in a ring: (n - 1) / n of the array for a gather or an
        exchange, as much for a scatter, twice that for an all-reduce.
    """

    count: int
    results: float
    sent: float


def _arrays(text: str) -> list[int]:
    out = []
    for dtype, dims in _ARRAY.findall(text):
        out.append(_SIZES.get(dtype, 0) * math.prod(int(n) for n in dims.split(",") if n))
    return out


def _group_size(line: str) -> int:
    listed = _LISTED.search(line)
    if listed:
        return listed[1].count(",") + 1
    counted = _COUNTED.search(line)
    if counted:
        return int(counted[2])
    named = _NAMED.search(line)
    if named:
        sizes = dict(part.strip().split("=") for part in named[1].split(","))
        return math.prod(int(sizes[name.strip()]) for name in named[2].split(","))
    if "replica_groups=" in line and "replica_groups={}" not in line:
        raise ValueError(f"groups of devices in a form that is not known: {line.strip()[:300]}")
    return 1


def _bytes(kind: str, result: str, started: bool, operand: str, line: str) -> tuple[float, float]:
    arrays = _arrays(result)
    if started and arrays:
        # An asynchronous one gives (operands, results, ...).
        size = float(min(a for a in arrays if a) if kind == "reduce-scatter" else max(arrays))
    else:
        size = float(sum(arrays))
    n = _group_size(line)
    if kind == "collective-permute":
        return size, size
    if kind == "ragged-all-to-all":  # the larger side has room for more than there is
        sides = (arrays[0], arrays[-1]) if started else (size, sum(_arrays(operand)))
        return size, float(min(sides)) * (n - 1) / n
    factor = {"reduce-scatter": n - 1.0, "all-reduce": 2 * (n - 1) / n}
    return size, size * factor.get(kind, (n - 1) / n)


def collectives_in_hlo(text: str) -> dict[str, Total]:
    """Adds up the collectives of a compiled program, loop bodies as often as they run.

    Args:
      text: Compiled HLO. A loop runs as often as it says, or as the bound in its condition says.

    Returns:
      The totals by kind, on one device.
    """
    text = _COMMENT.sub("", text)
    defined = {m[1]: m[2] for m in map(_DEFINED.match, text.splitlines()) if m}
    here: dict[str, list[tuple[str, float, float]]] = collections.defaultdict(list)
    calls: dict[str, list[tuple[str, int]]] = collections.defaultdict(list)
    loops: dict[str, list[tuple[str, str, int | None]]] = collections.defaultdict(list)
    bounds: dict[str, int] = {}
    name = entry = ""
    for line in text.splitlines():
        head = _HEAD.match(line)
        if head:
            name = head[1]
            entry = name if line.startswith("ENTRY") else entry
            continue
        found = _OPERATION.search(line)
        if found:
            kind, operand = found[2], defined.get(found[4], "")
            result, sent = _bytes(kind, found[1], bool(found[3]), operand, line)
            if kind == "all-reduce" and name.startswith("all-reduce-scatter"):
                # The TPU compiler's scatter: a fusion of a sum and the cut of one's own part.
                kind, result, sent = "reduce-scatter", result / _group_size(line), sent / 2
            here[name].append((kind, result, sent))
        bound = _BOUND.search(line)
        if bound:
            bounds[name] = max(bounds.get(name, 1), int(bound[1]))
        loop = _LOOP.search(line)
        if loop:
            trips = _TRIPS.search(line)
            loops[name].append((loop[2], loop[1], int(trips[1]) if trips else None))
        for called in _CALLED.findall(line):
            calls[name].append((called, 1))
    for caller, found_loops in loops.items():
        for body, condition, trips in found_loops:
            calls[caller].append((body, trips or bounds.get(condition, 1)))
    totals: dict[str, list[float]] = collections.defaultdict(lambda: [0, 0.0, 0.0])

    def walk(computation: str, times: int, depth: int = 0) -> None:
        for kind, result, sent in here.get(computation, ()):
            for i, value in enumerate((1, result, sent)):
                totals[kind][i] += times * value
        for called, trips in calls.get(computation, ()) if depth < 50 else ():
            walk(called, times * trips, depth + 1)

    walk(entry, 1)
    return {kind: Total(int(n), result, sent) for kind, (n, result, sent) in totals.items()}
