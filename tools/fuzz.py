"""Damages model files in many ways and reads them: only `FormatError` may come out.

    python -m tools.fuzz --cases 2000

A tiny model is written as a Hugging Face folder and as a GGUF file. Each case changes one of the
files (bits, cuts, huge lengths, offsets that overlap, JSON that is nearly right) and loads it. A
case passes if the load succeeds or raises `FormatError`, and allocates no more than a fixed
multiple of the file's size.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import resource
import shutil
import struct
import sys
import tempfile
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from jaxlib_papers.io.errors import FormatError
from jaxlib_papers.io.names import parameter_pieces
from jaxlib_papers.io.pretrained import load_pretrained, save_pretrained
from jaxlib_papers.nn.config import DecoderConfig
from jaxlib_papers.nn.decoder import DecoderLM
from tools.tiny_gguf import VOCABULARY_SIZE, write_gguf

__all__ = ["FuzzConfig", "Tally", "fuzz", "main", "mutate", "write_targets"]

_BOUNDARY = (0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
# What the reader itself, its tracing and a tokenizer take, whatever the file.
_MEMORY = 16 * 2**20
# What the process may grow by over all cases; this sees memory of compiled packages too.
_RESIDENT = 256 * 2**20


@dataclasses.dataclass(frozen=True)
class FuzzConfig:
    """Fuzzing of the readers of model files."""

    cases: int = 2000
    """Mutated files to read, spread over the targets."""
    seed: int = 0
    """Of the mutations; case i of a seed is always the same."""


@dataclasses.dataclass
class Tally:
    """What came out.

    Attributes:
      loaded: Cases whose damage did not matter or cannot be seen (a weight is another weight).
      refused: Cases that raised `FormatError`.
      failures: Descriptions of all others.
      peak: Largest memory of a case in bytes, as far as Python sees it.
      resident: Bytes by which the process's largest resident memory grew.
      kinds: Cases of each target and mutation.
    """

    loaded: int = 0
    refused: int = 0
    failures: list[str] = dataclasses.field(default_factory=list)
    peak: int = 0
    resident: int = 0
    kinds: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)


def _flip(data: bytearray, rng: np.random.Generator, header: int) -> None:
    for _ in range(int(rng.integers(1, 9))):
        data[int(rng.integers(0, header))] ^= 1 << int(rng.integers(0, 8))


def _flip_body(data: bytearray, rng: np.random.Generator, header: int) -> None:
    for _ in range(int(rng.integers(1, 64))):
        data[int(rng.integers(header, len(data)))] ^= 1 << int(rng.integers(0, 8))


def _truncate(data: bytearray, rng: np.random.Generator, header: int) -> None:
    most = header if rng.random() < 0.5 else len(data)
    del data[int(rng.integers(0, most)) :]


def _length(data: bytearray, rng: np.random.Generator, header: int) -> None:
    """A count, size or offset that is as large or small as its bytes allow."""
    at = int(rng.integers(0, header - 8)) if rng.random() < 0.7 else int(rng.choice([0, 4, 8, 16]))
    value = int(rng.choice(np.asarray(_BOUNDARY, object)))
    code = "<Q" if rng.random() < 0.7 else "<I"
    struct.pack_into(code, data, at, value & (2 ** (8 * struct.calcsize(code)) - 1))


def _copy(data: bytearray, rng: np.random.Generator, header: int) -> None:
    """A stretch of the header again at another place: names and offsets that are there twice."""
    size = int(rng.integers(1, min(200, header // 2)))
    source, target = (int(rng.integers(0, max(1, header - size))) for _ in range(2))
    data[target : target + size] = data[source : source + size]


def _insert(data: bytearray, rng: np.random.Generator, header: int) -> None:
    at = int(rng.integers(0, header))
    data[at:at] = rng.bytes(int(rng.integers(1, 40)))


MUTATIONS: Mapping[str, Callable[[bytearray, np.random.Generator, int], None]] = {
    "flip header": _flip,
    "flip body": _flip_body,
    "truncate": _truncate,
    "length": _length,
    "copy": _copy,
    "insert": _insert,
}
"""Changes of bytes, by name."""


def _entries(data: bytearray, rng: np.random.Generator) -> bytearray:
    """A safetensors header that is valid JSON and says something wrong."""
    size = int.from_bytes(data[:8], "little")
    header = json.loads(bytes(data[8 : 8 + size]))
    name = str(rng.choice([key for key in header if key != "__metadata__"]))
    other = str(rng.choice([key for key in header if key != "__metadata__"]))
    entry = header[name]
    wrong = int(rng.choice(np.asarray(_BOUNDARY, object)))
    choice = int(rng.integers(0, 6))
    if choice == 0:
        entry["data_offsets"] = header[other]["data_offsets"]
    elif choice == 1:
        entry["data_offsets"] = [wrong, wrong + 4]
    elif choice == 2:
        entry["shape"] = [wrong, *entry["shape"][1:]]
    elif choice == 3:
        entry["dtype"] = str(rng.choice(["F64", "I8", "BOOL", "F8_E4M3", "Q", ""]))
    elif choice == 4:
        header[name + "x"] = header.pop(name)
    else:
        header[name] = rng.choice(np.asarray([None, 3, "x", []], object))
    text = json.dumps(header).encode()
    return bytearray(len(text).to_bytes(8, "little") + text + bytes(data[8 + size :]))


def _settings(data: bytearray, rng: np.random.Generator) -> bytearray:
    """A config.json with one value of another size or kind."""
    config = json.loads(bytes(data))
    key = str(rng.choice(sorted(config)))
    values = [None, True, -1, 0, 1, 3, 2**31, 2**62, 1e308, float("nan"), "", "x" * 99, [], {}]
    values += [{"rope_type": "dynamic"}, {"rope_type": "yarn", "factor": 0}, {"a": {"b": 1}}]
    config[key] = values[int(rng.integers(0, len(values)))]
    return bytearray(json.dumps(config).encode())


def mutate(data: bytes, name: str, rng: np.random.Generator, header: int) -> tuple[str, bytes]:
    """One damaged version of a file.

    Args:
      data: The file.
      name: Its name, which tells what it is.
      rng: Source of the damage.
      header: Bytes that describe the rest.

    Returns:
      (name of the mutation, damaged bytes).
    """
    if name.endswith(".json"):
        if rng.random() < 0.7:
            return "settings", bytes(_settings(bytearray(data), rng))
        header = len(data)
    elif name.endswith(".safetensors") and rng.random() < 0.4:
        return "entries", bytes(_entries(bytearray(data), rng))
    names = sorted(set(MUTATIONS) - ({"flip body"} if header >= len(data) else set()))
    kind = str(rng.choice(names))
    changed = bytearray(data)
    MUTATIONS[kind](changed, rng, header)
    return kind, bytes(changed)


def _tiny() -> DecoderLM:
    config = DecoderConfig(
        vocab_size=VOCABULARY_SIZE,
        num_layers=2,
        embed_dim=32,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        mlp_dim=32,
        max_positions=64,
    )
    rng = np.random.default_rng(0)
    model = jax.eval_shape(lambda: DecoderLM(config, key=jax.random.key(0)))
    return jax.tree.map(lambda a: jnp.asarray(0.1 * rng.normal(size=a.shape), a.dtype), model)


def _write_gguf(path: Path, config: DecoderConfig) -> None:
    """Other weights than the folders', each matrix stored in a way drawn for it."""
    rng = np.random.default_rng(0)
    write_gguf(
        path,
        config,
        {
            piece.name: rng.normal(size=piece.stored_shape)
            for pieces in parameter_pieces(config).values()
            for piece in pieces
        },
        kind=lambda name: str(rng.choice(["F32", "F16", "Q8_0", "Q4_1"])),
    )


