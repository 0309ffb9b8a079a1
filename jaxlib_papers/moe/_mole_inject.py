"""LoRA experts for a whole model: configuration, adapter trees and labels."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Key

from jaxlib_papers.moe._mole_linear import LAMBDA_INITS, adapter_arrays, head_arrays
from jaxlib_papers.moe._mole_routing import HEAD_LEAVES, Router, check_eps
from jaxlib_papers.nn._projections import Projection, find_projections, plain_tree
from jaxlib_papers.ops.checks import check_choice, check_count, check_positive

__all__ = [
    "ADAPTER_LEAVES",
    "LAMBDA_HEADS",
    "MoLEConfig",
    "MoLEParams",
    "inject_mole",
    "mola_layout",
    "mole_partition",
]

ADAPTER_LEAVES = ("A", "B", "Wg")
LAMBDA_HEADS = ("shared", "local")


@dataclasses.dataclass(frozen=True)
class MoLEConfig:
    """LoRA experts on the projections of a model.

    Attributes:
        num_experts: E of each projection.
        rank: r of each expert.
        alpha: numerator of the scaling alpha / r.
        hidden: hidden units of the lambda heads (the paper: 128 below 1.7B, 256, 512 for 8B).
        router: a `Router` or its name.
        lambda_heads: "shared" (the paper: one head per input width in the whole model) or "local"
            (one per layer and input width, which the paper reports as weaker).
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
    lambda_heads: str = "shared"
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
        check_choice("MoLEConfig.lambda_heads", self.lambda_heads, LAMBDA_HEADS)
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
        heads: the lambda heads by input width (an int): W1 [H, width], b1 [H], W2 [1, H], b2 [1];
            local ones have a leading axis of layers. Empty for routers without them.
    """

    adapters: dict[str, dict[str, Array]]
    heads: dict[int, dict[str, Array]]


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


def _depths(found: list[Projection], setting: str) -> dict[str, int]:
    """Number of layers in the stack or the list of layers that each projection belongs to."""
    numbers = {projection.name: _layer_number(projection) for projection in found}
    listed = 1 + max((n for n in numbers.values() if n is not None), default=-1)
    for projection in found:
        if not projection.stack and numbers[projection.name] is None:
            raise ValueError(
                f"{setting} needs layers, but {projection.name!r} has no layer number in its path "
                "and is no stack of layers"
            )
    return {p.name: p.stack[0] if p.stack else listed for p in found}


def _experts(found: list[Projection], cfg: MoLEConfig) -> dict[str, int]:
    """Experts of each projection; a stack has those of its largest layer."""
    if cfg.layout is None:
        return dict.fromkeys((projection.name for projection in found), cfg.num_experts)
    depths = _depths(found, f"layout {cfg.layout!r}")
    experts = {}
    for projection in found:
        by_layer = cfg.experts_of_layers(depths[projection.name])
        number = _layer_number(projection)
        stacked = projection.stack or number is None
        experts[projection.name] = max(by_layer) if stacked else by_layer[number]
    return experts


def _heads(
    found: list[Projection], cfg: MoLEConfig, key: Key[Array, ""]
) -> dict[int, dict[str, Array]]:
    """The lambda heads of every input width; none for routers without them."""
    if not Router.of(cfg.router).uses_head:
        return {}
    depths = set()
    if cfg.lambda_heads == "local":
        depths = set(_depths(found, "lambda_heads='local'").values())
        if len(depths) > 1:
            raise ValueError(
                f"lambda_heads='local' needs one number of layers, but targets lie in stacks of "
                f"{sorted(depths)}; inject each stack on its own"
            )

    def make(key: Key[Array, ""], width: int) -> dict[str, Array]:
        return head_arrays(
            key,
            cfg.hidden,
            width,
            init=cfg.lambda_init,
            hidden_bias_init=cfg.hidden_bias_init,
            dtype=cfg.param_dtype,
        )

    heads = {}
    for width in sorted({projection.width for projection in found}):
        own = jax.random.fold_in(key, width)
        if depths:
            keys = jax.random.split(own, *depths)
            heads[width] = jax.vmap(make, in_axes=(0, None))(keys, width)
        else:
            heads[width] = make(own, width)
    return heads


def inject_mole(
    base_params: Any, cfg: MoLEConfig | None = None, *, key: Key[Array, ""] | None = None
) -> MoLEParams:
    """Adapter parameters for a base model: experts for each matching projection, lambda heads.

    Works on shapes alone (`jax.eval_shape`): nothing of the base is read but its shapes. One lambda
    head is made per distinct input width of the matched projections; with "local" heads, one for
    each layer and width, and row i of a head's arrays is that of layer i.

    Args:
        base_params: a `DecoderLM`, its `nnx.State`, or any tree of arrays: matrices are [out, in]
            ("kernel": [in, out]), and may have a leading axis of layers below a key "layers".
        cfg: experts, rank, router, heads, targets.
        key: PRNG key of the initial values; None is `jax.random.key(0)`.

    Returns:
        `MoLEParams`; with them the model computes what it did before, since B = 0.

    Raises:
        ValueError: no target matched; a layout or local heads for a projection outside layers.

    Source: arXiv 2509.25684, LD-MoLE on all linear layers, heads shared per width; what a local
    head spans (reconstructed).
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
    return MoLEParams(adapters, _heads(found, cfg, head_key))


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
        for name, leaves in (("adapters", ADAPTER_LEAVES), ("heads", HEAD_LEAVES)):
            if path and path[-1] in leaves and together >= set(leaves):
                return name
        return "adapters" if set(path) & set(trained) else "frozen"

    labels = [label(path) for path in paths]
    if "adapters" not in labels and "heads" not in labels:
        raise ValueError("params holds no adapter (A, B, Wg side by side), so nothing would train")
    return jax.tree.unflatten(jax.tree.structure(tree), labels)
