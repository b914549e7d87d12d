"""A script's file: what it means, and how a wrong one is refused."""

import json
from pathlib import Path

import pytest
from bakehouse_replica.core.errors import StartupError
from bakehouse_replica.script import N_BYTES, parse_script, read_script

GOOD: dict[str, object] = {
    "pieces": ["</s>", "b", {"bytes": "c48f"}, {"special": "<|x|>"}],
    "eos": 0,
    "replies": [
        {"when": "^one", "ids": [1, 2]},
        {"when": "two", "pieces": ["b", {"bytes": "c4"}], "logprobs": [[[1, -0.1], [2, -3]], None]},
    ],
    "default": {"pieces": ["b", "b"]},
}


def test_the_vocabulary_is_the_pieces_and_then_the_bytes() -> None:
    script = parse_script(GOOD)
    spelled = script.token_bytes()
    assert spelled[:4] == [b"</s>", b"b", "ď".encode(), b"<|x|>"]
    assert spelled[4:] == [bytes([byte]) for byte in range(256)]
    assert script.vocabulary_size == len(spelled) == 4 + N_BYTES


def test_the_end_of_sequence_and_special_pieces_add_nothing_to_an_output() -> None:
    vocabulary = parse_script(GOOD).vocabulary()
    assert [vocabulary.bytes_of(token_id) for token_id in range(5)] == [b"", b"b", "ď".encode(), b"", b"\0"]
    assert [vocabulary.name_of(token_id) for token_id in (0, 3)] == ["</s>", "<|x|>"]
    assert parse_script(GOOD | {"eos": None}).vocabulary().bytes_of(0) == b"</s>"


def test_replies_are_chosen_by_the_prompt_and_else_the_default_answers() -> None:
    script = parse_script(GOOD)
    assert [reply.token_ids for reply in script.replies_to("one two")] == [(1, 2), (1, 4 + 0xC4)]
    assert [reply.token_ids for reply in script.replies_to("not one")] == [(1, 1)]


def test_after_its_last_token_a_reply_wants_the_end_or_without_one_the_last_token_again() -> None:
    script = parse_script(GOOD)
    reply = script.replies_to("one")[0]
    assert [script.wanted_id(reply, index) for index in range(5)] == [1, 2, 0, 0, 0]
    endless = parse_script(GOOD | {"eos": None})
    assert [endless.wanted_id(reply, index) for index in range(5)] == [1, 2, 2, 2, 2]


def test_the_last_preference_holds_for_all_later_tokens() -> None:
    assert parse_script(GOOD).preferred_ids(7) == ()
    script = parse_script(GOOD | {"prefer": [[1], [3, 2]]})
    assert [script.preferred_ids(index) for index in (0, 1, 2, 9)] == [(1,), (3, 2), (3, 2), (3, 2)]


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "bun.json"
    path.write_text(json.dumps(GOOD | {"step_ms": 2, "tokens_per_step": 3, "raise_at": 4, "max_model_len": 99}))
    script = read_script(path)
    assert (script.step_s, script.tokens_per_step, script.raise_at, script.stall_at) == (0.002, 3, 4, None)
    assert (script.max_model_len, script.chat_template) == (99, None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"zoo": 1}, r"^zoo: unknown key$"),
        ({"pieces": ["a", ""]}, r"^pieces\[1\]: a piece is a text"),
        ({"pieces": ["a", "a"]}, r"^pieces\[1\]: the same as pieces\[0\]$"),
        ({"pieces": ["a", {"bytes": "abc"}]}, r"^pieces\[1\]: 'abc' is not an even number"),
        ({"pieces": ["a", {"bytes": "ab", "special": "x"}]}, r"^pieces\[1\]: a piece is"),
        ({"pieces": ["\ud800"]}, r"^pieces\[0\]: half of a surrogate pair"),
        ({"eos": 4}, r"^eos: 4 is not the index of one of the 4 pieces$"),
        ({"eos": None, "default": None}, r"^default: an empty reply needs an eos$"),
        ({"replies": [{"ids": [1]}]}, r"^replies\[0\]\.when: required$"),
        ({"replies": [{"when": "(", "ids": [1]}]}, r"^replies\[0\]\.when: '\(' is not a regular expression"),
        ({"replies": [{"when": "a", "ids": [1], "sum": 2}]}, r"^replies\[0\]\.sum: unknown key$"),
        ({"replies": [{"when": "a"}]}, r"^replies\[0\]: a reply has either ids or pieces$"),
        (
            {"replies": [{"when": "a", "pieces": ["b", "zz"]}]},
            r"^replies\[0\]\.pieces\[1\]: 'zz' is not in pieces$",
        ),
        ({"replies": [{"when": "a", "pieces": ["x"]}]}, r"^replies\[0\]\.pieces\[0\]: 'x' is not in pieces$"),
        ({"default": {"ids": [260]}}, r"^default\.ids: token id 260 is not between 0 and 259$"),
        ({"default": {"ids": [1.5]}}, r"^default\.ids\[0\]: it must be a valid integer"),
        ({"default": {"ids": [1], "logprobs": [[[1, 0.5]]]}}, r"^default\.logprobs\[0\]: a position is null or"),
        ({"default": {"ids": [1], "logprobs": [[[1, -(10**400)]]]}}, r"^default\.logprobs\[0\]: a position is"),
        (
            {"default": {"ids": [1], "logprobs": [[[1, -0.1], [2, -0.1]]]}},
            r"^default\.logprobs\[0\]: the prob.*1\.81",
        ),
        ({"default": {"ids": [1], "logprobs": [[[1, -1], [1, -1]]]}}, r"^default\.logprobs\[0\]: a token stands"),
        ({"default": {"ids": [1], "logprobs": [None, [[999, -1]]]}}, r"^default\.logprobs\[1\]: token id 999"),
        ({"default": {"ids": [1], "logprobs": [None] * 3}}, r"^default\.logprobs: 3 positions for 1 tokens"),
        ({"prefer": [[1], [-1]]}, r"^prefer\[1\]: token id -1 is not"),
        ({"raise_at": -1}, r"^raise_at: it must be greater than or equal to 0"),
        ({"stall_at": True}, r"^stall_at: it must be a valid integer"),
        ({"tokens_per_step": 0}, r"^tokens_per_step: it must be"),
        ({"step_ms": "1"}, r"^step_ms: it must be"),
        ({"max_model_len": 1}, r"^max_model_len: it must be"),
    ],
)
def test_a_wrong_script_is_refused_with_the_place_that_is_wrong(change: dict[str, object], message: str) -> None:
    with pytest.raises(StartupError, match=message) as refusal:
        parse_script(GOOD | change)
    assert "\n" not in refusal.value.message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[1, 2", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[1, 2]", "the file: it must be a JSON object"),
        (b"{}", "pieces: required"),
    ],
)
def test_a_file_that_is_no_script_is_refused_by_its_name(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bun.json"
    path.write_bytes(content)
    with pytest.raises(StartupError, match=message) as refusal:
        read_script(path)
    assert "bun.json" in refusal.value.message
    assert "\n" not in refusal.value.message


def test_a_missing_file_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"gone\.json: No such file"):
        read_script(tmp_path / "gone.json")
