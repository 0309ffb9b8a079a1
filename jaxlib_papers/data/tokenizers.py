"""Tokenizers: bytes (built in) and any Hugging Face `tokenizer.json`."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxlib_papers.data.errors import DataError

__all__ = ["ByteTokenizer", "HFTokenizer", "Tokenizer", "check_vocabulary", "make_tokenizer"]


class Tokenizer(Protocol):
    """What the pipeline needs of a tokenizer.

    Attributes:
        vocab_size: one more than the largest id.
        bos_id: id put before a document when `add_bos`, or None.
        eos_id: id put after each document.
        pad_id: id in padded positions.
        add_bos: whether documents get a `bos_id`.
        fingerprint: changes when the same text may give other ids.
    """

    @property
    def vocab_size(self) -> int: ...  # noqa: D102
    @property
    def bos_id(self) -> int | None: ...  # noqa: D102
    @property
    def eos_id(self) -> int: ...  # noqa: D102
    @property
    def pad_id(self) -> int: ...  # noqa: D102
    @property
    def add_bos(self) -> bool: ...  # noqa: D102
    @property
    def fingerprint(self) -> str: ...  # noqa: D102

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of a text, int32 [n], without special tokens."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of several texts."""
        ...

    def decode(self, ids: Any) -> str:
        """Return the text of ids; special tokens give nothing."""
        ...


class ByteTokenizer:
    """One token per byte of UTF-8: ids 0-255, then bos 256, eos 257, pad 258.

    `decode(encode(text)) == text` for every text; ids that are no complete UTF-8 sequence decode to
    U+FFFD.
    """

    vocab_size = 259
    bos_id = 256
    eos_id = 257
    pad_id = 258

    def __init__(self, *, add_bos: bool = False):
        self.add_bos = add_bos
        self.fingerprint = f"byte-1{'+bos' if add_bos else ''}"

    def encode(self, text: str) -> np.ndarray:
        """Return the bytes of a text, int32 [n]."""
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the bytes of several texts."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Any) -> str:
        """Return the text of ids; special tokens give nothing."""
        array = np.asarray(ids).reshape(-1)
        if array.size and (array.min() < 0 or array.max() >= self.vocab_size):
            raise DataError(f"ids must be in 0..{self.vocab_size - 1}, got {array.max()}")
        return array[array < 256].astype(np.uint8).tobytes().decode("utf-8", "replace")


# Names under which published tokenizers have their special tokens, most specific first.
_EOS = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "<|im_end|>", "<|eot_id|>", "[SEP]")
_BOS = ("<s>", "<|begin_of_text|>", "<bos>", "<|im_start|>", "<|endoftext|>", "[CLS]")
_PAD = ("<pad>", "<|pad|>", "[PAD]", "<|endoftext|>", "<|finetune_right_pad_id|>")


class HFTokenizer:
    """A `tokenizer.json` of Hugging Face, read by the `tokenizers` package (extra `lm`).

    Args:
        path: the file, or the folder that holds it.
        add_bos: put the bos token before each document.
        bos_token, eos_token, pad_token: names of the special tokens. The file does not say which
            token has which role; None takes the first usual name that the vocabulary has (pad falls
            back to eos).

    Raises:
        DataError: missing or unreadable file, a special token that is not in the vocabulary, or no
            eos token found.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        add_bos: bool = False,
        bos_token: str | None = None,
        eos_token: str | None = None,
        pad_token: str | None = None,
    ):
        file = Path(path).expanduser()
        if file.is_dir():
            file = file / "tokenizer.json"
        if not file.is_file():
            raise DataError(f"tokenizer {str(path)!r}: no such file; expected a tokenizer.json")
        try:
            import tokenizers
        except ImportError as error:
            raise DataError(
                "reading a tokenizer.json needs the package 'tokenizers'; install jaxlib-papers[lm]"
            ) from error
        raw = file.read_bytes()
        try:
            # The class is compiled and its stub lacks this method.
            backend: Any = tokenizers.Tokenizer
            self._backend = backend.from_buffer(raw)
        except Exception as error:  # the package raises bare Exception and ValueError
            raise DataError(f"tokenizer {str(file)!r} cannot be read: {error}") from error
        # Rows have a length of their own, so the file's truncation or padding must not act.
        self._backend.no_truncation()
        self._backend.no_padding()
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise DataError(f"tokenizer {str(file)!r} has an empty vocabulary")
        self.vocab_size = max(vocabulary.values()) + 1
        eos = _special(vocabulary, "eos_token", eos_token, _EOS)
        if eos is None:
            raise DataError(
                f"tokenizer {str(file)!r} has none of the usual end-of-text tokens "
                f"({', '.join(_EOS)}); name it with eos_token"
            )
        self.eos_id = eos
        self.bos_id = _special(vocabulary, "bos_token", bos_token, _BOS)
        pad = _special(vocabulary, "pad_token", pad_token, _PAD)
        self.pad_id = eos if pad is None else pad
        if add_bos and self.bos_id is None:
            raise DataError(f"tokenizer {str(file)!r} has no bos token; name it with bos_token")
        self.add_bos = add_bos
        roles = f"{self.bos_id if add_bos else None},{self.eos_id}"
        self.fingerprint = f"hf-{hashlib.sha256(raw).hexdigest()}-{roles}"

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of a text, int32 [n], without special tokens."""
        return np.asarray(self._backend.encode(text, add_special_tokens=False).ids, np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of several texts, encoded in parallel."""
        found = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, np.int32) for encoding in found]

    def decode(self, ids: Any) -> str:
        """Return the text of ids; special tokens give nothing."""
        flat = [int(i) for i in np.asarray(ids).reshape(-1)]
        return self._backend.decode(flat, skip_special_tokens=True)


def _special(
    vocabulary: dict[str, int], argument: str, chosen: str | None, usual: tuple[str, ...]
) -> int | None:
    if chosen is not None:
        if chosen not in vocabulary:
            raise DataError(f"{argument}={chosen!r} is not in the tokenizer's vocabulary")
        return vocabulary[chosen]
    return next((vocabulary[name] for name in usual if name in vocabulary), None)


def make_tokenizer(spec: str | None = None, **options: Any) -> Tokenizer:
    """Return a tokenizer.

    Args:
        spec: None or "byte" for bytes; otherwise the path of a `tokenizer.json` or of its folder.
        **options: `add_bos`, and for a `tokenizer.json` also `bos_token`, `eos_token`, `pad_token`.

    Raises:
        DataError: see `HFTokenizer`.
    """
    if spec is None or spec == "byte":
        return ByteTokenizer(**options)
    return HFTokenizer(spec, **options)


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Check that a model with `vocab_size` embeddings has one for every token.

    Raises:
        DataError: the tokenizer has larger ids than the model has rows.
    """
    if vocab_size < tokenizer.vocab_size:
        raise DataError(
            f"vocab_size={vocab_size} is smaller than the tokenizer's {tokenizer.vocab_size}; "
            f"set the model's vocab_size to at least {tokenizer.vocab_size}"
        )
