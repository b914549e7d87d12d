"""Mailboxes: the first token at once, then whatever accumulated, then one end."""

import asyncio
import threading
from dataclasses import replace

import pytest
from bakehouse_replica.core.errors import Overloaded
from bakehouse_replica.core.types import Cost, FinishReason, TokenDelta, TokenLogprob, Usage
from bakehouse_replica.mailbox import Mailbox, post

COST = Cost(block_seconds=1.5, computed_tokens=3, cached_tokens=0, recomputed_tokens=0, generated_tokens=3)
USAGE = Usage(prompt_tokens=3, cached_tokens=0, completion_tokens=3)


def delta(start: int, *token_ids: int, choice: int = 0, finish: FinishReason | None = None) -> TokenDelta:
    usage = USAGE if finish else None
    return TokenDelta(request_id="r", choice=choice, start=start, token_ids=token_ids, finish=finish, usage=usage)


async def test_deltas_that_wait_together_travel_as_one() -> None:
    mailbox = Mailbox(1)
    for letter in (delta(0, 5), delta(1, 6, 7), delta(3, finish=FinishReason.STOP)):
        mailbox.put(letter)
    (merged,) = await mailbox.take()
    assert merged == TokenDelta(
        request_id="r", choice=0, start=0, token_ids=(5, 6, 7), finish=FinishReason.STOP, usage=USAGE
    )
    assert mailbox.is_finished


async def test_the_first_deltas_usage_survives_merging() -> None:
    mailbox = Mailbox(1)
    mailbox.put(replace(delta(0, 5), usage=USAGE))
    mailbox.put(delta(1, 6))
    (merged,) = await mailbox.take()
    assert merged.usage == USAGE


async def test_log_probabilities_are_merged_with_their_tokens_and_the_prompt_s_kept() -> None:
    mailbox = Mailbox(1)
    scores = tuple(TokenLogprob(logprob=-float(rank), rank=rank) for rank in range(1, 6))
    mailbox.put(replace(delta(0, 5), logprobs=scores[:1], prompt_logprobs=scores[3:]))
    mailbox.put(replace(delta(1, 6, 7), logprobs=scores[1:3]))
    mailbox.put(delta(3, finish=FinishReason.STOP))
    (merged,) = await mailbox.take()
    assert (merged.logprobs, merged.prompt_logprobs) == (scores[:3], scores[3:])


async def test_choices_are_merged_apart() -> None:
    mailbox = Mailbox(2)
    for letter in (
        delta(0, 1),
        delta(0, 8, choice=1),
        delta(1, 2),
        delta(1, choice=1, finish=FinishReason.LENGTH),
    ):
        mailbox.put(letter)
    assert [(d.choice, d.start, d.token_ids, d.finish) for d in await mailbox.take()] == [
        (0, 0, (1, 2), None),
        (1, 0, (8,), FinishReason.LENGTH),
    ]
    assert not mailbox.is_finished


async def test_an_error_comes_after_what_was_there_before_it() -> None:
    mailbox = Mailbox(1)
    mailbox.put(delta(0, 5))
    mailbox.put(Overloaded("full"))
    assert [d.token_ids for d in await mailbox.take()] == [(5,)]
    assert not mailbox.is_finished
    with pytest.raises(Overloaded, match="full"):
        await mailbox.take()
    assert mailbox.is_finished


async def test_a_gap_between_deltas_is_our_bug_and_loud() -> None:
    mailbox = Mailbox(1)
    mailbox.put(delta(0, 5))
    with pytest.raises(AssertionError):
        mailbox.put(delta(2, 6))


async def test_a_waiting_consumer_is_woken_from_another_thread() -> None:
    mailbox = Mailbox(1)
    threading.Thread(target=lambda: post({mailbox.loop: [(mailbox, delta(0, 5)), (mailbox, delta(1, 6))]})).start()
    async with asyncio.timeout(60):
        assert [d.token_ids for d in await mailbox.take()] == [(5, 6)]


def test_mail_for_a_closed_loop_comes_back() -> None:
    async def make() -> Mailbox:
        return Mailbox(1)

    mailbox = asyncio.run(make())
    assert post({mailbox.loop: [(mailbox, delta(0, 5))]}) == [mailbox]


async def test_the_cost_survives_merging() -> None:
    mailbox = Mailbox(1)
    mailbox.put(delta(0, 5))
    mailbox.put(replace(delta(1, finish=FinishReason.STOP), cost=COST))
    (merged,) = await mailbox.take()
    assert merged.cost == COST


@pytest.mark.parametrize("comes_first", [True, False])
async def test_who_leaves_is_told_the_cost_once_whether_it_waits_or_comes_yet(comes_first: bool) -> None:
    mailbox, paid = Mailbox(2), list[Cost]()
    letters = [delta(0, 5), delta(0, finish=FinishReason.CANCELLED, choice=1)]
    end = replace(delta(1, finish=FinishReason.CANCELLED), cost=COST)
    for letter in [*letters, end] if comes_first else letters:
        mailbox.put(letter)
    mailbox.leave(paid.append)
    if not comes_first:
        assert paid == []
        mailbox.put(end)
    assert paid == [COST]


async def test_who_leaves_after_it_has_taken_the_cost_is_not_told_again() -> None:
    mailbox, paid = Mailbox(1), list[Cost]()
    mailbox.put(replace(delta(0, finish=FinishReason.STOP), cost=COST))
    await mailbox.take()
    mailbox.leave(paid.append)
    assert paid == []
