"""What `bakehouse serve` refuses before anything starts."""

import socket
from pathlib import Path

import pytest
from bakehouse_cluster.checks import check_before_start, check_model, is_loopback
from bakehouse_cluster.config import Config, parse_config
from bakehouse_replica.core.errors import StartupError
from bakehouse_replica.source import open_source


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        free: int = listener.getsockname()[1]
    return free


def config_of(
    port: int, server: dict[str, object] | None = None, gateway: dict[str, object] | None = None
) -> Config:
    return parse_config({"server": {"port": port} | (server or {}), "gateway": gateway or {}})


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_listening_beyond_loopback_without_keys_is_refused(port: int, host: str) -> None:
    with pytest.raises(StartupError, match=r"nobody would be asked for a key; give --keys FILE"):
        check_before_start(config_of(port, {"host": host}))


def test_listening_beyond_loopback_is_allowed_with_keys_or_where_it_is_meant(port: int, tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text("tenants: {alice: {keys: [sk-alice-0123456789abcdef]}}")
    check_before_start(config_of(port, {"host": "0.0.0.0"}, {"keys": path}))
    check_before_start(config_of(port, {"host": "0.0.0.0", "allow_unauthenticated": True}))


def test_a_wrong_key_file_is_refused_before_anything_starts(port: int, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"gateway\.keys: .*No such file"):
        check_before_start(config_of(port, gateway={"keys": tmp_path / "none.yaml"}))


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("localhost", True), ("::", False)],
)
def test_loopback_is_known_in_every_spelling(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_the_port_of_grpc_must_be_free_and_another(port: int) -> None:
    with pytest.raises(StartupError, match=rf"server\.grpc_port: {port} is the port of HTTP"):
        check_before_start(config_of(port, {"grpc_port": port}))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        used = listener.getsockname()[1]
        with pytest.raises(StartupError, match=rf"port {used} .* is in use; choose another with --grpc-port"):
            check_before_start(config_of(port, {"grpc_port": used}))


def test_several_gateways_need_a_proxy(port: int) -> None:
    with pytest.raises(
        StartupError, match=r"server\.gateways: .* one gateway, .* not 2; --ingress proxy or haproxy"
    ):
        check_before_start(config_of(port, {"gateways": 2}))
    check_before_start(config_of(port, {"gateways": 2, "ingress": "proxy"}))


def test_haproxy_listens_beyond_loopback_and_so_needs_keys_or_that_it_is_meant(port: int) -> None:
    with pytest.raises(StartupError, match=r"server\.ingress: HAProxy listens on all .* give --keys FILE"):
        check_before_start(config_of(port, {"ingress": "haproxy"}))
    check_before_start(config_of(port, {"ingress": "haproxy", "allow_unauthenticated": True}))


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({"model": {"quantize": "int8", "dtype": "bfloat16"}}, "--quantize int8 and --dtype bfloat16 exclude"),
        ({"model": {"max_model_len": 100_000}}, "--max-model-len is 100000; it must be from 2 to"),
        ({"replica": {"kv_memory": "1MiB"}}, "raise --kv-memory by 359 MiB"),
        ({"replica": {"kv_memory": "900GiB"}}, "too little memory: .* the KV cache 900 GiB"),
        ({"replica": {"tensor_parallel": 2}}, "--tensor-parallel is 2, .*; 1, 3 or 9 would work"),
    ],
)
def test_what_the_model_or_the_machine_cannot_do_is_refused_before_anything_starts(
    tree: dict[str, dict[str, object]], said: str
) -> None:
    config = parse_config(tree)
    with pytest.raises(StartupError, match=said):
        check_model(config, open_source(config.source))


def test_dummy_weights_without_a_tokenizer_are_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    config = parse_config({"model": {"source": str(tmp_path), "weights": "dummy"}})
    with pytest.raises(StartupError, match=r"dummy weights and no tokenizer: .* put the tokenizer's files beside"):
        check_model(config, open_source(config.source))
    (tmp_path / "tokenizer.json").write_text("{}")
    check_model(config, open_source(config.source))


def test_options_that_suit_the_model_pass() -> None:
    config = parse_config({"model": {"quantize": "int8", "max_model_len": 512}, "replica": {"tensor_parallel": 3}})
    check_model(config, open_source(config.source))
