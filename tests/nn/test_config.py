"""A configuration that makes no model is refused where it is written."""

from __future__ import annotations

import dataclasses

import pytest

from jaxlib_papers.nn.config import DecoderConfig, MoEConfig, RopeScaling

GOOD = dict(
    vocab_size=7, num_layers=1, embed_dim=8, num_heads=4, num_kv_heads=2, head_dim=4, mlp_dim=8
)
MOE = dict(num_experts=4, top_k=2, expert_dim=8)


def test_a_good_one_is_a_value():
    config = DecoderConfig(**GOOD, rope_scaling=RopeScaling("linear", 2.0))
    assert hash(config) == hash(dataclasses.replace(config)) and config.moe is None
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.num_layers = 2
    sparse = DecoderConfig(**GOOD | {"mlp_dim": 0}, moe=MoEConfig(**MOE))
    assert sparse.moe.renormalize and sparse.moe.capacity_factor is None


BAD = [
    ("vocab_size is 0", {"vocab_size": 0}),
    ("num_layers is 0", {"num_layers": 0}),
    ("embed_dim is 8.0", {"embed_dim": 8.0}),
    ("num_heads is 4, expected a multiple of num_kv_heads = 3", {"num_kv_heads": 3}),
    ("head_dim is 5", {"head_dim": 5}),
    ("theta is 1.0", {"rope_theta": 1.0}),
    ("mlp_dim is 0 and moe is None", {"mlp_dim": 0}),
    ("mlp_dim is 8 and moe is MoEConfig", {"moe": MoEConfig(**MOE)}),
    ("mlp_dim is -8", {"mlp_dim": -8, "moe": MoEConfig(**MOE)}),
    ("max_positions is 0", {"max_positions": 0}),
    ("norm_eps is 0", {"norm_eps": 0.0}),
    ("init_std is -1", {"init_std": -1.0}),
    ("attention_softcap is 0", {"attention_softcap": 0.0}),
    ("logit_softcap is -1", {"logit_softcap": -1.0}),
    ("sliding_window is 0", {"sliding_window": 0}),
    ("dropout is 1", {"dropout": 1.0}),
    ("dropout is -0.1", {"dropout": -0.1}),
    ("remat is 'some', expected one of .*'dots'", {"remat": "some"}),
    ("param_dtype is 'float16'", {"param_dtype": "float16"}),
    ("compute_dtype is 'int8'", {"compute_dtype": "int8"}),
]


@pytest.mark.parametrize(("message", "change"), BAD, ids=[b[0] for b in BAD])
def test_bad_decoder(message, change):
    with pytest.raises(ValueError, match=message):
        DecoderConfig(**GOOD | change)


BAD_MOE = [
    ("num_experts is 0", {"num_experts": 0}),
    ("top_k is 5, expected an integer in 1..4", {"top_k": 5}),
    ("top_k is 0", {"top_k": 0}),
    ("expert_dim is 0", {"expert_dim": 0}),
    ("shared_expert_dim is -1", {"shared_expert_dim": -1}),
    ("capacity_factor is 0", {"capacity_factor": 0.0}),
    ("router_std is -1", {"router_std": -1.0}),
]


@pytest.mark.parametrize(("message", "change"), BAD_MOE, ids=[b[0] for b in BAD_MOE])
def test_bad_mixture(message, change):
    with pytest.raises(ValueError, match=message):
        MoEConfig(**MOE | change)
