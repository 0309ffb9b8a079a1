"""LD-MoLE in a decoder: the paper's parameter counts, shared heads, labels, layouts, files."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxlib_papers.io.adapters import save_arrays
from jaxlib_papers.io.errors import FormatError
from jaxlib_papers.moe import ld_mole as m
from jaxlib_papers.nn.adapters import AdapterParam, adapter_scope
from jaxlib_papers.nn.config import DecoderConfig
from jaxlib_papers.nn.decoder import DecoderLM
from jaxlib_papers.nn.generate import prefill, unstack_layers
from jaxlib_papers.train.state import merge_model, split_model

SMALL = DecoderConfig(
    vocab_size=29,
    num_layers=4,
    embed_dim=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_dim=24,
    init_std=0.2,
)
CFG = m.MoLEConfig(
    num_experts=4, rank=2, alpha=4.0, hidden=8, dropout=0.0, hidden_bias_init=0.0,
    targets=("query", "key", "out", "down"),
)  # fmt: skip
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 29, (2, 6)), jnp.int32)


def shape_of(config: DecoderConfig) -> DecoderLM:
    return jax.eval_shape(lambda: DecoderLM(config, key=jax.random.key(0)))


def shapes(base, cfg: m.MoLEConfig) -> m.MoLEParams:
    return jax.eval_shape(lambda: m.inject_mole(base, cfg))


def size(tree) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def llama(layers, embed, heads, kv_heads, mlp) -> DecoderConfig:
    return DecoderConfig(128256, layers, embed, heads, kv_heads, 128, mlp)


PAPER = {
    "Qwen3-1.7B": (
        DecoderConfig(151936, 28, 2048, 16, 8, 128, 6144, qk_norm=True, tie_embeddings=True),
        256,
        (69_730_304 + 4_128_768, 2_098_178),
        {2048, 6144},
    ),
    "Llama-3.2-3B": (
        llama(28, 3072, 24, 8, 8192), 256, (97_255_424 + 5_963_776, 2_884_610), {3072, 8192}
    ),
    "Llama-3.1-8B": (
        llama(32, 4096, 32, 8, 14336), 512, (187_172_866 - 9_439_234, 9_439_234), {4096, 14336}
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(PAPER))
def test_parameter_counts_of_the_paper(name):
    config, hidden, (adapters, heads), widths = PAPER[name]
    model, cfg = shape_of(config), m.MoLEConfig(hidden=hidden)
    params = jax.eval_shape(lambda: m.inject_mole(model, cfg))
    assert (size(params.adapters), size(params.heads)) == (adapters, heads)
    assert set(params.heads) == widths

    def make():
        model = DecoderLM(config, key=jax.random.key(0))
        return m.with_mole(model, m.inject_mole(model, cfg), cfg)

    whole = jax.eval_shape(make)
    _, trained, _ = split_model(whole, AdapterParam)
    assert size(trained) == adapters + heads


def test_widths_include_that_of_the_attention_output():
    params = jax.eval_shape(
        lambda: m.inject_mole(shape_of(DecoderConfig(9, 2, 1024, 16, 8, 128, 3072)))
    )
    assert set(params.heads) == {1024, 2048, 3072}


def test_trees_in_hugging_face_layout():
    def layer():
        return {
            "self_attn": {"q_proj": {"weight": np.ones((8, 6), np.float32)}},
            "norm": np.ones(6),
        }

    tree = {"model": {"layers": {str(i): layer() for i in range(4)}}}
    params = m.inject_mole(tree, m.MoLEConfig(layout="2468", rank=3))
    shapes = [a["A"].shape for _, a in sorted(params.adapters.items())]
    assert shapes == [(2, 3, 6), (4, 3, 6), (6, 3, 6), (8, 3, 6)] and set(params.heads) == {6}
    assert m.inject_mole(tree, m.MoLEConfig(router="topk")).heads == {}
    with pytest.raises(ValueError, match="no target matched"):
        m.inject_mole({"norm": np.ones((3, 3))}, m.MoLEConfig())
    with pytest.raises(ValueError, match="needs layers"):
        m.inject_mole({"q_proj": np.ones((3, 3))}, m.MoLEConfig(layout="2468"))


@pytest.fixture(scope="module")
def base() -> DecoderLM:
    return jax.jit(lambda key: DecoderLM(SMALL, key=key))(jax.random.key(0))


def grown(params: m.MoLEParams, seed: int = 1) -> m.MoLEParams:
    """B as after training."""
    rng = np.random.default_rng(seed)
    adapters = {
        name: arrays | {"B": jnp.asarray(0.2 * rng.normal(size=arrays["B"].shape), jnp.float32)}
        for name, arrays in params.adapters.items()
    }
    return params._replace(adapters=adapters)


@pytest.fixture(scope="module")
def adapted(base) -> DecoderLM:
    params = m.inject_mole(base, CFG, key=jax.random.key(1))
    return m.with_mole(base, grown(params), CFG)


@jax.jit
def run(model, tokens, key=None):
    return model(tokens, key=key)


def test_starts_as_the_base_and_returns_its_routing(base):
    model = m.with_mole(base, m.inject_mole(base, CFG), CFG)
    out = run(model, TOKENS)
    np.testing.assert_allclose(out.hidden, run(base, TOKENS).hidden, atol=1e-5)
    assert set(out.adapter_routing) == {
        "layers.attention.query",
        "layers.attention.key",
        "layers.attention.out",
        "layers.feed_forward.down",
    }
    for routing in out.adapter_routing.values():
        assert routing.p.shape == routing.u.shape == (4, 2, 6, 4) and routing.lam.shape == (4, 2, 6)
        np.testing.assert_allclose(jnp.sum(routing.p, axis=-1), 1, atol=1e-5)
    assert run(base, TOKENS).adapter_routing is None


def test_scan_equals_a_loop_over_mole_linear(adapted):
    """The first layer's query, by the pure function on what the layer sees."""
    x = jnp.asarray(np.random.default_rng(3).normal(size=(2, 6, 16)), jnp.float32)
    query = jax.tree.map(lambda leaf: leaf[0], adapted.layers.attention.query)
    weight = query.base[...].reshape(16, 32).T
    params = {"W": weight, "A": query.A[...], "B": query.B[...], "Wg": query.Wg[...]}
    out = jax.jit(lambda p, h: m.mole_linear(p, x, h, alpha=4.0))(
        params, adapted.adapters.heads["16"]
    )

    with adapter_scope(adapted.adapters) as scope:
        y = query.project(x)
    np.testing.assert_allclose(y.reshape(2, 6, 32), out.y, atol=1e-4)
    np.testing.assert_allclose(scope.records["layers.attention.query"].p, out.p, atol=1e-5)
    with pytest.raises(ValueError, match="adapter_scope"):
        query.project(x)


