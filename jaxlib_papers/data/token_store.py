"""Token cache: one flat memory-mapped array per split and domain, with document offsets.

Its files are what training reads, for weeks and from disks that may fail, so their checksums are
compared each time they are opened, and what changed is made anew from the stored documents.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from jaxlib_papers.data.corpus import Corpus
from jaxlib_papers.data.errors import DataError
from jaxlib_papers.data.storage import digest_of, read_manifest, written_atomically
from jaxlib_papers.data.tokenizers import Tokenizer

__all__ = ["DomainTokens", "open_tokens"]

_FORMAT = 2  # 2: with checksums
_DOCUMENTS_AT_ONCE = 256
_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class DomainTokens:
    """The tokens of one domain of one split, all documents end to end.

    Attributes:
        domain: name of the domain.
        tokens: uint16 or uint32 [total]; each document is (bos,) text, eos.
        offsets: int64 [documents + 1]; document i is tokens[offsets[i]:offsets[i + 1]], none empty.
    """

    domain: str
    tokens: np.ndarray
    offsets: np.ndarray

    @property
    def total(self) -> int:
        """Number of tokens."""
        return int(self.offsets[-1])


class _Writer:
    """Appends documents to one `.npy` file whose length is known only at the end."""

    def __init__(self, path: Path, dtype: np.dtype[Any]):
        self._path = path
        self._dtype = dtype
        self._offsets = [0]
        self._file: BinaryIO = path.open("wb")
        self._header(0)
        self._start = self._file.tell()

    def _header(self, length: int) -> None:
        # numpy pads headers, so that the length of an array can be changed in place.
        fields = {
            "descr": np.lib.format.dtype_to_descr(self._dtype),
            "fortran_order": False,
            "shape": (length,),
        }
        np.lib.format.write_array_header_1_0(self._file, fields)

    def add(self, ids: np.ndarray) -> None:
        self._file.write(ids.astype(self._dtype).tobytes())
        self._offsets.append(self._offsets[-1] + len(ids))

    def close(self) -> tuple[int, int]:
        self._file.seek(0)
        self._header(self._offsets[-1])
        if self._file.tell() != self._start:
            raise RuntimeError("numpy changed the size of its header; the token cache is invalid")
        self._file.close()
        np.save(_offsets_file(self._path), np.asarray(self._offsets, np.int64))
        return len(self._offsets) - 1, self._offsets[-1]


def _offsets_file(tokens: Path) -> Path:
    return tokens.with_name(tokens.name.replace(".tokens.npy", ".offsets.npy"))


def _tokens_file(folder: Path, split: str, domain_id: int) -> Path:
    return folder / f"{split}-{domain_id:04d}.tokens.npy"


def open_tokens(corpus: Corpus, tokenizer: Tokenizer, split: str) -> list[DomainTokens]:
    """Tokenise a split, or open it if the cache has it.

    Files whose contents are not those that were written are made anew, in the same order.

    Args:
        corpus: the documents.
        tokenizer: turns text into ids.
        split: "train" or "heldout".

    Returns:
        One entry per domain of the corpus, in its order.

    Raises:
        DataError: unknown split, ids outside of the tokenizer's vocabulary, or stored documents
            whose contents are not those that were written.
    """
    corpus.check_split(split)
    key = digest_of([_FORMAT, corpus.fingerprint, tokenizer.fingerprint, split])
    folder = corpus.cache_dir / "tokens" / key[:24]
    paths = {name: _tokens_file(folder, split, i) for i, name in enumerate(corpus.domains)}
    read = {file.name for path in paths.values() for file in (path, _offsets_file(path))}
    if read_manifest(folder, contents=read.__contains__) is None:
        if folder.exists():
            _log.warning("%s is incomplete or damaged and is made anew", folder)
        if read_manifest(corpus.path, contents=lambda _: True) is None:
            raise DataError(
                f"the documents in {corpus.path} are not those that were written there (a file "
                "changed); remove that folder, and the next start prepares it from the text again"
            )
        with written_atomically(folder, contents=read.__contains__) as (temporary, manifest):
            manifest.update(
                format=_FORMAT,
                corpus=corpus.fingerprint,
                tokenizer=tokenizer.fingerprint,
                split=split,
                domains=_tokenise(corpus, tokenizer, split, temporary),
            )
    found = []
    for name, path in paths.items():
        offsets = np.load(_offsets_file(path), mmap_mode="r")
        # An empty file cannot be mapped.
        tokens = np.load(path, mmap_mode="r" if len(offsets) > 1 else None)
        found.append(DomainTokens(name, np.asarray(tokens), np.asarray(offsets)))
    return found


def _tokenise(corpus: Corpus, tokenizer: Tokenizer, split: str, folder: Path) -> dict[str, Any]:
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<u4")
    writers = [
        _Writer(_tokens_file(folder, split, domain_id), dtype)
        for domain_id in range(len(corpus.domains))
    ]
    before = np.asarray([tokenizer.bos_id] if tokenizer.add_bos else [], np.int32)
    after = np.asarray([tokenizer.eos_id], np.int32)
    for names, texts in _in_batches(corpus, split):
        for name, ids in zip(names, tokenizer.encode_batch(texts), strict=True):
            if not len(ids):  # a normaliser may leave nothing of a text
                continue
            if ids.min() < 0 or ids.max() >= tokenizer.vocab_size:
                raise DataError(
                    f"the tokenizer gave id {ids.max()}, outside of its vocab_size "
                    f"{tokenizer.vocab_size}"
                )
            whole = np.concatenate([before, ids, after])
            writers[corpus.domain_id(name)].add(whole)
    counts = [writer.close() for writer in writers]
    return {
        domain: {"documents": documents, "tokens": tokens}
        for domain, (documents, tokens) in zip(corpus.domains, counts, strict=True)
    }


def _in_batches(corpus: Corpus, split: str) -> Iterator[tuple[list[str], list[str]]]:
    names: list[str] = []
    texts: list[str] = []
    for document in corpus.documents(split):
        names.append(document.domain)
        texts.append(document.text)
        if len(texts) == _DOCUMENTS_AT_ONCE:
            yield names, texts
            names, texts = [], []
    if texts:
        yield names, texts
