from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxlib_papers.io.errors import FormatError
from jaxlib_papers.io.peft import load_peft, save_peft
from jaxlib_papers.nn.lora import LoRAConfig, inject_lora, lora_projections
from tests.io.synthetic import CONFIG, QWEN, SPARSE, make

WEIGHTS = "adapter_model.safetensors"


def adapted(config=CONFIG, **options):
    """A decoder with factors that are both random."""
    options = {"rank": 2, "alpha": 6.0} | options
    model = inject_lora(make(config), LoRAConfig(**options), key=jax.random.key(0))
    rng = np.random.default_rng(5)
    for adapter in lora_projections(model).values():
        noise = jnp.asarray(rng.normal(size=adapter.lora_b.shape), adapter.lora_b.dtype)
        adapter.lora_b = adapter.lora_b.replace(noise)
    return model


@pytest.mark.parametrize(
    ("config", "targets"),
    [
        (CONFIG, None),
        (QWEN, ("query", "head")),
        (SPARSE, ("attention.query", "attention.out")),
        (CONFIG, ("down", "head")),
    ],
    ids=["all seven", "tied head", "mixture", "own head"],
)
def test_round_trip(tmp_path, config, targets):
    model = adapted(config, targets=targets, dropout=0.1)
    save_peft(tmp_path, model, base_model="somewhere")
    again = load_peft(tmp_path, make(config))
    a, b = lora_projections(model), lora_projections(again)
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name].lora_a[...], b[name].lora_a[...])
        np.testing.assert_array_equal(a[name].lora_b[...], b[name].lora_b[...])
        assert (a[name].scaling, a[name].dropout) == (b[name].scaling, b[name].dropout) == (3, 0.1)


def test_what_is_written(tmp_path):
    """B A of the file is the change of the matrix as Hugging Face stores it."""
    model = adapted()
    save_peft(tmp_path, model)
    tensors = load_file(str(tmp_path / WEIGHTS))
    assert len(tensors) == 2 * 7 * CONFIG.num_layers
    prefix = "base_model.model.model.layers.1.self_attn."
    for name, ours, shape in (
        ("q_proj", "query", (32, 32)),
        ("v_proj", "value", (16, 32)),
        ("o_proj", "out", (32, 32)),
    ):
        a, b = (tensors[f"{prefix}{name}.lora_{part}.weight"] for part in "AB")
        assert a.shape[0] == b.shape[1] == 2
        delta = np.asarray(lora_projections(model)[f"layers.attention.{ours}"].delta())[1]
        inputs = 2 if ours == "out" else 1
        flat = delta.reshape(np.prod(delta.shape[:inputs]), -1).T
        assert flat.shape == shape
        np.testing.assert_allclose(3.0 * b @ a, flat, atol=1e-5)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (2, 6.0, "LORA")
    assert config["target_modules"] == sorted(
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    )


class TestRefused:
    @pytest.fixture
    def folder(self, tmp_path):
        save_peft(tmp_path, adapted(targets=("query", "down")))
        return tmp_path

    def settings(self, folder, **changes):
        file = folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            (dict(peft_type="IA3"), "peft_type is 'IA3'; only plain LoRA"),
            (dict(use_dora=True), "use_dora is True"),
            (dict(bias="all"), "bias is 'all'"),
            (dict(rank_pattern={"q_proj": 4}), "rank_pattern"),
            (dict(modules_to_save=["lm_head"]), "modules_to_save"),
            (dict(r="2"), "r is '2', expected a number"),
            (dict(r=3), "12 factors have another shape"),
            (dict(lora_alpha=-1), r"LoRAConfig\.alpha is -1"),
        ],
    )
    def test_settings(self, folder, changes, message):
        self.settings(folder, **changes)
        with pytest.raises(FormatError, match=message):
            load_peft(folder, make(CONFIG))

    def test_other_scaling(self, folder):
        self.settings(folder, use_rslora=True)
        adapter = lora_projections(load_peft(folder, make(CONFIG)))["layers.attention.query"]
        np.testing.assert_allclose(adapter.scaling, 6.0 / np.sqrt(2))

    def test_other_widths(self, folder):
        wide = make(dataclasses.replace(CONFIG, mlp_dim=96))
        with pytest.raises(FormatError) as error:
            load_peft(folder, wide)
        assert "3 factors have another shape" in str(error.value)
        assert "down_proj.lora_A.weight is (2, 64), expected (2, 96)" in str(error.value)

    def test_other_model(self, folder):
        tensors = load_file(str(folder / WEIGHTS))
        name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
        tensors["base_model.model.h.0.c_attn.lora_A.weight"] = tensors.pop(name)
        save_file(tensors, str(folder / WEIGHTS))
        with pytest.raises(FormatError) as error:
            load_peft(folder, make(CONFIG))
        assert "1 are missing" in str(error.value) and name in str(error.value)
        assert "no projection of this model: base_model.model.h.0" in str(error.value)

    def test_no_tensors_that_fit(self, folder):
        save_file({"x": np.zeros(2, np.float32)}, str(folder / WEIGHTS))
        with pytest.raises(FormatError, match="1 belong to no projection of this model: x"):
            load_peft(folder, make(CONFIG))

    def test_damaged(self, folder):
        file = folder / WEIGHTS
        file.write_bytes(file.read_bytes()[:-4])
        with pytest.raises(FormatError, match="no valid safetensors file"):
            load_peft(folder, make(CONFIG))
        file.unlink()
        with pytest.raises(FormatError, match="pickled adapters are not read"):
            load_peft(folder, make(CONFIG))

    def test_nothing_to_save(self, tmp_path):
        with pytest.raises(ValueError, match="low-rank factors of 0 kinds"):
            save_peft(tmp_path, make(CONFIG))


def test_copies_of_the_base_are_passed_over(tmp_path):
    """PEFT writes embedding and head beside the head's factors; changed ones are another model."""
    save_peft(tmp_path, adapted(targets=("head",)))
    tensors = load_file(str(tmp_path / WEIGHTS))
    base = make(CONFIG)
    name = "base_model.model.lm_head.base_layer.weight"
    tensors[name] = np.array(base.head[...].T)
    save_file(tensors, str(tmp_path / WEIGHTS))
    assert list(lora_projections(load_peft(tmp_path, base))) == ["head"]
    tensors[name][3, 2] += 1
    save_file(tensors, str(tmp_path / WEIGHTS))
    with pytest.raises(FormatError, match=f"no projection of this model: {name}"):
        load_peft(tmp_path, base)
