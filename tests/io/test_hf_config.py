from __future__ import annotations

import dataclasses
import json

import pytest

from jaxlib_papers.io.errors import FormatError
from jaxlib_papers.io.hf_config import config_from_json, config_to_json
from jaxlib_papers.nn.config import RopeScaling
from tests.io.synthetic import CONFIG, QWEN, SPARSE

BASE = {
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
QWEN_BASE = BASE | {"model_type": "qwen3", "head_dim": 8}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


@pytest.mark.parametrize("config", [CONFIG, QWEN, SPARSE], ids=["llama", "qwen3", "qwen3-moe"])
@pytest.mark.parametrize(
    "rope",
    [
        None,
        RopeScaling("linear", 2.0),
        RopeScaling("llama3", 8.0, 16),
        RopeScaling("yarn", 4.0, 16, attention_factor=1.5, truncate=False),
    ],
    ids=["plain", "linear", "llama3", "yarn"],
)
def test_round_trip(config, rope):
    window = 8 if config is QWEN else None
    config = dataclasses.replace(config, rope_scaling=rope, sliding_window=window)
    written = json.loads(json.dumps(config_to_json(config)))
    assert config_from_json(written) == config
    # Either half alone says the same: the first is what version 4 reads, the second version 5.
    four = {k: v for k, v in written.items() if k != "rope_parameters"}
    five = {k: v for k, v in written.items() if k not in ("rope_theta", "rope_scaling")}
    assert config_from_json(four) == config_from_json(five) == config


class TestTheta:
    """One number that stands at three places, by version and family."""

    def test_version_4(self):
        assert config_from_json(BASE | {"rope_theta": 1e5}).rope_theta == 1e5

    def test_version_5(self):
        rope = {"rope_type": "default", "rope_theta": 1e5}
        assert config_from_json(BASE | {"rope_parameters": rope}).rope_theta == 1e5

    def test_version_5_by_layer_type(self):
        rope = {"rope_type": "default", "rope_theta": 1e5}
        nested = {"full_attention": rope, "sliding_attention": rope | {"rope_theta": 1e4}}
        both = BASE | {"rope_parameters": nested}
        config = config_from_json(both | {"layer_types": ["full_attention"] * 3})
        assert config.rope_theta == 1e5
        with pytest.raises(FormatError, match="differ between layer types"):
            config_from_json(both)
        with pytest.raises(FormatError, match="no entry for some of layer_types"):
            config_from_json(both | {"layer_types": ["chunked_attention"] * 3})

    def test_the_families_default(self):
        assert config_from_json(BASE).rope_theta == 1e4

    def test_scaling_in_version_4_with_its_old_key(self):
        old = {"type": "linear", "factor": 2.0}
        config = config_from_json(BASE | {"rope_theta": 1e5, "rope_scaling": old})
        assert config.rope_theta == 1e5 and config.rope_scaling == RopeScaling("linear", 2.0)


def test_defaults_of_the_format():
    config = config_from_json(BASE)
    assert (config.head_dim, config.tie_embeddings, config.attention_bias) == (8, False, False)
    without = {k: v for k, v in BASE.items() if k != "num_key_value_heads"}
    assert config_from_json(without).num_kv_heads == 4


class TestWindow:
    OPTIONS = {"use_sliding_window": True, "sliding_window": 8}

    def test_in_all_layers_or_none(self):
        assert config_from_json(QWEN_BASE | self.OPTIONS | {"max_window_layers": 0}) == (
            dataclasses.replace(config_from_json(QWEN_BASE), sliding_window=8)
        )
        assert config_from_json(QWEN_BASE | self.OPTIONS).sliding_window is None
        off = self.OPTIONS | {"use_sliding_window": False, "max_window_layers": 0}
        assert config_from_json(QWEN_BASE | off).sliding_window is None

    def test_in_some(self):
        with pytest.raises(FormatError, match="only one kind of attention in all layers"):
            config_from_json(QWEN_BASE | self.OPTIONS | {"max_window_layers": 1})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "model_type is 'mamba', expected one of llama, qwen3"),
        ({"model_type": None}, "model_type is None"),
        ({"model_type": {}}, "model_type is {}"),
        ({"model_type": "qwen3", "layer_types": [[]]}, "expected a list of names"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic' is not implemented"),
        ({"rope_scaling": {"type": "longrope"}}, "expected default, linear, llama3 or yarn"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope: factor is missing"),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "high_freq_factor is 1.0"),
        ({"rope_scaling": LLAMA3 | {"factor": "8"}}, "factor is '8', expected a finite number"),
        ({"rope_scaling": LLAMA3 | {"factor": float("nan")}}, "factor is nan"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7}},
            "mscale is 0.7, which is not implemented",
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_slow": 0}},
            "beta_slow is 0.0, expected a number > 0",
        ),
        ({"rope_theta": 0.5}, "rope_theta is 0.5"),
        ({"rope_theta": float("inf")}, "rope_theta is inf"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, which is not implemented"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"quantization_config": {}}, "quantised"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": 31}, "no multiple of num_attention_heads"),
        ({"num_key_value_heads": 3}, "expected a multiple of num_kv_heads"),
        ({"num_hidden_layers": 10**7}, r"num_hidden_layers is 10000000, expected 1\.\.10000"),
        ({"head_dim": 2**30}, r"head_dim is 1073741824, expected 1\.\.65536"),
        ({"vocab_size": True}, "vocab_size is True, expected an integer"),
        ({"tie_word_embeddings": "no"}, "expected true or false"),
        (
            {"model_type": "qwen3_moe", "num_experts": 4, "decoder_sparse_step": 2},
            "decoder_sparse_step is 2",
        ),
        (
            {"model_type": "qwen3_moe", "num_experts": 4, "mlp_only_layers": [0]},
            r"mlp_only_layers is \[0\]",
        ),
    ],
)
def test_what_is_not_understood_is_refused(changes, message):
    with pytest.raises(FormatError, match=message) as error:
        config_from_json(BASE | changes, "folder/config.json")
    assert str(error.value).startswith("folder/config.json")
