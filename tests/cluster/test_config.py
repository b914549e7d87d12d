"""The configuration tree: what is accepted, what is refused, and in which words."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
from bakehouse_cluster.config import Config, load_config, parse_config
from bakehouse_replica.core.errors import ConfigError
from pydantic import BaseModel, ValidationError


def written(folder: Path, text: str) -> Path:
    path = folder / "bakehouse.yaml"
    path.write_text(text)
    return path


def test_an_empty_file_is_the_default_configuration(tmp_path: Path) -> None:
    assert load_config(written(tmp_path, ""), {}) == Config()


def test_flags_override_the_file_and_absent_flags_do_not(tmp_path: Path) -> None:
    path = written(tmp_path, "server: {port: 9000, replicas: 2}\n")
    config = load_config(path, {"server.port": 9001, "server.replicas": None, "model.source": "other"})
    assert (config.server.port, config.server.replicas, config.model.source) == (9001, 2, "other")


@pytest.mark.parametrize(
    ("text", "size_bytes"), [("512MiB", 512 * 2**20), ("2GB", 2 * 10**9), ("1.5GiB", 3 * 2**29), ("4096", 4096)]
)
def test_sizes_are_written_with_their_unit(text: str, size_bytes: int) -> None:
    config = load_config(None, {"replica.kv_memory": text})
    assert config.replica_settings(b"key").kv_memory_bytes == size_bytes


def test_replicas_are_told_how_to_keep_keys_and_values() -> None:
    assert load_config(None, {"model.kv_dtype": "float16"}).replica_settings(b"key").kv_dtype == "float16"
    assert load_config(None, {}).replica_settings(b"key").kv_dtype == "auto"


def test_replicas_are_told_to_quantize_only_where_somebody_asks() -> None:
    assert load_config(None, {"model.quantize": "int8"}).replica_settings(b"key").quantize == "int8"
    assert load_config(None, {}).replica_settings(b"key").quantize == "none"


@pytest.mark.parametrize(("text", "asked"), [("on", "on"), ("'on'", "on"), ("off", "off"), ("auto", "auto")])
def test_overlap_may_be_switched_as_yaml_writes_it(tmp_path: Path, text: str, asked: str) -> None:
    path = written(tmp_path, f"replica: {{overlap: {text}}}")
    assert load_config(path, {}).replica_settings(b"key").overlap == asked
    assert load_config(None, {"replica.overlap": asked}).replica_settings(b"key").overlap == asked


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (
            "sever: {port: 1}",
            r"^sever: unknown key; known here: model, replica, gateway, server, metrics, tracing$",
        ),
        ("server: {prot: 1}", r"^server\.prot: unknown key; known here: host, port, "),
        ("server: {port: 70000}", r"^server\.port: .*less than or equal to 65535, not 70000$"),
        ("server: {port: high}", r"^server\.port: a number is expected, not 'high'$"),
        ("server: {port: '8001'}", r"^server\.port: a number is expected, not '8001'$"),
        ("server: {replicas: true}", r"^server\.replicas: a number is expected, not True$"),
        ("server: {drain_s: .nan}", r"^server\.drain_s: .*, not nan$"),
        ("gateway: {max_queued_tokens: 1e30}", r"^gateway\.max_queued_tokens: .*, not 1e\+30$"),
        ("gateway: {log_prompts: 'on'}", r"^gateway\.log_prompts: .*boolean, not 'on'$"),
        ("gateway: {request_log: on}", r"^gateway\.request_log: .*'off', 'text' or 'json', not 'on'$"),
        ("replica: {kv_memory: true}", r"^replica\.kv_memory: a size is expected, .*, not True$"),
        ("server: {replicas: 0}", r"^server\.replicas: .*greater than or equal to 1, not 0$"),
        ("server: 3", r"^server: .*, not 3$"),
        ("model: {dtype: float8}", r"^model\.dtype: .*'auto', 'float32' or 'bfloat16', not 'float8'$"),
        ("model: {quantize: int4}", r"^model\.quantize: .*'none' or 'int8', not 'int4'$"),
        ("model: {kv_dtype: bfloat16}", r"^model\.kv_dtype: .*'auto', 'float32' or 'float16', not 'bfloat16'$"),
        ("model: {chat_template: ''}", r"^model\.chat_template: .*at least 1 character, not ''$"),
        ("gateway: {keys: ''}", r"^gateway\.keys: a path is expected, not ''$"),
        ("replica: {overlap: maybe}", r"^replica\.overlap: .*'auto', 'on' or 'off', not 'maybe'$"),
        ("replica: {kv_memory: much}", r"^replica\.kv_memory: a size is expected, such as 512MiB .*, not 'much'$"),
        ("replica: {kv_memory: 5XB}", r"^replica\.kv_memory: a size is expected, such as 512MiB .*, not '5XB'$"),
        ("replica: {kv_memory: 0}", r"^replica\.kv_memory: .*greater than 0, not 0$"),
        ("gateway: {pools: [a b]}", r"^gateway\.pools\.0: .*pattern.*, not 'a b'$"),
        (
            "replica: {autoscale: {}}",
            r"^replica\.autoscale\.min_replicas: field required.*; replica\.autoscale\.max_",
        ),
        (
            "replica: {autoscale: {min_replicas: 1, max_replicas: 2, target_requests: 1, delay: 3}}",
            r"^replica\.autoscale\.delay: unknown key; known here: min_replicas, max_replicas, target_requests, ",
        ),
        (
            "replica: {autoscale: {min_replicas: 0, max_replicas: 2, target_requests: 1}}",
            r"^replica\.autoscale\.min_replicas: .*greater than or equal to 1, not 0$",
        ),
        (
            "replica: {autoscale: {min_replicas: 3, max_replicas: 2, target_requests: 1}}",
            r"^replica\.autoscale: min_replicas is 3, but max_replicas is 2$",
        ),
        (
            "server: {replicas: 2}\nreplica: {autoscale: {min_replicas: 1, max_replicas: 2, target_requests: 1}}",
            r"^server\.replicas: it is 2, but replica\.autoscale says how many there are; leave out one",
        ),
        ("- a\n- b", r"a mapping of sections is expected, not list$"),
        ("a: [", r"not YAML: "),
    ],
)
def test_what_is_wrong_is_named_with_its_path_and_value(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load_config(written(tmp_path, text), {})


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--config \S*absent\.yaml: No such file"):
        load_config(tmp_path / "absent.yaml", {})


def test_a_flag_under_a_section_that_is_no_mapping_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^server: "):
        load_config(written(tmp_path, "server: 3"), {"server.port": 1})


def test_the_tree_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        Config().server.port = 1


def test_both_parts_are_told_the_same_source_and_name() -> None:
    config = parse_config({"model": {"source": "org/model", "revision": "v2", "served_name": "loaf"}})
    replica, gateway = config.replica_settings(b"key"), config.gateway_settings()
    assert replica.source == gateway.source
    assert (replica.source.model, replica.source.revision) == ("org/model", "v2")
    assert replica.served_name == gateway.served_name == "loaf"
    assert replica.hash_key == b"key"


def test_a_chat_template_is_a_text_or_a_file(tmp_path: Path) -> None:
    text = "{{ messages[0].content }}"
    path = tmp_path / "template.jinja"
    path.write_text(text)
    for given in (text, str(path)):
        config = parse_config({"model": {"chat_template": given}})
        assert config.gateway_settings().chat_template == text


def test_a_missing_chat_template_is_named() -> None:
    config = parse_config({"model": {"chat_template": "absent.jinja"}})
    with pytest.raises(ConfigError, match=r"^model\.chat_template: cannot read the file 'absent\.jinja'"):
        config.gateway_settings()


@pytest.mark.parametrize(("n_cpus", "n_replicas"), [(1, 1), (1, 4), (2, 1), (2, 2), (2, 3), (16, 2)])
def test_everything_fits_on_the_machine(n_cpus: int, n_replicas: int) -> None:
    config = parse_config({"server": {"replicas": n_replicas}}).shared_out(n_cpus)
    assert config.replica.cpus is not None
    assert config.replica.threads is not None
    assert n_replicas * config.replica.cpus + config.gateway.cpus <= n_cpus
    assert config.replica.threads >= 1
    assert config.replica.threads * n_replicas <= max(n_cpus, n_replicas)


def test_more_replicas_than_the_machine_can_run_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^server\.replicas: 1000000 replicas leave 0\.00 CPUs to each"):
        parse_config({"server": {"replicas": 1_000_000}}).shared_out(2)


@pytest.mark.parametrize("asked", [{"replica": {"cpus": 2}}, {"replica": {"cpus": 1}, "server": {"replicas": 2}}])
def test_more_cpus_than_there_are_are_refused(asked: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"reserve 2\.1 CPUs; this machine has 2"):
        parse_config(asked).shared_out(2)


@pytest.mark.parametrize("wrong", [{"replica": {"cpus": float("inf")}}, {"server": {"drain_s": float("inf")}}])
def test_an_infinite_amount_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="finite number"):
        parse_config(wrong)


def test_what_the_user_asked_for_is_not_shared_out_anew() -> None:
    asked = parse_config({"replica": {"cpus": 0.3, "threads": 7}})
    assert asked.shared_out(2) == asked


def test_a_machine_is_shared_out_among_all_replicas_that_there_may_be() -> None:
    autoscale = {"min_replicas": 1, "max_replicas": 4, "target_requests": 8}
    config = parse_config({"replica": {"autoscale": autoscale}})
    assert (config.n_replicas, config.max_replicas) == (1, 4)
    shared = config.shared_out(2)
    assert (shared.replica.cpus, shared.replica.threads) == (0.47, 1)
    with pytest.raises(ConfigError, match=r"^replica\.autoscale\.max_replicas: 400 replicas leave 0\.00 CPUs"):
        parse_config({"replica": {"autoscale": autoscale | {"max_replicas": 400}}}).shared_out(2)


def test_one_machine_has_no_pools() -> None:
    config = parse_config({"replica": {"pools": ["gpu"]}, "gateway": {"pools": ["cpu"]}}).shared_out(2)
    assert (config.replica.pools, config.gateway.pools) == ((), ())


def test_sharing_out_leaves_everything_else_alone() -> None:
    config = Config().shared_out(2)
    assert config.server == Config().server
    assert config.replica.kv_memory is None


def keys_below(model: type[BaseModel]) -> Iterator[str]:
    """The dotted path of every key that holds a value."""
    for name, field in model.model_fields.items():
        parts = [part for part in (field.annotation, *get_args(field.annotation)) if isinstance(part, type)]
        nested = [part for part in parts if issubclass(part, BaseModel)]
        yield from (f"{name}.{key}" for part in nested for key in keys_below(part))
        if not nested:
            yield name


def test_every_key_stands_in_the_readmes_table_and_no_other() -> None:
    readme = Path(__file__).parents[2] / "cluster" / "README.md"
    rows = [line.split("|")[1] for line in readme.read_text().splitlines() if line.startswith("| `")]
    a_key = rf"`((?:{'|'.join(Config.model_fields)})\.[\w.]+)`"
    told = [key for row in rows for key in re.findall(a_key, row)]
    assert sorted(told) == sorted(keys_below(Config))
