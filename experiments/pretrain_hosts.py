"""The processes of a run: how they find each other, agree, and notice that one of them is gone."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import jax

from jaxlib_papers.train.agreement import (
    DisagreementError,
    check_agreement,
    code_identity,
    exchange,
)
from jaxlib_papers.train.peers import PeerWatch

if TYPE_CHECKING:
    from experiments.pretrain import LaunchFlags, PretrainFlags

__all__ = [
    "LOST_PROCESS_EXIT_CODE",
    "agreed_flags",
    "connected",
    "leave",
    "leave_alone",
    "local_devices",
    "lost_process",
    "several_processes",
    "together",
]

LOST_PROCESS_EXIT_CODE = 76
"""Exit code where another process of the run died or did not come: start all of them again."""

_ROOT = pathlib.Path(__file__).resolve().parents[1]
T = TypeVar("T")


def several_processes(environ: Mapping[str, str]) -> bool:
    """Whether the environment is that of one process of several.

    What JAX itself would detect, but without waiting for others where a cluster is present and the
    program was started alone on it (a shell inside an allocation).
    """
    return (
        _number(environ, "SLURM_STEP_NUM_TASKS") > 1
        or _number(environ, "OMPI_COMM_WORLD_SIZE") > 1
        or "," in environ.get("TPU_WORKER_HOSTNAMES", "")
        or ("KUBERNETES_SERVICE_HOST" in environ and "JOB_COMPLETION_INDEX" in environ)
    )


def local_devices(environ: Mapping[str, str]) -> list[int] | None:
    """Which of its host's devices this process takes, as `jax.distributed.initialize` wants it.

    Under SLURM and Open MPI JAX gives each process the one device of its number on the host, which
    is right for one process per device and wastes all others with one process per host.

    Returns:
      An empty list, which is all that this process can see, if it is alone on its host or sees one
      device only; its number on the host, if others are there; None, which leaves it to JAX, if the
      environment does not say.
    """
    if "JAX_LOCAL_DEVICE_IDS" in environ:  # which JAX reads
        return None
    visible = environ.get("CUDA_VISIBLE_DEVICES", "")
    if visible and "," not in visible:
        return []
    # "1(x8)", "2,1", "2(x3),1": tasks on each host of the step.
    if tasks := environ.get("SLURM_STEP_TASKS_PER_NODE", ""):
        alone = all(part.split("(")[0] == "1" for part in tasks.split(","))
        return [] if alone else [_number(environ, "SLURM_LOCALID")]
    if count := _number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE"):
        return [] if count == 1 else [_number(environ, "OMPI_COMM_WORLD_LOCAL_RANK")]
    return None


@contextlib.contextmanager
def connected(flags: LaunchFlags) -> Iterator[PeerWatch | None]:
    """Connects the processes of a run for the time of the block; does nothing if there is one.

    While the block runs, a process that dies makes the others end with
    :data:`LOST_PROCESS_EXIT_CODE` within seconds. One whose block raises ends with 1 at once.

    Args:
      flags: Of the launch.

    Yields:
      The watch over the other processes; None if there are none.

    Raises:
      ValueError: The coordinator flags are incomplete or wrong, or no cluster was detected.
    """
    where = _explicit(flags, os.environ)
    if where is None and not (
        flags.distributed == "on" or (flags.distributed == "auto" and several_processes(os.environ))
    ):
        yield None
        return
    if where is None:
        where = {"local_device_ids": local_devices(os.environ)}
    with _limited(flags, where):
        try:
            # JAX aborts after its own limit, so that one comes later.
            jax.distributed.initialize(**where, initialization_timeout=flags.connect_timeout + 60)
        except ValueError as error:
            raise ValueError(
                f"distributed: the processes of this run were not detected ({error}); name them "
                "with --coordinator HOST:PORT --num-processes N --process-id I (under SLURM and "
                "Open MPI --coordinator is enough)"
            ) from error
    host = _coordinator(where).rpartition(":")[0].strip("[]")
    watch: list[PeerWatch] = []
    watch += [PeerWatch(host, lambda number: leave_alone(f"process {number} ended", *watch))]
    with watch[0]:
        try:
            yield watch[0]
        except BaseException:
            # What nobody foresaw, on this process alone perhaps: the others must not wait for it.
            traceback.print_exc()
            leave(1, watch[0])


def _explicit(flags: LaunchFlags, environ: Mapping[str, str]) -> dict[str, Any] | None:
    """Arguments of `initialize` where a coordinator was named; None where none was."""
    if flags.connect_timeout < 1:
        raise ValueError(f"connect_timeout: got {flags.connect_timeout}, expected at least 1 (s)")
    address, count, index = flags.coordinator, flags.num_processes, flags.process_id
    if address is None and count is None and index is None:
        return None
    if address is not None and count is None and index is None:
        for of_all, of_this in (
            ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
            ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
        ):
            if of_all in environ and of_this in environ:
                count, index = _number(environ, of_all), _number(environ, of_this)
                break
    if address is None or count is None or index is None:
        raise ValueError(
            f"coordinator, num_processes, process_id: got {(address, count, index)}, expected all "
            "or none (under SLURM and Open MPI the coordinator alone is enough)"
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 2**16:
        raise ValueError(f"coordinator: got {address!r}, expected HOST:PORT, e.g. host0:1234")
    if not 0 <= index < count:
        raise ValueError(
            f"process_id: got {index} of num_processes={count}, expected 0 to {count - 1}"
        )
    devices = local_devices(environ)
    if devices is None and "JAX_LOCAL_DEVICE_IDS" not in environ:
        devices = []  # all; without a list JAX would ask the cluster
    return {
        "coordinator_address": address,
        "num_processes": count,
        "process_id": index,
        "local_device_ids": devices,
    }


@contextlib.contextmanager
def _limited(flags: LaunchFlags, where: Mapping[str, Any]) -> Iterator[None]:
    """Ends the process with a clear line if the block takes longer than `connect_timeout`."""

    def give_up() -> None:
        address, index = _coordinator(where), where.get("process_id")
        who = "this process" if index is None else f"process {index} of {where['num_processes']}"
        print(
            f"pretrain: {who} could not connect within {flags.connect_timeout} s: "
            + (
                f"not all processes came to the coordinator at {address}, which is this one"
                if index == 0
                else f"there is no answer from the coordinator at {address}"
            )
            + "; check the address, and that all processes were started and process 0 is alive "
            "(--connect-timeout SECONDS waits longer)",
            file=sys.stderr,
            flush=True,
        )
        os._exit(LOST_PROCESS_EXIT_CODE)

    timer = threading.Timer(flags.connect_timeout, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _coordinator(where: Mapping[str, Any]) -> str:
    """Address of the coordinator, of the detected one too, which JAX shows nowhere in public."""
    from jax._src import distributed

    found = getattr(getattr(distributed, "global_state", None), "coordinator_address", None)
    return where.get("coordinator_address") or found or f"{socket.gethostname()}:0"


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    return int(text) if text.isdigit() else 0


def agreed_flags(flags: PretrainFlags) -> dict[str, Any]:
    """The flags that have to be equal on all processes.

    Not those that say where something lies on a host: what lies there is compared itself.
    """
    content = dataclasses.asdict(flags)
    content.pop("launch")
    for name in ("data", "tokenizer", "cache_dir"):
        content["data"].pop(name)
    return content


def together(work: Callable[[], T], describe: Callable[[T], dict[str, Any]]) -> T:
    """Does something on all processes that fails on all if it fails on one, or gives other results.

    Otherwise a process with a wrong flag or without its data would leave the others waiting.

    Args:
      work: What to do; runs on this process alone and enters no collective.
      describe: JSON value of the result, to be the same everywhere, together with the code.

    Returns:
      What `work` returned.

    Raises:
      DisagreementError: `work` failed on another process (which is named), or the processes differ.
      ValueError: As raised by `work`, like OSError and ImportError.
    """
    if jax.process_count() == 1:
        return work()
    failure: Exception | None = None
    result, content = None, {}
    try:
        result = work()
        content = describe(result)
    except (ValueError, OSError, ImportError) as error:
        failure = error
    code = code_identity(_ROOT / "experiments", _ROOT / "kernels_pallas")
    told = exchange(
        {
            "host": socket.gethostname(),
            "failure": None if failure is None else str(failure) or type(failure).__name__,
            "content": {"code": code, **content},
        }
    )
    if failure is not None:
        raise failure
    broken = [(number, one) for number, one in enumerate(told) if one["failure"] is not None]
    if broken:
        number, one = broken[0]
        raise DisagreementError(f"process {number} on {one['host']} cannot start: {one['failure']}")
    check_agreement([one["content"] for one in told], [one["host"] for one in told])
    return result  # type: ignore[return-value]  # work() returned it


def lost_process(error: BaseException | None) -> bool:
    """Whether an error, or what caused it, says that another process cannot be reached."""
    signs = ("connection closed", "connection reset", "connection refused", "timed out", "gloo",
             "unavailable", "deadline_exceeded", "heartbeat", "broken pipe", "shutting down",
             "nccl", "coordination", "aborted")  # fmt: skip
    while error is not None:
        text = str(error).lower()
        if isinstance(error, RuntimeError) and any(sign in text for sign in signs):
            return True
        error = error.__cause__ or error.__context__
    return False


def leave_alone(reason: BaseException | str, watch: PeerWatch | None = None) -> None:
    """Ends this process at once: the usual way out would wait for the process that is gone."""
    line = (str(reason).strip() or type(reason).__name__).splitlines()[0]
    print(
        f"pretrain: process {jax.process_index()} of {jax.process_count()} stops: another process "
        f"of the run is gone ({line}); start all of them again with the same --run-dir",
        file=sys.stderr,
        flush=True,
    )
    leave(LOST_PROCESS_EXIT_CODE, watch)


def leave(code: int, watch: PeerWatch | None = None) -> None:
    """Ends this process at once if there are others, which are told; else does nothing.

    Python's way out waits for all processes of the run, that of an error too.
    """
    if jax.process_count() > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        if watch is not None:
            watch.abandon()
        os._exit(code)
