"""The dispatcher over a scripted client: what it retries, what it reports, what it never repeats."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

import pytest
from bakehouse_replica.core.errors import (
    BakehouseError,
    DeadlineExceeded,
    EngineDead,
    InvalidRequest,
    Overloaded,
    Unavailable,
)
from bakehouse_replica.core.sampling import SamplingParams
from bakehouse_replica.core.story import ToldStory
from bakehouse_replica.core.types import (
    Delivery,
    Failure,
    FailureKind,
    FinishReason,
    ReplicaStatus,
    Request,
    TokenDelta,
    TokenLogprob,
)
from bakehouse_router import dispatch
from bakehouse_router.attempts import Attempts
from bakehouse_router.dispatch import Dispatcher

Act = Delivery | BakehouseError


class ScriptedClient:
    """Plays one script per attempt: deliveries, and an error where the script says so."""

    def __init__(self, *scripts: Sequence[Act]) -> None:
        self.scripts = list(scripts)
        self.asked: list[Request] = []
        self.n_closed = 0

    async def generate(self, request: Request) -> AsyncGenerator[Delivery, None]:
        script = self.scripts[len(self.asked)]
        self.asked.append(request)
        try:
            for act in script:
                if isinstance(act, BakehouseError):
                    raise act
                yield act
        finally:
            self.n_closed += 1

    async def statuses(self) -> tuple[ReplicaStatus, ...]:
        return ()

    async def explain(self, request_ids: Sequence[str]) -> tuple[ToldStory, ...]:
        return ()

    async def close(self) -> None:
        return None


def request(*, n: int = 1, timeout_s: float | None = None) -> Request:
    return Request(request_id="r", prompt_ids=(1,), params=SamplingParams(n=n, seed=1), timeout_s=timeout_s)


def delta(
    start: int,
    *token_ids: int,
    choice: int = 0,
    finish: FinishReason | None = None,
    failure: Failure | None = None,
) -> TokenDelta:
    return TokenDelta(
        request_id="r", choice=choice, start=start, token_ids=token_ids, finish=finish, failure=failure
    )


def delivery(*deltas: TokenDelta, replica_id: str = "a") -> Delivery:
    return Delivery(replica_id=replica_id, deltas=deltas)


ENDING = delivery(delta(0, 10, 11, finish=FinishReason.STOP), replica_id="b")
LOST = EngineDead("lost")


async def collect(client: ScriptedClient, asked: Request) -> list[Delivery]:
    async with aclosing(Dispatcher(client).stream(asked)) as deliveries:
        return [item async for item in deliveries]


async def test_deliveries_pass_in_order() -> None:
    first, second = delivery(delta(0, 10)), delivery(delta(1, 11, finish=FinishReason.LENGTH))

    assert await collect(ScriptedClient([first, second]), request()) == [first, second]


@pytest.mark.parametrize("error", [EngineDead("lost"), Unavailable("draining")])
async def test_a_replica_lost_before_the_first_delta_is_replaced_unseen(error: BakehouseError) -> None:
    client = ScriptedClient([error], [ENDING])

    assert await collect(client, request()) == [ENDING]
    # Under an id of its own: the first attempt may still be alive where the second arrives.
    assert client.asked == [request(), replace(request(), request_id="r-retry1")]


async def test_an_engine_that_fails_before_the_first_delta_is_replaced_too() -> None:
    failed = delta(
        0, finish=FinishReason.ERROR, failure=Failure(kind=FailureKind.ENGINE, message="the engine has failed")
    )

    assert await collect(ScriptedClient([delivery(failed)], [ENDING]), request()) == [ENDING]


@pytest.mark.parametrize(
    ("lost", "n_attempts"), [(LOST, 2), (Unavailable("draining"), len(dispatch.RETRY_DELAYS_S) + 1)]
)
async def test_the_number_of_attempts_is_bounded(lost: Unavailable, n_attempts: int) -> None:
    """Lowest where engines die: the request itself may be what kills them."""
    client = ScriptedClient(*[[lost]] * (n_attempts + 1))

    with pytest.raises(type(lost)):
        await collect(client, request())

    assert len(client.asked) == client.n_closed == n_attempts


async def test_a_replica_lost_after_the_first_delta_is_made_good_by_a_resume() -> None:
    """The second replica is told what stands already, and may repeat some of it."""
    client = ScriptedClient([delivery(delta(0, 10)), LOST], [ENDING])

    assert await collect(client, request()) == [
        delivery(delta(0, 10)),
        delivery(delta(1, 11, finish=FinishReason.STOP), replica_id="b"),
    ]
    assert client.asked == [request(), replace(request(), request_id="r-retry1", prior_output=(10,))]


async def test_a_stream_that_waits_until_anybody_serves_is_resumed_once() -> None:
    nobody = [Unavailable("nobody serves")]
    client = ScriptedClient([delivery(delta(0, 10)), LOST], *[nobody] * 2, [ENDING])
    attempts = Attempts()
    async with aclosing(Dispatcher(client).stream(request(), attempts)) as deliveries:
        assert [item.replica_id async for item in deliveries] == ["a", "b"]
    assert len(client.asked) == 4
    first, resumed = attempts.made
    assert (first.n_before, first.replica_ids, first.is_lost) == (0, ["a"], True)
    assert (resumed.n_before, resumed.replica_ids, resumed.is_lost) == (1, ["b"], False)
    assert resumed.ended_at is not None


async def test_what_came_in_the_same_delivery_as_the_loss_is_passed_on() -> None:
    failure = Failure(kind=FailureKind.ENGINE, message="the engine has failed")
    failed = delta(1, choice=0, finish=FinishReason.ERROR, failure=failure)
    client = ScriptedClient([delivery(delta(0, 10), failed)], [ENDING])

    assert [found.deltas for found in await collect(client, request())] == [
        (delta(0, 10),),
        (delta(1, 11, finish=FinishReason.STOP),),
    ]


async def test_a_replica_that_goes_down_and_cancels_its_requests_is_a_loss() -> None:
    client = ScriptedClient([delivery(delta(0, 10)), delivery(delta(1, finish=FinishReason.CANCELLED))], [ENDING])

    assert (await collect(client, request()))[-1].deltas == (delta(1, 11, finish=FinishReason.STOP),)


async def test_progress_between_two_losses_earns_another_attempt() -> None:
    client = ScriptedClient(
        [delivery(delta(0, 10)), LOST], [delivery(delta(1, 11)), LOST], [delivery(delta(2, 12)), LOST], [LOST], []
    )

    with pytest.raises(EngineDead):
        await collect(client, request())

    assert [asked.prior_output for asked in client.asked] == [(), (10,), (10, 11), (10, 11, 12)]


async def test_losses_are_bounded_whatever_the_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "RETRY_DELAYS_S", (0.0, 0.0))
    scripts: list[list[Act]] = [[delivery(delta(index, index)), LOST] for index in range(dispatch.MAX_DEATHS + 5)]
    client = ScriptedClient(*scripts)

    with pytest.raises(EngineDead):
        await collect(client, request())

    assert len(client.asked) == dispatch.MAX_DEATHS + 1


async def test_a_stream_that_has_begun_waits_as_long_as_it_may_while_nobody_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatch, "RETRY_DELAYS_S", (0.0, 0.0))
    nobody = Unavailable("nobody serves")
    client = ScriptedClient([delivery(delta(0, 10)), LOST], *[[nobody]] * 200, [ENDING])

    assert (await collect(client, request()))[-1].deltas == (delta(1, 11, finish=FinishReason.STOP),)


async def test_where_nobody_can_come_back_a_stream_soon_ends_with_what_broke_it() -> None:
    client = ScriptedClient([delivery(delta(0, 10)), LOST], *[[Unavailable("gone")]] * 9)
    stream = Dispatcher(client, resume_wait_s=0.0).stream(request())
    await anext(stream)

    with pytest.raises(EngineDead, match="lost"):
        await anext(stream)

    assert len(client.asked) == 3


async def test_each_unfinished_choice_goes_on_and_keeps_its_number() -> None:
    finish = FinishReason.STOP
    begun = delivery(delta(0, 10), delta(0, 20, choice=1, finish=finish), delta(0, 30, choice=2))
    client = ScriptedClient(
        [begun, LOST], [delivery(delta(1, 11, finish=finish))], [delivery(delta(1, 31, finish=finish))]
    )

    first, *others = await collect(client, request(n=3))

    assert first == begun
    assert sorted((one for other in others for one in other.deltas), key=lambda one: one.choice) == [
        delta(1, 11, finish=finish),
        delta(1, 31, choice=2, finish=finish),
    ]
    assert [asked.first_choice for asked in client.asked] == [0, 0, 2]
    assert client.n_closed == 3


@pytest.mark.parametrize(
    "error", [InvalidRequest("too long", "prompt"), Overloaded("full"), DeadlineExceeded("late")]
)
async def test_what_another_replica_would_not_change_is_not_retried(error: BakehouseError) -> None:
    client = ScriptedClient([error], [ENDING])

    with pytest.raises(type(error)) as caught:
        await collect(client, request())

    assert caught.value is error
    assert len(client.asked) == 1


async def test_a_stream_that_ends_before_its_choices_is_a_loss() -> None:
    begun = [delivery(delta(0, 10)), delivery(delta(0, 20, choice=1, finish=FinishReason.STOP))]
    client = ScriptedClient(begun, [], [])

    with pytest.raises(Unavailable, match="ended before its choices did"):
        await collect(client, request(n=2))


async def test_a_failure_of_the_request_itself_is_its_terminal_delta() -> None:
    failed = delivery(
        delta(0, finish=FinishReason.ERROR, failure=Failure(kind=FailureKind.DEADLINE, message="2 s have passed"))
    )

    assert await collect(ScriptedClient([failed]), request()) == [failed]


async def test_repeated_ids_are_dropped_and_empty_deliveries_with_them() -> None:
    client = ScriptedClient(
        [
            delivery(delta(0, 10)),
            delivery(delta(0, 10)),
            delivery(delta(0, 10, 11, finish=FinishReason.STOP)),
        ]
    )

    assert await collect(client, request()) == [
        delivery(delta(0, 10)),
        delivery(delta(1, 11, finish=FinishReason.STOP)),
    ]


async def test_log_probabilities_pass_whole_through_a_second_attempt() -> None:
    logprobs = tuple(TokenLogprob(logprob=-1.0, rank=rank) for rank in (1, 2))
    answer = replace(ENDING.deltas[0], logprobs=logprobs, prompt_logprobs=logprobs)
    client = ScriptedClient([LOST], [delivery(replace(answer, request_id="r-retry1"), replica_id="b")])

    assert await collect(client, request()) == [delivery(answer, replica_id="b")]


async def test_closing_the_stream_closes_the_call() -> None:
    client = ScriptedClient([delivery(delta(0, 10)), delivery(delta(1, 11))])
    stream = Dispatcher(client).stream(request())

    await anext(stream)
    await stream.aclose()

    assert client.n_closed == 1


async def test_a_second_attempt_gets_only_the_time_that_is_left() -> None:
    client = ScriptedClient([LOST], [ENDING])

    await collect(client, request(timeout_s=100.0))

    first, second = (asked.timeout_s for asked in client.asked)
    assert first is not None
    assert second is not None
    assert second <= first - dispatch.RETRY_DELAYS_S[0]


async def test_no_attempt_begins_after_the_requests_time_has_run_out() -> None:
    client = ScriptedClient([LOST], [ENDING])

    with pytest.raises(DeadlineExceeded):
        await collect(client, request(timeout_s=dispatch.RETRY_DELAYS_S[0] / 2))

    assert len(client.asked) == 1
