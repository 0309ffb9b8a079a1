"""Writes a decoder as a Hugging Face folder that transformers 4 and 5 load to the same logits."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

from jaxlib_papers.io.errors import FormatError
from jaxlib_papers.io.hf_config import config_to_json
from jaxlib_papers.io.names import Piece, parameter_pieces
from jaxlib_papers.io.tokenizer import PretrainedTokenizer
from jaxlib_papers.nn.decoder import DecoderLM
from jaxlib_papers.ops.checks import check_positive

__all__ = ["save_pretrained"]

_Named = tuple[Piece, Any]  # and the array (or its slice) that it is taken from


def save_pretrained(
    path: str | os.PathLike[str],
    model: DecoderLM,
    tokenizer: PretrainedTokenizer | None = None,
    *,
    max_shard_bytes: float = 2e9,
) -> None:
    """Writes config.json, the weights as safetensors, and the tokenizer's files.

    A tied output matrix is not written. Memory beside the model: one shard. Each file appears
    under its name only when it is complete, config.json last.

    Args:
      path: The folder; made when it is not there. Files of the same names are replaced.
      model: A decoder with plain parameters (merge adapters first).
      tokenizer: Written too when given.
      max_shard_bytes: Largest file of weights; a larger tensor still gets one of its own.

    Raises:
      ValueError: None of Llama, Qwen3 and Qwen3-MoE is such a model, the tree has parameters that
        none of them has, or the folder holds weights under other names.
      FormatError: The package `safetensors` is missing.
    """
    check_positive("max_shard_bytes", max_shard_bytes)
    try:
        from safetensors.numpy import save_file
    except ImportError as error:
        raise FormatError(
            "writing safetensors needs the package 'safetensors'; install jaxlib-papers[lm]"
        ) from error
    settings = config_to_json(model.config)
    shards = _shards(_tensors(model), max_shard_bytes)
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    files = ["model.safetensors"]
    if len(shards) > 1:
        count = len(shards)
        files = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    index = "model.safetensors.index.json"
    kept = {*files, *([index] if len(shards) > 1 else [])}
    stale = sorted(p.name for p in folder.glob("model*.safetensors*") if p.name not in kept)
    if stale:
        raise ValueError(f"{folder} holds {stale[0]} of another model; choose an empty folder")
    for file, shard in zip(files, shards, strict=True):
        tensors = {piece.name: _stored(piece, array) for piece, array in shard}
        with _complete(folder / file) as temporary:
            save_file(tensors, str(temporary), metadata={"format": "pt"})
    if len(shards) > 1:
        total = sum(_bytes(piece, array) for shard in shards for piece, array in shard)
        places = {p.name: f for f, shard in zip(files, shards, strict=True) for p, _ in shard}
        _write(folder / index, {"metadata": {"total_size": total}, "weight_map": places})
    if tokenizer is not None:
        tokenizer.save(folder)
        ids = {"bos_token_id": tokenizer.bos_id, "pad_token_id": tokenizer.pad_id}
        stop = list(tokenizer.stop_ids)
        ids["eos_token_id"] = stop if len(stop) > 1 else stop[0]
        ids = {name: value for name, value in ids.items() if value is not None}
        settings |= ids
        _write(folder / "generation_config.json", ids)
    _write(folder / "config.json", settings)


class _complete:
    """A file that gets its name when it is whole."""

    def __init__(self, path: Path):
        self.path, self.temporary = path, path.with_name(path.name + ".part")

    def __enter__(self) -> Path:
        return self.temporary

    def __exit__(self, kind: Any, *_: object) -> None:
        if kind is None:
            os.replace(self.temporary, self.path)
        else:
            self.temporary.unlink(missing_ok=True)


def _write(path: Path, value: dict[str, Any]) -> None:
    with _complete(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _tensors(model: DecoderLM) -> Iterator[_Named]:
    """Everything that is stored, in the order of the layers."""
    pieces = parameter_pieces(model.config)
    arrays = {
        path: variable.get_value()
        for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param))
    }
    strange = sorted(".".join(map(str, path)) for path in arrays.keys() ^ pieces.keys())
    if strange:
        raise ValueError(
            f"model has other parameters than a plain decoder: {', '.join(strange[:6])}; merge "
            "adapters before saving"
        )
    found = [(piece, arrays[path]) for path, parts in pieces.items() for piece in parts]
    return iter(sorted(found, key=lambda item: item[0].where[:1] or (-1,)))


def _bytes(piece: Piece, array: Any) -> int:
    return math.prod(piece.stored_shape) * np.dtype(array.dtype).itemsize


def _stored(piece: Piece, array: Any) -> np.ndarray:
    return np.ascontiguousarray(piece.to_stored(np.asarray(array[piece.where])))


def _shards(tensors: Iterator[_Named], most: float) -> list[list[_Named]]:
    shards: list[list[_Named]] = [[]]
    size = 0
    for piece, array in tensors:
        more = _bytes(piece, array)
        if shards[-1] and size + more > most:
            shards.append([])
            size = 0
        shards[-1].append((piece, array))
        size += more
    return shards
