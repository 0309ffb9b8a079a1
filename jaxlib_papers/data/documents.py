"""What every source yields: one document with its domain."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

from jaxlib_papers.data.errors import DataError

__all__ = ["Document", "Source", "check_domain_name", "decode_utf8"]


class Document(NamedTuple):
    """One text with its label; `id` is unique within its domain and stable between runs."""

    id: str
    domain: str
    text: str


class Source(Protocol):
    """Where documents come from.

    `documents` may be called several times and yields the same documents in the same order each
    time. `signature` is a JSON value that is cheap to compute and changes when the documents may
    have changed; it decides whether a prepared corpus on disk is used again.
    """

    @property
    def kind(self) -> str:
        """Return the scheme of the spec."""
        ...

    def signature(self) -> Any:
        """Return the JSON value described above."""
        ...

    def documents(self) -> Iterator[Document]:
        """Yield every document."""
        ...


def check_domain_name(name: Any, where: str) -> str:
    """Return `name` if it can be a domain label, that is a printable non-empty string.

    Args:
        name: the label found.
        where: file and line, for the message.

    Raises:
        DataError: not a string, empty, longer than 128 characters, or with control characters
            (labels are stored one a line).
    """
    if not isinstance(name, str) or not name.strip() or len(name) > 128:
        raise DataError(
            f"{where}: a domain must be a non-empty string of at most 128 characters, "
            f"got {name!r:.200}"
        )
    if any(unicodedata.category(c) in ("Cc", "Cs") for c in name):
        raise DataError(f"{where}: domain {name!r} contains control characters; rename it")
    return name


def decode_utf8(raw: bytes, where: str, errors: str = "strict") -> str:
    """Decode UTF-8.

    Args:
        raw: the bytes of a file.
        where: the file, for the message.
        errors: "strict", or "replace" to put U+FFFD where bytes cannot be decoded.

    Raises:
        DataError: undecodable bytes under "strict"; names the file and the byte offset.
    """
    try:
        return raw.decode("utf-8", errors)
    except UnicodeDecodeError as error:
        bad = raw[error.start : error.start + 4].hex(" ")
        raise DataError(
            f"{where}: not UTF-8 at byte offset {error.start} (bytes {bad}: {error.reason}). "
            "Convert the file to UTF-8, remove it, or allow replacement characters with "
            "'?errors=replace' at the end of the data spec"
        ) from error
