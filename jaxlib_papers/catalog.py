"""The one list of the papers: what each is called, where it comes from and whether it is built.

The data lie in ``catalog.toml``. Facts are those known from the papers' public record; what is not
known is None or empty, never guessed. The README table and `cite` are made from this list.
"""

from __future__ import annotations

import difflib
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

__all__ = ["FIELDS", "PAPERS", "Paper", "cite", "paper"]

FIELDS = (
    "moe",
    "causal",
    "uncertainty",
    "lm",
    "rl",
    "unlearning",
    "multimodal",
    "diffusion",
    "science",
    "agents",
)
"""Sub-packages of `jaxlib_papers` that hold papers, in the order of the table."""


@dataclass(frozen=True)
class Paper:
    """One paper of the library.

    Attributes:
        slug: Name of the paper's module, experiment, tests and vectors.
        field: Sub-package that holds the module, one of `FIELDS`.
        short: Name that people use for the method.
        title: Full title.
        authors: Names as known (some by surname only), comma-separated; "others" at the end or in
            the middle stands for names that are not known, "" for none known.
        venue: Conference and, where known, the kind of presentation.
        arxiv: arXiv identifier without a version, or None.
        openreview: OpenReview forum identifier, or None.
        code: The authors' public repository on GitHub as "owner/name", or None. Licences differ,
            and nothing here is copied from it.
        reconstructed: Parts that the public record leaves open and that this library filled in.
    """

    slug: str
    field: str
    short: str
    title: str
    authors: str
    venue: str = "ICLR 2026"
    arxiv: str | None = None
    openreview: str | None = None
    code: str | None = None
    reconstructed: tuple[str, ...] = ()

    @property
    def module(self) -> str:
        """Dotted name of the module that holds the method."""
        return f"jaxlib_papers.{self.field}.{self.slug}"

    @property
    def experiment(self) -> str:
        """What follows ``python -m`` to reproduce the paper's mechanism."""
        return f"experiments.{self.slug}"

    @property
    def status(self) -> Literal["built", "planned"]:
        """Whether the module is there; looked up, so that it cannot go stale."""
        built = (Path(__file__).parent / self.field / f"{self.slug}.py").is_file()
        return "built" if built else "planned"

    @property
    def url(self) -> str | None:
        """The paper's page on arXiv, else on OpenReview, else None."""
        if self.arxiv:
            return f"https://arxiv.org/abs/{self.arxiv}"
        return f"https://openreview.net/forum?id={self.openreview}" if self.openreview else None


def _load() -> tuple[Paper, ...]:
    text = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    entries = tomllib.loads(text)
    return tuple(
        Paper(slug=slug, **entry | {"reconstructed": tuple(entry.get("reconstructed", ()))})
        for slug, entry in entries.items()
    )


PAPERS: tuple[Paper, ...] = _load()
"""Every paper, grouped by field in the order of `FIELDS`."""


def paper(slug: str) -> Paper:
    """The entry of one paper.

    Args:
        slug: e.g. "expert_divergence".

    Returns:
        The `Paper`.

    Raises:
        ValueError: There is no paper of that slug; the nearest one is named.
    """
    for entry in PAPERS:
        if entry.slug == slug:
            return entry
    near = difflib.get_close_matches(slug, [entry.slug for entry in PAPERS], n=1, cutoff=0.0)
    raise ValueError(f"slug: no paper is called {slug!r}; the nearest is {near[0]!r}")


def cite(slug: str) -> str:
    """BibTeX entry of a paper, with the fields that are known.

    Args:
        slug: e.g. "expert_divergence".

    Returns:
        One ``@inproceedings`` entry, keyed by the slug.

    Raises:
        ValueError: There is no paper of that slug.

    Example:
        >>> print(cite("trec"))
        @inproceedings{trec,
          title = {{Predicting Training Re-evaluation Curves Enables ... for LLMs}},
          author = {Bergsma and Dey and Hestness},
          booktitle = {ICLR},
          year = {2026},
          eprint = {2509.25380},
          archivePrefix = {arXiv},
          url = {https://arxiv.org/abs/2509.25380},
        }
    """
    entry = paper(slug)
    names = entry.authors.split(", ") if entry.authors else []
    # BibTeX knows "and others" at the end only.
    known = [name for name in names if name != "others"]
    author = " and ".join(known + ["others"] * ("others" in names))
    fields = {
        "title": f"{{{entry.title}}}",
        "author": author,
        "booktitle": "ICLR",
        "year": "2026",
        "eprint": entry.arxiv,
        "archivePrefix": "arXiv" if entry.arxiv else None,
        "url": entry.url,
    }
    lines = [f"  {key} = {{{value}}}," for key, value in fields.items() if value]
    return "\n".join([f"@inproceedings{{{entry.slug},", *lines, "}"])
