"""What `LLM` takes: prompts, conversations and stops in every right form, and nothing else."""

import pytest
from bakehouse_cluster.outputs import as_conversations, as_prompts, as_stops
from bakehouse_replica.core.errors import InvalidRequest

TURN = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ("a", ["a"]),
        ([1, 2], [(1, 2)]),
        ((1, 2), [(1, 2)]),
        (["a", [1, 2], (3,)], ["a", (1, 2), (3,)]),
        ([], []),
    ],
)
def test_prompts_are_texts_or_token_ids(prompts: object, expected: list[object]) -> None:
    assert as_prompts(prompts) == expected


@pytest.mark.parametrize(
    "prompts", [None, 5, b"a", [True], [None], [b"a"], ["a", 5], [[1, "a"]], "\ud800", ["\ud800"]]
)
def test_anything_else_is_refused(prompts: object) -> None:
    with pytest.raises(InvalidRequest) as refused:
        as_prompts(prompts)
    assert refused.value.param == "prompts"


def test_conversations_are_lists_of_messages() -> None:
    assert as_conversations([TURN]) == [[TURN]]
    assert as_conversations([[TURN], [TURN]]) == [[TURN], [TURN]]


@pytest.mark.parametrize("messages", [None, "hi", TURN, ["hi"], [[TURN], "hi"]])
def test_other_conversations_are_refused(messages: object) -> None:
    with pytest.raises(InvalidRequest) as refused:
        as_conversations(messages)
    assert refused.value.param == "messages"


def test_stops_are_strings() -> None:
    assert as_stops(None) == ()
    assert as_stops("a") == ("a",)
    assert as_stops(["a", "b"]) == ("a", "b")


@pytest.mark.parametrize("stop", [5, [5], b"a", {"a": 1}, [None]])
def test_other_stops_are_refused(stop: object) -> None:
    with pytest.raises(InvalidRequest) as refused:
        as_stops(stop)
    assert refused.value.param == "stop"
