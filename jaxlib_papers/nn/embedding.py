"""Rows of a table that is split over devices, with a gradient that is scattered over them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxlib_papers.nn.partitioning import current_sharding, logical_to_spec
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
      dtype: Of the result.
    """
    context = current_sharding()
    if context is None or context[0].size == 1:
        return jnp.take(table, tokens, axis=0, mode="clip").astype(dtype)
    mesh, rules = context
    rows = logical_to_spec(("batch", "seq"), tokens.shape, rules, mesh, name="tokens")
    split = logical_to_spec((None, "embed"), table.shape, rules, mesh, name="embedding")[1]
    axes: set[str] = set()
    for entry in (*rows, split):
        axes.update((entry,) if isinstance(entry, str) else (entry or ()))
    if not axes:
        return jnp.take(table, tokens, axis=0, mode="clip").astype(dtype)

    def local(table: Array, tokens: Array) -> Array:
        table, tokens = align_varying(table, tokens)
        if split is not None:
            table = jax.lax.all_gather(table, split, axis=1, tiled=True)
        return _take(table, tokens)

    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(PartitionSpec(None, split), rows),
        out_specs=PartitionSpec(*rows, None),
        axis_names=axes,
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
