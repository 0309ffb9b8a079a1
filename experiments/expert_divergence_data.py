"""Text of the expert divergence experiment: four domains of bytes, and batches with equal shares.

| domain | corpus `science` (the judgement) | corpus `embedded` |
|---|---|---|
| `python` | scikit-learn's `linear_model` and `tree` | standard library, core packages |
| `prose` | scikit-learn's data descriptions, metadata and licences of packages | also docstrings |
| `c_headers` | numpy's headers | headers of core packages |
| `numbers` | scikit-learn's data tables | tables in core packages |

`science` is at most the first 400 kB of each domain, the last tenth held out, without tests, and
with each paragraph once (licences come many times and would be in both parts). `embedded` is what
`make pretrain` reads; it needs no further package, and every tenth document is held out.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np

from jaxlib_papers.data.embedded import EMBEDDED_DOMAINS, EmbeddedSource

__all__ = ["DOMAINS", "CorpusName", "corpus", "make_batch"]

CorpusName = Literal["science", "embedded"]
DOMAINS = EMBEDDED_DOMAINS

_DOMAIN_BYTES = 400_000
_HELDOUT = 0.1
# Descriptions and licences of these; jaxlib is not among them, whose licence is a list of files.
_DESCRIBED = tuple(
    "scikit-learn scipy numpy jax flax optax chex einops orbax-checkpoint grain tensorstore "
    "jaxtyping rich tyro".split()
)

Texts = tuple[np.ndarray, ...]


def _package_folder(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(
            f"the corpus 'science' reads files of {name}, which is not installed: "
            'pip install "jaxlib-papers[science]", or take --corpus embedded'
        )
    return Path(spec.origin).parent


def _sorted(folder: Path, pattern: str) -> list[Path]:
    return sorted(folder.glob(pattern))


def _descriptions() -> Iterator[Path]:
    for kind in ("METADATA", "LICENSE"):
        for package in _DESCRIBED:
            for file in sorted(importlib.metadata.files(package) or [], key=str):
                if ".dist-info" in file.parts[0] and file.name.startswith(kind):
                    yield Path(str(file.locate()))


def _science() -> Iterator[bytes]:
    """Each domain's files one after the other; a paragraph that came before is left out."""
    sklearn, numpy = _package_folder("sklearn"), _package_folder("numpy")
    domains = {
        "python": [*_sorted(sklearn, "linear_model/*.py"), *_sorted(sklearn, "tree/*.py")],
        "prose": [*_sorted(sklearn, "datasets/descr/*.rst"), *_descriptions()],
        "c_headers": _sorted(numpy, "_core/include/**/*.h"),
        "numbers": _sorted(sklearn, "datasets/data/*.csv"),
    }
    for domain in DOMAINS:
        paragraphs = b"\n\n".join(f.read_bytes() for f in domains[domain]).split(b"\n\n")
        yield b"\n\n".join(dict.fromkeys(paragraphs))[:_DOMAIN_BYTES]


def _bytes(text: bytes) -> np.ndarray:
    return np.frombuffer(text, np.uint8).astype(np.int32)


@functools.cache
def corpus(name: CorpusName) -> tuple[Texts, Texts]:
    """Bytes of the training and of the held-out text, one int32 array [length] a domain.

    Raises:
        ModuleNotFoundError: `science` without scikit-learn.
    """
    if name == "science":
        texts = [_bytes(text) for text in _science()]
        cuts = [round(len(text) * (1 - _HELDOUT)) for text in texts]
        pairs = list(zip(texts, cuts, strict=True))
        return tuple(text[:cut] for text, cut in pairs), tuple(text[cut:] for text, cut in pairs)
    documents: dict[str, list[bytes]] = {domain: [] for domain in DOMAINS}
    for document in EmbeddedSource().documents():
        documents[document.domain].append(document.text.encode() + b"\n")

    def joined(keep) -> Texts:
        return tuple(
            _bytes(b"".join(text for i, text in enumerate(documents[domain]) if keep(i)))
            for domain in DOMAINS
        )

    return joined(lambda i: i % 10 != 9), joined(lambda i: i % 10 == 9)


def make_batch(
    texts: Texts, per_domain: int, context: int, rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """Windows at random places, `per_domain` of each domain, in the trainer's batch form."""
    starts = [rng.integers(0, len(text) - context, per_domain) for text in texts]
    windows = np.concatenate(
        [text[at[:, None] + np.arange(context + 1)] for text, at in zip(texts, starts, strict=True)]
    )
    rows = len(windows)
    return {
        "tokens": windows[:, :-1],
        "targets": windows[:, 1:],
        "loss_mask": np.ones((rows, context), bool),
        "segment_ids": np.ones((rows, context), np.int32),
        "positions": np.tile(np.arange(context, dtype=np.int32), (rows, 1)),
        "domain_ids": np.repeat(np.arange(len(DOMAINS), dtype=np.int32), per_domain)[:, None],
    }
