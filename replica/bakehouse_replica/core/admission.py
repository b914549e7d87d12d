"""What a request must satisfy before a scheduler takes it: the limits that no waiting can change.

Everything here looks at the request and constants only; whether there is room *now* is the scheduler's
business. Every refusal names the field, the value and the limit.
"""

from bakehouse_replica.core.errors import ContextTooLong, InvalidRequest
from bakehouse_replica.core.types import Capacity, Request

MAX_TOKEN_ID = 2**31 - 1  # ids are hashed and sent to the device as 32-bit ints


def n_slots_of(capacity: Capacity) -> int:
    """Sequences that may run at once: each must find room for a token in every step, so that none starves."""
    return min(capacity.max_sequences, capacity.max_step_tokens)


def output_limit(request: Request, capacity: Capacity, max_model_len: int) -> int:
    """How many output tokens the request may have in all, `prior_output` included.

    `prior_output` counts towards `max_tokens`, so a resumed request needs no more room than it did at first.
    With `max_tokens` None the limit is `max_model_len`, which may be more than the block pool holds: such a
    request is accepted, and fails with `NO_ROOM` if it really grows that long.

    Raises:
        InvalidRequest: it could never be served as asked.
    """
    params, n_prompt, n_prior = request.params, len(request.prompt_ids), len(request.prior_output)
    _check_fields(request, capacity)
    if params.max_tokens is None and n_prompt >= max_model_len:
        raise ContextTooLong(
            f"prompt has {n_prompt} tokens; with at least one to generate, the limit is {max_model_len - 1} "
            f"(max_model_len {max_model_len})",
            "prompt",
        )
    if params.max_tokens is not None and n_prompt + params.max_tokens > max_model_len:
        raise ContextTooLong(
            f"prompt ({n_prompt} tokens) plus max_tokens ({params.max_tokens}) is {n_prompt + params.max_tokens}; "
            f"the limit is {max_model_len} (max_model_len)",
            "max_tokens" if n_prompt < max_model_len else "prompt",
        )
    n_limit = max_model_len - n_prompt if params.max_tokens is None else params.max_tokens
    if n_prior > n_limit:
        raise InvalidRequest(f"prior_output has {n_prior} tokens; the limit is {n_limit}", "prior_output")
    # The last output token is never computed, so it needs no place in a block.
    n_output = n_prior + 1 if params.max_tokens is None else max(params.max_tokens, 1)
    n_stored = n_prompt + n_output - 1
    n_needed = -(-n_stored // capacity.block_size)
    if n_needed > capacity.n_blocks:
        raise InvalidRequest(
            f"{n_stored} tokens of prompt and output need {n_needed} KV blocks of {capacity.block_size}; "
            f"this replica has {capacity.n_blocks}",
            "prompt" if params.max_tokens is None else "max_tokens",
        )
    return n_limit


def _check_fields(request: Request, capacity: Capacity) -> None:
    if request.params.seed is None:
        raise InvalidRequest("seed is None; whoever builds the request must choose one", "seed")
    if request.params.n > n_slots_of(capacity):
        raise InvalidRequest(
            f"n is {request.params.n}; at most {n_slots_of(capacity)} sequences run at once here", "n"
        )
    for param, token_ids in (("prompt", request.prompt_ids), ("prior_output", request.prior_output)):
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) <= MAX_TOKEN_ID:
            raise InvalidRequest(
                f"{param} has token ids from {min(token_ids)} to {max(token_ids)}; "
                f"they must lie between 0 and {MAX_TOKEN_ID}",
                param,
            )
