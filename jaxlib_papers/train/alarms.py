"""Alarms that a person should see: experts that nothing is sent to, spikes of loss and gradient.

They look at the logged records and change nothing in the training.
"""

from __future__ import annotations

import collections
import dataclasses
import statistics
from collections.abc import Mapping
from typing import Any

import numpy as np

__all__ = ["AlarmConfig", "Alarms"]


@dataclasses.dataclass(frozen=True)
class AlarmConfig:
    """When to speak.

    Attributes:
      dead_share: An expert is dead below this part of an even share.
      dead_records: In so many records, one after the other.
      window: Records that a spike is compared with.
      least: Records before the first comparison, at least 2.
      factor: A spike is above the median of the window by so many typical deviations (the median
        absolute deviation x 1.4826) ...
      ratio: ... and above this multiple of the median.
    """

    dead_share: float = 0.01
    dead_records: int = 5
    window: int = 50
    least: int = 10
    factor: float = 8.0
    ratio: float = 1.1

    def __post_init__(self) -> None:
        """Checks every number; the message names the field."""
        for name, low in (("dead_records", 1), ("least", 2), ("window", self.least)):
            if getattr(self, name) < low:
                raise ValueError(f"{name}: got {getattr(self, name)}, expected at least {low}")
        for name in ("dead_share", "factor", "ratio"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: got {getattr(self, name)}, expected a positive number")


class Alarms:
    """Reads records and returns what is new and alarming."""

    def __init__(self, config: AlarmConfig | None = None):
        """Starts with no history (after a resume too)."""
        self._config = config or AlarmConfig()
        self._history: dict[str, collections.deque[float]] = {
            name: collections.deque(maxlen=self._config.window) for name in ("loss", "grad_norm")
        }
        self._quiet: np.ndarray | None = None

    def check(self, values: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Looks at one record.

        Args:
          values: The record: ``loss``, ``grad_norm``, ``expert_load`` (any leading axes, then
            experts; 1 or the mean of each row is an even share). What is missing is not looked at.

        Returns:
          Alarms, each a dict with ``alarm`` ("dead_expert" or "spike") and what it is about. A dead
          expert is told once, and again if it has lived in between. Values that are not finite
          are no spikes: the train step counts those as skipped.
        """
        found = [
            alarm
            for name in ("loss", "grad_norm")
            if name in values and (alarm := self._spike(name, values[name])) is not None
        ]
        return found + (self._dead(values["expert_load"]) if "expert_load" in values else [])

    def _spike(self, name: str, value: Any) -> dict[str, Any] | None:
        if value is None or not np.isfinite(value):
            return None
        history, config = self._history[name], self._config
        alarm = None
        if len(history) >= config.least:
            middle = statistics.median(history)
            spread = 1.4826 * statistics.median(abs(x - middle) for x in history)
            if value > max(middle + config.factor * spread, config.ratio * middle):
                alarm = {"alarm": "spike", "of": name, "value": float(value), "median": middle}
        history.append(float(value))
        return alarm

    def _dead(self, load: Any) -> list[dict[str, Any]]:
        rows = np.atleast_2d(np.asarray(load, np.float64))
        rows = rows.reshape(-1, rows.shape[-1])
        even = np.mean(rows, axis=-1, keepdims=True)
        quiet = rows < self._config.dead_share * even
        if self._quiet is None or self._quiet.shape != rows.shape:
            self._quiet = np.zeros(rows.shape, np.int64)
        self._quiet = np.where(quiet, self._quiet + 1, 0)
        return [
            {"alarm": "dead_expert", "layer": int(layer), "expert": int(expert)}
            for layer, expert in np.argwhere(self._quiet == self._config.dead_records)
        ]
