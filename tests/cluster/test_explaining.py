"""`bakehouse explain`: what it prints of a request, over real HTTP."""

import asyncio
import io
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
from bakehouse_cluster.cli import app
from bakehouse_cluster.explaining import REASONS, explain, rows
from bakehouse_replica.core.errors import BakehouseError, StartupError
from bakehouse_replica.core.sampling import SamplingParams
from bakehouse_replica.core.story import WaitReason
from bakehouse_replica.core.types import Request
from bakehouse_router.dispatch import Dispatcher
from bakehouse_router.policy.pick import choose
from bakehouse_router.policy.views import ReplicaView
from bakehouse_router.routing import Routings
from gateways import MODEL, ScriptedDispatcher, fake_engine, served, tiny_card, tiny_text
from rich.console import Console
from typer.testing import CliRunner


async def test_a_request_is_told_from_its_route_to_its_end(tmp_path: Path) -> None:
    routings = Routings()
    asked = Request(request_id="r", prompt_ids=(1, 2, 3), params=SamplingParams(seed=1))
    views = [ReplicaView(card=tiny_card("one")), ReplicaView(card=tiny_card("[bold]two"), problem="no [red]luck")]
    routings.note("r", choose(asked, views, Random(1)), 0.0)
    async with fake_engine() as engine:
        dispatcher = Dispatcher(engine, routed=lambda request_id: routings.of("r"))
        async with served(tiny_text(tmp_path), dispatcher) as url, httpx.AsyncClient(base_url=url) as http:
            body = {"model": MODEL, "prompt": "x", "max_tokens": 2}
            await http.post("/v1/completions", json=body, headers={"x-request-id": "a/b"})
            console = Console(file=io.StringIO(), width=200)
            await asyncio.to_thread(explain, "a/b", url=url, key="none", console=console)
            result = await asyncio.to_thread(CliRunner().invoke, app, ["explain", "a/b", "--url", url])
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert result.exit_code == 0
    assert result.stdout.splitlines()[0] == printed.splitlines()[0]
    lines = [" ".join(line.split()) for line in printed.splitlines()]
    assert lines[0].startswith("a/b (cmpl-")
    assert "one 3 = 3 uncached + 0 waiting + 0 sequences + 0 short" in lines
    assert "[bold]two excluded: does not serve: no [red]luck" in lines, "what a server says is no markup"
    assert any(line.endswith("admitted step 0: 0 tokens cached") for line in lines)
    assert any("at replica-1 prompt in 1 piece," in line for line in lines)
    assert lines[-1].endswith("ended complete") or lines[-2].endswith("ended complete")


async def test_what_is_not_known_and_who_does_not_answer_are_one_line(tmp_path: Path) -> None:
    console = Console(file=io.StringIO())
    async with served(tiny_text(tmp_path), ScriptedDispatcher(["ab"])) as url:
        with pytest.raises(BakehouseError, match="no request of yours with this id is known"):
            await asyncio.to_thread(explain, "nobody", url=f"{url}/v1", key="none", console=console)
    with pytest.raises(StartupError, match="no server answers at"):
        explain("nobody", url=url, key="none", console=console)
    for odd in ("é", "\udcff", "a\nb"):
        with pytest.raises(StartupError, match="ID must be printable ASCII"):
            explain(odd, url=url, key="none", console=console)
        with pytest.raises(StartupError, match="--key must be printable ASCII"):
            explain("nobody", url=url, key=odd, console=console)
    with pytest.raises(StartupError, match="--url"):
        explain("nobody", url="http://[", key="none", console=console)


def test_every_reason_reads_as_words() -> None:
    assert set(REASONS) == set(WaitReason)


def test_waits_preemptions_losses_and_what_is_left_out_are_lines() -> None:
    wait: dict[str, Any] = {"seconds": 1.5, "n_plans": 3, "reason": "no_blocks", "is_behind": True}
    story = {
        "replica": "r1",
        "prepared_s": 0.5,
        "entries": [
            {"event": "waited", "at_s": 0.0, **wait},
            {
                "event": "waited",
                "at_s": 1.5,
                "seconds": 0.25,
                "n_plans": 0,
                "reason": "next_plan",
                "is_behind": False,
            },
            {"event": "preempted", "at_s": 2.0, "rule": "blocks", "n_short": 2, "n_freed": 3},
            {"event": "preempted", "at_s": 3.0, "rule": "outranked", "for_priority": -1, "n_freed": 4},
        ],
        "n_entries_left_out": 7,
        "waited": [wait],
        "n_prefill_chunks": 2,
        "n_copied_blocks": 0,
        "n_preemptions": 9,
    }
    attempt = {
        "at_s": 1.0,
        "state": "lost",
        "loss": "gone",
        "ended_at_s": 5.0,
        "after_tokens": 4,
        "parts": [{"id": "p", "routing": None, "story": story}, {"id": "q", "routing": None, "story": None}],
        "n_parts_left_out": 12,
    }
    told = {
        "admission": {"decision": "queued", "at_s": 0.1},
        "prompts": [{"attempts": [attempt], "n_attempts_left_out": 0}],
        "n_prompts_left_out": 1,
        "first_token_s": None,
        "state": "running",
    }
    assert list(rows(told)) == [
        ("0.100", "gateway: queued", ""),
        ("1.000", "sent: p", "goes on after 4 tokens"),
        ("", "grammar 0.500 s", "compiled before it was queued"),
        ("1.000", "waited 1.500 s", "behind another: too few KV blocks were free (3 plans)"),
        ("2.500", "waited 0.250 s", "it came between two plans"),
        ("3.000", "made way", "2 blocks were short, and it was the last; 3 came free"),
        ("4.000", "made way", "for one of priority -1; 4 blocks came free"),
        ("", "…", "7 lines left out"),
        ("", "waited 1.500 s", "in all: behind another: too few KV blocks were free"),
        ("", "at r1", "prompt in 2 pieces, 0 blocks copied, made way 9 times"),
        ("1.000", "sent: q", "goes on after 4 tokens"),
        ("", "at the replica", "not known (any more)"),
        ("", "…", "12 parts left out"),
        ("5.000", "lost", "gone"),
        ("", "…", "1 prompt left out"),
    ]
