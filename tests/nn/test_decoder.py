"""The language model: the function it computes, packing, causality, remat, dropout, depth."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params
from jax.test_util import check_grads

from jaxlib_papers.nn.config import DecoderConfig, MoEConfig, RopeScaling
from jaxlib_papers.nn.decoder import DecoderLM
from jaxlib_papers.ops.cross_entropy import chunked_cross_entropy
from tests.nn.numpy_decoder import forward as numpy_forward

DENSE = DecoderConfig(
    vocab_size=31,
    num_layers=2,
    embed_dim=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_dim=24,
    max_positions=64,
    init_std=0.3,
)
SPARSE = dataclasses.replace(
    DENSE, mlp_dim=0, qk_norm=True, tie_embeddings=True, moe=MoEConfig(4, 2, expert_dim=12)
)


def build(config, seed=0):
    """A model with every parameter, norms and biases too, drawn: no compilation."""
    abstract = jax.eval_shape(lambda: DecoderLM(config, key=jax.random.key(0)))
    leaves, tree = jax.tree.flatten_with_path(abstract)
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        one = "scale" in jax.tree_util.keystr(path)
        return jnp.asarray(one + 0.3 * rng.normal(size=leaf.shape), leaf.dtype)

    return jax.tree.unflatten(tree, [draw(*entry) for entry in leaves])


@jax.jit
def call(model, tokens, positions=None, segment_ids=None, key=None):
    return model(tokens, positions=positions, segment_ids=segment_ids, key=key)


def draw_tokens(seed=0, shape=(2, 12), vocab=31):
    return np.random.default_rng(seed).integers(0, vocab, shape).astype(np.int32)


# Two documents and padding in the first row, one document in the second.
SEGMENTS = np.array([[1] * 5 + [2] * 4 + [0] * 3, [1] * 12], np.int32)
POSITIONS = np.array([[*range(5), *range(4), *range(3)], range(12)], np.int32)

CONFIGS = {
    "llama3": dataclasses.replace(
        DENSE, rope_theta=100.0, rope_scaling=RopeScaling("llama3", 4.0, 16, 1.0, 2.0)
    ),
    "qwen3_moe": SPARSE,
    "everything": dataclasses.replace(
        DENSE,
        mlp_dim=0,
        qk_norm=True,
        attention_bias=True,
        attention_softcap=2.0,
        sliding_window=3,
        rope_scaling=RopeScaling("yarn", 4.0, 16),
        moe=MoEConfig(5, 3, expert_dim=6, renormalize=False, shared_expert_dim=10),
    ),
}


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_the_function_it_computes(name):
    model = build(CONFIGS[name])
    tokens = draw_tokens()
    out = call(model, tokens, POSITIONS, SEGMENTS)
    hidden, router = numpy_forward(model, tokens, POSITIONS, SEGMENTS)
    np.testing.assert_allclose(out.hidden, hidden, rtol=2e-4, atol=2e-4)
    if model.config.moe is None:
        assert out.router_logits is None and out.router_probs is None
    else:
        np.testing.assert_allclose(out.router_logits, router, rtol=2e-4, atol=2e-4)
        assert out.router_logits.shape == out.router_probs.shape
    assert out.dropped_fraction is None


def test_packed_documents_are_as_if_alone():
    """C6: neither neighbours nor padding reach a document's states or its router."""
    model, tokens = build(SPARSE), draw_tokens(1)
    packed = call(model, tokens, POSITIONS, SEGMENTS)
    other = np.where(SEGMENTS == 0, (tokens + 1) % 31, tokens)
    padded = call(model, other, POSITIONS, SEGMENTS)
    alone = np.zeros((2, 5), np.int32)
    alone[0], alone[1, :4] = tokens[0, :5], tokens[0, 5:9]
    single = call(model, alone)
    for got, again, want in (
        (packed.hidden[0], padded.hidden[0], single.hidden),
        (packed.router_logits[:, 0], padded.router_logits[:, 0], single.router_logits),
    ):
        documents = np.concatenate([want[..., 0, :, :], want[..., 1, :4, :]], -2)
        np.testing.assert_allclose(got[..., :9, :], documents, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(got[..., :9, :], again[..., :9, :])


def test_an_all_padding_row_is_finite():
    segments = np.zeros_like(SEGMENTS)
    out = call(build(SPARSE), draw_tokens(), POSITIONS, segments)
    assert all(np.isfinite(a).all() for a in jax.tree.leaves(out))


def changed(model, at):
    """Which positions' states change with the token at position `at`."""
    tokens = draw_tokens(2, (1, 12))
    other = tokens.copy()
    other[0, at] = (tokens[0, at] + 1) % 31
    first, second = (np.asarray(call(model, t).hidden[0]) for t in (tokens, other))
    return np.flatnonzero((first != second).any(-1))


def test_no_state_depends_on_a_later_token():
    np.testing.assert_array_equal(changed(build(DENSE), 7), np.arange(7, 12))


def test_a_window_reaches_so_far_per_layer():
    model = build(dataclasses.replace(DENSE, sliding_window=3))
    np.testing.assert_array_equal(changed(model, 2), np.arange(2, 2 + 2 * 2 + 1))


def test_positions_count_from_zero_by_default():
    model, tokens = build(DENSE), draw_tokens(3)
    positions = np.broadcast_to(np.arange(12, dtype=np.int32), (2, 12))
    np.testing.assert_array_equal(call(model, tokens).hidden, call(model, tokens, positions).hidden)
    # Only differences matter, so a shift of all changes nothing but rounding.
    shifted = call(model, tokens, positions + 20).hidden
    np.testing.assert_allclose(call(model, tokens).hidden, shifted, rtol=1e-3, atol=1e-3)
    stretched = call(model, tokens, positions * 2).hidden
    assert np.abs(stretched - shifted).max() > 0.1


def loss(model, tokens, key=None):
    out = model(tokens, key=key)
    total, weight = chunked_cross_entropy(
        out.hidden, model.head_kernel(), tokens, softcap=model.config.logit_softcap
    )
    aux = 0.0 if out.router_logits is None else jnp.mean(jnp.square(out.router_logits))
    return total / weight + aux


@functools.cache
def compiled_with_remat(policy):
    model = build(dataclasses.replace(SPARSE, remat=policy, dropout=0.2))
    step = jax.jit(jax.value_and_grad(loss))
    args = model, draw_tokens(4, (1, 16)), jax.random.key(3)
    compiled = step.lower(*args).compile()
    return compiled(*args), compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("policy", ("dots", "minimal", "full"))
def test_remat_changes_memory_only(policy):
    (value, grads), memory = compiled_with_remat(policy)
    (want, want_grads), most = compiled_with_remat("none")
    np.testing.assert_allclose(value, want, rtol=1e-6)
    for got, expected in zip(jax.tree.leaves(grads), jax.tree.leaves(want_grads), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6)
    assert memory < most


def equations(jaxpr):
    inner = (j for e in jaxpr.eqns for j in jaxprs_in_params(e.params))
    return len(jaxpr.eqns) + sum(map(equations, inner))


def test_the_program_does_not_grow_with_depth():
    def size(layers):
        config = dataclasses.replace(SPARSE, num_layers=layers)
        model = jax.eval_shape(lambda: DecoderLM(config, key=jax.random.key(0)))
        tokens = jax.ShapeDtypeStruct((2, 12), jnp.int32)
        return equations(jax.make_jaxpr(jax.grad(loss))(model, tokens).jaxpr)

    assert size(2) == size(16) > 100


def test_tied_and_untied_heads():
    tied, untied = build(dataclasses.replace(DENSE, tie_embeddings=True)), build(DENSE)
    np.testing.assert_array_equal(tied.head_kernel(), tied.embedding[...].T)
    assert tied.head is None and untied.head.shape == (16, 31)
    np.testing.assert_array_equal(untied.head_kernel(), untied.head[...])
    # A tied embedding learns from both of its uses: also rows of tokens that were not read.
    tokens = np.full((2, 12), 3, np.int32)
    grads = [jax.jit(jax.grad(loss))(m, tokens).embedding[...] for m in (tied, untied)]
    unread = np.arange(31) != 3
    assert (np.abs(grads[0]).max(1)[unread] > 0).all() and not np.any(grads[1][unread])


def test_logits_and_their_soft_cap():
    model = build(dataclasses.replace(DENSE, logit_softcap=2.0))
    hidden = call(model, draw_tokens()).hidden
    got = jax.jit(DecoderLM.logits)(model, hidden)
    raw = np.asarray(hidden, np.float64) @ np.asarray(model.head[...], np.float64)
    np.testing.assert_allclose(got, 2 * np.tanh(raw / 2), rtol=1e-4, atol=1e-5)
    assert np.abs(raw).max() > 2


def test_dropout_follows_its_key():
    config = dataclasses.replace(DENSE, dropout=0.3)
    model, tokens = build(config), draw_tokens(5)
    one, same, other = (call(model, tokens, key=jax.random.key(s)).hidden for s in (0, 0, 1))
    off = call(model, tokens).hidden
    np.testing.assert_array_equal(one, same)
    assert not np.array_equal(one, other) and not np.array_equal(one, off)
    # No rate, no dropout: the key is not even used.
    without = build(DENSE)
    np.testing.assert_array_equal(call(without, tokens, key=jax.random.key(0)).hidden, off)


def test_bfloat16_compute():
    config = dataclasses.replace(SPARSE, compute_dtype="bfloat16")
    model, tokens = build(config), draw_tokens(6)
    assert {a.dtype for a in jax.tree.leaves(model)} == {jnp.dtype(jnp.float32)}
    out = call(model, tokens)
    assert out.hidden.dtype == model.head_kernel().dtype == jnp.bfloat16
    assert out.router_logits.dtype == out.router_probs.dtype == jnp.float32
    exact = call(build(SPARSE), tokens)
    # A token whose expert flips differs for good reason; most stay near.
    error = np.abs(np.asarray(out.hidden, np.float32) - exact.hidden).max(-1)
    assert np.median(error) < 0.1
    assert jax.eval_shape(DecoderLM.logits, model, out.hidden).dtype == jnp.float32
    grads = jax.eval_shape(jax.grad(loss), model, tokens)
    assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype(jnp.float32)}


