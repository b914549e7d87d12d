"""Writes prompts of exactly so many tokens, as text, from common words drawn by a seed.

A word is one token or more, so n words are enough: their ids are cut after n, and the text of these is kept where
it has the same ids again, which is what every server will make of it. Two prompts agree in their first 16 words
with a chance under 1 in 10^37, so no prefix cache helps but where a prefix is meant to be shared.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import takewhile
from random import Random
from typing import Protocol

from bakehouse_replica.core.errors import StartupError

from bakehouse_cluster.bench.workloads import Demand, Messages

WORDS = tuple((files("bakehouse_cluster.bench") / "words.txt").read_text().split())

_N_TRIES = 16


class Encoder(Protocol):
    """A tokenizer, wherever it is. `name`: for people."""

    @property
    def name(self) -> str:
        """What it is called in reports."""
        ...

    def encode(self, text: str) -> tuple[int, ...]:
        """The ids of a raw prompt, with those that the tokenizer puts around it. Raises `StartupError`."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Their text."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request, ready to be put into words of HTTP; see `Demand`.

    `prompt` is text or messages. `token_ids`: of the text, where it was written here or tokenized. `n_input`:
    their number, None where it was not counted.
    """

    prompt: str | Messages | tuple[int, ...]
    token_ids: tuple[int, ...] | None
    n_input: int | None
    n_output: int
    arrival_s: float | None = None


class PromptWriter:
    """Writes prompts that the tokenizer `encoder` counts, from words that `draw` draws.

    `prefixes`: shared beginnings by number; those that are not in it yet are written and added to it.
    """

    def __init__(self, encoder: Encoder, draw: Random, prefixes: dict[int, str]) -> None:
        self._encoder = encoder
        self._draw = draw
        self._prefixes = prefixes
        # What the tokenizer puts before every text; decoding would show it in some servers' answers.
        self._n_leading = _n_equal(encoder.encode("able"), encoder.encode("hundred"))

    def write(self, demand: Demand) -> Ask:
        """A prompt for `demand`.

        Raises `StartupError`, which names its origin, where none of that length is found or it cannot be counted.
        """
        try:
            return self._written(demand) if demand.given is None else _given(demand, self._encoder)
        except StartupError as error:
            what = "its prompt" if demand.n_input is None else f"a prompt of {demand.n_input:,} tokens"
            where = f"{demand.origin}: " if demand.origin else ""
            raise StartupError(f"{where}{what}: {error.message}") from error

    def _written(self, demand: Demand) -> Ask:
        assert demand.n_input is not None, "a demand has a prompt or its length"
        prefix = "" if demand.prefix_id is None else self._prefix(demand.prefix_id, demand.n_prefix)
        text, token_ids = self._text(demand.n_input, prefix)
        return Ask(
            prompt=text,
            token_ids=token_ids,
            n_input=len(token_ids),
            n_output=demand.n_output,
            arrival_s=demand.arrival_s,
        )

    def _prefix(self, prefix_id: int, n_tokens: int) -> str:
        if prefix_id not in self._prefixes:
            self._prefixes[prefix_id], _ = self._text(n_tokens, "")
        return self._prefixes[prefix_id]

    def _text(self, n_tokens: int, prefix: str) -> tuple[str, tuple[int, ...]]:
        prefix_ids = self._encoder.encode(prefix) if prefix else ()
        for _ in range(_N_TRIES):
            words = self._draw.choices(WORDS, k=n_tokens - len(prefix_ids))
            token_ids = self._encoder.encode(" ".join([prefix, *words] if prefix else words))[:n_tokens]
            text = self._encoder.decode(token_ids[self._n_leading :])
            if self._encoder.encode(text) == token_ids and token_ids[: len(prefix_ids)] == prefix_ids:
                return text, token_ids
        raise StartupError(
            f"no text of exactly {n_tokens} tokens was found that the tokenizer {self._encoder.name} encodes "
            f"and decodes to the same; ask for longer prompts, or name another tokenizer by --tokenizer"
        )


def _given(demand: Demand, encoder: Encoder) -> Ask:
    given = demand.given
    assert given is not None
    if isinstance(given, Messages):
        token_ids = None
    elif isinstance(given, str):
        token_ids = encoder.encode(given)
    else:
        token_ids = given
    return Ask(
        prompt=given,
        token_ids=token_ids,
        n_input=None if token_ids is None else len(token_ids),
        n_output=demand.n_output,
        arrival_s=demand.arrival_s,
    )


def _n_equal(first: Sequence[int], second: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
