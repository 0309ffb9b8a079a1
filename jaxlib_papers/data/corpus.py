"""A prepared corpus: documents on disk as ArrayRecord, with splits and a manifest of hashes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxlib_papers.data.documents import Document
from jaxlib_papers.data.embedded import EMBEDDED_DOMAINS
from jaxlib_papers.data.errors import DataError
from jaxlib_papers.data.sources import make_source
from jaxlib_papers.data.storage import (
    default_cache_dir,
    digest_of,
    read_manifest,
    written_atomically,
)

__all__ = ["Corpus", "open_corpus"]

_FORMAT = 1


@dataclass(frozen=True)
class Corpus:
    """A corpus on disk.

    Attributes:
        spec: the spec it was opened with.
        domains: names of the domains; a domain id is an index into this tuple.
        manifest: what was written, with `domains` -> split -> documents, bytes, sha256.
        fingerprint: SHA-256 over the content and the split of every document. Independent of
            where the text lies and of when the files were written.
        path: the corpus's folder in the cache. `documents.jsonl` in it lists the SHA-256 of every
            document.
        cache_dir: the cache that holds it; token caches go there as well.
    """

    spec: str
    domains: tuple[str, ...]
    manifest: dict[str, Any]
    fingerprint: str
    path: Path
    cache_dir: Path

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits that exist: "train" and, unless heldout_fraction is 0, "heldout"."""
        return tuple(self.manifest["splits"])

    def check_split(self, split: str) -> str:
        """Return `split` if the corpus has it.

        Raises:
            DataError: there is no such split.
        """
        if split not in self.splits:
            raise DataError(
                f"split {split!r} does not exist; this corpus has {', '.join(self.splits)} "
                f"(heldout_fraction was {self.manifest['heldout_fraction']})"
            )
        return split

    def domain_id(self, domain: str) -> int:
        """Return the index of a domain.

        Raises:
            DataError: unknown domain; the known ones are named.
        """
        if domain not in self.domains:
            raise DataError(
                f"unknown domain {domain!r}; this corpus has {', '.join(map(repr, self.domains))}"
            )
        return self.domains.index(domain)

    def examples(self, split: str) -> Sequence[dict[str, Any]]:
        """Return the random-access TFDS data source of a split.

        Elements are dicts of `text` (bytes, UTF-8), `domain` (integer) and `id` (bytes); the order
        is TFDS's, which is shuffled by key and always the same.
        """
        import tensorflow_datasets as tfds

        (version,) = (self.path / "domain_text").iterdir()
        builder: Any = tfds.builder_from_directory(os.fspath(version))
        return builder.as_data_source(split=self.check_split(split))

    def documents(self, split: str) -> Iterator[Document]:
        """Yield the documents of a split in stored order."""
        examples = self.examples(split)
        for index in range(len(examples)):
            example = examples[index]
            yield Document(
                example["id"].decode("utf-8"),
                self.domains[int(example["domain"])],
                example["text"].decode("utf-8"),
            )


def open_corpus(
    spec: str = "embedded",
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    heldout_fraction: float = 0.1,
    seed: int = 0,
) -> Corpus:
    """Prepare a corpus, or open it if the cache has it.

    The source is read again only when it may have changed: sizes and modification times of files
    for `text`, `jsonl` and `tfds`, versions of the installed packages for `embedded`.

    Args:
        spec: `embedded`, `text:<dir>`, `jsonl:<dir>` or `tfds:<name>`, with options after "?"
            (see `sources.make_source`).
        cache_dir: where prepared data are kept; None takes $JAXLIB_PAPERS_CACHE, else the user's
            cache folder.
        heldout_fraction: share of each domain's documents that is held out, in [0, 1). Every domain
            keeps at least one document in each split. 0 makes no held-out split.
        seed: of the split by document.

    Raises:
        DataError: bad spec, missing directory, empty corpus, bad document (file and line or byte
            named), a domain with a single document, or a cache that cannot be written.
    """
    if not 0 <= heldout_fraction < 1:
        raise DataError(f"heldout_fraction must be in [0, 1), got {heldout_fraction}")
    source = make_source(spec)
    key = {
        "format": _FORMAT,
        "kind": source.kind,
        "signature": source.signature(),
        "heldout_fraction": float(heldout_fraction),
        "seed": int(seed),
    }
    cache = default_cache_dir(cache_dir)
    final = cache / "corpora" / f"{source.kind}-{digest_of(key)[:16]}"
    manifest = read_manifest(final)
    if manifest is None:
        from jaxlib_papers.data.builder import plan_split, write_corpus

        order = EMBEDDED_DOMAINS if source.kind == "embedded" else None
        plan = plan_split(source, heldout_fraction=heldout_fraction, seed=int(seed), domains=order)
        with written_atomically(final) as (folder, manifest):
            listing = os.fspath(folder / "documents.jsonl")
            digests = write_corpus(source, plan, os.fspath(folder), listing)
            # As pairs: the order of domains is part of the content, and JSON objects are sorted.
            content = [[domain, digests[domain]] for domain in plan.domains]
            manifest.update(
                format=_FORMAT,
                source=source.kind,
                heldout_fraction=float(heldout_fraction),
                seed=int(seed),
                splits=list(plan.splits),
                domain_order=list(plan.domains),
                domains=digests,
                skipped_empty=plan.skipped_empty,
                fingerprint=digest_of({"format": _FORMAT, "content": content}),
            )
    return Corpus(
        spec=spec,
        domains=tuple(manifest["domain_order"]),
        manifest=manifest,
        fingerprint=manifest["fingerprint"],
        path=final,
        cache_dir=cache,
    )
