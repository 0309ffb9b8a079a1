from __future__ import annotations

import dataclasses
import json
import tracemalloc

import jax
import numpy as np
import pytest

from jaxlib_papers.io.errors import FormatError
from jaxlib_papers.io.hf_config import config_to_json
from jaxlib_papers.io.pretrained import find_model, load_pretrained, save_pretrained
from jaxlib_papers.nn.config import DecoderConfig
from tests.io.synthetic import (
    CONFIG,
    QWEN,
    SPARSE,
    logits,
    make,
    read_weights,
    tokens,
    write_gguf,
    write_weights,
)

TIED = dataclasses.replace(CONFIG, tie_embeddings=True)
BRAIN = dataclasses.replace(SPARSE, param_dtype="bfloat16")
CONFIGS = {"llama": CONFIG, "tied": TIED, "qwen3": QWEN, "qwen3-moe": SPARSE, "bfloat16": BRAIN}


@pytest.fixture
def saved(tmp_path):
    """A saved Llama: folder, model, its config.json and its tensors."""
    model = make(CONFIG)
    save_pretrained(tmp_path, model)
    config = json.loads((tmp_path / "config.json").read_text())
    return tmp_path, model, config, read_weights(tmp_path)


def same_leaves(a, b):
    a, b = (jax.tree_util.tree_flatten_with_path(tree)[0] for tree in (a, b))
    assert [path for path, _ in a] == [path for path, _ in b]
    for (path, x), (_, y) in zip(a, b, strict=True):
        assert x.dtype == y.dtype, path
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y), str(path))


@pytest.mark.parametrize("name", sorted(CONFIGS))
@pytest.mark.parametrize("shard", [2e9, 20_000], ids=["one file", "shards"])
def test_round_trip(tmp_path, name, shard):
    model = make(CONFIGS[name])
    save_pretrained(tmp_path, model, max_shard_bytes=shard)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard < 1e6)
    assert "lm_head.weight" not in read_weights(tmp_path) or not model.config.tie_embeddings
    loaded, config, tokenizer = load_pretrained(tmp_path, param_dtype=model.config.param_dtype)
    assert config == model.config and tokenizer is None
    same_leaves(loaded, model)


def test_a_shard_is_no_larger_than_asked(tmp_path):
    save_pretrained(tmp_path, make(CONFIG), max_shard_bytes=20_000)
    sizes = [p.stat().st_size for p in tmp_path.glob("*.safetensors")]
    assert len(sizes) > 3 and max(sizes) < 20_000 + 4_000  # and the header


def test_experts_stored_as_one_tensor(tmp_path):
    model = make(SPARSE)
    save_pretrained(tmp_path, model)
    weights = read_weights(tmp_path)
    for layer in range(SPARSE.num_layers):
        prefix = f"model.layers.{layer}.mlp.experts."
        parts = {
            part: np.stack([weights.pop(f"{prefix}{e}.{part}_proj.weight") for e in range(4)])
            for part in ("gate", "up", "down")
        }
        weights[f"{prefix}gate_up_proj"] = np.concatenate([parts["gate"], parts["up"]], 1)
        weights[f"{prefix}down_proj"] = parts["down"]
    write_weights(tmp_path, weights)
    same_leaves(load_pretrained(tmp_path).model, model)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_1"])
@pytest.mark.parametrize("tied", [True, False])
def test_gguf_gives_the_model_of_the_folder(tmp_path, kind, tied):
    model = make(TIED if tied else CONFIG)
    save_pretrained(tmp_path, model)
    file = write_gguf(tmp_path / "m.gguf", model.config, read_weights(tmp_path), kind=kind)
    assert file.stat().st_size < 2**20
    loaded, config, tokenizer = load_pretrained(file)
    assert config == model.config
    assert tokenizer is not None and tokenizer.vocab_size == config.vocab_size
    if kind == "F32":
        same_leaves(loaded, model)
    # A block of 32 numbers within -1..1 is stored in 15 or 255 steps, halves in 11 or 8 bits.
    error = {"F32": 0, "F16": 1e-3, "BF16": 8e-3, "Q8_0": 0.01, "Q4_1": 0.1}[kind]
    for got, want in zip(jax.tree.leaves(loaded), jax.tree.leaves(model), strict=True):
        np.testing.assert_allclose(got, want, atol=error * 1.5)


