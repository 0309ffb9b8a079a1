"""Command line of the benchmarks."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator

import jax
from rich.console import Console
from rich.table import Table

from jaxlib_papers.train.host_memory import keep_freed_memory
from tools.bench import (
    causal_cases,
    device_cases,
    flow_cases,
    kernel_cases,
    lm_cases,
    mole_cases,
    train_cases,
)
from tools.bench.timing import Result

CASES: dict[str, Callable[[], Iterator[Result]]] = {
    "train_step_moe16": train_cases.train_step_moe16,
    "moe_layer": train_cases.moe_layer,
    "edl_overhead": train_cases.edl_overhead,
    "memory_length": train_cases.memory_length,
    "compile_depth": train_cases.compile_depth,
    "import_time": train_cases.import_time,
    "grouped_matmul": kernel_cases.grouped,
    "sparsegen": kernel_cases.sparsegen_speed,
    "block_sparse_attention": kernel_cases.block_sparse,
    "attention": kernel_cases.attention_speed,
    "attention_memory": kernel_cases.attention_memory,
    "mole_routing": mole_cases.mole_routing,
    "lora_step": mole_cases.lora_step,
    "language_model": lm_cases.language_model,
    "causal_tests": causal_cases.causal_tests,
    "causal_fit50": causal_cases.causal_fit50,
    "causal_bootstrap": causal_cases.causal_bootstrap,
    "flow_fit": flow_cases.flow_fit,
    "spline": flow_cases.spline,
    "flow_regions": flow_cases.flow_regions,
}


def _table(results: list[Result]) -> Table:
    table = Table("case", "seconds", "rate", "ratio", "target", "met", "rival")
    for r in results:
        table.add_row(
            r.case,
            "" if r.seconds is None else f"{r.seconds:.4g}",
            "" if r.rate is None else f"{r.rate:.4g} {r.unit}",
            "" if r.ratio is None else f"{r.ratio:.3f}",
            r.target,
            {True: "yes", False: "MISSED", None: ""}[r.met],
            r.rival,
        )
    return table


def main() -> None:
    """Runs the named cases, or all."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench", description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"any of {', '.join(CASES)}")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument(
        "--device",
        action="store_true",
        help="the kernels on the GPU or TPU of this machine, in under five minutes",
    )
    args = parser.parse_args()
    unknown = sorted(set(args.cases) - set(CASES))
    if unknown:
        parser.error(f"unknown case {', '.join(unknown)}; known: {', '.join(CASES)}")
    if args.device and args.cases:
        parser.error("--device runs its own table; name no case with it")
    if args.device and jax.default_backend() == "cpu":
        parser.error("--device: JAX sees no GPU or TPU here")
    keep_freed_memory()
    runs = [device_cases.device_table] if args.device else [CASES[n] for n in args.cases or CASES]
    results = []
    for run in runs:
        for result in run():
            results.append(result)
            if args.json:
                print(json.dumps(result.record()), flush=True)
    if not args.json:
        Console().print(_table(results))


if __name__ == "__main__":
    main()
