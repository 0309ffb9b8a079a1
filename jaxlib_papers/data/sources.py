"""Sources of domain-labelled documents, chosen by a short spec.

| spec | documents |
|---|---|
| `embedded` | text that every installation has (see `embedded.py`) |
| `text:<dir>` | one sub-folder per domain, one document per file |
| `jsonl:<dir>` | `*.jsonl` or `*.jsonl.gz`, one record with `text` and `domain` a line |
| `tfds:<name>` | any prepared TFDS dataset with a text and a domain feature |

Options follow after a question mark: `jsonl:corpus?text=content&domain=source`.
"""

from __future__ import annotations

import gzip
import json
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from jaxlib_papers.data.documents import Document, Source, check_domain_name, decode_utf8
from jaxlib_papers.data.embedded import EmbeddedSource
from jaxlib_papers.data.errors import DataError

__all__ = ["JsonlSource", "TextSource", "TfdsSource", "make_source"]

_SCHEMES = "embedded | text:<dir> | jsonl:<dir> | tfds:<name>"


def _directory(path: str | os.PathLike[str], spec: str) -> Path:
    directory = Path(path).expanduser()
    if not directory.exists():
        raise DataError(f"data spec {spec!r}: directory {str(directory)!r} does not exist")
    if not directory.is_dir():
        raise DataError(f"data spec {spec!r}: {str(directory)!r} is a file, expected a directory")
    return directory


def _visible_files(directory: Path) -> list[Path]:
    """All files below, sorted by path, without hidden files and folders."""
    found = (
        path
        for path in directory.rglob("*")
        if path.is_file()
        and not any(part.startswith(".") for part in path.relative_to(directory).parts)
    )
    return sorted(found, key=lambda path: path.relative_to(directory).as_posix())


def _stat_signature(directory: Path, files: list[Path]) -> list[list[Any]]:
    rows = []
    for path in files:
        stat = path.stat()
        rows.append([path.relative_to(directory).as_posix(), stat.st_size, stat.st_mtime_ns])
    return rows


@dataclass(frozen=True)
class TextSource:
    """One sub-folder per domain; every visible file below it is one document.

    Raises:
        DataError: missing directory, no sub-folder, or undecodable bytes (file and byte offset
            named; `errors="replace"` puts U+FFFD instead).
    """

    directory: str
    errors: str = "strict"
    kind: str = "text"

    def __post_init__(self) -> None:
        if self.errors not in ("strict", "replace"):
            raise DataError(f"errors must be 'strict' or 'replace', got {self.errors!r}")

    def _domains(self) -> list[Path]:
        root = _directory(self.directory, f"text:{self.directory}")
        visible = [path for path in sorted(root.iterdir()) if not path.name.startswith(".")]
        folders = [path for path in visible if path.is_dir()]
        loose = [path.name for path in visible if path.is_file()]
        if not folders:
            raise DataError(
                f"text:{self.directory} has no sub-folders; put the documents of each domain in a "
                "sub-folder named after the domain"
            )
        if loose:
            warnings.warn(
                f"text:{self.directory}: {len(loose)} files outside the domain sub-folders are "
                f"not read ({', '.join(loose[:3])}{', ...' if len(loose) > 3 else ''})",
                stacklevel=2,
            )
        return folders

    def signature(self) -> Any:
        """Return sizes and modification times of all files, and the options."""
        folders = {
            path.name: _stat_signature(path, _visible_files(path)) for path in self._domains()
        }
        return {"errors": self.errors, "folders": folders}

    def documents(self) -> Iterator[Document]:
        """Yield the files of each sub-folder, sorted by path."""
        for folder in self._domains():
            domain = check_domain_name(folder.name, f"folder {str(folder)!r}")
            for path in _visible_files(folder):
                text = decode_utf8(path.read_bytes(), str(path), self.errors)
                yield Document(path.relative_to(folder).as_posix(), domain, text)


