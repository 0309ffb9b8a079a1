"""Reader of GGUF files that trusts nothing: each length is checked against the file's size.

The header is parsed here; the blocks of quantised tensors are decoded by the `gguf` package
(extra `lm`). Nothing is memory-mapped, so a tensor costs memory only while it is read.

Source: the format's published specification, versions 2 and 3.
"""

from __future__ import annotations

import functools
import math
import os
import struct
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from jaxlib_papers.io.errors import FormatError

__all__ = ["GGUFFile", "GGUFTensor"]

_MAGIC = b"GGUF"
_SCALARS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "<u1"}
_SCALARS |= {10: "<u8", 11: "<i8", 12: "<f8"}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_MAX_RANK, _MAX_NAME, _MAX_NESTING = 4, 1024, 2


class GGUFTensor(NamedTuple):
    """Where and how one tensor is stored.

    Attributes:
      name: Its name in the file.
      shape: Row-major shape, the last axis the one whose numbers lie together.
      kind: Number of its storage type in the format.
      start: First byte in the file.
      size: Bytes.
    """

    name: str
    shape: tuple[int, ...]
    kind: int
    start: int
    size: int


class _Cursor:
    """Reads a header front to back; a length past the end of the file is an error, not a wait."""

    def __init__(self, file: BinaryIO, path: Path):
        self.file, self.path = file, path
        self.size = os.fstat(file.fileno()).st_size
        self.position = 0

    def fail(self, what: str) -> FormatError:
        return FormatError(
            f"{self.path}: at byte {self.position} of {self.size}: {what}; the file is damaged or "
            "cut short, fetch it again"
        )

    def take(self, count: int, what: str) -> bytes:
        if count > self.size - self.position:
            raise self.fail(f"{what} takes {count} bytes, past the end of the file")
        data = self.file.read(count)
        if len(data) != count:
            raise self.fail(f"{what} takes {count} bytes, {len(data)} could be read")
        self.position += count
        return data

    def number(self, what: str, code: str = "Q") -> int:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code), what))[0]

    def count(self, what: str, least_bytes: int) -> int:
        """A number of entries, each of which takes at least so many bytes."""
        count = self.number(what)
        if count * least_bytes > self.size - self.position:
            raise self.fail(f"{what} is {count}, more than the rest of the file can hold")
        return count

    def text(self, what: str, limit: int | None = None) -> str:
        length = self.count(f"length of {what}", 1)
        if limit is not None and length > limit:
            raise self.fail(f"{what} is {length} bytes long, expected at most {limit}")
        data = self.take(length, what)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} is no UTF-8") from error

    def value(self, kind: int, what: str, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.text(what)
        if kind in _SCALARS:
            dtype = np.dtype(_SCALARS[kind])
            value = np.frombuffer(self.take(dtype.itemsize, what), dtype)[0].item()
            return bool(value) if kind == _BOOL else value
        if kind != _ARRAY:
            raise self.fail(f"{what} has the unknown value type {kind}")
        if depth >= _MAX_NESTING:
            raise self.fail(f"{what} is an array nested more than {_MAX_NESTING} deep")
        inner = self.number(f"element type of {what}", "I")
        if inner in _SCALARS:
            dtype = np.dtype(_SCALARS[inner])
            count = self.count(f"length of {what}", dtype.itemsize)
            array = np.frombuffer(self.take(count * dtype.itemsize, what), dtype)
            return array.astype(bool) if inner == _BOOL else array
        # A string has at least its length, an array its type and its length.
        count = self.count(f"length of {what}", 8 if inner == _STRING else 12)
        return [self.value(inner, what, depth + 1) for _ in range(count)]


class GGUFFile:
    """An opened GGUF file: its metadata and where its tensors are.

    Args:
      path: The file.

    Attributes:
      metadata: Key to value; arrays of numbers are NumPy arrays, arrays of strings lists.
      tensors: Name to `GGUFTensor`.

    Raises:
      FormatError: Not a GGUF file, damaged, or the package `gguf` is missing.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                self._parse(_Cursor(file, self.path))
        except OSError as error:
            raise FormatError(f"{self.path}: cannot be read: {error}") from error

    def _parse(self, cursor: _Cursor) -> None:
        if cursor.take(4, "the magic number") != _MAGIC:
            raise FormatError(f"{self.path}: does not begin with GGUF; this is no GGUF file")
        version = cursor.number("version", "I")
        if version not in (2, 3):
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in (2, 3)
            raise FormatError(
                f"{self.path}: GGUF version {version}"
                + (" (a big-endian file)" if swapped else "")
                + ", expected little-endian 2 or 3; convert it with the tools of llama.cpp"
            )
        tensor_count = cursor.count("number of tensors", 32)
        key_count = cursor.count("number of metadata keys", 13)
        self.metadata: dict[str, Any] = {}
        for _ in range(key_count):
            key = cursor.text("a metadata key", 65535)
            if key in self.metadata:
                raise cursor.fail(f"metadata key {key!r} stands twice")
            self.metadata[key] = cursor.value(cursor.number(f"type of {key!r}", "I"), repr(key))
        entries = [self._entry(cursor) for _ in range(tensor_count)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0 or alignment % 8:
            raise cursor.fail(f"general.alignment is {alignment!r}, expected a multiple of 8")
        start = -(-cursor.position // alignment) * alignment
        self.tensors: dict[str, GGUFTensor] = {}
        end, previous = 0, None
        for entry in sorted(entries, key=lambda e: e.start):
            if entry.name in self.tensors:
                raise cursor.fail(f"tensor {entry.name!r} stands twice")
            if entry.start % alignment:
                raise cursor.fail(f"tensor {entry.name!r} is not aligned to {alignment} bytes")
            if entry.start < end:
                raise cursor.fail(f"tensors {previous!r} and {entry.name!r} overlap")
            end, previous = entry.start + entry.size, entry.name
            if start + end > cursor.size:
                raise cursor.fail(f"tensor {entry.name!r} ends at {start + end}, past the file")
            self.tensors[entry.name] = entry._replace(start=start + entry.start)

    def _entry(self, cursor: _Cursor) -> GGUFTensor:
        """One tensor's description, its start still relative to the data."""
        name = cursor.text("a tensor's name", _MAX_NAME)
        rank = cursor.number(f"rank of {name!r}", "I")
        if not 1 <= rank <= _MAX_RANK:
            raise cursor.fail(f"tensor {name!r} has rank {rank}, expected 1..{_MAX_RANK}")
        sizes = [cursor.number(f"shape of {name!r}") for _ in range(rank)]
        shape = tuple(reversed(sizes))
        kind = cursor.number(f"type of {name!r}", "I")
        start = cursor.number(f"offset of {name!r}")
        try:
            block, block_bytes = _blocks()[kind]
        except KeyError:
            raise cursor.fail(f"tensor {name!r} has the unknown storage type {kind}") from None
        if min(shape) < 1 or shape[-1] % block:
            raise cursor.fail(
                f"tensor {name!r} has shape {shape}; its last axis comes in blocks of {block}"
            )
        # Python integers: no length in the file can make this overflow.
        size = math.prod(shape) // block * block_bytes
        return GGUFTensor(name, shape, kind, start, size)

    def read(self, name: str) -> np.ndarray:
        """One tensor, decoded: float32 (float16 and bfloat16 tensors too), row-major.

        Raises:
          FormatError: No such tensor, a storage type that cannot be decoded, or a short file.
        """
        if name not in self.tensors:
            raise FormatError(f"{self.path}: has no tensor {name!r}")
        entry = self.tensors[name]
        data = np.empty(entry.size, np.uint8)
        with self.path.open("rb") as file:
            file.seek(entry.start)
            if file.readinto(data) != entry.size:
                raise FormatError(f"{self.path}: tensor {name!r} is cut short; fetch it again")
        constants, quants = _package()
        kind = constants.GGMLQuantizationType(entry.kind)
        block, block_bytes = _blocks()[entry.kind]
        rows = data.reshape(*entry.shape[:-1], entry.shape[-1] // block * block_bytes)
        try:
            # A scale of a damaged block may be infinite; who uses the tensor looks at its values.
            with np.errstate(all="ignore"):
                array = quants.dequantize(rows, kind)
        except NotImplementedError as error:
            raise FormatError(
                f"{self.path}: tensor {name!r} is stored as {kind.name}, which the package gguf "
                "cannot decode; convert the file to F16, Q8_0 or Q4_K"
            ) from error
        return np.asarray(array, np.float32).reshape(entry.shape)


def _package() -> tuple[Any, Any]:
    try:
        from gguf import constants, quants
    except ImportError as error:
        raise FormatError(
            "reading a GGUF file needs the package 'gguf'; install jaxlib-papers[lm]"
        ) from error
    return constants, quants


@functools.cache
def _blocks() -> dict[int, tuple[int, int]]:
    """Storage type to (numbers, bytes) of one of its blocks."""
    constants, _ = _package()
    return {int(kind): sizes for kind, sizes in constants.GGML_QUANT_SIZES.items()}
