"""Kernels under shard_map over rows, experts and columns equal the unsharded call."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_kernels_under_shard_map_equal_the_unsharded_call():
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    program = ROOT / "tests" / "distributed" / "programs" / "kernel_shards.py"
    done = subprocess.run(
        [sys.executable, str(program)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    differences = json.loads(done.stdout.splitlines()[-1])
    assert len(differences) == 8
    for name, value in differences.items():
        assert value < 2e-6, f"{name}: {value}"
