"""The main job, from the command line to the run directory, with a model of few weights."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import random
import resource
import signal
import socket
import subprocess
import sys
import textwrap

import jax
import numpy as np
import pytest

from experiments import presets, pretrain, pretrain_dirs, pretrain_report, pretrain_run
from jaxlib_papers.nn.decoder import DecoderLM
from jaxlib_papers.train import checkpoint, metrics
from jaxlib_papers.train.flops import count_parameters
from jaxlib_papers.train.preemption import PREEMPTED_EXIT_CODE
from jaxlib_papers.train.state import abstract_model

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Three domains of text with different words, and flags for a model that compiles fast."""
    root = tmp_path_factory.mktemp("data")
    rng = random.Random(0)
    for domain, words in {
        "fruit": ["apple", "pear", "plum", "fig"],
        "sums": ["1+1=2", "2+2=4", "3+5=8", "9-4=5"],
        "code": ["if x:", "def f():", "return y", "for i in x:"],
    }.items():
        (root / "text" / domain).mkdir(parents=True)
        for number in range(12):
            text = " ".join(rng.choice(words) for _ in range(120))
            (root / "text" / domain / f"{number}.txt").write_text(text)
    return [
        *("--data", f"text:{root / 'text'}", "--cache-dir", str(root / "cache")),
        *("--layers", "2", "--embed-dim", "32", "--num-experts", "4", "--dropout", "0.1"),
        *("--seq-len", "32", "--batch", "8", "--steps", "10", "--eval-batches", "1"),
        *("--eval-every", "5", "--save-every", "5", "--log-every", "1", "--peak-tflops", "0.1"),
    ]


@pytest.fixture(scope="module", autouse=True)
def compiled_once(tmp_path_factory):
    """All runs of this module have the same programs, in other processes too: compile them once."""
    names = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("compiled")),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    with pytest.MonkeyPatch.context() as patch:
        before = {name: getattr(jax.config, name) for name in names}
        for name, value in names.items():
            jax.config.update(name, value)
            patch.setenv(name.upper(), str(value))
        yield
        for name, value in before.items():
            jax.config.update(name, value)


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory):
    """A run that nothing interrupted."""
    directory = tmp_path_factory.mktemp("finished")
    assert pretrain.main([*data, "--run-dir", str(directory)]) == 0
    return directory


def records(directory, kind="train"):
    return [r for r in metrics.read_records(directory / "metrics.jsonl") if r["kind"] == kind]


def final_state(data, directory):
    """The state in the last checkpoint, and the position of the data."""
    flags = pretrain.parse([*data, "--run-dir", str(directory)])
    run = pretrain_run.prepare(flags)
    run.checkpointer.close()
    return jax.tree.map(np.asarray, run.state), run.batches.get_state()


def assert_same_run(data, one, other):
    (state_a, data_a), (state_b, data_b) = final_state(data, one), final_state(data, other)
    jax.tree.map(np.testing.assert_array_equal, state_a, state_b)
    assert data_a["step"] == data_b["step"] == 10

    def losses(directory):
        return [(r["step"], r["loss"], r["grad_norm"]) for r in records(directory)]

    assert losses(one) == losses(other) and len(losses(one)) == 10
    assert [r["step"] for r in records(other, "eval")] == [0, 5, 10]
    assert [r["loss"] for r in records(one, "eval")] == [r["loss"] for r in records(other, "eval")]


