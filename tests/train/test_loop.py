"""The loop: order of events, what it waits for, and what ends it."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlib_papers.train import loop
from jaxlib_papers.train.throughput import Throughput


class Counter:
    """Batches 0, 1, 2 ... whose state is the number drawn."""

    def __init__(self, at=0, end=math.inf):
        self.at, self.end = at, end

    def __next__(self):
        if self.at >= self.end:
            raise StopIteration
        self.at += 1
        return {"x": np.float32(self.at - 1)}

    def get_state(self):
        return {"at": self.at}


def make_step(bad=()):
    """Adds the batch to the state; the loss of the step is the batch, NaN where it is bad."""
    bad = jnp.asarray(sorted(bad) or [-1], jnp.float32)

    @jax.jit
    def step(state, batch):
        x = batch["x"]
        skipped = jnp.any(bad == x)
        in_a_row = jnp.where(skipped, state["in_a_row"] + 1, 0)
        loss = jnp.where(skipped, jnp.nan, x)
        state = {"sum": state["sum"] + jnp.where(skipped, 0, x), "in_a_row": in_a_row}
        metrics = {"loss": loss, "skipped_in_a_row": in_a_row, "load": jnp.stack([x, 2 * x])}
        return state, metrics | {"learning_rate": 0.1 * x}

    return step


def fresh():
    return {"sum": jnp.float32(0), "in_a_row": jnp.int32(0)}


def recorder(**more):
    events = []
    hooks = dict(
        log=lambda n, v: events.append(("log", n, v)),
        evaluate=lambda n, s: events.append(("eval", n, float(s["sum"]))),
        save=lambda n, s, d: events.append(("save", n, float(s["sum"]), d)),
    )
    return events, loop.LoopHooks(**(hooks | more))


def test_events_come_in_order_and_saves_hold_the_place_of_the_batch_not_of_the_prefetch():
    events, hooks = recorder()
    config = loop.LoopConfig(total_steps=6, log_every=2, eval_every=3, save_every=4, prefetch=3)
    batches = Counter()
    result = loop.train_loop(make_step(), fresh(), batches, config, hooks=hooks)
    assert [event[:2] for event in events] == [
        ("eval", 0), ("log", 2), ("eval", 3), ("log", 4), ("save", 4),
        ("log", 6), ("eval", 6), ("save", 6),
    ]  # fmt: skip
    assert [event[2:] for event in events if event[0] == "save"] == [
        (6.0, {"at": 4}),
        (15.0, {"at": 6}),
    ]
    assert batches.at > 6, "nothing was prefetched"
    assert (result.step, result.stopped, float(result.state["sum"])) == (6, False, 15.0)


def test_logged_values_are_means_of_their_interval_and_the_newest_learning_rate():
    events, hooks = recorder(evaluate=None, save=None)
    loop.train_loop(make_step(), fresh(), Counter(), loop.LoopConfig(5, log_every=3), hooks=hooks)
    (_, first, one), (_, second, two) = events
    assert (first, one["loss"], one["load"]) == (3, 1.0, [1.0, 2.0])
    assert (second, two["loss"]) == (5, 3.5), "the run's last step closes its interval"
    assert one["learning_rate"] == pytest.approx(0.2) and one["skipped_in_a_row"] == 0


def test_resumed_loop_continues_numbers_and_does_not_evaluate_step_zero_again():
    events, hooks = recorder()
    config = loop.LoopConfig(4, log_every=1)
    loop.train_loop(make_step(), fresh(), Counter(2), config, hooks=hooks, start_step=2)
    assert [event[:2] for event in events] == [("log", 3), ("log", 4), ("eval", 4), ("save", 4)]


def test_resumed_loop_makes_up_for_an_evaluation_that_a_stop_left_out():
    events, hooks = recorder(save=None, log=lambda *_: None)
    config = loop.LoopConfig(4, eval_every=2)
    loop.train_loop(
        make_step(), fresh(), Counter(2), config, hooks=hooks, start_step=2, evaluate_first=True
    )
    assert [event[:2] for event in events] == [("eval", 2), ("eval", 4)]


def test_run_that_is_over_does_nothing():
    events, hooks = recorder()
    result = loop.train_loop(
        make_step(), fresh(), Counter(), loop.LoopConfig(4), hooks=hooks, start_step=4
    )
    assert events == [] and result.step == 4 and result.rates == {} and not result.stopped


def test_stop_saves_the_step_and_leaves_without_evaluation():
    events, hooks = recorder(should_stop=lambda step: step == 3)
    config = loop.LoopConfig(10, log_every=100, eval_every=3)
    result = loop.train_loop(make_step(), fresh(), Counter(), config, hooks=hooks)
    assert result.stopped and result.step == 3
    assert [event[:2] for event in events] == [("eval", 0), ("save", 3)]
    assert events[-1][2:] == (3.0, {"at": 3})


def test_stop_at_the_last_step_is_no_preemption():
    _, hooks = recorder(should_stop=lambda step: step == 4)
    result = loop.train_loop(make_step(), fresh(), Counter(), loop.LoopConfig(4), hooks=hooks)
    assert result.step == 4 and not result.stopped


def test_too_many_bad_steps_in_a_row_are_an_error_and_fewer_are_not():
    config = loop.LoopConfig(12, max_skipped_in_a_row=3, log_every=4)
    events, hooks = recorder(evaluate=None)
    loop.train_loop(make_step({4, 5, 7, 8}), fresh(), Counter(), config, hooks=hooks)
    logs = {event[1]: event[2] for event in events if event[0] == "log"}
    assert logs[8]["loss"] == 6.0, "skipped steps have no part in the mean"
    assert logs[8]["skipped_in_a_row"] == 1
    with pytest.raises(loop.NonFiniteError, match=r"3 steps in a row \(step 7: loss nan"):
        loop.train_loop(make_step({4, 5, 6}), fresh(), Counter(), config)


def test_interval_without_a_good_step_logs_what_it_saw():
    events, hooks = recorder(evaluate=None, save=None)
    config = loop.LoopConfig(2, log_every=2)
    loop.train_loop(make_step({0, 1}), fresh(), Counter(), config, hooks=hooks)
    assert math.isnan(events[0][2]["loss"])


def test_data_that_ends_early_is_a_clear_error():
    with pytest.raises(RuntimeError, match="data ended after 3 of 5 steps"):
        loop.train_loop(make_step(), fresh(), Counter(end=3), loop.LoopConfig(5))


def test_first_step_and_pauses_do_not_count_as_training_time():
    now = [0.0]
    watch = Throughput()
    watch._clock = lambda: now[0]
    step = make_step()

    def slow_step(state, batch):
        now[0] += 100.0 if int(batch["x"]) == 0 else 1.0
        return step(state, batch)

    def pause(*_):
        now[0] += 1000.0

    result = loop.train_loop(
        slow_step,
        fresh(),
        Counter(),
        loop.LoopConfig(5, eval_every=2, save_every=2),
        hooks=loop.LoopHooks(evaluate=pause, save=pause),
        tokens_per_step=10,
        throughput=watch,
    )
    assert result.rates == {"tokens_per_second": 10.0}
    assert result.compile_seconds > 0


def test_metrics_of_a_step_are_read_after_the_next_one_was_dispatched():
    order = []
    step = make_step()

    def noted(state, batch):
        order.append(f"dispatch {int(batch['x']) + 1}")
        return step(state, batch)

    hooks = loop.LoopHooks(progress=lambda number, loss: order.append(f"read {number}"))
    loop.train_loop(noted, fresh(), Counter(), loop.LoopConfig(3), hooks=hooks)
    assert order == ["dispatch 1", "dispatch 2", "read 1", "dispatch 3", "read 2", "read 3"]


@pytest.mark.parametrize(
    "field", ["total_steps", "log_every", "max_skipped_in_a_row", "prefetch", "eval_every"]
)
def test_senseless_numbers_are_refused(field):
    with pytest.raises(ValueError, match=f"{field}: got -1"):
        loop.LoopConfig(**({"total_steps": 1} | {field: -1}))
