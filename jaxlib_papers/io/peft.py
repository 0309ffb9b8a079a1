"""Plain LoRA in the folder format of Hugging Face PEFT: export and import.

A folder has adapter_config.json and adapter_model.safetensors with lora_A [r, in] and lora_B
[out, r] of each layer on its own; here a stack of layers has one pair of arrays. Variants that
change the arithmetic (DoRA, ranks by pattern, trained biases, modules saved whole) are refused by
name.
"""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlib_papers.io.errors import FormatError, listed
from jaxlib_papers.io.sources import SafetensorsSource, read_json
from jaxlib_papers.nn.lora import (
    LoRAConfig,
    LoRAProjection,
    inject_lora,
    lora_projections,
    with_modules,
)

__all__ = ["load_peft", "save_peft"]

_HERE = {
    "q_proj": "layers.attention.query",
    "k_proj": "layers.attention.key",
    "v_proj": "layers.attention.value",
    "o_proj": "layers.attention.out",
    "gate_proj": "layers.feed_forward.gate",
    "up_proj": "layers.feed_forward.up",
    "down_proj": "layers.feed_forward.down",
    "lm_head": "head",
}
_THERE = {ours: theirs for theirs, ours in _HERE.items()}
_PREFIX = "base_model.model."
_LAYER = re.compile(r"model\.layers\.(\d+)\.(?:self_attn|mlp)\.(\w+_proj)")
# Settings that have to be empty, false or the given value for the arithmetic to be plain LoRA.
_PLAIN = {
    "peft_type": "LORA",
    "bias": "none",
    "use_dora": False,
    "fan_in_fan_out": False,
    "rank_pattern": {},
    "alpha_pattern": {},
    "modules_to_save": None,
    "lora_bias": False,
    "layer_replication": None,
}


def _module(name: str, layer: int) -> str:
    """Hugging Face's name of one layer's projection."""
    short = _THERE[name]
    if name == "head":
        return f"{_PREFIX}{short}"
    part = "self_attn" if "attention" in name else "mlp"
    return f"{_PREFIX}model.layers.{layer}.{part}.{short}"


def _pairs(name: str, adapter: LoRAProjection) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """(module, lora_A [r, in], lora_B [out, r]) of each layer of a projection."""
    rank = adapter.lora_a.shape[-1]
    stacked = name != "head"
    a, b = (np.asarray(jax.device_get(x[...])) for x in (adapter.lora_a, adapter.lora_b))
    a, b = (x if stacked else x[None] for x in (a, b))
    return [
        (_module(name, i), low.reshape(-1, rank).T, high.reshape(rank, -1).T)
        for i, (low, high) in enumerate(zip(a, b, strict=True))
    ]


def save_peft(path: str | os.PathLike[str], model: Any, *, base_model: str | None = None) -> None:
    """Writes the low-rank factors of a model as a folder that PEFT loads.

    Args:
      path: Folder, made if missing.
      model: From `nn.lora.inject_lora`.
      base_model: Name or path of the base model, written into the configuration.

    Raises:
      ValueError: The model has no low-rank factors, or one that PEFT's names don't reach.
      FormatError: The package `safetensors` is missing.

    Source: Hugging Face PEFT, LoRA checkpoint format.
    """
    adapters = lora_projections(model)
    if not adapters:
        raise ValueError("model has no low-rank factors to save; see nn.lora.inject_lora")
    if strange := sorted(set(adapters) - set(_THERE)):
        raise ValueError(f"{strange[0]} has no name in PEFT's format; expected {sorted(_THERE)}")
    try:
        from safetensors.numpy import save_file
    except ImportError as error:
        raise FormatError("writing safetensors needs: pip install jaxlib-papers[lm]") from error
    first = next(iter(adapters.values()))
    rank = int(first.lora_a.shape[-1])
    settings = {
        **_PLAIN,
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": rank,
        "lora_alpha": first.scaling * rank,
        "lora_dropout": first.dropout,
        "target_modules": sorted(_THERE[name] for name in adapters),
        "inference_mode": True,
        "use_rslora": False,
        "init_lora_weights": True,
    }
    tensors = {}
    for name, adapter in adapters.items():
        for module, low, high in _pairs(name, adapter):
            tensors[f"{module}.lora_A.weight"] = np.ascontiguousarray(low)
            tensors[f"{module}.lora_B.weight"] = np.ascontiguousarray(high)
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / "adapter_model.safetensors.part"
    save_file(tensors, temporary, {"format": "pt"})
    os.replace(temporary, folder / "adapter_model.safetensors")
    text = json.dumps(settings, indent=2) + "\n"
    (folder / "adapter_config.json").write_text(text, encoding="utf-8")


