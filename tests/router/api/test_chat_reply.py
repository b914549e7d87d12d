"""Pieces of a chat's choices to chunks and whole replies: content, calls, tokens, finish reasons."""

import json
from collections.abc import Sequence

import pytest
from bakehouse_replica.core.types import FinishReason, TokenLogprob
from bakehouse_router.api.chat_reply import ChatShape
from bakehouse_router.api.replies import ChoiceChunk
from bakehouse_router.api.token_json import TokenReport
from bakehouse_router.prompt_run import PromptReport, TextPiece
from bakehouse_router.text.stream import OutputToken
from bakehouse_router.text.tools.parser import CallDelta, ContentDelta, ParsedDelta

Json = dict[str, object]

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
PROMPT = PromptReport(token_ids=(7, 8), logprobs=(TokenLogprob(logprob=-0.5, rank=1, top=((8, -0.5),)),))
SPELLED = {1: b"Hi", 2: b" y", 3: b"\xc4", 4: b"\x8f", 5: b"", 7: b"p", 8: b"q"}
CALL_MARK, CALL_END = "<", ">"


class Names:
    """A vocabulary of a few tokens."""

    def bytes_of(self, token_id: int) -> bytes:
        return SPELLED[token_id]

    def name_of(self, token_id: int) -> str:
        return f"<|{token_id}|>"


class MarkedCalls:
    """Reads `<name{...}>` as a call; holds a call back until its name is whole."""

    def __init__(self) -> None:
        self.is_complete = False
        self.n_calls = 0
        self._held: str | None = None
        self._is_in_call = False

    def feed(self, text: str) -> list[ParsedDelta]:
        return [delta for character in text for delta in self._step(character)]

    def finish(self) -> list[ParsedDelta]:
        return [] if self._held is None else [ContentDelta(text=CALL_MARK + self._held)]

    def _step(self, character: str) -> list[ParsedDelta]:
        if self._held is not None:
            if character != "{":
                self._held += character
                return []
            name, self._held, self._is_in_call = self._held, None, True
            self.n_calls += 1
            return [CallDelta(index=self.n_calls - 1, call_id=f"call-{self.n_calls}", name=name, arguments="{")]
        if character == CALL_MARK:
            self._held = ""
            return []
        if character == CALL_END and self._is_in_call:
            self._is_in_call = False
            return []
        if self._is_in_call:
            return [CallDelta(index=self.n_calls - 1, arguments=character)]
        return [ContentDelta(text=character)]


def _token(token_id: int, offset: int = 0, *top: tuple[int, float]) -> OutputToken:
    logprob = TokenLogprob(logprob=-1.0, rank=2, top=top)
    return OutputToken(token_id=token_id, text_offset=offset, logprob=logprob)


def _pieces(*texts: str, finish: FinishReason = STOP) -> list[TextPiece]:
    ends = [*([None] * (len(texts) - 1)), finish]
    return [TextPiece(choice=0, text=text, finish=end) for text, end in zip(texts, ends, strict=True)]


def _chunks(shape: ChatShape, pieces: Sequence[TextPiece], choice: int = 0) -> list[ChoiceChunk]:
    writer = shape.writer(choice, PROMPT)
    return [chunk for piece in pieces for chunk in writer.write(piece)]


def _merged(shape: ChatShape, chunks: Sequence[ChoiceChunk]) -> ChoiceChunk:
    merger = shape.merger()
    for chunk in chunks:
        merger.add(chunk)
    return merger.whole()


def _deltas(chunks: Sequence[ChoiceChunk]) -> list[object]:
    return [chunk.choice["delta"] for chunk in chunks]


def _whole(shape: ChatShape, pieces: Sequence[TextPiece]) -> Json:
    return _merged(shape, _chunks(shape, pieces)).choice


PLAIN = ChatShape(TokenReport(names=Names()))
TOOLS = ChatShape(TokenReport(names=Names()), MarkedCalls)


