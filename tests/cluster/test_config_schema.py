"""The configuration's JSON schema says of single keys what `parse_config` says."""

import jsonschema
import pytest
from bakehouse_cluster.config import Config, parse_config
from bakehouse_cluster.config_schema import config_schema
from bakehouse_replica.core.errors import ConfigError

VALIDATOR = jsonschema.Draft202012Validator(config_schema())


def test_it_is_a_schema_without_references() -> None:
    jsonschema.Draft202012Validator.check_schema(config_schema())
    assert "$ref" not in str(config_schema())


def test_every_section_and_key_is_in_it() -> None:
    sections = config_schema()["properties"]
    assert isinstance(sections, dict)
    assert {name: list(section["properties"]) for name, section in sections.items()} == {
        name: list(getattr(Config(), name).__class__.model_fields) for name in Config.model_fields
    }


@pytest.mark.parametrize(
    "tree",
    [
        {},
        Config().model_dump(mode="json"),
        {
            "replica": {"kv_memory": "1.5 GiB", "overlap": True},
            "gateway": {"max_body": 1024, "cors_origins": ["*"]},
        },
        {"replica": {"autoscale": {"min_replicas": 1, "max_replicas": 2, "target_requests": 8}, "pools": ["gpu"]}},
    ],
)
def test_it_takes_what_is_right(tree: dict[str, object]) -> None:
    parse_config(tree)
    assert not list(VALIDATOR.iter_errors(tree))


@pytest.mark.parametrize(
    "tree",
    [
        {"models": {}},
        {"model": {"sources": "smollm2"}},
        {"model": {"source": ""}},
        {"model": {"max_model_len": 1}},
        {"model": {"dtype": "float8"}},
        {"replica": {"max_sequences": 0}},
        {"replica": {"max_sequences": "many"}},
        {"replica": {"kv_memory": "much"}},
        {"replica": {"kv_memory": 0}},
        {"replica": {"kv_memory": "512Mi"}},  # Kubernetes' own way
        {"replica": {"overlap": "maybe"}},
        {"replica": {"pools": ["a b"]}},
        {"replica": {"autoscale": {"min_replicas": 1}}},
        {"gateway": {"cpus": 0}},
        {"server": {"port": 65536}},
        {"server": {"object_store": 1}},
    ],
    ids=str,
)
def test_it_refuses_what_is_wrong(tree: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        parse_config(tree)
    assert list(VALIDATOR.iter_errors(tree))
