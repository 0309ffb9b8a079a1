"""A pre-training run: built and checked first, then trained."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import platform
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from experiments import pretrain_dirs, pretrain_hosts, pretrain_report, pretrain_settings
from experiments.pretrain_plan import check_batch_fits
from experiments.pretrain_profile import profiled
from experiments.pretrain_settings import Settings
from jaxlib_papers.data import Corpus, heldout_batches, make_pipeline, open_corpus
from jaxlib_papers.data.mixture import normalised_weights
from jaxlib_papers.data.pipeline import PipelineIterator
from jaxlib_papers.moe.expert_divergence import (
    check_domains_for_objective,
    expert_divergence_objective,
)
from jaxlib_papers.nn.decoder import DecoderLM
from jaxlib_papers.train.alarms import Alarms
from jaxlib_papers.train.checkpoint import Checkpointer, CheckpointError, Restored
from jaxlib_papers.train.evaluate import Evaluation, evaluate_domains, make_domain_eval_step
from jaxlib_papers.train.flops import count_parameters, flops_per_token
from jaxlib_papers.train.loop import LoopHooks, train_loop
from jaxlib_papers.train.mesh import host_slot, make_mesh, to_global
from jaxlib_papers.train.metrics import MetricsWriter, ProgressBar, read_records
from jaxlib_papers.train.optimizer import make_optimizer
from jaxlib_papers.train.preemption import PreemptionGuard
from jaxlib_papers.train.resume import check_config, resume_step
from jaxlib_papers.train.state import (
    ModelSpec,
    TrainState,
    abstract_model,
    abstract_state,
    init_state,
)
from jaxlib_papers.train.step import make_train_step
from jaxlib_papers.train.step_times import StepTimes
from jaxlib_papers.train.throughput import Throughput, peak_flops

if TYPE_CHECKING:
    from experiments.pretrain import PretrainFlags

__all__ = ["Run", "prepare"]

# Away from the keys of the steps, which are fold_in(key(seed), step).
_INIT_STREAM = 2**32 - 1


@dataclasses.dataclass
class Run:
    """A run that can start: everything is open, built and at its place.

    Attributes:
      flags: The command line.
      settings: What it resolved to.
      directory: Run directory.
      mesh: The devices.
      corpus: The text.
      batches: Iterator of training batches, at its place.
      spec: The model without its arrays.
      state: Train state after `start_step` steps.
      start_step: Finished steps.
      step_fn: The jitted train step.
      checkpointer: Open on the run's checkpoints.
      identity: What a resumed run must agree with.
    """

    flags: PretrainFlags
    settings: Settings
    directory: pathlib.Path
    mesh: Mesh
    corpus: Corpus
    batches: PipelineIterator
    spec: ModelSpec
    state: TrainState
    start_step: int
    step_fn: Any
    checkpointer: Checkpointer
    identity: dict[str, Any]

    def train(self) -> bool:
        """Trains to the last step, or until a signal.

        Returns:
          Whether the run is finished; False after a signal, when the state is saved.

        Raises:
          CheckpointError: A checkpoint could not be written; the former ones are valid.
          NonFiniteError: Too many steps in a row were not finite.
        """
        settings, began = self.settings, time.perf_counter()
        peak = peak_flops(
            settings.model.compute_dtype,
            per_device=_tera(self.flags.report.peak_tflops),
        )
        pretrain_report.announce(self)
        watch = Throughput(flops_per_token(settings.model, settings.pipeline.seq_len), peak)
        evaluations: dict[int, Evaluation] = {}
        evaluator = self._evaluator()
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.checkpointer)
            writer = stack.enter_context(MetricsWriter(self.directory, resume_step=self.start_step))
            guard = stack.enter_context(PreemptionGuard())
            bar = stack.enter_context(ProgressBar(settings.loop.total_steps, start=self.start_step))

            writer.write(self.start_step, "attempt", {"began": time.time()})
            times, alarms = StepTimes(), Alarms()

            def log(step: int, values: dict[str, Any]) -> None:
                writer.write(step, "train", values)
                for alarm in alarms.check(values):
                    writer.write(step, "alarm", alarm)
                    bar.print(pretrain_report.alarm_line(step, alarm))
                bar.update(step, pretrain_report.note(values))

            def evaluate(step: int, state: TrainState) -> None:
                evaluations[step] = evaluator(state)
                writer.write(step, "eval", evaluations[step].record())
                bar.print(pretrain_report.evaluation_line(step, evaluations[step]))

            def save(step: int, state: TrainState, data_state: Any) -> None:
                self.checkpointer.save(step, state, data_state=data_state, config=self.identity)

            left = settings.loop.total_steps - self.start_step
            step_fn = profiled(self.step_fn, self.directory, self.flags.report.profile, left=left)
            result = train_loop(
                step_fn,
                self.state,
                self.batches,
                settings.loop,
                put=lambda batch: to_global(batch, self.mesh),
                hooks=LoopHooks(
                    progress=lambda step, _: bar.update(step),
                    log=log,
                    evaluate=evaluate,
                    save=save,
                    should_stop=guard.should_stop,
                ),
                start_step=self.start_step,
                evaluate_first=self._evaluation_is_due(),
                tokens_per_step=settings.pipeline.global_batch * settings.pipeline.seq_len,
                throughput=watch,
                times=times,
            )
            # The step function has donated the first state's buffers.
            self.state = result.state
            if result.stopped:
                self.checkpointer.wait()
                bar.print(
                    f"{guard.signal_name}: stopped after step {result.step}, checkpoint written; "
                    f"go on with --run-dir {self.directory} --resume auto"
                )
                return False
            if result.step not in evaluations:
                evaluations[result.step] = evaluator(result.state)
        seconds = time.perf_counter() - began
        trained = times.total()["seconds_compute"] - result.compile_seconds
        summary = {
            "seconds": round(seconds, 1),
            # Of this attempt; over all attempts see tools.report.
            "goodput": round(max(trained, 0.0) / seconds, 4),
            **{name: round(value, 4) for name, value in times.shares().items()},
            "compile_seconds": round(result.compile_seconds, 1),
            **result.rates,
            "peak_flops": peak.total,
            "peak_source": peak.source,
        }
        if result.step == self.start_step:  # finished before: its times are those that count
            summary |= pretrain_report.former_summary(self.directory, summary)
        summary = {"steps": result.step, **summary}
        pretrain_report.finish(self, evaluations[result.step], summary)
        return True

    def _evaluation_is_due(self) -> bool:
        """Whether the starting state is to be evaluated and was not, by an attempt before."""
        every = self.settings.loop.eval_every
        if self.start_step == 0 or every == 0 or self.start_step % every:
            return self.start_step == 0
        records = read_records(self.directory / "metrics.jsonl")
        due = not any(r["kind"] == "eval" and r["step"] == self.start_step for r in records)
        if jax.process_count() > 1:  # a shared file need not look the same everywhere at once
            due = bool(multihost_utils.broadcast_one_to_all(np.int32(due)))
        return due

    def _evaluator(self):
        settings = self.settings
        step = make_domain_eval_step(
            self.spec.graphdef,
            top_k=settings.model.moe.top_k if settings.model.moe else None,
            mesh=self.mesh,
        )
        index, count = host_slot(self.mesh) if jax.process_count() > 1 else (0, 1)
        rows = settings.micro_rows

        def local(batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
            part = slice(index * rows // count, (index + 1) * rows // count)
            return {name: value[part] for name, value in batch.items()}

        batches = {
            domain: [
                local(batch)
                for batch in heldout_batches(
                    self.corpus,
                    settings.tokenizer,
                    settings.pipeline.seq_len,
                    rows,
                    domain,
                    settings.eval_batches,
                )
            ]
            for domain in self.corpus.domains
        }

        def evaluator(state: TrainState) -> Evaluation:
            return evaluate_domains(
                step,
                state.params,
                state.rest,
                batches,
                put=lambda batch: to_global(batch, self.mesh),
            )

        return evaluator

    def parameters(self) -> dict[str, int]:
        """Numbers of parameters."""
        moe = self.settings.model.moe
        counts = count_parameters(
            self.spec.params, self.spec.axes, top_k=moe.top_k if moe else None
        )
        return {"total": counts.total, "active": counts.active}


def prepare(flags: PretrainFlags) -> Run:
    """Builds a run and finds everything that is wrong with it before a step is taken.

    Several processes are connected before (`pretrain_hosts.connected`), and all of them call it.

    Args:
      flags: The command line.

    Returns:
      The run, at step 0 or at the step that it resumes from.

    Raises:
      ValueError: Flags, data or a former run's configuration do not fit, or the processes of the
        run are not the same program with the same settings; the message says which.
      CheckpointError: A checkpoint must be resumed and there is none, or the run directory cannot
        be written.
    """
    settings, mesh = pretrain_hosts.together(
        lambda: _settings(flags),
        lambda found: {
            "flags": pretrain_hosts.agreed_flags(flags),
            "settings": found[0].identity("") | {"loop": dataclasses.asdict(found[0].loop)},
        },
    )
    corpus = pretrain_hosts.together(
        lambda: _corpus(flags, settings), lambda found: {"corpus": found.fingerprint}
    )
    index, count = host_slot(mesh) if jax.process_count() > 1 else (0, 1)
    pipeline = make_pipeline(
        corpus, settings.tokenizer, settings.pipeline, process_index=index, process_count=count
    )

    def model(key: jax.Array) -> DecoderLM:
        return DecoderLM(settings.model, key=key)

    spec = abstract_model(model)
    optimizer = make_optimizer(settings.optimizer, spec.axes)
    moe = settings.model.moe
    assert moe is not None, "all presets are sparse"
    step_fn = make_train_step(
        spec.graphdef,
        expert_divergence_objective(
            settings.loss, num_domains=len(corpus.domains), top_k=moe.top_k
        ),
        optimizer,
        mesh=mesh,
        accum_steps=settings.pipeline.accum_steps,
        seed=settings.seed,
        exact_statistics=settings.exact_statistics,
    )
    target = abstract_state(model, optimizer, mesh=mesh)

    directory, mode = pretrain_dirs.open_run_directory(flags)
    checkpointer = Checkpointer(
        directory / "checkpoints",
        keep_last=flags.report.keep_last,
        keep_period=flags.report.keep_period,
    )
    identity = settings.identity(corpus.fingerprint)
    start = resume_step(mode, checkpointer.latest_step(), directory)
    batches = pipeline.iterator()
    if start is None:
        key = jax.random.fold_in(jax.random.key(settings.seed), _INIT_STREAM)
        state = init_state(model, optimizer, key, mesh=mesh)
    else:
        check_config(checkpointer.read_config(start), identity)
        restored = _restore(checkpointer, target, start, mode)
        batches.set_state(restored.data_state)
        state, start = restored.state, restored.step
    if jax.process_index() == 0:
        _write_config(directory, flags, settings, corpus, identity, mesh)
    return Run(
        flags=flags,
        settings=settings,
        directory=directory,
        mesh=mesh,
        corpus=corpus,
        batches=batches,
        spec=spec,
        state=state,
        start_step=start or 0,
        step_fn=step_fn,
        checkpointer=checkpointer,
        identity=identity,
    )


def _settings(flags: PretrainFlags) -> tuple[Settings, Mesh]:
    settings, mesh = pretrain_settings.resolve(flags), make_mesh(flags.mesh)
    check_batch_fits(settings, mesh)
    return settings, mesh


def _corpus(flags: PretrainFlags, settings: Settings) -> Corpus:
    data = flags.data
    corpus = open_corpus(data.data, cache_dir=data.cache_dir, heldout_fraction=data.heldout)
    weights = normalised_weights(corpus.domains, settings.pipeline.weights)
    check_domains_for_objective(settings.loss, sum(w > 0 for w in weights.values()))
    return corpus


def _restore(checkpointer: Checkpointer, target: Any, step: int, mode: str) -> Restored:
    """Restores a step; if it is damaged and the mode is "auto", the one before it."""
    first: CheckpointError | None = None
    while True:
        try:
            return checkpointer.restore(target, step)
        except CheckpointError as error:
            first = first or error
            earlier = [number for number in checkpointer.steps() if number < step]
            if mode != "auto" or not earlier:
                raise first from None
            print(f"pretrain: {error}; going on from step {earlier[-1]}", file=sys.stderr)
            checkpointer.set_aside(step)
            step = earlier[-1]


def _write_config(
    directory: pathlib.Path,
    flags: PretrainFlags,
    settings: Settings,
    corpus: Corpus,
    identity: dict[str, Any],
    mesh: Mesh,
) -> None:
    content = {
        "flags": dataclasses.asdict(flags),
        "settings": identity | {"loop": dataclasses.asdict(settings.loop)},
        "domains": list(corpus.domains),
        "mesh": dict(mesh.shape),
        "devices": [jax.devices()[0].device_kind, jax.device_count()],
        "processes": jax.process_count(),
        "versions": {"python": platform.python_version(), "jax": jax.__version__},
    }
    new = directory / "config.json.new"
    new.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(new, directory / "config.json")


def _tera(value: float | None) -> float | None:
    return None if value is None else value * 1e12
