"""Low-rank adapters on chosen projections of a decoder: inject, train, merge, and back.

`inject_lora` puts a `LoRAProjection` in the place of each matching kernel, so nothing else of the
model changes; stacked layers stay one stack. Its two factors are `AdapterParam`s: they train with
`train.state.split_model(model, AdapterParam)`, or by the labels of `lora_partition` under
`optax.multi_transform`.

`merge_lora` gives a plain model for generation and export. Sums in floating point can't be undone
exactly, so unmerging puts the kept base arrays back, bit by bit. A head that is tied to the
embedding is untied by merging: the embedding itself is never touched.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Key

from jaxlib_papers.nn._projections import Projection, find_projections, plain_tree
from jaxlib_papers.nn.adapters import AdapterParam, SharedAdapters, current_scope
from jaxlib_papers.nn.layers import dropout, project
from jaxlib_papers.ops.checks import check_choice, check_count, check_positive, float_dtype

__all__ = [
    "LoRAConfig",
    "LoRAProjection",
    "MergedLoRA",
    "inject_lora",
    "lora_names",
    "lora_partition",
    "lora_projections",
    "merge_lora",
    "unmerge_lora",
    "with_modules",
]

Model = TypeVar("Model", bound=nnx.Module)


@dataclasses.dataclass(frozen=True)
class LoRAConfig:
    """Which projections get low-rank factors, and how large.

    Attributes:
      rank: Rank r of the product.
      alpha: Numerator of the scaling alpha / r.
      dropout: Rate on the adapters' input in training.
      targets: Globs over paths, or over their ends ("query", "feed_forward.*", "head"); None takes
        the seven projections of a decoder layer.
      param_dtype: Of the factors.
    """

    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    targets: tuple[str, ...] | None = None
    param_dtype: str = "float32"

    def __post_init__(self) -> None:
        """Checks the numbers."""
        check_count("LoRAConfig.rank", self.rank, 1)
        check_positive("LoRAConfig.alpha", self.alpha)
        if not 0 <= self.dropout < 1:
            raise ValueError(f"LoRAConfig.dropout is {self.dropout}, expected a rate in [0, 1)")
        check_choice("LoRAConfig.param_dtype", self.param_dtype, ("float32", "bfloat16", "float64"))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _low_rank(x: Array, a: Array, b: Array, scaling: float) -> Array:
    """Gives scaling x a b for x [batch, seq, *inner], a [*inner, r], b [r, *outer].

    Nothing is reshaped on the way in: projections of one x then keep one x for the backward pass.
    """
    return _low_rank_forward(x, a, b, scaling)[0]


def _contract(x: Array, y: Array, x_axes: Sequence[int], y_axes: Sequence[int]) -> Array:
    return lax.dot_general(x, y, ((tuple(x_axes), tuple(y_axes)), ((), ())))


def _low_rank_forward(x: Array, a: Array, b: Array, scaling: float) -> tuple[Array, Any]:
    inner = range(a.ndim - 1)
    # Scaled where it is small.
    low = _contract(x, a, [i + 2 for i in inner], inner) * jnp.asarray(scaling, x.dtype)
    return _contract(low, b, [2], [0]), (x, a, b, low)


def _low_rank_backward(scaling: float, residuals: Any, dy: Array) -> tuple[Array, Array, Array]:
    x, a, b, low = residuals
    outer = range(1, b.ndim)
    dlow = _contract(dy, b, [i + 1 for i in outer], outer) * jnp.asarray(scaling, x.dtype)
    # A tall [in, r] result costs a CPU up to ten times the wide [r, in] one, hence the turn.
    da = jnp.moveaxis(_contract(dlow, x, [0, 1], [0, 1]), 0, -1)
    dx = _contract(dlow, a, [2], [a.ndim - 1])
    return dx, da, _contract(low, dy, [0, 1], [0, 1])


_low_rank.defvjp(_low_rank_forward, _low_rank_backward)


class LoRAProjection(nnx.Module):
    """A frozen kernel W with a low-rank product beside it: x W + (alpha / r) dropout(x) A B.

    Args:
      base: The kernel; None for a head that is tied to the embedding.
      projection: Where it sits and what shapes it has.
      config: Rank, scaling and dropout.
      key: PRNG key of A, drawn from U(+-1/sqrt(inputs)); B starts at zero.

    Source: Hu et al., arXiv 2106.09685, section 4.1.
    """

    def __init__(
        self,
        base: nnx.Param | None,
        projection: Projection,
        config: LoRAConfig,
        *,
        key: Key[Array, ""],
    ):
        inner, outer = projection.inputs, projection.outputs
        names = projection.axes or (None,) * (len(inner) + len(outer))
        layers = ("layers",) * len(projection.stack)
        bound = 1 / math.sqrt(projection.width)
        shape = (*projection.stack, *inner, config.rank)
        self.base = base
        self.lora_a = AdapterParam(
            jax.random.uniform(key, shape, config.param_dtype, -bound, bound),
            logical_axes=(*layers, *names[: len(inner)], None),
        )
        self.lora_b = AdapterParam(
            jnp.zeros((*projection.stack, config.rank, *outer), config.param_dtype),
            logical_axes=(*layers, None, *names[len(inner) :]),
        )
        self.scaling = config.alpha / config.rank
        self.dropout = config.dropout

    def project(
        self, x: Float[Array, "batch seq *inner"], bias: nnx.Param | None = None
    ) -> Float[Array, "batch seq *outer"]:
        """Takes the place of `nn.layers.project` for this kernel.

        Args:
          x: Input.
          bias: Of the base layer.
        """
        assert self.base is not None, "a tied head is used through `dense`"
        y = project(x, self.base, bias)
        scope = current_scope()
        key = None if scope is None or self.dropout == 0 else scope.dropout_key()
        a, b = (leaf[...].astype(x.dtype) for leaf in (self.lora_a, self.lora_b))
        return y + _low_rank(dropout(x, self.dropout, key), a, b, self.scaling)

    def delta(self) -> Float[Array, "*stack_inner_outer"]:
        """(alpha / r) A B in the shape of the kernel, float32 (float64 if a factor has it)."""
        a, b = self.lora_a[...], self.lora_b[...]
        wide = float_dtype(a, b)
        stack = 0 if self.base is None else a.ndim + b.ndim - 2 - self.base[...].ndim

        def product(a: Array, b: Array) -> Array:
            return lax.dot_general(
                a.astype(wide),
                b.astype(wide) * self.scaling,
                (((a.ndim - 1,), (0,)), ((), ())),
                precision=lax.Precision.HIGHEST,
            )

        return (jax.vmap(product) if stack else product)(a, b)

    def dense(self, tied: Array | None = None) -> Array:
        """The whole kernel W + (alpha / r) A B, in the dtype of W.

        Args:
          tied: The matrix to which a tied head adds.
        """
        base = tied if self.base is None else self.base[...]
        delta = self.delta()
        return (base.astype(delta.dtype) + delta).astype(base.dtype)


class MergedLoRA(NamedTuple):
    """A plain model with its adapters inside, and what it takes to get them out again.

    Attributes:
      model: Without adapters; a head that was tied has a matrix of its own.
      adapters: The `LoRAProjection`s that were merged, by path; they share their base arrays with
        the model that was merged.
      tied: Whether the head was tied before.
    """

    model: Any
    adapters: dict[str, LoRAProjection]
    tied: bool


def _parent(model: nnx.Module, name: str) -> tuple[Any, str]:
    *parents, last = name.split(".")
    for part in parents:
        model = getattr(model, part)
    return model, last


def with_modules(model: Model, replacements: dict[str, Any], **attributes: Any) -> Model:
    """A copy of a model (arrays shared) with what stands at some paths replaced.

    Args:
      model: Left as it is.
      replacements: New values (modules, parameters or None) by dotted path.
      **attributes: New values of the model's own attributes.
    """
    copy = nnx.merge(*nnx.split(model))
    for name, value in {**replacements, **attributes}.items():
        parent, last = _parent(copy, name)
        # Deleted first: an attribute keeps the role (array or not) in which it came.
        delattr(parent, last)
        setattr(parent, last, value)
    return copy


def inject_lora(model: Model, config: LoRAConfig | None = None, *, key: Key[Array, ""]) -> Model:
    """A copy of a decoder whose matching projections carry low-rank factors.

    The base arrays are shared with `model`, and the outputs are equal at first, since B = 0.

    Args:
      model: A `DecoderLM`, plain.
      config: Rank, scaling, dropout and targets.
      key: PRNG key of the factors.

    Returns:
      The model with `LoRAProjection`s.

    Raises:
      ValueError: No target matched, a target is the embedding (adapt "head" instead, also where it
        is tied), or the model has adapters already.

    Source: Hu et al., arXiv 2106.09685; which projections (reconstructed).
    """
    config = LoRAConfig() if config is None else config
    if getattr(model, "adapters", None) is not None:
        raise ValueError("model has adapters already; merge them first, or start from the base")
    targets = config.targets
    if targets is not None and any(t.split(".")[-1] == "embedding" for t in targets):
        raise ValueError(
            "targets: 'embedding' is a table and no projection; adapt 'head' (a tied head gets "
            "factors of its own and the table stays as it is)"
        )
    found: list[Projection] = []
    tied = getattr(model, "head", ...) is None
    if tied and targets is not None and "head" in targets:
        vocab, embed = model.embedding.get_value().shape
        found.append(
            Projection("head", ("head",), (), (embed,), (vocab,), False, ("embed", "vocab"))
        )
        targets = tuple(t for t in targets if t != "head")
    if targets is None or targets:
        found += find_projections(model, targets)
    keys = jax.random.split(key, len(found))
    replacements: dict[str, Any] = {}
    for projection, own in zip(found, keys, strict=True):
        parent, last = _parent(model, projection.name)
        base = getattr(parent, last)
        replacements[projection.name] = LoRAProjection(base, projection, config, key=own)
    return with_modules(model, replacements, adapters=SharedAdapters(dropout=config.dropout))


def lora_projections(model: nnx.Module) -> dict[str, LoRAProjection]:
    """The `LoRAProjection`s of a model, by dotted path.

    Args:
      model: Any module.
    """
    return {
        ".".join(map(str, path)): node
        for path, node in nnx.iter_modules(model)
        if isinstance(node, LoRAProjection)
    }


def lora_names(model: nnx.Module) -> list[str]:
    """Paths of the projections that carry low-rank factors, sorted.

    Args:
      model: Any module.
    """
    return sorted(lora_projections(model))


def merge_lora(model: Model) -> MergedLoRA:
    """The model with every low-rank product added to its kernel.

    A tied head becomes a matrix of its own (`config.tie_embeddings` turns False) where it had
    factors; the embedding is never changed.

    Args:
      model: From `inject_lora`, trained or not.

    Returns:
      `MergedLoRA`; its model computes what `model` does, up to rounding.

    Raises:
      ValueError: The model has no low-rank factors.

    Source: Hu et al., arXiv 2106.09685, section 4.1 (no additional inference latency).
    """
    adapters = lora_projections(model)
    if not adapters:
        raise ValueError("model has no low-rank factors to merge; see inject_lora")
    replacements: dict[str, Any] = {}
    tied = False
    for name, adapter in adapters.items():
        if adapter.base is None:
            tied = True
            kernel = nnx.Param(
                adapter.dense(model.embedding[...].T), logical_axes=("embed", "vocab")
            )
        else:
            kernel = adapter.base.replace(adapter.dense())
        replacements[name] = kernel
    extra: dict[str, Any] = {"adapters": None}
    if tied:
        extra["config"] = dataclasses.replace(model.config, tie_embeddings=False)
    return MergedLoRA(with_modules(model, replacements, **extra), adapters, tied)


def unmerge_lora(merged: MergedLoRA) -> Any:
    """The model as it was before `merge_lora`, every array bit by bit.

    Args:
      merged: From `merge_lora`.

    Raises:
      ValueError: A merged projection is not there any more.

    Source: Hu et al., arXiv 2106.09685, section 4.1 (recovering W0).
    """
    model, adapters, tied = merged
    gone = [name for name in adapters if not hasattr(*_parent(model, name))]
    if gone:
        raise ValueError(f"model has no {gone}; unmerge the model that merge_lora returned")
    rate = max(adapter.dropout for adapter in adapters.values())
    extra: dict[str, Any] = {"adapters": SharedAdapters(dropout=rate)}
    if tied:
        extra["config"] = dataclasses.replace(model.config, tie_embeddings=True)
    return with_modules(model, dict(adapters), **extra)


def lora_partition(params: Any, trained: Sequence[str] = ()) -> Any:
    """Labels "adapters" and "frozen" for `optax.multi_transform`, in the tree of the parameters.

    Args:
      params: Nested dict (`split_model`), `nnx.State` or module with low-rank factors.
      trained: Names (any part of a path) that train besides, for instance ("score",).

    Raises:
      ValueError: Nothing would train.
    """

    def label(path: Any, leaf: Any) -> str:
        del leaf
        names = {str(getattr(entry, "key", getattr(entry, "name", entry))) for entry in path}
        return "adapters" if names & {"lora_a", "lora_b", *trained} else "frozen"

    labels = jax.tree_util.tree_map_with_path(label, plain_tree(params))
    if "adapters" not in jax.tree.leaves(labels):
        raise ValueError("params holds no lora_a or lora_b, so nothing would train")
    return labels
