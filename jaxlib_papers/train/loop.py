"""The training loop: small, because everything that has a life of its own is handed in.

The host never waits for the step it has just dispatched. Metrics of step n are read after step
n + 1 is on its way, so the device always has work; the next batches are on the device before they
are asked for. What must see a finished state (evaluation, saves, the end) waits for it, and that
time does not count as training time.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxlib_papers.train.step_times import StepTimes
from jaxlib_papers.train.throughput import Throughput

__all__ = ["LoopConfig", "LoopHooks", "LoopResult", "NonFiniteError", "prefetch", "train_loop"]

Values = dict[str, Any]


class NonFiniteError(RuntimeError):
    """Loss or gradient was not finite in too many steps in a row."""


@dataclasses.dataclass(frozen=True)
class LoopConfig:
    """How long, and how often what.

    Attributes:
      total_steps: Steps of the whole run, those before a resume included.
      log_every: Steps between two records of training metrics (means over these steps).
      eval_every: Steps between evaluations, 0 = only at the end (and before the first step).
      save_every: Steps between checkpoints, 0 = only at the end.
      max_skipped_in_a_row: Steps with non-finite loss or gradient, one after the other, that end
        the run.
      prefetch: Batches that wait on the device.
    """

    total_steps: int
    log_every: int = 10
    eval_every: int = 0
    save_every: int = 0
    max_skipped_in_a_row: int = 10
    prefetch: int = 2

    def __post_init__(self) -> None:
        """Checks every number; the message names the field."""
        for field in dataclasses.fields(self):
            least = 0 if field.name in ("eval_every", "save_every") else 1
            if getattr(self, field.name) < least:
                raise ValueError(
                    f"{field.name}: got {getattr(self, field.name)}, expected at least {least}"
                )


@dataclasses.dataclass(frozen=True)
class LoopHooks:
    """What the loop calls; each may be left out.

    Attributes:
      progress: ``(step, loss)`` for every finished step.
      log: ``(step, values)`` every ``log_every`` steps: means of the metrics, and the rates.
      evaluate: ``(step, state)``.
      save: ``(step, state, data_state)``; must have copied the state when it returns.
      should_stop: ``(step) -> bool`` after every step: save and leave.
    """

    progress: Callable[[int, float], None] = lambda step, loss: None
    log: Callable[[int, Values], None] = lambda step, values: None
    evaluate: Callable[[int, Any], None] | None = None
    save: Callable[[int, Any, Any], None] | None = None
    should_stop: Callable[[int], bool] = lambda step: False


class LoopResult(NamedTuple):
    """How it ended.

    Attributes:
      state: The last state.
      step: Finished steps.
      stopped: Whether ``should_stop`` ended the run before its last step.
      compile_seconds: Time of this process's first step, which is mostly compilation; 0 if there
        was no step.
      rates: ``tokens_per_second`` and ``mfu`` over this process's other steps.
    """

    state: Any
    step: int
    stopped: bool
    compile_seconds: float
    rates: Values


def prefetch(batches: Any, put: Callable[[Any], Any], depth: int = 2) -> Iterator[tuple[Any, Any]]:
    """Puts batches on the device before they are asked for.

    Args:
      batches: Iterator of host batches; if it has ``get_state()``, a checkpoint can hold its place.
      put: Puts a host batch on the device(s) without waiting, e.g. :func:`mesh.to_global`.
      depth: How many batches wait on the device.

    Yields:
      ``(device batch, data state)``, the state being that right after this batch was drawn, however
      far the iterator has run ahead.
    """
    get_state = getattr(batches, "get_state", lambda: None)
    waiting: collections.deque[tuple[Any, Any]] = collections.deque()
    more = True
    while True:
        while more and len(waiting) < depth:
            try:
                batch = next(batches)
            except StopIteration:
                more = False
            else:
                waiting.append((put(batch), get_state()))
        if not waiting:
            return
        yield waiting.popleft()


def train_loop(
    step_fn: Callable[[Any, Any], tuple[Any, Mapping[str, jax.Array]]],
    state: Any,
    batches: Any,
    config: LoopConfig,
    *,
    put: Callable[[Any], Any] = jax.device_put,
    hooks: LoopHooks | None = None,
    start_step: int = 0,
    evaluate_first: bool | None = None,
    tokens_per_step: int = 0,
    throughput: Throughput | None = None,
    times: StepTimes | None = None,
) -> LoopResult:
    """Trains from ``start_step`` to ``config.total_steps``.

    Order at a step that is due for several things: log, evaluate, save. So a checkpoint of step n
    implies that the records up to n are written.

    Args:
      step_fn: ``(state, batch) -> (state, metrics)``, may donate the state; the metrics have
        ``loss`` and ``skipped_in_a_row`` (see :func:`step.make_train_step`).
      state: State after ``start_step`` steps.
      batches: Iterator of host batches at its place after ``start_step`` batches.
      config: Lengths and intervals.
      put: Puts a host batch on the device(s).
      hooks: What to call.
      start_step: Finished steps.
      evaluate_first: Whether to evaluate the given state; default: at step 0. (A run that was
        stopped at a step due for evaluation leaves that to its successor.)
      tokens_per_step: Tokens of a global batch, for the rates.
      throughput: Stop-watch that knows the model's FLOPs; default one without MFU.
      times: Where the time goes; each record then holds the seconds of its interval by part.

    Returns:
      A :class:`LoopResult`.

    Raises:
      NonFiniteError: More than ``max_skipped_in_a_row - 1`` steps in a row were not finite.
      RuntimeError: The batches end before the run does.
    """
    hooks = LoopHooks() if hooks is None else hooks
    watch = Throughput() if throughput is None else throughput
    where = StepTimes() if times is None else times
    stream = prefetch(batches, put, config.prefetch)
    pending: collections.deque[tuple[int, Mapping[str, jax.Array]]] = collections.deque()
    window = _Window()
    compile_seconds = 0.0

    def read_metrics(leave: int) -> None:
        while len(pending) > leave:
            number, values = pending.popleft()
            with where.part("compute"):
                values = jax.device_get(values)
            if number > start_step + 1:
                watch.add(tokens_per_step)
            window.add(values)
            hooks.progress(number, float(values["loss"]))
            in_a_row = int(values.get("skipped_in_a_row", 0))
            if number % config.log_every == 0 or number == config.total_steps:
                parts = {} if times is None else where.lap()
                hooks.log(number, window.means() | watch.lap() | parts)
                window.clear()
            if in_a_row >= config.max_skipped_in_a_row:
                raise NonFiniteError(
                    f"loss or gradient was not finite in {in_a_row} steps in a row (step {number}: "
                    f"loss {float(values['loss'])}, gradient norm "
                    f"{float(values.get('grad_norm', np.nan))}); parameters are those before "
                    "them. Lower the learning rate or look at the data of these steps"
                )

    def finish_steps() -> None:
        read_metrics(leave=0)
        with where.part("compute"):
            jax.block_until_ready(state)
        watch.stop()

    evaluate_first = start_step == 0 if evaluate_first is None else evaluate_first
    if evaluate_first and hooks.evaluate is not None:
        with where.part("evaluate"):
            hooks.evaluate(start_step, state)
    step, stop = start_step, False
    while step < config.total_steps and not stop:
        try:
            with where.part("data_wait"):
                batch, data_state = next(stream)
        except StopIteration:
            raise RuntimeError(
                f"the data ended after {step} of {config.total_steps} steps; give an iterator that "
                "repeats"
            ) from None
        first = step == start_step
        began = time.perf_counter()
        if not first:
            watch.start()
        with where.part("compute"):
            state, metrics = step_fn(state, batch)
            if first:
                jax.block_until_ready(state)
        step += 1
        pending.append((step, metrics))
        if first:
            compile_seconds = time.perf_counter() - began
        read_metrics(leave=1)
        stop = hooks.should_stop(step)
        last = step == config.total_steps
        if hooks.evaluate is not None and (last or _due(step, config.eval_every)) and not stop:
            finish_steps()
            with where.part("evaluate"):
                hooks.evaluate(step, state)
        if hooks.save is not None and (last or stop or _due(step, config.save_every)):
            finish_steps()
            with where.part("save"):
                hooks.save(step, state, data_state)
    finish_steps()
    stopped = stop and step < config.total_steps
    return LoopResult(state, step, stopped, compile_seconds, watch.total())


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


class _Window:
    """Means of the metrics since the last record, over the steps that were not skipped."""

    _LAST = ("learning_rate", "skipped", "skipped_in_a_row")

    def __init__(self) -> None:
        self._good: list[Mapping[str, Any]] = []
        self._newest: Mapping[str, Any] = {}

    def add(self, values: Mapping[str, Any]) -> None:
        self._newest = values
        if int(values.get("skipped_in_a_row", 0)) == 0:
            self._good.append(values)

    def means(self) -> Values:
        """The record; without a good step it shows the newest values, finite or not."""
        rows = self._good or [self._newest]
        out: Values = {}
        for name in self._newest:
            if name in self._LAST:
                out[name] = np.asarray(self._newest[name]).item()
            else:
                mean = np.mean([np.asarray(row[name], np.float64) for row in rows], axis=0)
                out[name] = mean.tolist()
        return out

    def clear(self) -> None:
        self._good = []
