"""The list of papers: complete, consistent with the tree, citable, and what the README shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from jaxlib_papers.catalog import FIELDS, PAPERS, Paper, cite, paper
from tools import catalog as tool

ROOT = Path(__file__).resolve().parent.parent
PER_FIELD = {
    "moe": "expert_divergence ld_mole graph_moe table_dart",
    "causal": "pce_causal personax prism",
    "uncertainty": "japan g_nll identity_free_deferral",
    "lm": "trec boomerang flatness neologism ata spelangy lora_audit",
    "rl": "adaback grpo_ptr",
    "unlearning": "tru entangled_unlearning",
    "multimodal": "triplesumm visual_integration chain_mpq gir_bench",
    "diffusion": "quantsparse pusa ttom sigma_gen temu_vtoff touch",
    "science": "garlic tandemfoil genomic_baselines",
    "agents": "cascadia textual_equilibrium virf care_medical",
}


def test_all_papers_are_listed_once_in_their_field():
    listed = {field: [p.slug for p in PAPERS if p.field == field] for field in FIELDS}
    assert {f: sorted(s) for f, s in listed.items()} == {
        f: sorted(s.split()) for f, s in PER_FIELD.items()
    }
    assert len(PAPERS) == 38


@pytest.mark.parametrize("entry", PAPERS, ids=lambda p: p.slug)
def test_entry_is_well_formed(entry: Paper):
    assert re.fullmatch(r"[a-z][a-z0-9_]*", entry.slug)
    assert entry.title and entry.short and entry.venue.startswith("ICLR 2026")
    assert entry.arxiv is None or re.fullmatch(r"2\d(0[1-9]|1[0-2])\.\d{5}", entry.arxiv)
    assert entry.openreview is None or re.fullmatch(r"[\w-]{10}", entry.openreview)
    assert entry.code is None or re.fullmatch(r"[\w.-]+/[\w.-]+", entry.code)
    assert all(name.strip() == name and name for name in entry.authors.split(", ") if entry.authors)
    assert all(entry.reconstructed)


@pytest.mark.parametrize("entry", PAPERS, ids=lambda p: p.slug)
def test_status_tells_whether_module_experiment_and_tests_exist(entry: Paper):
    parts = [
        ROOT / f"{entry.module.replace('.', '/')}.py",
        ROOT / f"{entry.experiment.replace('.', '/')}.py",
        ROOT / "tests" / entry.field / f"test_{entry.slug}.py",
    ]
    assert [p.is_file() for p in parts] == [entry.status == "built"] * 3


def test_every_module_of_a_field_is_in_the_catalog():
    # A leading underscore marks a helper of one paper that has outgrown its file.
    found = {
        (field, path.stem)
        for field in FIELDS
        for path in (ROOT / "jaxlib_papers" / field).glob("[!_]*.py")
    }
    assert found <= {(p.field, p.slug) for p in PAPERS}


def test_cite_gives_what_is_known_and_nothing_else():
    text = cite("expert_divergence")
    assert text.startswith("@inproceedings{expert_divergence,\n") and text.endswith("\n}")
    assert "author = {Jiaang Li and others}" in text and "eprint = {2603.00054}" in text
    assert "author" not in cite("pce_causal") and "eprint" not in cite("pce_causal")
    assert "An and Magno and others}" in cite("quantsparse")
    for entry in PAPERS:
        assert cite(entry.slug).count("{") == cite(entry.slug).count("}")


def test_unknown_slug_names_the_nearest():
    with pytest.raises(ValueError, match="slug: .*'expert_divergance'.*'expert_divergence'"):
        paper("expert_divergance")


def test_readme_table_is_current():
    assert tool.main(["--check"]) == 0


def test_stale_table_is_noticed(tmp_path, monkeypatch, capsys):
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{tool.BEGIN}\nold\n{tool.END}\nafter\n")
    monkeypatch.setattr(tool, "README", readme)
    assert tool.main(["--check"]) == 1
    assert "out of date" in capsys.readouterr().out
    assert tool.main([]) == 0 and tool.main(["--check"]) == 0
    text = readme.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "`garlic`" in text


def test_missing_markers_are_an_error():
    with pytest.raises(ValueError, match="README.md: expected one line"):
        tool.with_table("no markers here")
