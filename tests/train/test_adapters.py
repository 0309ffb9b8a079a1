"""Fine-tuning in one call: what trains, what stays, and the loss of the next token."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxlib_papers.data.answers import answer_batch
from jaxlib_papers.nn.config import DecoderConfig
from jaxlib_papers.nn.decoder import DecoderLM
from jaxlib_papers.nn.lora import LoRAConfig, inject_lora, merge_lora
from jaxlib_papers.train.adapters import adapter_training
from jaxlib_papers.train.objectives import language_objective

CONFIG = DecoderConfig(
    vocab_size=19,
    num_layers=2,
    embed_dim=8,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    mlp_dim=12,
    init_std=0.3,
)
BATCH = answer_batch([([3, 4], [5, 6]), ([7], [8, 9]), ([3, 1], [2]), ([4], [4])])


@pytest.fixture(scope="module")
def base() -> DecoderLM:
    return jax.jit(lambda key: DecoderLM(CONFIG, key=key))(jax.random.key(0))


@pytest.fixture(scope="module")
def adapted(base) -> DecoderLM:
    config = LoRAConfig(rank=2, targets=("query", "down"))
    return inject_lora(base, config, key=jax.random.key(1))


def test_only_adapters_train_and_the_model_can_be_used_on(base, adapted):
    before = jax.tree.map(np.asarray, (base, adapted))
    training = adapter_training(adapted, optax.adam(0.05))
    assert sum(leaf.size for leaf in jax.tree.leaves(training.state.params)) == 2 * 2 * (
        (8 + 8) + (12 + 8)
    )
    state, losses = training.state, []
    for _ in range(10):
        state, metrics = training.step(state, BATCH)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.9 * losses[0] and int(state.step) == 10
    jax.tree.map(np.testing.assert_array_equal, (base, adapted), before)

    model = training.merge(state)
    trained = np.asarray(model.layers.attention.query.lora_b[...])
    assert trained.any() and not np.asarray(adapted.layers.attention.query.lora_b[...]).any()
    assert model.layers.attention.query.base[...] is base.layers.attention.query[...]
    training.step(state, BATCH)  # gives the state away, not the model made of it
    np.testing.assert_array_equal(model.layers.attention.query.lora_b[...], trained)
    assert merge_lora(model).model.config == CONFIG


@pytest.mark.parametrize("place", ["as made", "one device", "mesh"])
def test_steps_compile_once_wherever_the_base_lies(base, place):
    """A loaded model's arrays are committed to a device, fresh adapters are not."""
    if place != "as made":
        mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        where = sharding if place == "mesh" else jax.devices()[0]
        base = nnx.merge(nnx.graphdef(base), jax.device_put(nnx.state(base), where))
    adapted = inject_lora(base, LoRAConfig(rank=2, targets=("query",)), key=jax.random.key(1))
    training = adapter_training(adapted, optax.adam(0.05))
    state, _ = training.step(training.state, BATCH)
    with jax.no_tracing():
        training.step(state, BATCH)


def test_accumulation_and_the_loss_of_optax(adapted):
    """One whole step and one of two micro-batches, whose answers differ in length."""
    results = []
    for parts in (1, 2):
        training = adapter_training(adapted, optax.sgd(1.0), accum_steps=parts)
        state, metrics = training.step(training.state, BATCH)
        results.append((jax.tree.map(np.asarray, state.params), float(metrics["lm_loss"])))
    (whole, loss), (parts, same) = results
    np.testing.assert_allclose(same, loss, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), parts, whole)

    logits = np.asarray(
        jax.jit(lambda m, t, s: m.logits(m(t, segment_ids=s).hidden))(
            adapted, BATCH["tokens"], BATCH["segment_ids"]
        )
    )
    own = -np.take_along_axis(jax.nn.log_softmax(logits), BATCH["targets"][..., None], -1)[..., 0]
    np.testing.assert_allclose(loss, own[BATCH["loss_mask"]].mean(), rtol=1e-5)


def test_a_batch_without_answers_gives_zero(adapted):
    objective = language_objective()
    batch = BATCH | {"loss_mask": np.zeros_like(BATCH["loss_mask"])}
    loss, _ = jax.jit(lambda m, b: objective.loss(m, b, None, objective.count(b)))(adapted, batch)
    assert float(loss) == 0


def test_a_model_without_adapters_is_refused(base):
    with pytest.raises(ValueError, match="nothing would train"):
        adapter_training(base, optax.sgd(1.0))
    whole = adapter_training(base, optax.sgd(1.0), trainable=lambda path, value: "head" in path)
    assert list(whole.state.params) == ["head"]
    assert jnp.shape(whole.state.params["head"]) == (8, 19)
