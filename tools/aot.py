"""Compiles every kernel for TPUs and GPUs that need not be there, and prints what it costs.

``python -m tools.aot --target tpu`` (an environment with ``jax[tpu]``) compiles for v5e, v5p and
v6e, ``--target cuda`` (one with ``jax[cuda12]``) for an H200: forward and backward of the cases in
every ``kernels_pallas/<kernel>/cases.py``. A kernel that a compiler rejects ends the run with exit
status 1; one that refuses a case by name (`NotImplementedError`) is listed with its reason.

Columns: bytes moved over the least that the algorithm moves, floating-point operations, memory for
temporaries, and on TPU the compiler's own estimate of the time over the roofline, the larger of
operations over peak and least bytes over bandwidth. The bytes of a Pallas kernel on TPU are those
of its schedule of blocks, which the kernel states and XLA can't see into. The GPU compiler gives
no cost: the bytes are arguments and results once and temporaries twice, a lower bound, and the
operations are the algorithm's.

On TPU the compiler chooses the layouts of arguments and results, as it does for the values inside a
larger program; ``--default-layouts`` shows what a kernel costs when called by itself, transposed
copies included.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kernels_pallas.cases import Case

__all__ = ["CHIPS", "H200_CONFIG", "Chip", "Row", "main"]

H200_CONFIG = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 150000000000 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
device_description_str: "NVIDIA H200"
"""


@dataclasses.dataclass(frozen=True)
class Chip:
    """A target and its published peak rates.

    Attributes:
      name: Short name.
      target: "tpu" or "cuda".
      topology: What `jax.experimental.topologies.get_topology_desc` calls a small one.
      flops: Dense bfloat16 operations a second.
      bandwidth: Bytes a second to and from main memory.
      all_cases: Whether the odd shapes are compiled too, or only the big ones.
    """

    name: str
    target: str
    topology: str
    flops: float
    bandwidth: float
    all_cases: bool


CHIPS: tuple[Chip, ...] = (
    Chip("v5e", "tpu", "v5e:2x2", 197e12, 819e9, True),
    Chip("v5p", "tpu", "v5p:2x2x1", 459e12, 2765e9, False),
    Chip("v6e", "tpu", "v6e:2x2", 918e12, 1640e9, False),
    Chip("h200", "cuda", "h200", 989e12, 4800e9, True),
)
"""Every target; TPU numbers from Google's documentation of the chips, H200 from NVIDIA's."""


@dataclasses.dataclass
class Row:
    """One line of the table; sizes in bytes, times in seconds, None where there is no number."""

    chip: str
    kernel: str
    case: str
    direction: str
    status: str = "compiled"
    reason: str = ""
    bytes_accessed: float | None = None
    bytes_over_minimum: float | None = None
    flops: float | None = None
    temp_bytes: int | None = None
    optimal_seconds: float | None = None
    ops_without_estimate: int = 0
    roofline_seconds: float | None = None
    compile_seconds: float | None = None


def _devices(chip: Chip) -> Sequence[Any]:
    from jax.experimental import topologies

    options: dict[str, Any] = {}
    if chip.target == "cuda":
        options = {"topology": "1x1x4", "target_config": H200_CONFIG}
    return topologies.get_topology_desc(
        platform=chip.target, topology_name=chip.topology, **options
    ).devices


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"[:300]


def _lower(case: Case, direction: str, chip: Chip, device: Any, default_layouts: bool) -> Any:
    import jax
    import numpy as np
    from jax.experimental.layout import Format, Layout
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from kernels_pallas.dispatch import target_platform

    sharding = NamedSharding(Mesh(np.array([device]), ("device",)), PartitionSpec())
    args: tuple[Any, ...] = case.args
    function = case.forward("pallas")
    if direction == "backward":
        args, function = (*args, case.cotangents()), case.vjp("pallas")
    args = jax.tree.map(
        lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=sharding), args
    )
    options: dict[str, Any] = {}
    if chip.target == "tpu" and not default_layouts:
        free = Format(Layout.AUTO, sharding)
        options = {"in_shardings": free, "out_shardings": free}
    with target_platform("tpu" if chip.target == "tpu" else "gpu"):
        return jax.jit(function, **options).trace(*args).lower(lowering_platforms=(chip.target,))


def _measure(row: Row, case: Case, chip: Chip, lowered: Any) -> Row:
    started = time.perf_counter()
    try:
        executable = lowered.compile()
    except Exception as error:
        row.status, row.reason = "FAILED", _first_line(error)
        return row
    row.compile_seconds = time.perf_counter() - started
    backward = row.direction == "backward"
    least = case.vjp_min_bytes if backward else case.min_bytes
    flops = case.vjp_flops if backward else case.flops
    row.roofline_seconds = max(flops / chip.flops, least / chip.bandwidth)
    memory = executable.memory_analysis()
    if memory is not None:
        row.temp_bytes = int(memory.temp_size_in_bytes)
    cost = executable.cost_analysis() or {}
    row.flops = cost.get("flops", flops)
    row.bytes_accessed = cost.get("bytes accessed")
    if row.bytes_accessed is None and memory is not None:
        # The GPU compiler gives no cost: arguments and results once, temporaries out and in.
        row.bytes_accessed = (
            memory.argument_size_in_bytes
            + memory.output_size_in_bytes
            + 2 * memory.temp_size_in_bytes
        )
    if row.bytes_accessed is not None:
        row.bytes_over_minimum = row.bytes_accessed / least
    optimal = cost.get("optimal_seconds")
    if optimal is not None:
        # An operation that the compiler has no estimate for counts as minus one second.
        row.ops_without_estimate = max(0, -math.floor(optimal))
        row.optimal_seconds = optimal + row.ops_without_estimate
    return row


