"""The adapters to Ray, without a cluster: ranks and charges in the router, errors and cancel in the calls."""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import TypedDict, Unpack, cast

import pytest
from bakehouse_replica.core.counts import Series
from bakehouse_replica.core.errors import BakehouseError, EngineDead, InvalidRequest, Overloaded, Unavailable
from bakehouse_replica.core.metric_table import PREEMPTIONS
from bakehouse_replica.core.sampling import SamplingParams
from bakehouse_replica.core.step_message import ReturnAddress, Subscribe
from bakehouse_replica.core.story import StoryLog, ToldStory
from bakehouse_replica.core.types import (
    Delivery,
    FinishReason,
    ReplicaCard,
    ReplicaLoad,
    ReplicaStatus,
    Request,
    TokenDelta,
)
from bakehouse_replica.core.wire import WireValue, card_to_wire, load_to_wire
from bakehouse_router.policy.pick import choose
from bakehouse_router.ray_client import KvAwareRouter, RayCall, RayCalls
from bakehouse_router.replica_watch import NOBODY_SERVES_S
from bakehouse_router.streaming_client import StreamingClient
from grpc import StatusCode
from grpc.aio import AioRpcError, Metadata
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError, RayTaskError
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
from ray.serve._private.replica_result import ReplicaResult
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator
from ray.serve.request_router import PendingRequest, RunningReplica

DEPLOYMENT = DeploymentID(name="Replica", app_name="app")
LOAD = ReplicaLoad(
    version=1,
    n_running=0,
    n_waiting=0,
    waiting_tokens=0,
    n_free_blocks=100,
    n_cached_blocks=0,
    n_held_blocks=0,
    step_time_s=0.0,
)


def card(name: str) -> ReplicaCard:
    return ReplicaCard(
        replica_id=name,
        model_name="m",
        model_digest="d",
        hash_key=b"k",
        block_size=16,
        n_blocks=100,
        vocabulary_size=1000,
        max_model_len=1000,
        max_sequences=8,
    )


class Replica(RunningReplica):
    """What Serve's controller has told about a replica; there is no actor behind it."""

    def __init__(self, name: str, *, problem: str | None = None, has_metadata: bool = True) -> None:
        self._id = ReplicaID(unique_id=name, deployment_id=DEPLOYMENT)
        self._stats = load_to_wire(LOAD, problem)
        self._metadata = card_to_wire(card(name)) if has_metadata else {}

    @property
    def replica_id(self) -> ReplicaID:
        return self._id

    @property
    def routing_stats(self) -> dict[str, WireValue]:
        return self._stats

    @property
    def replica_metadata(self) -> dict[str, WireValue]:
        return self._metadata


def router(*replicas: Replica) -> KvAwareRouter:
    made = KvAwareRouter(DEPLOYMENT, DeploymentHandleSource.REPLICA)
    made.initialize_state()
    made.update_replicas(list(replicas))
    return made


def request(*, n: int = 1, prompt: Sequence[int] = range(64)) -> Request:
    return Request(request_id="r", prompt_ids=tuple(prompt), params=SamplingParams(n=n, seed=1))


def pending(argument: object, call_id: str = "call") -> PendingRequest:
    metadata = RequestMetadata(request_id="r", internal_request_id=call_id)
    return PendingRequest(args=[argument], kwargs={}, metadata=metadata)


def in_flight(made: KvAwareRouter) -> dict[str, int]:
    return {view.replica_id: view.own.n_sequences for view in made.views()}


# --- The request router ------------------------------------------------------------------------------------------


async def test_each_candidate_is_a_rank_and_the_first_is_charged() -> None:
    a, b = Replica("a"), Replica("b")
    made = router(a, b)
    call = pending(request(n=3))

    ranks = await made.choose_replicas([a, b], call)

    assert sorted(replica.replica_id.unique_id for (replica,) in ranks) == ["a", "b"]
    assert in_flight(made)[ranks[0][0].replica_id.unique_id] == 3
    assert sum(in_flight(made).values()) == 3
    assert call.routing_context.should_backoff


async def test_the_same_prefix_goes_where_it_went_before() -> None:
    a, b = Replica("a"), Replica("b")
    made = router(a, b)
    homes = []
    for index in range(10):
        ((home,), *_) = await made.choose_replicas([a, b], pending(request(), f"call-{index}"))
        made.on_request_routed(pending(request(), f"call-{index}"), home.replica_id, cast(ReplicaResult, None))
        made.on_request_completed(home.replica_id, f"call-{index}")
        homes.append(home)

    assert len({home.replica_id.unique_id for home in homes}) == 1
    assert sum(in_flight(made).values()) == 0


