"""The training program with one disturbance in it; started by `tools.faults`, never by hand.

The environment variable JAXLIB_PAPERS_FAULT holds JSON: the kind, and when. Without a kind the
program is the ordinary one, but for a line in `digest.json` about the state that it ended in.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import signal
import sys
import threading
import time
from typing import Any

__all__ = ["main"]


def _kill(number: int = signal.SIGKILL) -> None:
    os.kill(os.getpid(), number)


def _later(seconds: float, number: int = signal.SIGKILL) -> None:
    timer = threading.Timer(seconds, _kill, (number,))
    timer.daemon = True
    timer.start()


def _at_step(fault: dict[str, Any]) -> None:
    """Does it when the step's metrics are logged, after a random delay."""
    from experiments import pretrain_report

    note, seen = pretrain_report.note, []
    number = signal.SIGTERM if fault["kind"] == "sigterm" else signal.SIGKILL

    def wrapped(values: Any) -> str:
        seen.append(values)
        if len(seen) == fault["after"]:
            if fault["kind"] == "sigterm":
                _kill(number)
            else:
                _later(fault["delay"], number)
        return note(values)

    pretrain_report.note = wrapped


def _at_save(fault: dict[str, Any]) -> None:
    """Kills while a checkpoint is being written, or lets the disk be full from then on."""
    from jaxlib_papers.train.checkpoint import Checkpointer

    save = Checkpointer.save

    def wrapped(self: Checkpointer, step: int, state: Any, **more: Any) -> None:
        if step == fault["step"] and fault["kind"] == "kill_in_save":
            _later(fault["delay"])
        if step == fault["step"] and fault["kind"] == "disk_full":
            self.wait()
            hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (fault["bytes"], hard))
        save(self, step, state, **more)

    Checkpointer.save = wrapped


def _poison(bad_step: int) -> None:
    """Makes the loss of one step NaN, wherever the run is resumed."""
    import numpy as np

    from experiments import pretrain_run
    from jaxlib_papers.data.pipeline import PipelineIterator

    objective, draw = pretrain_run.expert_divergence_objective, PipelineIterator.__next__

    def poisoned(*args: Any, **more: Any) -> Any:
        import jax.numpy as jnp

        inner = objective(*args, **more)

        def loss(model: Any, batch: Any, *rest: Any) -> Any:
            batch = dict(batch)
            poison = batch.pop("poison", None)
            value, metrics = inner.loss(model, batch, *rest)
            return (value if poison is None else value + jnp.sum(poison)), metrics

        return inner._replace(loss=loss)

    def drawn(self: PipelineIterator) -> Any:
        batch = dict(draw(self))
        rows = next(iter(batch.values())).shape[0]
        value = np.nan if self._step == bad_step else 0.0
        return batch | {"poison": np.full((rows,), value, np.float32)}

    pretrain_run.expert_divergence_objective = poisoned
    PipelineIterator.__next__ = drawn


def _jump(seconds: float) -> None:
    """The wall clock is off by so much, as after a bad time server."""
    true = time.time
    time.time = lambda: true() + seconds


def _write_digest() -> None:
    import jax
    import numpy as np

    from experiments import plots, pretrain_report

    finish = pretrain_report.finish
    plots.save_run_figures = lambda *args: []  # nobody looks at them

    def wrapped(run: Any, *args: Any) -> None:
        found = hashlib.sha256()
        for path, leaf in jax.tree_util.tree_leaves_with_path(run.state):
            found.update(jax.tree_util.keystr(path).encode() + np.asarray(leaf).tobytes())
        content = {"digest": found.hexdigest(), "skipped": int(run.state.skipped)}
        if jax.process_index() == 0:
            (run.directory / "digest.json").write_text(json.dumps(content))
        finish(run, *args)

    pretrain_report.finish = wrapped


def main() -> int:
    """Runs the training program with what the environment asks for."""
    fault = json.loads(os.environ.get("JAXLIB_PAPERS_FAULT", "{}"))
    from experiments import pretrain

    if "--coordinator" in sys.argv:
        import jax

        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    _write_digest()
    if "nan_step" in fault:
        _poison(fault["nan_step"])
    if "clock" in fault:
        _jump(fault["clock"])
    kind = fault.get("kind")
    if kind in ("sigkill", "sigterm"):
        _at_step(fault)
    elif kind in ("kill_in_save", "disk_full"):
        _at_save(fault)
    return pretrain.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