@dataclass(frozen=True)
class JsonlSource:
    """JSON lines: every line is an object with a text and a domain.

    Raises:
        DataError: missing directory, no file, or a bad line (file and line number named).
    """

    directory: str
    text_key: str = "text"
    domain_key: str = "domain"
    kind: str = "jsonl"

    def _files(self) -> tuple[Path, list[Path]]:
        root = _directory(self.directory, f"jsonl:{self.directory}")
        files = [p for p in _visible_files(root) if p.name.endswith((".jsonl", ".jsonl.gz"))]
        if not files:
            raise DataError(f"jsonl:{self.directory} has no *.jsonl or *.jsonl.gz file")
        return root, files

    def signature(self) -> Any:
        """Return sizes and modification times of all files, and the keys."""
        root, files = self._files()
        keys = [self.text_key, self.domain_key]
        return {"keys": keys, "files": _stat_signature(root, files)}

    def documents(self) -> Iterator[Document]:
        """Yield the records in order of file and line; blank lines are skipped."""
        root, files = self._files()
        for path in files:
            name = path.relative_to(root).as_posix()
            with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as lines:
                for number, line in enumerate(lines, start=1):
                    if line.strip():
                        text, domain = self._record(line, f"{path}:{number}")
                        yield Document(f"{name}:{number}", domain, text)

    def _record(self, line: bytes, where: str) -> tuple[str, str]:
        try:
            record = json.loads(line)
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise DataError(f"{where}: not a line of JSON ({error})") from error
        if not isinstance(record, dict):
            raise DataError(f"{where}: expected a JSON object, got {type(record).__name__}")
        for key in (self.text_key, self.domain_key):
            if key not in record:
                raise DataError(
                    f"{where}: no field {key!r} (it has {', '.join(map(repr, record)) or 'none'}); "
                    "name the fields with '?text=...&domain=...' at the end of the data spec"
                )
        text = record[self.text_key]
        if not isinstance(text, str):
            raise DataError(
                f"{where}: field {self.text_key!r} must be a string, got {type(text).__name__}"
            )
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise DataError(
                f"{where}: field {self.text_key!r} has a lone surrogate at character "
                f"{error.start}, which is not text"
            ) from error
        return text, check_domain_name(record[self.domain_key], where)