def test_run_directory_holds_everything_and_learning_shows(finished):
    names = {path.name for path in finished.iterdir()}
    assert names == {
        "config.json", "metrics.jsonl", "summary.json", "tensorboard", "checkpoints",
        "heldout_loss.png", "routing.png", "jsd.png",
    }  # fmt: skip
    for picture in finished.glob("*.png"):
        assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 5000
    with checkpoint.Checkpointer(finished / "checkpoints") as saved:
        assert saved.steps() == (5, 10)
    summary = json.loads((finished / "summary.json").read_text())
    assert list(summary["heldout_loss"]) == ["code", "fruit", "sums"]
    for domain, loss in summary["heldout_loss"].items():
        assert loss < summary["initial_heldout_loss"][domain]
    assert np.shape(summary["routing"]) == (2, 3, 4)
    np.testing.assert_allclose(np.sum(summary["routing"], axis=-1), 1, atol=1e-4)
    np.testing.assert_allclose(np.sum(summary["expert_load"], axis=-1), 4, atol=1e-4)
    assert summary["steps"] == 10 and 0 < summary["mfu"] < 1
    assert summary["peak_source"] == "given" and summary["tokens_per_second"] > 0
    config = json.loads((finished / "config.json").read_text())
    assert config["settings"]["model"]["num_layers"] == 2
    assert config["flags"]["data"]["batch"] == 8
    assert {"lm_loss", "load_balance", "expert_divergence", "mean_jsd"} <= set(records(finished)[0])


KILLED = """
    import os, signal, sys
    from experiments import pretrain
    from jaxlib_papers.train.checkpoint import Checkpointer
    save = Checkpointer.save
    def save_and_die(self, step, state, **more):
        save(self, step, state, **more)
        self.wait()
        if step == 5:
            os.kill(os.getpid(), signal.SIGKILL)
    Checkpointer.save = save_and_die
    pretrain.main(sys.argv[1:])
"""


def test_ten_steps_equal_five_a_kill_and_five_more_bitwise_with_dropout(data, finished, tmp_path):
    command = [sys.executable, "-c", textwrap.dedent(KILLED), *data, "--run-dir", str(tmp_path)]
    env = dict(os.environ, PYTHONPATH=str(ROOT), JAX_PLATFORMS="cpu")
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    assert not (tmp_path / "summary.json").exists()
    assert pretrain.main([*data, "--run-dir", str(tmp_path), "--resume", "must"]) == 0
    assert_same_run(data, finished, tmp_path)


def test_sigterm_saves_the_step_and_the_run_goes_on_from_there(
    data, finished, tmp_path, monkeypatch, capsys
):
    line = pretrain_report.note

    def stop_after_step_three(values):
        if len(records(tmp_path)) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return line(values)

    flags = [*data, "--run-dir", str(tmp_path)]
    with monkeypatch.context() as patch:
        patch.setattr(pretrain_report, "note", stop_after_step_three)
        assert pretrain.main(flags) == PREEMPTED_EXIT_CODE
    assert "SIGTERM: stopped after step" in capsys.readouterr().out
    with checkpoint.Checkpointer(tmp_path / "checkpoints") as saved:
        (step,) = saved.steps()
    assert 3 <= step < 6, "the signal came after step 3"
    # A half-written step that a person or a copy left behind does not stop it.
    (tmp_path / "checkpoints" / "9").mkdir()
    assert pretrain.main(flags) == 0
    assert_same_run(data, finished, tmp_path)
    # Asked once more, a finished run reports what it found, and keeps the times of its training.
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert pretrain.main(flags) == 0
    assert json.loads((tmp_path / "summary.json").read_text()) == summary


def test_resume_with_another_configuration_names_the_fields_and_loses_nothing(
    data, finished, capsys
):
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*") if path.is_file()}
    flags = [*data, "--run-dir", str(finished), "--learning-rate", "0.5", "--seed", "3"]
    assert pretrain.main(flags) == 2
    error = capsys.readouterr().err
    assert "optimizer.learning_rate: 0.003 in the checkpoint, 0.5 now" in error
    assert "seed: 0 in the checkpoint, 3 now" in error and "Traceback" not in error
    after = {path: path.stat().st_mtime_ns for path in finished.rglob("*") if path.is_file()}
    assert before == after


