"""Which format a model writes tool calls in: as the settings say, or by what its chat template writes."""

from bakehouse_replica.vocabulary import Vocabulary

from bakehouse_router.settings import ToolFormatName
from bakehouse_router.text.tools.hermes import HermesFormat
from bakehouse_router.text.tools.llama3 import Llama3Format
from bakehouse_router.text.tools.mistral import MistralFormat
from bakehouse_router.text.tools.tool_format import ToolFormat

# What templates write in one format only; the first that a template contains decides.
_MARKS: tuple[tuple[str, ToolFormatName], ...] = (
    ("[TOOL_CALLS]", "mistral"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama3_json"),
    ('"parameters": ', "llama3_json"),
)


def choose_tool_format(setting: ToolFormatName, template: str | None, vocabulary: Vocabulary) -> ToolFormat:
    """The format of `setting`; `auto` goes by the marks in the chat template's text, without any it is Hermes'."""
    template = template or ""
    if setting == "auto":
        setting = next((name for mark, name in _MARKS if mark in template), "hermes")
    match setting:
        case "mistral":
            return MistralFormat(vocabulary, template)
        case "llama3_json":
            return Llama3Format(vocabulary)
        case _:
            return HermesFormat(vocabulary)
