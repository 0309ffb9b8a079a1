"""Timing that survives a noisy machine: contestants take turns, and each keeps its best turn."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

__all__ = ["Paired", "Result", "compiled_seconds", "paired", "race", "timed"]


@dataclasses.dataclass(frozen=True)
class Result:
    """One line of the report.

    Attributes:
      case: Name of the case (with a suffix for its variants).
      seconds: Best time of ours, where there is one.
      rate: What ours reaches, in ``unit``.
      unit: Unit of ``rate``.
      ratio: The figure that has a target; see ``meaning``.
      meaning: What the ratio divides by what.
      rival: What ours was compared with, or why it was not.
      target: Bound on the ratio, e.g. ">= 1.3".
      detail: Further figures.
    """

    case: str
    seconds: float | None = None
    rate: float | None = None
    unit: str = ""
    ratio: float | None = None
    meaning: str = ""
    rival: str = ""
    target: str = ""
    detail: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def met(self) -> bool | None:
        """Whether the ratio keeps its target; None where one of them is missing."""
        if self.ratio is None or not self.target:
            return None
        sign, bound = self.target.split()
        return self.ratio >= float(bound) if sign == ">=" else self.ratio <= float(bound)

    def record(self) -> dict[str, Any]:
        """The line as a JSON-able dict."""
        return {**dataclasses.asdict(self), "detail": dict(self.detail), "met": self.met}


def timed(call: Callable[[], Any]) -> float:
    """Seconds of one call, its result waited for."""
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


def race(contestants: Mapping[str, Callable[[], Any]], turns: int = 9) -> dict[str, float]:
    """Best seconds of each contestant over ``turns`` rounds, after one call that compiles."""
    for call in contestants.values():
        jax.block_until_ready(call())
    best = dict.fromkeys(contestants, float("inf"))
    for _ in range(turns):
        for name, call in contestants.items():
            best[name] = min(best[name], timed(call))
    return best


class Paired(NamedTuple):
    """What `paired` found: best seconds of both, median and error of the ratio of neighbours."""

    seconds: float
    rival_seconds: float
    ratio: float
    error: float


def paired(ours: Callable[[], Any], rival: Callable[[], Any], turns: int) -> Paired:
    """Time of ours over the rival's where they differ by less than the machine's own drift.

    Each turn times both, one right after the other and in turn first; the median over turns of
    their ratio forgets turns in which something else ran. The error is that of the median, from
    the middle half of the ratios.
    """
    for call in (ours, rival):
        jax.block_until_ready(call())
    rows = np.empty((turns, 2))
    for turn in range(turns):
        order = (0, 1) if turn % 2 else (1, 0)
        for which in order:
            rows[turn, which] = timed((ours, rival)[which])
    ratios = rows[:, 0] / rows[:, 1]
    low, middle, high = np.quantile(ratios, (0.25, 0.5, 0.75))
    # In a normal distribution the middle half is 1.35 deviations wide, and a median's error is
    # 1.25 times the mean's.
    error = 1.25 * (high - low) / 1.35 / np.sqrt(turns)
    best = rows.min(axis=0)
    return Paired(float(best[0]), float(best[1]), float(middle), float(error))


def compiled_seconds(lowered: jax.stages.Lowered) -> float:
    """Seconds that XLA takes to compile."""
    start = time.perf_counter()
    lowered.compile()
    return time.perf_counter() - start
