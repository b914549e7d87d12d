"""Trace files: four kinds of prompts, with times or without, and one-line errors."""

from pathlib import Path
from random import Random

import pytest
from bakehouse_cluster.bench.traces import read_trace, require_sendable
from bakehouse_cluster.bench.workloads import Demand, Messages
from bakehouse_replica.core.errors import StartupError

WHOLE = """\
{"arrival_s": 0.0, "input_tokens": 120, "output_tokens": 64}
{"arrival_s": 0.4, "prompt": "Once upon a time", "output_tokens": 16}

{"arrival_s": 1.1, "token_ids": [504, 253, 18], "output_tokens": 8}
{"arrival_s": 1.1, "messages": [{"role": "user", "content": "Hello"}], "output_tokens": 9}
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "trace.jsonl"
    path.write_text(text)
    return path


def test_each_line_is_a_request_in_the_files_order(tmp_path: Path) -> None:
    path = write(tmp_path, WHOLE)
    trace = read_trace(path)
    assert trace.has_times
    assert trace.demands(trace.n_requests, Random(0)) == (
        Demand(arrival_s=0.0, n_input=120, n_output=64, origin=f"trace {path}, line 1"),
        Demand(arrival_s=0.4, given="Once upon a time", n_output=16, origin=f"trace {path}, line 2"),
        Demand(arrival_s=1.1, given=(504, 253, 18), n_output=8, origin=f"trace {path}, line 4"),
        Demand(arrival_s=1.1, given=Messages((("user", "Hello"),)), n_output=9, origin=f"trace {path}, line 5"),
    )


@pytest.mark.parametrize(
    ("is_chat", "complaint"),
    [(False, "line 5: messages need --chat"), (True, "line 4: token_ids cannot be asked in a chat")],
)
def test_a_prompt_that_the_api_does_not_take_is_refused_by_its_line(
    tmp_path: Path, is_chat: bool, complaint: str
) -> None:
    with pytest.raises(StartupError, match=complaint):
        require_sendable(read_trace(write(tmp_path, WHOLE)), is_chat=is_chat)


def test_more_requests_than_lines_begin_from_the_top_again(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, WHOLE))
    assert [one.n_output for one in trace.demands(6, Random(0))] == [64, 16, 8, 9, 64, 16]


def test_a_trace_is_known_by_its_content(tmp_path: Path) -> None:
    first = read_trace(write(tmp_path, WHOLE)).parameters()
    assert read_trace(write(tmp_path, WHOLE)).parameters() == first
    assert read_trace(write(tmp_path, WHOLE.replace("120", "121"))).parameters() != first


def test_times_may_be_left_out_of_all_lines(tmp_path: Path) -> None:
    assert not read_trace(write(tmp_path, '{"input_tokens": 1, "output_tokens": 1}\n')).has_times


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\n", "no requests in it"),
        ("{}", "line 1: output_tokens: Field required"),
        (
            '{"output_tokens": 1}',
            "line 1: Value error, needs exactly one of input_tokens, prompt, token_ids, messages",
        ),
        ('{"output_tokens": 1, "prompt": "a", "input_tokens": 1}', "line 1: Value error, needs exactly one of"),
        (
            '\n{"output_tokens": 0, "input_tokens": 1}',
            "line 2: output_tokens: Input should be greater than or equal",
        ),
        (
            '{"output_tokens": 1, "input_tokens": 1, "arival_s": 1}',
            "line 1: arival_s: Extra inputs are not permitted",
        ),
        ("{", "line 1: Invalid JSON"),
        (
            '{"output_tokens": 1, "input_tokens": 1, "arrival_s": 1}\n{"output_tokens": 1, "input_tokens": 1}',
            "arrival_s stands in some lines and not in others",
        ),
        (
            '{"output_tokens": 1, "input_tokens": 1, "arrival_s": 1}\n'
            '{"output_tokens": 1, "input_tokens": 1, "arrival_s": 0}',
            "arrival_s falls",
        ),
    ],
)
def test_a_wrong_trace_is_refused_by_its_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(StartupError) as refused:
        read_trace(write(tmp_path, text))
    assert message in refused.value.message
    assert "\n" not in refused.value.message


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"no\.jsonl: No such file or directory"):
        read_trace(tmp_path / "no.jsonl")
