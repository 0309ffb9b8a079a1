"""LoRA factors in the format of the package PEFT.

That is a folder with adapter_config.json and adapter_model.safetensors. Our factors stack the
layers and have the input first; theirs are one pair of matrices a layer, ``lora_A`` [rank, in] and
``lora_B`` [out, rank].
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxlib_papers.io.errors import FormatError, listed
from jaxlib_papers.io.names import parameter_pieces
from jaxlib_papers.io.sources import SafetensorsSource, read_json
from jaxlib_papers.nn.config import DecoderConfig
from jaxlib_papers.nn.decoder import DecoderLM
from jaxlib_papers.nn.lora import LoRAConfig, inject_lora, lora_projections

__all__ = ["load_peft", "save_peft"]

_PREFIX = "base_model.model."
_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# Settings that change what the factors mean; only these values are implemented.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": (None, "none"),
    "fan_in_fan_out": (None, False),
    "use_dora": (None, False),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, []),
}


class _Factor(NamedTuple):
    """One stored factor: its name, the projection it belongs to, which of the two, which layer."""

    name: str
    projection: str
    part: str
    layer: int | None


def _stored_names(config: DecoderConfig) -> dict[str, list[str]]:
    """Our path of each projection to the stored names of its layers, without their ends."""
    names = {
        ".".join(path): [piece.name.removesuffix(".weight") for piece in pieces]
        for path, pieces in parameter_pieces(config).items()
        if len(pieces[0].stored_shape) == 2 and len(pieces) in (1, config.num_layers)
    }
    del names["embedding"]
    return names | {"head": ["lm_head"]}


def _factors(config: DecoderConfig, projection: str) -> Iterator[_Factor]:
    names = _stored_names(config)[projection]
    for index, name in enumerate(names):
        layer = index if projection.startswith("layers.") else None
        for part, theirs in (("lora_a", "lora_A"), ("lora_b", "lora_B")):
            yield _Factor(f"{_PREFIX}{name}.{theirs}.weight", projection, part, layer)


def _to_stored(array: np.ndarray, part: str) -> np.ndarray:
    """[*in, rank] to [rank, in], [rank, *out] to [out, rank]."""
    if part == "lora_a":
        array = array.reshape(-1, array.shape[-1])
    else:
        array = array.reshape(array.shape[0], -1)
    return np.ascontiguousarray(array.T)


def save_peft(
    path: str | os.PathLike[str], model: DecoderLM, *, base_model: str | None = None
) -> None:
    """Writes the low-rank factors of a decoder as PEFT reads them.

    Args:
      path: The folder; made when it is not there.
      model: From `nn.lora.inject_lora`, trained.
      base_model: Where PEFT finds the base model; only noted in the file.

    Raises:
      ValueError: The model has no such factors, or factors of several ranks or scalings.
      FormatError: The package `safetensors` is missing.
    """
    try:
        from safetensors.numpy import save_file
    except ImportError as error:
        raise FormatError(
            "writing safetensors needs the package 'safetensors'; install jaxlib-papers[lm]"
        ) from error
    adapters = lora_projections(model)
    settings = {(a.lora_a.shape[-1], a.scaling, a.dropout) for a in adapters.values()}
    if len(settings) != 1:
        raise ValueError(
            f"model has low-rank factors of {len(settings)} kinds, expected one rank and scaling; "
            "see nn.lora.inject_lora"
        )
    unknown = sorted(adapters.keys() - _stored_names(model.config).keys())
    if unknown:
        raise ValueError(f"model has factors at {unknown[0]}, for which PEFT's format has no name")
    ((rank, scaling, rate),) = settings
    tensors = {}
    for projection, adapter in adapters.items():
        for factor in _factors(model.config, projection):
            array = np.asarray(getattr(adapter, factor.part)[...])
            array = array if factor.layer is None else array[factor.layer]
            tensors[factor.name] = _to_stored(array, factor.part)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": rank,
        "lora_alpha": scaling * rank,
        "lora_dropout": rate,
        "target_modules": sorted({name.split(".")[-3] for name in tensors}),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, str(folder / _WEIGHTS), metadata={"format": "pt"})
    (folder / _CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _lora_config(folder: Path) -> tuple[int, float, float]:
    """(rank, alpha, dropout) of a folder."""
    file = folder / _CONFIG
    config = read_json(file)
    for name, allowed in _PLAIN.items():
        if config.get(name) not in allowed:
            raise FormatError(
                f"{file}: {name} is {config.get(name)!r}; only plain LoRA is read: "
                f"{name} = {allowed[0]!r}"
            )
    numbers: Mapping[str, Any] = {
        name: config.get(name, default)
        for name, default in (("r", None), ("lora_alpha", None), ("lora_dropout", 0.0))
    }
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise FormatError(f"{file}: {name} is {value!r}, expected a number")
    rank, alpha = numbers["r"], float(numbers["lora_alpha"])
    if config.get("use_rslora"):  # scaled by alpha / sqrt(r)
        alpha *= math.sqrt(rank) if rank > 0 else 0.0
    return rank, alpha, float(numbers["lora_dropout"])


def load_peft(path: str | os.PathLike[str], model: DecoderLM) -> DecoderLM:
    """A copy of a decoder with the low-rank factors of a PEFT folder.

    Args:
      path: Folder with adapter_config.json and adapter_model.safetensors.
      model: A plain decoder; its arrays are shared, not copied.

    Returns:
      As `nn.lora.inject_lora`: train on, merge, or generate.

    Raises:
      FormatError: Not plain LoRA, or factors that don't fit the model: all of them are named.
    """
    folder = Path(path)
    rank, alpha, rate = _lora_config(folder)
    source = SafetensorsSource(folder / _WEIGHTS) if (folder / _WEIGHTS).is_file() else None
    if source is None:
        raise FormatError(f"{folder}: has no {_WEIGHTS}; pickled adapters are not read")
    stored = set(source.names())
    every = {p: list(_factors(model.config, p)) for p in _stored_names(model.config)}
    chosen = [p for p, factors in every.items() if any(f.name in stored for f in factors)]
    needed = {factor.name for p in chosen for factor in every[p]}
    stored -= _copies_of_the_base(source, model)
    faults = [
        f"{len(names)} {what}: {listed(names)}"
        for names, what in (
            (needed - stored, "are missing (each projection is adapted in all layers or none)"),
            (stored - needed, "belong to no projection of this model"),
        )
        if names
    ]
    if not chosen or faults:
        raise FormatError(
            f"{folder / _WEIGHTS}: its factors don't fit the model. "
            f"{'; '.join(faults) or 'There are none'}. Load the model that it was trained on"
        )
    try:
        config = LoRAConfig(rank=rank, alpha=alpha, dropout=rate, targets=tuple(chosen))
    except ValueError as error:
        raise FormatError(f"{folder / _CONFIG}: {error}") from error
    adapted = inject_lora(model, config, key=jax.random.key(0))
    arrays = _read(source, lora_projections(adapted), every)
    for projection, adapter in lora_projections(adapted).items():
        for part in ("lora_a", "lora_b"):
            value = jnp.asarray(arrays[projection, part])
            setattr(adapter, part, getattr(adapter, part).replace(value))
    return adapted


def _copies_of_the_base(source: SafetensorsSource, model: DecoderLM) -> set[str]:
    """Embedding and head, which PEFT adds when the head has factors: equal ones say nothing new."""
    table = model.embedding
    head = table[...] if model.head is None else model.head[...].T
    found = set()
    for name, array in (("model.embed_tokens", table[...]), ("lm_head", head)):
        for end in (".weight", ".base_layer.weight"):
            full = f"{_PREFIX}{name}{end}"
            if full in source.names() and np.array_equal(source.read(full), np.asarray(array)):
                found.add(full)
    return found


def _read(
    source: SafetensorsSource, adapters: Mapping[str, Any], every: Mapping[str, list[_Factor]]
) -> dict[tuple[str, str], np.ndarray]:
    """All factors in our layout, once all of them have the shapes that they should have."""
    out: dict[tuple[str, str], np.ndarray] = {}
    wrong = []
    for projection, adapter in adapters.items():
        for factor in every[projection]:
            like = getattr(adapter, factor.part)[...]
            shape = like.shape if factor.layer is None else like.shape[1:]
            want = _to_stored(np.broadcast_to(np.zeros((), np.int8), shape), factor.part).shape
            if source.shape(factor.name) != want:
                got = source.shape(factor.name)
                wrong.append(f"{factor.name} is {got}, expected {want}")
            out.setdefault((projection, factor.part), np.empty(like.shape, like.dtype))
    if wrong:
        raise FormatError(
            f"{source.path}: {len(wrong)} factors have another shape: {listed(wrong)}. The adapter "
            "was trained for other widths or another rank"
        )
    for projection in adapters:
        for factor in every[projection]:
            array = source.read(factor.name)
            if not np.isfinite(array).all():
                raise FormatError(
                    f"{source.path}: tensor {factor.name!r} has numbers that are not finite; the "
                    "file is damaged"
                )
            place = out[projection, factor.part]
            place = place if factor.layer is None else place[factor.layer]
            place[...] = array.T.reshape(place.shape)
    return out
