"""Random tiny models of Hugging Face transformers and ours, with the same weights: equal logits.

Needs torch and transformers, which nothing else here does: `pytest -m parity`.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlib_papers.nn.config import DecoderConfig, MoEConfig, RopeScaling
from jaxlib_papers.nn.decoder import DecoderLM

pytestmark = pytest.mark.parity
# Any error of importing them, not only their absence, is no fault of ours.
torch = pytest.importorskip("torch", exc_type=ImportError)
transformers = pytest.importorskip("transformers", exc_type=ImportError)

SIZES = dict(
    vocab_size=61,
    hidden_size=32,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=48,
    max_position_embeddings=128,
    rms_norm_eps=1e-5,
    initializer_range=0.3,
    tie_word_embeddings=False,
)
OURS = DecoderConfig(
    vocab_size=61,
    num_layers=3,
    embed_dim=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    mlp_dim=48,
    max_positions=128,
    norm_eps=1e-5,
)
SPARSE = dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24, decoder_sparse_step=1)
THEIR_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}


def llama3():
    rope = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    theirs = transformers.LlamaConfig(**SIZES, rope_parameters=rope)
    scaling = RopeScaling("llama3", 8.0, 64, low_freq_factor=1.0, high_freq_factor=4.0)
    return theirs, dataclasses.replace(OURS, rope_theta=5e5, rope_scaling=scaling)


def llama_with_biases_and_yarn():
    theirs = transformers.LlamaConfig(**SIZES, rope_parameters=THEIR_YARN, attention_bias=True)
    scaling = RopeScaling("yarn", 4.0, 32)
    return theirs, dataclasses.replace(OURS, rope_scaling=scaling, attention_bias=True)


def qwen3():
    rope = {"rope_type": "default", "rope_theta": 1e6}
    sizes = SIZES | {"tie_word_embeddings": True}
    theirs = transformers.Qwen3Config(**sizes, rope_parameters=rope)
    return theirs, dataclasses.replace(OURS, rope_theta=1e6, qk_norm=True, tie_embeddings=True)


def qwen3_with_a_window():
    options = dict(use_sliding_window=True, sliding_window=5, max_window_layers=0)
    rope = {"rope_type": "default", "rope_theta": 1e4}
    theirs = transformers.Qwen3Config(**SIZES, **options, rope_parameters=rope)
    assert set(theirs.layer_types) == {"sliding_attention"}
    return theirs, dataclasses.replace(OURS, qk_norm=True, sliding_window=5)


def qwen3_moe(renormalize):
    rope = {"rope_type": "default", "rope_theta": 1e4}
    theirs = transformers.Qwen3MoeConfig(
        **SIZES, **SPARSE, norm_topk_prob=renormalize, rope_parameters=rope
    )
    moe = MoEConfig(6, 2, expert_dim=24, renormalize=renormalize)
    return theirs, dataclasses.replace(OURS, mlp_dim=0, qk_norm=True, moe=moe)


MODELS = {
    "llama3": llama3,
    "llama, biases, yarn": llama_with_biases_and_yarn,
    "qwen3": qwen3,
    "qwen3, window": qwen3_with_a_window,
    "qwen3-moe": lambda: qwen3_moe(True),
    "qwen3-moe, not renormalized": lambda: qwen3_moe(False),
}


def load(model: DecoderLM, weights: dict[str, np.ndarray]) -> DecoderLM:
    """Our model with their weights, every one of which has to be used."""
    weights, config = dict(weights), model.config
    if config.tie_embeddings:
        weights.pop("lm_head.weight", None)

    def take(name, shape=None, transpose=True):
        """All layers' weights of one name, matrices turned to [in, out]."""
        stack = [weights.pop(f"model.layers.{i}.{name}") for i in range(config.num_layers)]
        stack = np.stack([a.T if a.ndim == 2 and transpose else a for a in stack])
        return stack if shape is None else stack.reshape(config.num_layers, *shape)

    def put(variable, value):
        assert variable.shape == value.shape
        return variable.replace(jnp.asarray(value))

    embed, dim = config.embed_dim, config.head_dim
    heads = {"query": config.num_heads, "key": config.num_kv_heads, "value": config.num_kv_heads}
    model.embedding = put(model.embedding, weights.pop("model.embed_tokens.weight"))
    model.final_norm.scale = put(model.final_norm.scale, weights.pop("model.norm.weight"))
    if model.head is not None:
        model.head = put(model.head, weights.pop("lm_head.weight").T)
    layers, attention = model.layers, model.layers.attention
    for norm, name in (
        (layers.attention_norm, "input_layernorm"),
        (layers.feed_forward_norm, "post_attention_layernorm"),
        (attention.query_norm, "self_attn.q_norm"),
        (attention.key_norm, "self_attn.k_norm"),
    ):
        if norm is not None:
            norm.scale = put(norm.scale, take(f"{name}.weight"))
    for part, count in heads.items():
        name = f"self_attn.{part[0]}_proj"
        kernel = take(f"{name}.weight", (embed, count, dim))
        setattr(attention, part, put(getattr(attention, part), kernel))
        if config.attention_bias:
            bias = take(f"{name}.bias", (count, dim))
            setattr(attention, f"{part}_bias", put(getattr(attention, f"{part}_bias"), bias))
    out = take("self_attn.o_proj.weight", (config.num_heads, dim, embed))
    attention.out = put(attention.out, out)
    if config.attention_bias:
        attention.out_bias = put(attention.out_bias, take("self_attn.o_proj.bias"))
    feed = layers.feed_forward
    if config.moe is None:
        for part in ("gate", "up", "down"):
            setattr(feed, part, put(getattr(feed, part), take(f"mlp.{part}_proj.weight")))
    else:
        feed.router = put(feed.router, take("mlp.gate.weight"))
        gate_up, down = experts(take, config.moe)
        feed.gate_up, feed.down = put(feed.gate_up, gate_up), put(feed.down, down)
    assert not weights, f"not used: {sorted(weights)}"
    return model


