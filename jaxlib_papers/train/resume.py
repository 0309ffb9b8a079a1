"""Whether and with what configuration a run continues from a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from jaxlib_papers.train.checkpoint import CheckpointError

__all__ = [
    "ConfigMismatchError",
    "ResumeMode",
    "check_config",
    "config_differences",
    "resume_step",
]

ResumeMode = Literal["auto", "never", "must"]


class ConfigMismatchError(ValueError):
    """A run is resumed with another configuration than it was started with."""


def resume_step(mode: ResumeMode, latest: int | None, directory: Any) -> int | None:
    """Decides which step a run continues from.

    Args:
      mode: ``auto`` = the last complete step if there is one, ``never`` = none, ``must`` = the last
        complete step or an error.
      latest: Last complete step, None if there is none.
      directory: Where it was looked for (for the message).

    Returns:
      The step to restore, or None for a fresh start.

    Raises:
      CheckpointError: ``must`` and there is nothing to resume.
      ValueError: Unknown mode.
    """
    if mode not in ("auto", "never", "must"):
        raise ValueError(f"resume: got {mode!r}, expected 'auto', 'never' or 'must'")
    if mode == "must" and latest is None:
        raise CheckpointError(
            f"resume 'must': there is no complete checkpoint in {directory}; "
            "use resume 'auto' to start from the beginning when there is none"
        )
    return None if mode == "never" else latest


def config_differences(saved: Any, current: Any, prefix: str = "") -> list[str]:
    """Lists the fields in which two JSON-like configurations differ, one readable line each."""
    if isinstance(saved, Mapping) and isinstance(current, Mapping):
        lines = []
        for key in sorted({*saved, *current}):
            name = f"{prefix}.{key}" if prefix else str(key)
            if key not in saved:
                lines.append(f"{name}: absent in the checkpoint, {current[key]!r} now")
            elif key not in current:
                lines.append(f"{name}: {saved[key]!r} in the checkpoint, absent now")
            else:
                lines += config_differences(saved[key], current[key], name)
        return lines
    return [] if saved == current else [f"{prefix}: {saved!r} in the checkpoint, {current!r} now"]


def check_config(saved: Any, current: Any) -> None:
    """Refuses to continue a run under another configuration.

    Args:
      saved: JSON-like configuration from the checkpoint.
      current: Configuration of this run; tuples count as lists.

    Raises:
      ConfigMismatchError: Names each field that differs, with both values.
    """
    lines = config_differences(saved, json.loads(json.dumps(current)))
    if lines:
        raise ConfigMismatchError(
            "resume: the configuration is not the one that the checkpoint was made with:\n  "
            + "\n  ".join(lines)
            + "\nresume with the same configuration, or start in another run directory"
        )
