"""What a run reports: JSON lines, TensorBoard events and a progress bar, from the first host only.

``metrics.jsonl`` is the record of the run, one JSON object a line with ``step`` and ``kind``; every
line is flushed, and a run that resumes at step n first drops the lines after n, so the file reads
as if the run had never been interrupted. Numbers that are not finite are written as null, for
strict JSON readers. TensorBoard gets the scalars.
"""

from __future__ import annotations

import json
import logging
import math
import os
import pathlib
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

__all__ = ["MetricsWriter", "ProgressBar", "read_records", "truncate_records"]

_log = logging.getLogger(__name__)


def read_records(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Reads a metrics file; a last line that a crash cut short is left out.

    Args:
      path: The ``metrics.jsonl``; a missing file has no records.

    Returns:
      The records in file order.

    Raises:
      ValueError: A line other than the last is no JSON object (file and line are named).
    """
    path = pathlib.Path(path)
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    records = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise ValueError("not an object")
        except ValueError as error:
            if number == len(lines):
                break
            raise ValueError(f"{path}, line {number}: expected a JSON object ({error})") from error
        records.append(record)
    return records


def truncate_records(path: str | os.PathLike[str], step: int) -> None:
    """Drops the records after ``step``, atomically: the old file stays until the new one is whole.

    Args:
      path: The ``metrics.jsonl``; a missing file is fine.
      step: Last step to keep.
    """
    path = pathlib.Path(path)
    if not path.exists():
        return
    kept = [record for record in read_records(path) if record.get("step", 0) <= step]
    new = path.with_name(path.name + ".new")
    with new.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in kept)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


class MetricsWriter:
    """Appends records to ``metrics.jsonl`` and scalars to TensorBoard events.

    On every process but the first all methods do nothing.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        resume_step: int = 0,
        tensorboard: bool = True,
    ):
        """Opens the files.

        Args:
          directory: Run directory; the events go to its sub-folder ``tensorboard``.
          resume_step: Finished steps of the run so far; later records of a former attempt go, and
            all of them when the run starts over (0).
          tensorboard: Whether to write events (needs tensorboardX; without it this is said once).
        """
        self._file = self._events = None
        if jax.process_index() != 0:
            return
        directory = pathlib.Path(directory)
        path = directory / "metrics.jsonl"
        truncate_records(path, resume_step or -1)
        self._file = path.open("a", encoding="utf-8")
        if tensorboard:
            self._events = _open_events(directory / "tensorboard", resume_step)

    def write(self, step: int, kind: str, values: Mapping[str, Any]) -> None:
        """Writes one record.

        Args:
          step: Finished steps.
          kind: What the record is about (``train``, ``eval`` ...); TensorBoard's tag prefix.
          values: Numbers, arrays, strings, or nested dicts and lists of them; TensorBoard gets
            those that are single numbers.
        """
        if self._file is None:
            return
        values = {name: _plain(value) for name, value in values.items()}
        record = {"step": int(step), "kind": kind, "time": round(time.time(), 3), **values}
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()
        if self._events is not None:
            for name, value in values.items():
                if isinstance(value, int | float):
                    self._events.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        """Closes the files."""
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._events is not None:
            self._events.close()
            self._events = None

    def __enter__(self) -> MetricsWriter:
        """Returns itself."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Closes."""
        self.close()


class ProgressBar:
    """A bar with loss, tokens/s and MFU on a terminal; plain lines elsewhere (logs, notebooks)."""

    def __init__(self, total: int, *, start: int = 0, description: str = "train"):
        """Starts the bar.

        Args:
          total: Steps of the whole run.
          start: Steps that are done already.
          description: Word at the left.
        """
        import rich.console
        import rich.progress as parts

        self._total, self._description, self._bar = total, description, None
        self._console = rich.console.Console(quiet=jax.process_index() != 0)
        if self._console.is_terminal and jax.process_index() == 0:
            self._bar = parts.Progress(
                parts.TextColumn("{task.description}"),
                parts.BarColumn(),
                parts.MofNCompleteColumn(),
                parts.TextColumn("{task.fields[note]}"),
                parts.TimeRemainingColumn(),
                console=self._console,
            )
            self._task = self._bar.add_task(description, total=total, completed=start, note="")
            self._bar.start()

    def update(self, step: int, note: str | None = None) -> None:
        """Moves to ``step``; ``note`` (loss, tokens/s, MFU) replaces the text at the right."""
        if self._bar is not None:
            fields = {} if note is None else {"note": note}
            self._bar.update(self._task, completed=step, **fields)
        elif note is not None:
            self._console.print(
                f"{self._description} {step}/{self._total}  {note}", highlight=False, soft_wrap=True
            )

    def print(self, text: str) -> None:
        """Prints a line above the bar."""
        self._console.print(text, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Stops the bar and leaves its last state on screen."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def __enter__(self) -> ProgressBar:
        """Returns itself."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Closes."""
        self.close()


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        return _plain(np.asarray(value).tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _open_events(directory: pathlib.Path, resume_step: int) -> Any:
    try:
        import tensorboardX
    except ImportError:
        _log.warning(
            "tensorboardX is not installed: no TensorBoard events (pip install tensorboardX)"
        )
        return None
    # Viewers drop what a former attempt wrote at or after the purge step.
    purge = resume_step + 1 if resume_step else None
    return tensorboardX.SummaryWriter(str(directory), purge_step=purge)
