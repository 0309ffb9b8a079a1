"""The error that bad data or a bad data configuration raises."""

from __future__ import annotations

__all__ = ["DataError"]


class DataError(ValueError):
    """Input text or a data setting that cannot be used; the message says which and what to do."""
