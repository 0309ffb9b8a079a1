from __future__ import annotations

import dataclasses
import json

import jax
import numpy as np
import pytest

from jaxlib_papers.data.tokenizers import HFTokenizer
from jaxlib_papers.io.errors import FormatError
from jaxlib_papers.io.gguf import GGUFFile
from jaxlib_papers.io.pretrained import load_pretrained, save_pretrained
from jaxlib_papers.io.tokenizer import tokenizer_from_folder, tokenizer_from_gguf
from tests.io.synthetic import CONFIG, make, read_weights, vocabulary, write_gguf


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_pretrained(folder, make(CONFIG))
    return write_gguf(folder / "m.gguf", CONFIG, read_weights(folder))


@pytest.fixture
def words(file):
    return tokenizer_from_gguf(GGUFFile(file))


def ids(*tokens):
    known = vocabulary()[0]
    return [known.index(token) for token in tokens]


def test_merges_digits_and_special_tokens(words):
    assert words.encode("abc").tolist() == ids("abc")
    assert words.encode(" abx").tolist() == ids("Ġ", "ab", "x")  # the earlier merge comes first
    assert words.encode(" a").tolist() == ids("Ġa")
    assert words.encode("12").tolist() == ids("1", "2")
    assert words.encode("ab</s>c").tolist() == ids("ab", "</s>", "c")
    assert words.encode("").shape == (0,) and words.encode("").dtype == np.int32
    assert [a.tolist() for a in words.encode_batch(["a", "bc"])] == [ids("a"), ids("b", "c")]


def test_decoding(words):
    row = np.asarray(ids("<s>", "abc", "Ġab", "</s>"))
    assert words.decode(row) == "abc ab"
    assert words.decode(row, skip_special=False) == "<s>abc ab</s>"


def test_roles(words):
    assert (words.bos_id, words.eos_id, words.pad_id, words.stop_ids) == (1, 2, 2, (2,))
    assert words.vocab_size == 40 and not words.add_bos
    assert words.encode_prompt("a").tolist() == ids("a")
    words.add_bos = True
    assert words.encode_prompt("a").tolist() == ids("<s>", "a")
    assert words.encode_prompt("<s>a").tolist() == ids("<s>", "a")  # not twice


def test_chat(words):
    assert words.chat("ab") == "<s>user\nab</s>\n<s>assistant\n"
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert words.chat(turns, add_generation_prompt=False) == (
        "<s>user\na</s>\n<s>assistant\nb</s>\n"
    )


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no such role') }}",
        "{{ ''.__class__.__mro__ }}",  # out of the sandbox
        "{% for i in range(10**9) %}{% endfor %}",
        "{% if %}",
        "{{ 1 + 'a' }}",
    ],
)
def test_templates_that_fail(words, template):
    words.chat_template = template
    with pytest.raises(ValueError, match=r"m\.gguf: the chat template fails"):
        words.chat("a")


def test_no_template(words):
    words.chat_template = None
    with pytest.raises(ValueError, match="no chat template; this is a base model"):
        words.chat("a")


def test_saved_and_read_again(words, tmp_path):
    words.save(tmp_path)
    again = tokenizer_from_folder(tmp_path)
    for text in ("abc 12", " ab</s>", "zzz"):
        assert again.encode(text).tolist() == words.encode(text).tolist()
    assert again.chat("a") == words.chat("a")
    assert (again.bos_id, again.eos_id, again.pad_id) == (1, 2, 2)
    assert again.fingerprint == words.fingerprint
    # And the pipeline's own reader takes the same file.
    pipeline = HFTokenizer(tmp_path, eos_token="</s>")
    assert pipeline.encode("abc 12").tolist() == words.encode("abc 12").tolist()


class TestFolder:
    @pytest.fixture
    def folder(self, words, tmp_path):
        words.save(tmp_path)
        return tmp_path

    def settings(self, folder, **changes):
        file = folder / "tokenizer_config.json"
        values = json.loads(file.read_text()) | changes
        file.write_text(json.dumps({k: v for k, v in values.items() if v is not None}))

    def test_template_of_its_own_file_and_named_ones(self, folder):
        named = [{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}]
        self.settings(folder, chat_template=named)
        assert tokenizer_from_folder(folder).chat("a") == "d"
        (folder / "chat_template.jinja").write_text("j")
        assert tokenizer_from_folder(folder).chat("a") == "j"

    def test_several_stop_tokens(self, folder):
        (folder / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
        assert tokenizer_from_folder(folder).stop_ids == (0, 2)

    def test_tokens_written_as_objects(self, folder):
        self.settings(folder, eos_token={"content": "</s>", "special": True})
        assert tokenizer_from_folder(folder).eos_id == 2

    def test_no_end(self, folder):
        self.settings(folder, eos_token=None)
        with pytest.raises(FormatError, match="names the eos token; add one of them"):
            tokenizer_from_folder(folder)

    def test_a_token_that_is_not_there(self, folder):
        self.settings(folder, eos_token="<gone>")
        with pytest.raises(FormatError, match="the eos token '<gone>' is not in the vocabulary"):
            tokenizer_from_folder(folder)

    def test_damaged(self, folder):
        (folder / "tokenizer.json").write_text("{}")
        with pytest.raises(FormatError, match=r"tokenizer\.json: no valid tokenizer"):
            tokenizer_from_folder(folder)


class TestInTheModel:
    def test_size_of_another_model(self, file, tmp_path):
        small = dict(read_weights(file.parent))
        small["model.embed_tokens.weight"] = small["model.embed_tokens.weight"][:39]
        small["lm_head.weight"] = small["lm_head.weight"][:39]
        damaged = write_gguf(tmp_path / "m.gguf", CONFIG, small)
        with pytest.raises(FormatError, match="has 40 tokens, the embedding 39 rows"):
            load_pretrained(damaged)
        assert load_pretrained(damaged, tokenizer=None).config.vocab_size == 39

    def test_a_folder_may_have_rows_to_spare(self, words, tmp_path):
        larger = make(dataclasses.replace(CONFIG, vocab_size=48))
        save_pretrained(tmp_path, larger, words)
        loaded = load_pretrained(tmp_path)
        assert loaded.tokenizer is not None and loaded.config.vocab_size == 48
        assert jax.tree.leaves(loaded.model)

    def test_another_kind(self, file, tmp_path):
        weights = read_weights(file.parent)
        with pytest.raises(FormatError, match="pre-tokenizer 'martian', expected 'gpt2' with one"):
            load_pretrained(
                write_gguf(tmp_path / "m.gguf", CONFIG, weights, tokenizer__ggml__pre="martian")
            )
