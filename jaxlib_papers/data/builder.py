"""TFDS builder that writes domain-labelled documents as ArrayRecord, without TensorFlow.

Importing this module imports `tensorflow_datasets`; `corpus.py` does so only when it prepares or
reads a corpus.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import tensorflow_datasets as tfds
from tensorflow_datasets.core.utils import tqdm_utils

from jaxlib_papers.data.documents import Document, Source
from jaxlib_papers.data.errors import DataError

__all__ = ["SPLITS", "DomainText", "SplitPlan", "plan_split", "write_corpus"]

SPLITS = ("train", "heldout")


@dataclass(frozen=True)
class SplitPlan:
    """Which split each document goes to: a rule on the hash of its id, plus exceptions.

    Attributes:
        domains: the domains that have documents, sorted by name.
        heldout_fraction: documents whose hash, read as a number in [0, 1), is below it are held
            out.
        seed: changes the hash.
        moved: (domain, id) -> split for the few documents that are moved so that no domain lacks a
            split.
        documents: number of documents per domain.
        skipped_empty: number of documents without any visible character, which are left out.
    """

    domains: tuple[str, ...]
    heldout_fraction: float
    seed: int
    moved: dict[tuple[str, str], str]
    documents: dict[str, int]
    skipped_empty: int

    def split_of(self, document: Document) -> str:
        """Return "train" or "heldout"."""
        by_rule = _by_rule(_position(self.seed, document), self.heldout_fraction)
        return self.moved.get((document.domain, document.id), by_rule)

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits that exist."""
        return SPLITS if self.heldout_fraction > 0 else SPLITS[:1]


def _position(seed: int, document: Document) -> float:
    key = f"{seed}\0{document.domain}\0{document.id}".encode()
    return int.from_bytes(hashlib.sha256(key).digest()[:6], "big") / 2**48


def _by_rule(position: float, heldout_fraction: float) -> str:
    return "heldout" if position < heldout_fraction else "train"


@dataclass
class _Scan:
    """What one pass over a domain's ids finds."""

    documents: int = 0
    heldout: int = 0
    lowest: tuple[float, str] = (2.0, "")
    highest: tuple[float, str] = (-1.0, "")


def plan_split(
    source: Source, *, heldout_fraction: float, seed: int, domains: tuple[str, ...] | None = None
) -> SplitPlan:
    """Read all documents once, check them, and decide the split of each.

    Args:
        source: the documents.
        heldout_fraction: in [0, 1); 0 makes no held-out split.
        seed: of the split.
        domains: the order of the domains; None sorts them by name.

    Raises:
        DataError: no document at all, or a domain with one document although each domain needs
            one to train on and one to hold out.
    """
    scans: dict[str, _Scan] = {}
    empty = 0
    for document in source.documents():
        if not document.text.strip():
            empty += 1
            continue
        scan = scans.setdefault(document.domain, _Scan())
        position = _position(seed, document)
        scan.documents += 1
        scan.heldout += _by_rule(position, heldout_fraction) == "heldout"
        scan.lowest = min(scan.lowest, (position, document.id))
        scan.highest = max(scan.highest, (position, document.id))
    if not scans:
        raise DataError(
            f"the {source.kind} source holds no text ({empty} empty documents); "
            "there is nothing to train on"
        )
    moved: dict[tuple[str, str], str] = {}
    for domain, scan in scans.items():
        if heldout_fraction == 0:
            continue
        if scan.documents < 2:
            raise DataError(
                f"domain {domain!r} has {scan.documents} document; training and held-out data need "
                "one each. Add documents, or set heldout_fraction=0"
            )
        if scan.heldout == 0:
            moved[domain, scan.lowest[1]] = "heldout"
        elif scan.heldout == scan.documents:
            moved[domain, scan.highest[1]] = "train"
    ordered = tuple(sorted(scans)) if domains is None else tuple(d for d in domains if d in scans)
    counts = {domain: scans[domain].documents for domain in ordered}
    return SplitPlan(ordered, heldout_fraction, seed, moved, counts, empty)