def _renamed(measured: concurrent.futures.Future[Row], case: str) -> Row:
    return dataclasses.replace(measured.result(), case=case)


def _rows(
    chips: Sequence[Chip], cases: Sequence[Case], jobs: int, every: bool, default_layouts: bool
) -> Iterator[Row]:
    """Lowers in this thread and compiles in ``jobs`` others; rows come in order."""
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        waiting: list[concurrent.futures.Future[Row]] = []
        seen: dict[tuple[str, str], concurrent.futures.Future[Row]] = {}
        for chip in chips:
            device = _devices(chip)[0]
            for case in cases:
                if case.size == "small" and not (chip.all_cases or every):
                    continue
                directions = ("forward", "backward") if case.differentiable else ("forward",)
                for direction in directions:
                    row = Row(chip.name, case.kernel, case.name, direction)
                    try:
                        lowered = _lower(case, direction, chip, device, default_layouts)
                    except NotImplementedError as error:
                        row.status, row.reason = "refused", _first_line(error)
                        waiting.append(pool.submit(lambda row=row: row))
                    except Exception as error:
                        row.status, row.reason = "FAILED", _first_line(error)
                        waiting.append(pool.submit(lambda row=row: row))
                    else:
                        # Cases that differ in their data only are one program.
                        program = (chip.name, lowered.as_text())
                        first = seen.get(program)
                        if first is None:
                            seen[program] = pool.submit(_measure, row, case, chip, lowered)
                            waiting.append(seen[program])
                        else:
                            waiting.append(pool.submit(_renamed, first, case.name))
                    while len(waiting) > jobs or (waiting and waiting[0].done()):
                        yield waiting.pop(0).result()
        for future in waiting:
            yield future.result()


_HEADER = (
    f"{'chip':5}{'kernel':23}{'case':22}{'pass':9}{'status':9}{'bytes/min':>10}{'GFLOP':>10}"
    f"{'temp MB':>9}{'est. us':>9}{'est/roof':>9}"
)


def _line(row: Row) -> str:
    def number(value: float | None, width: int, digits: int) -> str:
        return f"{'-' if value is None else format(value, f'.{digits}f'):>{width}}"

    time_us = None if row.optimal_seconds is None else 1e6 * row.optimal_seconds
    ratio = None
    if row.optimal_seconds is not None and row.roofline_seconds:
        ratio = row.optimal_seconds / row.roofline_seconds
    text = (
        f"{row.chip:5}{row.kernel:23}{row.case:22}{row.direction:9}{row.status:9}"
        f"{number(row.bytes_over_minimum, 10, 2)}"
        f"{number(None if row.flops is None else row.flops / 1e9, 10, 2)}"
        f"{number(None if row.temp_bytes is None else row.temp_bytes / 1e6, 9, 2)}"
        f"{number(time_us, 9, 1)}{number(ratio, 9, 2)}"
    )
    if row.ops_without_estimate:
        text += f"  (+{row.ops_without_estimate} without estimate)"
    return text + (f"  {row.reason}" if row.reason else "")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the check; returns the exit status."""
    parser = argparse.ArgumentParser(description="Compile the kernels ahead of time.")
    parser.add_argument("--target", choices=("tpu", "cuda"), default="tpu")
    parser.add_argument("--chip", choices=[chip.name for chip in CHIPS], help="only this chip")
    parser.add_argument("--kernel", help="only this kernel")
    parser.add_argument("--case", help="only this case")
    parser.add_argument("--every", action="store_true", help="the odd shapes on every chip too")
    parser.add_argument(
        "--default-layouts",
        action="store_true",
        help="arguments and results in JAX's default layouts, not those that suit the kernel",
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compiler threads")
    parser.add_argument("--json", metavar="PATH", help="write the table there as JSON too")
    options = parser.parse_args(argv)

    # Neither compiler may look for its device; the host computes nothing.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    from kernels_pallas.cases import all_cases

    if options.chip:
        chips = [chip for chip in CHIPS if chip.name == options.chip]
    else:
        chips = [chip for chip in CHIPS if chip.target == options.target]
    try:
        cases = all_cases(options.kernel, options.case)
    except ValueError as error:
        parser.error(str(error))
    every = options.every or options.case is not None
    started = time.perf_counter()
    print(_HEADER, flush=True)
    rows = []
    for row in _rows(chips, cases, max(1, options.jobs), every, options.default_layouts):
        rows.append(row)
        print(_line(row), flush=True)
    failed = [row for row in rows if row.status == "FAILED"]
    refused = [row for row in rows if row.status == "refused"]
    print(
        f"{len(rows)} programs in {time.perf_counter() - started:.0f} s: "
        f"{len(rows) - len(failed) - len(refused)} compiled, {len(refused)} refused by the kernel, "
        f"{len(failed)} failed"
    )
    if options.json:
        with open(options.json, "w") as file:
            json.dump([dataclasses.asdict(row) for row in rows], file, indent=1)
    return 1 if failed or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