def test_heads_live_once_and_sum_their_gradients(adapted):
    graphdef, params, rest = split_model(adapted, AdapterParam)
    heads = params["adapters"]["heads"]
    assert {w: h["W1"].shape for w, h in heads.items()} == {
        "16": (8, 16),
        "24": (8, 24),
        "32": (8, 32),
    }

    def loss(params, scale):
        model = merge_model(graphdef, params, rest)
        routing = model(TOKENS).adapter_routing["layers.attention.query"]
        return jnp.sum(routing.lam * scale[:, None, None])

    gradient = jax.jit(jax.grad(loss))
    whole = gradient(params, jnp.ones(4))["adapters"]["heads"]["16"]["b2"]
    parts = [gradient(params, jnp.eye(4)[i])["adapters"]["heads"]["16"]["b2"] for i in range(4)]
    assert all(float(part[0]) > 0 for part in parts)
    np.testing.assert_allclose(whole, sum(parts), rtol=1e-5)


LOCAL = dataclasses.replace(CFG, lambda_heads="local")


class TestLocalHeads:
    """A head for each layer and input width in place of one for each width."""

    @pytest.mark.parametrize("name", sorted(PAPER))
    def test_counts(self, name):
        config, hidden, (adapters, heads), widths = PAPER[name]
        cfg = m.MoLEConfig(hidden=hidden, lambda_heads="local")
        params = jax.eval_shape(lambda: m.inject_mole(shape_of(config), cfg))
        assert size(params.adapters) == adapters and set(params.heads) == widths
        assert size(params.heads) == config.num_layers * heads

    def test_equal_arrays_give_what_a_shared_head_gives(self, base, adapted):
        params = m.mole_params(adapted)
        heads = jax.tree.map(lambda a: jnp.broadcast_to(a, (4, *a.shape)), params.heads)
        model = m.with_mole(base, params._replace(heads=heads), LOCAL)
        out, shared = run(model, TOKENS), run(adapted, TOKENS)
        np.testing.assert_allclose(out.hidden, shared.hidden, atol=1e-6)
        for name, routing in out.adapter_routing.items():
            np.testing.assert_allclose(routing.lam, shared.adapter_routing[name].lam, atol=1e-6)
        logits, _ = jax.jit(prefill, static_argnames="slots")(
            unstack_layers(model), TOKENS, slots=6
        )
        np.testing.assert_allclose(logits, model.logits(out.hidden[:, -1:])[:, 0], atol=1e-5)

    def test_each_layer_reads_its_own_head_and_trains_no_other(self, base):
        cfg = dataclasses.replace(LOCAL, targets=("query", "key"))
        model = m.with_mole(base, grown(m.inject_mole(base, cfg, key=jax.random.key(3))), cfg)
        graphdef, params, rest = split_model(model, AdapterParam)
        first = params["adapters"]["heads"]["16"]["W1"]
        assert first.shape == (4, 8, 16) and bool((first[0] != first[1]).any())
        assert set(jax.tree.leaves(m.mole_partition(params)["adapters"])) == {"heads"}

        def loss(params, scale):
            routing = merge_model(graphdef, params, rest)(TOKENS).adapter_routing
            lam = routing["layers.attention.query"].lam + routing["layers.attention.key"].lam
            return jnp.sum(lam * scale[:, None, None])

        gradient = jax.jit(jax.grad(loss))
        for layer in range(4):
            own = gradient(params, jnp.eye(4)[layer])["adapters"]["heads"]
            # Layers before it matter through the stream, by their own heads; later ones don't.
            for leaf, array in own["16"].items():
                assert bool((array[layer] != 0).any()), leaf
                assert not bool(array[layer + 1 :].any()), leaf

    def test_trees_of_numbered_layers(self):
        tree = {"layers": {str(i): {"q_proj": {"weight": np.ones((8, 6))}} for i in range(3)}}
        heads = m.inject_mole(tree, m.MoLEConfig(hidden=5, lambda_heads="local")).heads
        assert {w: h["W1"].shape for w, h in heads.items()} == {6: (3, 5, 6)}
        cfg = m.MoLEConfig(router="topk", lambda_heads="local")
        assert m.inject_mole(tree, cfg).heads == {}

    def test_round_trip_and_files_from_before(self, tmp_path, base):
        file = tmp_path / "local.safetensors"
        made = m.inject_mole(base, LOCAL, key=jax.random.key(3))
        m.save_mole(file, m.mole_params(m.with_mole(base, made, LOCAL)), LOCAL)
        params, cfg = m.load_mole(file, base)
        assert cfg.lambda_heads == "local"
        jax.tree.map(np.testing.assert_array_equal, params, made)
        with pytest.raises(FormatError, match="local.safetensors"):
            m.load_mole(file, shape_of(dataclasses.replace(SMALL, num_layers=2)))
        settings = dataclasses.asdict(dataclasses.replace(CFG, router=m.Router()))
        del settings["lambda_heads"]
        shared = m.inject_mole(base, CFG)
        names = {f"{part}.{group}.{leaf}": array for part, groups in shared._asdict().items()
                 for group, arrays in groups.items() for leaf, array in arrays.items()}  # fmt: skip
        save_arrays(file, names, format="jaxlib-papers.ld_mole/1", settings=settings)
        assert m.load_mole(file, base)[1].lambda_heads == "shared"

    def test_refusals(self, base):
        with pytest.raises(ValueError, match="lambda_heads.*'each'"):
            m.MoLEConfig(lambda_heads="each")
        with pytest.raises(ValueError, match="lambda_heads='local' needs layers.*q_proj"):
            m.inject_mole({"q_proj": np.ones((3, 3))}, m.MoLEConfig(lambda_heads="local"))
        two = {
            name: {"layers": {"q_proj": {"weight": np.ones((n, 3, 3))}}}
            for name, n in (("a", 2), ("b", 3))
        }
        with pytest.raises(ValueError, match=r"stacks of \[2, 3\]"):
            m.inject_mole(two, m.MoLEConfig(lambda_heads="local"))
        with pytest.raises(ValueError, match="16.W1 has shape"):
            m.with_mole(base, shapes(base, CFG), LOCAL)


