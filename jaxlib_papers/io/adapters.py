"""Adapters on disk: one safetensors file with their arrays and their configuration.

Only adapters are written, never the base model. Loading is strict: every difference between the
file and what the model needs is collected and raised once, and nothing is loaded by half.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlib_papers.io.errors import FormatError, listed
from jaxlib_papers.io.sources import SafetensorsSource
from jaxlib_papers.nn.lora import LoRAConfig, inject_lora, lora_projections, with_modules

__all__ = ["load_arrays", "load_lora", "read_settings", "save_arrays", "save_lora"]

_LORA = "jaxlib-papers.lora/1"


def save_arrays(
    path: str | os.PathLike[str],
    arrays: Mapping[str, Any],
    *,
    format: str,
    settings: Mapping[str, Any],
) -> None:
    """Writes named arrays and settings into one safetensors file, whole or not at all.

    Args:
      path: File, made with its folder.
      arrays: By name, any float dtype.
      format: What the file holds, checked by `read_settings`.
      settings: JSON-able, for instance the adapter's configuration.

    Raises:
      FormatError: The package `safetensors` is missing.
    """
    try:
        from safetensors.numpy import save_file
    except ImportError as error:
        raise FormatError("writing safetensors needs: pip install jaxlib-papers[lm]") from error
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    host = {name: np.ascontiguousarray(jax.device_get(array)) for name, array in arrays.items()}
    temporary = path.with_name(path.name + ".part")
    save_file(host, temporary, {"format": format, "settings": json.dumps(dict(settings))})
    os.replace(temporary, path)


def read_settings(path: str | os.PathLike[str], format: str) -> dict[str, Any]:
    """The settings of a file from `save_arrays`.

    Args:
      path: The file.
      format: What it has to hold.

    Raises:
      FormatError: No safetensors file, another format, or damaged settings.
    """
    path = Path(path)
    if not path.is_file():
        raise FormatError(f"{path}: no such file; expected an adapter in safetensors")
    SafetensorsSource(path)  # refuses damaged files with a message of its own
    from safetensors import safe_open

    with safe_open(str(path), framework="numpy") as opened:
        metadata = opened.metadata() or {}
    if metadata.get("format") != format:
        raise FormatError(
            f"{path}: holds {metadata.get('format', 'no adapter of this library')!r}, expected "
            f"{format!r}"
        )
    try:
        settings = json.loads(metadata["settings"])
    except (KeyError, ValueError, RecursionError) as error:
        raise FormatError(f"{path}: its settings cannot be read: {error}") from error
    if not isinstance(settings, dict):
        raise FormatError(f"{path}: its settings are no object; save the adapter again")
    return settings


def load_arrays(path: str | os.PathLike[str], wanted: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Exactly the arrays that are wanted, or an error that lists every difference.

    Args:
      path: A safetensors file.
      wanted: Arrays or ShapeDtypeStructs by name; dtypes of the file are converted to theirs.

    Returns:
      The arrays by name.

    Raises:
      FormatError: A damaged file, or tensors that are missing, not wanted or of another shape.
    """
    source = SafetensorsSource(path)
    have = set(source.names())
    problems = []
    if missing := sorted(wanted.keys() - have):
        problems.append(f"lacks {listed(missing)}")
    if extra := sorted(have - wanted.keys()):
        problems.append(f"has {listed(extra)} that the model has no place for")
    for name in sorted(have & wanted.keys()):
        if source.shape(name) != tuple(wanted[name].shape):
            problems.append(
                f"tensor {name!r} has shape {source.shape(name)}, the model needs "
                f"{tuple(wanted[name].shape)}"
            )
    if problems:
        more = f"; and {len(problems) - 8} more differences" if len(problems) > 8 else ""
        raise FormatError(
            f"{path}: {'; '.join(problems[:8])}{more}. Load it onto the model and with the "
            "configuration that it was trained with"
        )
    return {name: jnp.asarray(source.read(name), like.dtype) for name, like in wanted.items()}


def save_lora(path: str | os.PathLike[str], model: Any) -> None:
    """Writes the low-rank factors of a model, and nothing of its base.

    Args:
      path: A file ending in .safetensors.
      model: From `nn.lora.inject_lora`.

    Raises:
      ValueError: The model has no low-rank factors.
    """
    adapters = lora_projections(model)
    if not adapters:
        raise ValueError("model has no low-rank factors to save; see nn.lora.inject_lora")
    first = next(iter(adapters.values()))
    rank = int(first.lora_a.shape[-1])
    config = LoRAConfig(
        rank=rank,
        alpha=first.scaling * rank,
        dropout=first.dropout,
        targets=tuple(sorted(adapters)),
        param_dtype=str(first.lora_a.dtype),
    )
    arrays = {
        f"{name}.{leaf}": getattr(adapter, leaf)[...]
        for name, adapter in adapters.items()
        for leaf in ("lora_a", "lora_b")
    }
    save_arrays(path, arrays, format=_LORA, settings=dataclasses.asdict(config))


def load_lora(path: str | os.PathLike[str], model: Any) -> Any:
    """The model with the low-rank factors of a file.

    Args:
      path: From `save_lora`.
      model: A plain decoder of the architecture that the factors were trained on.

    Raises:
      FormatError: A damaged file, or one for other widths, layers or projections.
    """
    settings = read_settings(path, _LORA)
    try:
        settings["targets"] = tuple(settings["targets"])
        config = LoRAConfig(**settings)
        adapted = inject_lora(model, config, key=jax.random.key(0))
    except (TypeError, KeyError, ValueError) as error:
        raise FormatError(f"{path}: does not fit this model: {error}") from error
    adapters = lora_projections(adapted)
    places = {
        f"{name}.{leaf}": getattr(adapter, leaf)
        for name, adapter in adapters.items()
        for leaf in ("lora_a", "lora_b")
    }
    arrays = load_arrays(path, {name: place.get_value() for name, place in places.items()})
    return with_modules(
        adapted, {name: places[name].replace(array) for name, array in arrays.items()}
    )
