"""The experiment judges what it must, and a quick run writes a whole report."""

from __future__ import annotations

import json

import numpy as np
import pytest

from experiments import japan as experiment
from experiments import japan_data as data
from experiments.japan_runs import log_ratio


def figures(area: float, coverage: float = 0.9) -> dict:
    return {"area": area, "coverage": coverage}


def verdicts(part: str | None = None, method: str = "", **changes) -> list[bool]:
    """Verdicts on a clear success in which one method of one part in the last seed is changed."""
    results = {}
    for name in ("A", "B"):
        areas = {"JAPAN": 5.0, "JAPAN hpd": 4.9, "CONTRA": 7.0, "l2": 8.0, "RCP": 7.0, "PCP": 9.0}
        results[name] = {
            seed: {"methods": {m: figures(a) for m, a in areas.items()}} for seed in (0, 1)
        }
    if part:
        results[part][1]["methods"][method] |= changes
    return [criterion.passed for criterion in experiment.judge(results, (0, 1), "seeds")]


def test_clear_success_meets_all_criteria():
    assert verdicts() == [True] * 6


@pytest.mark.parametrize(
    ("failing", "part", "method", "changes"),
    [
        (0, "A", "CONTRA", {"area": 5.8}),
        (1, "A", "l2", {"area": 6.2}),
        (2, "A", "JAPAN", {"coverage": 0.8}),
        (3, "B", "PCP", {"area": 0.5}),
        (4, "B", "RCP", {"area": 4.5}),
        (5, "B", "JAPAN", {"coverage": 0.83}),
    ],
)
def test_each_criterion_fails_on_its_own(failing, part, method, changes):
    got = verdicts(part, method, **changes)
    assert not got[failing] and (sum(got) == 5 or failing == 4)


def test_ratio_of_volumes_needs_no_exponentials():
    assert log_ratio(np.array([1000.0, 1001.0]), np.array([1000.0, 1001.0])) == 1
    assert log_ratio(np.log([1.0, 3.0]), np.log([8.0, 8.0])) == pytest.approx(0.25)


class TestData:
    def test_split_is_disjoint_and_standardised_on_its_training_part(self):
        table = np.arange(400.0)[:, None] ** 1.5
        split = data.split_rows(table, np.hstack([table, -table]), seed=0)
        assert [len(p) for p in split.x] == [200, 100, 100]
        assert abs(float(split.y[0].mean())) < 1e-5 and abs(split.y[0].std() - 1) < 1e-5
        assert abs(float(split.y[1][:, 0].mean())) > 1e-5
        together = np.concatenate(split.x)[:, 0]
        assert len(np.unique(together)) == 400

    def test_modes_turn_and_spread(self):
        x, y = data.rotating_modes(0, 20_000)
        angle = np.arctan2(y[:, 1], y[:, 0]) - np.pi * x[:, 0]
        off = np.abs((angle / (2 * np.pi / 3) + 0.5) % 1 - 0.5)
        assert off.mean() < 0.08
        radius = np.hypot(*y.T)
        assert radius[x[:, 0] > 0.8].std() > 1.8 * radius[x[:, 0] < -0.8].std()

    def test_walks_branch_at_step_three(self):
        history, future = data.branching_walks(0, 4000)
        assert history.shape == (4000, 4, 1) and future.shape == (4000, 8, 1)
        steps = np.diff(np.concatenate([history[:, -1:], future], axis=1)[..., 0], axis=1)
        assert [round(s, 1) for s in steps.std(axis=0)] == [0.2] * 3 + [2.0] + [0.2] * 4
        assert (np.abs(steps[:, 3]) > 1).mean() > 0.99

    def test_own_table(self, tmp_path):
        path = tmp_path / "table.csv"
        path.write_text("a,b,c\n1,2,3\n4,5,6\n")
        x, y = data.load_csv(str(path), ("a",), ("c", "b"))
        np.testing.assert_array_equal(y, [[3, 2], [6, 5]])
        with pytest.raises(ValueError, match="'d'"):
            data.load_csv(str(path), ("d",), ("b",))
        path.write_text("a,b\n1,\n")
        with pytest.raises(ValueError, match="empty cells"):
            data.load_csv(str(path), ("a",), ("b",))

    def test_tables(self):
        pytest.importorskip("sklearn")
        assert [a.shape for a in data.digits()] == [(1797, 6), (1797, 2)]
        assert [a.shape for a in data.real_table("breast_cancer")] == [(569, 10), (569, 3)]
        assert [a.shape for a in data.real_table("linnerud")] == [(20, 3), (20, 3)]
        with pytest.raises(ValueError, match="table is"):
            data.real_table("energy")


def test_seeds_judged_twice_are_refused(tmp_path):
    with pytest.raises(ValueError, match="seeds="):
        experiment.main(seeds=(0, 1), fresh_seeds=(1,), out=tmp_path)


@pytest.mark.slow
def test_quick_run_writes_a_whole_report(tmp_path, capsys):
    pytest.importorskip("sklearn")
    status = experiment.main(out=tmp_path, table="linnerud", trajectories=False, quick=True)
    out = capsys.readouterr().out
    assert "japan: " in out and "of 6 criteria held" in out
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["passed"] is (status == 0)
    assert (tmp_path / "japan.png").read_bytes().startswith(b"\x89PNG")
    runs = report["results"]
    assert set(runs) == {"A", "B", "linnerud"}
    for part, seed in (("A", "0"), ("B", "0")):
        methods = runs[part][seed]["methods"]
        assert len(methods) == 15
        for method in methods.values():
            assert 0.5 < method["coverage"] <= 1 and method["area"] > 0
    # Five calibration rows allow no finite region: the whole space covers everything.
    assert runs["linnerud"]["0"]["methods"]["JAPAN"] | {"seconds": 0} == {
        "coverage": 1.0,
        "area": "inf",
        "median_area": "inf",
        "worst_slab": 1.0,
        "seconds": 0,
    }


@pytest.mark.slow
def test_pass_lines_hold(tmp_path):
    """A and B as set, seeds of the judgement and fresh ones."""
    pytest.importorskip("sklearn")
    status = experiment.main(out=tmp_path, table="none", trajectories=False)
    report = json.loads((tmp_path / "report.json").read_text())
    assert len(report["criteria"]) == 12
    assert status == 0, [c for c in report["criteria"] if not c["passed"]]
