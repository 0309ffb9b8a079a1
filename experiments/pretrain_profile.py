"""A trace of a few steps for TensorBoard's profiler."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import jax

__all__ = ["profiled"]

_WARM = 2  # steps before the trace: the first compiles, the second may still wait for data


def profiled(
    step_fn: Callable[..., Any], directory: pathlib.Path, steps: int, *, left: int
) -> Callable[..., Any]:
    """Wraps a train step so that some of its calls are traced.

    Args:
      step_fn: ``(state, batch) -> (state, metrics)``.
      directory: Run directory; the trace goes to its sub-folder ``tensorboard``.
      steps: Steps to trace after the first two of this process; 0 traces nothing.
      left: Steps that the run still has; no more than those are traced.

    Returns:
      The step, itself where there is nothing to trace (and on all processes but the first).
    """
    steps = min(steps, left - _WARM)
    if steps <= 0 or jax.process_index() != 0:
        return step_fn
    calls = 0

    def step(state: Any, batch: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == _WARM + 1:
            jax.profiler.start_trace(str(directory / "tensorboard"))
        with jax.profiler.StepTraceAnnotation("train", step_num=calls):
            out = step_fn(state, batch)
        if calls == _WARM + steps:
            jax.block_until_ready(out)
            jax.profiler.stop_trace()
        return out

    return step
