"""Everything about one model that has to do with text, loaded from its files."""

from dataclasses import dataclass
from typing import TypeVar

from bakehouse_replica.core.sampling import SamplingParams
from bakehouse_replica.generation import GenerationDefaults, generation_defaults
from bakehouse_replica.script import Script, read_script
from bakehouse_replica.source import ModelFiles
from bakehouse_replica.tokenizer_files import load_tokenizer
from transformers import PreTrainedTokenizerFast

from bakehouse_router.text.chat_template import ChatTemplate
from bakehouse_router.text.scripted_text import DEFAULT_TEMPLATE, ScriptedTokenizer
from bakehouse_router.text.tokenizer import TextEncoder, Tokenizer

Number = TypeVar("Number", int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelText:
    """`defaults`: the model's own sampling; its `stop_token_ids` are the end-of-sequence ids."""

    tokenizer: TextEncoder
    chat_template: ChatTemplate
    defaults: SamplingParams


def _own_template(renderer: PreTrainedTokenizerFast) -> str | None:
    try:
        return str(renderer.get_chat_template())
    except ValueError:  # none, or several of which none is the default
        return None


def _given(value: Number | None, default: Number) -> Number:
    return default if value is None else value


def sampling_defaults(model: GenerationDefaults) -> SamplingParams:
    """The model's own sampling where it says so, else OpenAI's; its end-of-sequence ids as `stop_token_ids`."""
    return SamplingParams(
        temperature=_given(model.temperature, 1.0),
        top_k=model.top_k,
        top_p=_given(model.top_p, 1.0),
        min_p=_given(model.min_p, 0.0),
        repetition_penalty=_given(model.repetition_penalty, 1.0),
        stop_token_ids=model.eos_token_ids,
    )


def build_model_text(
    renderer: PreTrainedTokenizerFast, *, template_override: str | None, defaults: SamplingParams
) -> ModelText:
    """The text side of a model from its tokenizer. Raises `StartupError` where that is unusable."""
    template = template_override if template_override is not None else _own_template(renderer)
    tokenizer = Tokenizer(renderer.backend_tokenizer, bos_id=renderer.bos_token_id, template=template)
    chat_template = ChatTemplate(tokenizer, template, special_tokens=renderer.special_tokens_map)
    return ModelText(tokenizer=tokenizer, chat_template=chat_template, defaults=defaults)


def scripted_model_text(script: Script, *, template_override: str | None = None) -> ModelText:
    """The text side of a scripted model; its sampling is OpenAI's default."""
    tokenizer = ScriptedTokenizer(script)
    template = next(given for given in (template_override, script.chat_template, DEFAULT_TEMPLATE) if given)
    eos_ids = () if script.eos_id is None else (script.eos_id,)
    special_tokens = {} if script.eos_id is None else {"eos_token": tokenizer.vocabulary.name_of(script.eos_id)}
    return ModelText(
        tokenizer=tokenizer,
        chat_template=ChatTemplate(tokenizer, template, special_tokens=special_tokens),
        defaults=sampling_defaults(GenerationDefaults(eos_token_ids=eos_ids)),
    )


def load_model_text(files: ModelFiles, *, template_override: str | None = None) -> ModelText:
    """The text side of the model in `files`. Raises `StartupError` where it is unusable."""
    if files.is_script:
        return scripted_model_text(read_script(files.path), template_override=template_override)
    return build_model_text(
        load_tokenizer(files),
        template_override=template_override,
        defaults=sampling_defaults(generation_defaults(files)),
    )
