"""The experiments' harness: cache keys, resumption, verdicts and the report's files."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from experiments import harness


@dataclasses.dataclass(frozen=True)
class Config:
    steps: int = 3


def grid(cache, config=Config(), seeds=(0, 1), calls=None):
    calls = [] if calls is None else calls

    def run(variant, seed):
        calls.append((variant, seed))
        return {"loss": np.float32(seed + 0.5), "curve": np.arange(2)}

    results = harness.run_grid(
        run, ("a", "b"), seeds, config=config, cache=cache, say=lambda line: None
    )
    return results, calls


def test_finished_runs_are_not_repeated_and_read_back_equal(tmp_path):
    first, calls = grid(harness.ResultCache(tmp_path))
    assert calls == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    again, calls = grid(harness.ResultCache(tmp_path), seeds=(0, 1, 2))
    assert calls == [("a", 2), ("b", 2)]
    assert again["a"][0] == first["a"][0] == {"loss": 0.5, "curve": [0, 1]}


def test_another_config_or_another_source_is_another_run(tmp_path, monkeypatch):
    grid(harness.ResultCache(tmp_path))
    assert len(grid(harness.ResultCache(tmp_path), config=Config(steps=4))[1]) == 4
    monkeypatch.setattr(harness, "_source_fingerprint", lambda: "changed")
    assert len(grid(harness.ResultCache(tmp_path))[1]) == 4


def test_damaged_result_is_run_again(tmp_path):
    grid(harness.ResultCache(tmp_path))
    for path in tmp_path.iterdir():
        path.write_text(path.read_text()[:20])
    assert len(grid(harness.ResultCache(tmp_path))[1]) == 4


def test_interrupted_grid_keeps_what_was_done(tmp_path):
    def run(variant, seed):
        if variant == "b":
            raise KeyboardInterrupt
        return {"loss": 1.0}

    with pytest.raises(KeyboardInterrupt):
        harness.run_grid(
            run, ("a", "b"), (0,), config=Config(), cache=harness.ResultCache(tmp_path)
        )
    assert grid(harness.ResultCache(tmp_path), seeds=(0,))[1] == [("b", 0)]


def test_without_directory_nothing_is_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cache = harness.ResultCache(None)
    assert len(grid(cache)[1]) == len(grid(cache)[1]) == 4
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("passed", [True, False])
def test_report_states_the_verdict_on_screen_and_in_json(tmp_path, capsys, passed):
    report = harness.Report(
        slug="method",
        title="A table",
        config={"config": Config()},
        columns=("variant", "loss"),
        rows=[("a", "1.0")],
        criteria=[
            harness.Criterion("holds", True, "1 < 2"),
            harness.Criterion("may hold", passed, "x"),
        ],
        results={"a": {"loss": float("nan")}},
    )
    figure, axes = harness.new_figure()
    axes.plot([0, 1])
    path = harness.write_report(report, tmp_path / "new" / "place", figure)
    out = capsys.readouterr().out
    verdict = "PASS (2 of 2" if passed else "not reproduced (1 of 2"
    assert f"method: {verdict}" in out and "A table" in out
    content = json.loads(path.read_text())
    assert content["passed"] is passed and content["results"]["a"]["loss"] == "nan"
    assert content["config"]["config"] == {"steps": 3}
    assert content["environment"]["versions"]["jax"]
    assert (path.parent / "method.png").read_bytes().startswith(b"\x89PNG")


def test_a_report_without_criteria_has_not_passed():
    report = harness.Report("m", "t", {}, (), (), (), {})
    assert not report.passed


def test_mean_and_spread():
    assert harness.mean_and_spread([1.0, 3.0], 1) == "2.0 ± 1.4"
    assert harness.mean_and_spread([0.25], 2) == "0.25"


@pytest.mark.parametrize(
    ("seeds", "words"),
    [((0, 1, 2), "0 to 2"), ((9, 10), "9, 10"), ((0, 2, 5), "0, 2, 5"), ((3,), "3"), ((), "")],
)
def test_seeds_in_words(seeds, words):
    assert harness.seeds_in_words(seeds) == words
