"""YAML as Helm and Kubernetes read it, so that a configuration means the same to them and to the command line.

PyYAML reads `1e6` as a text, `1:30` as ninety and `2024-01-01` as a date, which they do not; and of a key that is
there twice it takes the last one in silence.
"""

import re

import yaml

# The most digits that `str` would write, so that every number read can be shown in an error.
MAX_DIGITS = 400
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$")
_INT = re.compile(r"[-+]?(0b[01_]+|0x[0-9a-fA-F_]+|0[0-7_]*|[1-9][0-9_]*)$")
_FIRST = list("-+.0123456789")
_INT_TAG, _FLOAT_TAG = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"
_OWN = (_INT_TAG, _FLOAT_TAG, "tag:yaml.org,2002:timestamp")


class _Loader(yaml.SafeLoader):
    """Strict, and with numbers as Kubernetes has them."""

    def compose_mapping_node(self, anchor: dict[object, yaml.Node]) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.composer.ComposerError(None, None, f"found the key {key.value!r} twice", key.start_mark)
            seen.add(str(key.value))
        return node

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        if len(node.value) > MAX_DIGITS:
            problem = f"found a number of {len(node.value)} digits"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return super().construct_yaml_int(node)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _OWN]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_INT_TAG, _INT, _FIRST)
_Loader.add_implicit_resolver(_FLOAT_TAG, _FLOAT, _FIRST)
_Loader.add_constructor(_INT_TAG, _Loader.construct_yaml_int)


class _Dumper(yaml.SafeDumper):
    """Quotes also what only others would take for a number."""


_Dumper.add_implicit_resolver(_FLOAT_TAG, _FLOAT, _FIRST)


def load(text: str) -> object:
    """The plain values of one document; raises `ValueError`, in one line, where it is none."""
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def dump(tree: object) -> str:
    """The document of plain values, in their order."""
    text: str = yaml.dump(tree, Dumper=_Dumper, sort_keys=False)
    return text
