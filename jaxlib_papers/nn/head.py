"""The loss of a language-model head on sharded activations."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from jaxlib_papers.nn.partitioning import (
    current_sharding,
    gather_shards,
    logical_to_spec,
    spec_axes,
)
from jaxlib_papers.ops.cross_entropy import chunked_cross_entropy
from kernels_pallas.tiling import align_varying

if TYPE_CHECKING:
    from jaxlib_papers.nn.decoder import DecoderLM

__all__ = ["decoder_cross_entropy", "head_cross_entropy"]


def head_cross_entropy(
    hidden: Float[Array, "batch seq embed"],
    kernel: Float[Array, "embed vocab"],
    targets: Int[Array, "batch seq"],
    mask: Bool[Array, "batch seq"] | Float[Array, "batch seq"],
    *,
    z_coef: float = 0.0,
    softcap: float | None = None,
    chunk: int | None = None,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """`ops.cross_entropy.chunked_cross_entropy` of the global batch, each device on its own rows.

    Inside `nn.partitioning.use_sharding` the chunks run in `jax.shard_map` over the axes that split
    rows and sequence, so that the kernel's gradient is summed over devices once and not once a
    chunk, and scattered where the kernel is split along the embedding; the vocabulary stays with
    automatic partitioning.

    Args:
      hidden: Final hidden states.
      kernel: Output matrix in the same dtype (`DecoderLM.head_kernel`).
      targets: Token ids.
      mask: Weight of each token.
      z_coef: Coefficient of the squared log-sum-exp.
      softcap: Soft cap of the logits.
      chunk: Positions whose logits exist at a time, on one device.

    Returns:
      (sum of losses, sum of weights) of the global batch, float32 scalars.

    Raises:
      ValueError: Shapes, dtypes or coefficients don't fit.
    """

    def local(hidden: Array, kernel: Array, targets: Array, mask: Array) -> tuple[Array, Array]:
        hidden, kernel, targets, mask = align_varying(hidden, kernel, targets, mask)
        return chunked_cross_entropy(
            hidden, kernel, targets, mask, z_coef=z_coef, softcap=softcap, chunk=chunk
        )

    context = current_sharding()
    if context is None or context[0].size == 1:
        return local(hidden, kernel, targets, mask)
    mesh, rules = context
    rows = logical_to_spec(("batch", "seq"), targets.shape, rules, mesh, name="targets")
    axes = spec_axes(*rows)
    if not axes:
        return local(hidden, kernel, targets, mask)
    split = logical_to_spec(("embed", None), kernel.shape, rules, mesh, name="kernel")[0]
    along = spec_axes(split)
    if not set(along) <= set(axes):  # devices that share rows: their sums are the partitioner's
        split, along = None, ()

    def summed(hidden: Array, kernel: Array, targets: Array, mask: Array) -> tuple[Array, Array]:
        kernel = gather_shards(kernel, along, dim=0, like=hidden)
        return jax.lax.psum(local(hidden, kernel, targets, mask), axes)

    return jax.shard_map(
        summed,
        mesh=mesh,
        in_specs=(PartitionSpec(*rows, None), PartitionSpec(split, None), rows, rows),
        out_specs=(PartitionSpec(), PartitionSpec()),
        axis_names=set(axes),
    )(hidden, kernel, targets, mask)


def decoder_cross_entropy(
    model: DecoderLM,
    hidden: Float[Array, "batch seq embed"],
    targets: Int[Array, "batch seq"],
    mask: Bool[Array, "batch seq"] | Float[Array, "batch seq"],
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """`head_cross_entropy` with a decoder's own output matrix and soft cap.

    Args:
      model: The decoder.
      hidden: Its final hidden states.
      targets: Token ids.
      mask: Weight of each token.

    Returns:
      (sum of losses in nats, sum of weights) of the global batch, float32 scalars.

    Raises:
      ValueError: As `head_cross_entropy`.
    """
    softcap = model.config.logit_softcap
    return head_cross_entropy(hidden, model.head_kernel(), targets, mask, softcap=softcap)
