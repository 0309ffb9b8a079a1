"""The campaign judges rightly: it would notice a run that lost something."""

from __future__ import annotations

import json
import random

import pytest

from tools import fault_trials, faults
from tools.fault_trials import Outcome


def committed(directory, *steps, broken=()):
    for step in steps:
        folder = directory / "checkpoints" / str(step)
        (folder / "state").mkdir(parents=True)
        (folder / "state" / "array").write_bytes(bytes(range(64)))
        record = {} if step in broken else {"commit_timestamp_nsecs": 7}
        (folder / "_CHECKPOINT_METADATA").write_text(json.dumps(record))


@pytest.fixture
def trial(tmp_path):
    committed(tmp_path, 3, 6, 9, broken=(9,))
    (tmp_path / "digest.json").write_text(json.dumps({"digest": "a", "skipped": 0}))
    (tmp_path / "metrics.jsonl").write_text('{"step": 8, "kind": "train"}\n{"step": 9, "ki')
    return fault_trials._Trial(None, tmp_path, random.Random(0))


def test_committed_steps_and_logged_steps_are_read_without_the_library(trial):
    assert fault_trials._complete(trial.directory) == [3, 6]
    assert fault_trials._last_logged(trial.directory) == 8


RIGHT = {"digest": "a", "skipped": 0}


def test_a_run_that_went_on_from_the_last_step_survives_and_counts_lost_steps(trial):
    step = trial.judge(0, "run x, resumed after step 6", [3, 6], 8, RIGHT, False)
    assert (step, trial.lost) == (6, 2)


@pytest.mark.parametrize(
    ("code", "output", "reference", "message"),
    [
        (1, "resumed after step 6", RIGHT, "ended with 1"),
        (0, "resumed after step 3", RIGHT, "went on from step 3"),
        (0, "", RIGHT, "went on from step 0"),
        (0, "resumed after step 6", {"digest": "b", "skipped": 0}, "not that of the undisturbed"),
        (0, "resumed after step 6", {"digest": "a", "skipped": 1}, "not that of the undisturbed"),
    ],
)
def test_what_was_lost_fails_the_trial(trial, code, output, reference, message):
    with pytest.raises(fault_trials._Failed, match=message):
        trial.judge(code, output, [3, 6], 8, reference, False)


def test_one_step_back_is_allowed_for_a_damaged_checkpoint_and_no_more(trial):
    assert trial.judge(0, "resumed after step 6", [3, 6, 9], 10, RIGHT, True) == 6
    with pytest.raises(fault_trials._Failed, match="went on from step 3"):
        trial.judge(0, "resumed after step 3", [3, 6, 9], 10, RIGHT, True)


@pytest.mark.parametrize("kind", ["bitflip", "truncate", "no_commit"])
def test_damage_is_done_and_told(trial, kind):
    folder = trial.directory / "checkpoints" / "6"
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    note = fault_trials._damage(kind, trial.directory, 6, random.Random(1))
    after = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    assert before != after and note.startswith("step 6")


def test_table_adds_up_and_every_kind_is_explained():
    outcomes = [
        Outcome("sigkill", True, 2, 2, 1.0, ""),
        Outcome("sigkill", False, 0, 2, 1.0, ""),
        Outcome("peer", True, 1, 4, 1.0, ""),
    ]
    rows = {line.split()[0]: line.split()[1:] for line in faults.table(outcomes).splitlines()[1:]}
    assert rows == {
        "sigkill": ["2", "1", "2", "4"],
        "peer": ["1", "1", "1", "4"],
        "all": ["3", "2", "3", "8"],
    }
    kinds = fault_trials.KINDS
    assert len(kinds) >= 10 and all(len(text) > 10 for text in kinds.values())


def test_no_trials_is_an_error():
    with pytest.raises(SystemExit) as stop:
        faults.main(["--trials", "0"])
    assert stop.value.code == 2
