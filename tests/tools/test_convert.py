from __future__ import annotations

import sys

import numpy as np
import pytest

from jaxlib_papers.io.pretrained import save_pretrained
from tests.io.synthetic import CONFIG, make, read_weights, write_gguf
from tools import convert


def test_from_gguf_to_a_folder(tmp_path, monkeypatch, capsys):
    save_pretrained(tmp_path / "first", make(CONFIG))
    want = read_weights(tmp_path / "first")
    source = write_gguf(tmp_path / "m.gguf", CONFIG, want)
    out = tmp_path / "out"
    monkeypatch.setattr(sys, "argv", ["convert", "--source", str(source), "--out", str(out)])
    convert.main()
    assert capsys.readouterr().out == f"wrote {out}\n"
    got = read_weights(out)
    assert got.keys() == want.keys()
    for name, array in want.items():
        np.testing.assert_array_equal(got[name], array)
    assert {p.name for p in out.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_errors_are_sentences(tmp_path, monkeypatch):
    source = tmp_path / "m.gguf"
    source.write_bytes(b"GGUF")
    arguments = ["convert", "--source", str(source), "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit, match=r"error: .*m\.gguf: at byte 4 of 4"):
        convert.main()
    assert not (tmp_path / "out").exists()
