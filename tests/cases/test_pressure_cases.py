"""Cases of requests that share a batch, a pool and a queue, over HTTP on a scripted model."""

import asyncio
from collections.abc import Sequence

import pytest
from answers import Answer, Json, ask
from bakehouse_replica.core.types import StepPlan
from bakehouse_router.settings import GatewaySettings
from engines import Gate
from prometheus_client.parser import text_string_to_metric_families
from scripted import MODEL, ScriptedServer, scripted_server, until, vocabulary

STREAM: Json = {"stream": True, "stream_options": {"include_usage": True}}
BOTH_WAYS = pytest.mark.parametrize("way", [{}, STREAM], ids=["whole", "streamed"])
ENDLESS: Json = {"pieces": ["x"], "default": {"ids": [0]}}


def completion(prompt: object, **fields: object) -> Json:
    return {"prompt": prompt, "temperature": 0, **fields}


def prompt_ids(first: int, n_tokens: int) -> list[int]:
    """Bytes' ids, so that no two of these prompts have a block in common."""
    return [1 + first, *(1 + index % 256 for index in range(n_tokens - 1))]


def preempted(plans: Sequence[StepPlan]) -> set[int]:
    """The sequences that were computed from their beginning although they had drawn before."""
    drawn: set[int] = set()
    found: set[int] = set()
    for plan in plans:
        found |= {chunk.sequence_id for chunk in plan.chunks if chunk.sequence_id in drawn and chunk.start == 0}
        drawn |= {chunk.sequence_id for chunk in plan.chunks if chunk.sample is not None}
    return found


COLOURS, WORDS = ("red", "green", "blue", "re"), ("ab", "abc", "true", "b")
FRAGMENTS = [
    "r",
    "re",
    "red",
    "d",
    "g",
    "gr",
    "een",
    "n",
    "b",
    "bl",
    "ue",
    "e",
    "a",
    "ab",
    "c",
    "t",
    "rue",
    "true",
]


async def test_c28_two_lists_of_choices_in_one_batch_never_mix_in_200_runs() -> None:
    pieces = vocabulary(*FRAGMENTS, {"special": "<|turn|>"})
    everything = list(range(1, len(pieces)))  # all but as likely as each other, the special one too
    tree: Json = {"pieces": pieces, "eos": 0, "default": {"ids": [1]}, "prefer": [everything]}
    async with scripted_server(tree) as server:

        async def run(seed: int) -> None:
            one, other = await asyncio.gather(
                *(
                    ask(
                        server.http,
                        completion(
                            "hi", n=2, temperature=1, seed=seed, structured_outputs={"choice": list(words)}
                        ),
                    )
                    for words in (COLOURS, WORDS)
                )
            )
            for answer, words in ((one, COLOURS), (other, WORDS)):
                assert {choice.text for choice in answer.choices.values()} <= set(words)
                assert {choice.finish for choice in answer.choices.values()} == {"stop"}

        for first in range(0, 200, 10):
            await asyncio.gather(*map(run, range(first, first + 10)))
        assert sum(len(plan.chunks) >= 4 for plan in server.plans) > 20, "too few batches were shared"


@BOTH_WAYS
@pytest.mark.parametrize(("n_prompt", "n_output"), [(20, 142), (161, 1), (160, 2)])
async def test_c42_a_request_that_the_pool_can_never_hold_is_told_so_and_others_are_served(
    way: Json, n_prompt: int, n_output: int
) -> None:
    async with scripted_server(ENDLESS, n_blocks=10) as server:  # of 16 tokens; the last one is never stored
        neighbour = asyncio.create_task(ask(server.http, completion(prompt_ids(0, 20), max_tokens=5)))
        refused = await ask(server.http, completion(prompt_ids(1, n_prompt), max_tokens=n_output, **way))
        largest = await ask(server.http, completion(prompt_ids(1, 20), max_tokens=141, **way))
        after = await ask(server.http, completion(prompt_ids(2, 20), max_tokens=5, **way))
        beside = await neighbour
    assert refused.status == 400
    assert "11 KV blocks of 16; this replica has 10" in refused.complaint()
    assert (largest.choice.text, largest.choice.finish) == ("x" * 141, "length")
    for answer in (beside, after):
        assert (answer.choice.text, answer.choice.finish) == ("xxxxx", "length")


