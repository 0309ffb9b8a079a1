"""SIGTERM and Ctrl-C end a run after the step in progress; a second one ends it at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from jaxlib_papers.train.preemption import PREEMPTED_EXIT_CODE, PreemptionGuard


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_is_remembered_and_the_former_handler_comes_back(number):
    before = signal.getsignal(number)
    with PreemptionGuard() as guard:
        assert not guard.should_stop(1)
        assert guard.signal_name == ""
        os.kill(os.getpid(), number)
        assert guard.should_stop(2) and guard.should_stop(3)
        assert guard.signal_name == number.name
    assert signal.getsignal(number) is before


def test_second_signal_ends_the_process_at_once():
    code = (
        "import os, signal\n"
        "from jaxlib_papers.train.preemption import PreemptionGuard\n"
        "with PreemptionGuard() as guard:\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    print(guard.should_stop(1), flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    print('still here')\n"
    )
    env = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert (done.returncode, done.stdout) == (128 + signal.SIGTERM, "True\n"), done.stderr


def test_outside_the_main_thread_there_are_no_handlers_and_no_error():
    seen = []

    def work():
        with PreemptionGuard() as guard:
            seen.append((guard.should_stop(1), signal.getsignal(signal.SIGTERM)))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(False, before)]


def test_exit_code_differs_from_success_failure_and_wrong_input():
    assert PREEMPTED_EXIT_CODE not in (0, 1, 2) and 0 < PREEMPTED_EXIT_CODE < 128
