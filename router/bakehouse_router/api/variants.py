"""How the API describes an object whose fields depend on one of them: as one of several variants."""

from collections.abc import Sequence
from typing import cast

from pydantic.config import JsonDict, JsonValue


def describe_by_variants(schema: JsonDict, variants: Sequence[JsonDict]) -> None:
    """Replaces what a schema says of all fields together; its title stays."""
    title = schema["title"]
    schema.clear()
    schema["title"] = title
    schema["anyOf"] = list[JsonValue](variants)


def variant(properties: JsonDict, required: Sequence[str]) -> JsonDict:
    """An object of these properties and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": list[JsonValue](required),
        "additionalProperties": False,
    }


def not_null(field: JsonDict) -> JsonDict:
    """A field that may be null, where it must not be."""
    kinds = cast("list[JsonValue]", field["anyOf"])
    return {"anyOf": [kind for kind in kinds if kind != {"type": "null"}]}
