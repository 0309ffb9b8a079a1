"""Where a run writes, and which processes take part in it."""

from __future__ import annotations

import os
import pathlib
import re
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import jax
import numpy as np

from jaxlib_papers.train.checkpoint import CheckpointError
from jaxlib_papers.train.resume import ResumeMode

if TYPE_CHECKING:
    from experiments.pretrain import LaunchFlags, PretrainFlags

__all__ = [
    "LOST_PROCESS_EXIT_CODE",
    "RUNS",
    "leave_alone",
    "lost_process",
    "open_run_directory",
    "several_processes",
    "start_processes",
]

LOST_PROCESS_EXIT_CODE = 76
"""Exit code where another process of the run died: start all of them again."""

RUNS = pathlib.Path("runs")
_STAMP = "%Y%m%d-%H%M%S"


def several_processes(environ: Mapping[str, str]) -> bool:
    """Whether the environment is that of one process of several.

    What JAX itself would detect, but without waiting for others where a cluster is present and the
    program was started alone on it (a shell inside an allocation).
    """

    def number(name: str) -> int:
        text = environ.get(name, "")
        return int(text) if text.isdigit() else 0

    return (
        number("SLURM_STEP_NUM_TASKS") > 1
        or number("OMPI_COMM_WORLD_SIZE") > 1
        or "," in environ.get("TPU_WORKER_HOSTNAMES", "")
        or ("KUBERNETES_SERVICE_HOST" in environ and "JOB_COMPLETION_INDEX" in environ)
    )


def start_processes(flags: LaunchFlags) -> None:
    """Connects the processes of a run; nothing if there is one.

    Raises:
      ValueError: The coordinator flags are incomplete.
    """
    explicit = (flags.coordinator, flags.num_processes, flags.process_id)
    if any(value is not None for value in explicit):
        if any(value is None for value in explicit):
            raise ValueError(
                f"coordinator, num_processes, process_id: got {explicit}, expected all or none"
            )
        jax.distributed.initialize(*explicit)
    elif flags.distributed == "on" or (
        flags.distributed == "auto" and several_processes(os.environ)
    ):
        jax.distributed.initialize()


def lost_process(error: BaseException | None) -> bool:
    """Whether an error, or what caused it, says that another process cannot be reached."""
    signs = ("connection closed", "connection reset", "connection refused", "timed out", "gloo",
             "unavailable", "deadline_exceeded", "heartbeat", "broken pipe", "shutting down",
             "nccl", "coordination", "aborted")  # fmt: skip
    while error is not None:
        text = str(error).lower()
        if isinstance(error, RuntimeError) and any(sign in text for sign in signs):
            return True
        error = error.__cause__ or error.__context__
    return False


def leave_alone(error: BaseException) -> None:
    """Ends this process at once: the usual way out would wait for the process that is gone."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    print(
        f"pretrain: process {jax.process_index()} of {jax.process_count()} stops: another process "
        f"of the run is gone ({line}); start all of them again with the same --run-dir",
        file=sys.stderr,
        flush=True,
    )
    sys.stdout.flush()
    os._exit(LOST_PROCESS_EXIT_CODE)


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