def test_gradients_by_finite_differences():
    config = dataclasses.replace(
        DENSE, num_layers=1, qk_norm=True, param_dtype="float64", compute_dtype="float64"
    )
    with jax.enable_x64(True):
        graphdef, params = nnx.split(build(config))
        tokens = jnp.asarray(draw_tokens(7, (1, 7)))

        @jax.jit
        def value(params):
            return loss(nnx.merge(graphdef, params), tokens)

        assert value(params).dtype == jnp.float64
        check_grads(value, (params,), 1, modes=["rev"], atol=1e-5, rtol=1e-5)


def test_parameters_are_named_and_drawn_as_configured():
    config = dataclasses.replace(
        SPARSE, attention_bias=True, tie_embeddings=False, embed_dim=64, init_std=0.05, num_layers=3
    )
    model = jax.jit(lambda key: DecoderLM(config, key=key))(jax.random.key(0))
    known = {"layers", "vocab", "embed", "heads", "kv_heads", "head_dim", "mlp", "experts",
             "expert_mlp", "norm", None}  # fmt: skip
    for path, variable in nnx.to_flat_state(nnx.split(model)[1]):
        axes, value = variable.get_metadata()["logical_axes"], np.asarray(variable[...])
        assert len(axes) == value.ndim and set(axes) <= known, path
        assert (path[0] == "layers") == (axes[0] == "layers"), path
        if path[-1] == "scale":
            assert (value == 1).all(), path
        elif str(path[-1]).endswith("_bias"):
            assert not value.any(), path
        else:
            assert value.std() == pytest.approx(0.05, rel=0.15), path
            if axes[0] == "layers":
                assert not np.array_equal(value[0], value[1]), path