def test_starting_over_sets_the_former_run_aside(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    (tmp_path / "previous-1").mkdir()
    flags = dataclasses.replace(pretrain.parse(["--resume", "never"]), run_dir=str(tmp_path))
    assert pretrain_dirs.open_run_directory(flags) == (tmp_path, "never")
    assert (tmp_path / "previous-2" / "metrics.jsonl").read_text() == "{}\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["previous-1", "previous-2"]


def test_without_run_dir_a_new_one_is_made_and_resume_takes_the_newest(tmp_path, monkeypatch):
    monkeypatch.setattr(pretrain_dirs, "RUNS", tmp_path)
    for name in (
        "tiny-20260101-000000",
        "tiny-20260102-000000",
        "tiny-notes",
        "small-20270101-000000",
    ):
        (tmp_path / name).mkdir()
    new, mode = pretrain_dirs.open_run_directory(pretrain.parse([]))
    assert mode == "never" and new.name > "tiny-20260102-000000"
    new.rmdir()
    for asked in ("auto", "must"):
        chosen = pretrain_dirs.open_run_directory(pretrain.parse(["--resume", asked]))
        assert chosen == (tmp_path / "tiny-20260102-000000", asked)
    with pytest.raises(checkpoint.CheckpointError, match="no run of preset 'edl-3b'"):
        pretrain_dirs.open_run_directory(pretrain.parse(["--resume", "must", "--preset", "edl-3b"]))


def test_full_disk_ends_the_run_and_the_previous_checkpoint_stays(data, tmp_path, capsys):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    flags = [*data, "--run-dir", str(tmp_path), "--save-every", "2"]
    save = checkpoint.Checkpointer.save

    def fill_disk_before_step_four(self, step, state, **more):
        if step == 4:
            self.wait()
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
        save(self, step, state, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint.Checkpointer, "save", fill_disk_before_step_four)
        try:
            assert pretrain.main(flags) == 1
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    error = capsys.readouterr().err
    assert "checkpoint of step 4 could not be written" in error
    assert "the last complete one is step 2" in error and "Traceback" not in error
    with checkpoint.Checkpointer(tmp_path / "checkpoints") as saved:
        assert saved.steps() == (2,)


BAD_FLAGS = {
    "preset": (["--preset", "edl-3B"], "did you mean 'edl-3b'"),
    "mesh": (["--mesh", "fsdp=3,expert=2"], "needs 6 devices, there are 1"),
    "mesh axis": (["--mesh", "fspd=1"], "unknown axis 'fspd'"),
    "top_k": (["--top-k", "5"], "top_k"),
    "alpha": (["--alpha", "-1"], "alpha is -1.0"),
    "beta": (["--beta", "-0.5"], "beta is -0.5"),
    "gamma_z": (["--gamma-z", "nan"], "gamma_z"),
    "sequence": (["--seq-len", "2048"], "max_positions=1024"),
    "vocabulary": (["--vocab-size", "258"], "smaller than the tokenizer's 259"),
    "run_dir": (["--run-dir", "/dev/null/run"], "cannot write to /dev/null/run"),
    "one domain": (["--weights", "code=1,fruit=0,sums=0"], "the data has 1 domain"),
    "weights": (["--weights", "code=1,fruit=1,suns=1"], "unknown domain 'suns'"),
    "weights form": (["--weights", "code"], "expected domain=number"),
    "data": (["--data", "text:/nowhere/at/all"], "does not exist"),
    "accumulation": (["--accum-steps", "3"], "not divisible by accum_steps=3"),
    "steps": (["--steps", "0"], "steps: got 0"),
    "coordinator": (["--coordinator", "localhost:1"], "expected all or none"),
}


@pytest.mark.parametrize("case", BAD_FLAGS)
def test_bad_input_is_one_clear_line_and_exit_code_two(data, case, capsys, tmp_path):
    flags, message = BAD_FLAGS[case]
    if "--run-dir" not in flags:
        flags = [*flags, "--run-dir", str(tmp_path / "run")]
    assert pretrain.main([*data, *flags]) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("pretrain: ") and "Traceback" not in error
    assert not (tmp_path / "run").exists(), "nothing was begun"


def test_must_resume_without_a_checkpoint_is_an_error(data, capsys, tmp_path):
    assert pretrain.main([*data, "--run-dir", str(tmp_path), "--resume", "must"]) == 2
    assert f"no complete checkpoint in {tmp_path}" in capsys.readouterr().err


def test_api_raises_what_the_command_line_prints(data):
    with pytest.raises(ValueError, match="unknown 'smal'; did you mean 'small'"):
        pretrain_run.prepare(pretrain.parse([*data, "--preset", "smal"]))


def test_dry_run_of_the_largest_preset_on_256_devices_that_are_not_there(capsys):
    flags = ["--preset", "edl-15b", "--mesh", "fsdp=64,expert=4", "--dry-run"]
    assert pretrain.main(flags) == 0
    out = capsys.readouterr().out
    assert "fsdp=64 x expert=4 (256 devices)" in out
    total = int(out.split("parameters")[1].split()[0].replace(",", ""))
    assert abs(total / 15e9 - 1) < 0.03
    # Expert matrices are 96 % of the model and split over all devices: 4 bytes a parameter / 256.
    assert 0.9 < int(out.split()[-1].replace(",", "")) / (4 * total / 256) < 1.6
    assert "fsdp" in out and "expert" in out and "optimizer" in out and "gradients" in out
    assert pretrain.main([*flags[:3], "fsdp=7", "--dry-run"]) == 2
    assert "not divisible by mesh axis" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [("edl-3b", 3.0e9, 0.3e9), ("edl-8b", 8.0e9, 0.8e9), ("edl-15b", 15e9, 1.5e9)],
)
def test_paper_presets_have_the_papers_sizes(name, total, active):
    config = presets.get_preset(name).model
    spec = abstract_model(lambda key: DecoderLM(config, key=key))
    counts = count_parameters(spec.params, spec.axes, top_k=config.moe.top_k)
    assert counts.total == pytest.approx(total, rel=0.03)
    assert counts.active == pytest.approx(active, rel=0.03)
    assert (config.moe.num_experts, config.moe.top_k) == (64, 4)
    assert config.max_positions >= presets.get_preset(name).seq_len


