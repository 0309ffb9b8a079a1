"""The trials of `tools.faults`: what is done to a run, and what has to be true afterwards."""

from __future__ import annotations

import concurrent.futures
import json
import os
import pathlib
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any, NamedTuple

__all__ = ["KINDS", "Bench", "Outcome", "run_trial"]

ROOT = pathlib.Path(__file__).resolve().parents[1]
STEPS, SAVE_EVERY = 12, 3
# A peer that is gone has to be noticed within this many seconds: 10 are the program's own, the rest
# is for a machine that many trials share.
PEER_LIMIT = 60
# Until a start that hangs is given up.
START_LIMIT = 1200

KINDS = {
    "sigkill": "killed at a random moment",
    "kill_in_save": "killed while a checkpoint is written",
    "bitflip": "one bit of a file of the newest checkpoint flipped",
    "sigterm": "told to stop at a random moment",
    "truncate": "a file of the newest checkpoint cut short",
    "disk_full": "no room for a checkpoint",
    "nan_batch": "a batch whose loss is NaN, then killed",
    "no_commit": "the newest checkpoint without its commit record",
    "data_missing": "a file of the prepared data deleted between two starts",
    "clock": "the clock ten days ahead, then ten days behind",
    "data_damaged": "a file of the prepared data cut short or a bit changed between two starts",
    "peer": "one of two processes killed, either of them",
}


class Outcome(NamedTuple):
    """How a trial ended.

    Attributes:
      kind: Of the fault.
      survived: Whether everything that was asked for held.
      lost_steps: Steps that were trained twice.
      starts: How often the program was started.
      seconds: Of the whole trial.
      note: What happened, in a few words.
    """

    kind: str
    survived: bool
    lost_steps: int
    starts: int
    seconds: float
    note: str


