"""Pictures of runs of any size."""

from __future__ import annotations

import numpy as np
import pytest

from experiments import plots


def make_run(domains, experts, layers=3, evaluations=3):
    rng = np.random.default_rng(0)
    records = [{"kind": "train", "step": 1, "loss": 2.0}]
    for step in range(evaluations):
        record = {"kind": "eval", "step": 10 * step}
        record |= {f"loss/{name}": 5 / (step + 1) for name in domains}
        pairs = rng.random((len(domains), len(domains))) / 2
        records.append(record | {"pairwise_jsd": (pairs + pairs.T).tolist()})
    return records, rng.dirichlet(np.ones(experts), (layers, len(domains)))


@pytest.mark.parametrize(("domains", "experts"), [(1, 4), (4, 16), (20, 64)])
def test_pictures_are_written_for_any_number_of_domains_and_experts(tmp_path, domains, experts):
    names = [f"domain {i}" for i in range(domains)]
    paths = plots.save_run_figures(tmp_path, *make_run(names, experts)[:1], names, None)
    assert [path.name for path in paths] == ["heldout_loss.png"]
    records, routing = make_run(names, experts)
    paths = plots.save_run_figures(tmp_path, records, names, routing)
    expected = ["heldout_loss.png", "routing.png"] + (["jsd.png"] if domains > 1 else [])
    assert [path.name for path in paths] == expected
    for path in paths:
        assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000


def test_loss_lines_are_those_of_the_records_and_gaps_stay_gaps():
    records, _ = make_run(["a", "b"], 4)
    records[-1]["loss/b"] = None
    (axes,) = plots.heldout_loss_figure(records, ["a", "b"]).axes
    lines = {line.get_label(): line.get_ydata() for line in axes.get_lines()}
    np.testing.assert_allclose(lines["a"], [5, 2.5, 5 / 3])
    np.testing.assert_allclose(lines["b"], [5, 2.5, np.nan])


def test_heat_map_shows_shares_relative_to_even_use():
    routing = np.full((2, 3, 4), 0.25)
    routing[1, 2] = [1, 0, 0, 0]
    figure = plots.routing_figure(routing, ["a", "b", "c"])
    maps = [axes.images[0].get_array() for axes in figure.axes if axes.images]
    np.testing.assert_allclose(maps[0], np.ones((3, 4)))
    np.testing.assert_allclose(maps[1][2], [4, 0, 0, 0])


def test_divergence_lines_are_the_pairs_and_their_mean():
    records, _ = make_run(["a", "b", "c"], 4)
    values = np.array([r["pairwise_jsd"] for r in records[1:]])
    (axes,) = plots.jsd_figure(records, ["a", "b", "c"]).axes
    drawn = [np.asarray(line.get_ydata()) for line in axes.get_lines()]
    pairs = [values[:, 0, 1], values[:, 0, 2], values[:, 1, 2]]
    for expected in [*pairs, np.mean(pairs, axis=0)]:
        assert any(d.shape == expected.shape and np.allclose(d, expected) for d in drawn)
