"""The corpus that every installation has."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from jaxlib_papers.data import heldout_batches, make_pipeline, make_tokenizer, open_corpus
from jaxlib_papers.data.embedded import EMBEDDED_DOMAINS, EmbeddedSource, _Candidate
from jaxlib_papers.data.pipeline import PipelineConfig


@pytest.fixture(scope="session")
def embedded(cache_dir):
    return open_corpus("embedded", cache_dir=cache_dir)


def test_four_domains_of_400_kb(embedded):
    assert embedded.domains == EMBEDDED_DOMAINS
    for domain in EMBEDDED_DOMAINS:
        parts = embedded.manifest["domains"][domain]
        assert 400_000 <= parts["train"]["bytes"] + parts["heldout"]["bytes"] <= 600_000
        assert parts["train"]["documents"] >= 20
        assert 3 <= parts["heldout"]["documents"] < parts["train"]["documents"]


def test_domains_are_what_they_claim(embedded):
    texts = {domain: [] for domain in EMBEDDED_DOMAINS}
    for document in embedded.documents("train"):
        texts[document.domain].append(document.text)
    joined = {domain: "".join(found) for domain, found in texts.items()}
    digits = {d: sum(c.isdigit() for c in text) / len(text) for d, text in joined.items()}
    assert digits["numbers"] > 0.4 > 0.1 > max(digits["python"], digits["prose"])
    assert joined["python"].count("def ") > 500 and joined["python"].count("import ") > 500
    assert joined["c_headers"].count("#define") > 500
    assert joined["prose"].count(" the ") > 3000
    assert joined["prose"].count("#define") < 10 and joined["prose"].count(">>>") < 500


def test_documents_are_small_whole_lines_and_unlike(embedded):
    documents = [d for split in embedded.splits for d in embedded.documents(split)]
    assert max(len(d.text.encode()) for d in documents) <= 16_384
    # No document is in the corpus twice, so none is in both splits.
    assert len({d.text for d in documents}) == len(documents)
    assert len({(d.domain, d.id) for d in documents}) == len(documents)


def test_held_out_text_was_not_trained_on(embedded):
    def lines(split, domain):
        texts = (d.text for d in embedded.documents(split) if d.domain == domain)
        return [line.strip() for text in texts for line in text.splitlines() if len(line) >= 30]

    for domain in EMBEDDED_DOMAINS:
        trained = set(lines("train", domain))
        repeated = [line in trained for line in lines("heldout", domain)]
        assert repeated and np.mean(repeated) < 0.1, domain


def test_a_paragraph_is_kept_once():
    notice = "Permission is hereby granted, free of charge, to any person obtaining a copy.\n" * 9
    texts = {"a": f"{notice}\n{'first ' * 99}\n", "b": f"{'second ' * 99}\n\n{notice}"}
    found = [_Candidate(name, lambda t=text: t) for name, text in texts.items()]
    documents = list(EmbeddedSource(min_bytes=0)._domain("prose", found))
    assert sum(notice.strip() in d.text for d in documents) == 1
    assert all(d.text.endswith("\n") and len(d.text) > 500 for d in documents)
    assert len(documents) == 2


def test_same_in_another_process():
    source = EmbeddedSource(max_bytes=30_000)
    here = [(d.domain, d.id, len(d.text)) for d in source.documents()]
    code = (
        "import json; from jaxlib_papers.data.embedded import EmbeddedSource as S;"
        "found = S(max_bytes=30_000).documents();"
        "print(json.dumps([(d.domain, d.id, len(d.text)) for d in found]))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": ":".join(p for p in sys.path if p), "PYTHONHASHSEED": "7"},
    )
    assert [tuple(row) for row in json.loads(out.stdout)] == here


def test_no_path_of_this_machine_in_ids(embedded):
    assert not any(d.id.startswith(("/", "..")) for d in embedded.documents("heldout"))


def test_short_domain_warns():
    with pytest.warns(UserWarning, match="only .* bytes of text for the embedded domain 'numbers'"):
        source = EmbeddedSource(min_bytes=10**9, max_bytes=10**9, max_document_bytes=4096)
        list(source._domain("numbers", []))


def test_trains_without_tensorflow(embedded):
    tokenizer = make_tokenizer()
    pipeline = make_pipeline(embedded, tokenizer, PipelineConfig(seq_len=128, global_batch=8))
    batch = pipeline.batch_at(0)
    assert set(np.unique(batch["domain_ids"])) - {-1} == {0, 1, 2, 3}
    for domain in embedded.domains:
        (first,) = heldout_batches(embedded, tokenizer, 128, 4, domain, limit=1)
        assert first["loss_mask"].sum() > 400
    assert "tensorflow" not in sys.modules