async def test_choices_are_counted_by_their_reason() -> None:
    a, b = Replica("a"), Replica("b")
    made = router(a, b)

    for index in range(3):
        await made.choose_replicas([a, b], pending(request(), f"call-{index}"))
    await made.choose_replicas([a], pending(request()))
    await made.choose_replicas([a, b], pending("status"))

    assert made.decisions["load"] + made.decisions["prefix"] == 3
    assert made.decisions["only_one"] == 1
    assert sum(made.decisions.values()) == 4


async def test_each_choice_is_kept_as_it_was_computed_with_who_accepted() -> None:
    a, b, broken = Replica("a"), Replica("b"), Replica("c", problem="the engine has failed")
    made = router(a, b, broken)
    call = pending(request())
    expected = choose(request(), made.views(), Random())
    (_, (second,)) = await made.choose_replicas([a, b, broken], call)

    routing = made.routings.of("r")
    assert routing is not None
    assert [replace(candidate, digests=()) for candidate in expected.ranked] == list(routing.choice.ranked)
    assert routing.choice.excluded == expected.excluded == (("c", "does not serve: the engine has failed"),)
    assert (routing.reason, routing.n_choices, routing.accepted_by) == (expected.reason, 1, None)

    await made.choose_replicas([a, b, broken], call)
    made.on_request_routed(call, second.replica_id, cast(ReplicaResult, None))
    again = made.routings.of("r")
    assert again is not None
    assert (again.n_choices, again.accepted_by) == (2, second.replica_id.unique_id)
    assert again.accepted_at is not None
    assert again.accepted_at >= again.chosen_at


async def test_the_charge_follows_the_replica_that_accepts() -> None:
    a, b = Replica("a"), Replica("b")
    made = router(a, b)
    call = pending(request())
    (_, (second,)) = await made.choose_replicas([a, b], call)

    made.on_request_routed(call, second.replica_id, cast(ReplicaResult, None))

    assert in_flight(made)[second.replica_id.unique_id] == 1
    assert sum(in_flight(made).values()) == 1


async def test_a_request_given_up_before_it_was_accepted_returns_its_charge() -> None:
    a = Replica("a")
    made = router(a)
    call = pending(request())
    await made.choose_replicas([a], call)
    assert in_flight(made) == {"a": 1}

    call.future.cancel()
    await asyncio.sleep(0)  # the event loop's turn, in which callbacks of the future run

    assert in_flight(made) == {"a": 0}


@pytest.mark.parametrize("argument", ["status", 7, None])
async def test_a_call_that_is_no_request_may_go_anywhere(argument: object) -> None:
    a, b = Replica("a"), Replica("b")
    made = router(a, b)

    assert await made.choose_replicas([a, b], pending(argument)) == [[a, b]]
    assert await made.choose_replicas([a, b], None) == [[a, b]]
    assert sum(in_flight(made).values()) == 0


async def test_a_subscription_goes_where_it_names_and_costs_no_charge() -> None:
    a, b = Replica("a"), Replica("b")
    made = router(a, b)
    call = pending(Subscribe(replica_id="b", gateway_id="g", subscription_id="g-0"))

    assert await made.choose_replicas([a, b], call) == [[b]]
    assert call.routing_context.should_backoff
    made.on_request_routed(call, b.replica_id, cast(ReplicaResult, None))
    assert in_flight(made) == {"a": 0, "b": 0}
    made.on_request_completed(b.replica_id, "call")
    assert in_flight(made) == {"a": 0, "b": 0}
    assert await made.choose_replicas([a], call) == [[a]], "which refuses it"


async def test_a_failure_of_the_policy_never_leaves_a_request_without_a_replica(
    caplog: pytest.LogCaptureFixture,
) -> None:
    a, b = Replica("a"), Replica("b")
    made = router(a, b)

    unhashable = pending(request(prompt=[2**40] * 64))  # ids are hashed as 32-bit integers

    assert await made.choose_replicas([a, b], unhashable) == [[a, b]]
    assert "routing failed" in caplog.text


async def test_a_replica_that_does_not_serve_is_no_candidate() -> None:
    a, b = Replica("a", problem="the engine has failed"), Replica("b")

    assert await router(a, b).choose_replicas([a, b], pending(request())) == [[b]]


async def test_a_replica_that_has_not_introduced_itself_is_the_last_resort() -> None:
    a, b = Replica("a", has_metadata=False), Replica("b")

    assert await router(a, b).choose_replicas([a, b], pending(request())) == [[b], [a]]


