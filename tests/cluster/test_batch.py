"""Batch files: what a line may be, how it is answered, and how a run goes on where an earlier one stopped."""

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from bakehouse_cluster.batch import Line, answer_all, answered_keys, count_lines, read_lines
from bakehouse_cluster.config import parse_config
from bakehouse_cluster.generating import generate
from bakehouse_replica.core.errors import EngineDead, StartupError
from bakehouse_replica.core.types import ModelSource
from bakehouse_router.dispatch import Dispatcher
from bakehouse_router.gateway import Gateway
from bakehouse_router.settings import GatewaySettings
from gateways import MODEL, ScriptedDispatcher, fake_engine, tiny_text
from rich.console import Console

Json = dict[str, object]


def lines_of(*objects: object) -> Iterator[Line]:
    for number, fields in enumerate(objects, start=1):
        custom_id = fields.get("custom_id") if isinstance(fields, dict) else None
        text = fields if isinstance(fields, str) else "" if isinstance(fields, bytes) else json.dumps(fields)
        content = fields if isinstance(fields, bytes) else text.encode()
        yield Line(number=number, custom_id=custom_id if isinstance(custom_id, str) else None, content=content)


async def answers(gateway: Gateway, *objects: object, n_in_flight: int = 4) -> tuple[list[Json], int]:
    """The records in the order of the lines' keys, and the number of errors."""
    output = io.StringIO()
    n_answered = 0

    def count() -> None:
        nonlocal n_answered
        n_answered += 1

    n_errors = await answer_all(gateway, lines_of(*objects), output, n_in_flight=n_in_flight, on_answer=count)
    records: list[Json] = [json.loads(text) for text in output.getvalue().splitlines()]
    assert n_answered == len(records) == len(objects)
    return sorted(records, key=lambda record: str(record.get("line", record.get("custom_id")))), n_errors


def gateway_over(dispatcher: ScriptedDispatcher, folder: Path) -> Gateway:
    return Gateway(GatewaySettings(source=ModelSource(model=MODEL)), dispatcher, tiny_text(folder))


@pytest.fixture
def scripted(tmp_path: Path) -> Gateway:
    """Answers everything with "bread"."""
    return gateway_over(ScriptedDispatcher(script=("bread",)), tmp_path)


async def test_plain_lines_are_answered_with_text_reason_and_usage(scripted: Gateway) -> None:
    records, n_errors = await answers(
        scripted, {"prompt": "a"}, {"messages": [{"role": "user", "content": "a"}]}, {"prompt": [5, 6]}
    )
    assert n_errors == 0
    assert [(record["line"], record["text"], record["finish_reason"]) for record in records] == [
        (1, "bread", "length"),
        (2, "bread", "length"),
        (3, "bread", "length"),
    ]
    assert records[2]["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 5,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_a_plain_line_may_carry_an_id_of_its_own(scripted: Gateway) -> None:
    records, _ = await answers(scripted, {"custom_id": "rye", "prompt": "a"})
    assert records[0]["custom_id"] == "rye"
    assert "line" not in records[0]


async def test_batch_lines_are_answered_as_openai_does(scripted: Gateway) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "a"}]}
    line = {"custom_id": "rye", "method": "POST", "url": "/v1/chat/completions", "body": body}
    records, n_errors = await answers(scripted, line)
    assert n_errors == 0
    (record,) = records
    assert (record["custom_id"], record["error"]) == ("rye", None)
    response = record["response"]
    assert isinstance(response, dict)
    assert response["status_code"] == 200
    assert response["request_id"] == record["id"]
    assert response["body"]["object"] == "chat.completion"
    assert response["body"]["choices"][0]["message"]["content"] == "bread"


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{torn", "not valid JSON"),
        ("[1]", "it must be an object"),
        ({}, "either prompt or messages"),
        ({"prompt": "a", "messages": []}, "either prompt or messages"),
        ({"prompt": "a", "n": 2}, "n must be 1"),
        ({"prompt": ["a", "b"]}, "prompt must be one prompt"),
        ({"prompt": "a", "stream": True}, "stream is true"),
        ({"prompt": "a", "oven": 1}, "unsupported field: oven"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens is 0"),
        ({"prompt": "a", "max_tokens": 10**6}, "max_tokens"),
    ],
)
async def test_a_wrong_plain_line_is_answered_by_its_error_and_the_next_goes_on(
    scripted: Gateway, line: object, complaint: str
) -> None:
    records, n_errors = await answers(scripted, line, {"prompt": "a"})
    assert n_errors == 1
    error = records[0]["error"]
    assert isinstance(error, dict)
    assert complaint in error["message"]
    assert records[1]["text"] == "bread"


@pytest.mark.parametrize(
    ("changes", "status", "complaint"),
    [
        ({"url": "/v1/embeddings"}, 400, "url is '/v1/embeddings'"),
        ({"method": "GET"}, 400, "method is 'GET'"),
        ({"body": 3}, 400, "body must be a JSON object"),
        ({"body": {"model": "rye", "prompt": "a"}}, 404, "'rye' is not served"),
        ({"body": {"model": MODEL}}, 400, "prompt is required"),
    ],
)
async def test_a_wrong_batch_line_is_answered_with_its_status(
    scripted: Gateway, changes: Json, status: int, complaint: str
) -> None:
    line = {"custom_id": "x", "method": "POST", "url": "/v1/completions", "body": {"model": MODEL, "prompt": "a"}}
    records, n_errors = await answers(scripted, line | changes)
    assert n_errors == 1
    response = records[0]["response"]
    assert isinstance(response, dict)
    assert response["status_code"] == status
    assert complaint in response["body"]["error"]["message"]


