"""What a client has been sent of each choice, and the requests that would continue it elsewhere."""

from dataclasses import replace

from bakehouse_replica.core.hashing import choice_seed
from bakehouse_replica.core.types import Request, TokenDelta, Usage


class Journal:
    """The emitted ids of one request, per choice; pure.

    Ids already emitted are never changed: a delta that repeats them is cut to what is new, its log-probabilities
    with it. Those of the prompt pass once, and the number of its cached tokens stays the one told first.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self._emitted: list[list[int]] = [list(request.prior_output) for _ in range(request.params.n)]
        self._is_ended = [False] * request.params.n
        self._has_prompt_logprobs = False
        self._cached_tokens: int | None = None

    @property
    def is_finished(self) -> bool:
        """Whether every choice has had its terminal delta."""
        return all(self._is_ended)

    @property
    def n_tokens(self) -> int:
        """New ids so far, over all choices."""
        n_prior = len(self._request.prior_output)
        return sum(len(emitted) - n_prior for emitted in self._emitted)

    @property
    def n_emitted(self) -> int:
        """The same, each end counted as one: it grows with whatever a client was sent."""
        return self.n_tokens + sum(self._is_ended)

    def accept(self, delta: TokenDelta) -> TokenDelta | None:
        """Record a delta and return what is new of it, None where nothing is.

        A gap, or anything after a choice's end, is a bug of the replica: AssertionError, and nothing changes.
        """
        emitted = self._emitted[delta.choice]
        assert not self._is_ended[delta.choice], f"choice {delta.choice} of {delta.request_id} has ended already"
        assert delta.start <= len(emitted), (
            f"choice {delta.choice} of {delta.request_id} continues at {delta.start}, "
            f"but only {len(emitted)} ids have been emitted"
        )
        start = len(emitted)
        n_repeated = start - delta.start
        fresh = delta.token_ids[n_repeated:]
        if not fresh and delta.finish is None:
            return None
        emitted.extend(fresh)
        self._is_ended[delta.choice] = delta.finish is not None
        prompt_logprobs = () if self._has_prompt_logprobs else delta.prompt_logprobs
        self._has_prompt_logprobs = self._has_prompt_logprobs or bool(prompt_logprobs)
        usage = self._as_told_first(delta.usage)
        if not n_repeated and prompt_logprobs is delta.prompt_logprobs and usage is delta.usage:
            return delta
        return replace(
            delta,
            start=start,
            token_ids=fresh,
            logprobs=delta.logprobs[n_repeated:],
            prompt_logprobs=prompt_logprobs,
            usage=usage,
        )

    def _as_told_first(self, usage: Usage | None) -> Usage | None:
        if usage is None or usage.cached_tokens == self._cached_tokens:
            return usage
        if self._cached_tokens is None:
            self._cached_tokens = usage.cached_tokens
            return usage
        return replace(usage, cached_tokens=self._cached_tokens)

    def resume_requests(self) -> list[tuple[int, Request]]:
        """Each unfinished choice with the request that continues it, `n` 1, under its own seed."""
        return [(choice, self._resumed(choice)) for choice, is_ended in enumerate(self._is_ended) if not is_ended]

    def _resumed(self, choice: int) -> Request:
        request, params = self._request, self._request.params
        assert params.seed is not None, "whoever builds a Request fills its seed"
        owes_prompt = choice == 0 and not self._has_prompt_logprobs
        return replace(
            request,
            request_id=request.request_id if params.n == 1 else f"{request.request_id}-{choice}",
            first_choice=request.first_choice + choice,
            params=replace(
                params,
                n=1,
                seed=choice_seed(params.seed, choice),
                prompt_logprobs=params.prompt_logprobs if owes_prompt else None,
            ),
            prior_output=tuple(self._emitted[choice]),
        )
