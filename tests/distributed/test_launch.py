"""Processes find each other, refuse what does not fit, and end when one of them is gone."""

from __future__ import annotations

import json
import random
import shutil
import signal
import socket
import subprocess
import sys

import pytest

from tests.distributed.harness import PROGRAMS, ROOT, clean_environment, free_port

pytestmark = pytest.mark.distributed

GLOO = {"JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo"}
FIRST_PORT = 61440  # JAX derives the coordinator's port from the job's number: this + job % 4096


def run_all(commands, environments, folder):
    """Runs processes together; returns (exit code, output, error) of each."""
    running = []
    try:
        for number, (command, more) in enumerate(zip(commands, environments, strict=True)):
            files = [open(folder / f"{number}.{name}", "w+") for name in ("out", "err")]  # noqa: SIM115
            process = subprocess.Popen(
                command,
                env=clean_environment(1) | GLOO | more,
                cwd=more.get("PYTHONPATH", ROOT),
                stdout=files[0],
                stderr=files[1],
                text=True,
            )
            running.append((process, files))
        results = []
        for process, files in running:
            code = process.wait(300)
            for file in files:
                file.seek(0)
            results.append((code, *(file.read() for file in files)))
        return results
    finally:
        for process, files in running:
            process.kill()
            process.wait()
            for file in files:
                file.close()


def job_with_a_free_port():
    while True:
        job = random.randrange(2**12)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", FIRST_PORT + job))
                return job
            except OSError:
                continue


def slurm(count):
    job = str(job_with_a_free_port())
    return [
        {
            "SLURM_JOB_ID": job,
            "SLURM_STEP_NODELIST": "127.0.0.1",
            "SLURM_NTASKS": str(count),
            "SLURM_STEP_NUM_TASKS": str(count),
            "SLURM_STEP_TASKS_PER_NODE": str(count),
            "SLURM_PROCID": str(number),
            "SLURM_LOCALID": str(number),
        }
        for number in range(count)
    ]


def open_mpi(count):
    job = job_with_a_free_port() * 2**12
    return [
        {
            "OMPI_MCA_orte_hnp_uri": f"{job}.0;tcp://127.0.0.1:34911",
            "OMPI_COMM_WORLD_SIZE": str(count),
            "OMPI_COMM_WORLD_LOCAL_SIZE": str(count),
            "OMPI_COMM_WORLD_RANK": str(number),
            "OMPI_COMM_WORLD_LOCAL_RANK": str(number),
        }
        for number in range(count)
    ]


@pytest.mark.parametrize(("cluster", "count", "victim"), [(slurm, 3, 1), (open_mpi, 2, 0)])
def test_detected_processes_meet_and_end_with_76_when_one_dies(cluster, count, victim, tmp_path):
    command = [sys.executable, str(PROGRAMS / "launch.py"), "kill", str(victim)]
    results = run_all([command] * count, cluster(count), tmp_path)
    for number, (code, out, error) in enumerate(results):
        told = [f"from {i}" for i in range(count)]
        assert json.loads(out.splitlines()[-1]) == [number, count, True, told], error
        if number == victim:
            assert code == -signal.SIGKILL
            continue
        assert code == 76, error
        assert f"process {number} of {count} stops: another process of the run is gone" in error
        assert f"process {victim} ended" in error and "with the same --run-dir" in error


def test_an_error_that_nobody_expected_ends_the_others_too(tmp_path):
    launch = ["--coordinator", f"127.0.0.1:{free_port()}", "--num-processes", "2", "--process-id"]
    command = [sys.executable, str(PROGRAMS / "launch.py"), "raise", "1", *launch]
    (first, second) = run_all([[*command, "0"], [*command, "1"]], [{}, {}], tmp_path)
    assert second[0] == 1 and "KeyError: 'nobody expected this'" in second[2], second[2]
    assert first[0] == 76 and "process 1 ended" in first[2], first[2]


def test_one_task_of_a_cluster_runs_alone(tmp_path):
    command = [sys.executable, str(PROGRAMS / "launch.py"), "kill", "-1"]
    ((code, out, error),) = run_all([command], slurm(1), tmp_path)
    assert code == 0, error
    assert json.loads(out.splitlines()[-1]) == [0, 1, False, ["from 0"]]


def pretrain(port, number, *flags):
    launch = ["--coordinator", f"127.0.0.1:{port}", "--num-processes", "2"]
    command = [sys.executable, "-m", "experiments.pretrain", *launch, "--process-id", str(number)]
    return [*command, *flags]


def test_other_code_and_other_flags_are_refused_on_all_hosts(tmp_path):
    for name in ("jaxlib_papers", "kernels_pallas", "experiments"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, tmp_path / "tree" / name, ignore=ignore)
    with (tmp_path / "tree" / "jaxlib_papers" / "train" / "step.py").open("a") as file:
        file.write("# one line more\n")
    port = free_port()
    flags = ["--run-dir", str(tmp_path / "run")]
    commands = [pretrain(port, 0, *flags), pretrain(port, 1, *flags, "--learning-rate", "0.5")]
    results = run_all(commands, [{}, {"PYTHONPATH": str(tmp_path / "tree")}], tmp_path)
    for code, _, error in results:
        assert code == 2, error
        assert f"process 1 on {socket.gethostname()}: code.source is" in error
        assert "settings.optimizer.learning_rate is 0.5, but 0.003 on process 0" in error
        assert "versions" not in error and "Traceback" not in error
    assert not (tmp_path / "run").exists()


def test_what_one_host_lacks_ends_all_of_them(tmp_path):
    port = free_port()
    for domain in ("a", "b"):
        (tmp_path / "text" / domain).mkdir(parents=True)
        for number in range(3):
            (tmp_path / "text" / domain / f"{number}.txt").write_text(f"{domain} {number} " * 40)
    flags = ["--cache-dir", str(tmp_path / "cache"), "--run-dir", str(tmp_path / "run"), "--data"]
    places = [f"text:{tmp_path / 'text'}", f"text:{tmp_path / 'nowhere'}"]
    commands = [pretrain(port, number, *flags, place) for number, place in enumerate(places)]
    (first, _, told), (second, _, own) = run_all(commands, [{}, {}], tmp_path)
    assert (first, second) == (2, 2), (told, own)
    assert "does not exist" in own and "process 1 on" in told and "does not exist" in told
    assert not (tmp_path / "run").exists()


def test_coordinator_that_is_not_there_ends_the_process_in_time(tmp_path):
    command = pretrain(1, 1, "--connect-timeout", "2")
    ((code, _, error),) = run_all([command], [{}], tmp_path)
    assert code == 76, error
    assert "process 1 of 2 could not connect within 2 s" in error
    assert "coordinator at 127.0.0.1:1;" in error and "--connect-timeout" in error
