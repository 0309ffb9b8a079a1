"""Sphinx configuration. API pages are made from the docstrings at each build; no network needed."""

import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
sys.path.insert(0, str(ROOT))

import jaxlib_papers  # noqa: E402

project = "jaxlib-papers"
author = "the jaxlib-papers authors"
release = version = jaxlib_papers.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"{project} {release}"

# Annotations stay as the source writes them (Float[Array, "batch seq"]), in the signature.
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
default_role = "literal"  # `name` in a docstring is code, as in Markdown

PACKAGES = {
    "jaxlib_papers": "The library",
    "kernels_pallas": "The kernels",
}


def public_modules(package: str) -> list[str]:
    """Modules and packages below `package` that have public names, without helpers."""
    names = []
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[-1] == "__init__":
            parts = parts[:-1]
        if not any(part.startswith("_") for part in parts) and "__all__" in path.read_text():
            names.append(".".join(parts))
    return names


def write_api_pages() -> None:
    """One page a module and one index, rewritten only when the text changes."""
    place = DOCS / "api" / "_generated"
    place.mkdir(parents=True, exist_ok=True)
    wanted = {}
    index = ["# API", ""]
    for package, title in PACKAGES.items():
        modules = public_modules(package)
        index += [f"## {title}", "", "```{toctree}", ":maxdepth: 1", "", *modules, "```", ""]
        for module in modules:
            wanted[f"{module}.md"] = (
                f"# {module}\n\n```{{eval-rst}}\n.. automodule:: {module}\n   :members:\n```\n"
            )
    wanted["index.md"] = "\n".join(index)
    for old in place.glob("*.md"):
        if old.name not in wanted:
            old.unlink()
    for name, text in wanted.items():
        path = place / name
        if not path.is_file() or path.read_text() != text:
            path.write_text(text)


write_api_pages()