async def test_a_batch_line_without_an_id_is_known_by_its_number(scripted: Gateway) -> None:
    records, n_errors = await answers(
        scripted, {"url": "/v1/completions", "body": {"model": MODEL, "prompt": "a"}}
    )
    assert n_errors == 1
    assert records[0]["line"] == 1


async def test_a_dead_engine_ends_the_run_instead_of_filling_the_file_with_errors(tmp_path: Path) -> None:
    gateway = gateway_over(ScriptedDispatcher(script=(EngineDead("the engine has died"),)), tmp_path)
    output = io.StringIO()
    with pytest.raises(EngineDead):
        await answer_all(gateway, lines_of(*[{"prompt": "a"}] * 3), output, n_in_flight=2, on_answer=lambda: None)
    assert output.getvalue() == ""


async def test_no_more_lines_are_in_flight_than_allowed_and_all_share_the_batch(tmp_path: Path) -> None:
    batch_sizes: list[int] = []
    async with fake_engine(before_step=lambda plan: batch_sizes.append(len(plan.chunks))) as engine:
        gateway = Gateway(
            GatewaySettings(source=ModelSource(model=MODEL)), Dispatcher(engine), tiny_text(tmp_path)
        )
        prompts = [{"prompt": f"loaf {number}", "max_tokens": 12, "ignore_eos": True} for number in range(20)]
        records, n_errors = await answers(gateway, *prompts, n_in_flight=5)
    assert n_errors == 0
    assert len(records) == 20
    assert 2 <= max(batch_sizes) <= 5


def written(folder: Path, text: str) -> Path:
    path = folder / "file.jsonl"
    path.write_text(text)
    return path


def test_blank_lines_are_no_lines_but_count_in_the_numbering(tmp_path: Path) -> None:
    path = written(tmp_path, '{"prompt": "a"}\n\n{"custom_id": "rye", "prompt": "b"}\n')
    assert [(line.number, line.key) for line in read_lines(path)] == [(1, 1), (3, "rye")]
    assert count_lines(path) == 2


def test_an_id_that_stands_twice_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, '{"custom_id": "rye"}\n{"custom_id": "rye"}\n')
    with pytest.raises(StartupError, match=r"custom_id 'rye' stands in lines 1 and 2$"):
        count_lines(path)


def test_a_missing_input_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"absent\.jsonl: No such file"):
        count_lines(tmp_path / "absent.jsonl")


async def test_a_line_that_is_not_utf_8_is_answered_by_its_error_and_the_others_go_on(scripted: Gateway) -> None:
    records, n_errors = await answers(scripted, b'{"prompt": "\xff"}', {"prompt": "a"})
    assert n_errors == 1
    assert "not UTF-8" in json.dumps(records[0]["error"])
    assert records[1]["text"] == "bread"


@pytest.mark.parametrize("path", [Path("/dev/full"), Path("/tmp")])
def test_an_output_that_is_no_regular_file_is_refused(path: Path) -> None:
    with pytest.raises(StartupError, match=f"{path} is not a regular file"):
        answered_keys(path)


def test_a_first_run_has_no_answers_yet(tmp_path: Path) -> None:
    assert answered_keys(tmp_path / "absent.jsonl") == set()


def test_answers_of_an_earlier_run_are_found_and_a_torn_last_line_is_taken_away(tmp_path: Path) -> None:
    whole = '{"line": 2, "text": "b"}\n{"custom_id": "rye", "response": {}}\n'
    path = written(tmp_path, whole + '{"line": 3, "te')
    assert answered_keys(path) == {2, "rye"}
    assert path.read_text() == whole


@pytest.mark.parametrize("torn", ["{", '{"li', '{"id": "batch-7f", "custom_id": "ry'])
def test_however_short_a_torn_answer_is_it_is_taken_away(tmp_path: Path, torn: str) -> None:
    path = written(tmp_path, '{"line": 1, "text": "a"}\n' + torn)
    assert answered_keys(path) == {1}
    assert path.read_text() == '{"line": 1, "text": "a"}\n'


@pytest.mark.parametrize("content", ["no newline at all", '{"line": 1}\n{"prompt": "mine"}'])
def test_a_last_line_that_is_no_answer_is_left_alone_and_refused(tmp_path: Path, content: str) -> None:
    path = written(tmp_path, content)
    with pytest.raises(StartupError, match="its last line is not an answer of an earlier run"):
        answered_keys(path)
    assert path.read_text() == content


def test_the_input_is_refused_as_output(tmp_path: Path) -> None:
    path = written(tmp_path, '{"prompt": "a"}\n')
    with pytest.raises(StartupError, match="--output is the same file as --input"):
        generate(parse_config({}), path, path, Console(stderr=True))
    assert path.read_text() == '{"prompt": "a"}\n'


def test_a_file_that_is_no_output_is_left_alone_and_refused(tmp_path: Path) -> None:
    path = written(tmp_path, "a poem\nby somebody\n")
    with pytest.raises(StartupError, match="line 1 is not an answer of an earlier run"):
        answered_keys(path)
    assert path.read_text() == "a poem\nby somebody\n"
