"""Metrics survive crashes and resumption, and stay strict JSON."""

from __future__ import annotations

import json
import logging
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlib_papers.train import metrics


def test_records_are_strict_json_lines_on_disk_at_once(tmp_path):
    with metrics.MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write(1, "train", {"loss": jnp.float32(2.5), "load": np.ones((2, 2)), "n": 3})
        writer.write(2, "train", {"loss": math.nan, "nested": {"a": [math.inf, 1.0]}, "s": "x"})
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()

        def refuse(name):
            raise AssertionError(name)

        first, second = (json.loads(line, parse_constant=refuse) for line in lines)
    assert first["step"] == 1 and first["kind"] == "train" and first["loss"] == 2.5
    assert first["load"] == [[1.0, 1.0], [1.0, 1.0]] and first["n"] == 3
    assert second["loss"] is None and second["nested"] == {"a": [None, 1.0]} and second["s"] == "x"


def test_resume_drops_later_records_and_a_line_cut_short(tmp_path):
    with metrics.MetricsWriter(tmp_path, tensorboard=False) as writer:
        for step in range(1, 7):
            writer.write(step, "train", {"loss": float(step)})
    path = tmp_path / "metrics.jsonl"
    with path.open("a") as file:
        file.write('{"step": 7, "kind": "tr')
    assert [r["step"] for r in metrics.read_records(path)] == [1, 2, 3, 4, 5, 6]
    with metrics.MetricsWriter(tmp_path, resume_step=4, tensorboard=False) as writer:
        writer.write(5, "train", {"loss": 50.0})
    assert [(r["step"], r["loss"]) for r in metrics.read_records(path)] == [
        (1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (5, 50.0),
    ]  # fmt: skip
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_starting_over_drops_every_record(tmp_path):
    with metrics.MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write(0, "eval", {"loss": 1.0})
    metrics.MetricsWriter(tmp_path, tensorboard=False).close()
    assert metrics.read_records(tmp_path / "metrics.jsonl") == []


def test_damage_in_the_middle_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\nnot json\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2"):
        metrics.read_records(path)
    assert metrics.read_records(tmp_path / "absent.jsonl") == []


def test_tensorboard_events_hold_the_scalars(tmp_path):
    with metrics.MetricsWriter(tmp_path) as writer:
        writer.write(3, "train", {"loss": 1.25, "load": np.ones(2)})
    (events,) = (tmp_path / "tensorboard").glob("events.out.tfevents*")
    data = events.read_bytes()
    assert b"train/loss" in data and np.float32(1.25).tobytes() in data
    assert b"train/load" not in data


def test_without_tensorboardx_it_says_so_once_and_goes_on(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with caplog.at_level(logging.WARNING), metrics.MetricsWriter(tmp_path) as writer:
        writer.write(1, "train", {"loss": 1.0})
        writer.write(2, "train", {"loss": 1.0})
    assert [r.message for r in caplog.records if "tensorboardX is not installed" in r.message]
    assert len(caplog.records) == 1
    assert len(metrics.read_records(tmp_path / "metrics.jsonl")) == 2


def test_only_the_first_process_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with metrics.MetricsWriter(tmp_path) as writer:
        writer.write(1, "train", {"loss": 1.0})
    assert list(tmp_path.iterdir()) == []


def test_progress_prints_plain_lines_where_there_is_no_terminal(capsys):
    with metrics.ProgressBar(10, start=2) as bar:
        bar.update(3)
        bar.update(4, "loss 2.50  1,000 tokens/s")
        bar.print("a note")
    assert capsys.readouterr().out == "train 4/10  loss 2.50  1,000 tokens/s\na note\n"
