"""Text that every installation of this library has: four domains, no network.

| domain | from |
|---|---|
| `python` | the standard library and the sources of some core dependencies |
| `prose` | the language reference of `pydoc_data`, package descriptions, licences, docstrings |
| `c_headers` | C and C++ headers of the interpreter, numpy, scipy, jaxlib and pyarrow |
| `numbers` | tables of numbers in numpy's and scipy's data files |

Only core dependencies are read, so the corpus depends on the versions of Python and of those
packages and on nothing else that happens to be installed. Within a domain files are taken in the
order of the hash of their path, which mixes packages and gives the same choice everywhere. A
paragraph that an earlier document of the domain had is left out (licences and notices come many
times), or held-out documents would be in the training text.
"""

from __future__ import annotations

import ast
import csv
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import io
import os
import platform
import sysconfig
import warnings
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np

from jaxlib_papers.data.documents import Document
from jaxlib_papers.data.errors import DataError

__all__ = ["EMBEDDED_DOMAINS", "EmbeddedSource"]

EMBEDDED_DOMAINS = ("python", "prose", "c_headers", "numbers")

_FORMAT = 2
_CODE = ("flax", "jax", "optax")
_DOCSTRINGS = ("numpy", "scipy")
_HEADERS = ("jaxlib", "numpy", "pyarrow", "scipy")
_TABLES = ("numpy", "scipy")
_DESCRIBED = tuple(
    "chex einops flax grain jax jaxlib jaxtyping ml-dtypes numpy optax orbax-checkpoint protobuf "
    "pyarrow rich scipy tensorflow-datasets tensorstore treescope tyro".split()
)
_SKIPPED_FOLDERS = frozenset(
    "__pycache__ site-packages dist-packages test tests idlelib lib2to3 encodings pydoc_data "
    "turtledemo ensurepip".split()
)
_MIN_DOCUMENT_BYTES = 512
_MIN_PARAGRAPH = 60  # characters; shorter ones ("else:", "Returns") repeat without being copies


class _Candidate(NamedTuple):
    name: str
    read: Callable[[], str]  # returns "" for what cannot be used
    tier: int = 0  # lower tiers are used up first


@dataclass(frozen=True)
class EmbeddedSource:
    """The embedded corpus.

    Attributes:
        max_bytes: at most this many bytes of text per domain.
        min_bytes: warn when an unusual installation has less than this for a domain.
        max_document_bytes: longer files are cut at the last line end before this size, so that a
            domain consists of many documents.
    """

    max_bytes: int = 600_000
    min_bytes: int = 400_000
    max_document_bytes: int = 16_384
    kind: str = "embedded"

    def __post_init__(self) -> None:
        if self.max_document_bytes < _MIN_DOCUMENT_BYTES or self.max_bytes < _MIN_DOCUMENT_BYTES:
            raise DataError(
                f"embedded: max_bytes and max_document_bytes must be at least "
                f"{_MIN_DOCUMENT_BYTES}, got {self.max_bytes} and {self.max_document_bytes}"
            )

    def signature(self) -> Any:
        """Return the versions of Python and of the packages read, and the options."""
        versions = {name: _version(name) for name in _DESCRIBED}
        options = [self.max_bytes, self.max_document_bytes]
        python = [platform.python_implementation(), platform.python_version()]
        return {"format": _FORMAT, "python": python, "packages": versions, "options": options}

    def documents(self) -> Iterator[Document]:
        """Yield the documents, domain by domain."""
        candidates = {
            "python": _python_files,
            "prose": _prose,
            "c_headers": _header_files,
            "numbers": _tables,
        }
        for domain in EMBEDDED_DOMAINS:
            yield from self._domain(domain, candidates[domain]())

    def _domain(self, domain: str, candidates: list[_Candidate]) -> Iterator[Document]:
        total = 0
        seen: set[bytes] = set()
        for name, read, _ in sorted(candidates, key=lambda c: (c.tier, _digest(c.name), c.name)):
            limit = min(self.max_document_bytes, self.max_bytes - total)
            text, paragraphs = _unseen(_cut(read(), limit), seen)
            size = len(text.encode("utf-8"))
            if size < _MIN_DOCUMENT_BYTES:
                continue
            seen |= paragraphs
            total += size
            yield Document(name, domain, text)
            if self.max_bytes - total < _MIN_DOCUMENT_BYTES:
                return
        if total < min(self.min_bytes, self.max_bytes):
            warnings.warn(
                f"this installation has only {total} bytes of text for the embedded domain "
                f"{domain!r} (expected {self.min_bytes}); bring your own text with text:<dir>",
                stacklevel=2,
            )


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8")).digest()


def _unseen(text: str, seen: set[bytes]) -> tuple[str, set[bytes]]:
    """The text without paragraphs in ``seen``, and the digests of those that it has."""
    kept, digests = [], set()
    for paragraph in text.split("\n\n"):
        words = " ".join(paragraph.split())
        digest = _digest(words)
        if len(words) >= _MIN_PARAGRAPH:
            if digest in seen:
                continue
            digests.add(digest)
        kept.append(paragraph)
    unseen = "\n\n".join(kept)
    return (unseen if unseen == text else unseen.rstrip("\n") + "\n"), digests


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cut(text: str, limit: int) -> str:
    """At most `limit` bytes of UTF-8, ending after a line."""
    raw = text.encode("utf-8")
    if len(raw) <= limit:
        return text
    return raw[: raw.rfind(b"\n", 0, limit) + 1].decode("utf-8")