def test_labels_freeze_the_base(adapted):
    graphdef, params, rest = split_model(adapted)
    labels = m.mole_partition(params)
    assert set(jax.tree.leaves(labels)) == {"frozen", "adapters", "heads"}
    optimizer = optax.multi_transform(
        {"adapters": optax.sgd(0.1), "heads": optax.sgd(0.1), "frozen": optax.set_to_zero()}, labels
    )

    @jax.jit
    def step(params):
        def loss(params):
            return jnp.sum(jnp.sin(merge_model(graphdef, params, rest)(TOKENS).hidden[:, -1]))

        updates, _ = optimizer.update(jax.grad(loss)(params), optimizer.init(params), params)
        return optax.apply_updates(params, updates)

    after = step(params)
    for (path, old), new, label in zip(
        jax.tree_util.tree_leaves_with_path(params),
        jax.tree.leaves(after),
        jax.tree.leaves(labels),
        strict=True,
    ):
        if label == "frozen":
            np.testing.assert_array_equal(old, new, err_msg=str(path))
        else:
            assert bool((old != new).any()), path


def test_partition_of_plain_trees():
    params = m.inject_mole({"q_proj": {"weight": np.ones((4, 3), np.float32)}}, m.MoLEConfig())
    labels = m.mole_partition({"base": {"A": np.ones(2), "W1": np.ones(2)}, "score": np.ones(2),
                               "new": params}, trained=("score",))  # fmt: skip
    assert labels["base"] == {"A": "frozen", "W1": "frozen"} and labels["score"] == "adapters"
    assert set(labels["new"].adapters["q_proj"].values()) == {"adapters"}
    assert set(labels["new"].heads[3].values()) == {"heads"}
    with pytest.raises(ValueError, match="no adapter"):
        m.mole_partition({"kernel": np.ones((2, 2))})


