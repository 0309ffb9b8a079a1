"""A run goes on with another number of devices and of processes (C13, C14, C15).

Steps before the change and after it; the data come from the pipeline, at the place that the
checkpoint holds, and dropout is on.
"""

from __future__ import annotations

import json
import random
import shutil

import numpy as np
import pytest

from tests.distributed.harness import run_program

pytestmark = pytest.mark.distributed

BEFORE, AFTER = 3, 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Text of three domains."""
    root = tmp_path_factory.mktemp("elastic")
    rng = random.Random(0)
    for domain, words in {"fruit": "apple pear plum fig", "sums": "1+1=2 2+2=4 9-4=5"}.items():
        (root / "text" / domain).mkdir(parents=True)
        for number in range(6):
            text = " ".join(rng.choice(words.split()) for _ in range(150))
            (root / "text" / domain / f"{number}.txt").write_text(text)
    return root


def train(folder, *parts, **launch):
    """Runs parts (mesh, directory, steps) in one start; what each process says of each part."""
    told = [{"mesh": m, "directory": str(folder / d), "steps": n} for m, d, n in parts]
    places = (str(folder / "text"), str(folder / "cache"))
    launch |= {"compiled": folder / "compiled"}
    results = run_program("elastic", *places, json.dumps(told), **launch)
    for result in results[1:]:  # every process saw the same
        assert result == results[0]
    return results[0]


@pytest.fixture(scope="module")
def eight(folder):
    """Eight devices: the run that nobody interrupted, and the first steps of one that was."""
    mesh = "fsdp=4,expert=2"
    whole, before = train(folder, (mesh, "whole", BEFORE + AFTER), (mesh, "saved", BEFORE))
    assert before["losses"] == whole["losses"][:BEFORE]
    return whole


def check_continuation(parts, whole):
    """The parts follow each other and are the whole run: same examples, losses within 1e-5."""
    steps = BEFORE
    for part in parts:
        assert part["first"] == steps
        steps += len(part["losses"])
    batches = [one for part in parts for one in part["batches"]]
    losses = [one for part in parts for one in part["losses"]]
    assert len(set(batches)) == len(batches) == AFTER
    assert batches == whole["batches"][BEFORE:], "another order of examples"
    np.testing.assert_allclose(losses, whole["losses"][BEFORE:], rtol=1e-5)


def test_same_mesh_is_bitwise_and_eight_devices_become_four_and_one(folder, eight):
    for name in ("same", "fewer"):
        shutil.copytree(folder / "saved", folder / name)
    same, four, one = train(
        folder,
        ("fsdp=4,expert=2", "same", AFTER),
        ("data=2,fsdp=2", "fewer", 5),
        ("data=1", "fewer", 5),
    )
    check_continuation([same], eight)
    assert same["losses"] == eight["losses"][BEFORE:]
    assert same["digest"] == eight["digest"]
    check_continuation([four, one], eight)


def test_eight_devices_become_two_processes(folder, eight):
    shutil.copytree(folder / "saved", folder / "two")
    (two,) = train(folder, ("fsdp=2", "two", AFTER), devices=1, processes=2)
    check_continuation([two], eight)


@pytest.mark.slow
def test_two_processes_become_one_and_four(folder, eight):
    (two,) = train(folder, ("fsdp=2", "more", BEFORE), devices=1, processes=2)
    (one,) = train(folder, ("data=1", "more", 5), devices=1)
    (four,) = train(folder, ("data=2,fsdp=2", "more", 5), devices=1, processes=4)
    assert two["batches"] == eight["batches"][:BEFORE]
    np.testing.assert_allclose(two["losses"], eight["losses"][:BEFORE], rtol=1e-5)
    check_continuation([one, four], eight)