@dataclass
class _Digest:
    """Running digest of the documents of one split of one domain."""

    documents: int = 0
    bytes: int = 0
    sha: Any = field(default_factory=hashlib.sha256)

    def add(self, document: Document, raw: bytes) -> str:
        digest = hashlib.sha256(raw).hexdigest()
        self.documents += 1
        self.bytes += len(raw)
        self.sha.update(f"{document.id}\0{digest}\n".encode())
        return digest

    def as_json(self) -> dict[str, Any]:
        return {"documents": self.documents, "bytes": self.bytes, "sha256": self.sha.hexdigest()}


class DomainText(tfds.core.GeneratorBasedBuilder):
    """Dataset of documents: features `text`, `domain` (a ClassLabel) and `id`.

    Args:
        source: the documents.
        plan: split of each document.
        record: called with (split, document, UTF-8 bytes) for each document written.
        data_dir: folder to write under.
        file_format: how TFDS stores the examples.
    """

    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES = {"1.0.0": "Documents with a domain and an id."}
    # Nothing is downloaded. Inferring this would import a package that TFDS does not require.
    url_infos = None

    def __init__(
        self,
        *,
        source: Source,
        plan: SplitPlan,
        record: Callable[[str, Document, bytes], None],
        data_dir: str,
        file_format: str = "array_record",
    ):
        self._source = source
        self._plan = plan
        self._record = record
        super().__init__(data_dir=data_dir, file_format=file_format)

    def _info(self) -> tfds.core.DatasetInfo:
        features = tfds.features.FeaturesDict(
            {
                "text": tfds.features.Text(),
                "domain": tfds.features.ClassLabel(names=list(self._plan.domains)),
                "id": tfds.features.Text(),
            }
        )
        return tfds.core.DatasetInfo(
            builder=self, description="Domain-labelled documents.", features=features
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        del dl_manager  # nothing is downloaded
        return {split: self._generate_examples(split) for split in self._plan.splits}

    def _generate_examples(self, split: str) -> Iterator[tuple[str, dict[str, str]]]:
        for document in self._source.documents():
            if document.text.strip() and self._plan.split_of(document) == split:
                self._record(split, document, document.text.encode("utf-8"))
                yield (
                    f"{document.domain}\0{document.id}",
                    {"text": document.text, "domain": document.domain, "id": document.id},
                )


def write_corpus(source: Source, plan: SplitPlan, directory: str, listing: str) -> dict[str, Any]:
    """Write a corpus under `directory` and return the digests of what was written.

    Args:
        source: the documents.
        plan: split of each document.
        directory: folder for TFDS.
        listing: file that receives one JSON line per document (split, domain, id, bytes, sha256).

    Returns:
        domain -> split -> {"documents", "bytes", "sha256"}.

    Raises:
        DataError: the documents are not those that the plan was made from.
    """
    digests = {d: {split: _Digest() for split in plan.splits} for d in plan.domains}
    with open(listing, "w", encoding="utf-8") as out, _quiet():

        def record(split: str, document: Document, raw: bytes) -> None:
            if document.domain not in digests:
                raise DataError(f"domain {document.domain!r} appeared while the corpus was read")
            digest = digests[document.domain][split].add(document, raw)
            entry = {"split": split, "domain": document.domain, "id": document.id}
            out.write(json.dumps({**entry, "bytes": len(raw), "sha256": digest}) + "\n")

        builder = DomainText(source=source, plan=plan, record=record, data_dir=directory)
        config = tfds.download.DownloadConfig(try_download_gcs=False)
        builder.download_and_prepare(
            download_config=config, download_dir=os.path.join(directory, "downloads")
        )
    for domain, count in plan.documents.items():
        written = sum(digest.documents for digest in digests[domain].values())
        if written != count:
            raise DataError(
                f"domain {domain!r} had {count} documents at first and {written} a moment later: "
                "the source changes while it is read"
            )
    return {
        domain: {split: digest.as_json() for split, digest in by_split.items()}
        for domain, by_split in digests.items()
    }


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep TFDS's progress bars and notices off the screen while a corpus is written."""
    logger = logging.getLogger("absl")
    level = logger.level
    shown = getattr(tqdm_utils, "_active", True)
    logger.setLevel(logging.WARNING)
    tfds.disable_progress_bar()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)
        if shown:
            tfds.enable_progress_bar()
