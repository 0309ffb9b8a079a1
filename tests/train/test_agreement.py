"""Processes that are not the same program with the same settings are told apart."""

from __future__ import annotations

import pytest

from jaxlib_papers.train import agreement


def test_same_everywhere_passes():
    value = {"code": {"source": "a", "versions": {"jax": "1"}}, "lr": 0.1}
    agreement.check_agreement([value] * 3, ["h0", "h1", "h2"])


def test_every_difference_is_named_with_process_and_host():
    values = [
        {"code": {"source": "a", "versions": {"jax": "1", "flax": None}}, "lr": 0.1},
        {"code": {"source": "b", "versions": {"jax": "1", "flax": None}}, "lr": 0.1},
        {"code": {"source": "a", "versions": {"jax": "2", "flax": "3"}}, "more": True},
    ]
    with pytest.raises(agreement.DisagreementError) as error:
        agreement.check_agreement(values, ["h0", "h1", "h2"])
    lines = [line.strip() for line in str(error.value).splitlines()[1:-1]]
    assert lines == [
        "process 1 on h1: code.source is 'b', but 'a' on process 0",
        "process 2 on h2: code.versions.flax is '3', but None on process 0",
        "process 2 on h2: code.versions.jax is '2', but '1' on process 0",
        "process 2 on h2: lr is None, but 0.1 on process 0",
        "process 2 on h2: more is True, but None on process 0",
    ]


def test_many_differences_are_cut_short():
    values = [{str(i): 0 for i in range(50)}, {str(i): 1 for i in range(50)}]
    with pytest.raises(agreement.DisagreementError, match="and 30 more"):
        agreement.check_agreement(values, ["a", "b"])


def test_code_identity_follows_contents_and_not_place(tmp_path):
    for place in ("here", "there"):
        (tmp_path / place / "program" / "part").mkdir(parents=True)
        (tmp_path / place / "program" / "part" / "a.py").write_text("x = 1\n")
        (tmp_path / place / "program" / "notes.txt").write_text(place)
    one = agreement.code_identity(tmp_path / "here" / "program")
    assert one == agreement.code_identity(tmp_path / "there" / "program")
    assert one["versions"]["jax"] and one["versions"]["python"].startswith("3.")
    (tmp_path / "there" / "program" / "part" / "a.py").write_text("x = 2\n")
    assert one["source"] != agreement.code_identity(tmp_path / "there" / "program")["source"]


def test_one_process_exchanges_with_itself():
    assert agreement.exchange({"a": (1, 2)}) == [{"a": [1, 2]}]
