"""Requests in token ids, from demands."""

from random import Random

import pytest
from bakehouse_cluster.bench.workloads import Demand, Messages
from bakehouse_cluster.plan.asking import RequestWriter
from bakehouse_replica.core.errors import StartupError


def encoded(given: str | Messages) -> tuple[int, ...]:
    return tuple(map(ord, given)) if isinstance(given, str) else (7, 8, 9)


def writer(seed: int = 0, timeout_s: float | None = None) -> RequestWriter:
    return RequestWriter(vocabulary_size=200, draw=Random(seed), encode=encoded, timeout_s=timeout_s)


def test_prompts_and_answers_have_the_demanded_lengths() -> None:
    request = writer(timeout_s=5.0).write(Demand(n_input=1000, n_output=7))
    assert len(request.prompt_ids) == 1000
    assert 0 <= min(request.prompt_ids) < 5 < 195 <= max(request.prompt_ids) < 200
    assert (request.params.max_tokens, request.params.stop_token_ids, request.timeout_s) == (7, (), 5.0)


def test_prompts_share_what_they_are_to_share_and_nothing_else() -> None:
    one = writer()
    demands = [Demand(n_input=20, n_output=1, prefix_id=index % 2, n_prefix=12) for index in range(4)]
    first, second, third, fourth = (one.write(demand).prompt_ids for demand in demands)
    assert first[:12] == third[:12] != second[:12] == fourth[:12]
    assert first[12:] != third[12:]
    assert {len(prompt) for prompt in (first, second, third, fourth)} == {20}


def test_the_same_seed_writes_the_same_requests() -> None:
    demand = Demand(n_input=20, n_output=1)
    assert writer(1).write(demand) == writer(1).write(demand) != writer(2).write(demand)


def test_each_request_has_an_id_and_a_seed_of_its_own() -> None:
    one = writer()
    requests = [one.write(Demand(n_input=3, n_output=1)) for _ in range(3)]
    assert len({request.request_id for request in requests}) == 3
    assert len({request.params.seed for request in requests}) == 3


def test_given_prompts_are_kept_or_encoded() -> None:
    one = writer()
    assert one.write(Demand(given=(3, 1, 199), n_output=1)).prompt_ids == (3, 1, 199)
    assert one.write(Demand(given="ab", n_output=1)).prompt_ids == (97, 98)
    assert one.write(Demand(given=Messages((("user", "hi"),)), n_output=1)).prompt_ids == (7, 8, 9)


def test_ids_beyond_the_vocabulary_are_refused_by_their_line() -> None:
    with pytest.raises(StartupError, match="line 3: token ids from 3 to 200; the model's are from 0 to 199"):
        writer().write(Demand(given=(3, 200), n_output=1, origin="trace t, line 3"))


def test_a_prompt_that_would_fill_the_memory_is_refused() -> None:
    for n_input in (10_000_001, 10**24):
        with pytest.raises(StartupError, match=f"line 7: a prompt of {n_input} tokens; the longest .* 10000000"):
            writer().write(Demand(n_input=n_input, n_output=1, origin="trace t, line 7"))


def test_what_cannot_be_encoded_is_refused_by_its_line() -> None:
    def refuse(_: object) -> tuple[int, ...]:
        raise StartupError("no such role")

    one = RequestWriter(vocabulary_size=200, draw=Random(0), encode=refuse)
    with pytest.raises(StartupError, match="line 2: no such role"):
        one.write(Demand(given="a", n_output=1, origin="trace t, line 2"))


def test_requests_of_a_trace_are_written_as_they_are_taken() -> None:
    def refuse(_: object) -> tuple[int, ...]:
        raise AssertionError("not asked for yet")

    one = RequestWriter(vocabulary_size=200, draw=Random(0), encode=refuse)
    coming = one.arriving(
        [Demand(n_input=2, n_output=1, arrival_s=0.5), Demand(given="x", n_output=1, arrival_s=1.0)]
    )
    assert next(coming)[0] == 0.5
    with pytest.raises(AssertionError, match="not asked for yet"):
        next(coming)
