"""The shape of the house: which package may import which, and what no file may contain."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FIELDS = (
    "moe causal uncertainty lm rl unlearning multimodal diffusion science agents".split()
)  # the papers
PLACES = ("jaxlib_papers", "kernels_pallas", "experiments", "tools", "tests")

# Height of each part; a file may import its own part and lower ones only.
HEIGHT = {"kernels_pallas": -1, "jaxlib_papers.ops": 0, "jaxlib_papers.nn": 1}
HEIGHT |= {f"jaxlib_papers.{name}": 2 for name in ("train", "data", "io")}
HEIGHT |= {f"jaxlib_papers.{name}": 3 for name in FIELDS}
HEIGHT |= {"jaxlib_papers.catalog": 3, "experiments": 4, "tools": 4, "tests": 5}

# Of Flax NNX the library uses modules as values; these bind state to a transform or a module.
FORBIDDEN_NNX = frozenset(
    "jit grad value_and_grad vmap pmap scan remat checkpoint cond switch while_loop fori_loop "
    "custom_vjp shard_map jvp vjp Rngs RngStream Dropout Optimizer ModelAndOptimizer".split()
)
HEAVY = frozenset(
    "jax jaxlib flax numpy scipy optax chex orbax grain tensorflow_datasets array_record "
    "tensorflow matplotlib tokenizers tensorboardX torch transformers rich tyro".split()
)
LAZY = HEAVY - frozenset("jax jaxlib flax numpy scipy optax chex orbax rich tyro".split())


def python_files(root: Path, places=PLACES) -> list[Path]:
    return sorted(p for place in places for p in (root / place).rglob("*.py"))


def module_name(root: Path, path: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def part_of(module: str) -> str | None:
    """The longest entry of HEIGHT that holds the module."""
    pieces = module.split(".")
    names = (".".join(pieces[:n]) for n in range(len(pieces), 0, -1))
    return next((name for name in names if name in HEIGHT), None)


def for_types_only(tree: ast.AST) -> set[ast.AST]:
    """Everything below an `if TYPE_CHECKING:`; it is never executed."""
    guards = (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
    )
    return {inner for guard in guards for step in guard.body for inner in ast.walk(step)}


def imports_of(root: Path, path: Path, modules: frozenset[str], *, types: bool = True) -> set[str]:
    """Modules of this repository that a file imports anywhere, inside functions too."""
    here = module_name(root, path)
    package = here if path.name == "__init__.py" else here.rpartition(".")[0]
    found = set()
    tree = ast.parse(path.read_text())
    left_out = set() if types else for_types_only(tree)
    for node in ast.walk(tree):
        if node in left_out:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base]).strip(".")
            for alias in node.names:
                name = f"{base}.{alias.name}"
                found.add(name if name in modules else base)
    return {name for name in found if name.split(".")[0] in PLACES and name != here}


def import_graph(root: Path, *, types: bool = True) -> dict[str, set[str]]:
    files = python_files(root)
    modules = frozenset(module_name(root, p) for p in files)
    return {module_name(root, p): imports_of(root, p, modules, types=types) for p in files}


def broken_arrows(graph: dict[str, set[str]]) -> list[str]:
    broken = []
    for module, imported in sorted(graph.items()):
        source = part_of(module)
        for target in sorted(imported):
            aim = part_of(target)
            if source is None or source == "tests" or aim == source or target == "jaxlib_papers":
                continue
            both_on_top = source in ("experiments", "tools") and aim in ("experiments", "tools")
            if aim is None or (HEIGHT[aim] >= HEIGHT[source] and not both_on_top):
                broken.append(f"{module} imports {target}")
    return broken


def find_cycle(graph: dict[str, set[str]]) -> list[str]:
    done: set[str] = set()

    def visit(module: str, trail: list[str]) -> list[str]:
        if module in trail:
            return [*trail[trail.index(module) :], module]
        if module in done:
            return []
        for target in sorted(graph.get(module, ())):
            if cycle := visit(target, [*trail, module]):
                return cycle
        done.add(module)
        return []

    for module in sorted(graph):
        if cycle := visit(module, []):
            return cycle
    return []


def forbidden_code(source: str, *, nnx_rules: bool = True) -> list[str]:
    """What the syntax tree of one file holds that it may not."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id == "nnx" and node.attr in FORBIDDEN_NNX and nnx_rules:
                found.append(f"line {node.lineno}: nnx.{node.attr}")
        elif isinstance(node, ast.ImportFrom) and node.module == "flax.nnx" and nnx_rules:
            names = {alias.name for alias in node.names} & FORBIDDEN_NNX
            found += [f"line {node.lineno}: nnx.{name}" for name in sorted(names)]
        elif isinstance(node, ast.ExceptHandler):
            broad = node.type is None or (
                isinstance(node.type, ast.Name) and node.type.id in ("Exception", "BaseException")
            )
            silent = all(isinstance(step, (ast.Pass, ast.Continue)) for step in node.body)
            if broad and silent:
                found.append(f"line {node.lineno}: an exception of any kind is swallowed")
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [getattr(node, "module", None)] + [alias.name for alias in node.names]
            if "pickle" in names or "cloudpickle" in names:
                found.append(f"line {node.lineno}: pickle")
    return found


def forbidden_text(text: str) -> list[str]:
    # Patterns are put together from halves so that this file passes its own check.
    places = "|".join(["wo" + "rk", "fa" + "rm", "ho" + "me", "ro" + "ot", "Us" + "ers"])
    patterns = {
        "path of one machine": rf"(?<![\w.\-}}])/({places})/\w",
        "temporary path of one machine": "/tm" + r"p/\w",
        "registry host": "python" + r"hosted|py" + r"pi\.org|registry\.npm" + "js",
        "unfinished": "TO" + "DO|FIX" + "ME",
    }
    return [
        f"line {number}: {what}: {line.strip()[:80]}"
        for number, line in enumerate(text.splitlines(), 1)
        for what, pattern in patterns.items()
        if re.search(pattern, line)
    ]


