"""Prompts of exactly so many tokens, under tokenizers that count in different ways."""

from collections.abc import Callable, Sequence
from random import Random

import pytest
from bakehouse_cluster.bench.prompts import Ask, PromptWriter
from bakehouse_cluster.bench.workloads import Demand, Messages
from bakehouse_replica.core.errors import StartupError

BOS = 1


class WordEncoder:
    """A token for each word, after a beginning of sequence."""

    name = "words"

    def __init__(self) -> None:
        self._words: list[str] = []

    def encode(self, text: str) -> tuple[int, ...]:
        ids = []
        for word in text.split(" "):
            if word not in self._words:
                self._words.append(word)
            ids.append(self._words.index(word) + BOS + 1)
        return (BOS, *ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        return " ".join("<s>" if one == BOS else self._words[one - BOS - 1] for one in token_ids)


class ByteEncoder:
    """A token for each byte."""

    name = "bytes"

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(text.encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode()


class PairEncoder:
    """A token for each two characters, counted from the text's start; an odd one at the end stands alone."""

    name = "pairs"

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(int.from_bytes(text[index : index + 2].encode()) for index in range(0, len(text), 2))

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(one.to_bytes(2 if one > 255 else 1).decode() for one in token_ids)


class ForgetfulEncoder(ByteEncoder):
    """Loses case, so that nothing reads as what it was."""

    name = "forgetful"

    def decode(self, token_ids: Sequence[int]) -> str:
        return super().decode(token_ids).upper()


EXACT = [WordEncoder, ByteEncoder, PairEncoder]


@pytest.mark.parametrize("encoder_of", EXACT)
@pytest.mark.parametrize("n_input", [2, 3, 17, 200])
def test_a_prompt_has_exactly_the_length_asked_for(encoder_of: Callable[[], ByteEncoder], n_input: int) -> None:
    encoder = encoder_of()
    ask = PromptWriter(encoder, Random(0), {}).write(Demand(n_input=n_input, n_output=3))
    assert isinstance(ask.prompt, str)
    assert len(encoder.encode(ask.prompt)) == n_input
    assert ask.token_ids == encoder.encode(ask.prompt)
    assert (ask.n_input, ask.n_output) == (n_input, 3)


@pytest.mark.parametrize("encoder_of", EXACT)
def test_prompts_share_their_prefix_and_nothing_after_it(encoder_of: Callable[[], ByteEncoder]) -> None:
    encoder = encoder_of()
    writer = PromptWriter(encoder, Random(0), {})
    demand = Demand(n_input=160, n_output=1, prefix_id=0, n_prefix=96)
    first, second = (writer.write(demand).token_ids or () for _ in range(2))
    assert len(first) == len(second) == 160
    assert first[:96] == second[:96]
    assert first[96:112] != second[96:112]


def test_other_numbers_are_other_prefixes_and_are_kept_for_the_next_writer() -> None:
    prefixes: dict[int, str] = {}
    demands = [Demand(n_input=60, n_output=1, prefix_id=number, n_prefix=40) for number in (0, 1)]
    writer = PromptWriter(ByteEncoder(), Random(0), prefixes)
    zero, one = (str(writer.write(demand).prompt) for demand in demands)
    again = str(PromptWriter(ByteEncoder(), Random(9), prefixes).write(demands[0]).prompt)
    assert zero[:40] == again[:40] == prefixes[0]
    assert one[:40] == prefixes[1] != prefixes[0]
    assert zero[40:] != again[40:]


def test_the_same_seed_writes_the_same() -> None:
    demand = Demand(n_input=50, n_output=1)
    texts = [PromptWriter(ByteEncoder(), Random(seed), {}).write(demand).prompt for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]


def test_a_tokenizer_that_does_not_read_back_what_it_wrote_is_refused() -> None:
    writer = PromptWriter(ForgetfulEncoder(), Random(0), {})
    with pytest.raises(
        StartupError, match=r"no text of exactly 8 tokens .* the tokenizer forgetful .* --tokenizer"
    ):
        writer.write(Demand(n_input=8, n_output=1))


class FullEncoder(ByteEncoder):
    """Takes no more than so many characters, as a server with a limit on bodies."""

    def encode(self, text: str) -> tuple[int, ...]:
        if len(text) > 1000:
            raise StartupError("/tokenize: HTTP 413")
        return super().encode(text)


@pytest.mark.parametrize(
    ("demand", "words"),
    [
        (Demand(n_input=1_000_000, n_output=1), "a prompt of 1,000,000 tokens: /tokenize: HTTP 413"),
        (
            Demand(n_input=1_000_000, n_output=1, origin="trace t, line 3"),
            "trace t, line 3: a prompt of 1,000,000 tokens: /tokenize: HTTP 413",
        ),
        (
            Demand(given="a" * 1001, n_output=1, origin="trace t, line 3"),
            "trace t, line 3: its prompt: /tokenize: HTTP 413",
        ),
    ],
)
def test_a_prompt_that_cannot_be_counted_is_named_with_its_length_and_line(demand: Demand, words: str) -> None:
    with pytest.raises(StartupError) as refused:
        PromptWriter(FullEncoder(), Random(0), {}).write(demand)
    assert refused.value.message == words


@pytest.mark.parametrize(
    ("given", "token_ids"),
    [("ab", (97, 98)), ((5, 6, 7), (5, 6, 7)), (Messages((("user", "hello"),)), None)],
)
def test_a_given_prompt_is_taken_as_it_is(
    given: str | tuple[int, ...] | Messages, token_ids: tuple[int, ...] | None
) -> None:
    writer = PromptWriter(ByteEncoder(), Random(0), {})
    n_input = None if token_ids is None else len(token_ids)
    assert writer.write(Demand(given=given, n_output=4, arrival_s=2.0)) == Ask(
        prompt=given, token_ids=token_ids, n_input=n_input, n_output=4, arrival_s=2.0
    )
