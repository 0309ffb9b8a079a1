"""Where the time of a run goes: waiting for data, steps, evaluation, checkpoints.

The loop's host runs ahead of the devices, so times are taken where the host has to wait: for the
next batch, for the steps in flight, in the hooks. Their sum is the time that passed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

__all__ = ["StepTimes"]

PARTS = ("data_wait", "compute", "evaluate", "save")


class StepTimes:
    """Seconds by part: ``data_wait``, ``compute``, ``evaluate``, ``save``."""

    def __init__(self) -> None:
        """Starts at zero."""
        self._clock = time.perf_counter
        self._lap = dict.fromkeys(PARTS, 0.0)
        self._total = dict.fromkeys(PARTS, 0.0)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Counts the time inside the block as this part, also if it ends in an error."""
        began = self._clock()
        try:
            yield
        finally:
            elapsed = self._clock() - began
            self._lap[name] += elapsed
            self._total[name] += elapsed

    def lap(self) -> dict[str, float]:
        """Seconds of each part since the last lap, as ``seconds_<part>``; the lap ends here."""
        values = {f"seconds_{name}": value for name, value in self._lap.items()}
        self._lap = dict.fromkeys(PARTS, 0.0)
        return values

    def total(self) -> dict[str, float]:
        """Seconds of each part since the start, as ``seconds_<part>``."""
        return {f"seconds_{name}": value for name, value in self._total.items()}

    def shares(self) -> dict[str, float]:
        """Each part's share of their sum, as ``share_<part>``; empty before anything was timed."""
        whole = sum(self._total.values())
        if whole <= 0:
            return {}
        return {f"share_{name}": value / whole for name, value in self._total.items()}