def test_mola_layout_limits_the_lower_layers(base):
    assert m.mola_layout("2468", 8) == [2, 2, 4, 4, 6, 6, 8, 8]
    assert m.mola_layout((8,), 3) == [8, 8, 8]
    cfg = dataclasses.replace(CFG, router="softmax", layout=(2, 4), targets=("query",))
    model = m.with_mole(base, m.inject_mole(base, cfg), cfg)
    p = run(model, TOKENS).adapter_routing["layers.attention.query"].p
    assert np.all(np.asarray(p[:2, ..., 2:]) == 0) and np.all(np.asarray(p[2:]) > 0)


def test_dropout_needs_a_key(base):
    cfg = dataclasses.replace(CFG, dropout=0.5, targets=("query",))
    model = m.with_mole(base, grown(m.inject_mole(base, cfg)), cfg)
    still, wet = run(model, TOKENS).hidden, run(model, TOKENS, jax.random.key(0)).hidden
    np.testing.assert_array_equal(still, run(model, TOKENS).hidden)
    assert not np.allclose(still, wet)


class TestFiles:
    def test_round_trip(self, tmp_path, base, adapted):
        file = tmp_path / "a.safetensors"
        m.save_mole(file, m.mole_params(adapted), CFG)
        params, cfg = m.load_mole(file, base)
        assert cfg == dataclasses.replace(CFG, router=m.Router())
        again = m.with_mole(base, params, cfg)
        np.testing.assert_array_equal(run(again, TOKENS).hidden, run(adapted, TOKENS).hidden)

    @pytest.mark.parametrize("change", [{"embed_dim": 8}, {"num_layers": 2}, {"mlp_dim": 40}])
    def test_other_widths(self, tmp_path, adapted, change):
        file = tmp_path / "a.safetensors"
        m.save_mole(file, m.mole_params(adapted), CFG)
        with pytest.raises(FormatError, match="a.safetensors: .*(has shape|lacks)"):
            m.load_mole(file, shape_of(dataclasses.replace(SMALL, **change)))

    def test_wrong_tensor_and_truncation(self, tmp_path, base, adapted):
        file = tmp_path / "a.safetensors"
        params = m.mole_params(adapted)
        broken = params.adapters["layers.attention.query"] | {"A": jnp.ones((4, 4, 2, 15))}
        names = params.adapters | {"layers.attention.query": broken}
        m.save_mole(file, params._replace(adapters=names), CFG)
        with pytest.raises(FormatError, match=r"query.A' has shape \(4, 4, 2, 15\)"):
            m.load_mole(file, base)
        file.write_bytes(file.read_bytes()[:500])
        with pytest.raises(FormatError, match="a.safetensors"):
            m.load_mole(file, base)


