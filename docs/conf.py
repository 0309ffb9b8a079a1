"""Sphinx configuration. API pages are made from the docstrings at each build; no network needed."""

import importlib
import re
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
napoleon_attr_annotations = False  # the signature has them; unescaped axes break the markup
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


def module_page(name: str) -> str:
    """The page of one module; what it only passes on from another public module is a line."""
    module = importlib.import_module(name)
    here, elsewhere = [], []
    for member in module.__all__:
        home = getattr(getattr(module, member), "__module__", name)
        public = home != name and not any(part.startswith("_") for part in home.split("."))
        if public and home.split(".")[0] in PACKAGES:
            elsewhere.append(f"`{member}` (from `{home}`)")
        else:
            here.append(member)
    lines = [f"# {name}", "", "```{eval-rst}", f".. automodule:: {name}"]
    lines += [f"   :members: {', '.join(here)}"] * bool(here) + ["```", ""]
    lines += ["Also importable from here: " + ", ".join(elsewhere) + ".", ""] * bool(elsewhere)
    return "\n".join(lines)


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
            wanted[f"{module}.md"] = module_page(module)
    wanted["index.md"] = "\n".join(index)
    for old in place.glob("*.md"):
        if old.name not in wanted:
            old.unlink()
    for name, text in wanted.items():
        path = place / name
        if not path.is_file() or path.read_text() != text:
            path.write_text(text)


def as_list_table(rows: list[str]) -> list[str]:
    """A Markdown table of a docstring in the form that Sphinx reads."""
    cells = [[cell.strip() for cell in row.strip().strip("|").split("|")] for row in rows]
    out = [".. list-table::", "   :header-rows: 1", ""]
    for row in [cells[0], *cells[2:]]:
        out += [f"   {'* -' if i == 0 else '  -'} {cell}" for i, cell in enumerate(row)]
    return ["", *out, ""]


def convert_markdown(app, what, name, obj, options, lines: list[str]) -> None:
    """Docstrings use Markdown tables, since they are read in editors more often than here."""
    out, table = [], []
    for line in [*lines, ""]:
        if line.startswith("|"):
            table.append(line)
            continue
        out += as_list_table(table) if len(table) > 2 else table
        table = []
        out.append(line)
    # In a docstring `*batch` is an axis or an argument, not the start of emphasis.
    out = [re.sub(r"(?<![*`\\\w])\*(?=[A-Za-z])", r"\\*", line) for line in out[:-1]]
    # |x| is a magnitude and not a substitution, outside of literals.
    out = [
        "".join(
            part if part.startswith("`") else re.sub(r"(?<!\\)\|", r"\\|", part)
            for part in re.split(r"(``.*?``|`[^`]*`)", line)
        )
        for line in out
    ]
    # Markdown reads `Name`s as intended; here the plural needs a break between the two.
    lines[:] = [re.sub(r"(`[^`\s][^`]*`)(?=[A-Za-z])", r"\1\\ ", line) for line in out]


def setup(app) -> None:
    app.connect("autodoc-process-docstring", convert_markdown, priority=100)


write_api_pages()
