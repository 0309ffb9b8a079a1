"""LoRA on a stacked decoder: injection, training by filter and by labels, merging, tied heads."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxlib_papers.io.adapters import load_lora, save_lora
from jaxlib_papers.io.errors import FormatError
from jaxlib_papers.nn._projections import find_projections
from jaxlib_papers.nn.adapters import AdapterParam
from jaxlib_papers.nn.config import DecoderConfig
from jaxlib_papers.nn.decoder import DecoderLM
from jaxlib_papers.nn.lora import (
    LoRAConfig,
    inject_lora,
    lora_names,
    lora_partition,
    lora_projections,
    merge_lora,
    unmerge_lora,
)
from jaxlib_papers.train.state import merge_model, split_model

CONFIG = DecoderConfig(
    vocab_size=29,
    num_layers=3,
    embed_dim=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_dim=24,
    init_std=0.2,
    tie_embeddings=True,
)
SEVEN = {
    f"layers.{name}"
    for name in (
        *(f"attention.{n}" for n in ("query", "key", "value", "out")),
        *(f"feed_forward.{n}" for n in ("gate", "up", "down")),
    )
}
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 29, (2, 7)), jnp.int32)
WITH_HEAD = LoRAConfig(rank=2, alpha=4.0, targets=("attention.*", "feed_forward.*", "head"))


@pytest.fixture(scope="module")
def base() -> DecoderLM:
    return jax.jit(lambda key: DecoderLM(CONFIG, key=key))(jax.random.key(0))


def noisy(model: DecoderLM, seed: int = 1) -> DecoderLM:
    """Factors as after training: B is not zero any more."""
    graphdef, params, rest = split_model(model, AdapterParam)
    rng = np.random.default_rng(seed)
    params = jax.tree.map(lambda x: jnp.asarray(0.3 * rng.normal(size=x.shape), x.dtype), params)
    return merge_model(graphdef, params, rest)


@pytest.fixture(scope="module")
def adapted(base) -> DecoderLM:
    return noisy(inject_lora(base, WITH_HEAD, key=jax.random.key(1)))


@jax.jit
def logits(model, tokens, key=None):
    return model.logits(model(tokens, key=key).hidden)


def bits(model) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(model)]


def test_seven_projections_by_default_and_no_change_at_first(base):
    model = inject_lora(base, key=jax.random.key(1))
    assert set(lora_names(model)) == SEVEN
    np.testing.assert_array_equal(logits(model, TOKENS), logits(base, TOKENS))
    assert lora_names(base) == []


def test_is_the_product_of_the_factors(base, adapted):
    """Against the same model whose kernels have the products added by NumPy."""
    kernels = nnx.to_pure_dict(nnx.state(base))
    for name, adapter in lora_projections(adapted).items():
        a, b = (np.asarray(leaf[...], np.float64) for leaf in (adapter.lora_a, adapter.lora_b))
        if name == "head":
            head = np.asarray(base.embedding[...]).T + 2 * a @ b
            continue
        *path, last = name.split(".")
        place = kernels
        for part in path:
            place = place[part]
        low = np.stack([np.tensordot(x, y, 1) for x, y in zip(a, b, strict=True)])
        place[last] = jnp.asarray(np.asarray(place[last]) + 2 * low, jnp.float32)
    plain = nnx.merge(nnx.graphdef(base), kernels)
    expected = np.asarray(jax.jit(lambda m, t: m(t).hidden)(plain, TOKENS)) @ head
    np.testing.assert_allclose(logits(adapted, TOKENS), expected, rtol=2e-4, atol=2e-4)


def test_merge_and_unmerge(base, adapted):
    before = bits(adapted)
    merged = merge_lora(adapted)
    assert lora_names(merged.model) == [] and merged.tied
    np.testing.assert_allclose(
        logits(merged.model, TOKENS), logits(adapted, TOKENS), rtol=2e-4, atol=2e-4
    )
    again = unmerge_lora(merged)
    assert bits(again) == before == bits(adapted)
    assert jax.tree.structure(again) == jax.tree.structure(adapted)
    np.testing.assert_array_equal(again.layers.attention.query.base[...],
                                  base.layers.attention.query[...])  # fmt: skip


def test_a_tied_head_never_touches_the_embedding(base, adapted):
    merged = merge_lora(adapted).model
    np.testing.assert_array_equal(merged.embedding[...], base.embedding[...])
    assert merged.config == dataclasses.replace(CONFIG, tie_embeddings=False)
    assert merged.head[...].shape == (16, 29)
    delta = np.asarray(merged.head[...]) - np.asarray(base.embedding[...]).T
    assert np.abs(delta).max() > 0.1
    assert base.head is None and base.config.tie_embeddings
    back = unmerge_lora(merge_lora(adapted))
    assert back.config.tie_embeddings and back.head.base is None
    # Without factors on the head, it stays tied.
    plain = merge_lora(noisy(inject_lora(base, key=jax.random.key(1)))).model
    assert plain.head is None and plain.config.tie_embeddings
    with pytest.raises(ValueError, match="adapt 'head'"):
        inject_lora(base, LoRAConfig(targets=("embedding",)), key=jax.random.key(1))


def test_only_the_factors_train_by_filter_and_by_labels(base):
    model = inject_lora(base, LoRAConfig(rank=2, targets=("query", "head")), key=jax.random.key(1))
    _, params, _ = split_model(model, AdapterParam)
    assert sum(x.size for x in jax.tree.leaves(params)) == 3 * 2 * (16 + 32) + 2 * (16 + 29)

    graphdef, everything, rest = split_model(model)
    labels = lora_partition(everything)
    optimizer = optax.multi_transform(
        {"adapters": optax.sgd(0.5), "frozen": optax.set_to_zero()}, labels
    )

    @jax.jit
    def step(params):
        def loss(params):
            model = merge_model(graphdef, params, rest)
            return jnp.mean(jnp.square(model.logits(model(TOKENS).hidden)))

        updates, _ = optimizer.update(jax.grad(loss)(params), optimizer.init(params), params)
        return optax.apply_updates(params, updates)

    after = step(everything)
    changed = jax.tree.map(lambda a, b: bool((a != b).any()), everything, after)
    for path, value in jax.tree_util.tree_leaves_with_path(changed):
        # B is zero at first, so A has no gradient in the first step.
        assert value == ("lora_b" in jax.tree_util.keystr(path)), path
    with pytest.raises(ValueError, match="nothing would train"):
        lora_partition(nnx.to_pure_dict(nnx.state(base)))


def test_dropout_only_with_a_key(base):
    config = LoRAConfig(rank=2, dropout=0.5, targets=("query", "down"))
    model = noisy(inject_lora(base, config, key=jax.random.key(1)))
    still = logits(model, TOKENS)
    one, other = (logits(model, TOKENS, jax.random.key(k)) for k in (0, 1))
    np.testing.assert_array_equal(still, logits(model, TOKENS))
    assert not np.allclose(one, still) and not np.allclose(one, other)


def test_a_pattern_never_catches_the_scale_of_a_norm():
    config = dataclasses.replace(CONFIG, qk_norm=True, attention_bias=True)
    model = jax.eval_shape(lambda: DecoderLM(config, key=jax.random.key(0)))
    found = {projection.name for projection in find_projections(model, ("attention.*",))}
    assert found == {name for name in SEVEN if "attention" in name}


def test_patterns():
    tree = {
        "layers": [{"self_attn": {"q_proj": {"weight": np.ones((6, 4))}}, "norm": np.ones(4)}] * 2,
        "lm_head": {"kernel": np.ones((4, 9))},
    }
    found = {p.name: p for p in find_projections(tree)}
    assert set(found) == {"layers.0.self_attn.q_proj", "layers.1.self_attn.q_proj"}
    assert (found["layers.0.self_attn.q_proj"].width, found["layers.0.self_attn.q_proj"].out) == (
        4,
        6,
    )
    (head,) = find_projections(tree, ("lm_head",))
    assert (head.width, head.out) == (4, 9)
    (second,) = find_projections(tree, ("layers.1.*",))
    assert second.path == ("layers", 1, "self_attn", "q_proj", "weight")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LoRAConfig(targets=("querry",)), "did you mean.*query"),
        (LoRAConfig(targets=("query", "nowhere")), "nowhere"),
        (LoRAConfig(targets=("head.inner",)), "no target matched"),
    ],
)
def test_no_target(base, config, message):
    with pytest.raises(ValueError, match=message):
        inject_lora(base, config, key=jax.random.key(0))


@pytest.mark.parametrize("values", [{"rank": 0}, {"alpha": 0.0}, {"dropout": 1.0}])
def test_bad_configuration(values):
    with pytest.raises(ValueError, match=next(iter(values))):
        LoRAConfig(**values)


def test_refuses_what_it_cannot_do(base, adapted):
    with pytest.raises(ValueError, match="adapters already"):
        inject_lora(adapted, key=jax.random.key(0))
    with pytest.raises(ValueError, match="no low-rank factors"):
        merge_lora(base)


class TestFiles:
    def test_round_trip(self, tmp_path, base, adapted):
        save_lora(tmp_path / "a.safetensors", adapted)
        again = load_lora(tmp_path / "a.safetensors", base)
        np.testing.assert_array_equal(logits(again, TOKENS), logits(adapted, TOKENS))
        assert sorted(p.name for p in tmp_path.iterdir()) == ["a.safetensors"]

    def test_other_model(self, tmp_path, adapted):
        save_lora(tmp_path / "a.safetensors", adapted)
        for change, part in (
            ({"embed_dim": 8}, "query.lora_a' has shape"),
            ({"num_layers": 2}, "has shape"),
        ):
            other = jax.eval_shape(
                lambda c=change: DecoderLM(dataclasses.replace(CONFIG, **c), key=jax.random.key(0))
            )
            with pytest.raises(FormatError, match=part) as caught:
                load_lora(tmp_path / "a.safetensors", other)
            assert "a.safetensors" in str(caught.value)

    def test_damaged(self, tmp_path, base, adapted):
        file = tmp_path / "a.safetensors"
        save_lora(file, adapted)
        whole = file.read_bytes()
        file.write_bytes(whole[:-10])
        with pytest.raises(FormatError, match="no valid safetensors"):
            load_lora(file, base)
        with pytest.raises(FormatError, match="no such file"):
            load_lora(tmp_path / "b.safetensors", base)
        from safetensors.numpy import save_file

        save_file({"x": np.ones(3, np.float32)}, file)
        with pytest.raises(FormatError, match="no adapter of this library"):
            load_lora(file, base)
