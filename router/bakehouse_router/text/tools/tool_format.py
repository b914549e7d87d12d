"""How a model writes tool calls: a parser of its answers, and a grammar that forces calls.

A format's markers are special tokens in some vocabularies, which add nothing to a text, and ordinary text in
others. So answers are decoded with a view of the vocabulary that shows them, and grammars name them by id.
"""

import json
from abc import ABC, abstractmethod
from typing import ClassVar

from bakehouse_replica.core.sampling import Grammar, GrammarKind
from bakehouse_replica.vocabulary import Vocabulary

from bakehouse_router.calls import ToolUse
from bakehouse_router.text.messages import Tool
from bakehouse_router.text.tools.machine import CallMachine
from bakehouse_router.text.tools.parser import ToolCallParser

# As models were trained to write JSON, and no space that a model could go on writing for ever.
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


class ToolFormat(ABC):
    """One format over one vocabulary; `visible_markers` are the texts that it is recognised by.

    `vocabulary`: what answers are to be decoded with where they are parsed.
    """

    visible_markers: ClassVar[tuple[str, ...]]
    _parser: ClassVar[type[CallMachine]]
    _arguments_key: ClassVar[str] = "arguments"

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary.showing(self.visible_markers)
        self._marker_ids = {
            marker: token_id
            for marker in self.visible_markers
            if (token_id := vocabulary.special_id(marker)) is not None
        }

    def parser(self, tool_use: ToolUse) -> ToolCallParser:
        """A parser for one choice; `tool_use.choice` must not be `none`."""
        assert tool_use.choice != "none", "an answer that may not call tools is not parsed"
        names = frozenset(tool.name for tool in _callable_tools(tool_use))
        return self._parser(names, is_parallel=not tool_use.allows_one_call)

    def grammar(self, tool_use: ToolUse) -> Grammar | None:
        """What the answer must match where calls are forced: one call or more, with nothing around them.

        One call only where the tool is named or calls may not be parallel. None where calls are not forced.
        """
        if tool_use.choice not in ("required", "named"):
            return None
        tools = _callable_tools(tool_use)
        rules = ["%llguidance {}", f"start: {self._start(not tool_use.allows_one_call)}"]
        rules.append("call: " + " | ".join(f"call_{index}" for index in range(len(tools))))
        for index, tool in enumerate(tools):
            rules.append(f"call_{index}: {self._call(tool.name, f'arguments_{index}')}")
            rules.append(f"arguments_{index}: %json {json.dumps(_arguments_schema(tool))}")
        return Grammar(kind=GrammarKind.LARK, text="\n".join(rules) + "\n")

    @abstractmethod
    def _start(self, is_parallel: bool) -> str:
        """The whole answer's rule, in terms of the rule `call`."""

    def _call(self, name: str, arguments: str) -> str:
        """A call's rule, in terms of the rule named `arguments`."""
        head = f'{{"name": {json.dumps(name)}, "{self._arguments_key}": '
        return f'{literal(head)} {arguments} "}}"'

    def _marker(self, marker: str) -> str:
        """How a rule refers to a marker."""
        if marker in self._marker_ids:
            return f"<[{self._marker_ids[marker]}]>"
        return literal(marker)


def literal(text: str) -> str:
    """A text in a rule."""
    return json.dumps(text)


def repeated(item: str, separator: str, *, is_parallel: bool) -> str:
    """A rule for one `item`, or for one or more."""
    return f"{item} ({literal(separator)} {item})*" if is_parallel else item


def _callable_tools(tool_use: ToolUse) -> list[Tool]:
    return [tool for tool in tool_use.tools if tool_use.choice != "named" or tool.name == tool_use.name]


def _arguments_schema(tool: Tool) -> dict[str, object]:
    return {"type": "object", **(tool.parameters or _NO_PARAMETERS), "x-guidance": _JSON_STYLE}
