"""The page of a run: whole, offline, and honest about what is missing."""

from __future__ import annotations

import html.parser
import json

import pytest

from tools import report


class Checker(html.parser.HTMLParser):
    """Collects tags, text, and whatever would need a network."""

    def __init__(self):
        super().__init__()
        self.tags, self.outside, self.text = [], [], ""

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.outside += [v for k, v in attrs if k in ("src", "href", "data")]

    def handle_data(self, data):
        self.text += data


def write(directory, records, **files):
    (directory / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))


RECORDS = [
    {"step": 0, "kind": "attempt", "time": 100.5, "began": 100.0},
    {"step": 0, "kind": "eval", "time": 101, "loss/a<b": 5.0, "loss/prose": 4.0},
    {"step": 1, "kind": "train", "time": 110, "loss": 5.0, "grad_norm": 2.0, "skipped": 0,
     "seconds_compute": 8.0, "seconds_data_wait": 0.5, "seconds_evaluate": 0, "seconds_save": 0,
     "expert_load": [[0.7, 0.3], [0.5, 0.5]]},
    {"step": 2, "kind": "train", "time": 112, "loss": None, "grad_norm": None, "skipped": 1,
     "seconds_compute": 2.0, "seconds_data_wait": 0.0, "seconds_evaluate": 0, "seconds_save": 1.0},
    {"step": 2, "kind": "attempt", "time": 120, "began": 119.0},
    {"step": 3, "kind": "train", "time": 130, "loss": 4.0, "grad_norm": 1.0, "skipped": 1,
     "seconds_compute": 6.0, "seconds_data_wait": 0.0, "seconds_evaluate": 0, "seconds_save": 0},
    {"step": 3, "kind": "alarm", "time": 130, "alarm": "dead_expert", "layer": 1, "expert": 0},
    {"step": 3, "kind": "alarm", "time": 130, "alarm": "spike", "of": "loss", "value": 9.0,
     "median": 4.0},
]  # fmt: skip


def test_page_is_whole_and_needs_no_network(tmp_path, capsys):
    write(
        tmp_path,
        RECORDS,
        config={"domains": ["a<b", "prose"], "mesh": {"data": 2, "fsdp": 1},
                "flags": {"preset": "tiny"}, "devices": ["cpu", 2]},
        summary={"mfu": 0.1, "routing": [[[0.9, 0.1], [0.2, 0.8]]]},
    )  # fmt: skip
    assert report.main([str(tmp_path)]) == 0
    text = (tmp_path / "report.html").read_text()
    assert capsys.readouterr().out.strip() == str(tmp_path / "report.html")
    checker = Checker()
    checker.feed(text)
    assert checker.outside == [] and "http" not in text and "script" not in checker.tags
    assert checker.tags.count("svg") == 3, "loss, held-out loss, gradient norm"
    for words in (
        "Resumed after step 2", "dead expert", "layer 1, expert 0", "loss 9, median before 4",
        "1 step(s) skipped", "data=2", "routing by domain, layer 0", "a<b", "1.40", "Goodput",
    ):  # fmt: skip
        assert words in checker.text, words
    assert "a<b" not in text, "names are escaped"


def test_goodput_counts_training_only():
    parts = report.goodput(RECORDS)
    # First starts: 8 and 6 seconds hold compilation; a usual interval takes less.
    assert parts["elapsed"] == 30 and parts["data_wait"] == 0.5 and parts["save"] == 1.0
    assert 2.0 <= parts["compute"] < 16 and parts["goodput"] == parts["compute"] / 30
    total = sum(v for k, v in parts.items() if k not in ("elapsed", "goodput"))
    assert total == pytest.approx(30)
    assert report.goodput([]) == {}


def test_a_run_that_has_only_begun_has_a_page(tmp_path):
    write(tmp_path, RECORDS[:1])
    assert "No timed records" in report.page(tmp_path)


def test_no_run_is_one_clear_line(tmp_path, capsys):
    assert report.main([str(tmp_path / "nothing")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("report: ") and "no training run" in error
