"""Finds the projections of a parameter tree that an adapter can sit on, by path pattern."""

from __future__ import annotations

import difflib
import fnmatch
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

__all__ = ["DEFAULT_TARGETS", "Projection", "find_projections", "plain_tree"]

# Trailing axes of each projection of nn.attention and nn.layers, and how many of them are inputs.
_NATIVE = {
    "query": (3, 1),
    "key": (3, 1),
    "value": (3, 1),
    "out": (3, 2),
    "gate": (2, 1),
    "up": (2, 1),
    "down": (2, 1),
    "head": (2, 1),
}
_OTHERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
DEFAULT_TARGETS = (*(name for name in _NATIVE if name != "head"), *_OTHERS)
"""The seven projections of a decoder layer, by this library's names and by Hugging Face's."""


class Projection(NamedTuple):
    """One linear map (or a stack of them) inside a parameter tree.

    Attributes:
      name: Path joined by dots, without a last "weight" or "kernel".
      path: Keys of the leaf.
      stack: Leading axes that only stack layers.
      inputs: Shape of the input.
      outputs: Shape of the output.
      out_first: Whether the leaf is [out, in] as in PyTorch.
      axes: Logical axes of the leaf without those of the stack, where they are known.
    """

    name: str
    path: tuple[Any, ...]
    stack: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    out_first: bool
    axes: tuple[str | None, ...] | None

    @property
    def width(self) -> int:
        """Number of inputs."""
        return math.prod(self.inputs)

    @property
    def out(self) -> int:
        """Number of outputs."""
        return math.prod(self.outputs)


def plain_tree(tree: Any) -> Any:
    """Nested dicts of arrays for a module or `nnx.State`, other trees as they are."""
    if isinstance(tree, nnx.Module):
        tree = nnx.state(tree)
    return nnx.to_pure_dict(tree) if isinstance(tree, nnx.State) else tree


def _keys(path: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(
        next(getattr(entry, field) for field in ("key", "name", "idx") if hasattr(entry, field))
        for entry in path
    )


def _axes_by_path(tree: Any) -> Mapping[tuple[Any, ...], tuple[str | None, ...]]:
    if not isinstance(tree, (nnx.Module, nnx.State)):
        return {}
    state = nnx.state(tree) if isinstance(tree, nnx.Module) else tree
    return {
        tuple(path): variable.get_metadata().get("logical_axes")
        for path, variable in nnx.to_flat_state(state)
    }


def _projection(path: tuple[Any, ...], shape: tuple[int, ...], axes: Any) -> Projection | None:
    """The leaf as a projection, or None if it can't be one."""
    keys = [str(key) for key in path]
    leaf, stacked = keys[-1], "layers" in keys
    name = ".".join(keys[:-1] if leaf in ("weight", "kernel", "W") and len(keys) > 1 else keys)
    base, inner, out_first = 2, 1, leaf != "kernel"
    if leaf in _NATIVE and len(shape) >= _NATIVE[leaf][0]:
        (base, inner), out_first = _NATIVE[leaf], False
    extra = len(shape) - base
    if extra not in (0, 1) or (extra == 1 and not stacked) or (axes and "experts" in axes):
        return None
    if leaf == "scale" or leaf.endswith("bias"):  # stacked, they look like matrices
        return None
    own = shape[extra:]
    inputs, outputs = own[:inner], own[inner:]
    if out_first:
        inputs, outputs = outputs, inputs
    return Projection(
        name, path, shape[:extra], inputs, outputs, out_first, axes and tuple(axes[extra:])
    )


def _matches(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, f"*.{pattern}")


def find_projections(tree: Any, targets: Sequence[str] | None = None) -> list[Projection]:
    """Projections of a parameter tree whose path matches one of the patterns.

    Args:
      tree: A module, an `nnx.State`, or any tree of arrays (or of their shapes). Matrices are
        [out, in], except for leaves named "kernel" ([in, out]) and the projections of this
        library's decoder. Below a key "layers" a matrix may have one leading axis more.
      targets: Globs for a whole path or its end: "query", "attention.*", "layers.3.*.q_proj". None
        takes the seven projections of a decoder layer.

    Raises:
      ValueError: Nothing matched, or one of the patterns given matched nothing.
    """
    axes = _axes_by_path(tree)
    leaves = jax.tree_util.tree_flatten_with_path(plain_tree(tree))[0]
    found = []
    for path, leaf in leaves:
        keys = _keys(path)
        if keys and len(np.shape(leaf)) >= 2:
            found.append(_projection(keys, tuple(np.shape(leaf)), axes.get(keys)))
    found = [projection for projection in found if projection is not None]
    patterns = DEFAULT_TARGETS if targets is None else tuple(targets)
    chosen = [p for p in found if any(_matches(p.name, pattern) for pattern in patterns)]
    if targets is None:
        unmatched = [] if chosen else ["the seven projections of a decoder layer"]
    else:
        unmatched = [t for t in patterns if not any(_matches(p.name, t) for p in found)]
    if unmatched or not chosen:
        names = sorted({p.name for p in found})
        near = {n for t in unmatched for n in difflib.get_close_matches(t, names, 3, 0.3)}
        raise ValueError(
            f"targets: no target matched {unmatched or list(patterns)}; projections of this tree "
            f"are {names[:12]}{' ...' if len(names) > 12 else ''}"
            + (f"; did you mean {sorted(near)}?" if near else "")
        )
    return chosen
