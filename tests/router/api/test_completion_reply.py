"""Pieces of a completion's choices to chunks and whole replies: text, echo, tokens, offsets."""

from collections.abc import Sequence

from bakehouse_replica.core.types import FinishReason, TokenLogprob
from bakehouse_router.api.completion_reply import CompletionShape
from bakehouse_router.api.replies import ChoiceChunk
from bakehouse_router.api.token_json import TokenReport
from bakehouse_router.prompt_run import PromptReport, TextPiece
from bakehouse_router.text.stream import OutputToken

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
SPELLED = {1: b"a", 2: b"b", 3: b"c", 4: b"d", 5: b"", 6: b"\xc4", 7: b"\xc5"}
PROMPT = PromptReport(token_ids=(1, 2), logprobs=(TokenLogprob(logprob=-3.0, rank=9, top=((4, -0.5),)),))


class Names:
    """A vocabulary of a few tokens."""

    def bytes_of(self, token_id: int) -> bytes:
        return SPELLED[token_id]

    def name_of(self, token_id: int) -> str:
        return f"<|{token_id}|>"


def _token(token_id: int, offset: int, *top: tuple[int, float]) -> OutputToken:
    logprob = TokenLogprob(logprob=-1.0, rank=2, top=top)
    return OutputToken(token_id=token_id, text_offset=offset, logprob=logprob)


ECHOED = [
    TextPiece(choice=0, text="ab", tokens=(OutputToken(token_id=1, text_offset=0), _token(2, 1, (4, -0.5)))),
    TextPiece(choice=0, text="c", tokens=(_token(3, 2, (3, -1.0)),)),
    TextPiece(choice=0, text="d", tokens=(_token(4, 3, (3, -0.5)),)),
    TextPiece(choice=0, text="", tokens=(_token(5, 4),), finish=STOP),
]


def _chunks(shape: CompletionShape, pieces: Sequence[TextPiece]) -> list[ChoiceChunk]:
    writer = shape.writer(0, PROMPT)
    return [chunk for piece in pieces for chunk in writer.write(piece)]


def _merged(shape: CompletionShape, chunks: Sequence[ChoiceChunk]) -> ChoiceChunk:
    merger = shape.merger()
    for chunk in chunks:
        merger.add(chunk)
    return merger.whole()


def test_a_completion_is_text_and_then_its_reason() -> None:
    shape = CompletionShape(TokenReport(names=Names()))
    pieces = [TextPiece(choice=0, text="a"), TextPiece(choice=0, text="b", finish=LENGTH)]
    chunks = _chunks(shape, pieces)
    assert [(chunk.choice["text"], chunk.choice["finish_reason"]) for chunk in chunks] == [
        ("a", None),
        ("b", None),
        ("", "length"),
    ]
    assert _merged(shape, chunks).choice == {
        "index": 0,
        "text": "ab",
        "logprobs": None,
        "finish_reason": "length",
    }


def test_c14_offsets_count_from_the_start_of_the_returned_text_prompt_included() -> None:
    shape = CompletionShape(TokenReport(names=Names(), n_top=1, echoes=True))
    chunks = _chunks(shape, ECHOED)
    streamed = [chunk.choice["logprobs"]["text_offset"] for chunk in chunks]  # type: ignore[index]
    assert streamed == [[0, 1], [2], [3], [4]]
    whole = _merged(shape, chunks).choice
    assert whole["text"] == "abcd"
    assert whole["logprobs"] == {
        "tokens": ["a", "b", "c", "d", "<|5|>"],
        "token_logprobs": [None, -1.0, -1.0, -1.0, -1.0],
        "top_logprobs": [
            None,
            {"d": -0.5, "b": -1.0},
            {"c": -1.0},
            {"c": -0.5, "d": -1.0},
            {"<|5|>": -1.0},
        ],
        "text_offset": [0, 1, 2, 3, 4],
    }


def test_of_alternatives_that_read_alike_the_likeliest_is_shown() -> None:
    shape = CompletionShape(TokenReport(names=Names(), n_top=2))
    piece = TextPiece(choice=0, text="a", tokens=(_token(1, 0, (6, -0.1), (7, -0.2)),), finish=STOP)
    logprobs = _merged(shape, _chunks(shape, [piece])).choice["logprobs"]
    assert logprobs["top_logprobs"] == [{"\ufffd": -0.1, "a": -1.0}]  # type: ignore[index]


def test_token_ids_are_those_of_the_answer_and_the_prompt_has_its_own() -> None:
    shape = CompletionShape(TokenReport(names=Names(), shows_ids=True, echoes=True))
    chunks = _chunks(shape, ECHOED)
    assert [chunk.choice["token_ids"] for chunk in chunks] == [[], [3], [4], [5]]
    assert chunks[0].choice["prompt_token_ids"] == (1, 2)
    assert all("prompt_token_ids" not in chunk.choice for chunk in chunks[1:])
    whole = _merged(shape, chunks).choice
    assert (whole["token_ids"], whole["prompt_token_ids"]) == ([3, 4, 5], (1, 2))


def test_prompt_log_probabilities_stand_in_each_choice_by_token_id() -> None:
    shape = CompletionShape(TokenReport(names=Names(), n_prompt_top=1))
    chunks = _chunks(shape, [TextPiece(choice=0, text="c", finish=STOP)])
    expected = [
        None,
        {
            "2": {"logprob": -3.0, "rank": 9, "decoded_token": "b"},
            "4": {"logprob": -0.5, "rank": 1, "decoded_token": "d"},
        },
    ]
    assert chunks[0].choice["prompt_logprobs"] == expected
    assert _merged(shape, chunks).choice["prompt_logprobs"] == expected


def test_c25_an_echo_without_output_is_the_prompt() -> None:
    shape = CompletionShape(TokenReport(names=Names(), echoes=True))
    chunks = _chunks(shape, [TextPiece(choice=0, text="ab", finish=LENGTH)])
    whole = _merged(shape, chunks).choice
    assert (whole["text"], whole["finish_reason"]) == ("ab", "length")


def test_what_is_known_of_the_prompt_waits_for_the_first_chunk() -> None:
    shape = CompletionShape(TokenReport(names=Names(), shows_ids=True))
    pieces = [TextPiece(choice=0, text="", tokens=(_token(6, 0),)), TextPiece(choice=0, text="c", finish=STOP)]
    first, _ = _chunks(shape, pieces)
    assert (first.choice["prompt_token_ids"], first.choice["token_ids"]) == ((1, 2), [6])
