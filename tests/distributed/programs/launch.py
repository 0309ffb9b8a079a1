"""Connects as the training program does, and dies or waits for the others.

Arguments: what happens to one of them ("kill" or "raise"), its number, then flags of the training
program. Before that every process prints what it found: its number, how many there are, and what
the others sent.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time


def main() -> None:
    what, victim, *flags = sys.argv[1:]
    from experiments import pretrain, pretrain_hosts

    with pretrain_hosts.connected(pretrain.parse(flags).launch) as watch:
        import jax

        from jaxlib_papers.train.agreement import exchange

        told = exchange(f"from {jax.process_index()}")
        found = [jax.process_index(), jax.process_count(), watch is not None, told]
        print(json.dumps(found), flush=True)
        if jax.process_count() == 1:
            return
        time.sleep(1)  # all have printed
        if jax.process_index() == int(victim):
            if what == "raise":
                raise KeyError("nobody expected this")
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(120)  # in nothing that could fail


if __name__ == "__main__":
    main()
