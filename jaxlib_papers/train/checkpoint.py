"""Checkpoints that either exist whole or do not count, on any number of devices.

A thin layer over Orbax's asynchronous ``CheckpointManager``. One step directory holds three things
that belong together: the train state's arrays, the data iterator's state and the configuration of
the run.

What this layer adds to Orbax, and why:

* **Only complete steps exist.** With rename-style commits Orbax takes any numbered directory for a
  finished step, also one that a dying copy job or a person made. Here a step counts only if its
  commit record, its array index and its metadata are all there; anything else is set aside at
  start, so that the next save at the same number succeeds instead of being skipped.
* **Nothing is cast.** Orbax restores float32 into a bfloat16 target without a word. Here keys,
  shapes and dtypes are compared before a byte is read, and every difference is named.
* **Damage is noticed.** Beside the arrays lies a sum of the bits of each, which is the same on any
  mesh; an array whose bits changed on disk is an error and not a slightly different model.
* **Errors say what is still good.** A save that fails (full disk, lost mount) raises
  :class:`CheckpointError` with the last complete step, which is never deleted before its
  successor is committed.

Arrays are stored under flat names (``params.layers.attention.query``), so the container types of
the state (NNX states, optax named tuples, dataclasses) may change without making a checkpoint
unreadable. Random keys are refused: they are derived from seed and step
(``fold_in(key(seed), step)``).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils

from jaxlib_papers import __version__
from jaxlib_papers.train._checkpoint_arrays import (
    CheckpointMismatchError,
    abstract,
    bit_sums,
    check_arrays,
    flatten_state,
)

__all__ = [
    "CheckpointError",
    "CheckpointFormatError",
    "CheckpointMismatchError",
    "Checkpointer",
    "Restored",
    "flatten_state",
]

_STATE, _META = "state", "meta"
_FORMAT = 1


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or found; the message names the last one that is valid."""


class CheckpointFormatError(CheckpointError):
    """A checkpoint was written by a later version, whose format this one does not know."""


class Restored(NamedTuple):
    """What one step directory holds.

    Attributes:
      step: Number of finished training steps.
      state: The state, in the structure, dtypes and shardings of the target.
      data_state: State of the data iterator (JSON values), None if none was saved.
      config: Configuration that the run was saved with (JSON values), None if none was saved.
    """

    step: int
    state: Any
    data_state: Any
    config: Any


class _Retention:
    """Orbax preservation policy: the newest ``last`` steps and every multiple of ``period``."""

    def __init__(self, last: int, period: int | None):
        self.last, self.period = last, period

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        newest = {info.step for info in sorted(checkpoints, key=lambda c: c.step)[-self.last :]}
        kept_forever = self.period or 0
        return [
            info.step in newest or (kept_forever > 0 and info.step % kept_forever == 0)
            for info in checkpoints
        ]