def write_targets(folder: Path) -> list[tuple[Path, Path]]:
    """Writes the tiny model in both forms.

    Args:
      folder: An empty folder.

    Returns:
      Pairs of (file to damage, path to load).
    """
    model = _tiny()
    save_pretrained(folder / "plain", model)
    save_pretrained(folder / "parts", model, max_shard_bytes=20_000)
    _write_gguf(folder / "model.gguf", model.config)
    plain, parts, file = folder / "plain", folder / "parts", folder / "model.gguf"
    index = parts / "model.safetensors.index.json"
    shard = sorted(parts.glob("*.safetensors"))[0]
    return [
        (file, file),
        (plain / "model.safetensors", plain),
        (file, file),
        (plain / "config.json", plain),
        (index, parts),
        (shard, parts),
    ]


def _header(path: Path) -> int:
    data = path.read_bytes()
    if path.suffix == ".gguf":
        from jaxlib_papers.io.gguf import GGUFFile

        return min(tensor.start for tensor in GGUFFile(path).tensors.values())
    return 8 + int.from_bytes(data[:8], "little") if path.suffix == ".safetensors" else len(data)


def fuzz(config: FuzzConfig) -> Tally:
    """Runs all cases.

    Args:
      config: How many, and the seed.

    Raises:
      RuntimeError: An undamaged target cannot be read.
    """
    tally = Tally()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        targets = write_targets(folder)
        for _, where in targets:
            try:
                load_pretrained(where)
            except FormatError as error:
                raise RuntimeError(f"the undamaged {where.name} is refused: {error}") from error
        headers = [_header(file) for file, _ in targets]
        copies = folder / "damaged"
        resident = _resident()
        tracemalloc.start()
        for case in range(config.cases):
            which = case % len(targets)
            file, where = targets[which]
            rng = np.random.default_rng([config.seed, case])
            kind, data = mutate(file.read_bytes(), file.name, rng, headers[which])
            shutil.rmtree(copies, ignore_errors=True)
            if where.is_dir():
                shutil.copytree(where, copies)
                (copies / file.name).write_bytes(data)
                target = copies
            else:
                copies.mkdir()
                target = copies / file.name
                target.write_bytes(data)
            label = f"{file.suffix[1:]}: {kind}"
            tally.kinds[label] += 1
            _one(target, f"case {case} ({label})", tally)
        tracemalloc.stop()
        tally.resident = _resident() - resident
    if tally.resident > _RESIDENT:
        tally.failures.append(f"the process grew by {tally.resident / 2**20:.0f} MiB")
    return tally


