"""Where time goes adds up, and alarms speak when they should and only then."""

from __future__ import annotations

import numpy as np
import pytest

from jaxlib_papers.train.alarms import AlarmConfig, Alarms
from jaxlib_papers.train.loop import LoopConfig, LoopHooks, train_loop
from jaxlib_papers.train.step_times import StepTimes


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_parts_add_up_and_laps_end():
    times, clock = StepTimes(), Clock()
    times._clock = clock
    assert times.shares() == {}
    with times.part("compute"):
        clock.now += 3
    with pytest.raises(RuntimeError), times.part("save"):
        clock.now += 1
        raise RuntimeError
    assert times.lap()["seconds_compute"] == 3 and times.lap()["seconds_compute"] == 0
    assert times.total()["seconds_save"] == 1
    assert times.shares()["share_compute"] == 0.75
    assert sum(times.shares().values()) == pytest.approx(1)


def test_the_loop_says_where_time_goes():
    times, clock, records = StepTimes(), Clock(), []
    times._clock = clock

    class Slow:
        def __next__(self):
            clock.now += 2
            return {"x": np.float32(1)}

    def step(state, batch):
        clock.now += 5
        return state + 1, {"loss": np.float32(1), "skipped_in_a_row": 0}

    def spend(seconds):
        clock.now += seconds

    train_loop(
        step,
        np.float32(0),
        Slow(),
        LoopConfig(total_steps=4, log_every=2, save_every=4, prefetch=1),
        hooks=LoopHooks(
            log=lambda n, v: records.append(v),
            evaluate=lambda n, s: spend(7),
            save=lambda n, s, d: spend(3),
        ),
        times=times,
    )
    assert times.total() == {
        "seconds_data_wait": 8,
        "seconds_compute": 20,
        "seconds_evaluate": 14,
        "seconds_save": 3,
    }
    assert sum(r["seconds_data_wait"] for r in records) == 8


def test_a_spike_is_told_and_noise_is_not():
    alarms = Alarms(AlarmConfig(least=10))
    rng = np.random.default_rng(0)
    quiet = [alarms.check({"loss": 3 + 0.01 * rng.normal(), "grad_norm": 1.0}) for _ in range(60)]
    assert quiet == [[]] * 60
    (alarm,) = alarms.check({"loss": 5.0, "grad_norm": 1.05})
    assert (alarm["alarm"], alarm["of"], alarm["value"]) == ("spike", "loss", 5.0)
    assert alarms.check({"loss": float("nan"), "grad_norm": None}) == []
    (alarm,) = alarms.check({"grad_norm": 2.0})
    assert alarm["of"] == "grad_norm"


def test_a_dead_expert_is_told_once_and_again_after_it_lived():
    alarms = Alarms(AlarmConfig(dead_records=3))
    even, dead = np.full((2, 4), 0.25), np.array([[0.25] * 4, [0.5, 0.5, 0.0, 0.0]])
    told = [alarms.check({"expert_load": load.tolist()}) for load in [even, *[dead] * 5]]
    assert [len(t) for t in told] == [0, 0, 0, 2, 0, 0]
    assert told[3][0] == {"alarm": "dead_expert", "layer": 1, "expert": 2}
    assert alarms.check({"expert_load": even}) == []
    assert [len(alarms.check({"expert_load": dead})) for _ in range(3)] == [0, 0, 2]


@pytest.mark.parametrize(
    "bad", [{"dead_records": 0}, {"least": 1}, {"window": 5}, {"factor": 0.0}, {"ratio": -1.0}]
)
def test_bad_alarm_settings_name_the_field(bad):
    (name,) = bad
    with pytest.raises(ValueError, match=name):
        AlarmConfig(**bad)
