"""Where each parameter lies: from logical axes to shardings, and the table that shows them.

Everything here works on concrete arrays and on `jax.ShapeDtypeStruct`s, on real meshes and (for
the table) on abstract ones, so that a layout for a thousand devices can be read on a laptop.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxlib_papers.nn.partitioning import (
    DEFAULT_RULES,
    ShardingRules,
    logical_to_spec,
)

__all__ = [
    "ShardingRow",
    "describe_shardings",
    "format_rows",
    "leaf_name",
    "model_axes",
    "state_axes",
    "tree_shardings",
    "tree_specs",
]

PyTree = Any
Path = tuple[Any, ...]


class ShardingRow(NamedTuple):
    """One array in the table of `describe_shardings`.

    Attributes:
      name: Path of the leaf, joined by dots.
      shape: Global shape.
      dtype: Name of the dtype.
      axes: Logical axes, None where unknown (counters and other scalars).
      spec: Where each dimension lies.
      bytes_per_device: Bytes that one device holds.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str | None, ...] | None
    spec: PartitionSpec
    bytes_per_device: int


def leaf_name(path: Iterable[Any]) -> str:
    """Returns the path of a tree leaf as text, e.g. "layers.attention.query"."""
    return ".".join(str(part) for part in _keys(path))


def _keys(path: Iterable[Any]) -> Path:
    """The bare keys of a tree path, whatever kind of container each came from."""
    out = []
    for entry in path:
        for field in ("key", "name", "idx"):
            if hasattr(entry, field):
                out.append(getattr(entry, field))
                break
    return tuple(out)


def _by_path(tree: PyTree, is_leaf: Any = None) -> dict[Path, Any]:
    return {
        _keys(path): leaf
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]
    }


def _is_axes(x: Any) -> bool:
    return x is None or isinstance(x, tuple)


def state_axes(state: nnx.State) -> PyTree:
    """Returns the `logical_axes` metadata of every variable of an `nnx.State`, as a nested dict.

    Raises:
      ValueError: If an `nnx.Param` has none; names it. (Other variables may have none: they are
        replicated.)
    """

    def axes_of(path: Path, variable: nnx.Variable) -> tuple[str | None, ...] | None:
        axes = variable.get_metadata().get("logical_axes")
        if axes is None and isinstance(variable, nnx.Param):
            raise ValueError(
                f"parameter {'.'.join(map(str, path))} carries no logical axes; create it as "
                "nnx.Param(value, logical_axes=(...)), one name or None per dimension"
            )
        return None if axes is None else tuple(axes)

    out: dict[Any, Any] = {}
    for path, variable in nnx.to_flat_state(state):
        node = out
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node[path[-1]] = axes_of(path, variable)
    return out


def model_axes(graphdef: nnx.GraphDef, params: PyTree, rest: PyTree) -> tuple[PyTree, PyTree]:
    """Returns the logical axes of a split model's (params, rest).

    The axes are part of the graphdef, so they are there wherever the model's structure is.

    Args:
      graphdef: Static structure of the model.
      params: Nested dict of arrays or ShapeDtypeStructs.
      rest: Nested dict of the others.
    """
    every = _by_path(state_axes(nnx.state(nnx.merge(graphdef, params, rest))), _is_axes)

    def select(tree: PyTree) -> PyTree:
        return jax.tree_util.tree_map_with_path(lambda path, _: every[_keys(path)], tree)

    return select(params), select(rest)


