"""`bakehouse.connect` from another program and from tasks in the cluster, against a running `bakehouse serve`."""

import json
import os
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import bakehouse
import connected
import grpc
import httpx
import psutil
import pytest
from bakehouse_replica.core.errors import Unavailable
from ray._private import services
from servers import STOP_TIMEOUT_S, Server, running, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

FREE_TIMEOUT_S = 10.0
REFUSAL_TIMEOUT_S = 9.0  # of an address that says at once that it is wrong: in less than one that says nothing has
UNREACHED_TIMEOUT_S = 20.0

Seen = dict[str, object]


def told(server: Server, pattern: str) -> str:
    """What the server has announced."""
    found = re.search(pattern, server.log.read_text())
    assert found is not None, server.log.read_text()
    return found[1]


def announced_environment(server: Server) -> dict[str, str]:
    """What the server says is to be put before a program."""
    return dict(word.split("=", 1) for word in shlex.split(told(server, r"Python +(.+) python your_program\.py")))


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the other program's standard error goes."""
    return tmp_path_factory.mktemp("connected") / "printed"


@pytest.fixture(scope="module")
def seen(server: Server, printed: Path) -> Iterator[dict[str, Seen]]:
    """What the other program has seen; it lives on meanwhile."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    with printed.open("wb") as errors:
        program = subprocess.Popen(
            [sys.executable, connected.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=plain | announced_environment(server),
        )
    assert program.stdin is not None
    assert program.stdout is not None
    line = next((line for line in program.stdout if line.startswith("{")), "{}")
    try:
        yield json.loads(line)
    finally:
        program.stdin.close()
        assert program.wait(timeout=60) == 0
        program.stdout.close()


def test_nothing_is_printed_that_the_program_has_not_asked_for(seen: dict[str, Seen], printed: Path) -> None:
    assert seen
    assert printed.read_text() == ""


def test_whole_replies_have_what_was_asked_for(seen: dict[str, Seen]) -> None:
    assert seen["whole"] == {
        "text": "Hello world",
        "finish_reason": "length",
        "completion_tokens": 2,
        "token_ids": [3, 4],
        "has_logprobs": True,
        "several": ["Hello world", "Hello world", "ab", "ab"],
        "chat": "Hello world",
        "tokenized": [3, 4],
        "detokenized": "Hello world",
        "models": [["scripted", 4096]],
    }


def test_a_stream_comes_in_pieces_and_ends_with_the_usage(seen: dict[str, Seen]) -> None:
    texts, has_usage = (
        cast("list[str]", seen["streamed"]["texts"]),
        cast("list[bool]", seen["streamed"]["has_usage"]),
    )
    assert "".join(texts) == "Hello world"
    assert has_usage == [*[False] * len(texts), True]


@pytest.mark.parametrize(
    ("call", "error", "param"),
    [
        ("bounds", "InvalidRequest", "max_tokens"),
        ("unknown", "InvalidRequest", "oven"),
        ("model", "UnknownModel", "model"),
        ("messages", "InvalidRequest", "messages"),
        ("stream", "InvalidRequest", "stream"),
        ("ids", "InvalidRequest", "tokens"),
        ("deadline", "DeadlineExceeded", None),
    ],
)
def test_errors_are_our_own_and_name_the_field(
    seen: dict[str, Seen], call: str, error: str, param: str | None
) -> None:
    assert cast("list[object]", seen["refused"][call])[:2] == [error, param]


def test_the_same_works_with_an_event_loop(seen: dict[str, Seen]) -> None:
    awaited = seen["awaited"]
    assert awaited["text"] == "".join(cast("list[str]", awaited["texts"])) == "Hello world"
    assert (awaited["tokenized"], awaited["was_cancelled"]) == ([3], True)


def test_tasks_of_the_cluster_connect_and_take_clients(seen: dict[str, Seen]) -> None:
    assert cast("object", seen["in_a_task"]) == "Hello world"
    assert seen["sent_to_a_task"] == seen["whole"]


def test_calls_that_are_broken_off_leave_no_block_held(seen: dict[str, Seen], server: Server) -> None:
    assert cast("list[object]", seen["broken_off"]["cancelled"])[0] == "CancelledError"

    def n_held_blocks() -> int:
        replicas = httpx.get(f"{server.url}/health", timeout=60).json()["replicas"]
        return sum(int(replica["load"]["n_held_blocks"]) for replica in replicas)

    wait_until(lambda: n_held_blocks() == 0, FREE_TIMEOUT_S, "blocks free")


def test_an_application_that_does_not_run_is_told(seen: dict[str, Seen]) -> None:
    error, _, message = cast("list[object]", seen["no_such_app"])
    assert error == "Unavailable"
    assert "bakery" in str(message)


def refusal(address: str, within_s: float) -> str:
    """Why `address` cannot be connected to, told in one line and in time."""
    started_s = time.monotonic()
    with pytest.raises(Unavailable) as refused:
        bakehouse.connect(address)
    assert time.monotonic() - started_s < within_s
    assert "\n" not in str(refused.value)
    # Else its traceback would be preceded by those of Ray and gRPC.
    assert refused.value.__context__ is None or refused.value.__suppress_context__
    return str(refused.value)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "http://127.0.0.1:8265", "local", "10.0.0.5"])
def test_a_wrong_address_is_told_at_once(address: str) -> None:
    assert refusal(address, REFUSAL_TIMEOUT_S).startswith(f"no Ray can be reached at {address!r}: ")


def test_a_wrong_address_in_the_environment_is_told_with_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert "at '127.0.0.1:1' (RAY_ADDRESS): " in refusal("auto", REFUSAL_TIMEOUT_S)


def test_of_several_rays_one_has_to_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def find() -> set[str]:
        return {"127.0.0.1:2", "127.0.0.1:1"}

    find.cache_clear = lambda: None  # type: ignore[attr-defined]
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(services, "find_gcs_addresses", find)
    monkeypatch.setattr(services, "find_bootstrap_address", lambda _folder: None)
    message = refusal("auto", REFUSAL_TIMEOUT_S)
    assert message.startswith("several Rays run on this machine, at 127.0.0.1:1, 127.0.0.1:2: name one by RAY_A")


def test_the_port_of_http_is_refused_at_once(server: Server) -> None:
    assert "HTTP/2" in refusal(server.url.removeprefix("http://"), REFUSAL_TIMEOUT_S)


def test_without_a_token_is_told_what_to_set(server: Server) -> None:
    message = refusal(announced_environment(server)["RAY_ADDRESS"], REFUSAL_TIMEOUT_S)
    assert "RAY_AUTH_MODE=token" in message
    assert "RAY_AUTH_TOKEN_PATH" in message


def test_a_port_that_never_answers_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        message = refusal(f"127.0.0.1:{silent.getsockname()[1]}", UNREACHED_TIMEOUT_S)
    assert message.endswith("nothing answered within 10 s")


def test_a_ray_of_other_machines_is_refused_at_once() -> None:
    service = "ray.rpc.NodeInfoGcsService"
    no_nodes: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(lambda *_call: b"")
    elsewhere = grpc.server(ThreadPoolExecutor(1))
    elsewhere.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service, {"GetAllNodeInfo": no_nodes}),)
    )
    port = elsewhere.add_insecure_port("127.0.0.1:0")
    elsewhere.start()
    try:
        assert "none of its nodes runs on this machine" in refusal(f"127.0.0.1:{port}", REFUSAL_TIMEOUT_S)
    finally:
        elsewhere.stop(None).wait()


@pytest.mark.slow
@pytest.mark.parametrize("program", ["raylet", "gcs_server"])
def test_a_server_whose_ray_dies_says_so_and_ends(tmp_path: Path, model: str, program: str) -> None:
    with running(tmp_path / "log", model) as dying:
        processes = dying.tree()
        (vital,) = [
            process for process in psutil.Process(dying.process.pid).children() if process.name() == program
        ]
        vital.kill()
        assert dying.process.wait(STOP_TIMEOUT_S) == 1
        psutil.wait_procs(processes, timeout=10)
        assert not any(process.is_running() for process in processes)
        assert not Path(told(dying, r"token: ([^)]+)/token\)")).exists()
        assert dying.log.read_text().splitlines()[-1].startswith(f"bakehouse: Ray is lost: its program {program}")
        assert "(raylet)" not in dying.log.read_text()  # the end of its log, which Ray would print