def _read(path: Path) -> str:
    """The text of a file, or "" where it is no UTF-8 (such a file is just not chosen)."""
    try:
        return path.read_bytes().decode("utf-8").replace("\r\n", "\n")
    except (UnicodeDecodeError, OSError):
        return ""


@functools.cache
def _package_files(package: str) -> tuple[tuple[str, Path], ...]:
    """Name and path of every file that a distribution installed."""
    try:
        distribution = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        return ()
    record = distribution.read_text("RECORD")
    if record is not None:
        names = [row[0] for row in csv.reader(record.splitlines()) if row]
        return tuple((name, Path(str(distribution.locate_file(name)))) for name in names)
    # Some system packages ship no list of files.
    spec = importlib.util.find_spec(package.replace("-", "_"))
    roots = [Path(p) for p in (spec.submodule_search_locations or [])] if spec else []
    return tuple(
        (path.relative_to(root.parent).as_posix(), path)
        for root in roots
        for path in root.rglob("*")
        if path.is_file()
    )


def _skipped(name: str) -> bool:
    return any(part in _SKIPPED_FOLDERS for part in PurePosixPath(name).parts[:-1])


def _file(name: str, path: Path, tier: int = 0) -> _Candidate:
    return _Candidate(name, lambda: _read(path), tier)


def _python_files() -> list[_Candidate]:
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [
            name
            for name in subfolders
            if name not in _SKIPPED_FOLDERS and not name.startswith("config-")
        ]
        for name in names:
            # _sysconfigdata* records the paths of the machine that built the interpreter.
            if name.endswith(".py") and not name.startswith("_sysconfigdata"):
                path = Path(folder, name)
                found.append(_file(f"stdlib/{path.relative_to(root).as_posix()}", path))
    for package in _CODE:
        for name, path in _package_files(package):
            if name.endswith(".py") and not _skipped(name) and not name.endswith("_test.py"):
                found.append(_file(name, path))
    return found


def _prose() -> list[_Candidate]:
    found: list[_Candidate] = []
    try:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    except ImportError:
        topics = {}
    for topic in topics:
        found.append(_Candidate(f"pydoc_data/{topic}", lambda t=topic: topics[t]))
    for package in _DESCRIBED:
        if _version(package) is not None:
            found.append(_Candidate(f"description/{package}", lambda p=package: _description(p)))
        for name, path in _package_files(package):
            base = PurePosixPath(name).name.upper()
            if base.startswith(("LICENSE", "LICENCE", "COPYING", "NOTICE")) and ".PY" not in base:
                found.append(_file(name, path))
    for package in _DOCSTRINGS:
        for name, path in _package_files(package):
            if name.endswith(".py") and not _skipped(name):
                found.append(_Candidate(f"docstrings/{name}", lambda p=path: _docstrings(p), 1))
    return found


def _description(package: str) -> str:
    metadata: Any = importlib.metadata.metadata(package)
    body = metadata.get("Description") or metadata.get_payload() or ""
    return str(body).replace("\r\n", "\n")


def _docstrings(path: Path) -> str:
    """The docstrings of a module, without their code examples."""
    try:
        tree = ast.parse(_read(path))
    except (SyntaxError, ValueError):
        return ""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds))
    paragraphs = [
        paragraph
        for docstring in found
        if docstring and len(docstring) >= 200
        for paragraph in docstring.split("\n\n")
        if ">>>" not in paragraph
    ]
    return "\n\n".join(paragraphs) + "\n" if paragraphs else ""


def _header_files() -> list[_Candidate]:
    found = []
    include = Path(sysconfig.get_path("include"))
    if include.is_dir():
        for path in include.rglob("*.h"):
            found.append(_file(f"python/{path.relative_to(include).as_posix()}", path))
    for package in _HEADERS:
        for name, path in _package_files(package):
            if name.endswith((".h", ".hh", ".hpp")):
                found.append(_file(name, path, tier=int(package in ("pyarrow", "scipy"))))
    return found


def _tables() -> list[_Candidate]:
    found: list[_Candidate] = []
    for package in _TABLES:
        for name, path in _package_files(package):
            if name.endswith((".csv", ".dat", ".tsv")):
                found.append(_file(name, path))
            elif name.endswith(".npy"):
                found.append(_Candidate(name, lambda p=path: _array(p, None)))
            elif name.endswith(".npz"):
                for key in _array_names(path):
                    found.append(_Candidate(f"{name}/{key}", lambda p=path, k=key: _array(p, k)))
    return found


def _array_names(path: Path) -> list[str]:
    try:
        with zipfile.ZipFile(path) as archive:
            return [name.removesuffix(".npy") for name in archive.namelist()]
    except (OSError, zipfile.BadZipFile):
        return []


def _array(path: Path, key: str | None) -> str:
    """One table of a numpy file, written as comma-separated numbers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about headers that Python 2 wrote
        try:
            loaded = np.load(path, allow_pickle=False)
            return _csv(loaded if key is None else loaded[key])
        except (OSError, ValueError):  # not readable, or objects that would need unpickling
            return ""


def _csv(array: np.ndarray, max_values: int = 4096) -> str:
    if array.dtype.kind not in "iuf" or array.ndim == 0 or not array.size:
        return ""
    rows = array.reshape(-1, array.shape[-1]) if array.ndim > 1 else array.reshape(-1, 1)
    rows = rows[: max(1, max_values // rows.shape[1])]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for row in rows.tolist():
        writer.writerow([value if isinstance(value, int) else f"{value:.10g}" for value in row])
    return out.getvalue()
