"""Multiple-choice questions as JSONL {prompt, target, choices}, made here or brought along.

Four tasks come from what every installation has: sums, the kind of a snippet of text (documents of
installed packages), the kind of a Python name, the first word by alphabet. A fifth, the language of
a phrase, is added where the package `sphinx` (extra "docs") with its translations is installed.
The two "kind" tasks are classifications: their options stand in one order, so that a letter is a
class. In the others a small model has to tie letters to options first, which takes long.

A file of one's own (ARC, HellaSwag, OpenBookQA ... as JSONL) takes their place: one object a line,
"prompt" the question, "choices" the texts of the options, "target" the letter, the text or the
number (from 0) of the right one, and "task" if there are several.
"""

from __future__ import annotations

import builtins
import gettext
import hashlib
import importlib.util
import json
import keyword
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxlib_papers.data.embedded import EmbeddedSource

__all__ = ["LETTERS", "Question", "make_questions", "read_jsonl", "split", "write_jsonl"]

LETTERS = "ABCDEFGHIJ"
_KINDS = {
    "python": "Python code",
    "prose": "English documentation",
    "c_headers": "C header",
    "numbers": "table of numbers",
}
_LANGUAGES = {
    "de": "German",
    "es": "Spanish",
    "fr": "French",
    "it": "Italian",
    "nl": "Dutch",
    "pl": "Polish",
    "pt_BR": "Portuguese",
    "sv": "Swedish",
}


class Question(NamedTuple):
    """One multiple-choice question.

    Attributes:
        task: name of its task.
        prompt: the question.
        choices: texts of the options.
        target: index of the right one.
    """

    task: str
    prompt: str
    choices: tuple[str, ...]
    target: int

    def text(self) -> str:
        """The prompt as the paper has it: instruction, question, options, "Answer:"."""
        options = "".join(
            f"{letter}. {choice}\n" for letter, choice in zip(LETTERS, self.choices, strict=False)
        )
        return f"Answer with one letter.\n{self.prompt}\nOptions:\n{options}Answer:"


def _ask(
    task: str, prompt: str, right: str, wrong: list[str], rng: np.random.Generator | None
) -> Question:
    """A question; options that are the same in every question of a task keep their order (None)."""
    if rng is None:
        options = sorted([right, *wrong])
        return Question(task, prompt, tuple(options), options.index(right))
    choices = [right, *wrong]
    order = rng.permutation(len(choices))
    return Question(task, prompt, tuple(choices[i] for i in order), int(np.argmin(order)))


def _sums(rng: np.random.Generator) -> Iterator[Question]:
    while True:
        a, b = (int(n) for n in rng.integers(2, 50, 2))
        sign = "+" if rng.random() < 0.5 else "-"
        right = a + b if sign == "+" else a - b
        near = [right + d for d in (-11, -10, -2, -1, 1, 2, 10, 11)]
        wrong = [str(near[i]) for i in rng.choice(len(near), 3, replace=False)]
        yield _ask("sum", f"What is {a} {sign} {b}?", str(right), wrong, rng)


def _snippets(rng: np.random.Generator) -> Iterator[Question]:
    texts: dict[str, list[str]] = {}
    for document in EmbeddedSource().documents():
        texts.setdefault(document.domain, []).append(document.text)
    kinds = sorted(texts)
    while True:
        kind = kinds[int(rng.integers(len(kinds)))]
        text = texts[kind][int(rng.integers(len(texts[kind])))]
        start = int(rng.integers(max(1, len(text) - 90)))
        snippet = " ".join(text[start : start + 90].split())
        wrong = [name for other, name in _KINDS.items() if other != kind]
        yield _ask("snippet", f"What is this? {snippet}", _KINDS[kind], wrong, None)


def _names(rng: np.random.Generator) -> Iterator[Question]:
    public = [name for name in dir(builtins) if not name.startswith("_")]
    errors = [
        name
        for name in public
        if isinstance(getattr(builtins, name), type)
        and issubclass(getattr(builtins, name), BaseException)
    ]
    groups = {
        "keyword": [word for word in keyword.kwlist if word.islower()],
        "exception": errors,
        "built-in function": [name for name in public if name.islower() and name not in errors],
        "standard module": [name for name in sys.stdlib_module_names if not name.startswith("_")],
    }
    kinds = sorted(groups)
    # As many of each kind, or most answers would be "standard module".
    fewest = min(map(len, groups.values()))
    for name, words in groups.items():
        groups[name] = [str(word) for word in rng.permutation(sorted(words))[:fewest]]
    while True:
        kind = kinds[int(rng.integers(len(kinds)))]
        word = groups[kind][int(rng.integers(len(groups[kind])))]
        prompt = f"In Python, what is {word}?"
        yield _ask("name", prompt, kind, [other for other in kinds if other != kind], None)