async def test_a_dead_replica_is_forgotten() -> None:
    a, b = Replica("a"), Replica("b")
    made = router(a, b)

    made.on_replica_actor_died(a.replica_id)
    assert set(in_flight(made)) == {"b"}

    made.update_replicas([a])
    assert set(in_flight(made)) == {"a"}


# --- The client --------------------------------------------------------------------------------------------------


class Response(DeploymentResponseGenerator[Delivery]):
    """Plays a script instead of a call; at its end it waits for ever unless `ends`."""

    def __init__(self, script: Sequence[object], *, ends: bool = True) -> None:
        routing: asyncio.Future[ReplicaResult] = asyncio.get_running_loop().create_future()
        super().__init__(routing, RequestMetadata(request_id="r", internal_request_id="i"))
        self._script = iter(script)
        self._ends = ends
        self.is_cancelled = False

    async def __anext__(self) -> Delivery:
        for act in self._script:
            if isinstance(act, BaseException):
                raise act
            return cast(Delivery, act)
        if not self._ends:
            await asyncio.Event().wait()
        raise StopAsyncIteration

    def cancel(self) -> None:
        self.is_cancelled = True


class Unassigned(Response):
    """A call for which Serve finds no replica: as in Serve, its `cancel` raises why, too."""

    def cancel(self) -> None:
        super().cancel()
        raise DeploymentUnavailableError(DEPLOYMENT)


class Answer:
    """One replica's answer to a broadcast."""

    def __init__(self, answer: object) -> None:
        self._answer = answer

    async def get_async(self) -> object:
        if isinstance(self._answer, BaseException):
            raise self._answer
        if self._answer is None:
            await asyncio.Event().wait()
        return self._answer


class Broadcast:
    def __init__(self, answers: Sequence[Answer]) -> None:
        self._answers = answers

    async def _fetch_replica_results_async(self) -> Sequence[Answer]:
        return self._answers


class Options(TypedDict, total=False):
    method_name: str
    stream: bool
    _by_reference: bool


class Handle:
    """The part of a deployment handle that the client uses."""

    def __init__(self, response: Response | None = None, answers: Sequence[object] | Exception = ()) -> None:
        self.response = response
        self.answers = answers
        self.ways: dict[str, bool] = {}  # by method that was called: whether its arguments went by reference
        self.n_asked = 0
        self.is_asked = asyncio.Event()
        self.router: KvAwareRouter | None = None

    def options(self, **chosen: Unpack[Options]) -> "HandleWith":
        return HandleWith(self, chosen)


class HandleWith:
    """A handle with options; by itself Serve passes by reference."""

    def __init__(self, handle: Handle, options: Options) -> None:
        self._handle = handle
        self._options = options
        self._router = SimpleNamespace(_asyncio_router=SimpleNamespace(_request_router=handle.router))

    def options(self, **chosen: Unpack[Options]) -> "HandleWith":
        return HandleWith(self._handle, self._options | chosen)

    def remote(self, *arguments: object) -> Response | None:
        assert self._options["stream"]
        self._call(self._options["method_name"])
        return self._handle.response

    def broadcast(self, method_name: str, argument: object) -> Broadcast:
        self._call(method_name)
        if isinstance(self._handle.answers, Exception):
            raise self._handle.answers
        self._handle.n_asked += 1
        self._handle.is_asked.set()
        return Broadcast([Answer(answer) for answer in self._handle.answers])

    def _call(self, method_name: str) -> None:
        self._handle.ways[method_name] = self._options.get("_by_reference", True)


def calls_by(handle: Handle) -> RayCalls:
    return RayCalls(cast(DeploymentHandle[object], handle), status_timeout_s=0.05)


def call_of(response: DeploymentResponseGenerator[Delivery]) -> RayCall[Delivery]:
    return RayCall(response, lambda internal_request_id: None)


def client(handle: Handle, *, clock: Callable[[], float] = time.monotonic) -> StreamingClient:
    return StreamingClient(calls_by(handle), status_period_s=0.01, clock=clock)


def delivery(*, finish: FinishReason | None = None, choice: int = 0) -> Delivery:
    delta = TokenDelta(request_id="r", choice=choice, start=0, token_ids=(1,), finish=finish)
    return Delivery(replica_id="a", deltas=(delta,))


def from_replica(cause: Exception) -> BaseException:
    """As Ray raises in the caller what an actor's method has raised."""
    error = RayTaskError("generate", "traceback", cause)  # type: ignore[no-untyped-call]
    return cast(BaseException, error.as_instanceof_cause())  # type: ignore[no-untyped-call]


