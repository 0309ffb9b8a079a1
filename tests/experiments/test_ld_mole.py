"""The digits experiment: verdicts, the six tasks, and a quick run through everything."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from experiments import ld_mole as experiment


def result(accuracy: float, **changes) -> dict:
    figures = {
        "accuracy": accuracy,
        "zero": 0.0,
        "active": [2.5, 2.5, 2.5],
        "active_std": [0.9, 0.8, 0.7],
    }
    return figures | changes


def verdicts(**changes) -> list[bool]:
    """Verdicts when one thing deviates from a clear success; keys are variants."""
    runs = {
        experiment.LD: [result(0.87), result(0.88), result(0.86)],
        experiment.SPARSE: [result(0.8, active=[1.2, 1.8, 1.1])] * 3,
        experiment.TOP: [result(0.8)] * 3,
        experiment.RELU: [result(0.91, zero=0.01), result(0.79, zero=0.1), result(0.88)],
    } | changes
    seeds = (0, 1, 2)
    results = {name: dict(zip(seeds, figures, strict=True)) for name, figures in runs.items()}
    return [criterion.passed for criterion in experiment.judge(results, seeds, "seeds")]


def test_clear_success_meets_all_five_criteria():
    assert verdicts() == [True] * 5


@pytest.mark.parametrize(
    ("failing", "changes"),
    [
        (0, {experiment.TOP: [result(0.85)] * 3}),
        (1, {experiment.RELU: [result(0.91, zero=0.01), result(0.79), result(0.88)]}),
        (2, {experiment.RELU: [result(0.9, zero=0.1)] * 3}),
        (3, {experiment.SPARSE: [result(0.8, active=[1.2, 2.3, 1.1])] * 3}),
        (3, {experiment.SPARSE: [result(0.8, active=[1.2, 1.2, 2.6])] * 3}),
        (4, {experiment.LD: [result(0.87), result(0.88), result(0.86, active_std=[0.9, 0.2, 1])]}),
    ],
)
def test_each_criterion_fails_on_its_own(failing, changes):
    assert verdicts(**changes) == [index != failing for index in range(5)]


def test_an_empty_token_of_ld_mole_is_noticed():
    runs = {experiment.LD: [result(0.87, zero=0.001), result(0.88), result(0.86)]}
    assert verdicts(**runs)[1] is False


def test_tasks():
    images = np.random.default_rng(0).random((5, 8, 8)).astype(np.float32)
    views = experiment.transformed(images)
    assert views.shape == (len(experiment.TASKS), 5, 64)
    np.testing.assert_array_equal(views[0], images.reshape(5, 64))
    np.testing.assert_allclose(views[0] + views[1], 1, rtol=1e-6)
    np.testing.assert_array_equal(views[2], views[5])  # as the sheet of the paper notes
    twice = experiment.transformed(views[2].reshape(5, 8, 8))[2]
    np.testing.assert_array_equal(twice, views[4])


def test_local_heads_are_read_by_their_own_linear():
    cfg = experiment.Config().mole(experiment.LOCAL)
    rng = np.random.default_rng(0)
    base = [
        {"W": rng.normal(size=(n, 64)).astype(np.float32), "b": np.zeros(n, np.float32)}
        for n in (64, 64, 10)
    ]
    tree = {"layers": {i: {"W": layer["W"]} for i, layer in enumerate(base)}}
    params = experiment.inject_mole(tree, dataclasses.replace(cfg, targets=("layers.*",)))
    head = {name: np.array(array) for name, array in params.heads[64].items()}
    x = rng.random((3, 64)).astype(np.float32)
    before = experiment.forward(base, params, x, cfg)[1]
    head["b2"][1] += 1
    after = experiment.forward(base, params._replace(heads={64: head}), x, cfg)[1]
    changed = [bool((a.lam != b.lam).any()) for a, b in zip(before, after, strict=True)]
    assert changed == [False, True, False]  # B = 0, so what the next linear sees is the same


@pytest.mark.slow
def test_quick_run_writes_a_whole_report(tmp_path, capsys):
    pytest.importorskip("sklearn")
    status = experiment.main(out=tmp_path, quick=True)
    assert status in (0, 3)
    assert "of 5 criteria held" in capsys.readouterr().out
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["passed"] is (status == 0) and report["config"]["seeds"] == [0]
    assert set(report["results"]) == set(experiment.VARIANTS)
    for variant, runs in report["results"].items():
        figures = runs["0"]
        assert 0 < figures["accuracy"] < 1 and len(figures["active"]) == 3
        assert (figures["zero"] == 0) or "ReLU" in variant
    assert (tmp_path / "ld_mole.png").read_bytes().startswith(b"\x89PNG")


def test_seeds_shared_by_both_sets_are_refused(tmp_path):
    with pytest.raises(ValueError, match="seeds="):
        experiment.main(seeds=(0, 1), fresh_seeds=(1,), out=tmp_path)


@pytest.mark.slow
def test_mechanism(tmp_path):
    """What holds whatever rounding does to a run; the spread over seeds may come out either way."""
    pytest.importorskip("sklearn")
    status = experiment.main(out=tmp_path)
    report = json.loads((tmp_path / "report.json").read_text())
    failed = [c["name"] for c in report["criteria"] if not c["passed"]]
    assert [name for name in failed if "(c)" not in name] == []
    assert status == (3 if failed else 0)
