"""LoRA experts in a whole model: configuration, adapter trees, labels, and decoders with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from jaxlib_papers.moe._mole_linear import (
    LAMBDA_INITS,
    LambdaHead,
    adapter_arrays,
    head_arrays,
    mole_delta,
)
from jaxlib_papers.moe._mole_routing import HEAD_LEAVES, Router, check_eps
from jaxlib_papers.nn._projections import Projection, find_projections, plain_tree
from jaxlib_papers.nn.adapters import AdapterParam, SharedAdapters, current_scope
from jaxlib_papers.nn.layers import project
from jaxlib_papers.nn.lora import with_modules
from jaxlib_papers.ops.checks import check_choice, check_count, check_positive, check_shape

__all__ = [
    "MoLEConfig",
    "MoLEParams",
    "MoLEProjection",
    "MoLERouting",
    "inject_mole",
    "mola_layout",
    "mole_params",
    "mole_partition",
    "with_mole",
]

_ADAPTER_LEAVES = ("A", "B", "Wg")


@dataclasses.dataclass(frozen=True)
class MoLEConfig:
    """LoRA experts on the projections of a model.

    Attributes:
        num_experts: E of each projection.
        rank: r of each expert.
        alpha: numerator of the scaling alpha / r.
        hidden: hidden units of the lambda heads (the paper: 128 below 1.7B, 256, 512 for 8B).
        router: a `Router` or its name.
        targets: globs over paths or their ends; None takes the seven projections of a layer.
        dropout: rate on the experts' input in training.
        eps: lambda stays below 1 - eps.
        lambda_init: initial values of the heads: "default", "zeros", "sparse" or "dense".
        hidden_bias_init: in place of the heads' initial hidden bias.
        layout: MoLA's experts per quarter of the layers, from the lowest: "2468"; None is
            num_experts everywhere.
        param_dtype: of all these parameters.
    """

    num_experts: int = 8
    rank: int = 8
    alpha: float = 16.0
    hidden: int = 256
    router: Router | str = "sparsegen"
    targets: tuple[str, ...] | None = None
    dropout: float = 0.1
    eps: float = 1e-2
    lambda_init: str = "default"
    hidden_bias_init: float | None = None
    layout: str | tuple[int, ...] | None = None
    param_dtype: str = "float32"

    def __post_init__(self) -> None:
        check_count("MoLEConfig.num_experts", self.num_experts, 2)
        check_count("MoLEConfig.rank", self.rank, 1)
        check_count("MoLEConfig.hidden", self.hidden, 1)
        check_positive("MoLEConfig.alpha", self.alpha)
        check_eps(self.eps)
        check_choice("MoLEConfig.lambda_init", self.lambda_init, LAMBDA_INITS)
        if not 0 <= self.dropout < 1:
            raise ValueError(f"MoLEConfig.dropout is {self.dropout}, expected a rate in [0, 1)")
        router = Router.of(self.router)
        if self.layout is not None:
            experts = mola_layout(self.layout, len(self.layout))
            if router.kind == "topk":
                check_count("Router.top_k", router.top_k, 1, min(experts))
        elif router.kind == "topk":
            check_count("Router.top_k", router.top_k, 1, self.num_experts)

    def experts_of_layers(self, num_layers: int) -> list[int]:
        """Experts of each layer, lowest first."""
        if self.layout is None:
            return [self.num_experts] * num_layers
        return mola_layout(self.layout, num_layers)


class MoLEParams(NamedTuple):
    """Everything that trains.

    Attributes:
        adapters: by path of the projection: A [*layers, E, r, in], B [*layers, E, out, r] and
            Wg [*layers, E, in].
        heads: the shared lambda heads by input width (an int): W1, b1, W2, b2; empty for routers
            without them.
    """

    adapters: dict[str, dict[str, Array]]
    heads: dict[int, dict[str, Array]]


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


def mola_layout(layout: str | Sequence[int], num_layers: int) -> list[int]:
    """Experts of each layer from MoLA's pattern, one number per equal part of the layers.

    Args:
        layout: "2468" or (2, 4, 6, 8): experts in the lowest to the highest quarter (or any number
            of parts).
        num_layers: layers of the model.

    Returns:
        One number a layer, lowest layer first.

    Raises:
        ValueError: a part with fewer than two experts, or fewer layers than parts.

    Source: MoLA as the baseline of arXiv 2509.25684 (reconstructed).
    """
    parts: list[int] = []
    for part in layout:
        number = int(part) if str(part).isdigit() else part
        check_count("layout, experts of a part,", number, 2)
        parts.append(int(number))
    check_count("num_layers", num_layers, max(1, len(parts)))
    if not parts:
        raise ValueError("layout is empty, expected experts per quarter such as '2468'")
    return [parts[layer * len(parts) // num_layers] for layer in range(num_layers)]


def _layer_number(projection: Projection) -> int | None:
    """The layer of a projection that is not stacked, from the path ("layers.3.q_proj")."""
    keys = [str(key) for key in projection.path]
    for before, after in zip(keys, keys[1:], strict=False):
        if before in ("layers", "h", "blocks") and after.isdigit():
            return int(after)
    return None


def _experts(found: list[Projection], cfg: MoLEConfig) -> dict[str, int]:
    """Experts of each projection; a stack has those of its largest layer."""
    numbers = [n for n in map(_layer_number, found) if n is not None]
    depth = 1 + max(numbers, default=-1)
    experts = {}
    for projection in found:
        number = _layer_number(projection)
        if projection.stack:
            experts[projection.name] = max(cfg.experts_of_layers(projection.stack[0]))
        elif number is not None:
            experts[projection.name] = cfg.experts_of_layers(depth)[number]
        elif cfg.layout is not None:
            raise ValueError(
                f"layout {cfg.layout!r} needs layers, but {projection.name!r} has no layer number "
                "in its path and is no stack of layers"
            )
        else:
            experts[projection.name] = cfg.num_experts
    return experts


def inject_mole(
    base_params: Any, cfg: MoLEConfig | None = None, *, key: Key[Array, ""] | None = None
) -> MoLEParams:
    """Adapter parameters for a base model: experts for each matching projection, shared heads.

    Works on shapes alone (`jax.eval_shape`): nothing of the base is read but its shapes. One lambda
    head is made per distinct input width of the matched projections.

    Args:
        base_params: a `DecoderLM`, its `nnx.State`, or any tree of arrays: matrices are [out, in]
            ("kernel": [in, out]), and may have a leading axis of layers below a key "layers".
        cfg: experts, rank, router, targets.
        key: PRNG key of the initial values; None is `jax.random.key(0)`.

    Returns:
        `MoLEParams`; with them the model computes what it did before, since B = 0.

    Raises:
        ValueError: no target matched.

    Source: arXiv 2509.25684, LD-MoLE on all linear layers, heads shared per width.
    """
    cfg = MoLEConfig() if cfg is None else cfg
    key = jax.random.key(0) if key is None else key
    found = find_projections(base_params, cfg.targets)
    experts = _experts(found, cfg)
    adapter_key, head_key = jax.random.split(key)
    adapters = {
        projection.name: adapter_arrays(
            jax.random.fold_in(adapter_key, index),
            experts[projection.name],
            cfg.rank,
            projection.width,
            projection.out,
            stack=projection.stack,
            dtype=cfg.param_dtype,
        )
        for index, projection in enumerate(found)
    }
    widths = sorted({p.width for p in found}) if Router.of(cfg.router).uses_head else []
    heads = {
        width: head_arrays(
            jax.random.fold_in(head_key, width),
            cfg.hidden,
            width,
            init=cfg.lambda_init,
            hidden_bias_init=cfg.hidden_bias_init,
            dtype=cfg.param_dtype,
        )
        for width in widths
    }
    return MoLEParams(adapters, heads)


def mole_partition(params: Any, trained: Sequence[str] = ()) -> Any:
    """Labels "frozen", "adapters" and "heads" for `optax.multi_transform`.

    Args:
        params: any tree (nested dicts, `MoLEParams`, `nnx.State`, a module). Arrays A, B, Wg that
            stand together are adapters; W1, b1, W2, b2 that stand together are lambda heads; all
            else is frozen.
        trained: names (any part of a path) that train with the adapters, for instance ("score",)
            for a classification head.

    Returns:
        A tree of labels with the structure of `params` (nested dicts for a module or state).

    Raises:
        ValueError: the tree holds no adapter.

    Source: arXiv 2509.25684, what trains and what is frozen.
    """
    tree = plain_tree(params)
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    paths = [
        tuple(str(getattr(e, "key", getattr(e, "name", getattr(e, "idx", e)))) for e in path)
        for path, _ in flat
    ]
    siblings: dict[tuple[str, ...], set[str]] = {}
    for path in paths:
        siblings.setdefault(path[:-1], set()).add(path[-1] if path else "")

    def label(path: tuple[str, ...]) -> str:
        together = siblings[path[:-1]]
        for name, leaves in (("adapters", _ADAPTER_LEAVES), ("heads", HEAD_LEAVES)):
            if path and path[-1] in leaves and together >= set(leaves):
                return name
        return "adapters" if set(path) & set(trained) else "frozen"

    labels = [label(path) for path in paths]
    if "adapters" not in labels and "heads" not in labels:
        raise ValueError("params holds no adapter (A, B, Wg side by side), so nothing would train")
    return jax.tree.unflatten(jax.tree.structure(tree), labels)


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
        self.name, self.width = projection.name, projection.width
        self.alpha, self.eps, self.dropout = cfg.alpha, cfg.eps, cfg.dropout
        self.router = Router.of(cfg.router)

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

    Stacked layers stay one stack; the lambda heads live once, in `model.adapters`, so that their
    gradients are summed over layers. Adapters train with `split_model(model, AdapterParam)`, and
    the decoder's output has `adapter_routing`: a `MoLERouting` by projection.

    Args:
        model: a plain `DecoderLM`; its arrays are shared, not copied.
        params: from `inject_mole(model, cfg)` or a file.
        cfg: the configuration that they were made with.

    Raises:
        ValueError: the model has adapters already, or projections, widths or shapes of `params`
            are not those of the model.

    Source: arXiv 2509.25684, LD-MoLE on a transformer.
    """
    if getattr(model, "adapters", None) is not None:
        raise ValueError("model has adapters already; start from the base model")
    found = {p.name: p for p in find_projections(model, cfg.targets)}
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
        limits = cfg.experts_of_layers(projection.stack[0]) if projection.stack else None
        if cfg.layout is None:
            limits = None
        replacements[name] = MoLEProjection(base, params.adapters[name], projection, cfg, limits)
    heads: dict[str, nnx.Module] = {}
    for width, arrays in params.heads.items():
        head = jax.eval_shape(lambda w=width: LambdaHead(cfg.hidden, w, key=jax.random.key(0)))
        heads[str(width)] = with_modules(
            head,
            {leaf: getattr(head, leaf).replace(jnp.asarray(a)) for leaf, a in arrays.items()},
            eps=cfg.eps,
        )
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
        node.name: {leaf: getattr(node, leaf)[...] for leaf in _ADAPTER_LEAVES}
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
