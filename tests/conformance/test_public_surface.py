"""One sweep over every public name: it exists, is documented, and says where it comes from."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re

import pytest

from jaxlib_papers.catalog import FIELDS
from tests.conformance.discovery import defined_here, is_public, module_names, public_names

MODULES = module_names()
PUBLIC_MODULES = [name for name in MODULES if is_public(name)]
NAMES = public_names()
# Plumbing (argument checks, masks, moving rows): there is no paper that it comes from.
WITHOUT_SOURCE = {f"jaxlib_papers.ops.{name}" for name in ("checks", "expert_dispatch", "masked")}
# Textbook quantities and checks of arguments, likewise.
TEXTBOOK = re.compile(r"check_\w+|entropy|expert_counts|token_log_probs")
SOURCE = re.compile(r"arXiv|reconstructed|Source:|equation|Eq\.|RFC|section \d", re.IGNORECASE)


def document(value) -> str:
    return inspect.getdoc(inspect.unwrap(value)) or ""


def needs_source(module: str) -> bool:
    parts = module.split(".")
    return parts[0] == "jaxlib_papers" and len(parts) > 2 and parts[1] in ("ops", *FIELDS)


MATHEMATICS = [pair for pair in NAMES if needs_source(pair[0])]


@pytest.mark.parametrize("name", MODULES)
def test_module_imports_and_has_a_docstring(name):
    module = importlib.import_module(name)
    assert (module.__doc__ or "").strip(), f"{name} says nothing about itself"


@pytest.mark.parametrize("name", PUBLIC_MODULES)
def test_all_is_the_whole_public_surface(name):
    module = importlib.import_module(name)
    exported = list(getattr(module, "__all__", ()))
    assert len(exported) == len(set(exported)), "a name stands twice in __all__"
    assert [n for n in exported if not hasattr(module, n)] == []
    unlisted = {n for n in defined_here(module) if not n.startswith("_")} - set(exported)
    assert unlisted == set(), f"{name}: public by name but not in __all__"


@pytest.mark.parametrize(("module", "name"), NAMES, ids=map(".".join, NAMES))
def test_public_name_is_documented(module, name):
    value = getattr(importlib.import_module(module), name)
    if not (inspect.isfunction(inspect.unwrap(value)) or inspect.isclass(value)):
        return  # constants and type aliases are documented where they are defined
    text = document(value)
    assert len(text.split()) >= 3, f"{module}.{name} has no docstring"
    # The docstring that a dataclass or NamedTuple makes for itself is its signature.
    assert not re.match(rf"{re.escape(name)}\(", text), f"{module}.{name} has no docstring"


@pytest.mark.parametrize(("module", "name"), MATHEMATICS, ids=map(".".join, MATHEMATICS))
def test_mathematics_names_its_source(module, name):
    value = getattr(importlib.import_module(module), name)
    home = getattr(inspect.unwrap(value), "__module__", module)
    if (
        home in WITHOUT_SOURCE
        or TEXTBOOK.fullmatch(name)
        or not inspect.isfunction(inspect.unwrap(value))
    ):
        return
    text = document(value)
    if module.startswith("jaxlib_papers.ops."):  # one idea a file: its docstring may say it for all
        text += importlib.import_module(home).__doc__ or ""
    assert SOURCE.search(text), f"{module}.{name} does not say where it comes from"


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_run(name):
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    result = doctest.testmod(importlib.import_module(name), optionflags=flags)
    assert result.failed == 0


class TestTheChecksThemselves:
    def test_source_pattern(self):
        assert SOURCE.search("Source: arXiv 2603.00054, training objective")
        assert SOURCE.search("the z term (reconstructed)")
        assert not SOURCE.search("Adds two arrays.")

    def test_fields_and_ops_are_swept(self):
        swept = {module.split(".")[1] for module, _ in MATHEMATICS}
        assert {"ops", "moe"} <= swept