def _settings(file: Path) -> tuple[int, float, float]:
    """Rank, alpha and dropout, after the checks."""
    settings = read_json(file)
    for name, plain in _PLAIN.items():
        value = settings.get(name, plain)
        if value != plain and (value or plain):
            raise FormatError(f"{file}: {name} is {value!r}; only plain LoRA ({plain!r}) is read")
    rank, alpha = settings.get("r"), settings.get("lora_alpha")
    dropout = settings.get("lora_dropout", 0.0)
    numbers = all(isinstance(v, int | float) for v in (rank, alpha, dropout))
    if not numbers or rank != int(rank) or rank < 1 or not math.isfinite(alpha):
        raise FormatError(f"{file}: r, lora_alpha, lora_dropout are {rank}, {alpha}, {dropout}")
    if settings.get("use_rslora"):  # alpha / sqrt(r) in place of alpha / r
        alpha = alpha * math.sqrt(rank)
    return int(rank), float(alpha), float(dropout)


def load_peft(path: str | os.PathLike[str], model: Any) -> Any:
    """A model with the low-rank factors of a PEFT folder.

    Args:
      path: Folder with adapter_config.json and adapter_model.safetensors.
      model: The plain decoder that the factors were trained on.

    Returns:
      As `nn.lora.inject_lora`, with the folder's factors.

    Raises:
      FormatError: A damaged file, a variant of LoRA, tensors that are missing, unknown, or of
        another shape than the model needs; nothing is loaded by half.

    Source: Hugging Face PEFT, LoRA checkpoint format.
    """
    folder = Path(path)
    rank, alpha, dropout = _settings(folder / "adapter_config.json")
    file = folder / "adapter_model.safetensors"
    if not file.is_file():
        raise FormatError(f"{file}: no such file (a .bin is a pickle, which is never read)")
    source = SafetensorsSource(file)
    modules, unknown = set(), []
    for name in source.names():
        inner = name.removeprefix(_PREFIX).removesuffix(".weight")
        place, _, part = inner.rpartition(".")
        found = _LAYER.fullmatch(place)
        short = found.group(2) if found else place
        if part not in ("lora_A", "lora_B") or short not in _HERE:
            unknown.append(name)
        else:
            modules.add(_HERE[short])
    if unknown or not modules:
        raise FormatError(
            f"{file}: has tensors without a place: {listed(unknown) or 'none at all'}"
        )
    config = LoRAConfig(rank, alpha, dropout, tuple(sorted(modules)))
    try:
        adapted = inject_lora(model, config, key=jax.random.key(0))
    except ValueError as error:
        raise FormatError(f"{file}: does not fit this model: {error}") from error
    adapters = lora_projections(adapted)
    wanted = {
        f"{module}.{part}.weight": array.shape
        for name, adapter in adapters.items()
        for module, low, high in _pairs(name, adapter)
        for part, array in (("lora_A", low), ("lora_B", high))
    }
    have = {name: source.shape(name) for name in source.names()}
    problems = [f"lacks {listed(wanted.keys() - have.keys())}"] if wanted.keys() - have else []
    if extra := have.keys() - wanted.keys():
        problems.append(f"has {listed(extra)} that the model has no place for")
    problems += [
        f"tensor {name!r} has shape {have[name]}, the model needs {shape}"
        for name, shape in sorted(wanted.items())
        if name in have and have[name] != shape
    ]
    if problems:
        raise FormatError(f"{file}: {'; '.join(problems[:8])}; was it trained on another model?")
    replacements: dict[str, Any] = {}
    for name, adapter in adapters.items():
        modules_here = [module for module, _, _ in _pairs(name, adapter)]
        for leaf, part in (("lora_a", "lora_A"), ("lora_b", "lora_B")):
            variable = getattr(adapter, leaf)
            parts = [source.read(f"{m}.{part}.weight").astype(np.float32).T for m in modules_here]
            array = jnp.asarray(np.stack(parts).reshape(variable.shape), variable.dtype)
            replacements[f"{name}.{leaf}"] = variable.replace(array)
    return with_modules(adapted, replacements)