def test_forgetting_the_permutation_would_be_seen(tmp_path):
    model = make(CONFIG)
    save_pretrained(tmp_path, model)
    file = write_gguf(tmp_path / "m.gguf", CONFIG, read_weights(tmp_path))
    loaded = load_pretrained(file).model
    query = np.asarray(loaded.layers.attention.query[...])
    halves = query.reshape(*query.shape[:3], 2, 4).swapaxes(3, 4).reshape(query.shape)
    loaded.layers.attention.query = loaded.layers.attention.query.replace(jax.numpy.asarray(halves))
    batch = tokens(CONFIG)
    assert np.abs(logits(loaded, batch) - logits(model, batch)).max() > 0.05


def test_first_layers_only(tmp_path):
    model = make(CONFIG)
    save_pretrained(tmp_path, model)
    loaded = load_pretrained(tmp_path, num_layers=2)
    assert loaded.config.num_layers == 2
    want = np.asarray(model.layers.attention.query[...])[:2]
    np.testing.assert_array_equal(np.asarray(loaded.model.layers.attention.query[...]), want)
    with pytest.raises(ValueError, match=r"num_layers is 4, expected an integer in 1\.\.3"):
        load_pretrained(tmp_path, num_layers=4)


def test_changes(tmp_path):
    save_pretrained(tmp_path, make(CONFIG))
    loaded = load_pretrained(tmp_path, param_dtype="bfloat16", remat="full", max_positions=99)
    assert {a.dtype for a in jax.tree.leaves(loaded.model)} == {jax.numpy.bfloat16.dtype}
    assert loaded.model.config == loaded.config and loaded.config.max_positions == 99
    with pytest.raises(ValueError, match="num_heads is fixed by the weights"):
        load_pretrained(tmp_path, num_heads=2)


