"""A model's tokenizer, loaded from its files; that inside a GGUF file is converted once into an ordinary folder.

Here and not in the router, because a replica needs the bytes of the same tokens for its grammars.

transformers converts vocabulary, merges and special tokens, but gives every byte-level vocabulary that it does not
know GPT-2's way of splitting text into words, which tokenises numbers and spaces wrongly without a sign. So the
splitting is set here, by the name that the file gives it, and an unknown name is refused.
"""

import logging
import os
import shutil
import tempfile
from pathlib import Path

from tokenizers import Regex, pre_tokenizers
from tokenizers.pre_tokenizers import PreTokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from bakehouse_replica.core.errors import StartupError
from bakehouse_replica.gguf_metadata import read_gguf_metadata
from bakehouse_replica.source import ModelFiles, require_tokenizer

logger = logging.getLogger(__name__)

_CACHE_NAME = "tokenizer-1"  # the number grows when the conversion changes

_DIGIT_BY_DIGIT = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
_GPT2 = ("gpt-2", "phi-2", "olmo", "mpt")
_LLAMA3 = ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "lfm2", "smaug-bpe", "dbrx")
_QWEN2 = ("qwen2", "deepseek-r1-qwen", "megrez")

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _by_pattern(pattern: str) -> PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def byte_level_splitting(name: str) -> PreTokenizer:
    """How a byte-level vocabulary splits text, by `tokenizer.ggml.pre`; `StartupError` for unknown names."""
    if name in _DIGIT_BY_DIGIT:
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    if name in _GPT2:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if name in _LLAMA3:
        return _by_pattern(_LLAMA3_SPLIT)
    if name in _QWEN2:
        return _by_pattern(_QWEN2_SPLIT)
    known = ", ".join(sorted({*_DIGIT_BY_DIGIT, *_GPT2, *_LLAMA3, *_QWEN2}))
    raise StartupError(
        f"this GGUF file's tokenizer splits text as {name!r}, which is not supported (supported: {known}); "
        f"use the model's Hugging Face folder instead"
    )


def _convert(files: ModelFiles) -> PreTrainedTokenizerFast:
    scalars = read_gguf_metadata(files).scalars
    splitting = None
    if scalars.get("tokenizer.ggml.model") == "gpt2":
        splitting = byte_level_splitting(str(scalars.get("tokenizer.ggml.pre", "")))
    path = files.path
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    assert isinstance(tokenizer, PreTrainedTokenizerFast), f"a {type(tokenizer).__name__} from a GGUF file"
    if splitting is not None:
        tokenizer.backend_tokenizer.pre_tokenizer = splitting
    return tokenizer


def _save_whole(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Let `folder` appear complete or not at all; without a writable cache the next start converts again."""
    made = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent)
        tokenizer.save_pretrained(made)
        os.rename(made, folder)
    except OSError as error:
        if not folder.is_dir():  # else another process was first
            logger.warning("could not write %s to the cache: %s", folder, error)
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)


def load_gguf_tokenizer(files: ModelFiles) -> PreTrainedTokenizerBase:
    """The tokenizer inside a GGUF file, converted at the first call and kept in the cache folder.

    Raises `StartupError` where it splits text in a way that is not known here.
    """
    folder = files.cache_dir / _CACHE_NAME
    if folder.is_dir():
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    logger.info("converting the tokenizer of %s, once", files.path)
    tokenizer = _convert(files)
    _save_whole(tokenizer, folder)
    return tokenizer


def load_tokenizer(files: ModelFiles) -> PreTrainedTokenizerFast:
    """The tokenizer of the model in `files`. Raises `StartupError` where there is none that can be used."""
    require_tokenizer(files)
    try:
        if files.is_gguf:
            tokenizer = load_gguf_tokenizer(files)
        else:
            tokenizer = AutoTokenizer.from_pretrained(files.path, local_files_only=True)
    except StartupError:
        raise
    except Exception as error:  # transformers and tokenizers raise whatever broke, bare Exceptions too
        raise StartupError(f"the tokenizer of model {files.name!r} cannot be loaded: {error}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise StartupError(f"the tokenizer of model {files.name!r} has no fast implementation, which is needed")
    return tokenizer
