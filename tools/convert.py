"""Rewrites a language model as a Hugging Face folder.

    python -m tools.convert --source model.gguf --out folder

The source is a GGUF file, a Hugging Face folder, or "smollm2". Weights are decoded, the rows of
query and key put into the half-split order, and the tokenizer written beside them.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import tyro

from jaxlib_papers.io.pretrained import load_pretrained, save_pretrained

__all__ = ["ConvertConfig", "convert", "main"]


@dataclasses.dataclass(frozen=True)
class ConvertConfig:
    """Conversion to a Hugging Face folder."""

    source: str
    """GGUF file, Hugging Face folder, or "smollm2"."""
    out: str
    """Folder to write; made when it is not there."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the written weights."""
    num_layers: int | None = None
    """Only the first layers."""
    tokenizer: str | None = None
    """Folder of a tokenizer.json to use instead of the source's own."""
    max_shard_gb: float = 2.0
    """Largest file of weights in GB."""


def convert(config: ConvertConfig) -> None:
    """Does it.

    Raises:
      ValueError: The source cannot be read, or the result cannot be written.
    """
    model, _, tokenizer = load_pretrained(
        config.source,
        param_dtype=config.dtype,
        num_layers=config.num_layers,
        tokenizer=config.tokenizer or "auto",
    )
    save_pretrained(config.out, model, tokenizer, max_shard_bytes=config.max_shard_gb * 1e9)


def main() -> None:
    """Command line."""
    config = tyro.cli(ConvertConfig, description=__doc__)
    try:
        convert(config)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error
    print(f"wrote {config.out}")


if __name__ == "__main__":
    main()
