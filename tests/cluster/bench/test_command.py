"""`bakehouse bench` as a command, against a whole server on a scripted model, one token a byte."""

import asyncio
import json
import signal
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
import pytest_asyncio
from bakehouse_cluster.bench.records import Outcome
from bakehouse_cluster.bench.result import Result, read_result
from scripted import ScriptedServer, saying, scripted_server, until
from servers import command

WAIT_S = 120.0
NEVER_ENDS = {"pieces": ["x"], "default": {"pieces": ["x"]}, "max_model_len": 2048}
FIXED = ("--requests", "6", "--input-tokens", "20", "--output-tokens", "5", "--warmup", "2")


@pytest_asyncio.fixture
async def server() -> AsyncGenerator[ScriptedServer, None]:
    async with scripted_server(NEVER_ENDS) as running:
        yield running


async def begin(*arguments: str) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(*command("bench", *arguments), stdout=pipe, stderr=pipe)


async def bench(*arguments: str) -> tuple[int | None, str, str]:
    """Exit status, standard output and standard error."""
    process = await begin(*arguments)
    output, errors = await process.communicate()
    return process.returncode, output.decode(), errors.decode()


async def measure(server: ScriptedServer, folder: Path, *arguments: str) -> Result:
    path = folder / "result.json"
    status, _, errors = await bench("--url", server.url, "--output", str(path), *arguments)
    assert status == 0, errors
    return read_result(path)


async def test_each_load_is_warmed_up_and_measured_with_the_exact_lengths(
    server: ScriptedServer, tmp_path: Path
) -> None:
    result = await measure(server, tmp_path, "--concurrency", "1,3", *FIXED)
    assert [point.load.value for point in result.points] == [1, 3]
    for point in result.points:
        assert point.summary.outcomes[Outcome.OK] == 6
        assert (point.summary.n_input_tokens, point.summary.n_output_tokens) == (120, 30)
        assert (point.summary.n_input_other, point.summary.n_cached_tokens) == (0, 0)
    requests = server.client.requests
    assert len(requests) == 2 * (2 + 6)
    assert {len(request.prompt_ids) for request in requests} == {20}
    assert {request.params.max_tokens for request in requests} == {5}
    assert {request.params.temperature for request in requests} == {0.0}
    assert len({request.prompt_ids for request in requests}) == len(requests)


async def test_text_and_ids_are_the_same_prompts_and_prefixes_are_shared_with_the_warm_up(
    server: ScriptedServer, tmp_path: Path
) -> None:
    lengths = ("--prefix-tokens", "64", "--input-tokens", "16", "--output-tokens", "2", "--requests", "4")
    workload = ("--workload", "shared-prefix", "--concurrency", "1", "--warmup", "1", *lengths)
    for form in ("text", "ids"):
        result = await measure(server, tmp_path, *workload, "--prompt", form)
    asked = [request.prompt_ids for request in server.client.requests]
    assert asked[:5] == asked[5:]
    assert len({ids[:64] for ids in asked}) == 1
    assert len({ids[64:] for ids in asked}) == 5
    assert result.points[0].warmup.endswith("which begin with 1 of the 1 shared prefixes")


