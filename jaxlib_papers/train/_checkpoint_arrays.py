"""The arrays of a checkpoint by name: how they are called, and whether they are those wanted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

__all__ = ["CheckpointMismatchError", "abstract", "bit_sums", "check_arrays", "flatten_state"]


class CheckpointMismatchError(ValueError):
    """The arrays in a checkpoint are not those that were asked for (key, shape or dtype)."""


def flatten_state(state: Any) -> tuple[dict[str, Any], Any]:
    """Names every leaf of a pytree by its dotted path.

    Args:
      state: Pytree of arrays (or of ``jax.ShapeDtypeStruct``).

    Returns:
      ``(leaves, treedef)``: a dict in the tree's own order, and what ``jax.tree.unflatten`` needs.

    Raises:
      ValueError: Two leaves have the same name, or a leaf is a random key.
    """
    entries, treedef = jax.tree_util.tree_flatten_with_path(state)
    leaves: dict[str, Any] = {}
    for path, leaf in entries:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if name in leaves:
            raise ValueError(f"state: two leaves are both called {name!r}; rename one of them")
        dtype = getattr(leaf, "dtype", None)
        if dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
            raise ValueError(
                f"state: {name!r} is a random key, and checkpoints hold none; derive keys with "
                "jax.random.fold_in(jax.random.key(seed), step)"
            )
        leaves[name] = leaf
    return leaves, treedef


def bit_sums(leaves: Mapping[str, Any]) -> dict[str, int]:
    """Sum of the bits of each array as unsigned words, modulo 2**32: no order, no mesh.

    Each process reads its own shards; of shards that are held several times, one counts.
    """

    def of_words(x: np.ndarray) -> int:
        x = np.ascontiguousarray(x).reshape(-1)
        return int(x.view(f"u{min(x.dtype.itemsize, 4)}").sum(dtype=np.uint32))

    def one(x: Any) -> int:
        if not isinstance(x, jax.Array):
            return of_words(np.asarray(x)) if jax.process_index() == 0 else 0
        return sum(of_words(np.asarray(s.data)) for s in x.addressable_shards if s.replica_id == 0)

    sums = np.array([one(x) % 2**32 for x in leaves.values()], np.uint32)
    if jax.process_count() > 1:
        sums = np.asarray(multihost_utils.process_allgather(sums)).sum(axis=0, dtype=np.uint32)
    return dict(zip(leaves, sums.tolist(), strict=True))


def check_arrays(target: Mapping[str, Any], stored: Mapping[str, Any], where: Any) -> None:
    """Compares names, shapes and dtypes, and raises once for all that differ."""
    lines = [f"{name}: not in the checkpoint" for name in target if name not in stored]
    lines += [f"{name}: in the checkpoint, not asked for" for name in stored if name not in target]
    for name, leaf in target.items():
        if name not in stored:
            continue
        want, have = abstract(leaf), stored[name]
        if tuple(have.shape) != want.shape:
            lines.append(
                f"{name}: shape {tuple(have.shape)} in the checkpoint, {want.shape} asked for"
            )
        if np.dtype(have.dtype) != want.dtype:
            lines.append(f"{name}: dtype {have.dtype} in the checkpoint, {want.dtype} asked for")
    if lines:
        more = [f"... and {len(lines) - 20} more"] if len(lines) > 20 else []
        raise CheckpointMismatchError(
            f"{where} does not hold the state asked for (nothing is cast or filled in):\n  "
            + "\n  ".join(lines[:20] + more)
        )


def abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    """Shape, dtype and sharding of a leaf; without a sharding, the first device."""
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        leaf = np.asarray(leaf)
    sharding = getattr(leaf, "sharding", None)
    if sharding is None:
        sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
