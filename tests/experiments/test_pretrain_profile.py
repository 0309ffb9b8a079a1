"""A trace of a few steps, where TensorBoard's profiler looks for it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from experiments.pretrain_profile import profiled


def run(step, count):
    state = jnp.zeros(())
    for _ in range(count):
        state, _ = step(state, jnp.float32(1))
    return float(state)


@jax.jit
def add(state, batch):
    return state + batch, {"loss": batch}


def test_steps_after_the_second_are_traced_and_computed_as_ever(tmp_path):
    step = profiled(add, tmp_path, 2, left=10)
    assert run(step, 2) == 2 and not (tmp_path / "tensorboard").exists()
    assert run(step, 4) == 4
    (trace,) = (tmp_path / "tensorboard" / "plugins" / "profile").glob("*/*.xplane.pb")
    content = trace.read_bytes()
    assert b"train" in content and b"step_num" in content
    # Nothing runs on: another trace can start.
    with jax.profiler.trace(str(tmp_path / "other")):
        pass


@pytest.mark.parametrize(("steps", "left"), [(0, 10), (3, 2)])
def test_nothing_to_trace_is_the_step_itself(steps, left, tmp_path):
    assert profiled(add, tmp_path, steps, left=left) is add


def test_only_the_first_process_traces(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    assert profiled(add, tmp_path, 3, left=10) is add
