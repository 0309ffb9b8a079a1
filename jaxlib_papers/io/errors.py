"""The error that a file from outside raises when it cannot be used."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["FormatError", "listed"]


class FormatError(ValueError):
    """A file that is damaged or that this library cannot read.

    The message names the file, the tensor or setting, and what to do.
    """


def listed(names: Iterable[str], limit: int = 12) -> str:
    """Names in one line for a message, the first ``limit`` of them sorted, and how many more."""
    names = sorted(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
