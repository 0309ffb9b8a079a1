"""Cache folders that appear whole or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxlib_papers.data.errors import DataError

__all__ = ["default_cache_dir", "digest_of", "file_sizes", "read_manifest", "written_atomically"]

MANIFEST = "manifest.json"


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


def read_manifest(directory: Path) -> dict[str, Any] | None:
    """Return the manifest of a finished folder, or None if it is absent, damaged or incomplete."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(manifest, dict) or manifest.get("files") != file_sizes(directory):
        return None
    return manifest


@contextlib.contextmanager
def written_atomically(final: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Give an empty folder and a manifest to fill; on success they become `final`.

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
        text = json.dumps(manifest, indent=1, sort_keys=True)
        (temporary / MANIFEST).write_text(text + "\n", encoding="utf-8")
        if final.exists() and read_manifest(final) is None:
            os.replace(final, temporary.with_name(temporary.name + "-old"))
        try:
            os.replace(temporary, final)
        except OSError:
            if read_manifest(final) is None:
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(temporary.with_name(temporary.name + "-old"), ignore_errors=True)
