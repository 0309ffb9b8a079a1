"""Logical axis names, and the table that places them on the mesh.

Parameters and activations name their dimensions ("embed", "heads", "batch" ...). One frozen
`ShardingRules` table says which mesh axis each name lies on. The module code never mentions a
mesh: `constrain` reads mesh and rules from a context that the train step enters while tracing, and
does nothing where there is none, so that the same module runs on a laptop and on a pod.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from kernels_pallas.tiling import align_varying

__all__ = [
    "DEFAULT_RULES",
    "MESH_AXES",
    "ShardingRules",
    "constrain",
    "current_sharding",
    "gather_shards",
    "logical_to_spec",
    "spec_axes",
    "use_sharding",
]

MESH_AXES: tuple[str, ...] = ("data", "fsdp", "expert", "tensor", "context")
"""Names of the axes of every mesh, outermost first; any of them may have size 1."""

MeshAxes = str | tuple[str, ...] | None


def _as_tuple(axes: MeshAxes) -> tuple[str, ...]:
    if axes is None:
        return ()
    return (axes,) if isinstance(axes, str) else tuple(axes)


@dataclasses.dataclass(frozen=True)
class ShardingRules:
    """The table from logical axis names to mesh axes.

    Attributes:
      table: Pairs (logical name, mesh axis | tuple of mesh axes | None). A tuple splits one
        dimension over the product of several mesh axes; None leaves it whole.
      replicate_if_indivisible: Logical names that stay whole when their size is no multiple of the
        mesh axes' product. Any other name raises there.
    """

    table: tuple[tuple[str, MeshAxes], ...]
    replicate_if_indivisible: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        """Checks the table for names given twice and for mesh axes that do not exist."""
        names = [name for name, _ in self.table]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"ShardingRules.table names {twice} more than once; keep one row each")
        for name, axes in self.table:
            for axis in _as_tuple(axes):
                if axis not in MESH_AXES:
                    raise ValueError(
                        f"ShardingRules.table places {name!r} on mesh axis {axis!r}; "
                        f"expected one of {MESH_AXES}"
                    )

    def mesh_axes(self, logical: str) -> tuple[str, ...]:
        """Returns the mesh axes of a logical name (empty for None).

        Raises:
          ValueError: If the table has no row for the name.
        """
        for name, axes in self.table:
            if name == logical:
                return _as_tuple(axes)
        raise ValueError(
            f"logical axis {logical!r} is not in the sharding rules; known: "
            f"{sorted(name for name, _ in self.table)}. Add it with rules.override({logical}=...)"
        )

    def override(
        self, *, replicate_if_indivisible: Sequence[str] | None = None, **rows: MeshAxes
    ) -> ShardingRules:
        """Returns a copy with rows replaced or added, e.g. `rules.override(vocab=None)`."""
        merged = {**dict(self.table), **rows}
        allowed = (
            self.replicate_if_indivisible
            if replicate_if_indivisible is None
            else frozenset(replicate_if_indivisible)
        )
        return ShardingRules(tuple(merged.items()), allowed)


DEFAULT_RULES = ShardingRules(
    table=(
        # Parameters.
        ("layers", None),
        ("vocab", "tensor"),
        ("embed", "fsdp"),
        ("heads", "tensor"),
        ("kv_heads", "tensor"),
        ("head_dim", None),
        ("mlp", "tensor"),
        ("experts", "expert"),
        ("expert_mlp", "tensor"),
        ("norm", None),
        # Activations.
        ("batch", ("data", "fsdp", "expert")),
        ("seq", "context"),
        ("embed_act", None),
        ("heads_act", "tensor"),
        ("kv_heads_act", "tensor"),
        ("mlp_act", "tensor"),
        ("vocab_act", "tensor"),
        ("experts_act", "expert"),
        ("expert_capacity", None),
    ),
    # Few KV heads on a wide tensor axis: each device keeps all of them, as is usual.
    replicate_if_indivisible=frozenset({"kv_heads", "kv_heads_act"}),
)
"""Rows over (data, fsdp, expert), parameters split over fsdp, tensor and expert.

