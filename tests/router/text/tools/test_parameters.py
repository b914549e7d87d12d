"""What the JSON schema of a tool's arguments may be."""

import pytest
from bakehouse_replica.core.errors import InvalidRequest
from bakehouse_router.bounds import check_bounds
from bakehouse_router.calls import ToolUse
from bakehouse_router.text.messages import Tool
from gateways import chat, settings

LIMITS = settings(max_schema_bytes=60, max_schema_depth=3)


def _tools(parameters: dict[str, object]) -> ToolUse:
    return ToolUse(tools=(Tool(name="now"), Tool(name="f", parameters=parameters)))


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"properties": {"a": {"enum": [1]}}}, "is 4 levels deep; the limit is 3"),
        ({"description": "x" * 60}, "has 79 bytes; the limit is 60"),
        ({"type": "string"}, "has the type 'string'"),
        ({"type": ["object", "null"]}, r"has the type \['object', 'null'\]"),
    ],
)
def test_parameters_beyond_the_limits_are_refused(parameters: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        check_bounds(chat(tool_use=_tools(parameters)), LIMITS)
    assert caught.value.param == "tools[1].function.parameters"


def test_parameters_within_the_limits_are_accepted() -> None:
    check_bounds(chat(tool_use=_tools({"properties": {"a": {"type": "string"}}})), LIMITS)
