"""Decoders with LoRA experts: the projection that carries them, and how they get in and out."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from jaxlib_papers.moe._mole_inject import ADAPTER_LEAVES, MoLEConfig, MoLEParams, inject_mole
from jaxlib_papers.moe._mole_linear import LambdaHead, mole_delta
from jaxlib_papers.moe._mole_routing import HEAD_LEAVES, Router
from jaxlib_papers.nn._projections import Projection, find_projections
from jaxlib_papers.nn.adapters import AdapterParam, SharedAdapters, current_scope
from jaxlib_papers.nn.layers import project
from jaxlib_papers.nn.lora import with_modules
from jaxlib_papers.ops.checks import check_shape

__all__ = ["MoLEProjection", "MoLERouting", "mole_params", "with_mole"]


class MoLERouting(NamedTuple):
    """How one projection routed; with a leading layers axis in a decoder's output.

    Attributes:
        p: expert weights [..., batch, seq, E], float32.
        u: gate logits [..., batch, seq, E], float32.
        lam: lambda [..., batch, seq]; None for routers without one.
    """

    p: Float[Array, "*layers batch seq E"]
    u: Float[Array, "*layers batch seq E"]
    lam: Float[Array, "*layers batch seq"] | None


class MoLEProjection(nnx.Module):
    """A frozen kernel of a decoder with LoRA experts; stands where the kernel stood.

    Args:
        base: the kernel.
        arrays: A, B, Wg of this projection.
        projection: where it sits and what shapes it has.
        cfg: scaling, router, dropout.
        limits: experts of each layer of the stack where they differ, else None.

    Source: arXiv 2509.25684, MoLE layer.
    """

    def __init__(
        self,
        base: nnx.Param,
        arrays: dict[str, Array],
        projection: Projection,
        cfg: MoLEConfig,
        limits: list[int] | None,
    ):
        inner, outer = projection.inputs, projection.outputs
        names = projection.axes or (None,) * (len(inner) + len(outer))
        layers = ("layers",) * len(projection.stack)
        into, out = names[0], names[len(inner)]
        self.base = base
        self.A = AdapterParam(arrays["A"], logical_axes=(*layers, None, None, into))
        self.B = AdapterParam(arrays["B"], logical_axes=(*layers, None, out, None))
        self.Wg = AdapterParam(arrays["Wg"], logical_axes=(*layers, None, into))
        self.limit = (
            None
            if limits is None
            else nnx.Variable(jnp.asarray(limits, jnp.int32), logical_axes=layers)
        )
        self.router = Router.of(cfg.router)
        local = self.router.uses_head and cfg.lambda_heads == "local"
        self.layer = (
            nnx.Variable(jnp.arange(*projection.stack, dtype=jnp.int32), logical_axes=layers)
            if local
            else None
        )
        self.name, self.width = projection.name, projection.width
        self.alpha, self.eps, self.dropout = cfg.alpha, cfg.eps, cfg.dropout

    def project(
        self, x: Float[Array, "batch seq *inner"], bias: nnx.Param | None = None
    ) -> Float[Array, "batch seq *outer"]:
        """Takes the place of `nn.layers.project`; records its `MoLERouting` in the open scope.

        Args:
            x: input.
            bias: of the base layer.
        """
        y = project(x, self.base, bias)
        scope = current_scope()
        head = None
        if self.router.uses_head:
            if scope is None or scope.shared is None:
                raise ValueError(
                    f"{self.name} needs the model's lambda heads; call it through DecoderLM, or "
                    "inside nn.adapters.adapter_scope(model.adapters)"
                )
            head = scope.shared.heads[str(self.width)]
            if self.layer is not None:
                head = {
                    leaf: lax.dynamic_index_in_dim(
                        getattr(head, leaf)[...], self.layer[...], keepdims=False
                    )
                    for leaf in HEAD_LEAVES
                }
        out = mole_delta(
            {"A": self.A, "B": self.B, "Wg": self.Wg},
            x.reshape(*x.shape[:2], self.width),
            head,
            alpha=self.alpha,
            router=self.router,
            eps=self.eps,
            dropout_rate=self.dropout,
            key=None if scope is None or self.dropout == 0 else scope.dropout_key(),
            num_experts=None if self.limit is None else self.limit[...],
        )
        if scope is not None:
            scope.records[self.name] = MoLERouting(out.p, out.u, out.lam)
        return y + out.y.reshape(y.shape)


def with_mole(model: Any, params: MoLEParams, cfg: MoLEConfig) -> Any:
    """A copy of a decoder whose projections carry the experts of `params`.

    Stacked layers stay one stack; the lambda heads live once, in `model.adapters`, so that the
    gradients of shared ones are summed over layers. Adapters train with
    `split_model(model, AdapterParam)`, and the decoder's output has `adapter_routing`: a
    `MoLERouting` by projection.

    Args:
        model: a plain `DecoderLM`; its arrays are shared, not copied.
        params: from `inject_mole(model, cfg)` or a file.
        cfg: the configuration that they were made with.

    Raises:
        ValueError: the model has adapters already, a target lies outside its layers, or
            projections, widths or shapes of `params` are not those of the model.

    Source: arXiv 2509.25684, LD-MoLE on a transformer.
    """
    if getattr(model, "adapters", None) is not None:
        raise ValueError("model has adapters already; start from the base model")
    found = {p.name: p for p in find_projections(model, cfg.targets)}
    outside = sorted(name for name, projection in found.items() if not projection.stack)
    if outside:
        raise ValueError(f"targets match {outside} outside the layers, where experts can't run")
    wanted = jax.eval_shape(lambda: inject_mole(model, cfg))
    for what, have, want in (
        ("adapters", params.adapters, wanted.adapters),
        ("heads", params.heads, wanted.heads),
    ):
        if set(have) != set(want):
            raise ValueError(
                f"params.{what} are for {sorted(set(have) - set(want))} that the model lacks, and "
                f"lack {sorted(set(want) - set(have))}; was it made for other widths or targets?"
            )
        for name, arrays in want.items():
            for leaf, array in arrays.items():
                check_shape(f"{what}.{name}.{leaf}", have[name][leaf], array.shape, "the model's")
    replacements: dict[str, Any] = {}
    for name, projection in found.items():
        parts = name.split(".")
        base = model
        for part in parts:
            base = getattr(base, part)
        limits = None if cfg.layout is None else cfg.experts_of_layers(projection.stack[0])
        replacements[name] = MoLEProjection(base, params.adapters[name], projection, cfg, limits)
    heads: dict[str, nnx.Module] = {}
    layers = ("layers",) if cfg.lambda_heads == "local" else ()
    for width, arrays in params.heads.items():
        head = jax.eval_shape(lambda w=width: LambdaHead(cfg.hidden, w, key=jax.random.key(0)))
        variables = {}
        for leaf, array in arrays.items():
            own = getattr(head, leaf)
            axes = (*layers, *own.get_metadata()["logical_axes"])
            variables[leaf] = own.replace(jnp.asarray(array), logical_axes=axes)
        heads[str(width)] = with_modules(head, variables, eps=cfg.eps)
    shared = SharedAdapters(heads, dropout=cfg.dropout)
    return with_modules(model, replacements, adapters=shared)


def mole_params(model: Any) -> MoLEParams:
    """The adapter parameters of a decoder from `with_mole`, for saving.

    Args:
        model: with LoRA experts.

    Raises:
        ValueError: the model has none.

    Source: arXiv 2509.25684, what trains.
    """
    adapters = {
        node.name: {leaf: getattr(node, leaf)[...] for leaf in ADAPTER_LEAVES}
        for _, node in nnx.iter_modules(model)
        if isinstance(node, MoLEProjection)
    }
    if not adapters:
        raise ValueError("model has no LoRA experts; see with_mole")
    heads = {
        int(width): {leaf: getattr(head, leaf)[...] for leaf in HEAD_LEAVES}
        for width, head in model.adapters.heads.items()
    }
    return MoLEParams(adapters, heads)
