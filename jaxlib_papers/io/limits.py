"""Bounds on numbers of a configuration, far above any model there is.

A damaged file must not make the process that reads it build a giant.
"""

from __future__ import annotations

__all__ = ["MAX_HEAD_DIM", "MAX_LAYERS"]

MAX_LAYERS: int = 10_000
"""Layers of a model."""

MAX_HEAD_DIM: int = 65_536
"""Channels of an attention head."""