async def test_all_but_generate_goes_by_grpc() -> None:
    handle = Handle(Response([]))
    calls = calls_by(handle)

    calls.generate(request())
    calls.serve(request(), ReturnAddress(gateway_id="g", first_stream=0))
    calls.subscribe(Subscribe(replica_id="a", gateway_id="g", subscription_id="g-0"))
    await calls.ask_all(None)

    assert handle.ways == {"generate": True, "serve": False, "subscribe": False, "status": False}


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        pytest.param(
            from_replica(InvalidRequest("too long", "prompt")), InvalidRequest("too long", "prompt"), id="400"
        ),
        pytest.param(from_replica(Overloaded("full", 2.0)), Overloaded("full", 2.0), id="429"),
        pytest.param(from_replica(EngineDead("dead")), EngineDead("dead"), id="the engine"),
        pytest.param(
            ActorDiedError(),
            EngineDead("the replica was lost: ActorDiedError"),
            id="the process",
        ),
        pytest.param(
            ActorUnavailableError("gone", None),
            EngineDead("the replica was lost: ActorUnavailableError"),
            id="the connection",
        ),
        pytest.param(
            AioRpcError(StatusCode.CANCELLED, Metadata(), Metadata()),
            EngineDead("the call to the replica has failed: CANCELLED"),
            id="gRPC",
        ),
        pytest.param(
            DeploymentUnavailableError(DEPLOYMENT),
            Unavailable("the replica deployment is not available"),
            id="the deployment",
        ),
        pytest.param(
            asyncio.CancelledError(),
            EngineDead("the replica cancelled the request"),
            id="cancelled by the replica",
        ),
    ],
)
async def test_errors_are_ours_exactly(raised: BaseException, expected: BakehouseError) -> None:
    response = Response([delivery(), raised])
    stream = client(Handle(response)).generate(request())
    await anext(stream)

    with pytest.raises(BakehouseError) as caught:
        await anext(stream)

    assert type(caught.value) is type(expected)
    assert caught.value.args == expected.args
    assert caught.value.__cause__ is raised
    assert response.is_cancelled


async def test_a_call_without_a_replica_is_our_error_though_its_cancel_fails_as_well() -> None:
    response = Unassigned([DeploymentUnavailableError(DEPLOYMENT)])

    with pytest.raises(Unavailable, match="not available"):
        await anext(client(Handle(response)).generate(request()))

    assert response.is_cancelled


async def test_a_bug_of_the_replica_stays_one() -> None:
    stream = client(Handle(Response([from_replica(ZeroDivisionError())]))).generate(request())

    with pytest.raises(RayError):
        await anext(stream)


async def test_closing_early_cancels_the_call() -> None:
    response = Response([delivery()], ends=False)
    stream = client(Handle(response)).generate(request())

    await anext(stream)
    await stream.aclose()

    assert response.is_cancelled


async def test_cancelling_while_nothing_has_come_cancels_the_call() -> None:
    response = Response([], ends=False)
    stream = client(Handle(response)).generate(request())
    waiting = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)

    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting

    assert response.is_cancelled


class Taken:
    """The call at the replica that has taken it."""

    def __init__(self) -> None:
        self.n_cancels = 0

    def cancel(self) -> None:
        self.n_cancels += 1


@pytest.mark.parametrize("is_seen", [False, True])
async def test_a_call_that_a_replica_has_taken_is_cancelled_there_once(is_seen: bool) -> None:
    """On the router's own loop Serve forgets one at which nobody has looked since it was taken."""
    taken = Taken()
    routing: asyncio.Future[ReplicaResult] = asyncio.get_running_loop().create_future()
    routing.set_result(cast(ReplicaResult, taken))
    metadata = RequestMetadata(request_id="r", internal_request_id="i")
    response = DeploymentResponseGenerator[Delivery](routing, metadata, _is_router_running_in_separate_loop=False)
    if is_seen:
        await response._fetch_future_result_async()

    call_of(response).cancel()

    assert taken.n_cancels == 1


async def test_a_call_that_is_still_being_routed_is_cancelled_there() -> None:
    routing: asyncio.Future[ReplicaResult] = asyncio.get_running_loop().create_future()
    metadata = RequestMetadata(request_id="r", internal_request_id="i")

    call_of(
        DeploymentResponseGenerator[Delivery](routing, metadata, _is_router_running_in_separate_loop=False)
    ).cancel()

    assert routing.cancelled()