async def test_a_trace_is_sent_at_its_times_as_chats_too(server: ScriptedServer, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [
        {"arrival_s": 0.2, "input_tokens": 9, "output_tokens": 3},
        {"arrival_s": 0.4, "messages": [{"role": "user", "content": "Hello"}], "output_tokens": 4},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    result = await measure(server, tmp_path, "--workload", "trace", "--trace", str(path), "--chat", "--speed", "2")
    (point,) = result.points
    assert point.summary.outcomes[Outcome.OK] == 2
    assert point.summary.n_output_tokens == 7
    assert point.summary.duration_s >= 0.1
    assert (result.work.api, result.work.kind) == ("chat", "trace")


async def test_random_arrivals_and_counts_in_each_frame(server: ScriptedServer, tmp_path: Path) -> None:
    result = await measure(server, tmp_path, "--rate", "50", "--frame-usage", *FIXED)
    (point,) = result.points
    assert point.load.kind == "rate"
    assert point.summary.outcomes[Outcome.OK] == 6


async def test_a_short_answer_is_never_taken_for_a_whole_one(tmp_path: Path) -> None:
    async with scripted_server(saying("a", "b")) as server:
        path = tmp_path / "result.json"
        _, output, _ = await bench(
            "--url", server.url, "--extra-body", '{"ignore_eos": null}', "--output", str(path), *FIXED
        )
    (point,) = read_result(path).points
    assert point.summary.outcomes[Outcome.SHORT] == 6
    assert "6 times: answered with 3 tokens where 5 were asked for" in " ".join(output.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "other"), "does not serve 'other'; it serves scripted"),
        (("--extra-body", '{"foo": 1}'), "the server answered no request of the warm-up: HTTP 400: "),
        (("--workload", "W9"), "--workload W9: unknown; there are W1, W2, W3, W4, fixed, "),
        (("--extra-body", '{"a": "\\ud800"}'), "--extra-body "),
        (("--output", "/proc/r.json"), "/proc/r.json cannot be written: No such file or directory"),
        (("--output", "/nowhere/r.json"), "/nowhere/r.json: there is no folder /nowhere"),
        (("--url", "http://127.0.0.1:1"), "no server answers at http://127.0.0.1:1: Connection refused"),
    ],
)
async def test_what_cannot_be_measured_is_one_line(
    server: ScriptedServer, arguments: tuple[str, ...], message: str
) -> None:
    status, output, errors = await bench("--url", server.url, *arguments)
    assert (status, output) == (1, "")
    assert errors.splitlines()[-1].startswith("bakehouse: ")
    assert message in errors.splitlines()[-1]


async def test_a_trace_with_messages_is_refused_by_its_line_before_anything_is_sent(
    server: ScriptedServer, tmp_path: Path
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "Hello"}], "output_tokens": 4}')
    status, _, errors = await bench("--url", server.url, "--workload", "trace", "--trace", str(path))
    assert (status, errors) == (1, f"bakehouse: trace {path}, line 1: messages need --chat\n")
    assert not server.client.requests


async def test_a_measurement_without_any_answer_is_kept_and_fails(server: ScriptedServer, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    status, output, errors = await bench(
        "--url", server.url, "--output", str(path), *FIXED, "--warmup", "0", "--extra-body", '{"foo": 1}'
    )
    assert status == 1
    assert errors.splitlines()[-1].startswith(f"bakehouse: {server.url} answered no request")
    assert "6 times: HTTP 400: " in output
    assert read_result(path).points[0].summary.outcomes[Outcome.ERROR] == 6


async def test_ctrl_c_tells_what_was_measured_and_that_it_is_partial(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    many = ("--requests", "200", "--output-tokens", "50")
    async with scripted_server(NEVER_ENDS | {"step_ms": 5}) as server:
        process = await begin("--url", server.url, "--output", str(path), *FIXED, *many)
        await until(lambda: len(server.client.requests) > 30, WAIT_S)  # of 8 at once, so some have ended
        process.send_signal(signal.SIGINT)
        output, _ = await process.communicate()
    assert process.returncode == 130
    assert b"interrupted: this is partial" in output
    result = read_result(path)
    assert result.is_partial
    assert 0 < result.points[0].summary.n_requests < 200


async def test_compare_fails_below_a_ratio(server: ScriptedServer, tmp_path: Path) -> None:
    await measure(server, tmp_path, *FIXED)
    path = str(tmp_path / "result.json")
    assert (await bench("compare", path, path, "--fail-below", "1"))[0] == 0
    status, output, _ = await bench("compare", path, path, "--fail-below", "1.01")
    assert status == 1
    assert "below 1.01 times the first's output tok/s" in output
