"""`bakehouse.connect` from another program and from tasks in the cluster, against a running `bakehouse serve`."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import bakehouse
import connected
import httpx
import psutil
import pytest
from bakehouse_replica.core.errors import Unavailable
from servers import STOP_TIMEOUT_S, Server, running, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

# A stream that nobody cancels takes 20 s: far longer than the test here waits for blocks to be free.
SCRIPT = {
    "pieces": ["a", "b", "c", "Hello", " world"],
    "replies": [{"when": "greet", "pieces": ["Hello", " world"]}],
    "default": {"pieces": ["a", "b", "c"]},
    "step_ms": 5,
    "max_model_len": 4096,
}
FREE_TIMEOUT_S = 5.0

Seen = dict[str, object]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("connect")
    path = folder / "script.json"
    path.write_text(json.dumps(SCRIPT))
    with running(folder / "log", f"scripted:{path}", "--served-model-name", "scripted") as ready:
        yield ready


def told(server: Server, pattern: str) -> str:
    """What the server has announced."""
    wait_until(lambda: re.search(pattern, server.log.read_text()) is not None, 10, f"{pattern} announced")
    found = re.search(pattern, server.log.read_text())
    assert found is not None, "waited for it"
    return found[1]


@pytest.fixture(scope="module")
def seen(server: Server) -> Iterator[dict[str, Seen]]:
    """What the other program has seen; it lives on meanwhile."""
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": told(server, r"token: ([^)]+)\)")}
    program = subprocess.Popen(
        [sys.executable, connected.__file__, told(server, r"Ray +(\S+) \(")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | token,
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
        replicas = httpx.get(f"{server.url}/health").json()["replicas"]
        return sum(int(replica["load"]["n_held_blocks"]) for replica in replicas)

    wait_until(lambda: n_held_blocks() == 0, FREE_TIMEOUT_S, "blocks free")


def test_an_application_that_does_not_run_is_told(seen: dict[str, Seen]) -> None:
    error, _, message = cast("list[object]", seen["no_such_app"])
    assert error == "Unavailable"
    assert "bakery" in str(message)


def test_an_address_where_nobody_answers_is_told_at_once() -> None:
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1'"):
        bakehouse.connect("127.0.0.1:1")


@pytest.mark.slow
@pytest.mark.parametrize("program", ["raylet", "gcs_server"])
def test_a_server_whose_ray_dies_says_so_and_ends(tmp_path: Path, program: str) -> None:
    path = tmp_path / "script.json"
    path.write_text(json.dumps(SCRIPT))
    with running(tmp_path / "log", f"scripted:{path}") as dying:
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
