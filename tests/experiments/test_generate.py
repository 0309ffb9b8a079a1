from __future__ import annotations

import sys

import pytest

from experiments import generate
from experiments.generate import GenerateConfig, run
from jaxlib_papers.io.pretrained import find_model, save_pretrained
from tests.io.synthetic import CONFIG, make, read_weights, write_gguf


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_pretrained(folder, make(CONFIG))
    return str(write_gguf(folder / "m.gguf", CONFIG, read_weights(folder)))


def test_a_batch_of_prompts(model, capsys):
    options = dict(max_new_tokens=3, chat="no", log_probs=True)
    answers = run(GenerateConfig(model, ("abc", "a b a b a b"), **options))
    assert len(answers) == 2 and all(isinstance(a, str) for a in answers)
    assert run(GenerateConfig(model, ("abc", "a b a b a b"), **options)) == answers
    lines = capsys.readouterr().err.splitlines()
    assert "tokens in" in lines[0] and sum(line.strip().startswith("-") for line in lines) >= 4


def test_template_is_used_when_there_is_one(model, monkeypatch):
    seen = []
    real = generate.pad_prompts

    def spy(prompts, **options):
        seen.append([list(p) for p in prompts])
        return real(prompts, **options)

    monkeypatch.setattr(generate, "pad_prompts", spy)
    run(GenerateConfig(model, ("a",), max_new_tokens=1))
    run(GenerateConfig(model, ("a",), max_new_tokens=1, chat="no"))
    assert seen[0][0][0] == 1 and len(seen[0][0]) > 10  # <s>user ...
    assert seen[1] == [[7]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "gone", "--prompt", "a"], "error: 'gone': no such file or folder"),
        (["--prompt", "a" * 90, "--chat", "no"], "model's context of 64; shorten the prompt"),
        (["--prompt", "a", "--top-p", "2"], "top_p is 2.0, expected a number"),
    ],
)
def test_errors_are_sentences(model, monkeypatch, arguments, message):
    if "--model" not in arguments:
        arguments = ["--model", model, *arguments]
    monkeypatch.setattr(sys, "argv", ["generate", *arguments])
    with pytest.raises(SystemExit) as error:
        generate.main()
    assert message in str(error.value)


@pytest.mark.slow
def test_quick_smollm2_answers_paris():
    try:
        find_model("smollm2")
    except ValueError as error:
        pytest.skip(str(error))
    config = GenerateConfig("smollm2", ("What is the capital of France?",), max_new_tokens=16)
    assert run(config) == ["The capital of France is Paris."]
