"""Timing that survives a noisy machine: contestants take turns, and each keeps its best turn."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

__all__ = ["Result", "compiled_seconds", "race", "timed"]


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


def compiled_seconds(lowered: jax.stages.Lowered) -> float:
    """Seconds that XLA takes to compile."""
    start = time.perf_counter()
    lowered.compile()
    return time.perf_counter() - start
