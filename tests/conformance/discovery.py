"""Finds the public modules, names and Flax classes of the library by looking, not by a list."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from flax import nnx

import jaxlib_papers
import kernels_pallas


def module_names() -> list[str]:
    """Every module of both packages, helpers (leading underscore) included."""
    found = []
    for package in (jaxlib_papers, kernels_pallas):
        found.append(package.__name__)
        found += [m.name for m in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
    return sorted(found)


def is_public(name: str) -> bool:
    return not any(part.startswith("_") for part in name.split("."))


def declared_all(module: str) -> list[str]:
    """The module's `__all__`, read without importing it, so that collection cannot fail."""
    spec = find_spec(module)
    assert spec is not None and spec.origin is not None
    for node in ast.parse(Path(spec.origin).read_text()).body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if any(isinstance(t, ast.Name) and t.id == "__all__" for t in targets):
            return ast.literal_eval(node.value)
    return []


def public_names() -> list[tuple[str, str]]:
    """(module, name) for every name in the `__all__` of a public module."""
    return [
        (module, name)
        for module in filter(is_public, module_names())
        for name in declared_all(module)
    ]


def defined_here(module: ModuleType) -> dict[str, Any]:
    """Functions and classes that the module itself defines, by name."""
    return {
        name: value
        for name, value in vars(module).items()
        if (inspect.isfunction(inspect.unwrap(value)) or inspect.isclass(value))
        and getattr(value, "__module__", None) == module.__name__
    }


def module_classes() -> list[type[nnx.Module]]:
    """Every concrete public `nnx.Module` class, by qualified name."""
    found = {}
    for name in filter(is_public, module_names()):
        for value in defined_here(importlib.import_module(name)).values():
            if inspect.isclass(value) and issubclass(value, nnx.Module):
                if not value.__name__.startswith("_") and not inspect.isabstract(value):
                    found[f"{name}.{value.__name__}"] = value
    return [found[key] for key in sorted(found)]
