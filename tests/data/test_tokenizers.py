"""Byte tokenizer and tokenizer.json."""

from __future__ import annotations

import builtins

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxlib_papers.data import ByteTokenizer, DataError, check_vocabulary, make_tokenizer

tokenizers = pytest.importorskip("tokenizers")


@pytest.fixture
def write_tokenizer(tmp_path):
    """Write a byte-level tokenizer.json with the given special tokens."""

    def write(specials, name="tokenizer.json"):
        backend = tokenizers.Tokenizer(tokenizers.models.BPE())
        backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=list(specials),
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        backend.train_from_iterator(["the router sends the tokens to the experts"] * 4, trainer)
        backend.enable_truncation(4)
        backend.enable_padding(length=32)
        path = tmp_path / name
        backend.save(str(path))
        return path

    return write


class TestBytes:
    @given(st.text())
    def test_round_trip(self, text):
        tokenizer = ByteTokenizer()
        ids = tokenizer.encode(text)
        assert ids.dtype == np.int32 and len(ids) == len(text.encode())
        assert tokenizer.decode(ids) == text

    def test_specials(self):
        tokenizer = make_tokenizer()
        assert tokenizer.vocab_size == 259
        assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (256, 257, 258)
        assert tokenizer.decode([256, 104, 105, 257, 258, 258]) == "hi"

    def test_half_a_character_decodes_to_the_replacement(self):
        assert make_tokenizer("byte").decode(np.frombuffer("é".encode()[:1], np.uint8)) == "\ufffd"

    @pytest.mark.parametrize("ids", [[259], [-1, 5]])
    def test_ids_out_of_range(self, ids):
        with pytest.raises(DataError, match="ids must be in 0..258"):
            make_tokenizer().decode(ids)

    def test_fingerprint_tells_bos(self):
        assert make_tokenizer().fingerprint != make_tokenizer(add_bos=True).fingerprint
        assert make_tokenizer().fingerprint == make_tokenizer("byte").fingerprint


class TestTokenizerJson:
    @pytest.mark.parametrize("text", ["the router", "ünïcode 東京\n\t  x", "", "a" * 300])
    def test_round_trip(self, write_tokenizer, text):
        tokenizer = make_tokenizer(str(write_tokenizer(["</s>", "<s>", "<pad>"])))
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        (again,) = tokenizer.encode_batch([text])
        np.testing.assert_array_equal(again, ids)
        # Neither the file's truncation to 4 nor its padding to 32 acts.
        assert tokenizer.pad_id not in ids

    def test_special_tokens_are_found(self, write_tokenizer):
        path = write_tokenizer(["<pad>", "<s>", "</s>"])
        tokenizer = make_tokenizer(str(path.parent), add_bos=True)
        assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id) == (0, 1, 2)
        assert tokenizer.decode([1, 2, 0]) == ""
        assert max(tokenizer.encode("the experts")) < tokenizer.vocab_size

    def test_special_tokens_may_be_named(self, write_tokenizer):
        path = write_tokenizer(["<stop>", "<go>"])
        with pytest.raises(DataError, match="none of the usual end-of-text tokens .*eos_token"):
            make_tokenizer(str(path))
        tokenizer = make_tokenizer(str(path), eos_token="<stop>")
        assert tokenizer.eos_id == tokenizer.pad_id == 0
        with pytest.raises(DataError, match="no bos token; name it with bos_token"):
            make_tokenizer(str(path), eos_token="<stop>", add_bos=True)
        with pytest.raises(DataError, match="bos_token='<x>' is not in the tokenizer's vocabulary"):
            make_tokenizer(str(path), eos_token="<stop>", bos_token="<x>")
        assert make_tokenizer(str(path), eos_token="<stop>", bos_token="<go>").bos_id == 1

    def test_fingerprint_follows_the_file(self, write_tokenizer):
        one = make_tokenizer(str(write_tokenizer(["</s>"], "a.json")))
        two = make_tokenizer(str(write_tokenizer(["</s>", "<s>"], "b.json")))
        same = make_tokenizer(str(write_tokenizer(["</s>"], "c.json")))
        assert one.fingerprint == same.fingerprint != two.fingerprint

    def test_missing_and_broken_files(self, tmp_path):
        with pytest.raises(DataError, match="no such file; expected a tokenizer.json"):
            make_tokenizer(str(tmp_path))
        (tmp_path / "tokenizer.json").write_text("{}")
        with pytest.raises(DataError, match="cannot be read"):
            make_tokenizer(str(tmp_path))

    def test_package_not_installed(self, write_tokenizer, monkeypatch):
        path = write_tokenizer(["</s>"])
        original = builtins.__import__

        def without(name, *args, **kwargs):
            if name == "tokenizers":
                raise ImportError(name)
            return original(name, *args, **kwargs)

        monkeypatch.setattr(builtins, "__import__", without)
        with pytest.raises(DataError, match=r"install jaxlib-papers\[lm\]"):
            make_tokenizer(str(path))


def test_vocabulary_of_the_model():
    check_vocabulary(make_tokenizer(), 259)
    check_vocabulary(make_tokenizer(), 512)
    with pytest.raises(DataError, match="vocab_size=256 is smaller than the tokenizer's 259"):
        check_vocabulary(make_tokenizer(), 256)
