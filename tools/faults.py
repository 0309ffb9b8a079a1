"""Disturbs small training runs in seeded ways and checks that nothing is lost.

  python -m tools.faults --trials 10 --seed 0
  python -m tools.faults --trials 50 --seed 1 --keep runs/faults

Each trial starts the real training program in a process of its own, hurts it (see `KINDS`), and
starts it again with `--resume auto` until it finishes. It survives if the run goes on from the last
complete checkpoint and ends in the parameters, moments and step of the undisturbed run, bit by bit
(a batch that gives NaN: of the run whose only disturbance is that batch). "lost" counts the steps
that had to be trained twice.

The disk is filled by a limit on the size of files (RLIMIT_FSIZE): a full file system of its own
would need root. Exit status: 0 if every trial survived, else 1.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import json
import pathlib
import sys
import tempfile
import time
from collections.abc import Sequence

from tools.fault_trials import KINDS, Bench, Outcome, run_trial

__all__ = ["main", "table"]


def table(outcomes: Sequence[Outcome]) -> str:
    """Trials, survivors and lost steps by kind."""
    rows: dict[str, list[Outcome]] = collections.defaultdict(list)
    for outcome in outcomes:
        rows[outcome.kind].append(outcome)
    lines = [f"{'fault':<16}{'trials':>7}{'survived':>10}{'lost steps':>12}{'starts':>8}"]
    for kind, some in [*sorted(rows.items()), ("all", list(outcomes))]:
        lines.append(
            f"{kind:<16}{len(some):>7}{sum(o.survived for o in some):>10}"
            f"{sum(o.lost_steps for o in some):>12}{sum(o.starts for o in some):>8}"
        )
    return "\n".join(lines)


def _tell(number: int, outcome: Outcome) -> Outcome:
    verdict = "survived" if outcome.survived else "FAILED"
    print(
        f"{number:>3} {outcome.kind:<16}{verdict:<10}lost {outcome.lost_steps}  "
        f"{outcome.seconds:5.1f} s  {outcome.note}",
        flush=True,
    )
    return outcome


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the campaign; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.faults",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0, help="of the faults' kinds and moments")
    parser.add_argument("--jobs", type=int, default=2, help="trials at a time")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--keep", metavar="DIR", help="keep the runs there")
    parser.add_argument("--json", metavar="PATH", help="write the outcomes there")
    flags = parser.parse_args(argv)
    if flags.trials < 1:
        parser.error(f"--trials: got {flags.trials}, expected at least 1")
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        place = pathlib.Path(flags.keep or temporary).absolute()
        place.mkdir(parents=True, exist_ok=True)
        bench = Bench(place)
        bench.reference("plain")  # compiles what the trials share

        def trial(number: int) -> Outcome:
            # Each kind in turn, so that a few trials show most kinds.
            kind = flags.kinds[(number + flags.seed) % len(flags.kinds)]
            return run_trial(bench, kind, seed=1000 * flags.seed + number)

        with concurrent.futures.ThreadPoolExecutor(flags.jobs) as pool:
            running = pool.map(trial, range(flags.trials))
            outcomes = [_tell(number, outcome) for number, outcome in enumerate(running, 1)]
    print(table(outcomes))
    survived = sum(outcome.survived for outcome in outcomes)
    print(
        f"{survived} of {len(outcomes)} trials survived in {time.perf_counter() - began:.0f} s "
        f"(seed {flags.seed})"
    )
    if flags.json:
        content = [outcome._asdict() for outcome in outcomes]
        pathlib.Path(flags.json).write_text(json.dumps(content, indent=1) + "\n")
    return 0 if survived == len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