class Bench:
    """Data, compiled programs and undisturbed runs that trials share."""

    def __init__(self, place: pathlib.Path):
        """Writes the data.

        Args:
          place: An empty or new directory.
        """
        self.place = place
        self._references: dict[str, dict[str, Any]] = {}
        self._lock = threading.Lock()
        rng = random.Random(0)
        words = {
            "fruit": ["apple", "pear", "plum", "fig"],
            "sums": ["1+1=2", "2+2=4", "3+5=8", "9-4=5"],
            "code": ["if x:", "def f():", "return y", "for i in x:"],
        }
        for domain, some in words.items():
            folder = place / "text" / domain
            folder.mkdir(parents=True, exist_ok=True)
            for number in range(8):
                text = " ".join(rng.choice(some) for _ in range(120))
                (folder / f"{number}.txt").write_text(text)

    def flags(self, directory: pathlib.Path, cache: pathlib.Path | None) -> list[str]:
        """Command line of a run: the tiny preset, smaller still."""
        return [
            *("--data", f"text:{self.place / 'text'}"),
            *("--cache-dir", str(cache or self.place / "cache"), "--run-dir", str(directory)),
            *("--layers", "1", "--embed-dim", "32", "--num-experts", "4", "--dropout", "0.1"),
            *("--seq-len", "32", "--batch", "8", "--steps", str(STEPS), "--eval-batches", "1"),
            *("--eval-every", "0", "--save-every", str(SAVE_EVERY), "--log-every", "1"),
            *("--peak-tflops", "0.1", "--resume", "auto"),
        ]

    def start(
        self,
        directory: pathlib.Path,
        fault: dict[str, Any] | None = None,
        *more: str,
        cache: pathlib.Path | None = None,
    ) -> subprocess.Popen[str]:
        """Starts the program."""
        foreign = ("SLURM_", "OMPI_", "XLA_FLAGS", "JAX_")
        env = {name: v for name, v in os.environ.items() if not name.startswith(foreign)}
        env |= {
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": str(ROOT),
            "JAXLIB_PAPERS_FAULT": json.dumps(fault or {}),
            # A trial's time is compiling; LLVM's optimisations gain nothing in a dozen steps.
            "XLA_FLAGS": "--xla_backend_optimization_level=0",
            "JAX_COMPILATION_CACHE_DIR": str(self.place / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        return subprocess.Popen(
            [sys.executable, "-m", "tools.fault_child", *self.flags(directory, cache), *more],
            env=env,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *args: Any, **kwargs: Any) -> tuple[int, str]:
        """Runs the program to its end; returns exit code and output."""
        process = self.start(*args, **kwargs)
        try:
            output, _ = process.communicate(timeout=START_LIMIT)
        finally:
            process.kill()
        return process.returncode, output

    def pair(
        self, directory: pathlib.Path, fault: dict[str, Any] | None = None, victim: int = 1
    ) -> list[tuple[int, str, float]]:
        """Runs it as two processes; the victim has the fault. The last is the time of each end."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        launch = ["--coordinator", f"127.0.0.1:{port}", "--num-processes", "2", "--process-id"]
        two = [
            self.start(directory, fault if i == victim else None, *launch, str(i)) for i in range(2)
        ]

        def end(process: subprocess.Popen[str]) -> tuple[int, str, float]:
            output, _ = process.communicate(timeout=START_LIMIT)
            return process.returncode, output, time.perf_counter()

        try:
            with concurrent.futures.ThreadPoolExecutor(2) as pool:
                return list(pool.map(end, two))
        finally:
            for process in two:
                process.kill()

    def reference(self, name: str, fault: dict[str, Any] | None = None) -> dict[str, Any]:
        """Digest of a run without (further) disturbance."""
        with self._lock:
            return self._reference(name, fault)

    def _reference(self, name: str, fault: dict[str, Any] | None) -> dict[str, Any]:
        if name not in self._references:
            directory = self.place / f"undisturbed-{name}"
            if name == "pair":
                code, output, _ = self.pair(directory)[0]
            else:
                code, output = self.run(directory, fault)
            if code:
                raise RuntimeError(f"the undisturbed run {name!r} ended with {code}:\n{output}")
            self._references[name] = _digest(directory)
        return self._references[name]


def _digest(directory: pathlib.Path) -> dict[str, Any]:
    return json.loads((directory / "digest.json").read_text())


def _complete(directory: pathlib.Path) -> list[int]:
    """Committed steps, read without the library under test."""
    found = []
    for path in (directory / "checkpoints").glob("[0-9]*"):
        record = path / "_CHECKPOINT_METADATA"
        if path.name.isdigit() and record.exists():
            try:
                if json.loads(record.read_text()).get("commit_timestamp_nsecs"):
                    found.append(int(path.name))
            except ValueError:
                continue
    return sorted(found)


def _last_logged(directory: pathlib.Path) -> int:
    path, last = directory / "metrics.jsonl", 0
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
        except ValueError:
            continue  # the line that the kill cut short
        if record.get("kind") == "train":
            last = max(last, record["step"])
    return last


def _files(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)


def _damage(kind: str, directory: pathlib.Path, step: int, rng: random.Random) -> str:
    folder = directory / "checkpoints" / str(step)
    if kind == "no_commit":
        (folder / "_CHECKPOINT_METADATA").unlink()
        return f"step {step}: no commit record"
    path = rng.choice(_files(folder))
    name = path.relative_to(folder)
    if kind == "truncate":
        size = path.stat().st_size
        with path.open("r+b") as file:
            file.truncate(rng.randrange(size))
        return f"step {step}: {name} cut short"
    return f"step {step}: bit {_flip(path, rng)} of {name}"


def _flip(path: pathlib.Path, rng: random.Random) -> int:
    content = bytearray(path.read_bytes())
    at = rng.randrange(8 * len(content))
    content[at // 8] ^= 1 << at % 8
    path.write_bytes(bytes(content))
    return at


class _Failed(Exception):
    """What did not hold."""


def _require(condition: bool, text: str) -> None:
    if not condition:
        raise _Failed(text)


def run_trial(bench: Bench, kind: str, seed: int) -> Outcome:
    """Runs one trial.

    Args:
      bench: What trials share.
      kind: A key of `KINDS`.
      seed: Of the moment and the place of the fault.
    """
    rng = random.Random(seed)
    directory = bench.place / f"trial-{seed}-{kind}"
    trial = _Trial(bench, directory, rng)
    began = time.perf_counter()
    try:
        note = getattr(trial, kind if hasattr(trial, kind) else "kill_then_damage")(kind)
        survived = True
    except (_Failed, subprocess.TimeoutExpired, OSError) as error:
        note, survived = f"{type(error).__name__}: {error}", False
    seconds = time.perf_counter() - began
    return Outcome(kind, survived, trial.lost, trial.starts, round(seconds, 1), note)


class _Trial:
    def __init__(self, bench: Bench, directory: pathlib.Path, rng: random.Random):
        self.bench, self.directory, self.rng = bench, directory, rng
        self.lost = self.starts = 0

    def disturb(self, fault: dict[str, Any], code: int, cache: pathlib.Path | None = None) -> None:
        """Starts the run with a fault and expects its exit code."""
        self.starts += 1
        got, output = self.bench.run(self.directory, fault, cache=cache)
        _require(got == code, f"ended with {got}, expected {code}: {output[-1500:]}")

    def finish(
        self,
        reference: dict[str, Any],
        fault: dict[str, Any] | None = None,
        *,
        may_fall_back: bool = False,
        cache: pathlib.Path | None = None,
    ) -> int:
        """Starts the run once more, to its end; returns the step that it went on from."""
        committed, logged = _complete(self.directory), _last_logged(self.directory)
        self.starts += 1
        code, output = self.bench.run(self.directory, fault, cache=cache)
        return self.judge(code, output, committed, logged, reference, may_fall_back)

    def judge(
        self,
        code: int,
        output: str,
        committed: list[int],
        logged: int,
        reference: dict[str, Any],
        may_fall_back: bool,
    ) -> int:
        _require(code == 0, f"the restarted run ended with {code}: {output[-1500:]}")
        found = re.search(r"going on from step (\d+)", output)
        found = re.search(r"resumed after step (\d+)", output) or found
        step = int(found[1]) if found else 0
        allowed = {committed[-1] if committed else 0}
        if may_fall_back:
            allowed |= set(committed[-2:-1])
        _require(step in allowed, f"went on from step {step}, committed: {committed}")
        self.lost += max(0, logged - step)
        result = _digest(self.directory)
        _require(result == reference, "the final state is not that of the undisturbed run")
        return step

    def killed(self, after: int | None = None, **more: Any) -> dict[str, Any]:
        steps = self.rng.randint(2, STEPS - 1) if after is None else after
        return {"kind": "sigkill", "after": steps, "delay": self.rng.uniform(0, 0.05), **more}

    def sigkill(self, kind: str) -> str:
        fault = self.killed()
        self.disturb(fault, -signal.SIGKILL)
        step = self.finish(self.bench.reference("plain"))
        return f"killed after step {fault['after']}, went on from {step}"

    def sigterm(self, kind: str) -> str:
        after = self.rng.randint(2, STEPS - 2)
        self.disturb({"kind": "sigterm", "after": after}, 75)
        step = self.finish(self.bench.reference("plain"))
        _require(step >= after, f"told to stop after step {after}, but saved step {step}")
        return f"told to stop after step {after}, went on from {step}"

    def kill_in_save(self, kind: str) -> str:
        at = self.rng.choice(range(SAVE_EVERY, STEPS, SAVE_EVERY))
        delay = self.rng.uniform(0, 0.04)
        self.disturb({"kind": kind, "step": at, "delay": delay}, -signal.SIGKILL)
        step = self.finish(self.bench.reference("plain"))
        return f"killed {1e3 * delay:.0f} ms into the save of step {at}, went on from {step}"

    def disk_full(self, kind: str) -> str:
        at = self.rng.choice(range(2 * SAVE_EVERY, STEPS, SAVE_EVERY))
        size = self.rng.choice((0, 1_000, 10_000))
        self.disturb({"kind": kind, "step": at, "bytes": size}, 1)
        step = self.finish(self.bench.reference("plain"))
        return f"no file over {size} bytes at step {at}, went on from {step}"

    def kill_then_damage(self, kind: str) -> str:
        # After two saves: the one before the damaged one is what remains.
        self.disturb(self.killed(self.rng.randint(3 * SAVE_EVERY + 1, STEPS - 1)), -signal.SIGKILL)
        newest = _complete(self.directory)[-1]
        note = _damage(kind, self.directory, newest, self.rng)
        step = self.finish(self.bench.reference("plain"), may_fall_back=True)
        return f"{note}, went on from {step}"

    def nan_batch(self, kind: str) -> str:
        bad = self.rng.randint(2, STEPS - 2)
        reference = self.bench.reference(f"nan-{bad}", {"nan_step": bad})
        _require(reference["skipped"] == 1, f"{reference['skipped']} steps were skipped, not one")
        _require(
            reference["digest"] != self.bench.reference("plain")["digest"],
            "the step with NaN was not skipped",
        )
        self.disturb(self.killed(nan_step=bad), -signal.SIGKILL)
        step = self.finish(reference, {"nan_step": bad})
        return f"NaN in step {bad}, went on from {step}, skipped once"

    def clock(self, kind: str) -> str:
        days = self.rng.choice((-10, 10)) * 86400.0
        self.disturb(self.killed(clock=days), -signal.SIGKILL)
        step = self.finish(self.bench.reference("plain"), {"clock": -days})
        return f"clock off by {days / 86400:+.0f} days, then {-days / 86400:+.0f}; from {step}"

    def _data(self, kind: str) -> str:
        reference = self.bench.reference("plain")
        cache = self.bench.place / f"cache-{self.directory.name}"
        shutil.copytree(self.bench.place / "cache", cache)
        self.disturb(self.killed(), -signal.SIGKILL, cache=cache)
        path = self.rng.choice([p for p in _files(cache / "tokens") if p.suffix == ".npy"])
        # The documented rule: what is missing or not what was written is prepared again.
        if kind == "data_missing":
            path.unlink()
            note = f"{path.name} deleted"
        elif self.rng.random() < 0.5:
            with path.open("r+b") as file:
                file.truncate(path.stat().st_size // 2)
            note = f"{path.name} cut short"
        else:
            note = f"bit {_flip(path, self.rng)} of {path.name} flipped"
        return f"{note}: made anew, went on from {self.finish(reference, cache=cache)}"

    data_missing = data_damaged = _data

    def peer(self, kind: str) -> str:
        reference = self.bench.reference("pair")
        self.starts += 2
        at = self.rng.choice(range(SAVE_EVERY, STEPS, SAVE_EVERY))
        fault = {"kind": "kill_in_save", "step": at, "delay": self.rng.uniform(0, 0.2)}
        victim = self.rng.randrange(2)
        ends = self.bench.pair(self.directory, fault, victim)
        (code, output, end), (gone, last, began) = ends[1 - victim], ends[victim]
        _require(gone == -signal.SIGKILL, f"the victim ended with {gone}: {last[-1500:]}")
        _require(code == 76, f"the other process ended with {code}, not 76: {output[-1500:]}")
        _require(end - began < PEER_LIMIT, f"the other process stopped {end - began:.0f} s later")
        committed, logged = _complete(self.directory), _last_logged(self.directory)
        code, output, _ = self.bench.pair(self.directory)[0]
        step = self.judge(code, output, committed, logged, reference, False)
        return f"process {victim} killed, the other stopped {end - began:.0f} s later, from {step}"
