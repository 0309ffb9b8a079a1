"""Tokenizer of a pretrained model: from tokenizer.json or a GGUF's own vocabulary, with its chat.

Needs the packages `tokenizers` and, for chat templates, `jinja2` (extra `lm`). A template is run in
Jinja's sandbox: it comes with the weights, from whoever made them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxlib_papers.io.errors import FormatError
from jaxlib_papers.io.gguf import GGUFFile
from jaxlib_papers.io.sources import read_json

__all__ = ["PretrainedTokenizer", "tokenizer_from_folder", "tokenizer_from_gguf"]

_WORDS = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|"
    r"%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# How a GGUF names the way text is cut before merging: pattern (None: that of GPT-2), digits apart,
# whole words looked up before merging.
_CUTS: dict[str, tuple[str | None, bool, bool]] = {
    "gpt-2": (None, False, False),
    "smollm": (None, True, False),
    "llama-bpe": (_WORDS % r"\p{N}{1,3}", False, True),
    "qwen2": (_WORDS % r"\p{N}", False, False),
}
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4


class PretrainedTokenizer:
    """Text to ids and back, with special tokens and the chat template.

    It is also what the training pipeline asks of a tokenizer (`data.tokenizers.Tokenizer`).

    Args:
      backend: A `tokenizers.Tokenizer`.
      bos: Text of the token before a document, or None.
      eos: Text of the token that ends a text.
      pad: Text of the token in padded positions; None is that of ``eos``.
      add_bos: Whether prompts and documents get the bos token.
      stop: Texts of further tokens that end a generated text.
      chat_template: Jinja source, or None.
      where: The file, for messages.

    Attributes:
      vocab_size: One more than the largest id.
      bos_id: Id of ``bos``, or None.
      eos_id: Id of ``eos``.
      pad_id: Id of ``pad``.
      add_bos: As given.
      stop_ids: All ids that end a generated text.
      fingerprint: Changes when the same text may give other ids.
      chat_template: As given.

    Raises:
      FormatError: A special token is not in the vocabulary.
    """

    def __init__(
        self,
        backend: Any,
        *,
        eos: str,
        bos: str | None = None,
        pad: str | None = None,
        add_bos: bool = False,
        stop: Sequence[str] = (),
        chat_template: str | None = None,
        where: str = "tokenizer",
    ):
        self._backend, self._where = backend, where
        backend.no_truncation()
        backend.no_padding()
        vocabulary = backend.get_vocab(with_added_tokens=True)
        names = {"bos": bos, "eos": eos, "pad": eos if pad is None else pad}
        for role, token in (*names.items(), *(("stop", s) for s in stop)):
            if token is not None and token not in vocabulary:
                raise FormatError(f"{where}: the {role} token {token!r} is not in the vocabulary")
        if add_bos and bos is None:
            raise FormatError(f"{where}: a bos token is to be added, and none is named")
        self._names = names
        self.vocab_size = max(vocabulary.values()) + 1
        self.bos_id = None if bos is None else vocabulary[bos]
        self.eos_id, self.pad_id = vocabulary[names["eos"]], vocabulary[names["pad"]]
        self.add_bos = add_bos
        self.stop_ids = tuple(sorted({self.eos_id, *(vocabulary[s] for s in stop)}))
        self.chat_template = chat_template
        digest = hashlib.sha256(backend.to_str().encode()).hexdigest()
        self.fingerprint = f"hf-{digest}-{self.bos_id if add_bos else None},{self.eos_id}"

    def encode(self, text: str) -> np.ndarray:
        """Ids of a text, int32 [n]; special tokens written in it become their ids."""
        return np.asarray(self._backend.encode(text, add_special_tokens=False).ids, np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of several texts, encoded in parallel."""
        found = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, np.int32) for encoding in found]

    def encode_prompt(self, text: str) -> np.ndarray:
        """Ids of a text that a model is to continue, with the bos token where it wants one."""
        ids = self.encode(text)
        if not self.add_bos or self.bos_id is None or (ids.size and ids[0] == self.bos_id):
            return ids
        return np.concatenate([np.asarray([self.bos_id], np.int32), ids])

    def decode(self, ids: Any, *, skip_special: bool = True) -> str:
        """Text of ids; special tokens give nothing unless ``skip_special`` is False."""
        flat = [int(i) for i in np.asarray(ids).reshape(-1)]
        return self._backend.decode(flat, skip_special_tokens=skip_special)

    def chat(
        self, messages: Sequence[Mapping[str, str]] | str, *, add_generation_prompt: bool = True
    ) -> str:
        """A conversation as the text that the model was tuned on.

        Args:
          messages: Mappings with "role" and "content"; a string is one message of the user.
          add_generation_prompt: End with the beginning of the assistant's answer.

        Raises:
          ValueError: There is no chat template, or it refuses the messages.
        """
        if self.chat_template is None:
            raise ValueError(
                f"{self._where} has no chat template; this is a base model: encode the text itself"
            )
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        import jinja2
        import jinja2.sandbox

        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = lambda x, **kw: json.dumps(x, ensure_ascii=False, **kw)

        def raise_exception(message: str) -> None:
            raise jinja2.TemplateError(message)

        try:
            return environment.from_string(self.chat_template).render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                raise_exception=raise_exception,
                bos_token=self._names["bos"] or "",
                eos_token=self._names["eos"],
                pad_token=self._names["pad"],
            )
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            ArithmeticError,
            LookupError,
        ) as error:
            raise ValueError(f"{self._where}: the chat template fails: {error}") from error

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes tokenizer.json and tokenizer_config.json, as transformers reads them."""
        folder = Path(folder)
        self._backend.save(str(folder / "tokenizer.json"))
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "add_bos_token": self.add_bos,
            **{f"{role}_token": token for role, token in self._names.items() if token is not None},
        }
        if self.chat_template is not None:
            settings["chat_template"] = self.chat_template
        text = json.dumps(settings, indent=2, ensure_ascii=False)
        (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def _package() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise FormatError(
            "reading a tokenizer needs the package 'tokenizers'; install jaxlib-papers[lm]"
        ) from error
    return tokenizers


def _token_text(entry: Any) -> str | None:
    return entry.get("content") if isinstance(entry, Mapping) else entry


def _template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template}
        template = named.get("default")
    return template


def tokenizer_from_folder(path: str | os.PathLike[str]) -> PretrainedTokenizer:
    """The tokenizer of a Hugging Face folder.

    Reads tokenizer.json, and where they are there tokenizer_config.json (special tokens, chat
    template), chat_template.jinja and generation_config.json (further tokens that end a text).

    Args:
      path: The folder.

    Raises:
      FormatError: A file is missing or damaged, or no token is named as the end of a text.
    """
    folder = Path(path)
    file = folder / "tokenizer.json"
    try:
        backend = _package().Tokenizer.from_buffer(file.read_bytes())
    except OSError as error:
        raise FormatError(f"{file}: cannot be read: {error}; pass tokenizer=None") from error
    except Exception as error:  # the package raises bare Exception
        raise FormatError(f"{file}: no valid tokenizer: {error}") from error

    def optional(name: str) -> dict[str, Any]:
        return read_json(folder / name) if (folder / name).is_file() else {}

    settings, generation = optional("tokenizer_config.json"), optional("generation_config.json")
    model = optional("config.json")
    stop = generation.get("eos_token_id", model.get("eos_token_id"))
    stop = [] if stop is None else [stop] if isinstance(stop, int) else stop
    stop = [backend.id_to_token(i) for i in stop if isinstance(i, int) and i >= 0]
    stop = [token for token in stop if token is not None]
    bos, eos = _token_text(settings.get("bos_token")), _token_text(settings.get("eos_token"))
    eos = eos or (stop[0] if stop else None)
    if eos is None:
        raise FormatError(
            f"{folder}: neither tokenizer_config.json nor generation_config.json names the eos "
            "token; add one of them"
        )
    if bos is None and isinstance(model.get("bos_token_id"), int):
        bos = backend.id_to_token(model["bos_token_id"])
    add_bos = settings.get("add_bos_token")
    if add_bos is None:
        # Version 5 leaves it to the post-processor: see what that one puts before a text.
        ids = backend.encode("a", add_special_tokens=True).ids
        add_bos = bos is not None and bool(ids) and ids[0] == backend.token_to_id(bos)
    return PretrainedTokenizer(
        backend,
        bos=bos,
        eos=eos,
        pad=_token_text(settings.get("pad_token")),
        add_bos=bool(add_bos),
        stop=stop,
        chat_template=_template(folder, settings),
        where=str(folder),
    )


def tokenizer_from_gguf(file: GGUFFile) -> PretrainedTokenizer:
    """The tokenizer inside a GGUF file: byte-level BPE with its vocabulary and merges.

    Args:
      file: An opened file.

    Raises:
      FormatError: There is none, it is of another kind, or its parts don't fit each other.
    """
    metadata = file.metadata

    def get(name: str, kind: type, default: Any = None) -> Any:
        value = metadata.get(f"tokenizer.{name}", default)
        if value is not default and not isinstance(value, kind):
            raise FormatError(f"{file.path}: tokenizer.{name} is no {kind.__name__}")
        return value

    model, cut = get("ggml.model", str), get("ggml.pre", str, "gpt-2")
    if model != "gpt2" or cut not in _CUTS:
        raise FormatError(
            f"{file.path}: its tokenizer is {model!r} with pre-tokenizer {cut!r}, expected 'gpt2' "
            f"with one of {', '.join(_CUTS)}; pass tokenizer= the folder of a tokenizer.json"
        )
    tokens, merges = get("ggml.tokens", list), get("ggml.merges", list)
    if not tokens or merges is None:
        raise FormatError(f"{file.path}: its tokenizer has no tokens or no merges")
    if len(set(tokens)) != len(tokens) or not all(isinstance(t, str) for t in tokens):
        raise FormatError(f"{file.path}: tokenizer.ggml.tokens are not distinct texts")
    kinds = get("ggml.token_type", np.ndarray)
    kinds = np.full(len(tokens), _NORMAL) if kinds is None else kinds
    if len(kinds) != len(tokens):
        raise FormatError(f"{file.path}: {len(kinds)} token types for {len(tokens)} tokens")

    def token(role: str) -> str | None:
        index = get(f"ggml.{role}_token_id", int)
        if index is not None and not 0 <= index < len(tokens):
            raise FormatError(f"{file.path}: {role} token {index} of {len(tokens)} tokens")
        return None if index is None else tokens[index]

    eos = token("eos")
    if eos is None:
        raise FormatError(f"{file.path}: tokenizer.ggml.eos_token_id is missing")
    end_of_turn = token("eot")
    return PretrainedTokenizer(
        _byte_pairs(file, tokens, merges, kinds, cut),
        bos=token("bos"),
        eos=eos,
        pad=token("padding"),
        add_bos=get("ggml.add_bos_token", bool, False),
        stop=[] if end_of_turn is None else [end_of_turn],
        chat_template=get("chat_template", str),
        where=str(file.path),
    )


def _byte_pairs(
    file: GGUFFile, tokens: list[str], merges: list[Any], kinds: np.ndarray, cut: str
) -> Any:
    package = _package()
    pairs = [tuple(merge.split(" ")) if isinstance(merge, str) else () for merge in merges]
    if any(len(pair) != 2 for pair in pairs):
        raise FormatError(f"{file.path}: a merge in tokenizer.ggml.merges is no pair of tokens")
    pattern, digits, whole_words = _CUTS[cut]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    try:
        model = package.models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=whole_words)
    except Exception as error:  # the package raises bare Exception
        raise FormatError(f"{file.path}: vocabulary and merges don't fit: {error}") from error
    backend = package.Tokenizer(model)
    pre = package.pre_tokenizers
    steps = [pre.Digits(individual_digits=True)] if digits else []
    if pattern is not None:
        steps.append(pre.Split(package.Regex(pattern), behavior="isolated"))
    steps.append(pre.ByteLevel(add_prefix_space=False, use_regex=pattern is None))
    backend.pre_tokenizer = pre.Sequence(steps)
    backend.decoder = package.decoders.ByteLevel()
    if cut == "qwen2":
        backend.normalizer = package.normalizers.NFC()
    for kind, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        added = [tokens[i] for i in np.flatnonzero(np.asarray(kinds) == kind)]
        added = [
            package.AddedToken(token, special=special, normalized=False) for token in added if token
        ]
        (backend.add_special_tokens if special else backend.add_tokens)(added)
    return backend
