"""What the process keeps after a large buffer is freed."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from jaxlib_papers.train.host_memory import keep_freed_memory

_PROGRAM = """
import resource
import sys

if sys.argv[1] == "keep":
    from jaxlib_papers.train.host_memory import keep_freed_memory

    assert keep_freed_memory()


def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    # Python's bytearray takes its bytes from the C library's calloc; writing touches each page.
    block = bytearray(32 << 20)
    block[:: 4096] = b"x" * len(block[:: 4096])
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


faults()
print(faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc only")
def test_a_second_buffer_needs_no_fresh_pages():
    def second(how: str) -> int:
        out = subprocess.run(
            [sys.executable, "-c", _PROGRAM, how], check=True, capture_output=True, text=True
        )
        return int(out.stdout)

    pages = (32 << 20) // 4096
    assert second("leave") > pages // 2
    assert second("keep") < pages // 10


def test_without_glibc_nothing_is_done(monkeypatch):
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    assert keep_freed_memory() is False