def modules_after(statement: str) -> set[str]:
    code = f"{statement}\nimport sys, json\nprint(json.dumps(sorted(sys.modules)))"
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert out.returncode == 0, out.stderr
    return {name.split(".")[0] for name in json.loads(out.stdout.splitlines()[-1])}


def test_arrows_point_down():
    assert broken_arrows(import_graph(ROOT)) == []


def test_no_import_cycles():
    # Annotations may point upwards; what is executed may not run in a circle.
    assert find_cycle(import_graph(ROOT, types=False)) == []


def test_every_part_has_a_height():
    found = {module_name(ROOT, p) for p in python_files(ROOT)} - {"jaxlib_papers"}
    assert {module for module in found if part_of(module) is None} == set()


@pytest.mark.parametrize("path", python_files(ROOT), ids=lambda p: str(p.relative_to(ROOT)))
def test_no_forbidden_code(path):
    # Tests make the very modules that the rules forbid, to see that they are refused.
    in_tests = path.is_relative_to(ROOT / "tests")
    assert forbidden_code(path.read_text(), nnx_rules=not in_tests) == []


def test_no_forbidden_text():
    tracked = [*python_files(ROOT), *ROOT.glob("*.md"), *ROOT.glob("*.toml"), *ROOT.glob("*.txt")]
    tracked += [ROOT / "Makefile", ROOT / ".ci" / "run", *(ROOT / "docs").rglob("*.md")]
    found = {
        str(p.relative_to(ROOT)): hits
        for p in tracked
        if p.exists() and (hits := forbidden_text(p.read_text()))
    }
    assert found == {}


def test_importing_the_package_loads_nothing_heavy():
    assert modules_after("import jaxlib_papers") & HEAVY == set()


def test_package_inits_leave_optional_libraries_alone():
    inits = [p for p in python_files(ROOT, ("jaxlib_papers", "kernels_pallas"))]
    packages = [module_name(ROOT, p) for p in inits if p.name == "__init__.py"]
    assert modules_after("import " + ", ".join(packages)) & LAZY == set()


@pytest.mark.parametrize(
    ("place", "banned"), [("jaxlib_papers/ops", "flax"), ("kernels_pallas", "jaxlib_papers")]
)
def test_lowest_parts_load_nothing_from_above(place, banned):
    modules = [module_name(ROOT, p) for p in python_files(ROOT, (place,))]
    assert modules, f"{place} is empty"
    assert banned not in modules_after("import " + ", ".join(modules))


class TestTheChecksThemselves:
    """A check that cannot fail proves nothing: each one meets a tree that it must refuse."""

    def tree(self, root: Path, **files: str) -> dict[str, set[str]]:
        for name, text in files.items():
            path = root / (name.replace("__", "/") + ".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return import_graph(root)

    @pytest.mark.parametrize(
        ("files", "message"),
        [
            (
                {
                    "jaxlib_papers__moe__a": "from jaxlib_papers.rl import b",
                    "jaxlib_papers__rl__b": "",
                },
                "jaxlib_papers.moe.a imports jaxlib_papers.rl.b",
            ),
            (
                {"jaxlib_papers__ops__a": "import jaxlib_papers.nn.b", "jaxlib_papers__nn__b": ""},
                "jaxlib_papers.ops.a imports jaxlib_papers.nn.b",
            ),
            (
                {"kernels_pallas__a": "def f():\n    from jaxlib_papers.ops.b import x"},
                "kernels_pallas.a imports jaxlib_papers.ops.b",
            ),
            (
                {"jaxlib_papers__nn__a": "from ..train import b", "jaxlib_papers__train__b": ""},
                "jaxlib_papers.nn.a imports jaxlib_papers.train.b",
            ),
        ],
    )
    def test_upward_arrow_is_found(self, tmp_path, files, message):
        assert message in broken_arrows(self.tree(tmp_path, **files))

    def test_downward_arrow_is_allowed(self, tmp_path):
        files = {"experiments__a": "from jaxlib_papers.nn.b import c", "jaxlib_papers__nn__b": ""}
        assert broken_arrows(self.tree(tmp_path, **files)) == []

    def test_cycle_is_found(self, tmp_path):
        graph = self.tree(tmp_path, tools__a="import tools.b", tools__b="from tools import a")
        assert find_cycle(graph) == ["tools.a", "tools.b", "tools.a"]

    def test_import_for_types_makes_no_cycle(self, tmp_path):
        only = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from tools.b import x"
        self.tree(tmp_path, tools__a=only, tools__b="import tools.a")
        assert find_cycle(import_graph(tmp_path, types=False)) == []
        assert find_cycle(import_graph(tmp_path)) != []

    @pytest.mark.parametrize(
        "source",
        [
            "from flax import nnx\nf = nnx.jit(g)",
            "from flax.nnx import Rngs",
            "try:\n    f()\nexcept Exception:\n    pass",
            "try:\n    f()\nexcept:\n    pass",
            "import pickle",
        ],
    )
    def test_forbidden_code_is_found(self, source):
        assert len(forbidden_code(source)) == 1

    def test_forbidden_text_is_found(self):
        assert len(forbidden_text("cache = '/ho" + "me/me/cache'\n# TO" + "DO: later")) == 2
        assert forbidden_text("see docs/ho" + "me/page and $HOME/x") == []