async def test_c44_a_smaller_priority_is_served_first_and_its_victim_before_later_arrivals() -> None:
    gate = Gate()
    ended: list[str] = []
    async with scripted_server(ENDLESS, n_blocks=6, before_step=gate.before_step) as server:  # room for two

        async def finish(name: str, priority: int) -> Answer:
            n_output = 3 if name == "urgent" else 16
            asked = completion(prompt_ids(ord(name[0]), 32), max_tokens=n_output, priority=priority)
            answer = await ask(server.http, asked)
            ended.append(name)
            return answer

        tasks = []
        for name, priority in (("a", 0), ("b", 0), ("later", 0)):
            tasks.append(asyncio.create_task(finish(name, priority)))
            await until(lambda: server.client.n_open == len(tasks))
        gate.allow(2)
        await until(lambda: len(server.plans) == 3)
        assert {chunk.sequence_id for chunk in server.plans[-1].chunks} == {0, 1}
        tasks.append(asyncio.create_task(finish("urgent", -1)))
        await until(lambda: server.client.n_open == 4)
        while all(chunk.sequence_id != 3 for chunk in server.plans[-1].chunks):
            n_steps = len(server.plans)
            assert n_steps < 12, "the urgent one was not served at once"
            gate.allow(1)
            await until(lambda n_steps=n_steps: len(server.plans) > n_steps)  # type: ignore[misc]
        gate.open()
        answers = await asyncio.gather(*tasks)
        assert preempted(server.plans) == {1}
    assert [len(answer.choice.text) for answer in answers] == [16, 16, 16, 3]
    assert ended.index("urgent") < ended.index("b") < ended.index("later")


async def samples(server: ScriptedServer) -> dict[tuple[str, ...], float]:
    """What `/metrics` shows: by name and labels."""
    told = (await server.http.get("/metrics")).text
    families = text_string_to_metric_families(told)
    return {
        (sample.name, *sample.labels.values()): sample.value for family in families for sample in family.samples
    }


@BOTH_WAYS
async def test_c63_ten_calls_of_which_three_are_preempted_and_two_leave_early_give_eight_first_tokens(
    way: Json,
) -> None:
    gate = Gate()
    async with scripted_server(ENDLESS, n_blocks=20, before_step=gate.before_step) as server:
        asked = [completion(prompt_ids(index, 20), max_tokens=40, **way) for index in range(8)]
        served = [asyncio.create_task(ask(server.http, body)) for body in asked]
        await until(lambda: server.client.n_open == 8)
        leaving = [
            asyncio.create_task(ask(server.http, completion(prompt_ids(20 + index, 20), priority=9, **way)))
            for index in range(2)
        ]
        await until(lambda: server.client.n_open == 10)
        for task in leaving:
            task.cancel()
        await until(lambda: server.client.n_open == 8)
        gate.open()
        answers = await asyncio.gather(*served)
        assert len(preempted(server.plans)) >= 3
        found = await samples(server)
    assert [answer.choice.text for answer in answers] == ["x" * 40] * 8
    assert found["bakehouse_time_to_first_token_seconds_count", "completion"] == 8
    assert found["bakehouse_requests_total", "completion", "complete"] == 8
    assert found["bakehouse_requests_total", "completion", "cancelled"] == 2
    assert found["bakehouse_request_duration_seconds_count", "completion"] == 10
    assert found["bakehouse_generated_tokens_total",] == 8 * 40
    computed, cached = (found["bakehouse_prompt_tokens_total", source] for source in ("computed", "cached"))
    assert (computed, cached) == (8 * 20, 0)


async def test_c63_calls_that_end_without_a_token_give_no_first_one() -> None:
    tree: Json = {"pieces": vocabulary("a", "b"), "eos": 0, "default": {"ids": [1]}}
    async with scripted_server(tree) as server:
        echo = await ask(server.http, completion("hi", echo=True, max_tokens=0))
        # The grammar wants `b`, and only `a` may be drawn: nothing can ever come.
        broken = await ask(server.http, completion("hi", structured_outputs={"regex": "b"}, allowed_token_ids=[1]))
        found = await samples(server)
    assert (echo.choice.text, echo.status, broken.status) == ("hi", 200, 400)
    assert found["bakehouse_requests_total", "completion", "complete"] == 1
    assert found["bakehouse_requests_total", "completion", "invalid_request"] == 1
    assert found["bakehouse_time_to_first_token_seconds_count", "completion"] == 0


async def test_what_is_answered_by_an_error_alone_is_counted_by_its_code() -> None:
    gate = Gate()
    limits = GatewaySettings(served_name=MODEL, max_queued_requests=1)
    async with scripted_server(ENDLESS, gateway=limits, before_step=gate.before_step) as server:
        waiting = asyncio.create_task(ask(server.http, completion("hi", max_tokens=1)))
        await until(lambda: server.client.n_open == 1)
        refused = [
            await ask(server.http, body)
            for body in (
                completion("hi", temprature=1),
                completion("hi", n=0),
                completion("hi") | {"model": "another"},
                completion("hi", max_tokens=1),  # one waits already
            )
        ]
        gate.open()
        assert (await waiting).status == 200
        found = await samples(server)
    assert [answer.status for answer in refused] == [400, 400, 404, 429]
    counted = {labels[0]: n for (name, *labels), n in found.items() if name == "bakehouse_rejections_total" and n}
    assert counted == {"invalid_request": 2, "model_not_found": 1, "overloaded": 1}
    assert found["bakehouse_requests_total", "completion", "overloaded"] == 1, "it was begun"
    assert found["bakehouse_requests_total", "completion", "invalid_request"] == 0
