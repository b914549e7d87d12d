"""`bakehouse explain`: what became of a request and why, as its gateway tells it, for people."""

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx
from bakehouse_replica.core.errors import BakehouseError, StartupError
from rich.console import Console
from rich.markup import escape

from bakehouse_cluster.bench.table import plain_table, print_table
from bakehouse_cluster.progress import n_of
from bakehouse_cluster.reaching import unreachable

TIMEOUT_S = 10.0  # the gateway asks its replicas for 3 s at most
# In words that say what would have helped; the names are those of `core/story.py` in the replica.
REASONS = {
    "next_plan": "it came between two plans",
    "draw_in_flight": "the step in flight had to tell the host what it draws first",
    "preemption_ahead": "somebody had to make way, which waits for the step in flight",
    "preempting": "the step took blocks back for those that ran, and admitted nobody",
    "no_tokens": "the step's tokens were spent",
    "no_slot": "too few slots were free",
    "long_prefills": "another long prompt was in prefill",
    "no_blocks": "too few KV blocks were free",
    "prefix_coming": "another computed the beginning of its prompt",
}

Row = tuple[str, str, str]  # seconds since its arrival, what happened, why
Json = dict[str, Any]


def explain(request_id: str, *, url: str, key: str, console: Console) -> None:
    """Prints the explanation of a request that the server at `url` has served or serves.

    Raises `StartupError` where no server answers, `BakehouseError` with what it says where it knows none.
    """
    told = _asked(request_id, url, key)
    outcome = told["outcome"] or "still running"
    lasted = f"{outcome}, {told['seconds']:.3f} s"
    console.print(f"{told['request_id']} ({told['reply_id']}): {lasted}", markup=False, highlight=False)
    table = plain_table("s", "what", "why", n_left=3)
    for at, what, why in rows(told):
        table.add_row(at, escape(what), escape(why))
    print_table(table, console)


def rows(told: Json) -> Iterator[Row]:
    """The explanation line by line, in the order of its parts."""
    admission = told["admission"]
    yield _at(admission["at_s"]), f"gateway: {admission['decision']}", ""
    for prompt in told["prompts"]:
        for attempt in prompt["attempts"]:
            for part in attempt["parts"]:
                yield _at(attempt["at_s"]), f"sent: {part['id']}", _after(attempt["after_tokens"])
                yield from _routing(part["routing"])
                # The replica's clock is its own: its story begins, as far as anybody knows, with the choice of it.
                yield from _story(part["story"], (part["routing"] or attempt)["at_s"])
            yield from _left_out(attempt["n_parts_left_out"], "part")
            if attempt["state"] == "lost":
                yield _at(attempt["ended_at_s"]), "lost", attempt["loss"] or ""
        yield from _left_out(prompt["n_attempts_left_out"], "attempt")
    yield from _left_out(told["n_prompts_left_out"], "prompt")
    if told["first_token_s"] is not None:
        yield _at(told["first_token_s"]), "first token", ""
    if told["state"] == "ended":
        yield _at(told["seconds"]), "ended", told["outcome"]


def _routing(routing: Json | None) -> Iterator[Row]:
    if routing is None:
        return
    times = "" if routing["n_choices"] == 1 else f", chosen for {routing['n_choices']} times"
    yield _at(routing["at_s"]), f"routed: {routing['accepted_by'] or 'waits'}", f"{routing['reason']}{times}"
    for one in routing["candidates"]:
        cost = (
            f"{one['cost_tokens']} = {one['uncached_tokens']} uncached + {one['waiting_tokens']} waiting "
            f"+ {one['sequence_tokens']} sequences + {one['shortage_tokens']} short"
        )
        yield "", f"  {one['replica']}", cost if one["skipped"] is None else f"{cost}; skipped: {one['skipped']}"
    for one in routing["excluded"]:
        yield "", f"  {one['replica']}", f"excluded: {one['reason']}"
    yield from _left_out(routing["n_candidates_left_out"], "candidate")


def _story(story: Json | None, begun_s: float) -> Iterator[Row]:
    if story is None:
        yield "", "at the replica", "not known (any more)"
        return
    if story["prepared_s"]:
        yield "", f"grammar {story['prepared_s']:.3f} s", "compiled before it was queued"
    for entry in story["entries"]:
        yield _at(begun_s + entry["at_s"]), *_event(entry)
    yield from _left_out(story["n_entries_left_out"], "line")
    for total in story["waited"] if story["n_entries_left_out"] else ():
        yield "", f"waited {total['seconds']:.3f} s", f"in all: {_reason(total)}"
    computed = (
        f"prompt in {n_of(story['n_prefill_chunks'], 'piece')}, {n_of(story['n_copied_blocks'], 'block')} copied"
    )
    yield "", f"at {story['replica']}", f"{computed}, made way {n_of(story['n_preemptions'], 'time')}"


def _event(entry: Json) -> tuple[str, str]:
    match entry["event"]:
        case "waited":
            plans = f" ({n_of(entry['n_plans'], 'plan')})" if entry["n_plans"] else ""
            return f"waited {entry['seconds']:.3f} s", f"{_reason(entry)}{plans}"
        case "admitted":
            return "admitted", f"step {entry['step']}: {entry['n_cached_tokens']} tokens cached"
    if entry["rule"] == "outranked":
        return "made way", f"for one of priority {entry['for_priority']}; {entry['n_freed']} blocks came free"
    return "made way", f"{entry['n_short']} blocks were short, and it was the last; {entry['n_freed']} came free"


def _reason(entry: Json) -> str:
    reason = REASONS.get(entry["reason"], str(entry["reason"]))
    return f"behind another: {reason}" if entry["is_behind"] else reason


def _after(n_tokens: int) -> str:
    return f"goes on after {n_tokens} tokens" if n_tokens else ""


def _left_out(n: int, what: str) -> Iterator[Row]:
    if n:
        yield "", "…", f"{n_of(n, what)} left out"


def _at(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.3f}"


def _asked(request_id: str, url: str, key: str) -> Json:
    for name, given in (("ID", request_id), ("--key", key)):
        if not (given.isascii() and given.isprintable()):
            raise StartupError(f"{name} must be printable ASCII, which is all that a header carries")
    base = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")
    # A dot alone would be taken for a step in the path.
    path = f"/v1/requests/{quote(request_id, safe='').replace('.', '%2E')}/explain"
    try:
        reply = httpx.get(f"{base}{path}", headers={"authorization": f"Bearer {key}"}, timeout=TIMEOUT_S)
    except httpx.InvalidURL as error:
        raise StartupError(f"--url {url}: {error}") from error
    except httpx.TransportError as error:
        raise StartupError(unreachable(base, error)) from error
    try:
        told: Json = reply.json()
        if reply.status_code != 200:
            raise BakehouseError(told["error"]["message"])
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise BakehouseError(f"{base} answered {reply.status_code} with no explanation") from error
    return told
