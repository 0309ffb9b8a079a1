"""LoRA in PEFT's folder format: round trip, other models, variants and damaged files."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlib_papers.io.errors import FormatError
from jaxlib_papers.io.peft import load_peft, save_peft
from jaxlib_papers.nn.adapters import AdapterParam
from jaxlib_papers.nn.config import DecoderConfig
from jaxlib_papers.nn.decoder import DecoderLM
from jaxlib_papers.nn.lora import LoRAConfig, inject_lora
from jaxlib_papers.train.state import merge_model, split_model

CONFIG = DecoderConfig(
    vocab_size=29,
    num_layers=2,
    embed_dim=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_dim=24,
    tie_embeddings=True,
)


def noisy(model):
    graphdef, params, rest = split_model(model, AdapterParam)
    rng = np.random.default_rng(1)
    params = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), params)
    return merge_model(graphdef, params, rest)


@pytest.fixture(scope="module")
def base():
    return jax.jit(lambda key: DecoderLM(CONFIG, key=key))(jax.random.key(0))


@pytest.fixture(scope="module")
def adapted(base):
    config = LoRAConfig(rank=3, alpha=5.0, dropout=0.1, targets=("attention.*", "down", "head"))
    return noisy(inject_lora(base, config, key=jax.random.key(1)))


def test_round_trip(tmp_path, base, adapted):
    save_peft(tmp_path, adapted, base_model="tiny")
    again = load_peft(tmp_path, base)
    assert jax.tree.structure(again) == jax.tree.structure(adapted)
    for one, other in zip(jax.tree.leaves(again), jax.tree.leaves(adapted), strict=True):
        np.testing.assert_array_equal(one, other)
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    assert settings["r"] == 3 and settings["lora_alpha"] == 5.0
    assert settings["target_modules"] == ["down_proj", "k_proj", "lm_head", "o_proj", "q_proj",
                                          "v_proj"]  # fmt: skip


def test_layout(tmp_path, adapted):
    from safetensors.numpy import load_file

    save_peft(tmp_path, adapted)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    prefix = "base_model.model.model.layers.1.self_attn.o_proj"
    out = adapted.layers.attention.out
    low, high = tensors[f"{prefix}.lora_A.weight"], tensors[f"{prefix}.lora_B.weight"]
    assert low.shape == (3, 32) and high.shape == (16, 3)
    np.testing.assert_allclose(low, out.lora_a[...][1].reshape(32, 3).T)
    delta = 5 / 3 * high @ low
    np.testing.assert_allclose(out.delta()[1].reshape(32, 16).T, delta, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_dora": True}, "use_dora is True"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"peft_type": "IA3"}, "IA3"),
        ({"r": 0}, "r, lora_alpha"),
        ({"r": "3"}, "r, lora_alpha"),
    ],
)
def test_variants_are_refused(tmp_path, base, adapted, change, message):
    save_peft(tmp_path, adapted)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(FormatError, match=message) as caught:
        load_peft(tmp_path, base)
    assert "adapter_config.json" in str(caught.value)


def test_rank_stabilised_scaling(tmp_path, base, adapted):
    save_peft(tmp_path, adapted)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"use_rslora": True}))
    assert load_peft(tmp_path, base).head.scaling == pytest.approx(5 / np.sqrt(3))


def test_other_models_and_damage(tmp_path, base, adapted):
    from safetensors.numpy import load_file, save_file

    save_peft(tmp_path, adapted)
    file = tmp_path / "adapter_model.safetensors"
    other = DecoderLM(dataclasses.replace(CONFIG, num_layers=3), key=jax.random.key(0))
    with pytest.raises(FormatError, match="lacks .*layers.2"):
        load_peft(tmp_path, other)
    tensors = load_file(file)
    first = sorted(tensors)[0]
    save_file(tensors | {first: np.ones((2, 2), np.float32)}, file)
    with pytest.raises(FormatError, match=r"has shape \(2, 2\)"):
        load_peft(tmp_path, base)
    save_file(tensors | {"base_model.model.model.embed_tokens.weight": np.ones((2, 2))}, file)
    with pytest.raises(FormatError, match="embed_tokens"):
        load_peft(tmp_path, base)
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(FormatError, match="no valid safetensors"):
        load_peft(tmp_path, base)
    file.unlink()
    with pytest.raises(FormatError, match="no such file"):
        load_peft(tmp_path, base)
    with pytest.raises(ValueError, match="no low-rank factors"):
        save_peft(tmp_path, base)