def test_a_choice_opens_with_its_role_and_ends_with_its_reason() -> None:
    chunks = _chunks(PLAIN, _pieces("Hi ", "you", ""))
    assert _deltas(chunks) == [{"role": "assistant", "content": ""}, {"content": "Hi "}, {"content": "you"}, {}]
    assert [chunk.choice["finish_reason"] for chunk in chunks] == [None, None, None, "stop"]


def test_the_whole_answer_is_the_joined_chunks() -> None:
    assert _whole(PLAIN, _pieces("Hi ", "you", finish=LENGTH)) == {
        "index": 0,
        "message": {"role": "assistant", "content": "Hi you", "refusal": None},
        "logprobs": None,
        "finish_reason": "length",
    }


def test_an_empty_answer_is_empty_text() -> None:
    assert _whole(PLAIN, _pieces(""))["message"] == {"role": "assistant", "content": "", "refusal": None}


def test_log_probabilities_have_token_bytes_and_alternatives() -> None:
    shape = ChatShape(TokenReport(names=Names(), n_top=1))
    pieces = [
        TextPiece(choice=0, text="Hi", tokens=(_token(1, 0, (2, -0.25)),)),
        TextPiece(choice=0, text="ď", tokens=(_token(3), _token(4))),
        TextPiece(choice=0, text="", tokens=(_token(5),), finish=STOP),
    ]
    chunks = _chunks(shape, pieces)
    first, half, rest, special = [
        token
        for chunk in chunks
        if chunk.choice["logprobs"] is not None
        for token in chunk.choice["logprobs"]["content"]  # type: ignore[index]
    ]
    assert first == {
        "token": "Hi",
        "logprob": -1.0,
        "bytes": list(b"Hi"),
        "top_logprobs": [{"token": " y", "logprob": -0.25, "bytes": list(b" y")}],
    }
    assert (half["token"], half["bytes"], rest["token"], rest["bytes"]) == ("\ufffd", [0xC4], "\ufffd", [0x8F])
    assert (special["token"], special["bytes"]) == ("<|5|>", [])
    assert _whole(shape, pieces)["logprobs"] == {"content": [first, half, rest, special], "refusal": None}
    assert chunks[-1].choice["logprobs"]["content"] == [special]  # type: ignore[index]


def test_a_token_that_cannot_be_has_a_finite_log_probability() -> None:
    shape = ChatShape(TokenReport(names=Names(), n_top=1))
    token = OutputToken(
        token_id=1, text_offset=0, logprob=TokenLogprob(logprob=-1.0, rank=1, top=((2, float("-inf")),))
    )
    whole = _whole(shape, [TextPiece(choice=0, text="Hi", tokens=(token,), finish=STOP)])
    assert "-9999.0" in json.dumps(whole, allow_nan=False)


def test_token_ids_are_told_with_the_text_that_they_stand_for() -> None:
    shape = ChatShape(TokenReport(names=Names(), shows_ids=True))
    pieces = [
        TextPiece(choice=0, text="Hi", tokens=(OutputToken(token_id=1, text_offset=0),)),
        TextPiece(choice=0, text=" y", tokens=(OutputToken(token_id=2, text_offset=2),)),
        TextPiece(choice=0, text="", tokens=(OutputToken(token_id=5, text_offset=4),), finish=STOP),
    ]
    chunks = _chunks(shape, pieces)
    assert [chunk.choice["token_ids"] for chunk in chunks] == [[], [1], [2], [5]]
    assert chunks[0].beside == {"prompt_token_ids": (7, 8)}
    assert all(chunk.beside == {} for chunk in chunks[1:])
    whole = _merged(shape, chunks)
    assert whole.choice["token_ids"] == [1, 2, 5]
    assert whole.beside == {"prompt_token_ids": (7, 8)}


