"""Fills a model's parameters from stored tensors, one at a time, straight into their shards.

A parameter that stacks all layers is filled layer by layer in place. So beside the model itself
there is never more on the host than one stored tensor (and, for the parameter at hand, nothing that
does not become the parameter).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding

from jaxlib_papers.io.errors import FormatError, listed
from jaxlib_papers.io.names import Piece, fused_expert_names, parameter_pieces
from jaxlib_papers.io.sources import TensorSource
from jaxlib_papers.nn.config import DecoderConfig
from jaxlib_papers.nn.decoder import DecoderLM
from jaxlib_papers.nn.partitioning import DEFAULT_RULES, ShardingRules, logical_to_spec

__all__ = ["check_tensors", "fill_parameter", "load_decoder"]

Path = tuple[str, ...]
_ALIGNMENT = 64  # JAX takes over a host buffer that is aligned so without copying it
_IGNORED = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")


def check_tensors(
    source: TensorSource, pieces: Collection[Piece], *, ignored: Collection[str] = ()
) -> None:
    """Compares all names and shapes before anything is read.

    Args:
      source: What is stored.
      pieces: What the model needs.
      ignored: Names that may be there for nothing.

    Raises:
      FormatError: With every tensor that is missing, not used, or of another shape.
    """
    stored = set(source.names())
    needed = {piece.name: piece.stored_shape for piece in pieces}
    missing, extra = needed.keys() - stored, stored - needed.keys() - set(ignored)
    extra = {name for name in extra if not name.endswith(_IGNORED)}
    wrong = {
        f"{name} is {source.shape(name)}, expected {shape} ({source.file_of(name).name})"
        for name, shape in needed.items()
        if name in stored and tuple(source.shape(name)) != shape
    }
    faults = [
        f"{len(names)} {what}: {listed(names)}"
        for names, what in (
            (missing, "tensors are missing"),
            (extra, "tensors are not part of the model"),
            (wrong, "tensors have another shape"),
        )
        if names
    ]
    if faults:
        where = source.file_of(min(stored)).parent if stored else "the file"
        raise FormatError(
            f"{where}: the tensors don't fit the configuration. {'; '.join(faults)}. "
            "Check that configuration and weights belong together"
        )


def _empty(shape: Sequence[int], dtype: Any) -> np.ndarray:
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def _copy_part(
    piece: Piece, part: np.ndarray, buffer: np.ndarray, bounds: Sequence[tuple[int, int]]
) -> None:
    """Copies what of a piece lies within the bounds that a buffer holds."""
    taken: list[slice] = []
    put: list[int | slice] = []
    for axis, (low, high) in enumerate(bounds):
        at = piece.where[axis] if axis < len(piece.where) else slice(None)
        if isinstance(at, slice):
            taken.append(slice(low, high))
            put.append(slice(None))
        elif low <= at < high:
            put.append(at - low)
        else:
            return
    # The step casts; what a bfloat16 cannot hold becomes infinite only where it was close to it.
    buffer[tuple(put)] = part[tuple(taken)]


def fill_parameter(
    source: TensorSource,
    pieces: Sequence[Piece],
    shape: Sequence[int],
    dtype: Any,
    sharding: Sharding,
) -> jax.Array:
    """One parameter from its pieces.

    Args:
      source: Where the tensors are read.
      pieces: The parts of the parameter; each tensor is read once, whole.
      shape: Of the parameter.
      dtype: Of the parameter; stored numbers are cast.
      sharding: Where it goes. Only what this process holds is kept.

    Raises:
      FormatError: A tensor cannot be read, or has numbers that are not finite.
    """
    places = sharding.addressable_devices_indices_map(tuple(shape))
    buffers: dict[tuple[tuple[int, int], ...], np.ndarray] = {}
    bounds_of: dict[Any, tuple[tuple[int, int], ...]] = {}
    for device, index in places.items():
        bounds = tuple(s.indices(n)[:2] for s, n in zip(index or (), shape, strict=True))
        bounds_of[device] = bounds
        if bounds not in buffers:
            buffers[bounds] = _empty([high - low for low, high in bounds], dtype)
    for piece in pieces:
        stored = source.read(piece.name)
        if not np.isfinite(stored).all():
            raise FormatError(
                f"{source.file_of(piece.name)}: tensor {piece.name!r} has numbers that are not "
                "finite; the file is damaged, fetch it again"
            )
        part = piece.to_part(stored)
        for bounds, buffer in buffers.items():
            _copy_part(piece, part, buffer, bounds)
    shards = [jax.device_put(buffers[bounds], device) for device, bounds in bounds_of.items()]
    return jax.make_array_from_single_device_arrays(tuple(shape), sharding, shards)


def _check_tied_head(source: TensorSource) -> None:
    head, table = "lm_head.weight", "model.embed_tokens.weight"
    if source.shape(head) != source.shape(table) or not np.array_equal(
        source.read(head), source.read(table)
    ):
        raise FormatError(
            f"{source.file_of(head)}: the configuration ties the output matrix to the embedding, "
            f"but {head} differs from {table}; set tie_word_embeddings to false"
        )


@functools.lru_cache(maxsize=4)
def _abstract(config: DecoderConfig) -> tuple[nnx.GraphDef, dict[Path, Any], dict[Path, Any]]:
    """(structure, shape of each parameter, its logical axes) of a decoder, nothing allocated."""
    model = jax.eval_shape(lambda: DecoderLM(config, key=jax.random.key(0)))
    graphdef, state = nnx.split(model)
    flat = [(tuple(map(str, path)), variable) for path, variable in nnx.to_flat_state(state)]
    shapes = {path: variable.get_value() for path, variable in flat}
    return graphdef, shapes, {path: v.get_metadata()["logical_axes"] for path, v in flat}


def load_decoder(
    config: DecoderConfig,
    source: TensorSource,
    *,
    mesh: Mesh | None = None,
    rules: ShardingRules = DEFAULT_RULES,
    ignored: Collection[str] = (),
) -> DecoderLM:
    """A decoder with stored weights.

    Args:
      config: The decoder's configuration.
      source: The stored tensors.
      mesh: Devices to spread the parameters over; None is the default device.
      rules: Where each logical axis lies on the mesh.
      ignored: Stored tensors that may be left out.

    Raises:
      FormatError: Tensors are missing, left over, of another shape, damaged or not finite.
      ValueError: The sharding rules don't fit the model.
    """
    stored = source.names()
    fused = config.moe is not None and fused_expert_names(0)[0] in stored
    moe_size = 0 if config.moe is None or fused else config.moe.num_experts
    if config.num_layers * max(moe_size, 1) > len(stored):
        raise FormatError(
            f"the configuration has {config.num_layers} layers"
            + (f" of {moe_size} experts" if moe_size else "")
            + f", and only {len(stored)} tensors are stored; configuration and weights don't "
            "belong together"
        )
    pieces = parameter_pieces(config, fused_experts=fused)
    ignored = set(ignored)
    if config.tie_embeddings and "lm_head.weight" in stored:
        _check_tied_head(source)
        ignored.add("lm_head.weight")
    check_tensors(source, [p for parts in pieces.values() for p in parts], ignored=ignored)

    graphdef, shapes, axes = _abstract(config)
    if shapes.keys() != pieces.keys():
        raise AssertionError(f"names: {shapes.keys() ^ pieces.keys()} have no stored form")

    def place(path: Path) -> Sharding:
        if mesh is None:
            return SingleDeviceSharding(jax.devices()[0])
        spec = logical_to_spec(axes[path], shapes[path].shape, rules, mesh, name=".".join(path))
        return NamedSharding(mesh, spec)

    shardings = {path: place(path) for path in shapes}  # all rules are checked before any reading
    arrays: dict[Path, jax.Array] = {}
    # The largest stored tensors first, while there is nothing else in memory.
    for path in sorted(pieces, key=lambda p: -max(math.prod(q.stored_shape) for q in pieces[p])):
        leaf = shapes[path]
        arrays[path] = fill_parameter(source, pieces[path], leaf.shape, leaf.dtype, shardings[path])
    return nnx.merge(graphdef, _nested(arrays))


def _nested(flat: Mapping[Path, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for path, value in flat.items():
        node = out
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node[path[-1]] = value
    return out
