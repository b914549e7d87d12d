"""The configuration file's JSON schema, for whoever checks such a file without Python: editors, and `helm lint`.

It refuses what `parse_config` refuses of a single key: unknown ones, wrong types, values out of range. What
several keys say together only `parse_config` knows.
"""

from collections.abc import Mapping

from bakehouse_cluster.config import Config

# Whatever else pydantic writes is not of JSON schema's vocabulary, or says nothing that a reader needs.
_KEPT = frozenset(
    {
        "additionalProperties", "anyOf", "const", "description", "enum", "exclusiveMinimum", "items",
        "maxItems", "maximum", "minItems", "minLength", "minimum", "pattern", "properties", "required", "type",
    }
)  # fmt: skip
# Where a type of its own has bounds, pydantic writes them by its own names. They say nothing of texts in either.
_RENAMED = {"gt": "exclusiveMinimum", "ge": "minimum", "le": "maximum"}
# pydantic's pattern takes any word for a unit and refuses it afterwards: Kubernetes' own `512Mi`, for one.
_BYTE_SIZE = r"^\s*(\d*\.?\d+)\s*(\w+)?"
_SIZE = r"^(\d*[1-9]\d*(\.\d+)?|\d*\.\d*[1-9]\d*) ?(([kKmMgGtTpPeE][iI]?)?[bB])?$"


def config_schema() -> dict[str, object]:
    """Without references, so that it can be put anywhere into another schema."""
    schema = Config.model_json_schema()
    return _plain(schema, schema.get("$defs", {}))


def _plain(node: Mapping[str, object], definitions: Mapping[str, Mapping[str, object]]) -> dict[str, object]:
    reference = node.get("$ref")
    if isinstance(reference, str):
        return _plain(definitions[reference.removeprefix("#/$defs/")], definitions)
    plain: dict[str, object] = {}
    for key, value in node.items():
        if key == "properties" and isinstance(value, Mapping):
            plain[key] = {name: _plain(part, definitions) for name, part in value.items()}
        elif key == "anyOf" and isinstance(value, list):
            plain[key] = [_plain(part, definitions) for part in value]
        elif key == "items" and isinstance(value, Mapping):
            plain[key] = _plain(value, definitions)
        elif key in _RENAMED:
            plain[_RENAMED[key]] = value
        elif key in _KEPT:
            plain[key] = _SIZE if value == _BYTE_SIZE else value
    return plain
