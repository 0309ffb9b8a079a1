"""Stopping in time: a signal ends the run after the step in progress, with a checkpoint.

Clusters announce the end of a job with SIGTERM, people with Ctrl-C (SIGINT). Either asks the loop
to finish the step that runs, save and leave with :data:`PREEMPTED_EXIT_CODE`, so that a scheduler
can tell "start me again" from success (0), wrong input (2) and failure (1). A second signal ends
the process at once with the usual 128 + signal number; the last complete checkpoint is valid then.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

import jax
from jax.experimental import multihost_utils

__all__ = ["PREEMPTED_EXIT_CODE", "PreemptionGuard"]

PREEMPTED_EXIT_CODE = 75
"""Exit code of a run that was told to stop and saved: EX_TEMPFAIL, "try again later"."""


class PreemptionGuard:
    """Turns SIGTERM and SIGINT into a question that the loop asks after every step.

    With several processes the answer must come at the same step everywhere, although the signal
    reaches hosts at different times or only one of them. JAX's coordination service agrees on that
    step (it has its own SIGTERM handler, which is therefore left alone); Ctrl-C keeps its usual
    meaning there.
    """

    def __init__(self) -> None:
        self._signal: int | None = None
        self._previous: dict[int, Any] = {}
        self._service = jax.process_count() > 1

    def __enter__(self) -> PreemptionGuard:
        """Installs the handlers; only the main thread can, elsewhere there are none."""
        if not self._service and threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc: object) -> None:
        """Puts the former handlers back."""
        while self._previous:
            number, handler = self._previous.popitem()
            signal.signal(number, handler)

    @property
    def signal_name(self) -> str:
        """The signal that came, for messages; empty if none did."""
        if self._signal is not None:
            return signal.Signals(self._signal).name
        return ""

    def should_stop(self, step: int) -> bool:
        """Whether to save and leave now. All processes ask after every step.

        Args:
          step: Number of finished steps, the same on all processes.

        Returns:
          True from the first step after the signal on (with several processes: at the one step that
          they agreed on, and from then on).
        """
        if self._service and self._signal is None:
            if multihost_utils.reached_preemption_sync_point(step):
                self._signal = signal.SIGTERM
        return self._signal is not None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._signal is not None:
            # No cleaning up: whoever asks twice wants the process gone, and nothing valid is lost.
            os._exit(128 + number)
        self._signal = number
