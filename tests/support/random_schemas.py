"""Random JSON schemas of the kinds that clients send; the same for the same source of randomness."""

from random import Random

Schema = dict[str, object]

_KEYS = ("name", "age", "items", "kind", "price", "note", "tags", "id", "total", "is_open")
_PATTERNS = (
    "^[a-z]{2,8}$",
    "^[A-Z][a-z]+( [A-Z][a-z]+)?$",
    "^\\d{4}-\\d{2}-\\d{2}$",
    "^(red|green|blue)$",
    "^x[0-9a-f]*$",
)
_MAX_DEPTH = 3


def random_schema(random: Random) -> Schema:
    """An object, array or choice of schemas, nested up to three levels, some of it behind references."""
    definitions = {f"part{index}": _scalar(random) for index in range(2)}
    definitions["whole"] = _object(random, _MAX_DEPTH - 1, ())
    schema = random.choice((_object, _object, _array, _any_of))(random, 1, tuple(definitions))
    return {**schema, "$defs": definitions}


def _value(random: Random, depth: int, references: tuple[str, ...]) -> Schema:
    if references and random.random() < 0.15:
        return {"$ref": f"#/$defs/{random.choice(references)}"}
    if depth < _MAX_DEPTH and random.random() < 0.5:
        return random.choice((_object, _array, _any_of))(random, depth + 1, references)
    return _scalar(random)


def _object(random: Random, depth: int, references: tuple[str, ...]) -> Schema:
    keys = random.sample(_KEYS, random.randint(1, 4))
    return {
        "type": "object",
        "properties": {key: _value(random, depth, references) for key in keys},
        "required": [key for key in keys if random.random() < 0.6],
        "additionalProperties": random.choice((False, False, {"type": "integer"})),
    }


def _array(random: Random, depth: int, references: tuple[str, ...]) -> Schema:
    n_items = random.randint(0, 2)
    return {
        "type": "array",
        "items": _value(random, depth, references),
        "minItems": n_items,
        "maxItems": n_items + random.randint(0, 2),
    }


def _any_of(random: Random, depth: int, references: tuple[str, ...]) -> Schema:
    return {"anyOf": [_value(random, depth, references) for _ in range(random.randint(2, 3))]}


def _scalar(random: Random) -> Schema:
    return random.choice((_integer, _number, _string, _string, _pattern, _enum, _plain))(random)


def _integer(random: Random) -> Schema:
    least = random.randint(-1_000, 1_000)
    bound = random.choice(("maximum", "exclusiveMaximum"))
    return {"type": "integer", "minimum": least, bound: least + random.randint(1, 10**6)}


def _number(random: Random) -> Schema:
    least = round(random.uniform(-100, 100), 2)
    bound = random.choice(("minimum", "exclusiveMinimum"))
    return {"type": "number", bound: least, "maximum": round(least + random.uniform(1, 1_000), 2)}


def _string(random: Random) -> Schema:
    n_chars = random.randint(0, 4)
    return {"type": "string", "minLength": n_chars, "maxLength": n_chars + random.randint(0, 12)}


def _pattern(random: Random) -> Schema:
    return {"type": "string", "pattern": random.choice(_PATTERNS), "maxLength": 20}


def _enum(random: Random) -> Schema:
    values: tuple[object, ...] = ("red", "green", 'quo"ted', "naïve ☕", 7, -1.5, True, None)
    return {"enum": random.sample(values, random.randint(1, 4))}


def _plain(random: Random) -> Schema:
    schemas: tuple[Schema, ...] = (
        {"type": "boolean"},
        {"type": "null"},
        {"const": "fixed"},
        {"type": ["boolean", "null"]},
    )
    return random.choice(schemas)
