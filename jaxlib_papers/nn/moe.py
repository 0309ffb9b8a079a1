"""Sparse mixture of SwiGLU experts: float32 router, no token dropped, grouped matmuls."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jaxtyping import Array, Float, Int, Key

from jaxlib_papers.nn.config import DecoderConfig
from jaxlib_papers.nn.layers import SwiGLU, normal_param
from jaxlib_papers.nn.partitioning import (
    current_sharding,
    gather_shards,
    logical_to_spec,
    spec_axes,
)
from jaxlib_papers.ops.expert_dispatch import route_top_k
from jaxlib_papers.ops.expert_exchange import exchanged_expert_mixture
from jaxlib_papers.ops.expert_mixture import expert_mixture

__all__ = ["MoELayer", "RouterOutput", "expert_mixture"]


class RouterOutput(NamedTuple):
    """What the auxiliary losses need of one layer's router.

    Attributes:
      logits: Router logits before the softmax, float32 [batch, seq, experts].
      probs: Their softmax over all experts.
      dropped_fraction: Share of assignments that found no room, scalar; None when none can be
        dropped.
    """

    logits: Float[Array, "batch seq experts"]
    probs: Float[Array, "batch seq experts"]
    dropped_fraction: Float[Array, ""] | None = None


class MoELayer(nnx.Module):
    """A mixture of experts in place of a feed-forward network.

    Under `nn.partitioning.use_sharding` each device routes its own tokens over all experts. Where
    the mesh axis of the experts splits the tokens too (as the default rules say), tokens travel to
    their experts and back (`ops.expert_exchange`); where it does not, each device runs the experts
    that it holds on the tokens that it shares with the others, and results are summed.

    Args:
      config: The decoder's configuration, with ``moe``.
      key: PRNG key of the initial weights.
    """

    def __init__(self, config: DecoderConfig, *, key: Key[Array, ""]):
        moe = config.moe
        if moe is None:
            raise ValueError("config.moe is None, expected a MoEConfig")
        keys = jax.random.split(key, 4)
        embed, hidden = config.embed_dim, moe.expert_dim
        std, dtype = config.init_std, config.param_dtype
        router_std = std if moe.router_std is None else moe.router_std
        # Router operands are float32 whatever the model computes in: bfloat16 logits tie.
        self.router = normal_param(
            keys[0], (embed, moe.num_experts), ("embed", "experts"), router_std, "float32"
        )
        self.gate_up = normal_param(
            keys[1],
            (moe.num_experts, embed, 2, hidden),
            ("experts", "embed", None, "expert_mlp"),
            std,
            dtype,
        )
        self.down = normal_param(
            keys[2],
            (moe.num_experts, hidden, embed),
            ("experts", "expert_mlp", "embed"),
            std,
            dtype,
        )
        width = moe.shared_expert_dim
        self.shared = SwiGLU(config, width, key=keys[3]) if width else None
        self.config = moe

    def __call__(
        self, x: Float[Array, "batch seq embed"]
    ) -> tuple[Float[Array, "batch seq embed"], RouterOutput]:
        """Sends every token to its experts.

        Args:
          x: Normalised residual stream.

        Returns:
          (sum of the experts' results in the dtype of x, router output).
        """
        config = self.config
        # At full precision also on a TPU, whose default would round the operands to bfloat16.
        logits = lax.dot_general(
            x.astype(self.router.dtype),
            self.router[...],
            (((2,), (0,)), ((), ())),
            precision=lax.Precision.HIGHEST,
        )
        routing = route_top_k(
            logits.reshape(-1, config.num_experts), config.top_k, renormalize=config.renormalize
        )
        choice = (*x.shape[:2], config.top_k)
        y, dropped = self._mixture(
            x, routing.indices.reshape(choice), routing.weights.reshape(choice)
        )
        if self.shared is not None:
            y = y + self.shared(x)
        fraction = None
        if config.capacity_factor is not None or config.receive_factor is not None:
            assignments = routing.indices.size
            fraction = dropped.astype(jnp.float32) / max(assignments, 1)
        return y, RouterOutput(logits, routing.probs.reshape(logits.shape), fraction)

    def _mixture(
        self,
        x: Float[Array, "batch seq embed"],
        indices: Int[Array, "batch seq top_k"],
        weights: Float[Array, "batch seq top_k"],
    ) -> tuple[Float[Array, "batch seq embed"], Int[Array, ""]]:
        gate_up = self.gate_up[...].astype(x.dtype)
        down = self.down[...].astype(x.dtype)
        factor = self.config.capacity_factor

        def mixture(
            function: Callable[..., tuple[Array, Array]],
            x: Array,
            indices: Array,
            weights: Array,
            *experts: Array,
        ) -> tuple[Array, Array]:
            tokens = (a.reshape(-1, a.shape[2]) for a in (x, indices, weights))
            y, dropped = function(*tokens, *experts, capacity_factor=factor)
            return y.reshape(x.shape), dropped

        local = functools.partial(mixture, expert_mixture)
        context = current_sharding()
        if context is None or context[0].size == 1:
            return local(x, indices, weights, gate_up, down)

        mesh, rules = context
        spec = logical_to_spec(("batch", "seq", None), x.shape, rules, mesh, name="x")
        experts, embed, _, hidden = logical_to_spec(
            ("experts", "embed", None, "expert_mlp"), gate_up.shape, rules, mesh, name="gate_up"
        )
        token_axes, expert_axes, hidden_axes = (
            spec_axes(*spec),
            spec_axes(experts),
            spec_axes(hidden),
        )
        if not set(spec_axes(embed)) <= set(token_axes):
            embed = None  # devices that share rows: they take the matrices whole
        embed_axes = spec_axes(embed)
        exchanged = bool(expert_axes) and set(expert_axes) <= set(token_axes)

        def whole(matrices: Array, dim: int, x: Array) -> Array:
            return checkpoint_name(gather_shards(matrices, embed_axes, dim=dim, like=x), _GATHERED)

        def on_device(
            x: Array, indices: Array, weights: Array, gate_up: Array, down: Array
        ) -> tuple[Array, Array]:
            # Of three dimensions: the TPU compiler turns a scatter of four into an all-reduce.
            both = whole(gate_up.reshape(*gate_up.shape[:2], -1), 1, x)
            gate_up = both.reshape(*both.shape[:2], *gate_up.shape[2:])
            down = whole(down, 2, x)
            if exchanged:
                exchange = functools.partial(
                    exchanged_expert_mixture,
                    axis_name=expert_axes,
                    receive_factor=self.config.receive_factor,
                    ragged=ragged,
                )
                y, dropped = mixture(exchange, x, indices, weights, gate_up, down)
                y = lax.psum(y, hidden_axes)
                return y, lax.psum(dropped, token_axes)
            if expert_axes:
                indices = indices - lax.axis_index(expert_axes) * gate_up.shape[0]
            y, dropped = local(x, indices, weights, gate_up, down)
            y = lax.psum(y, (*expert_axes, *hidden_axes))
            # Each device of the tensor axis dropped the same assignments.
            return y, lax.psum(dropped, (*token_axes, *expert_axes))

        ragged = factor is None and _sends_ragged(mesh)
        # One layer's gathered experts are much; they are gathered again in the backward pass.
        keep = jax.checkpoint_policies.save_anything_except_these_names(_GATHERED)
        return jax.shard_map(
            jax.checkpoint(on_device, policy=keep) if embed_axes else on_device,
            mesh=mesh,
            in_specs=(
                *(spec, spec, spec),
                PartitionSpec(experts, embed, None, hidden),
                PartitionSpec(experts, hidden, embed),
            ),
            out_specs=(spec, PartitionSpec()),
        )(x, indices, weights, gate_up, down)


_GATHERED = "gathered_experts"


def _sends_ragged(mesh: Mesh | AbstractMesh) -> bool:
    """Whether the devices have an all-to-all of parts of any size: XLA's CPU has not."""
    return isinstance(mesh, Mesh) and mesh.devices.flat[0].platform in ("tpu", "gpu", "cuda")
