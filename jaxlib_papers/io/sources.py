"""Stored tensors under Hugging Face's names, whatever the file: what loading reads from."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import ml_dtypes
import numpy as np

from jaxlib_papers.io.errors import FormatError, listed
from jaxlib_papers.io.gguf import GGUFFile

__all__ = ["GGUFSource", "SafetensorsSource", "TensorSource", "read_json"]

_MAX_JSON = 64 * 2**20
_FLOATS = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


class _Place(NamedTuple):
    """Where a tensor of a safetensors file is: shape, dtype as named there, first byte, bytes."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    start: int
    size: int


class TensorSource(Protocol):
    """Named tensors on disk, read one at a time."""

    def names(self) -> Collection[str]:
        """All names, as Hugging Face writes them."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""
        ...

    def read(self, name: str) -> np.ndarray:
        """The tensor, in a floating dtype."""
        ...

    def file_of(self, name: str) -> Path:
        """The file that holds it, for messages."""
        ...


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
      FormatError: Missing, larger than 64 MiB, no JSON, or no object.
    """
    try:
        if path.stat().st_size > _MAX_JSON:
            raise FormatError(f"{path}: larger than {_MAX_JSON} bytes; this is no configuration")
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FormatError(f"{path}: cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: no valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise FormatError(f"{path}: holds a {type(value).__name__}, expected an object")
    return value


class SafetensorsSource:
    """Tensors of one safetensors file, or of a folder of them with or without an index.

    Args:
      path: A file, or a folder with model.safetensors or model.safetensors.index.json.

    Raises:
      FormatError: Nothing to read, a damaged file, an index that doesn't fit its files, or the
        package `safetensors` is missing.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self._places: dict[str, _Place] = {}
        if self.path.is_file():
            self._add(self.path)
            return
        index = self.path / "model.safetensors.index.json"
        if index.is_file():
            self._add_index(index)
        elif (self.path / "model.safetensors").is_file():
            self._add(self.path / "model.safetensors")
        else:
            pickles = sorted(p.name for p in self.path.glob("*.bin"))
            hint = f" ({pickles[0]} is a pickle, which is never read)" if pickles else ""
            raise FormatError(
                f"{self.path}: has neither model.safetensors nor model.safetensors.index.json"
                f"{hint}; save the model again with safe_serialization=True"
            )

    def _add(self, file: Path) -> None:
        _validate(file)
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(length))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            start, end = entry["data_offsets"]
            place = _Place(
                file, tuple(entry["shape"]), entry["dtype"], 8 + length + start, end - start
            )
            self._places[name] = place

    def _add_index(self, index: Path) -> None:
        wanted = read_json(index).get("weight_map")
        if not isinstance(wanted, dict) or not all(isinstance(f, str) for f in wanted.values()):
            raise FormatError(f"{index}: weight_map is missing or no map from names to files")
        for file in sorted(set(wanted.values())):
            if Path(file).name != file or file in ("", ".", ".."):
                raise FormatError(f"{index}: names the file {file!r} outside of its own folder")
            if not (self.path / file).is_file():
                raise FormatError(f"{index}: its file {file!r} is not there; fetch it")
            self._add(self.path / file)
        wrong = {n for n, f in wanted.items() if n not in self._places or self.file_of(n).name != f}
        if wrong:
            raise FormatError(f"{index}: these tensors are not where it says: {listed(wrong)}")

    def names(self) -> Collection[str]:
        """All names in the files."""
        return self._places.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return self._places[name].shape

    def file_of(self, name: str) -> Path:
        """The file that holds it."""
        return self._places[name].file

    def read(self, name: str) -> np.ndarray:
        """The tensor in its stored dtype.

        Raises:
          FormatError: The file is damaged, or its numbers are no floats.
        """
        place = self._places[name]
        if place.dtype not in _FLOATS:
            raise FormatError(
                f"{place.file}: tensor {name!r} is stored as {place.dtype}, expected one of "
                f"{', '.join(_FLOATS)}; save the model unquantised"
            )
        array = np.empty(place.shape, _FLOATS[place.dtype])
        with place.file.open("rb") as opened:
            opened.seek(place.start)
            # Read, not mapped: what is mapped would stay in memory beside the model.
            count = opened.readinto(array.reshape(-1).view(np.uint8))
        if count != place.size or place.size != array.nbytes:
            raise FormatError(f"{place.file}: tensor {name!r} is cut short; fetch the file again")
        return array


def _validate(file: Path) -> None:
    """Has the reference implementation check the header: lengths, overlaps, bounds."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise FormatError(
            "reading safetensors needs the package 'safetensors'; install jaxlib-papers[lm]"
        ) from error
    try:
        with safe_open(str(file), framework="numpy"):
            return
    except (SafetensorError, OSError) as error:
        raise FormatError(f"{file}: no valid safetensors file: {error}; fetch it again") from error


_GGUF_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_GGUF_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


class GGUFSource:
    """Tensors of a GGUF file of the Llama architecture, renamed, rotary pairs half a head apart.

    Such files store the rows of query and key for pairs of neighbouring channels; here they are
    put back into the order of the half-split form. A name that is unknown stays as it is.

    Args:
      file: The opened file.
      num_heads: Query heads.
      num_kv_heads: Key heads.
    """

    def __init__(self, file: GGUFFile, num_heads: int, num_kv_heads: int):
        self.file = file
        self._stored = {_hugging_face_name(name): name for name in file.tensors}
        # The frequencies' stretching is in the configuration.
        self._stored.pop("rope_freqs.weight", None)
        self._heads = {"q_proj": num_heads, "k_proj": num_kv_heads}

    def names(self) -> Collection[str]:
        """All names, translated."""
        return self._stored.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, row-major."""
        return self.file.tensors[self._stored[name]].shape

    def file_of(self, name: str) -> Path:
        """The GGUF file."""
        return self.file.path

    def read(self, name: str) -> np.ndarray:
        """The tensor, float32.

        Raises:
          FormatError: As `GGUFFile.read`.
        """
        array = self.file.read(self._stored[name])
        heads = self._heads.get(name.split(".")[-2]) if "." in name else None
        if heads is None or array.shape[0] % (2 * heads):
            return array
        # [heads, dim / 2, 2] -> [heads, 2, dim / 2]
        pairs = array.reshape(heads, -1, 2, *array.shape[1:])
        return pairs.swapaxes(1, 2).reshape(array.shape)


def _hugging_face_name(name: str) -> str:
    if name in _GGUF_NAMES:
        return _GGUF_NAMES[name]
    match = _GGUF_BLOCK.fullmatch(name)
    if match is None or match[2] not in _GGUF_LAYER:
        return name
    return f"model.layers.{int(match[1])}.{_GGUF_LAYER[match[2]]}.{match[3]}"
