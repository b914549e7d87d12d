"""What a request may say about a model's vocabulary; the rest would break the step of every neighbour.

An id that the embedding lacks stops the whole batch, and a row that leaves no token to draw has no answer.
"""

from itertools import chain

from bakehouse_replica.core.errors import InvalidRequest
from bakehouse_replica.core.sampling import SamplingParams
from bakehouse_replica.core.types import Request


def check_vocabulary(request: Request, n_vocabulary: int) -> None:
    """Raises `InvalidRequest` for ids outside the vocabulary, and where no token would be left to draw.

    A sequence of several bad words can still leave none in the middle of an output: that is known only there.
    """
    params = request.params
    for param, token_ids in (
        ("prompt", request.prompt_ids),
        ("prior_output", request.prior_output),
        ("stop_token_ids", params.stop_token_ids),
        ("allowed_token_ids", params.allowed_token_ids or ()),
        ("logit_bias", tuple(token_id for token_id, _ in params.logit_bias)),
        ("bad_words_ids", tuple(chain.from_iterable(params.bad_words_ids))),
    ):
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < n_vocabulary:
            wrong = next(token_id for token_id in token_ids if not 0 <= token_id < n_vocabulary)
            raise InvalidRequest(
                f"{param} holds token id {wrong}; it must be between 0 and {n_vocabulary - 1}", param
            )
    if params.max_tokens != 0:
        _check_choice(params, n_vocabulary)


def _check_choice(params: SamplingParams, n_vocabulary: int) -> None:
    """Raises where what is allowed, without what is banned, is nothing."""
    allowed, stop_ids = params.allowed_token_ids, frozenset(params.stop_token_ids)
    banned = {word[0] for word in params.bad_words_ids if len(word) == 1}
    facts = [f"bad_words_ids bans {len(banned)} of {n_vocabulary} tokens", f"stop_token_ids has {len(stop_ids)}"]
    if allowed is None:
        n_left, n_left_before_stops = n_vocabulary - len(banned), n_vocabulary - len(banned | stop_ids)
    else:
        left = {*allowed, *stop_ids} - banned
        n_left, n_left_before_stops = len(left), len(left - stop_ids)
        facts.append(f"allowed_token_ids has {len(set(allowed))}")
    if n_left == 0:
        param = "bad_words_ids" if allowed is None else "allowed_token_ids"
        raise InvalidRequest(f"no token would be left to draw: {', '.join(facts)}", param)
    if params.min_tokens and n_left_before_stops == 0:
        param = "stop_token_ids" if allowed is None else "allowed_token_ids"
        raise InvalidRequest(
            f"no token would be left to draw before min_tokens ({params.min_tokens}): {', '.join(facts)}", param
        )
