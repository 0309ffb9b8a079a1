from __future__ import annotations

import numpy as np
import pytest

from jaxlib_papers.io.errors import FormatError
from tools import fuzz as fuzz_module
from tools.fuzz import MUTATIONS, FuzzConfig, fuzz, mutate


def test_only_the_format_error_comes_out():
    tally = fuzz(FuzzConfig(cases=240, seed=1))
    assert tally.failures == []
    assert tally.refused + tally.loaded == 240
    assert tally.refused > 120 and tally.loaded > 10
    assert {label.split(": ")[0] for label in tally.kinds} == {"gguf", "json", "safetensors"}
    assert {label.split(": ")[1] for label in tally.kinds} == {*MUTATIONS, "entries", "settings"}


@pytest.mark.slow
def test_two_thousand_cases():
    tally = fuzz(FuzzConfig(cases=2000))
    assert tally.failures == [] and tally.refused > 1000


def test_cases_repeat():
    data = np.random.default_rng(0).bytes(1024)
    a, b = (mutate(data, "x.gguf", np.random.default_rng([3, 4]), 100) for _ in range(2))
    assert a == b and a[1] != data


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (lambda: (_ for _ in ()).throw(KeyError("lost")), "KeyError"),
        (lambda: bytearray(40 * 2**20), "took 40 MiB"),
        (lambda: (_ for _ in ()).throw(FormatError("bad")), "says only 'bad'"),
    ],
)
def test_what_it_looks_for_is_found(monkeypatch, what, message):
    """Nothing is wrong with the readers, so something wrong takes their place."""
    real, calls = fuzz_module.load_pretrained, []

    def load(path):
        calls.append(path)
        return what() if len(calls) > 6 else real(path)

    monkeypatch.setattr(fuzz_module, "load_pretrained", load)
    tally = fuzz(FuzzConfig(cases=1))
    assert len(tally.failures) == 1 and message in tally.failures[0]