def experts(take, moe):
    """Expert kernels [layers, experts, embed, 2, hidden] and [layers, experts, hidden, embed]."""
    both = take("mlp.experts.gate_up_proj")  # [layers, experts, 2 * hidden, embed]
    both = both.reshape(*both.shape[:2], 2, moe.expert_dim, both.shape[3])
    return both.transpose(0, 1, 4, 2, 3), take("mlp.experts.down_proj").swapaxes(2, 3)


def pair(name):
    theirs, ours = MODELS[name]()
    torch.manual_seed(0)
    rival = transformers.AutoModelForCausalLM.from_config(theirs, attn_implementation="eager")
    with torch.no_grad():
        for parameter in rival.parameters():  # norms and biases too
            parameter.add_(0.1 * torch.randn_like(parameter))
    weights = {n: p.detach().numpy().copy() for n, p in rival.state_dict().items()}
    return rival.eval(), load(DecoderLM(ours, key=jax.random.key(0)), weights)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_logits(name):
    rival, model = pair(name)
    tokens = np.random.default_rng(0).integers(0, 61, (2, 40)).astype(np.int32)
    with torch.no_grad():
        want = rival(torch.tensor(tokens, dtype=torch.long)).logits.numpy()

    @jax.jit
    def logits(model, tokens):
        return model.logits(model(tokens).hidden)

    got = np.asarray(logits(model, tokens))
    assert np.abs(want).max() > 1
    scale = max(1.0, np.abs(want).max() / 10)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * scale)


def test_gradients_of_a_mixture():
    """The loss and what each expert, the router and the embedding learn from it."""
    rival, model = pair("qwen3-moe")
    tokens = np.random.default_rng(1).integers(0, 61, (2, 24)).astype(np.int32)
    logits = rival(torch.tensor(tokens, dtype=torch.long)).logits
    log_probs = torch.log_softmax(logits[:, :-1], -1)
    targets = torch.tensor(tokens[:, 1:], dtype=torch.long)
    want = -log_probs.gather(-1, targets[..., None]).mean()
    want.backward()

    @jax.jit
    @jax.value_and_grad
    def loss(model):
        logits = model.logits(model(tokens).hidden)[:, :-1]
        chosen = jax.nn.log_softmax(logits) * jax.nn.one_hot(tokens[:, 1:], 61)
        return -jnp.sum(chosen) / targets.numel()

    value, grads = loss(model)
    np.testing.assert_allclose(value, want.item(), rtol=1e-5)
    theirs = {n: p.grad.numpy() for n, p in rival.named_parameters()}
    expected = load(DecoderLM(model.config, key=jax.random.key(0)), theirs)
    for got, reference in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        scale = np.abs(reference).max()
        np.testing.assert_allclose(got, reference, rtol=1e-3, atol=1e-4 * scale)
