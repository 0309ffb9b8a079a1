"""Folders of tiny random models that transformers wrote, read here, and the other way round.

Needs torch and transformers, which nothing else here does: `pytest -m parity`.
"""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest

from jaxlib_papers.io.peft import load_peft, save_peft
from jaxlib_papers.io.pretrained import find_model, load_pretrained, save_pretrained
from jaxlib_papers.nn.generate import generate, pad_prompts, unstack_layers
from jaxlib_papers.nn.lora import LoRAConfig, inject_lora, lora_projections

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch", exc_type=ImportError)
transformers = pytest.importorskip("transformers", exc_type=ImportError)

SIZES = dict(
    vocab_size=61,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=48,
    max_position_embeddings=128,
    rms_norm_eps=1e-5,
    initializer_range=0.3,
)
SPARSE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, decoder_sparse_step=1)
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "factor": 2.0}
PLAIN = {"rope_type": "default"}
MODELS = {
    "llama, tied, llama3": (transformers.LlamaConfig, dict(tie_word_embeddings=True), LLAMA3),
    "llama, untied, yarn, biases": (
        transformers.LlamaConfig,
        dict(tie_word_embeddings=False, attention_bias=True),
        YARN,
    ),
    "llama, linear": (transformers.LlamaConfig, dict(tie_word_embeddings=False), LINEAR),
    "qwen3, tied": (transformers.Qwen3Config, dict(tie_word_embeddings=True), PLAIN),
    "qwen3, untied, yarn": (transformers.Qwen3Config, dict(tie_word_embeddings=False), YARN),
    "qwen3-moe, untied": (
        transformers.Qwen3MoeConfig,
        dict(**SPARSE, norm_topk_prob=True, tie_word_embeddings=False),
        PLAIN,
    ),
    "qwen3-moe, tied": (
        transformers.Qwen3MoeConfig,
        dict(**SPARSE, norm_topk_prob=False, tie_word_embeddings=True),
        PLAIN,
    ),
}
THETA = 3e5


def their_model(name):
    cls, options, rope = MODELS[name]
    config = cls(**SIZES, **options, rope_parameters=rope | {"rope_theta": THETA})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def their_logits(model, tokens):
    with torch.no_grad():
        return model(torch.tensor(tokens, dtype=torch.long)).logits.numpy()


def our_logits(model, tokens):
    return np.asarray(jax.jit(lambda m, t: m.logits(m(t).hidden))(model, tokens))


def as_version_4(folder):
    """The same config.json as transformers 4 wrote it."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    config["torch_dtype"] = config.pop("dtype")
    file.write_text(json.dumps(config))


def close(got, want):
    assert np.abs(want).max() > 1
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * max(1, np.abs(want).max() / 10))


@pytest.mark.parametrize("name", sorted(MODELS))
def test_both_ways(tmp_path, name):
    rival = their_model(name)
    tokens = np.random.default_rng(0).integers(0, 61, (2, 100)).astype(np.int32)
    want = their_logits(rival, tokens)
    rival.save_pretrained(tmp_path / "theirs")
    five = load_pretrained(tmp_path / "theirs")
    assert five.config.rope_theta == THETA
    close(our_logits(five.model, tokens), want)

    as_version_4(tmp_path / "theirs")
    assert load_pretrained(tmp_path / "theirs").config == five.config

    save_pretrained(tmp_path / "ours", five.model)
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", attn_implementation="eager"
    )
    np.testing.assert_allclose(their_logits(again, tokens), want, rtol=1e-5, atol=1e-5)


def test_a_wrong_theta_would_be_seen(tmp_path):
    rival = their_model("llama, linear")
    tokens = np.random.default_rng(0).integers(0, 61, (1, 100)).astype(np.int32)
    rival.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    config["rope_parameters"]["rope_theta"] = 1e4
    file.write_text(json.dumps(config))
    got = our_logits(load_pretrained(tmp_path).model, tokens)
    assert np.abs(got - their_logits(rival, tokens)).max() > 0.01


def test_greedy_generation(tmp_path):
    """Rows of different lengths, padded on the left, against theirs one by one."""
    rival = their_model("qwen3, untied, yarn")
    rival.save_pretrained(tmp_path)
    model = unstack_layers(load_pretrained(tmp_path).model)
    rng = np.random.default_rng(2)
    prompts = [rng.integers(1, 61, n).tolist() for n in (3, 9, 6)]
    tokens, lengths = pad_prompts(prompts)
    got = generate(model, tokens, lengths, max_new_tokens=12)
    for row, prompt in enumerate(prompts):
        with torch.no_grad():
            ids = rival.generate(
                torch.tensor([prompt]),
                max_new_tokens=12,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        assert got.tokens[row].tolist() == ids[0, len(prompt) :].tolist()


def test_smollm2_exported(tmp_path):
    """The whole way of a real model: GGUF, here, a folder, transformers."""
    try:
        path = find_model("smollm2")
    except ValueError as error:
        pytest.skip(str(error))
    model, _, tokenizer = load_pretrained(path)
    save_pretrained(tmp_path, model, tokenizer)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    texts = ["The capital of France is", "Zürich, 1234 — naïve\n\n  café's\t№5 don't", "你好 🙂"]
    for text in texts:
        assert theirs(text, add_special_tokens=False).input_ids == tokenizer.encode(text).tolist()
    messages = [{"role": "user", "content": "Why?"}]
    rendered = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == tokenizer.chat("Why?")
    rival = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = tokenizer.encode(texts[0])[None]
    got = their_logits(rival.eval(), tokens)[0, -1]
    np.testing.assert_allclose(got[[7042, 260, 4528]], [17.3713, 14.8886, 13.2450], atol=2e-3)
    np.testing.assert_allclose(got, our_logits(model, tokens)[0, -1], atol=2e-3)


@pytest.mark.parametrize("targets", [None, ("query", "out", "head")], ids=["all", "tied head"])
def test_adapters(tmp_path, targets):
    """LoRA factors written here give PEFT the logits that they give here."""
    peft = pytest.importorskip("peft", exc_type=ImportError)
    rival = their_model("qwen3, tied")
    rival.save_pretrained(tmp_path / "base")
    base = load_pretrained(tmp_path / "base").model
    adapted = inject_lora(base, LoRAConfig(rank=4, targets=targets), key=jax.random.key(0))
    for adapter in lora_projections(adapted).values():
        noise = 0.1 * np.random.default_rng(0).normal(size=adapter.lora_b.shape)
        adapter.lora_b = adapter.lora_b.replace(noise.astype(np.float32))
    save_peft(tmp_path / "adapter", adapted)
    tokens = np.random.default_rng(0).integers(0, 61, (2, 20)).astype(np.int32)
    with_factors = peft.PeftModel.from_pretrained(rival, str(tmp_path / "adapter")).eval()
    want = their_logits(with_factors, tokens)
    assert np.abs(want - our_logits(base, tokens)).max() > 0.1
    close(our_logits(adapted, tokens), want)

    with_factors.save_pretrained(tmp_path / "again")
    close(our_logits(load_peft(tmp_path / "again", base), tokens), want)
