"""`bakehouse serve` as its users see it: a real process, real weights, real HTTP."""

import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest
from openai.types.chat import ChatCompletionMessageParam
from servers import PROGRAM, STOP_TIMEOUT_S, Server, command, free_port, gone, running, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

REFUSE_TIMEOUT_S = 150.0
QUESTION: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the capital of France?"}]
PROMPT_600 = list(range(1000, 1600))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("serve") / "log") as ready:
        yield ready


# --- The official OpenAI package ----------------------------------------------------------------------------


def test_a_chat_knows_the_capital_of_france(server: Server) -> None:
    answer = server.sdk.chat.completions.create(model="smollm2", messages=QUESTION, max_tokens=24, temperature=0)
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 24


def test_a_streamed_chat_says_the_same_as_a_whole_one(server: Server) -> None:
    whole = server.sdk.chat.completions.create(model="smollm2", messages=QUESTION, max_tokens=24, temperature=0)
    chunks = list(
        server.sdk.chat.completions.create(
            model="smollm2",
            messages=QUESTION,
            max_tokens=24,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_completions_stream_and_do_not(server: Server) -> None:
    prompt = "The capital of France is"
    whole = server.sdk.completions.create(model="smollm2", prompt=prompt, max_tokens=8, temperature=0)
    assert "Paris" in whole.choices[0].text
    stream = server.sdk.completions.create(
        model="smollm2", prompt=prompt, max_tokens=8, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in stream if chunk.choices) == whole.choices[0].text


def test_the_model_is_listed(server: Server) -> None:
    assert [model.id for model in server.sdk.models.list()] == ["smollm2"]


def test_a_repeated_prompt_of_600_tokens_is_cached(server: Server) -> None:
    first, second = (
        server.sdk.completions.create(model="smollm2", prompt=PROMPT_600, max_tokens=4, temperature=0)
        for _ in range(2)
    )
    assert first.choices[0].text == second.choices[0].text
    assert second.usage is not None
    assert second.usage.prompt_tokens == 600
    assert second.usage.prompt_tokens_details is not None
    assert (second.usage.prompt_tokens_details.cached_tokens or 0) >= 576


# --- Clients that go, and clients that err ------------------------------------------------------------------


def n_held_blocks(server: Server) -> int:
    replicas = httpx.get(f"{server.url}/health", timeout=60).json()["replicas"]
    return sum(int(replica["load"]["n_held_blocks"]) for replica in replicas)


def test_a_client_that_goes_frees_its_blocks(server: Server) -> None:
    wait_until(lambda: n_held_blocks(server) == 0, 30, "idle before")
    body = {"model": "smollm2", "prompt": PROMPT_600, "max_tokens": 7000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        wait_until(lambda: n_held_blocks(server) > 0, 30, "blocks held")
    # By themselves they would be after some 30 s. 0.5 s until the engine has freed them, and as much until the
    # gateway's picture of the replica is renewed, on cores that nobody else wants.
    wait_until(lambda: n_held_blocks(server) == 0, 10, "blocks freed")


def test_bad_input_is_told_and_disturbs_nobody(server: Server) -> None:
    with ThreadPoolExecutor() as pool:
        neighbour = pool.submit(
            server.sdk.completions.create,
            model="smollm2",
            prompt="Once upon a time",
            max_tokens=64,
            temperature=0,
            extra_body={"ignore_eos": True},
        )
        for body, status, param in (
            ({"prompt": ""}, 400, "prompt"),
            ({"prompt": "x", "max_tokens": -1}, 400, "max_tokens"),
            ({"prompt": "x", "max_tokens": 10**9}, 400, "max_tokens"),
            ({"prompt": "x", "temperature": "hot"}, 400, "temperature"),
            ({"prompt": "x", "oven": 1}, 400, "oven"),
            ({"prompt": "x", "model": "rye"}, 404, "model"),
        ):
            answer = httpx.post(f"{server.url}/v1/completions", json={"model": "smollm2"} | body, timeout=60)
            assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
        answer = httpx.post(f"{server.url}/v1/completions", content=b"{not json", timeout=60)
        assert answer.status_code == 400
        undisturbed = neighbour.result(timeout=60)
    assert undisturbed.usage is not None
    assert undisturbed.usage.completion_tokens == 64


# --- A good guest -------------------------------------------------------------------------------------------


def test_everything_listens_on_loopback_only(server: Server) -> None:
    listening = {
        connection.laddr.ip.removeprefix("::ffff:")
        for process in server.tree()
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening == {"127.0.0.1"}


def test_what_it_says_when_ready_is_enough_to_use_it(server: Server) -> None:
    said = server.log.read_text()
    assert f"curl {server.url}/v1/chat/completions" in said
    assert "dashboard" in said
    assert f"{' '.join(PROGRAM)} monitor --session /" in said
    assert "MiB" in said
    assert "Traceback" not in said


def test_an_interrupt_lets_streams_end_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with running(tmp_path / "log", "--replicas", "2") as server:
        processes = server.tree()
        with ThreadPoolExecutor() as pool:
            stream = pool.submit(read_long_stream, server)
            wait_until(lambda: n_held_blocks(server) > 0, 10, "stream running")
            os.killpg(server.process.pid, signal.SIGINT)  # as a terminal does: to the whole group
            n_tokens, is_done = stream.result(timeout=60)
        assert (n_tokens, is_done) == (200, True)
        assert server.process.wait(STOP_TIMEOUT_S) == 0
        assert gone(processes)
        with socket.socket() as probe:  # nobody listens any more
            assert probe.connect_ex(("127.0.0.1", int(server.url.rsplit(":", 1)[1]))) != 0
        assert "Traceback" not in server.log.read_text()


def read_long_stream(server: Server) -> tuple[int, bool]:
    """How many tokens came, and whether the stream ended in order."""
    body = {
        "model": "smollm2",
        "prompt": "Once upon a time",
        "max_tokens": 200,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
        events = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    usage = json.loads(events[-2])["usage"]
    return usage["completion_tokens"], events[-1] == "[DONE]"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_of_a_server_that_is_killed(tmp_path: Path, number: signal.Signals) -> None:
    with running(tmp_path / "log") as server:
        processes = server.tree()
        os.kill(server.process.pid, number)
        status = server.process.wait(STOP_TIMEOUT_S)
        assert status == (0 if number == signal.SIGTERM else -number)
        wait_until(lambda: gone(processes), 30, "all gone")


def has_started(family: psutil.Process, program: str) -> bool:
    """Whether one of the processes below runs it."""
    for child in family.children(recursive=True):
        with suppress(psutil.Error):  # it has ended meanwhile
            if program in " ".join(child.cmdline()):
                return True
    return False


def said_when_interrupted(log: Path, vital: str, number: signal.Signals) -> tuple[int, list[str]]:
    """The exit status of a server whose whole group gets the signal once `vital` runs, and all that it said."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command("serve", "--port", str(free_port())), stdout=output, stderr=output, start_new_session=True
        )
    family = psutil.Process(process.pid)
    wait_until(lambda: has_started(family, vital), REFUSE_TIMEOUT_S, f"{vital} runs")
    processes = [family, *family.children(recursive=True)]
    os.killpg(process.pid, number)
    status = process.wait(STOP_TIMEOUT_S)
    assert gone(processes)
    return status, log.read_text().splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("vital", ["gcs_server", "raylet", "ray::ServeController"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_while_ray_starts_is_a_quiet_line(tmp_path: Path, vital: str, number: signal.Signals) -> None:
    status, lines = said_when_interrupted(tmp_path / "log", vital, number)
    assert status == 128 + number
    assert lines[-1] == "stopped before anything was served; nothing is left running"
    assert all(line[0] in "…✓" for line in lines[:-1]), lines


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_while_replicas_start_drains_without_a_word_of_ray_s(
    tmp_path: Path, number: signal.Signals
) -> None:
    status, lines = said_when_interrupted(tmp_path / "log", "ServeReplica:bakehouse:Replica", number)
    assert status == 0
    assert "drained" in lines[-1]
    assert all(line[0] in "…✓ " for line in lines), lines  # the blank: of a note that kernels are compiled


@pytest.mark.slow
def test_a_second_interrupt_ends_at_once(tmp_path: Path) -> None:
    with running(tmp_path / "log") as server, ThreadPoolExecutor() as pool:
        processes = server.tree()
        stream = pool.submit(read_long_stream, server)
        wait_until(lambda: n_held_blocks(server) > 0, 10, "stream running")
        os.killpg(server.process.pid, signal.SIGINT)
        wait_until(lambda: "draining" in server.log.read_text(), 30, "draining")
        os.killpg(server.process.pid, signal.SIGINT)
        assert server.process.wait(30) == 130
        assert gone(processes)
        assert isinstance(stream.exception(timeout=10), httpx.TransportError)


# --- Refused at once ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("bakery/no-such-model-anywhere",), "no-such-model-anywhere"),
        (("--kv-memory", "1KiB"), "raise --kv-memory by"),  # known to the replica only, so Ray has been started
        (("--kv-memory", "900TiB"), "this machine's memory is"),
        (("--dtype", "float8"), "model.dtype"),
        (("--chat-template", "absent.jinja"), "absent.jinja"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else value,
)
def test_what_cannot_be_served_is_refused_in_one_line(arguments: tuple[str, ...], complaint: str) -> None:
    assert_refused(command("serve", "--port", str(free_port()), *arguments), complaint)


def test_a_port_in_use_is_refused_in_one_line() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = str(listener.getsockname()[1])
        assert_refused(command("serve", "--port", port), f"port {port} on 127.0.0.1 is in use")


def test_a_wrong_key_in_the_configuration_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "bakehouse.yaml"
    path.write_text("server: {prot: 9000}\n")
    assert_refused(command("serve", "--config", str(path)), "server.prot: unknown key")


def assert_refused(arguments: list[str], complaint: str) -> None:
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    answer = subprocess.run(
        arguments, capture_output=True, text=True, timeout=REFUSE_TIMEOUT_S, check=False, env=environment
    )
    *_stages, last = answer.stderr.strip().splitlines()
    assert answer.returncode not in (0, None)
    assert last.startswith("bakehouse: ")
    assert complaint in last
    assert "Traceback" not in answer.stderr + answer.stdout