def test_a_router_of_zeros_sends_evenly_and_learns():
    moe = dataclasses.replace(SPARSE.moe, router_std=0.0)
    config = dataclasses.replace(SPARSE, moe=moe)
    drawn = jax.jit(lambda key: DecoderLM(config, key=key).layers.feed_forward.router[...])
    model = build(config)
    router = model.layers.feed_forward.router
    model.layers.feed_forward.router = router.replace(drawn(jax.random.key(0)))
    assert not np.any(model.layers.feed_forward.router[...])
    out = call(model, draw_tokens())
    np.testing.assert_allclose(out.router_probs, np.full(out.router_probs.shape, 0.25), rtol=1e-6)
    grads = jax.jit(jax.grad(loss))(model, draw_tokens(0, (1, 4)))
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(grads))
    assert np.any(grads.layers.feed_forward.router[...])


def test_bad_calls():
    model = jax.eval_shape(lambda: DecoderLM(DENSE, key=jax.random.key(0)))
    tokens = jnp.zeros((2, 12), jnp.int32)

    def shape_of(*args, **options):
        return jax.eval_shape(lambda m: m(*args, **options), model)

    assert shape_of(tokens).hidden.shape == (2, 12, 16)
    with pytest.raises(ValueError, match="tokens has shape"):
        shape_of(tokens[0])
    with pytest.raises(ValueError, match="tokens has dtype float32"):
        shape_of(tokens.astype(jnp.float32))
    with pytest.raises(ValueError, match="65 positions, the model has 64.*max_positions"):
        shape_of(jnp.zeros((1, 65), jnp.int32))
    with pytest.raises(ValueError, match="positions has shape"):
        shape_of(tokens, positions=tokens[:1])
    with pytest.raises(ValueError, match="segment_ids has shape"):
        shape_of(tokens, segment_ids=tokens[:, 1:])
