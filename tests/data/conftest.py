"""Tiny corpora for the tests of the data package."""

from __future__ import annotations

import json

import numpy as np
import pytest

from jaxlib_papers.data import open_corpus

WORDS = "the router sends each token to an expert and ünïcode 東京 has many bytes \n".split(" ")


def make_text(rng, words):
    return " ".join(rng.choice(WORDS, words))


@pytest.fixture(scope="session")
def text_dir(tmp_path_factory):
    """Three domains of 12, 8 and 5 documents of different lengths."""
    root = tmp_path_factory.mktemp("text")
    rng = np.random.default_rng(0)
    for domain, documents in (("code", 12), ("math", 8), ("prose", 5)):
        (root / domain / "deep").mkdir(parents=True)
        for index in range(documents):
            folder = root / domain / "deep" if index % 3 == 0 else root / domain
            text = make_text(rng, int(rng.integers(5, 120)))
            (folder / f"{index:02d}.txt").write_text(text, encoding="utf-8")
    return root


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def corpus(text_dir, cache_dir):
    return open_corpus(f"text:{text_dir}", cache_dir=cache_dir, heldout_fraction=0.2)


@pytest.fixture
def write_jsonl(tmp_path):
    """Write records, or raw lines, to a file in a folder of its own and return the folder."""

    def write(*records, name="part.jsonl"):
        folder = tmp_path / "jsonl"
        folder.mkdir(exist_ok=True)
        lines = [r if isinstance(r, bytes) else json.dumps(r).encode() for r in records]
        (folder / name).write_bytes(b"\n".join(lines) + b"\n")
        return folder

    return write