def test_help_is_grouped_and_needs_no_jax_start():
    code = (
        "import sys\nfrom experiments import pretrain\n"
        "try:\n    pretrain.main(['--help'])\n"
        "except SystemExit as stop:\n    assert stop.code == 0 and 'jax' not in sys.modules\n"
    )
    env = dict(os.environ, PYTHONPATH=str(ROOT), COLUMNS="100")
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for text in ("data options", "model options", "launch options", "--dry-run", "Exit codes"):
        assert text in done.stdout


TWO_PROCESSES = """
    import os, signal, sys, time, jax
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    from experiments import pretrain, pretrain_report
    note, seen = pretrain_report.note, []
    def signal_after_step_three(values):
        seen.append(values)
        if len(seen) == 3 and sys.argv[-1] == "1":
            os.kill(os.getpid(), signal.SIGTERM)
        if len(seen) >= 3:
            time.sleep(0.3)  # for the news to reach the other process before the run is over
        return note(values)
    pretrain_report.note = signal_after_step_three
    sys.exit(pretrain.main(sys.argv[1:]))
"""


@pytest.mark.distributed
def test_two_processes_train_as_one_stop_together_and_one_process_goes_on(data, finished, tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    launch = ["--coordinator", f"localhost:{port}", "--num-processes", "2", "--process-id"]
    flags = [*data, "--run-dir", str(tmp_path), "--save-every", "0"]
    env = dict(os.environ, PYTHONPATH=str(ROOT), JAX_PLATFORMS="cpu")
    code = textwrap.dedent(TWO_PROCESSES)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, *flags, *launch, str(number)],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    outputs = [process.communicate(timeout=900) for process in processes]
    codes = [process.returncode for process in processes]
    assert codes == [PREEMPTED_EXIT_CODE] * 2, [error[-2000:] for _, error in outputs]
    spoken = ["held-out" in out for out, _ in outputs]
    assert spoken == [True, False], "only the first process speaks"
    with checkpoint.Checkpointer(tmp_path / "checkpoints") as saved:
        (step,) = saved.steps()
    assert 3 <= step < 10
    assert [r["step"] for r in records(tmp_path)] == list(range(1, step + 1))

    assert pretrain.main(flags) == 0
    for kind in ("train", "eval"):
        one, two = records(finished, kind), records(tmp_path, kind)
        assert [r["step"] for r in one] == [r["step"] for r in two]
        losses = [[r["loss"] for r in run] for run in (one, two)]
        np.testing.assert_allclose(*losses, rtol=2e-5)