@dataclass(frozen=True)
class TfdsSource:
    """A dataset that `tensorflow_datasets` has prepared in a random-access format.

    Attributes:
        name: a TFDS name ("ds", "ds/config:1.0.0") or the directory of a prepared version.
        text_feature: feature that holds the text (string).
        domain_feature: feature that holds the domain: a string, or a ClassLabel whose names are
            used, or an integer whose digits are used.
        split: the TFDS split to read; train and held-out documents are both taken from it.
        data_dir: where TFDS looks for it (None: TFDS's own default).
    """

    name: str
    text_feature: str = "text"
    domain_feature: str = "domain"
    split: str = "train"
    data_dir: str | None = None
    kind: str = "tfds"

    def _builder(self) -> Any:
        import tensorflow_datasets as tfds

        try:
            if os.path.isdir(self.name):
                builder = tfds.builder_from_directory(self.name)
            else:
                builder = tfds.builder(self.name, data_dir=self.data_dir)
        except (tfds.core.DatasetNotFoundError, FileNotFoundError, AssertionError) as error:
            raise DataError(
                f"tfds:{self.name}: no such dataset ({str(error).splitlines()[0]:.200}); "
                "give the directory of a prepared version, or '?data_dir=...'"
            ) from error
        features: Any = builder.info.features
        for feature in (self.text_feature, self.domain_feature):
            if feature not in features:
                raise DataError(
                    f"tfds:{self.name} has no feature {feature!r} (features: "
                    f"{', '.join(sorted(features))}); add '?text=...&domain=...' to the spec"
                )
        if self.split.partition("[")[0] not in builder.info.splits:
            raise DataError(
                f"tfds:{self.name} has no prepared split {self.split!r} (prepared: "
                f"{', '.join(builder.info.splits) or 'none; run download_and_prepare first'})"
            )
        return builder

    def signature(self) -> Any:
        """Return names, sizes and modification times of the prepared files, and the options."""
        directory = Path(os.fspath(self._builder().data_dir))
        options = [self.text_feature, self.domain_feature, self.split]
        return {"options": options, "files": _stat_signature(directory, _visible_files(directory))}

    def documents(self) -> Iterator[Document]:
        """Yield the examples in TFDS's order."""
        builder = self._builder()
        try:
            examples = builder.as_data_source(split=self.split)
        except NotImplementedError as error:
            raise DataError(
                f"tfds:{self.name} is stored as {builder.info.file_format}, which has no random "
                "access; prepare it again with file_format='array_record'"
            ) from error
        label = builder.info.features[self.domain_feature]
        for index in range(len(examples)):
            example = examples[index]
            where = f"tfds:{self.name} {self.split} example {index}"
            text = example[self.text_feature]
            domain = example[self.domain_feature]
            if hasattr(label, "int2str") and not isinstance(domain, bytes | str):
                if int(domain) < 0:
                    raise DataError(f"{where}: label {int(domain)} is out of range")
                domain = label.int2str(int(domain))
            domain = domain.decode("utf-8") if isinstance(domain, bytes) else str(domain)
            if isinstance(text, bytes):
                text = decode_utf8(text, where)
            if not isinstance(text, str):
                raise DataError(f"{where}: feature {self.text_feature!r} is no text")
            yield Document(f"{index:012d}", check_domain_name(domain, where), text)


_EMBEDDED = ("max_bytes", "min_bytes", "max_document_bytes")
# Scheme -> source and its options (name in the spec -> keyword).
_OPTIONS: dict[str, tuple[Any, dict[str, str]]] = {
    "text": (TextSource, {"errors": "errors"}),
    "jsonl": (JsonlSource, {"text": "text_key", "domain": "domain_key"}),
    "tfds": (
        TfdsSource,
        {
            "text": "text_feature",
            "domain": "domain_feature",
            "split": "split",
            "data_dir": "data_dir",
        },
    ),
}


def make_source(spec: str) -> Source:
    """Return the source that a spec names.

    Args:
        spec: `embedded`, `text:<dir>`, `jsonl:<dir>` or `tfds:<name>`, with options after "?".
            `embedded` takes max_bytes, min_bytes and max_document_bytes (per domain, in bytes);
            `text` takes errors=replace; `jsonl` and `tfds` take text=, domain= (field names);
            `tfds` also split= and data_dir=.

    Raises:
        DataError: unknown scheme or option, or nothing after the colon.
    """
    head, _, query = spec.partition("?")
    scheme, colon, rest = head.partition(":")
    options = dict(parse_qsl(query, keep_blank_values=True))
    if head == "embedded":
        numbers = {}
        for key, value in _known(spec, options, dict.fromkeys(_EMBEDDED, "")).items():
            if not value.isdigit():
                raise DataError(f"data spec {spec!r}: {key} must be a whole number, got {value!r}")
            numbers[key] = int(value)
        return EmbeddedSource(**numbers)
    if scheme not in _OPTIONS or not colon:
        raise DataError(f"unknown data spec {spec!r}; expected {_SCHEMES}")
    if not rest:
        raise DataError(f"data spec {spec!r} names nothing after the colon ({_SCHEMES})")
    make, keywords = _OPTIONS[scheme]
    chosen = _known(spec, options, keywords)
    return make(rest, **{keywords[key]: value for key, value in chosen.items()})


def _known(spec: str, options: dict[str, str], known: dict[str, str]) -> dict[str, str]:
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise DataError(
            f"data spec {spec!r}: unknown option {', '.join(unknown)} (known: {', '.join(known)})"
        )
    return options
