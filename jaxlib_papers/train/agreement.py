"""Whether all processes of a run are the same program with the same settings.

A host that was left with an older checkout, or was started with another flag, either trains
something else without a word or waits for ever in a collective that the others do not enter. So
before anything is built, every process tells every other what it runs.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import pathlib
import platform
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

__all__ = ["DisagreementError", "check_agreement", "code_identity", "exchange"]

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
_SHOWN = 20


class DisagreementError(ValueError):
    """Processes of one run have different code, versions, settings or data."""


def code_identity(*folders: pathlib.Path) -> dict[str, Any]:
    """Says what program this is.

    Args:
      *folders: Folders whose Python and JSON files are the program, beside this package itself.

    Returns:
      ``source``, a SHA-256 over names and contents of these files wherever they lie, and
      ``versions`` of Python and of the packages that decide a run's numbers (None: not installed).
    """
    digest = hashlib.sha256()
    for folder in (pathlib.Path(__file__).parents[1], *folders):
        files = (p for pattern in ("*.py", "*.json") for p in folder.rglob(pattern))
        for path in sorted(files):
            content = path.read_bytes()
            name = f"{folder.name}/{path.relative_to(folder).as_posix()}"
            digest.update(f"{name} {len(content)}\n".encode() + content)
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return {"source": digest.hexdigest()[:16], "versions": versions}


def exchange(value: Any) -> list[Any]:
    """Gives every process the values of all of them. All processes call it.

    Args:
      value: A JSON value.

    Returns:
      The values in the order of the processes; with one process, its own.
    """
    content = json.dumps(value).encode()
    if jax.process_count() == 1:
        return [json.loads(content)]
    lengths = np.asarray(multihost_utils.process_allgather(np.int32(len(content)))).reshape(-1)
    padded = np.zeros(int(lengths.max()), np.uint8)
    padded[: len(content)] = np.frombuffer(content, np.uint8)
    rows = np.asarray(multihost_utils.process_allgather(padded)).reshape(len(lengths), -1)
    return [json.loads(row[:n].tobytes()) for row, n in zip(rows, lengths.tolist(), strict=True)]


def check_agreement(values: Sequence[Mapping[str, Any]], hosts: Sequence[str]) -> None:
    """Refuses processes that are not what process 0 is.

    Args:
      values: What each process said of itself, nested mappings of JSON values.
      hosts: Name of each process's host, for the message.

    Raises:
      DisagreementError: Names every process that differs, its host, and each field with both
        values.
    """
    lines = [
        f"process {number} on {host}: {difference}"
        for number, (host, value) in enumerate(zip(hosts, values, strict=True))
        for difference in _differences(values[0], value)
    ]
    if lines:
        more = [f"... and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
        raise DisagreementError(
            "the processes of this run are not the same program with the same settings:\n  "
            + "\n  ".join(lines[:_SHOWN] + more)
            + "\ngive all hosts the same installation, data and flags"
        )


def _differences(first: Any, other: Any, prefix: str = "") -> list[str]:
    if isinstance(first, Mapping) and isinstance(other, Mapping):
        return [
            line
            for key in sorted({*first, *other})
            for line in _differences(
                first.get(key), other.get(key), f"{prefix}.{key}" if prefix else str(key)
            )
        ]
    if first == other:
        return []
    return [f"{prefix} is {other!r}, but {first!r} on process 0"]
