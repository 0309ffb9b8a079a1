"""Rows of a table that is split over devices, with a gradient that is scattered over them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxlib_papers.nn.partitioning import (
    current_sharding,
    gather_shards,
    logical_to_spec,
    spec_axes,
)
from jaxlib_papers.ops.checks import float_dtype
from kernels_pallas.tiling import align_varying

__all__ = ["embed_tokens"]


def embed_tokens(
    table: Float[Array, "vocab embed"], tokens: Int[Array, "batch seq"], dtype: Any
) -> Float[Array, "batch seq embed"]:
    """The table's row of every token.

    Inside `nn.partitioning.use_sharding` each device looks its own tokens up in the whole table,
    gathered along the embedding in ``dtype``; the gradient is summed up on each device in float32
    or better, and scattered in ``dtype``. The vocabulary stays with automatic partitioning.

    Args:
      table: One row a token id.
      tokens: Token ids; those outside are clipped.
      dtype: Of the result, floating point.

    Returns:
      [batch, seq, embed] in ``dtype``.

    Raises:
      ValueError: A dimension that the mesh does not divide; as `nn.partitioning.logical_to_spec`.
    """
    context = current_sharding()
    if context is None or context[0].size == 1:
        return jnp.take(table, tokens, axis=0, mode="clip").astype(dtype)
    mesh, rules = context
    rows = logical_to_spec(("batch", "seq"), tokens.shape, rules, mesh, name="tokens")
    split = logical_to_spec((None, "embed"), table.shape, rules, mesh, name="embedding")[1]
    axes, along = spec_axes(*rows), spec_axes(split)
    if not axes:
        return jnp.take(table, tokens, axis=0, mode="clip").astype(dtype)
    if not set(along) <= set(axes):  # devices that share rows: their sums are the partitioner's
        split, along = None, ()

    def local(table: Array, tokens: Array) -> Array:
        return _take(gather_shards(table, along, dim=1, like=tokens), tokens)

    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(PartitionSpec(None, split), rows),
        out_specs=PartitionSpec(*rows, None),
        axis_names=set(axes),
    )(table.astype(dtype), tokens)


@jax.custom_vjp
def _take(table: Array, tokens: Array) -> Array:
    return jnp.take(table, tokens, axis=0, mode="clip")


def _take_fwd(table: Array, tokens: Array) -> tuple[Array, tuple[Array, Array]]:
    # An empty array carries the table's dtype and size; the table itself is not kept.
    like = jnp.zeros((table.shape[0], 0), table.dtype)
    return _take(table, tokens), (like, tokens)


def _take_bwd(saved: tuple[Array, Array], dy: Array) -> tuple[Array, None]:
    like, tokens = saved
    total = jnp.zeros((like.shape[0], dy.shape[-1]), float_dtype(dy))
    total, _ = align_varying(total, dy)
    return total.at[tokens].add(dy.astype(total.dtype), mode="clip").astype(like.dtype), None


_take.defvjp(_take_fwd, _take_bwd)
