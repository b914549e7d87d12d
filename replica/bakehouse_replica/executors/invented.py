"""Which token executors without a model draw, and what log-probabilities say of any token.

After a history, some number b names the most likely token; b + 1 is half as likely, b + 2 a quarter, and so on
around the vocabulary.
"""

import math
from collections.abc import Iterable
from itertools import chain

from bakehouse_replica.core.sampling import MAX_BIAS, SamplingParams
from bakehouse_replica.core.types import TokenLogprob


def nearest_token(
    wanted: int, params: SamplingParams, output_ids: list[int], output_index: int, vocabulary_size: int
) -> int | None:
    """The first token from `wanted` on, around the vocabulary, that may come; None where none may.

    `output_ids` are looked at for bad words only.
    """
    banned = {word[-1] for word in params.bad_words_ids if _would_complete(word, output_ids)}
    if output_index < params.min_tokens:
        banned.update(params.stop_token_ids)
    allowed: Iterable[int] = chain(range(wanted, vocabulary_size), range(wanted))
    if params.allowed_token_ids is not None:
        choice = {*params.allowed_token_ids, *params.stop_token_ids}
        allowed = (token_id for token_id in allowed if token_id in choice)
    possible = (token_id for token_id in allowed if token_id not in banned)
    if not params.logit_bias:
        return next(possible, None)
    bias, candidates = dict(params.logit_bias), list(possible)
    forced = (token_id for token_id in candidates if bias.get(token_id, 0.0) >= MAX_BIAS)
    unharmed = (token_id for token_id in candidates if bias.get(token_id, 0.0) > -MAX_BIAS)
    return next(chain(forced, unharmed, candidates), None)


def invented_logprob(token_id: int, best: int, n_top: int, vocabulary_size: int) -> TokenLogprob:
    """What is said of `token_id` where `best` is the most likely, with the `n_top` best beside it."""
    place = (token_id - best) % vocabulary_size
    top = tuple(
        ((best + other) % vocabulary_size, _logprob_at(other)) for other in range(min(n_top, vocabulary_size))
    )
    return TokenLogprob(logprob=_logprob_at(place), rank=place + 1, top=top)


def _logprob_at(place: int) -> float:
    return -math.log(2.0) * (place + 1)


def _would_complete(word: tuple[int, ...], output_ids: list[int]) -> bool:
    return len(word) == 1 or tuple(output_ids[1 - len(word) :]) == word[:-1]