Tokens travel to the devices that hold their experts. With fewer rows than that product,
``rules.override(batch=("data", "fsdp"))`` lets the devices of the expert axis share their rows.
"""


def logical_to_spec(
    axes: Sequence[str | None],
    shape: Sequence[int],
    rules: ShardingRules,
    mesh: Mesh | AbstractMesh,
    *,
    name: str = "array",
) -> PartitionSpec:
    """Returns the PartitionSpec of an array from its logical axes.

    Mesh axes of size 1 (or missing in `mesh`) are left out of the result.

    Args:
      axes: One logical name (or None: never split) per dimension.
      shape: The array's shape.
      rules: The table from logical names to mesh axes.
      mesh: A concrete or abstract mesh; only the axis sizes are read.
      name: What the array is called in error messages.

    Returns:
      A spec with one entry per dimension.

    Raises:
      ValueError: If the number of names is not the rank, a name is not in the rules, two
        dimensions claim one mesh axis, or a dimension is no multiple of its mesh axes' size and
        the rules do not let it replicate.
    """
    if len(axes) != len(shape):
        raise ValueError(
            f"{name}: {len(axes)} logical axes {tuple(axes)} for an array of rank {len(shape)}, "
            f"shape {tuple(shape)}; give one name (or None) per dimension"
        )
    sizes = dict(mesh.shape)
    claimed: dict[str, int] = {}
    entries: list[MeshAxes] = []
    for dim, (logical, size) in enumerate(zip(axes, shape, strict=True)):
        wanted = () if logical is None else rules.mesh_axes(logical)
        for axis in wanted:
            # Checked whatever the axis' size, so that a rule that cannot work at scale already
            # fails on one device.
            if axis in claimed:
                other = claimed[axis]
                raise ValueError(
                    f"{name}: dimensions {other} ({axes[other]!r}) and {dim} ({logical!r}) both "
                    f"claim mesh axis {axis!r}; change one of their rows in the sharding rules"
                )
            claimed[axis] = dim
        present = tuple(axis for axis in wanted if sizes.get(axis, 1) > 1)
        parts = math.prod(sizes[axis] for axis in present)
        if size % parts != 0:
            if logical not in rules.replicate_if_indivisible:
                raise ValueError(
                    f"{name}: dimension {dim} ({logical!r}) of size {size}, shape {tuple(shape)}, "
                    f"is not divisible by mesh axis {'*'.join(present)} of size {parts}; change "
                    f"the mesh or the size, or add {logical!r} to replicate_if_indivisible"
                )
            present = ()
        entries.append(present[0] if len(present) == 1 else (present or None))
    return PartitionSpec(*entries)


def spec_axes(*entries: MeshAxes) -> tuple[str, ...]:
    """Returns the mesh axes that entries of a PartitionSpec name, in their order."""
    return tuple(axis for entry in entries for axis in _as_tuple(entry))


def gather_shards(
    shard: jax.Array, axes: tuple[str, ...], *, dim: int, like: jax.Array
) -> jax.Array:
    """Returns a parameter whole along one dimension, inside `shard_map`.

    The transpose is a reduce-scatter, where XLA would sum a parameter that comes in whole by an
    all-reduce; sums over replicas are sums of shards.

    Args:
      shard: This device's part.
      axes: Mesh axes that split `dim`; empty: none does.
      dim: The dimension.
      like: What the parameter is used with; the result varies over the mesh axes that it does.
    """
    shard, _ = align_varying(shard, like)
    return jax.lax.all_gather(shard, axes, axis=dim, tiled=True) if axes else shard


_CURRENT: ContextVar[tuple[Mesh | AbstractMesh, ShardingRules] | None] = ContextVar(
    "jaxlib_papers_sharding", default=None
)


@contextmanager
def use_sharding(mesh: Mesh | AbstractMesh | None, rules: ShardingRules) -> Iterator[None]:
    """Makes mesh and rules visible to `constrain` and `current_sharding` inside the block.

    Enter it inside the function that is traced: what a jitted function sees is fixed at trace
    time. `mesh=None` makes the block one without sharding.
    """
    token = _CURRENT.set(None if mesh is None else (mesh, rules))
    try:
        yield
    finally:
        _CURRENT.reset(token)


def current_sharding() -> tuple[Mesh | AbstractMesh, ShardingRules] | None:
    """Returns (mesh, rules) of the enclosing `use_sharding` block, or None outside of one."""
    return _CURRENT.get()


def constrain(x: jax.Array, logical_axes: Sequence[str | None], *, name: str = "x") -> jax.Array:
    """Fixes the sharding of an activation by its logical axes.

    Returns `x` itself when there is no `use_sharding` block, when the mesh has one device, and
    inside `shard_map` (where arrays are per-device already).

    Args:
      x: An array.
      logical_axes: One logical name (or None) per dimension of `x`.
      name: What the array is called in error messages.

    Raises:
      ValueError: As `logical_to_spec`.
    """
    context = current_sharding()
    if context is None or _inside_shard_map():
        return x
    mesh, rules = context
    spec = logical_to_spec(logical_axes, x.shape, rules, mesh, name=name)
    if mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def _inside_shard_map() -> bool:
    return AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types