async def test_the_router_hears_of_a_call_s_first_tokens() -> None:
    a = Replica("a")
    made = router(a)
    handle = Handle(Response([delivery(), delivery(finish=FinishReason.STOP)]))
    handle.router = made
    await made.choose_replicas([a], pending(request(), "i"))
    assert [view.waiting_tokens for view in made.views()] == [64]

    async with aclosing(client(handle).generate(request())) as stream:
        await anext(stream)

        assert [view.waiting_tokens for view in made.views()] == [0]
        assert in_flight(made) == {"a": 1}


async def test_a_call_whose_choices_have_all_ended_is_left_alone() -> None:
    response = Response([delivery(finish=FinishReason.STOP), delivery(finish=FinishReason.STOP, choice=1)])

    seen = [item async for item in client(Handle(response)).generate(request(n=2))]

    assert len(seen) == 2
    assert not response.is_cancelled


async def test_a_request_does_not_wait_for_ever_for_somebody_to_serve() -> None:
    response = Response([], ends=False)
    now = [0.0]
    watched = client(Handle(response), clock=lambda: now[0])
    waiting = asyncio.ensure_future(anext(watched.generate(request())))
    now[0] += NOBODY_SERVES_S + 2

    with pytest.raises(Unavailable, match="no replica has served for 12 s"):
        await waiting

    assert response.is_cancelled


async def test_a_request_may_wait_while_somebody_serves() -> None:
    handle = Handle(Response([], ends=False), [ReplicaStatus(card=card("a"), load=LOAD)])
    now = [0.0]
    watched = client(handle, clock=lambda: now[0])
    watched.start()
    waiting = asyncio.ensure_future(anext(watched.generate(request())))

    for _ in range(10):
        await rounds(handle, 2)
        now[0] += NOBODY_SERVES_S / 3

    assert not waiting.done()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await watched.close()


async def rounds(handle: Handle, n_rounds: int) -> None:
    """Wait until the client has asked `n_rounds` more times, and so has used the answers before."""
    for _ in range(n_rounds):
        handle.is_asked.clear()
        await asyncio.wait_for(handle.is_asked.wait(), timeout=60)


async def test_statuses_show_who_serves_who_does_not_and_who_has_gone_silent() -> None:
    counted = (Series(PREEMPTIONS.name, (), 1),)
    well = ReplicaStatus(card=card("a"), load=LOAD, counted=counted)
    ill = ReplicaStatus(card=card("b"), load=LOAD, problem="dead", counted=counted)
    handle = Handle(answers=[well, ill])
    watched = client(handle)
    assert await watched.statuses() == ()
    watched.start()
    await rounds(handle, 2)
    both = await watched.statuses()

    handle.answers = [ActorDiedError(), ill]
    await rounds(handle, 2)
    statuses = {status.card.replica_id: status for status in await watched.statuses()}
    await watched.close()

    assert set(both) == {well, ill}
    assert (statuses["b"].problem, statuses["b"].counted) == ("dead", counted)
    assert (statuses["a"].problem or "").startswith("silent for")
    assert statuses["a"].counted == (), "nobody knows what it counts by now"
    assert statuses["a"].age_s > statuses["b"].age_s > 0


async def test_whether_all_that_run_have_answered_is_known() -> None:
    well = ReplicaStatus(card=card("a"), load=LOAD)
    told: list[tuple[Sequence[object] | Exception, int, bool]] = [
        ([well], 1, True),
        ([None, well], 1, False),
        ([ActorDiedError(), well], 1, False),
        (DeploymentUnavailableError(DEPLOYMENT), 0, True),
        (ActorDiedError(), 0, False),
    ]
    for answers, n_statuses, is_whole in told:
        seen = await calls_by(Handle(answers=answers)).ask_all(None)
        assert (len(seen.statuses), seen.is_whole) == (n_statuses, is_whole), answers


async def test_stories_are_those_of_all_replicas_that_answer_and_come_by_grpc() -> None:
    story = StoryLog().told(ended_at_s=1.0)
    told = [ToldStory(replica_id=name, request_id=name, story=story) for name in ("a", "b")]
    handle = Handle(answers=[(told[0],), ActorDiedError(), (), (told[1],)])
    assert await calls_by(handle).explain_all(["a", "b"]) == tuple(told)
    assert handle.ways == {"explain": False}
    for gone in (DeploymentUnavailableError(DEPLOYMENT), ActorDiedError()):
        assert await client(Handle(answers=gone)).explain(["a"]) == ()


async def test_one_silent_replica_does_not_hide_the_others() -> None:
    well = ReplicaStatus(card=card("a"), load=LOAD)
    handle = Handle(answers=[None, well])
    watched = client(handle)
    watched.start()

    await rounds(handle, 3)

    assert await watched.statuses() == (well,)
    watched.check()
    await watched.close()
