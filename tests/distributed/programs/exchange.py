"""Experts and sequences spread over eight devices, against one device.

Prints, by case, how far value and gradients are from those of one device (relative to the largest
entry of each, or to 0.1), the share of dropped assignments, and the compiled layer's collectives.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import re
import unittest.mock

import jax
import jax.numpy as jnp
import numpy as np

from jaxlib_papers.nn import moe
from jaxlib_papers.nn.attention import sharded_attention
from jaxlib_papers.nn.config import DecoderConfig, MoEConfig
from jaxlib_papers.nn.decoder import DecoderLM
from jaxlib_papers.nn.head import head_cross_entropy
from jaxlib_papers.nn.moe import MoELayer
from jaxlib_papers.nn.partitioning import DEFAULT_RULES, use_sharding
from jaxlib_papers.train.mesh import make_mesh

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

CONFIG = DecoderConfig(
    vocab_size=7,
    num_layers=1,
    embed_dim=16,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    init_std=0.5,
    moe=MoEConfig(8, 2, expert_dim=12),
)
SHARED_ROWS = DEFAULT_RULES.override(batch=("data", "fsdp"))
# Rows that the devices of the axis that splits the parameters share.
ROWS_OVER_DATA = DEFAULT_RULES.override(batch="data")


def far(tree, reference):
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(reference), strict=True)
    # Some gradients are zero but for rounding (a window of one key).
    return max(float(jnp.max(jnp.abs(x - r)) / max(jnp.max(jnp.abs(r)), 0.1)) for x, r in pairs)


def layer_of(embed=16, **options):
    config = dataclasses.replace(CONFIG.moe, **options)
    return MoELayer(dataclasses.replace(CONFIG, moe=config, embed_dim=embed), key=jax.random.key(0))


def mixture(mesh, rules=DEFAULT_RULES, **options):
    x = jax.random.normal(jax.random.key(1), (8, 16, 16))

    def run(layer, x):
        def loss(layer, x):
            y, router = layer(x)
            return jnp.sum(jnp.sin(y)), (y, router.dropped_fraction)

        with use_sharding(mesh, rules):
            return jax.grad(loss, argnums=(0, 1), has_aux=True)(layer, x)

    grads, (y, dropped) = jax.jit(run)(layer_of(**options), x)
    return (grads, y), None if dropped is None else float(dropped)


def decoder(mesh, rules=DEFAULT_RULES):
    config = dataclasses.replace(CONFIG, vocab_size=16, num_heads=2)
    model = DecoderLM(config, key=jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (8, 16), 0, 16)

    def run(model):
        def loss(model):
            hidden = model(tokens).hidden
            mask = jnp.ones(tokens.shape, bool)
            return head_cross_entropy(hidden, model.head_kernel(), tokens, mask)[0]

        with use_sharding(mesh, rules):
            return jax.value_and_grad(loss)(model)

    return jax.jit(run)(model)


def attention(mesh, window, segmented):
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(4, 48, h, 8)), jnp.float32) for h in (4, 2, 2))
    ids = jnp.asarray(np.sort(rng.integers(0, 4, (4, 48)), axis=1), jnp.int32)

    def run(q, k, v):
        def loss(q, k, v):
            y = sharded_attention(
                q, k, v, ids if segmented else None, window=window, logit_softcap=3.0
            )
            return jnp.sum(jnp.sin(y)), y

        with use_sharding(mesh, DEFAULT_RULES):
            return jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(q, k, v)

    return jax.jit(run)(q, k, v)


def ragged_all_to_all(operand, output, starts, sizes, places, receives, *, axis_name):
    """What `jax.lax.ragged_all_to_all` is documented to do, by gathering everything everywhere."""
    operands = jax.lax.all_gather(operand, axis_name)
    me = jax.lax.axis_index(axis_name)
    starts, sizes, places = (
        jax.lax.all_gather(a, axis_name)[:, me] for a in (starts, sizes, places)
    )
    # The contract: what is announced is what comes.
    output = jnp.where(jnp.all(sizes == receives), output, jnp.full_like(output, jnp.nan))
    row = jnp.arange(output.shape[0], dtype=jnp.int32)
    for rows, start, size, place in zip(operands, starts, sizes, places, strict=True):
        here = (row >= place) & (row < place + size)
        sent = jnp.take(rows, start + row - place, axis=0, mode="clip")
        output = jnp.where(here[:, None], sent, output)
    return output


def ragged_mixtures(one):
    """The layer as on TPU and GPU, with the collective that XLA's CPU lacks played by others."""
    out = {}
    with (
        unittest.mock.patch.object(jax.lax, "ragged_all_to_all", ragged_all_to_all),
        unittest.mock.patch.object(moe, "_sends_ragged", lambda mesh: True),
    ):
        for text in ("expert=8", "fsdp=2,expert=2,tensor=2"):
            out[f"ragged {text}"] = far(mixture(make_mesh(text))[0], one)
        mesh = make_mesh("fsdp=2,expert=4")
        roomy, dropped = mixture(mesh, receive_factor=4.0)
        out["ragged roomy"], out["ragged dropped roomy"] = far(roomy, one), dropped
        (grads, y), dropped = mixture(mesh, receive_factor=0.5)
        out["ragged dropped tight"] = dropped
        out["ragged tight is finite"] = all(
            bool(jnp.all(jnp.isfinite(a))) for a in jax.tree.leaves((grads, y))
        )
    return out