def _alphabet(rng: np.random.Generator) -> Iterator[Question]:
    words = sorted({name for name in sys.stdlib_module_names if name.isalpha() and len(name) > 3})
    while True:
        four = [words[i] for i in rng.choice(len(words), 4, replace=False)]
        first = min(four)
        wrong = [word for word in four if word != first]
        yield _ask("alphabet", "Which word comes first in a dictionary?", first, wrong, rng)


def _phrases() -> dict[str, list[str]]:
    """Translated phrases by language, from Sphinx's catalogues if it is installed."""
    spec = importlib.util.find_spec("sphinx")
    if spec is None or spec.origin is None:
        return {}
    found = {}
    for code, name in _LANGUAGES.items():
        file = Path(spec.origin).parent / "locale" / code / "LC_MESSAGES" / "sphinx.mo"
        if not file.is_file():
            continue
        with file.open("rb") as opened:
            catalogue = gettext.GNUTranslations(opened)._catalog  # type: ignore[attr-defined]
        texts = sorted({v for k, v in catalogue.items() if isinstance(k, str) and k != v})
        found[name] = [t for t in texts if 20 <= len(t) <= 90 and "%" not in t and "\n" not in t]
    return {name: texts for name, texts in found.items() if len(texts) >= 10}


def _languages(phrases: dict[str, list[str]]) -> Callable[[np.random.Generator], Iterator]:
    def questions(rng: np.random.Generator) -> Iterator[Question]:
        names = sorted(phrases)
        while True:
            four = [names[i] for i in rng.choice(len(names), 4, replace=False)]
            text = phrases[four[0]][int(rng.integers(len(phrases[four[0]])))]
            yield _ask("language", f"Which language is this? {text}", four[0], four[1:], rng)

    return questions


def make_questions(per_task: int, seed: int = 0) -> list[Question]:
    """Distinct questions of every task that this installation can make.

    Args:
        per_task: number a task (fewer where a task has no more).
        seed: decides which.
    """
    makers = {"sum": _sums, "snippet": _snippets, "name": _names, "alphabet": _alphabet}
    phrases = _phrases()
    if len(phrases) >= 4:
        makers["language"] = _languages(phrases)
    questions = []
    for number, maker in enumerate(makers.values()):
        found: dict[str, Question] = {}
        source = maker(np.random.default_rng([seed, number]))
        for _ in range(20 * per_task):
            question = next(source)
            found.setdefault(question.prompt + "|".join(sorted(question.choices)), question)
            if len(found) == per_task:
                break
        questions += found.values()
    return questions


def split(questions: list[Question], test_share: float) -> tuple[list[Question], list[Question]]:
    """Training and test questions; a prompt is on one side only, whatever the seed."""
    train, test = [], []
    for question in questions:
        digest = hashlib.sha256(f"{question.prompt}|{question.choices}".encode()).digest()
        # Equal prompts with other options (the alphabet) are other questions.
        share = int.from_bytes(digest[:4], "big") / 2**32
        (test if share < test_share else train).append(question)
    return train, test


def write_jsonl(questions: list[Question], path: Path) -> None:
    """Writes questions as `read_jsonl` reads them."""
    lines = (
        json.dumps(
            {
                "task": q.task,
                "prompt": q.prompt,
                "choices": list(q.choices),
                "target": LETTERS[q.target],
            },
            ensure_ascii=False,
        )
        for q in questions
    )
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_jsonl(path: Path) -> list[Question]:
    """Reads questions from a file.

    Raises:
        ValueError: an empty file, or a line that is no question; the message names the line.
    """
    questions = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            entry = json.loads(line)
            prompt, target = entry["prompt"], entry["target"]
            choices = [str(choice) for choice in entry["choices"]]
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"{where}: expected an object with prompt, target and choices: {error!r}"
            ) from error
        if not 2 <= len(choices) <= len(LETTERS) or len(set(choices)) != len(choices):
            raise ValueError(f"{where}: expected 2 to {len(LETTERS)} different choices")
        index = target
        if isinstance(target, str):
            letters = list(LETTERS[: len(choices)])
            # The text wins where an option is itself a letter.
            index = choices.index(target) if target in choices else None
            if index is None and target.strip() in letters:
                index = letters.index(target.strip())
        if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < len(choices):
            raise ValueError(
                f"{where}: target is {target!r}, expected a letter, a text or a number of choices"
            )
        questions.append(Question(str(entry.get("task", path.stem)), prompt, tuple(choices), index))
    if not questions:
        raise ValueError(f"{path} holds no question")
    return questions
