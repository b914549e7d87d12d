"""What a client has been sent of each choice, and the requests that would continue it elsewhere."""

from dataclasses import replace

from bakehouse_replica.core.hashing import choice_seed
from bakehouse_replica.core.types import Request, TokenDelta


class Journal:
    """The emitted ids of one request, per choice; pure.

    Ids already emitted are never changed: a delta that repeats them is cut to what is new.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self._emitted: list[list[int]] = [list(request.prior_output) for _ in range(request.params.n)]
        self._is_ended = [False] * request.params.n

    @property
    def is_finished(self) -> bool:
        """Whether every choice has had its terminal delta."""
        return all(self._is_ended)

    @property
    def has_begun(self) -> bool:
        """Whether anything new has been emitted, so that a plain retry would repeat it."""
        n_prior = len(self._request.prior_output)
        return any(self._is_ended) or any(len(emitted) > n_prior for emitted in self._emitted)

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
        fresh = delta.token_ids[start - delta.start :]
        if not fresh and delta.finish is None:
            return None
        emitted.extend(fresh)
        self._is_ended[delta.choice] = delta.finish is not None
        return replace(delta, start=start, token_ids=fresh)

    def resume_requests(self) -> list[tuple[int, Request]]:
        """Each unfinished choice with the request that continues it, `n` 1, under its own seed."""
        params = self._request.params
        assert params.seed is not None, "whoever builds a Request fills its seed"
        return [
            (
                choice,
                replace(
                    self._request,
                    request_id=self._request.request_id
                    if params.n == 1
                    else f"{self._request.request_id}-{choice}",
                    params=replace(params, n=1, seed=choice_seed(params.seed, choice)),
                    prior_output=tuple(emitted),
                ),
            )
            for choice, emitted in enumerate(self._emitted)
            if not self._is_ended[choice]
        ]
