"""A LoRA folder of ours in PEFT, and one of PEFT's here: equal logits. `pytest -m parity`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlib_papers.io.peft import load_peft, save_peft
from jaxlib_papers.io.pretrained import load_pretrained
from jaxlib_papers.nn.adapters import AdapterParam
from jaxlib_papers.nn.lora import LoRAConfig, inject_lora
from jaxlib_papers.train.state import merge_model, split_model

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch", exc_type=ImportError)
transformers = pytest.importorskip("transformers", exc_type=ImportError)
peft = pytest.importorskip("peft", exc_type=ImportError)

TOKENS = np.random.default_rng(0).integers(0, 61, (2, 9))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=48,
        initializer_range=0.3,
        tie_word_embeddings=False,
    )
    path = tmp_path_factory.mktemp("base")
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path


def logits(model) -> np.ndarray:
    return np.asarray(model.logits(model(jnp.asarray(TOKENS, jnp.int32)).hidden))


def their_logits(model) -> np.ndarray:
    with torch.no_grad():
        return model.eval()(torch.as_tensor(TOKENS)).logits.numpy()


def test_ours_in_peft(folder, tmp_path):
    base = load_pretrained(folder, tokenizer=None).model
    model = inject_lora(base, LoRAConfig(rank=3, alpha=5.0), key=jax.random.key(0))
    graphdef, params, rest = split_model(model, AdapterParam)
    rng = np.random.default_rng(1)
    params = jax.tree.map(lambda x: jnp.asarray(0.2 * rng.normal(size=x.shape), x.dtype), params)
    model = merge_model(graphdef, params, rest)
    save_peft(tmp_path, model, base_model=str(folder))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(theirs, tmp_path)
    assert np.abs(logits(model) - logits(base)).max() > 0.1
    np.testing.assert_allclose(their_logits(theirs), logits(model), rtol=1e-4, atol=1e-4)


def test_theirs_here(folder, tmp_path):
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules=["q_proj", "o_proj", "up_proj"], init_lora_weights=False
    )
    theirs = peft.get_peft_model(theirs, config)
    theirs.save_pretrained(tmp_path)
    model = load_peft(tmp_path, load_pretrained(folder, tokenizer=None).model)
    np.testing.assert_allclose(logits(model), their_logits(theirs), rtol=1e-4, atol=1e-4)
