"""Who takes part in a run: read from the environment and the flags, and told when they differ."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from experiments import pretrain, pretrain_hosts

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("environ", "several"),
    [
        ({}, False),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8"}, False),  # a shell inside an allocation
        ({"SLURM_STEP_NUM_TASKS": "8"}, True),
        ({"SLURM_STEP_NUM_TASKS": "1"}, False),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, True),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, False),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, True),
        ({"KUBERNETES_SERVICE_HOST": "x"}, False),
        ({"KUBERNETES_SERVICE_HOST": "x", "JOB_COMPLETION_INDEX": "0"}, True),
    ],
)
def test_several_processes_are_recognised(environ, several):
    assert pretrain_hosts.several_processes(environ) == several


@pytest.mark.parametrize(
    ("environ", "devices"),
    [
        ({}, None),
        # One task a host: all of the host's devices, where JAX would take the first alone.
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x8)", "SLURM_LOCALID": "0"}, []),
        ({"SLURM_STEP_TASKS_PER_NODE": "8(x2)", "SLURM_LOCALID": "3"}, [3]),
        ({"SLURM_STEP_TASKS_PER_NODE": "2,1", "SLURM_LOCALID": "1"}, [1]),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, []),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "5"}, [5]),
        # Bound to one device, whose number on the host means nothing inside.
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "8", "CUDA_VISIBLE_DEVICES": "5"}, []),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "JAX_LOCAL_DEVICE_IDS": "0,1"}, None),
    ],
)
def test_a_process_alone_on_its_host_takes_all_devices(environ, devices):
    assert pretrain_hosts.local_devices(environ) == devices


def explicit(environ, *flags):
    return pretrain_hosts._explicit(pretrain.parse(flags).launch, environ)


def test_named_coordinator_with_numbers_from_the_scheduler():
    assert explicit({}) is None
    flags = ["--coordinator", "host0:1234"]
    mpi = {"OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_RANK": "3"}
    want = {"coordinator_address": "host0:1234", "num_processes": 8, "process_id": 3}
    assert explicit(mpi | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, *flags) == want | {
        "local_device_ids": []
    }
    slurm = {"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "3", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}
    slurm["SLURM_LOCALID"] = "2"
    assert explicit(slurm, *flags) == want | {"local_device_ids": [2]}
    pods = {"KUBERNETES_SERVICE_HOST": "x", "JOB_COMPLETION_INDEX": "3"}
    asked = [*flags, "--num-processes", "8", "--process-id", "3"]
    assert explicit(pods, *asked) == want | {"local_device_ids": []}
    chosen = explicit({"JAX_LOCAL_DEVICE_IDS": "0,1"}, *asked)
    assert chosen == want | {"local_device_ids": None}
    assert explicit({}, *asked) == want | {"local_device_ids": []}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--coordinator", "host0:1"], "expected all or none"),
        (["--process-id", "0", "--num-processes", "2"], "expected all or none"),
        (["--coordinator", "host0"], "got 'host0', expected HOST:PORT"),
        (["--coordinator", "host0:99999"], "expected HOST:PORT"),
        (["--process-id", "2"], "got 2 of num_processes=2, expected 0 to 1"),
        (["--connect-timeout", "0"], "connect_timeout: got 0"),
    ],
)
def test_wrong_coordinator_flags_name_what_is_wrong(flags, message):
    rest = {"--coordinator": "h:1", "--num-processes": "2", "--process-id": "0"}
    if "all or none" in message:
        rest = {}
    given = [word for name, value in rest.items() if name not in flags for word in (name, value)]
    with pytest.raises(ValueError, match=message):
        explicit({}, *flags, *given)


def test_no_cluster_where_one_is_asked_for_says_what_to_name(monkeypatch):
    def refuse(**_):
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr("jax.distributed.initialize", refuse)
    with pytest.raises(ValueError, match="not detected .*--coordinator HOST:PORT"):
        with pretrain_hosts.connected(pretrain.parse(["--distributed", "on"]).launch):
            pass


def test_one_process_needs_nobody():
    with pretrain_hosts.connected(pretrain.parse(["--distributed", "off"]).launch) as watch:
        assert watch is None
    assert pretrain_hosts.together(lambda: 3, lambda _: {}) == 3
    with pytest.raises(ZeroDivisionError):
        pretrain_hosts.together(lambda: 1 // 0, lambda _: {})


def test_flags_that_say_where_things_lie_may_differ():
    one = pretrain_hosts.agreed_flags(pretrain.parse(["--data", "text:/a", "--cache-dir", "/c"]))
    other = ["--data", "text:/b", "--coordinator", "h:1", "--process-id", "1"]
    assert one == pretrain_hosts.agreed_flags(pretrain.parse(other))
    assert one != pretrain_hosts.agreed_flags(pretrain.parse(["--log-every", "7"]))


def test_commands_of_the_launch_page_are_flags_that_exist():
    text = (ROOT / "docs" / "launch.md").read_text().replace("\\\n", " ")
    commands = re.findall(r"experiments\.pretrain((?:\s+--[\w-]+\s+[^\s`]+)+)", text)
    assert len(commands) >= 6
    for command in commands:
        words = [word.strip('"').replace("$JOB_COMPLETION_INDEX", "0") for word in command.split()]
        flags = pretrain.parse([word.replace("$I", "0") for word in words])
        if flags.launch.coordinator is not None:
            assert pretrain_hosts._explicit(flags.launch, {}) is not None
