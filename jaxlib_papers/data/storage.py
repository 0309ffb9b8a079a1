"""Cache folders that appear whole or not at all, and that are noticed when they change."""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import json
import os
import shutil
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from jaxlib_papers.data.errors import DataError

__all__ = [
    "checksums",
    "default_cache_dir",
    "digest_of",
    "file_sizes",
    "read_manifest",
    "written_atomically",
]

MANIFEST = "manifest.json"
_BLOCK = 1 << 24


def default_cache_dir(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """Return where prepared data are kept.

    Args:
        cache_dir: the caller's choice. None: $JAXLIB_PAPERS_CACHE, else
            $XDG_CACHE_HOME/jaxlib_papers, else ~/.cache/jaxlib_papers.
    """
    if cache_dir is not None:
        return Path(cache_dir).expanduser().absolute()
    if chosen := os.environ.get("JAXLIB_PAPERS_CACHE"):
        return Path(chosen).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache").absolute() / "jaxlib_papers"


def digest_of(value: Any) -> str:
    """Return the SHA-256, in hexadecimal, of a JSON value."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def file_sizes(directory: Path) -> dict[str, int]:
    """Return the size in bytes of every file below `directory` except its manifest."""
    return {
        path.relative_to(directory).as_posix(): path.stat().st_size
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path != directory / MANIFEST
    }


def checksums(directory: Path, names: Iterable[str] | None = None) -> dict[str, int]:
    """Return the CRC-32 of files below `directory`; None: all of them except its manifest.

    Reads them, several at once: less than a second for a gigabyte that is in memory.
    """

    def of_file(name: str) -> int:
        value = 0
        with (directory / name).open("rb") as file:
            while block := file.read(_BLOCK):
                value = zlib.crc32(block, value)
        return value

    names = list(file_sizes(directory) if names is None else names)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        return dict(zip(names, pool.map(of_file, names), strict=True))


def read_manifest(
    directory: Path, *, contents: Callable[[str], bool] | None = None
) -> dict[str, Any] | None:
    """Return the manifest of a finished folder, or None if it is absent, damaged or incomplete.

    Args:
        directory: the folder.
        contents: which files, by their names, are read to compare their checksums, and not only
            their sizes; None: none of them.
    """
    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(manifest, dict) or manifest.get("files") != file_sizes(directory):
        return None
    if manifest.get("digest", _digest(manifest)) != _digest(manifest):
        return None
    if contents is not None and "checksums" in manifest:  # earlier versions wrote none
        wanted = {name: value for name, value in manifest["checksums"].items() if contents(name)}
        if wanted != checksums(directory, wanted):
            return None
    return manifest


def _digest(manifest: dict[str, Any]) -> str:
    """Of everything else in the manifest; earlier versions wrote none."""
    return digest_of({name: value for name, value in manifest.items() if name != "digest"})


@contextlib.contextmanager
def written_atomically(
    final: Path, *, contents: Callable[[str], bool] | None = None
) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Give an empty folder and a manifest to fill; on success they become `final`.

    A `final` that is damaged (by contents too, as for `read_manifest`) is replaced.

    Several processes may write the same folder at once: the first to finish wins, and since all of
    them write the same content the others discard theirs. After an exception nothing is left.

    Raises:
        DataError: the cache folder cannot be written.
    """
    temporary = final.parent / f".incomplete-{final.name}-{uuid.uuid4().hex[:8]}"
    try:
        temporary.mkdir(parents=True)
    except OSError as error:
        raise DataError(
            f"cannot write the data cache {str(final.parent)!r} ({error.strerror}); choose another "
            "with cache_dir or the environment variable JAXLIB_PAPERS_CACHE"
        ) from error
    manifest: dict[str, Any] = {}
    try:
        yield temporary, manifest
        manifest["files"] = file_sizes(temporary)
        manifest["checksums"] = checksums(temporary)
        manifest["digest"] = _digest(manifest)
        text = json.dumps(manifest, indent=1, sort_keys=True)
        (temporary / MANIFEST).write_text(text + "\n", encoding="utf-8")
        if final.exists() and read_manifest(final, contents=contents) is None:
            os.replace(final, temporary.with_name(temporary.name + "-old"))
        try:
            os.replace(temporary, final)
        except OSError:
            if read_manifest(final) is None:
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(temporary.with_name(temporary.name + "-old"), ignore_errors=True)
