from __future__ import annotations

import struct

import numpy as np
import pytest

from jaxlib_papers.io.errors import FormatError
from jaxlib_papers.io.gguf import GGUFFile
from jaxlib_papers.io.gguf_config import config_from_gguf
from jaxlib_papers.io.pretrained import find_model, load_pretrained, save_pretrained
from jaxlib_papers.nn.config import RopeScaling
from jaxlib_papers.ops.rope import rope_frequencies
from tests.io.synthetic import CONFIG, logits, make, read_weights, write_gguf

SENTENCE = (
    "The Industrial Revolution was a period of global transition of the human economy towards more "
    "efficient and stable manufacturing processes, starting from Great Britain and spreading to "
    "continental Europe and the United States."
)


def text(value):
    value = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(value)) + value


def number(key, value):
    return text(key) + struct.pack("<II", 4, value)


def tensor(name, sizes, kind=0, offset=0):
    return text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)


def build(tensors=(), keys=(), data=b"", *, magic=b"GGUF", version=3, counts=None):
    """A file put together by hand, right or wrong."""
    tensor_count, key_count = counts or (len(tensors), len(keys))
    out = magic + struct.pack("<IQQ", version, tensor_count, key_count)
    out += b"".join(keys) + b"".join(tensors)
    return out + bytes(-len(out) % 32) + data


def read(tmp_path, data):
    file = tmp_path / "m.gguf"
    file.write_bytes(data)
    return GGUFFile(file)


def test_file_by_hand(tmp_path):
    """Independent of the package that writes such files."""
    values = np.arange(12, dtype="<f4")
    halves = np.arange(32, dtype="<f2").tobytes() + bytes(0)
    # Q8_0: a half as the scale, then 32 signed bytes. Q4_1: scale, minimum, 32 nibbles.
    eight = np.float16(0.5).tobytes() + np.arange(-16, 16, dtype=np.int8).tobytes()
    low = np.arange(16, dtype=np.uint8)
    four = np.array([0.5, -1], "<f2").tobytes() + (low | (15 - low) << 4).tobytes()
    data = values.tobytes().ljust(64, b"\0") + halves + eight.ljust(64, b"\0") + four
    keys = [
        number("a", 7),
        text("words") + struct.pack("<IIQ", 9, 8, 2) + text("x") + text("öl"),
        text("numbers") + struct.pack("<IIQ3f", 9, 6, 3, 1, 2, 3),
        text("yes") + struct.pack("<I?", 7, True),
    ]
    tensors = [
        tensor("f32", (4, 3)),
        tensor("f16", (32,), 1, 64),
        tensor("q8_0", (32,), 8, 128),
        tensor("q4_1", (32, 1), 3, 192),
    ]
    file = read(tmp_path, build(tensors, keys, data))
    assert file.metadata["a"] == 7 and file.metadata["words"] == ["x", "öl"]
    assert file.metadata["numbers"].tolist() == [1, 2, 3] and file.metadata["yes"] is True
    np.testing.assert_array_equal(file.read("f32"), values.reshape(3, 4))
    np.testing.assert_array_equal(file.read("f16"), np.arange(32))
    np.testing.assert_array_equal(file.read("q8_0"), np.arange(-16, 16) / 2)
    want = np.concatenate([low, 15 - low]) / 2 - 1
    np.testing.assert_array_equal(file.read("q4_1"), want[None])
    with pytest.raises(FormatError, match=r"m\.gguf: has no tensor 'gone'"):
        file.read("gone")


DATA = bytes(64)
ONE = [tensor("a", (8,))]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "past the end of the file"),
        (build(magic=b"GGML"), "this is no GGUF file"),
        (build(version=1), "GGUF version 1, expected"),
        (build(version=3 << 24), "a big-endian file"),
        (build(counts=(2**60, 0)), "number of tensors is 1152921504606846976, more than"),
        (build(counts=(0, 2**40)), "number of metadata keys is"),
        (build(keys=[struct.pack("<Q", 2**63) + b"k"]), "length of a metadata key"),
        (build(keys=[text(b"\xff\xfe") + struct.pack("<II", 4, 1)]), "is no UTF-8"),
        (build(keys=[number("a", 1), number("a", 2)]), "metadata key 'a' stands twice"),
        (build(keys=[text("a") + struct.pack("<II", 99, 1)]), "unknown value type 99"),
        (build(keys=[text("a") + struct.pack("<IIQ", 9, 8, 2**50)]), "length of 'a' is"),
        (build(keys=[text("a") + struct.pack("<IIQ", 9, 4, 2**62)]), "length of 'a' is"),
        (
            build(keys=[text("a") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 3 + DATA]),
            "nested more than 2 deep",
        ),
        (build([tensor("a", (8,) * 5)], data=DATA), r"rank 5, expected 1\.\.4"),
        (build([tensor("a", (8,), kind=77)], data=DATA), "unknown storage type 77"),
        (build([tensor("a", (33,), kind=8)], data=DATA), "in blocks of 32"),
        (build([tensor("a", (0,))], data=DATA), r"has shape \(0,\)"),
        (build([tensor("a", (2**40, 2**40))], data=DATA), "past the file"),
        (build([tensor("a", (8,), offset=2**63)], data=DATA), "past the file"),
        (build([tensor("a", (8,), offset=4)], data=DATA), "not aligned to 32"),
        (build([*ONE, tensor("b", (8,))], data=DATA), "tensors 'a' and 'b' overlap"),
        (build([*ONE, tensor("a", (8,), offset=32)], data=DATA), "tensor 'a' stands twice"),
        (build(ONE, [number("general.alignment", 0)], DATA), "general.alignment is 0"),
        (build(ONE, data=DATA)[:-40], "past the file"),
    ],
)
def test_damage(tmp_path, data, message):
    with pytest.raises(FormatError, match=message) as error:
        read(tmp_path, data)
    assert "m.gguf" in str(error.value)


