"""YAML is read as Helm and Kubernetes read it, and what is no configuration is refused in one line."""

from pathlib import Path

import pytest
from bakehouse_cluster import plain_yaml
from bakehouse_cluster.config import load_config
from bakehouse_replica.core.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e6", 1e6),
        ("1E-7", 1e-7),
        ("-.5", -0.5),
        ("12", 12),
        ("0x1F", 31),
        ("010", 8),
        ("1_000", 1000),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("'1e6'", "1e6"),
        ("on", True),
        ("~", None),
    ],
)
def test_words_are_what_they_are_to_kubernetes(text: str, value: object) -> None:
    read = plain_yaml.load(text)
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    "text", ["1e6", "1:30", "2024-01-01", "on", "=", "1_000", "", "a\nb", "\x1b[0m", "ü\u202e"]
)
def test_a_text_that_looks_like_something_else_is_written_as_a_text(text: str) -> None:
    assert plain_yaml.load(plain_yaml.dump({"x": text})) == {"x": text}
    assert "'" in plain_yaml.dump({"x": "1e6"})


BOMB = "\n".join(["a0: &a0 [x, x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12))])


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("server: {port: 1, port: 2}", "found the key 'port' twice"),
        ("server: {}\nserver: {}", "found the key 'server' twice"),
        ("server: " + "[" * 3000 + "]" * 3000, "it is nested too deeply"),
        ("server: {port: " + "9" * 5000 + "}", "found a number of 5000 digits"),
        ("server: {? [a, b] : c}", "unhashable key"),
        ("--- {}\n--- {}", "another document"),
        ("server: {port: *x}", "undefined alias"),
        ("server: &s {port: *s}", "server.port: input should be a valid integer"),
        ("model: {source: " + "x" * 10**6 + "\x07}", "special characters are not allowed"),
        ("model: {source: [" + "x" * 10**6 + "]}", "model.source: input should be a valid string, not ["),
        (f"{BOMB}\nmodel: {{source: *a11}}", "model.source: input should be a valid string, not ["),
        (f"{BOMB}\ngateway: {{cors_origins: *a11}}", "gateway.cors_origins.0: input should be a valid string"),
    ],
    ids=lambda text: text[:20],
)
def test_hostile_files_are_refused_in_one_short_line(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "bakehouse.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as raised:
        load_config(path, {})
    assert complaint in str(raised.value)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 4000


def test_merged_keys_may_be_overridden() -> None:
    text = "a: &a {x: 1}\nb: &b {<<: *a, x: 2}\nc: {<<: *b, x: 3}\n"
    assert plain_yaml.load(text) == {"a": {"x": 1}, "b": {"x": 2}, "c": {"x": 3}}