def test_the_prompt_is_told_once_whatever_the_number_of_choices() -> None:
    shape = ChatShape(TokenReport(names=Names(), n_prompt_top=1))
    assert _chunks(shape, _pieces("Hi"))[0].beside == {
        "prompt_logprobs": [None, {"8": {"logprob": -0.5, "rank": 1, "decoded_token": "q"}}]
    }
    assert all(chunk.beside == {} for chunk in _chunks(shape, _pieces("Hi"), choice=1))


ANSWERS = [
    'text <f{"a":"x\\"y","b":[1,2]}>',
    '<f{"a":1}><g{"b":{"c":2}}>',
    '<f{"a":1}> and text <g{}> end',
]


@pytest.mark.parametrize("answer", ANSWERS)
def test_c32_calls_are_the_same_however_the_answer_is_cut(answer: str) -> None:
    whole = _whole(TOOLS, _pieces(answer))
    for cut in range(len(answer) + 1):
        for other in range(cut, len(answer) + 1):
            assert _whole(TOOLS, _pieces(answer[:cut], answer[cut:other], answer[other:])) == whole
    assert _whole(TOOLS, _pieces(*answer)) == whole


def test_c32_streamed_arguments_join_to_those_of_the_whole_answer() -> None:
    chunks = _chunks(TOOLS, _pieces(*'text <f{"a":"x\\"y"}>'))
    calls = [delta["tool_calls"][0] for delta in _deltas(chunks) if "tool_calls" in delta]  # type: ignore[operator,index]
    assert calls[0] == {
        "index": 0,
        "id": "call-1",
        "type": "function",
        "function": {"name": "f", "arguments": "{"},
    }
    assert all(call.keys() == {"index", "function"} for call in calls[1:])
    joined = "".join(call["function"]["arguments"] for call in calls)
    message = _merged(TOOLS, chunks).choice["message"]
    assert message == {
        "role": "assistant",
        "content": "text ",
        "refusal": None,
        "tool_calls": [{"id": "call-1", "type": "function", "function": {"name": "f", "arguments": joined}}],
    }
    assert json.loads(joined) == {"a": 'x"y'}


def test_an_answer_of_calls_alone_has_no_content() -> None:
    assert _whole(TOOLS, _pieces("<f{}>"))["message"]["content"] is None  # type: ignore[index]


def test_a_choice_with_calls_finishes_with_them() -> None:
    assert _whole(TOOLS, _pieces("<f{}>"))["finish_reason"] == "tool_calls"
    assert _whole(TOOLS, _pieces("no call"))["finish_reason"] == "stop"


@pytest.mark.parametrize("answer", ['<f{"a', "<f{}>"])
def test_c33_a_truncated_answer_says_so_whatever_it_contains(answer: str) -> None:
    chunks = _chunks(TOOLS, _pieces(*answer, finish=LENGTH))
    assert chunks[-1].choice["finish_reason"] == "length"
    assert _merged(TOOLS, chunks).choice["finish_reason"] == "length"


def test_c12_what_a_stop_interrupts_before_it_is_a_call_is_content() -> None:
    chunks = _chunks(TOOLS, _pieces("text ", "<na", ""))
    assert "".join(str(delta.get("content", "")) for delta in _deltas(chunks)) == "text <na"  # type: ignore[attr-defined]
    assert chunks[-1].choice["finish_reason"] == "stop"


def test_tokens_of_text_that_is_held_back_are_told_later_and_once() -> None:
    shape = ChatShape(TokenReport(names=Names(), shows_ids=True), MarkedCalls)
    pieces = [
        TextPiece(choice=0, text="<", tokens=(OutputToken(token_id=1, text_offset=0),)),
        TextPiece(choice=0, text="f{", tokens=(OutputToken(token_id=2, text_offset=1),)),
        TextPiece(choice=0, text="}>", tokens=(OutputToken(token_id=7, text_offset=3),), finish=STOP),
    ]
    told = [chunk.choice["token_ids"] for chunk in _chunks(shape, pieces)]
    assert [token_id for token_ids in told for token_id in token_ids] == [1, 2, 7]  # type: ignore[attr-defined]