class Checkpointer:
    """Saves and restores (train state, data state, configuration) by step number.

    All processes of a run call every method, in the same order; the directory is shared by them.
    ``save`` returns as soon as the arrays are copied to the host; the state may be donated to the
    next step right after.
    """

    def __init__(
        self,
        directory: str | epath.PathLike,
        *,
        keep_last: int = 3,
        keep_period: int | None = None,
        asynchronous: bool = True,
    ):
        """Opens (and creates) a directory of checkpoints.

        Args:
          directory: Where the step directories go; a local path or one that ``etils.epath`` knows.
          keep_last: How many of the newest steps to keep, at least 1.
          keep_period: Steps that are multiples of this are kept for ever; None = none.
          asynchronous: Write in the background.

        Raises:
          ValueError: A retention number below 1.
          CheckpointError: The directory cannot be made or written.
          CheckpointFormatError: A step in it was written by a later version; nothing is changed.
        """
        if keep_last < 1:
            raise ValueError(f"keep_last: got {keep_last}, expected at least 1")
        if keep_period is not None and keep_period < 1:
            raise ValueError(f"keep_period: got {keep_period}, expected at least 1 or None")
        self.directory = epath.Path(directory).absolute()
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._refuse_newer_formats()
            if jax.process_index() == 0:
                self._set_incomplete_aside()
            _barrier("checkpoint-directory-ready")
            self._manager = ocp.CheckpointManager(
                self.directory,
                options=ocp.CheckpointManagerOptions(
                    preservation_policy=_Retention(keep_last, keep_period),
                    cleanup_tmp_directories=True,
                    enable_async_checkpointing=asynchronous,
                ),
                item_names=(_STATE, _META),
                # Named here, so that a fresh process can read the array index before any save.
                item_handlers={
                    _STATE: ocp.StandardCheckpointHandler(),
                    _META: ocp.JsonCheckpointHandler(),
                },
            )
        except OSError as error:
            raise CheckpointError(
                f"cannot use {self.directory} for checkpoints: {error}"
            ) from error
        self._pending: int | None = None

    def __enter__(self) -> Checkpointer:
        """Returns itself; leaving the block waits for the last save."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Closes."""
        self.close()

    def steps(self) -> tuple[int, ...]:
        """Complete steps on disk, ascending."""
        numbers = [int(p.name) for p in self.directory.iterdir() if p.name.isdigit()]
        return tuple(sorted(n for n in numbers if _is_complete(self.directory / str(n))))

    def latest_step(self) -> int | None:
        """Last complete step, None if there is none; the same answer on every process."""
        steps = self.steps()
        latest = steps[-1] if steps else -1
        if jax.process_count() > 1:
            latest = int(multihost_utils.broadcast_one_to_all(np.int32(latest)))
        return None if latest < 0 else latest

    def save(self, step: int, state: Any, *, data_state: Any = None, config: Any = None) -> None:
        """Starts writing one step; an error of the previous write comes out here too.

        Args:
          step: Number of finished steps, not saved before.
          state: Pytree of arrays, sharded in any way.
          data_state: JSON-able state of the data iterator, the same on every process.
          config: JSON-able configuration to be compared at a resume.

        Raises:
          CheckpointError: The step exists already, or writing this or the previous one failed.
          ValueError: The state holds a random key.
        """
        self.wait()
        if step in self.steps():
            raise CheckpointError(
                f"{self.directory / str(step)} is a complete checkpoint and is not overwritten; "
                "resume from the last step or use another run directory"
            )
        leaves, _ = flatten_state(state)
        sums = bit_sums(leaves)
        meta = {"format": _FORMAT, "step": step, "data": data_state, "config": config, "sums": sums}
        meta["digest"] = _digest(meta)
        self._pending = step
        try:
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    **{_STATE: ocp.args.StandardSave(leaves), _META: ocp.args.JsonSave(meta)}
                ),
                force=True,
            )
        except (OSError, ValueError, RuntimeError) as error:
            self._fail(error)

    def wait(self) -> None:
        """Waits for the write in progress.

        Raises:
          CheckpointError: It failed; the message names the last complete step, which stays valid.
        """
        try:
            self._manager.wait_until_finished()
        except (OSError, ValueError, RuntimeError) as error:
            self._fail(error)
        self._pending = None

    def restore(self, target: Any, step: int | None = None) -> Restored:
        """Reads one step into the structure, dtypes and shardings of ``target``.

        The mesh of the target may be any; it need not be the one that the step was saved from.

        Args:
          target: Pytree of arrays or of ``jax.ShapeDtypeStruct`` (with ``sharding``, else the first
            device).
          step: Which step; None = the last complete one.

        Returns:
          The :class:`Restored` step.

        Raises:
          CheckpointError: There is no such complete step, or it cannot be read.
          CheckpointMismatchError: A key is missing or unknown, a shape or a dtype differs.
        """
        self.wait()
        step = self.latest_step() if step is None else step
        if step is None or not _is_complete(self.directory / str(step)):
            raise CheckpointError(
                f"there is no complete checkpoint {'' if step is None else f'of step {step} '}in "
                f"{self.directory}; complete steps: {list(self.steps()) or 'none'}"
            )
        leaves, treedef = flatten_state(target)
        try:
            stored = dict(self._manager.item_metadata(step)[_STATE].tree)
            check_arrays(leaves, stored, self.directory / str(step))
            wanted = {name: abstract(leaf) for name, leaf in leaves.items()}
            args = {_STATE: ocp.args.StandardRestore(wanted), _META: ocp.args.JsonRestore()}
            restored = self._manager.restore(step, args=ocp.args.Composite(**args))
            meta = restored[_META]
        except CheckpointMismatchError:
            raise
        # Damaged files surface as anything from KeyError to Orbax's own bare Exception.
        except Exception as error:
            raise CheckpointError(
                f"checkpoint {self.directory / str(step)} cannot be read: {_first_line(error)}"
            ) from error
        arrays = {name: restored[_STATE][name] for name in leaves}
        sums = bit_sums(arrays)
        expected = meta.get("sums", {})  # earlier versions wrote none
        damaged = [name for name in arrays if name in expected and sums[name] != expected[name]]
        if damaged:
            raise CheckpointError(
                f"checkpoint {self.directory / str(step)} is damaged: the bits of "
                f"{', '.join(damaged[:5])} are not those that were saved ({len(damaged)} arrays)"
            )
        state = jax.tree.unflatten(treedef, list(arrays.values()))
        return Restored(step, state, meta["data"], meta["config"])

    def set_aside(self, step: int) -> None:
        """Takes a step that cannot be read out of the way; it is kept as ``damaged-<step>``.

        All processes call it. The next save at the same number succeeds.
        """
        if jax.process_index() == 0:
            self._rename(self.directory / str(step), f"damaged-{step}")
        _barrier("checkpoint-set-aside")
        self._manager.reload()

    def read_config(self, step: int) -> Any:
        """Configuration that a complete step was saved with, without reading its arrays."""
        return json.loads((self.directory / str(step) / _META / "metadata").read_text())["config"]

    def close(self) -> None:
        """Waits for the write in progress and lets the background threads go."""
        try:
            self.wait()
        finally:
            self._manager.close()

    def _fail(self, error: Exception) -> None:
        step, self._pending = self._pending, None
        self._manager.reload()
        if jax.process_index() == 0 and step is not None:
            # Half a checkpoint is of no use, and the disk is likely to be full.
            for path in self.directory.glob(f"{step}.orbax-checkpoint-tmp*"):
                path.rmtree(missing_ok=True)
        steps = self.steps()
        good = f"the last complete one is step {steps[-1]}" if steps else "there is no earlier one"
        raise CheckpointError(
            f"checkpoint of step {step} could not be written to {self.directory} ({good}): "
            f"{_first_line(error)}"
        ) from error

    def _refuse_newer_formats(self) -> None:
        """Such a step is whole for those who can read it: it is not set aside as incomplete."""
        for path in self.directory.iterdir():
            meta = _read_meta(path) if path.name.isdigit() else {}
            number = meta.get("format")
            # The digest tells a later version from a bit that changed in the number.
            if isinstance(number, int) and number > _FORMAT and _has_its_digest(meta):
                raise CheckpointFormatError(
                    f"{path} is a checkpoint of format {number}, and jaxlib_papers {__version__} "
                    f"knows formats up to {_FORMAT}: resume with the version that wrote it, or use "
                    "another run directory; nothing was changed"
                )

    def _set_incomplete_aside(self) -> None:
        for path in list(self.directory.iterdir()):
            if not path.name.isdigit() or _is_complete(path):
                continue
            self._rename(path, f"incomplete-{path.name}")

    def _rename(self, path: epath.Path, name: str) -> None:
        target, n = self.directory / name, 1
        while target.exists():
            n += 1
            target = self.directory / f"{name}-{n}"
        path.rename(target)


def _is_complete(path: epath.Path) -> bool:
    commit, meta = _read_json(path / "_CHECKPOINT_METADATA"), _read_meta(path)
    return (
        commit.get("commit_timestamp_nsecs") is not None
        and meta.get("format") == _FORMAT
        and _has_its_digest(meta)
        and (path / _STATE / "_METADATA").exists()
    )


def _read_json(path: epath.Path) -> dict[str, Any]:
    """An object from a file; an empty one if there is none."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _read_meta(path: epath.Path) -> dict[str, Any]:
    return _read_json(path / _META / "metadata")


def _has_its_digest(meta: Mapping[str, Any]) -> bool:
    return meta.get("digest", _digest(meta)) == _digest(meta)


def _digest(meta: Mapping[str, Any]) -> str:
    """Of everything beside the arrays; earlier versions wrote none."""
    content = {name: value for name, value in meta.items() if name != "digest"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"


def _barrier(name: str) -> None:
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)