def tree_specs(
    tree: PyTree,
    axes: PyTree,
    mesh: Mesh | AbstractMesh,
    rules: ShardingRules = DEFAULT_RULES,
    *,
    like: PyTree | None = None,
) -> PyTree:
    """Returns the PartitionSpec of every leaf of a tree.

    A leaf takes the axes of the entry of `axes` whose path is the end of its own path. So the same
    function serves parameters and optimizer states, in which the parameters' tree appears once or
    more inside other containers. Leaves without an entry are replicated.

    Args:
      tree: Arrays or ShapeDtypeStructs.
      axes: Nested dict of tuples of logical names.
      mesh: A concrete or abstract mesh.
      rules: The sharding rules.
      like: Tree of the structure of `axes`; when given, a leaf of another shape than its entry here
        (the factored moments of Adafactor) is replicated.

    Raises:
      ValueError: As `logical_to_spec`; names the leaf.
    """
    by_path = _by_path(axes, _is_axes)
    shapes = {} if like is None else {path: leaf.shape for path, leaf in _by_path(like).items()}

    def spec_of(path: Path, leaf: Any) -> PartitionSpec:
        names = _lookup(by_path, _keys(path))
        if names is None or _lookup(shapes, _keys(path)) not in (None, leaf.shape):
            return PartitionSpec()
        return logical_to_spec(names, leaf.shape, rules, mesh, name=leaf_name(path))

    return jax.tree_util.tree_map_with_path(spec_of, tree)


def _lookup(table: Mapping[Path, Any], path: Path) -> Any:
    for start in range(len(path) + 1):
        if path[start:] in table:
            return table[path[start:]]
    return None


def tree_shardings(
    tree: PyTree,
    axes: PyTree,
    mesh: Mesh,
    rules: ShardingRules = DEFAULT_RULES,
    *,
    like: PyTree | None = None,
) -> PyTree:
    """Returns the NamedSharding of every leaf; arguments as `tree_specs`."""
    specs = tree_specs(tree, axes, mesh, rules, like=like)
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        specs,
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )


def describe_shardings(
    tree: PyTree,
    axes: PyTree,
    mesh: Mesh | AbstractMesh,
    rules: ShardingRules = DEFAULT_RULES,
    *,
    like: PyTree | None = None,
) -> list[ShardingRow]:
    """Returns one row per leaf: name, shape, dtype, axes, spec, bytes on one device.

    Args:
      tree: Arrays or ShapeDtypeStructs; nothing is allocated.
      axes: Nested dict of tuples of logical names (`ModelSpec.axes`).
      mesh: A concrete or abstract mesh.
      rules: The sharding rules.
      like: As in `tree_specs`.

    Raises:
      ValueError: As `logical_to_spec`; names the parameter.
    """
    by_path = _by_path(axes, _is_axes)
    specs = _by_path(
        tree_specs(tree, axes, mesh, rules, like=like), lambda x: isinstance(x, PartitionSpec)
    )
    sizes = dict(mesh.shape)
    rows = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        spec = specs[_keys(path)]
        used = [axis for entry in spec if entry for axis in np.atleast_1d(entry)]
        parts = math.prod(sizes[axis] for axis in used)
        rows.append(
            ShardingRow(
                name=leaf_name(path),
                shape=tuple(leaf.shape),
                dtype=np.dtype(leaf.dtype).name,
                axes=_lookup(by_path, _keys(path)),
                spec=spec,
                bytes_per_device=math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize // parts,
            )
        )
    return rows


def format_rows(rows: Iterable[ShardingRow]) -> str:
    """Returns the table as aligned text, with the total of bytes per device in the last line."""
    rows = list(rows)
    cells = [("name", "shape", "dtype", "logical axes", "on mesh axes", "bytes/device")]
    for row in rows:
        axes = "-" if row.axes is None else " ".join(str(axis or "-") for axis in row.axes)
        on = " ".join("-" if e is None else "*".join(np.atleast_1d(e)) for e in row.spec)
        shape = "x".join(map(str, row.shape)) or "scalar"
        cells.append((row.name, shape, row.dtype, axes, on or "-", f"{row.bytes_per_device:,}"))
    cells.append(("total", "", "", "", "", f"{sum(row.bytes_per_device for row in rows):,}"))
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column == len(widths) - 1 else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in cells
    )