def _resident() -> int:
    """Largest resident memory so far; the system counts it in KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _one(target: Path, label: str, tally: Tally) -> None:
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    try:
        load_pretrained(target)
        tally.loaded += 1
    except FormatError as error:
        if len(str(error)) < 20:
            tally.failures.append(f"{label}: says only {str(error)!r}")
        tally.refused += 1
    except Exception as error:  # what must not come out is what this looks for
        tally.failures.append(f"{label}: {type(error).__name__}: {error}")
    peak = tracemalloc.get_traced_memory()[1] - before
    tally.peak = max(tally.peak, peak)
    if peak > _MEMORY:
        tally.failures.append(f"{label}: took {peak / 2**20:.0f} MiB")


def main() -> None:
    """Command line; exits with 1 if a case fails."""
    tally = fuzz(tyro.cli(FuzzConfig, description=__doc__))
    for label, count in sorted(tally.kinds.items()):
        print(f"{count:6d}  {label}")
    print(
        f"{tally.refused} refused, {tally.loaded} loaded, {len(tally.failures)} failed; "
        f"largest case {tally.peak / 2**20:.1f} MiB, "
        f"process grew by {tally.resident / 2**20:.0f} MiB"
    )
    for failure in tally.failures[:20]:
        print(failure, file=sys.stderr)
    sys.exit(bool(tally.failures))


if __name__ == "__main__":
    main()
