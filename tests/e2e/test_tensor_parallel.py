"""`bakehouse serve --tensor-parallel 3` as its users see it, also where a rank is killed."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest
from openai.types import Completion
from servers import Server, answers_ready, command, gone, running, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

MODEL_LIMITS = ("--max-model-len", "1024", "--kv-memory", "256MiB")
N_PROMPTS, N_TOKENS = 24, 12
# Ranks add their products up in another order than one process does; a closer race than this is no error.
EXCUSED_MARGIN = 1e-3
# On cores that nobody else wants. On others a group may take as long as the first one did, Ray's start included.
N_STREAMED = 100
REPLACED_WITHIN_S = 30.0
# A program that joins the server's Ray takes its time on busy cores.
JOIN_TIMEOUT_S = 200
NAMES_IN_RAY = """
import json, bakehouse
from ray.util import list_named_actors, placement_group_table
bakehouse.connect()
groups = [[group["name"], group["state"]] for group in placement_group_table().values()]
actors = [actor["name"] for actor in list_named_actors(all_namespaces=True)]
print(json.dumps([groups, actors]))
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("serve") / "log", "--tensor-parallel", "3", *MODEL_LIMITS) as ready:
        yield ready


def prompts() -> list[str]:
    """Beginnings of the licence, of very different lengths; every third shares the longest's own beginning."""
    words = (Path(__file__).parents[2] / "LICENSE").read_text().split()
    return [" ".join(words[(0 if i % 3 == 0 else 7 * i) :][: 3 + 5 * i]) for i in range(N_PROMPTS)]


def complete_all(server: Server) -> list[Completion]:
    with ThreadPoolExecutor(N_PROMPTS) as pool:
        return list(
            pool.map(
                lambda prompt: server.sdk.completions.create(
                    model="smollm2", prompt=prompt, max_tokens=N_TOKENS, temperature=0, logprobs=2
                ),
                prompts(),
            )
        )


def margin_of(completion: Completion, at: int) -> float:
    """By how much the token `at` led the runner-up."""
    logprobs = completion.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.top_logprobs is not None
    best, second = sorted(logprobs.top_logprobs[at].values(), reverse=True)[:2]
    return best - second


def tokens_of(completion: Completion) -> list[str]:
    logprobs = completion.choices[0].logprobs
    assert logprobs is not None
    return logprobs.tokens or []


def test_24_prompts_at_once_get_the_ids_that_one_process_gives(server: Server, tmp_path: Path) -> None:
    found = complete_all(server)
    with running(tmp_path / "log", *MODEL_LIMITS) as alone:
        expected = complete_all(alone)
    n_excused = 0
    for one, other in zip(found, expected, strict=True):
        tokens, wanted = tokens_of(one), tokens_of(other)
        assert len(wanted) > 0
        if tokens != wanted:
            at = next(i for i, pair in enumerate(zip(tokens, wanted, strict=False)) if pair[0] != pair[1])
            assert margin_of(other, at) < EXCUSED_MARGIN, (tokens, wanted)
            n_excused += 1
    assert n_excused <= 1


def replica_log(server: Server) -> str:
    """Of all replicas there have been."""
    match = re.search(r"logs +(\S+)", server.log.read_text())
    assert match is not None
    return "".join(path.read_text() for path in Path(match[1]).glob("serve/replica_bakehouse_Replica_*.log"))


def rank_processes(server: Server) -> list[psutil.Process]:
    """Of the newest group: rank 0, 1, 2."""
    (rank_0,) = [child for child in server.tree() if "ServeReplica:bakehouse:Replica" in " ".join(child.cmdline())]
    joined = re.findall(r"rank (\d) is process (\d+)", replica_log(server))[-2:]
    others = {int(rank): psutil.Process(int(process_id)) for rank, process_id in joined}
    return [rank_0, others[1], others[2]]


