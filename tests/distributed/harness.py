"""Runs a program in processes of its own, with forced host devices, on one machine.

The number of devices is fixed when JAX starts, so what needs eight of them cannot run in the
process of the tests. A program prints one line of JSON last; that is the result.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

__all__ = ["PROGRAMS", "ROOT", "clean_environment", "free_port", "run_program"]

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "programs"


def clean_environment(devices: int) -> dict[str, str]:
    """The environment of a process with so many devices."""
    # Nothing that a cluster's launcher or the caller set may reach JAX's own cluster detection.
    foreign = ("SLURM_", "OMPI_", "PMIX_", "JAX_", "XLA_", "KUBERNETES_", "TPU_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    return env | {
        "JAX_PLATFORMS": "cpu",
        # Compiling takes nearly all of the time here: leave LLVM's optimisations out.
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} "
        "--xla_backend_optimization_level=0",
        "PYTHONPATH": str(ROOT),
        # Many small processes share few cores.
        "OMP_NUM_THREADS": "1",
    }


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def run_program(
    name: str,
    *args: str,
    devices: int = 8,
    processes: int = 1,
    timeout: float = 1200.0,
    compiled: Path | None = None,
) -> list[Any]:
    """Runs `programs/<name>.py` and returns what each process printed last, from JSON.

    With several processes, each gets `--coordinator ADDRESS --process INDEX --processes COUNT`
    after its other arguments.

    Args:
      name: Name of the program.
      *args: Its arguments.
      devices: Devices of each process.
      processes: Number of processes.
      timeout: Seconds until all of them are killed.
      compiled: Folder of compiled programs, for several starts of the same.

    Returns:
      One value per process.

    Raises:
      AssertionError: If a process fails; with the end of its output.
    """
    command = [sys.executable, str(PROGRAMS / f"{name}.py"), *args]
    env = clean_environment(devices)
    if compiled is not None:
        env |= {
            "JAX_COMPILATION_CACHE_DIR": str(compiled),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
    coordinator = f"127.0.0.1:{free_port()}"
    running = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for index in range(processes):
                where = ["--coordinator", coordinator, "--process", str(index)]
                where += ["--processes", str(processes)]
                # Files, not pipes: a full pipe would stall a process that the others wait for.
                log = open(Path(folder) / f"{index}.log", "w+")  # noqa: SIM115
                process = subprocess.Popen(
                    command + (where if processes > 1 else []),
                    env=env,
                    cwd=ROOT,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
                running.append((process, log))
            results = []
            for index, (process, log) in enumerate(running):
                code = process.wait(timeout)
                log.seek(0)
                output = log.read().strip()
                assert code == 0, f"{name} (process {index}) ended with {code}:\n{output[-4000:]}"
                results.append(json.loads(output.splitlines()[-1]))
            return results
        finally:
            for process, log in running:
                process.kill()
                process.wait()
                log.close()
