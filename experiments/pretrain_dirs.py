"""Where a run writes."""

from __future__ import annotations

import pathlib
import re
import time
from typing import TYPE_CHECKING

import jax
import numpy as np

from jaxlib_papers.train.checkpoint import CheckpointError
from jaxlib_papers.train.resume import ResumeMode

if TYPE_CHECKING:
    from experiments.pretrain import PretrainFlags

__all__ = ["RUNS", "open_run_directory"]

RUNS = pathlib.Path("runs")
_STAMP = "%Y%m%d-%H%M%S"


def open_run_directory(flags: PretrainFlags) -> tuple[pathlib.Path, ResumeMode]:
    """Chooses and makes the run directory.

    With `run_dir` it is that one, and the default is to resume. Without, it is a new one; or, if
    `resume` asks to resume, the newest of the preset. All processes get the same.

    Args:
      flags: The command line.

    Returns:
      The directory, writable, and how to resume. After "never" it holds nothing of a former run:
      that lies in its sub-folder ``previous-<n>``.

    Raises:
      CheckpointError: It cannot be written, or `must` finds no run.
    """
    if flags.run_dir is not None:
        directory, mode = pathlib.Path(flags.run_dir), flags.resume or "auto"
    else:
        mode = flags.resume or "never"
        directory = RUNS / f"{flags.preset}-{_stamp(flags.preset, newest=mode != 'never')}"
        if mode == "must" and not directory.exists():
            raise CheckpointError(
                f"resume 'must': there is no run of preset {flags.preset!r} in {RUNS.absolute()}; "
                "name it with --run-dir"
            )
    if jax.process_index() == 0:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            if mode == "never":
                _set_aside(directory)
            probe = directory / ".writable"
            probe.write_text("")
            probe.unlink()
        except OSError as error:
            raise CheckpointError(
                f"run_dir: cannot write to {directory} ({error.strerror or error}); "
                "choose another with --run-dir"
            ) from error
    return directory, mode


def _stamp(preset: str, *, newest: bool) -> str:
    """Time stamp of a new run, or of the newest run there is; process 0 decides for all."""
    name = time.strftime(_STAMP)
    if newest:
        pattern = re.compile(re.escape(preset) + r"-(\d{8}-\d{6})")
        found = [pattern.fullmatch(path.name) for path in RUNS.glob(f"{preset}-*")]
        name = max((match[1] for match in found if match), default=name)
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        digits = np.array([int(part) for part in name.split("-")], np.int32)
        date, clock = multihost_utils.broadcast_one_to_all(digits).tolist()
        name = f"{date:08d}-{clock:06d}"
    return name


def _set_aside(directory: pathlib.Path) -> None:
    former = [path for path in directory.iterdir() if not path.name.startswith("previous-")]
    if not former:
        return
    number = 1
    while (directory / f"previous-{number}").exists():
        number += 1
    target = directory / f"previous-{number}"
    target.mkdir()
    for path in former:
        path.rename(target / path.name)