def listening_ports(processes: list[psutil.Process]) -> set[int]:
    return {
        connection.laddr.port
        for process in processes
        for connection in process.net_connections(kind="tcp")
        if connection.status == psutil.CONN_LISTEN
    }


def names_in_ray(server: Server) -> tuple[dict[str, str], list[str]]:
    """The states of all placement groups that there have been by their names, and the names of living actors."""
    match = re.search(r"Python +(.*) python your_program.py", server.log.read_text())
    assert match is not None
    environment = dict(pair.split("=", 1) for pair in match[1].split())
    told = subprocess.run(
        [sys.executable, "-c", NAMES_IN_RAY],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=JOIN_TIMEOUT_S,
        check=True,
    )
    groups, actors = json.loads(told.stdout.splitlines()[-1])
    return dict(groups), actors


def started_within_s(server: Server) -> float:
    """What the stages of the start took together, as the server tells."""
    return sum(map(float, re.findall(r"\(([\d.]+) s\)", server.log.read_text())))


def stream_across(server: Server, victim: psutil.Process) -> list[str]:
    """The lines of a stream in whose midst `victim` is killed."""
    body = {
        "model": "smollm2",
        "prompt": "Once",
        "max_tokens": N_STREAMED,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    lines = []
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=120) as answer:
        for line in filter(None, answer.iter_lines()):
            lines.append(line)
            if len(lines) == 3:
                victim.send_signal(signal.SIGKILL)
    return lines


def test_a_killed_rank_is_named_and_its_group_is_replaced_whole(server: Server) -> None:
    """And the stream that was open goes on in the new group."""
    group = rank_processes(server)
    ports = listening_ports(group)
    assert ports
    with ThreadPoolExecutor() as pool:
        stream = pool.submit(stream_across, server, group[1])
        wait_until(lambda: not group[1].is_running(), 30, "rank 1 is dead")
        killed_s = time.monotonic()
        wait_until(lambda: gone(group), 60, "the old group is gone")
        assert "rank 1 has died" in replica_log(server)
        # Only then is `/ready` that of a new group.
        limit_s = max(REPLACED_WITHIN_S, started_within_s(server))
        wait_until(lambda: answers_ready(server), limit_s, "a new group serves")
        answer = server.sdk.completions.create(
            model="smollm2", prompt="The capital of France is", max_tokens=8, temperature=0
        )
        print(f"replaced and answered after {time.monotonic() - killed_s:.1f} s")
        assert time.monotonic() - killed_s < limit_s
        assert "Paris" in answer.choices[0].text
        lines = stream.result()
    assert not any('"error"' in line for line in lines)
    assert lines[-1] == "data: [DONE]"
    assert json.loads(lines[-2].removeprefix("data: "))["usage"]["completion_tokens"] == N_STREAMED

    assert len([child for child in server.tree() if "ray::RankActor" in " ".join(child.cmdline())]) == 2
    groups, actors = names_in_ray(server)
    assert sorted(groups.values()) == ["CREATED", "REMOVED"]
    (replica,) = [name for name, state in groups.items() if state == "CREATED"]
    assert re.fullmatch(r"SERVE_REPLICA::bakehouse#Replica#\w+", replica)
    assert replica in actors
    replica_id = replica.rpartition("#")[2]
    ranks = sorted(name for name in actors if name.startswith("rank "))
    assert ranks == [f"rank {rank} of bakehouse replica {replica_id}" for rank in (1, 2)]
    for process in psutil.process_iter():
        with suppress(psutil.AccessDenied, psutil.NoSuchProcess):
            assert process in rank_processes(server) or not ports & listening_ports([process])


def test_a_size_that_does_not_divide_is_refused_at_once_with_those_that_do() -> None:
    refused = subprocess.run(
        command("serve", "--tensor-parallel", "2"), capture_output=True, text=True, timeout=120
    )
    assert refused.returncode == 1
    assert "9 query heads and 3 key-value heads" in refused.stderr
    assert "1, 3 or 9 would work" in refused.stderr