def test_loading_takes_little_more_than_the_model(tmp_path):
    config = dataclasses.replace(CONFIG, vocab_size=2000, embed_dim=256, mlp_dim=1024, num_layers=6)
    model = make(config)
    size = sum(a.nbytes for a in jax.tree.leaves(model))
    save_pretrained(tmp_path, model)
    del model
    load_pretrained(tmp_path)  # imports and traces
    tracemalloc.start()
    try:
        loaded = load_pretrained(tmp_path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert size > 20e6 and jax.tree.leaves(loaded.model)
    assert 0.5 * size < peak < 1.3 * size


class TestKeys:
    def test_all_mismatches_at_once(self, saved):
        folder, _, config, weights = saved
        del weights["model.layers.0.mlp.up_proj.weight"], weights["model.norm.weight"]
        weights["model.layers.1.self_attn.q_norm.weight"] = np.ones(8, np.float32)
        weights["model.layers.2.mlp.down_proj.weight"] = np.ones((32, 63), np.float32)
        write_weights(folder, weights, config)
        with pytest.raises(FormatError) as error:
            load_pretrained(folder)
        text = str(error.value)
        assert str(folder) in text and "2 tensors are missing" in text
        assert "model.layers.0.mlp.up_proj.weight" in text and "model.norm.weight" in text
        assert "not part of the model: model.layers.1.self_attn.q_norm.weight" in text
        assert "model.layers.2.mlp.down_proj.weight is (32, 63), expected (32, 64)" in text

    def test_old_buffers_are_passed_over(self, saved):
        folder, model, config, weights = saved
        weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
        write_weights(folder, weights, config)
        same_leaves(load_pretrained(folder).model, model)

    def test_tied_model_with_a_head(self, saved):
        folder, _, config, weights = saved
        config["tie_word_embeddings"] = True
        write_weights(folder, weights, config)
        with pytest.raises(FormatError, match="lm_head.weight differs from model.embed_tokens"):
            load_pretrained(folder)
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
        write_weights(folder, weights, config)
        assert load_pretrained(folder).model.head is None

    def test_untied_model_without_a_head(self, saved):
        folder, _, config, weights = saved
        del weights["lm_head.weight"]
        write_weights(folder, weights, config)
        with pytest.raises(FormatError, match=r"1 tensors are missing: lm_head\.weight"):
            load_pretrained(folder)

    def test_numbers_that_are_not_finite(self, saved):
        folder, _, config, weights = saved
        weights["model.layers.1.mlp.up_proj.weight"][3, 2] = np.nan
        write_weights(folder, weights, config)
        with pytest.raises(FormatError, match=r"layers\.1\.mlp\.up_proj\.weight' has numbers"):
            load_pretrained(folder)

    def test_integers_are_no_weights(self, saved):
        folder, _, config, weights = saved
        weights["model.norm.weight"] = np.ones(32, np.int8)
        write_weights(folder, weights, config)
        with pytest.raises(FormatError, match=r"'model.norm.weight' is stored as I8.*unquantised"):
            load_pretrained(folder)

    def test_more_layers_than_tensors(self, saved):
        folder, _, config, weights = saved
        write_weights(folder, weights, config | {"num_hidden_layers": 9_000})
        with pytest.raises(FormatError, match="9000 layers, and only 30 tensors"):
            load_pretrained(folder)


class TestFiles:
    def test_truncated(self, saved):
        folder, *_ = saved
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-5])
        with pytest.raises(FormatError, match=r"model\.safetensors: no valid safetensors"):
            load_pretrained(folder)

    def test_a_pickle_is_not_read(self, saved):
        folder, *_ = saved
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
        with pytest.raises(FormatError, match=r"pytorch_model\.bin is a pickle"):
            load_pretrained(folder)

    @pytest.mark.parametrize(
        ("weight_map", "message"),
        [
            ({"a": "../other.safetensors"}, "outside of its own folder"),
            ({"a": "gone.safetensors"}, "'gone.safetensors' is not there"),
            ({"a": "model.safetensors"}, "not where it says: a"),
            ([1], "weight_map is missing"),
        ],
    )
    def test_index(self, saved, weight_map, message):
        folder, *_ = saved
        index = folder / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(FormatError, match=message):
            load_pretrained(folder)

    def test_no_config(self, saved):
        folder, *_ = saved
        (folder / "config.json").write_text("{")
        with pytest.raises(FormatError, match=r"config\.json: no valid JSON"):
            load_pretrained(folder)
        (folder / "config.json").unlink()
        with pytest.raises(FormatError, match=r"config\.json: cannot be read"):
            load_pretrained(folder)

    def test_nothing_there(self, tmp_path):
        with pytest.raises(FormatError, match="no such file or folder"):
            load_pretrained(tmp_path / "gone")
        with pytest.raises(FormatError, match="neither a GGUF file nor a folder"):
            (tmp_path / "x.safetensors").write_bytes(b"1234")
            load_pretrained(tmp_path / "x.safetensors")

    def test_package_that_is_not_installed(self, monkeypatch):
        from jaxlib_papers.io import pretrained

        monkeypatch.setitem(pretrained.PACKAGED, "ghost", ("no-such-distribution", ".gguf"))
        with pytest.raises(FormatError, match="'no-such-distribution', which is not installed"):
            find_model("ghost")


class TestSaving:
    def test_weights_of_another_model_in_the_way(self, tmp_path):
        save_pretrained(tmp_path, make(CONFIG), max_shard_bytes=20_000)
        with pytest.raises(ValueError, match="of another model; choose an empty folder"):
            save_pretrained(tmp_path, make(CONFIG))

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            (dict(logit_softcap=3.0), "logit_softcap"),
            (dict(sliding_window=4), "Llama has no window"),
            (dict(moe=SPARSE.moe, mlp_dim=0), "a Qwen3-MoE has both"),
            (
                dict(
                    moe=dataclasses.replace(SPARSE.moe, capacity_factor=1.0),
                    mlp_dim=0,
                    qk_norm=True,
                ),
                "a Qwen3-MoE drops none",
            ),
            (
                dict(
                    moe=dataclasses.replace(SPARSE.moe, shared_expert_dim=8),
                    mlp_dim=0,
                    qk_norm=True,
                ),
                "have no shared expert",
            ),
        ],
    )
    def test_what_no_family_has(self, tmp_path, changes, message):
        config = dataclasses.replace(CONFIG, **changes)
        with pytest.raises(ValueError, match=message):
            save_pretrained(tmp_path / "out", make(config))
        assert not (tmp_path / "out").exists()


def test_config_round_trip_keeps_the_rest():
    config = config_to_json(CONFIG)
    assert DecoderConfig(**dataclasses.asdict(CONFIG)) == CONFIG
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 1e5
    assert config["architectures"] == ["LlamaForCausalLM"] and "num_experts" not in config