def test_a_file_cut_after_it_was_opened(tmp_path):
    file = read(tmp_path, build(ONE, data=DATA))
    file.path.write_bytes(file.path.read_bytes()[:-50])
    with pytest.raises(FormatError, match="tensor 'a' is cut short"):
        file.read("a")


@pytest.fixture
def written(tmp_path):
    save_pretrained(tmp_path, make(CONFIG))
    return tmp_path / "m.gguf", read_weights(tmp_path)


class TestConfiguration:
    def test_another_architecture(self, written):
        file, weights = written
        write_gguf(file, CONFIG, weights)
        opened = GGUFFile(file)
        opened.metadata["general.architecture"] = "gemma3"
        with pytest.raises(FormatError, match="'gemma3', only 'llama' is read from GGUF"):
            config_from_gguf(opened)

    @pytest.mark.parametrize(
        ("key", "value", "message"),
        [
            ("rope.scaling.type", "longrope", "rope scaling 'longrope'"),
            ("expert_count", 8, "a mixture of experts"),
            ("block_count", 2**33, r"expected 1\.\.10000"),
            ("attention.head_count", np.array([4, 4]), "head_count is not a plain number"),
            ("attention.key_length", 2**30, r"expected 1\.\.65536"),
            ("rope.dimension_count", 4, "a part of each head"),
            ("rope.freq_base", float("nan"), "no number of a model"),
            ("attention.layer_norm_rms_epsilon", None, "is missing"),
            ("attention.head_count_kv", 3, "expected a multiple of num_kv_heads"),
        ],
    )
    def test_what_is_not_implemented(self, written, key, value, message):
        file, weights = written
        write_gguf(file, CONFIG, weights)
        opened = GGUFFile(file)
        opened.metadata[f"llama.{key}"] = value
        if value is None:
            del opened.metadata[f"llama.{key}"]
        with pytest.raises(FormatError, match=message):
            config_from_gguf(opened)

    def test_yarn(self, written):
        file, weights = written
        opened = GGUFFile(write_gguf(file, CONFIG, weights))
        opened.metadata |= {
            "llama.rope.scaling.type": "yarn",
            "llama.rope.scaling.factor": 4.0,
            "llama.rope.scaling.original_context_length": 16,
        }
        assert config_from_gguf(opened).rope_scaling == RopeScaling("yarn", 4.0, 16)

    def test_llama3_by_its_frequencies(self, written):
        file, weights = written
        scaling = RopeScaling("llama3", 32.0, 8192)
        plain, _ = rope_frequencies(8, CONFIG.rope_theta)
        stretched, _ = rope_frequencies(8, CONFIG.rope_theta, scaling)
        factors = (plain / stretched).astype(np.float32)
        write_gguf(file, CONFIG, weights | {"rope_freqs.weight": factors})
        assert load_pretrained(file).config.rope_scaling == scaling
        write_gguf(file, CONFIG, weights | {"rope_freqs.weight": factors * 1.5})
        with pytest.raises(FormatError, match="not those of Llama 3"):
            load_pretrained(file)


@pytest.fixture(scope="module")
def loaded():
    try:
        path = find_model("smollm2")
    except FormatError as error:
        pytest.skip(str(error))
    return load_pretrained(path)


class TestSmolLM2:
    """Golden values of a real model, computed by hand in NumPy from the same file."""

    def test_configuration(self, loaded):
        config = loaded.config
        assert (config.num_layers, config.embed_dim, config.mlp_dim) == (30, 576, 1536)
        assert (config.num_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
        assert (config.rope_theta, config.norm_eps, config.vocab_size) == (1e5, 1e-5, 49_152)
        assert config.tie_embeddings and loaded.model.head is None

    def test_next_token(self, loaded):
        ids = loaded.tokenizer.encode("The capital of France is")
        assert ids.tolist() == [504, 3575, 282, 4649, 314]
        last = logits(loaded.model, ids[None])[0, -1]
        assert np.argsort(-last)[:3].tolist() == [7042, 260, 4528]
        np.testing.assert_allclose(last[[7042, 260, 4528]], [17.3713, 14.8886, 13.2450], atol=2e-3)
        assert loaded.tokenizer.decode([7042, 260, 4528]) == " Paris the London"

    def test_likelihood(self, loaded):
        ids = loaded.tokenizer.encode(SENTENCE)
        assert len(ids) == 35
        scores = logits(loaded.model, ids[None])[0].astype(np.float64)
        scores -= np.log(np.exp(scores).sum(-1, keepdims=True))
        nll = -scores[np.arange(34), ids[1:]].mean()
        np.testing.assert_allclose(nll, 3.1230533, atol=2e-4)

    def test_chat(self, loaded):
        text = loaded.tokenizer.chat("What is the capital of France?")
        assert text.endswith("<|im_start|>assistant\n") and text.startswith("<|im_start|>system\n")
        assert loaded.tokenizer.stop_ids == (2,)
