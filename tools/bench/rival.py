"""A rival in a process and environment of its own, timed turn by turn with ours.

The rival needs PyTorch and transformers, which this project does not depend on: `make parity` puts
them into `.venv-parity`; another interpreter is named by JAXLIB_PAPERS_RIVAL_PYTHON.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
from collections.abc import Sequence

__all__ = ["Rival"]

_ROOT = pathlib.Path(__file__).parents[2]
_KEEP = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_TOP_PAD_": str(64 << 20),
}


def _interpreter() -> str | None:
    named = os.environ.get("JAXLIB_PAPERS_RIVAL_PYTHON")
    if named:
        return named
    default = _ROOT / ".venv-parity" / "bin" / "python"
    return str(default) if default.exists() else None


class Rival:
    """Context manager around a script of this folder that runs in the rival's environment.

    The script prints a JSON line with its description when it has warmed up, then answers each line
    of stdin with a JSON line that has "seconds".

    Args:
      case: The script's first argument.
      script: Its file name.
      options: Its further arguments.
      keep_freed_memory: Start it with malloc set as `train.host_memory` sets ours.

    Attributes:
      ready: Whether the rival can take turns.
      description: What it is, or why it is not there.
    """

    def __init__(
        self,
        case: str,
        *,
        script: str = "torch_rival.py",
        options: Sequence[str] = (),
        keep_freed_memory: bool = False,
    ):
        self._environment = os.environ | (_KEEP if keep_freed_memory else {})
        self.ready = False
        self.description = "transformers is not installed (see tools/bench/rival.py)"
        self._script, self._arguments, self._process = script, [case, *options], None

    def __enter__(self) -> Rival:
        """Starts the process and waits until it has warmed up."""
        python = _interpreter()
        if python is None:
            return self
        script = str(_ROOT / "tools" / "bench" / self._script)
        self._process = subprocess.Popen(
            [python, script, *self._arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=self._environment,
            text=True,
        )
        self.description = self._read()["description"]
        self.ready = True
        return self

    def _read(self) -> dict:
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise RuntimeError(f"the rival process ended with code {code}; its messages are above")
        return json.loads(line)

    def turn(self, what: str = "turn") -> float:
        """Seconds of one turn of the rival."""
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        return self._read()["seconds"]

    def __exit__(self, *_: object) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.stdin.close()
            self._process.wait(timeout=30)
