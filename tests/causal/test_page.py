"""The guide's page on this method runs as written."""

from __future__ import annotations

from tests.causal.data import SMALL
from tests.test_docs import ROOT, run


def test_page_runs_as_written(capsys):
    names = run(ROOT / "docs" / "causal-parameters.md")
    out = capsys.readouterr().out
    assert names["config"].degree == SMALL.degree
    assert "f1=1.0" in out and "heat transfer" in out and "X0 -> X1: mean" in out
    assert names["strength"][0] < names["strength"][1] < names["strength"][2]
    assert float(names["test"].pvalue) < 1e-6
