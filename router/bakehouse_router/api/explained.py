"""What became of a request, and why, as `GET /v1/requests/{id}/explain` tells it.

Seconds count from the request's arrival at the gateway; those within a `story` from its arrival at the replica,
whose clock measures them. `version` changes when a field is renamed, removed or means something else.
"""

from collections.abc import Sequence
from dataclasses import fields
from typing import cast

from bakehouse_replica.core.story import Admitted, Entry, Preempted, ToldStory, Waited, WaitSum

from bakehouse_router.api.token_json import Json
from bakehouse_router.attempts import Attempt
from bakehouse_router.request_report import PromptAttempts, RequestReport
from bakehouse_router.routing import Routing

VERSION = 1
MAX_PROMPTS = 8
# Of the attempts for one prompt the first and the latest are told.
FIRST_ATTEMPTS = 1
LAST_ATTEMPTS = 7
# Of the choices that go on apart after a loss: of 8 prompts with 128 choices each all of them were 9 MB, which
# held up the gateway's streams while they were made, at the request's end and whenever somebody asked.
MAX_PARTS = 4
_FIELDS: dict[type[Entry | WaitSum], tuple[str, ...]] = {
    kind: tuple(field.name for field in fields(kind)) for kind in (Waited, Admitted, Preempted, WaitSum)
}
_EVENTS: dict[type[Entry], str] = {Waited: "waited", Admitted: "admitted", Preempted: "preempted"}


def explanation(report: RequestReport, *, is_over: bool) -> Json:
    """The whole of it; of a request that goes on, as it stands now."""
    prompts = report.prompts[:MAX_PROMPTS]
    return {
        "object": "request.explanation",
        "version": VERSION,
        "request_id": report.request_id,
        "reply_id": report.call_id,
        "face": report.face,
        "kind": report.kind,
        "state": "ended" if is_over else "running",
        "outcome": report.outcome if is_over else None,
        "seconds": _rounded(report.ended_at - report.received_at),
        "first_token_s": _rounded(report.first_token_s),
        "admission": _admission(report, is_over=is_over),
        "prompts": [_prompt(index, prompt, report.received_at) for index, prompt in enumerate(prompts)],
        "n_prompts_left_out": len(report.prompts) - len(prompts),
    }


def ids_without_story(told: Json) -> list[str]:
    """The ids of the parts of an explanation whose replica has not told their story."""
    return [str(part["id"]) for part in _parts(told) if part["story"] is None]


def add_stories(told: Json, stories: Sequence[ToldStory]) -> None:
    """Puts the stories of parts in their places; changes `told`."""
    by_id = {story.request_id: story for story in stories}
    for part in _parts(told):
        story = by_id.get(str(part["id"]))
        if story is not None:
            part["story"] = _story(story)


def _parts(told: Json) -> list[Json]:
    prompts = cast("list[dict[str, list[dict[str, list[Json]]]]]", told["prompts"])
    return [part for prompt in prompts for attempt in prompt["attempts"] for part in attempt["parts"]]


def _admission(report: RequestReport, *, is_over: bool) -> Json:
    """What the gateway's own queue has decided."""
    decision = "pending"
    if report.queued_at is not None:
        decision = "queued"
    elif report.problem is not None and report.problem.code == "overloaded":
        decision = "shed"
    elif is_over:
        decision = "refused"
    at_s = None if report.queued_at is None else _rounded(report.queued_at - report.received_at)
    return {"decision": decision, "at_s": at_s}


def _prompt(index: int, prompt: PromptAttempts, received_at: float) -> Json:
    made = prompt.made
    if len(made) > FIRST_ATTEMPTS + LAST_ATTEMPTS:
        made = (*made[:FIRST_ATTEMPTS], *made[-LAST_ATTEMPTS:])
    return {
        "prompt": index,
        "attempts": [_attempt(attempt, received_at) for attempt in made],
        "n_attempts_left_out": len(prompt.made) - len(made),
    }


def _attempt(attempt: Attempt, received_at: float) -> Json:
    state = "running" if attempt.ended_at is None else "lost" if attempt.is_lost else "ended"
    stories = {told.request_id: told for told in attempt.stories}
    shown = attempt.request_ids[:MAX_PARTS]
    return {
        "state": state,
        "loss": attempt.loss,
        "at_s": _rounded(attempt.begun_at - received_at),
        "ended_at_s": _since(attempt.ended_at, received_at),
        "first_token_at_s": _since(attempt.first_at, received_at),
        "after_tokens": attempt.n_before,
        "replicas": list(attempt.replica_ids),
        "parts": [
            {
                "id": request_id,
                "routing": _routing(attempt.routings.get(request_id), received_at),
                "story": None if (told := stories.get(request_id)) is None else _story(told),
            }
            for request_id in shown
        ],
        "n_parts_left_out": len(attempt.request_ids) - len(shown),
    }


def _routing(routing: Routing | None, received_at: float) -> Json | None:
    if routing is None:
        return None
    return {
        "reason": routing.reason,
        "at_s": _rounded(routing.chosen_at - received_at),
        "n_choices": routing.n_choices,
        "accepted_by": routing.accepted_by,
        "accepted_at_s": _since(routing.accepted_at, received_at),
        "candidates": [
            {
                "replica": candidate.replica_id,
                "cost_tokens": candidate.cost_tokens,
                "uncached_tokens": candidate.n_uncached_tokens,
                "waiting_tokens": candidate.n_waiting_tokens,
                "sequence_tokens": candidate.n_sequence_tokens,
                "shortage_tokens": candidate.n_shortage_tokens,
                "skipped": candidate.skipped,
            }
            for candidate in routing.choice.ranked
        ],
        "n_candidates_left_out": routing.n_left_out,
        "excluded": [{"replica": replica, "reason": reason} for replica, reason in routing.choice.excluded],
    }


def _story(told: ToldStory) -> Json:
    story = told.story
    return {
        "replica": told.replica_id,
        "ended_at_s": _rounded(story.ended_at_s),
        "prepared_s": _rounded(story.prepared_s),
        "waited": [_plain(total) for total in story.waited],
        "entries": [{"event": _EVENTS[type(entry)], **_plain(entry)} for entry in story.entries],
        "n_entries_left_out": story.n_left_out,
        "n_preemptions": story.n_preemptions,
        "n_prefill_chunks": story.n_chunks,
        "n_copied_blocks": story.n_copies,
    }


def _plain(message: Entry | WaitSum) -> Json:
    """Its fields; `asdict` would copy each of them, which takes four times as long."""
    told = [(name, getattr(message, name)) for name in _FIELDS[type(message)]]
    return {name: _rounded(value) if isinstance(value, float) else value for name, value in told}


def _since(moment: float | None, received_at: float) -> float | None:
    return None if moment is None else _rounded(moment - received_at)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