def collectives(mesh):
    """Bytes of the results of each kind of collective in the layer's gradient, by compiled HLO."""
    x = jax.ShapeDtypeStruct((8, 16, 64), jnp.float32)

    def run(layer, x):
        with use_sharding(mesh, DEFAULT_RULES):
            return jax.grad(lambda layer, x: jnp.sum(layer(x)[0]), argnums=(0, 1))(layer, x)

    text = jax.jit(run).lower(layer_of(64), x).compile().as_text()
    sizes = collections.Counter()
    pattern = r"= \(?f32\[([\d,]*)\]\S*.*? (all-reduce|reduce-scatter|all-gather|all-to-all)\("
    for dims, kind in re.findall(pattern, text):
        largest = int(np.prod([int(n) for n in dims.split(",") if n]))
        sizes[kind] = max(sizes[kind], 4 * largest)
    return dict(sizes)


def main() -> None:
    out = {}
    one, _ = mixture(None)
    for text in ("expert=8", "data=2,expert=2,tensor=2", "fsdp=2,expert=2,context=2"):
        out[f"mixture {text}"] = far(mixture(make_mesh(text))[0], one)
    mesh = make_mesh("fsdp=2,expert=4")
    out["mixture shared rows"] = far(mixture(mesh, SHARED_ROWS)[0], one)
    rows_over_data = make_mesh("data=2,fsdp=2,tensor=2")
    out["mixture rows over data"] = far(mixture(rows_over_data, ROWS_OVER_DATA)[0], one)
    reference = decoder(None)
    out["decoder rows over data"] = far(decoder(rows_over_data, ROWS_OVER_DATA), reference)
    out["decoder rows over all"] = far(decoder(make_mesh("fsdp=4,expert=2")), reference)
    roomy, dropped = mixture(mesh, capacity_factor=8.0)
    out["mixture roomy"] = far(roomy, one)
    out["dropped roomy"] = dropped
    # Slots are counted on each device's own tokens, with and without the exchange.
    out["dropped tight"] = mixture(mesh, capacity_factor=0.5)[1]
    out["dropped tight, no exchange"] = mixture(make_mesh("fsdp=8"), capacity_factor=0.5)[1]
    out |= ragged_mixtures(one)
    for window, segmented, text in (
        (None, True, "context=8"),
        (None, False, "data=2,context=2,tensor=2"),
        (1, False, "context=8"),
        (17, True, "data=2,context=4"),
        (100, False, "context=8"),
    ):
        far_off = far(
            attention(make_mesh(text), window, segmented), attention(None, window, segmented)
        )
        out[f"attention {window} {text}"] = far_off
    out["collectives fsdp=8"] = collectives(make_mesh("fsdp=8"))
    print(json.dumps(out))


if __name__ == "__main__":
    main()
