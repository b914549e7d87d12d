"""What a request changes in a row of logits before a token is drawn: penalties, then bias, then masks.

Masks forbid tokens, whatever a bias added: stop ids before `min_tokens`, all but `allowed_token_ids`, the ends of
`bad_words_ids`, and what the output's constraint rules out. Each row is treated by itself.

Shape legend: V vocabulary.
"""

import math
from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor

from bakehouse_replica.core.sampling import SamplingParams
from bakehouse_replica.core.types import Sample
from bakehouse_replica.model.constraint import Constraint


class NoTokenLeft(Exception):
    """The masks forbid every token. `is_complete`: the constraint agrees that the output ends here."""

    def __init__(self, message: str, *, is_complete: bool) -> None:
        super().__init__(message)
        self.is_complete = is_complete


def changes_logits(sample: Sample) -> bool:
    """Whether `adjusted` would change a row, its constraint aside."""
    params = sample.params
    return (
        params.has_penalties
        or bool(params.logit_bias)
        or params.allowed_token_ids is not None
        or bool(params.bad_words_ids)
        or _masks_stops(sample)
    )


def adjusted(logits_V: Tensor, sample: Sample, constraint: Constraint | None) -> Tensor:
    """A copy of the float32 logits after penalties, bias and masks; what is forbidden is -inf.

    Raises `NoTokenLeft`, and `ConstraintFailure` from the constraint.
    """
    logits_V = logits_V.clone()
    _penalise(logits_V, sample)
    if bias := biases(sample.params):
        logits_V[_index(bias, logits_V)] += logits_V.new_tensor(list(bias.values()))
    _mask(logits_V, sample)
    allowed_V = None
    if constraint is not None:
        allowed_V = constraint.allowed(len(logits_V)).to(logits_V.device)
        logits_V.masked_fill_(~allowed_V, -math.inf)
    if float(logits_V.max()) == -math.inf:
        raise NoTokenLeft(_reason(sample, allowed_V), is_complete=_may_end(sample, allowed_V))
    return logits_V


def _penalise(logits_V: Tensor, sample: Sample) -> None:
    params = sample.params
    if params.repetition_penalty != 1.0:
        seen = _index({*sample.prompt_ids, *sample.output_ids}, logits_V)
        value = logits_V[seen]
        penalty = params.repetition_penalty
        logits_V[seen] = torch.where(value > 0, value / penalty, value * penalty)
    if sample.output_ids and (params.presence_penalty != 0.0 or params.frequency_penalty != 0.0):
        counts = Counter(sample.output_ids)
        count = logits_V.new_tensor(list(counts.values()))
        logits_V[_index(counts, logits_V)] -= params.presence_penalty + params.frequency_penalty * count


def _mask(logits_V: Tensor, sample: Sample) -> None:
    params = sample.params
    if params.allowed_token_ids is not None:
        stays = _index((*params.allowed_token_ids, *params.stop_token_ids), logits_V)
        forbidden_V = torch.ones_like(logits_V, dtype=torch.bool)
        forbidden_V[stays] = False
        logits_V.masked_fill_(forbidden_V, -math.inf)
    if banned := banned_ids(sample):
        logits_V[_index(banned, logits_V)] = -math.inf


def biases(params: SamplingParams) -> dict[int, float]:
    """What is added to which logits; an id that stands there twice gets the sum."""
    found: dict[int, float] = {}
    for token_id, bias in params.logit_bias:
        found[token_id] = found.get(token_id, 0.0) + bias
    return found


def banned_ids(sample: Sample) -> set[int]:
    """Stop ids before `min_tokens`, and the ends of bad words."""
    banned = set(_word_ends(sample))
    return banned.union(sample.params.stop_token_ids) if _masks_stops(sample) else banned


def _masks_stops(sample: Sample) -> bool:
    return sample.output_index < sample.params.min_tokens and bool(sample.params.stop_token_ids)


def _word_ends(sample: Sample) -> Iterable[int]:
    """The last token of each bad word whose other tokens are the newest of the output."""
    for *begin, end in sample.params.bad_words_ids:
        if not begin or sample.output_ids[-len(begin) :] == tuple(begin):
            yield end


def _may_end(sample: Sample, allowed_V: Tensor | None) -> bool:
    """Whether a constraint stands at an end: it allows nothing at all, or a stop id that another mask forbids."""
    if allowed_V is None:
        return False
    return not bool(allowed_V.any()) or bool(allowed_V[_index(sample.params.stop_token_ids, allowed_V)].any())


def _reason(sample: Sample, allowed_V: Tensor | None) -> str:
    params = sample.params
    masks = {
        "min_tokens": _masks_stops(sample),
        "allowed_token_ids": params.allowed_token_ids is not None,
        "bad_words": bool(params.bad_words_ids),
        "the grammar": allowed_V is not None,  # of one of several fields, which only the router knows
    }
    *names, last = [name for name, is_set in masks.items() if is_set]
    forbidding = f"{', '.join(names)} and {last} together forbid" if names else f"{last} forbids"
    return (
        f"after {sample.output_index} output tokens no token may follow: {forbidding} all of them; "
        f"loosen {'one of these' if names else 'it'}"
    )


def _index(token_ids: Iterable[int], like: Tensor) -> Tensor:
    return torch.tensor(list(token_ids), dtype=torch.int64, device=like.device)