def test_refusals(base, adapted):
    with pytest.raises(ValueError, match="adapters already"):
        m.with_mole(adapted, m.mole_params(adapted), CFG)
    with pytest.raises(ValueError, match="no LoRA experts"):
        m.mole_params(base)
    head = dataclasses.replace(CFG, targets=("query", "head"))
    with pytest.raises(ValueError, match="'head'.*outside the layers"):
        m.with_mole(base, shapes(base, head), head)
    params = shapes(base, dataclasses.replace(CFG, targets=("query",)))
    with pytest.raises(ValueError, match="other widths or targets"):
        m.with_mole(base, params, CFG)
    with pytest.raises(ValueError, match="has shape"):
        m.with_mole(base, shapes(base, dataclasses.replace(CFG, rank=3)), CFG)


def packed() -> dict[str, jax.Array]:
    rng = np.random.default_rng(5)
    segments = np.ones((2, 6), np.int32)
    segments[1, 4:] = 0
    return {
        "tokens": TOKENS,
        "targets": jnp.asarray(rng.integers(0, 29, (2, 6)), jnp.int32),
        "loss_mask": jnp.asarray((segments > 0) & (np.arange(6) > 1)),
        "segment_ids": jnp.asarray(segments),
        "positions": jnp.broadcast_to(jnp.arange(6, dtype=jnp.int32), (2, 6)),
    }


def test_objective_is_the_sum_of_its_terms(adapted):
    batch = packed()
    coef = m.MoLELossConfig(alpha=0.3, beta=0.2, k=1, gamma_z=0.01, lam_coef=0.05, smoothing=0.1)
    objective = m.mole_objective(coef)

    @jax.jit
    def run(model, batch):
        total, metrics = objective.loss(model, batch, None, objective.count(batch))
        out = model(batch["tokens"], segment_ids=batch["segment_ids"])
        return total, metrics, jax.nn.log_softmax(model.logits(out.hidden)), out.adapter_routing

    total, metrics, log_probs, routing = run(adapted, batch)
    log_probs, mask = np.asarray(log_probs), np.asarray(batch["loss_mask"])
    own = np.take_along_axis(log_probs, np.asarray(batch["targets"])[..., None], -1)[..., 0]
    smoothed = -(0.9 * own + 0.1 * log_probs.mean(-1))[mask].mean()
    np.testing.assert_allclose(metrics["lm_loss"], smoothed, rtol=1e-5)
    valid = np.asarray(batch["segment_ids"]) > 0
    active = np.mean([np.asarray(m.active_experts(r.p))[:, valid].mean() for r in routing.values()])
    np.testing.assert_allclose(metrics["active_experts"], active, rtol=1e-5)
    terms = (
        smoothed + 0.3 * metrics["load_balance"] + 0.2 * metrics["sparsity"]
        + 0.01 * metrics["router_z"] + 0.05 * metrics["lambda_penalty"]
    )  # fmt: skip
    np.testing.assert_allclose(total, terms, rtol=1e-5)


def test_objective_refuses_models_without_lambda(base):
    batch = packed()
    with pytest.raises(ValueError, match="no LoRA experts"):
        m.mole_auxiliary({}, None, m.MoLELossConfig())
    routing = m.MoLERouting(jnp.ones((1, 2, 6, 4)) / 4, jnp.ones((1, 2, 6, 4)), None)
    with pytest.raises(ValueError, match="need lambda"):
        m.mole_auxiliary({"query": routing}, batch["segment_ids"] > 0, m.MoLELossConfig(beta=0.1))
    with pytest.raises(ValueError, match="alpha"):
        m.MoLELossConfig(alpha=-1.0)
