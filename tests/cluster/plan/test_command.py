"""`bakehouse plan` as a command."""

import asyncio
import json
import os
import signal
import sys
from itertools import chain
from pathlib import Path

import pytest
from bakehouse_cluster.cli import main
from bakehouse_cluster.plan.cost_file import CostFile, write_cost
from bakehouse_replica.core.types import ModelSource
from bakehouse_replica.executors.simulated import StepCost
from bakehouse_replica.source import open_source
from bakehouse_router.text.messages import ChatMessage
from bakehouse_router.text.model_text import load_model_text
from servers import command
from tiny_llama import write_tiny_llama

SLO = ("--slo", "ttft=2s")
SIZED = ("--kv-memory", "1MiB")
WORK = ("--workload", "fixed", "--rate", "2", "--requests", "20", "--input-tokens", "8", "--output-tokens", "4")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan")
    write_tiny_llama(path / "tiny")
    cost = StepCost(step_s=0.1, prefill_token_s=0.01, decode_sequence_s=0.01)
    write_cost(CostFile(cost=cost, device="cpu", model="tiny"), path / "cost.json")
    (path / "two.jsonl").write_text(
        '{"arrival_s": 0, "prompt": "Many hands", "output_tokens": 3}\n'
        '{"arrival_s": 1, "messages": [{"role": "user", "content": "Many hands"}], "output_tokens": 3}\n'
        '{"arrival_s": 1, "token_ids": [5, 6, 7], "output_tokens": 3}\n'
    )
    (path / "config.yaml").write_text("gateway: {max_queued_requests: 1}\n")
    return path


def plan(folder: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int | str | None:
    """Runs the command in `folder` and in this process, and returns what it exits with."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "argv", ["bakehouse", "plan", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


async def plan_apart(folder: Path, name: str, hash_seed: str) -> tuple[int | None, str, str]:
    """Exit status, standard output and standard error of a process of its own, which writes `name`."""
    files = {"--cost": "cost.json", "--model": "tiny", "--output": f"{name}.json", "--plot": f"{name}.png"}
    named = chain.from_iterable((option, str(folder / file)) for option, file in files.items())
    process = await asyncio.create_subprocess_exec(
        *command("plan", *named, *WORK, *SLO, *SIZED),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"PYTHONHASHSEED": hash_seed, "COLUMNS": "200"},
    )
    output, errors = await process.communicate()
    return process.returncode, output.decode(), errors.decode()


async def test_it_answers_in_one_line_and_keeps_the_same_bytes_in_every_process(folder: Path) -> None:
    one, two = await asyncio.gather(plan_apart(folder, "one", "0"), plan_apart(folder, "two", "1"))
    status, output, errors = one
    assert status == two[0] == 0, errors
    assert output.splitlines()[-1] == "1 replica meets p99 TTFT 2 s, goodput 0.99"
    assert output == two[1]
    assert "✓ 1 replica: 20 of 20" in errors
    assert (folder / "one.json").read_bytes() == (folder / "two.json").read_bytes()
    tree = json.loads((folder / "one.json").read_bytes())
    assert (tree["format"], tree["answer"], tree["question"]["replica"]["capacity"]["block_size"]) == (
        "bakehouse-plan",
        1,
        32,
    )
    assert (folder / "one.png").read_bytes().startswith(b"\x89PNG")


def test_a_trace_of_texts_chats_and_ids_is_read_with_the_model_s_tokenizer(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("--cost", "cost.json", "--model", "tiny", "--trace", "two.jsonl", "--slo", "ttft=2s,itl=1s")
    assert plan(folder, monkeypatch, *asked, *SIZED, "--all", "--max-replicas", "2", "--output", "t.json") == 0
    tree = json.loads((folder / "t.json").read_bytes())
    assert [size["n_replicas"] for size in tree["sizes"]] == [1, 2]
    assert tree["sizes"][0]["outcomes"]["ok"] == 3
    text = load_model_text(open_source(ModelSource(model=str(folder / "tiny"))))
    n_input = len(text.tokenizer.encode_raw("Many hands")) + 3
    n_input += len(text.chat_template.encode([ChatMessage(role="user", content="Many hands")]))
    assert tree["sizes"][0]["n_input_tokens"] == n_input
    assert "trace at 1x" in capsys.readouterr().out


def test_a_configuration_file_limits_the_queue_and_1_says_that_no_size_suffices(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    crowd = ("--workload", "fixed", "--concurrency", "4", "--requests", "8", "--max-replicas", "2")
    asked = ("--cost", "cost.json", "--model", "tiny", "--config", "config.yaml")
    assert plan(folder, monkeypatch, *asked, *crowd, *SIZED, *SLO) == 1
    output = capsys.readouterr().out
    assert "2 replicas do not meet p99 TTFT 2 s, goodput 0.99: goodput is" in output
    assert "requests are waiting here" in output


async def test_ctrl_c_leaves_one_line_and_130(folder: Path) -> None:
    work = ("--workload", "fixed", "--requests", "200000", "--rate", "5", "--model", str(folder / "tiny"))
    process = await asyncio.create_subprocess_exec(
        *command("plan", "--cost", str(folder / "cost.json"), *work, *SLO, *SIZED),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    assert "0 of 200000" in (await process.stderr.readline()).decode()
    process.send_signal(signal.SIGINT)
    output, errors = await process.communicate()
    assert (process.returncode, output) == (130, b"")
    assert errors.decode().splitlines()[-1] == "bakehouse: interrupted before an answer was found"
    assert "Traceback" not in errors.decode()


def test_a_plot_without_matplotlib_is_refused_before_the_plan(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    message = plan(
        folder, monkeypatch, *SLO, "--cost", "cost.json", "--model", "tiny", *WORK, *SIZED, "--plot", "p"
    )
    assert message == "bakehouse: --plot needs matplotlib: pip install 'bakehouse[bench]'"


def test_contexts_beyond_the_measured_ones_are_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = CostFile(cost=StepCost(step_s=0.1), device="cpu", model="tiny", machine="here", max_context=64)
    write_cost(file, folder / "short.json")
    assert plan(folder, monkeypatch, *SLO, "--cost", "short.json", "--model", "tiny", *WORK, *SIZED) == 0
    assert "with tiny on here; contexts beyond 64 tokens are extrapolated" in " ".join(
        capsys.readouterr().out.split()
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--cost", "cost.json", *WORK), "--slo is missing"),
        ((*SLO, *WORK), "--cost is missing: `bakehouse plan calibrate --output cost.json`"),
        ((*SLO, "--cost", "cost.json"), "--trace FILE or --workload NAME is missing"),
        (
            (*SLO, "--cost", "none.json", *WORK),
            "--cost none.json: No such file or directory; `bakehouse plan calibrate",
        ),
        ((*SLO, "--cost", "cost.json", "--workload", "W9"), "--workload W9: unknown"),
        ((*SLO, "--cost", "cost.json", "--workload", "W3", "--rate", "1,2"), "one load is planned for at a time"),
        ((*SLO, "--cost", "cost.json", "--model", "tiny", *WORK), "replica.kv_memory: not given"),
        (("--slo", "speed=1s", "--cost", "cost.json", *WORK), "--slo: 'speed' is unknown"),
        ((*SLO, "--cost", "cost.json", "--workload", "trace", "--trace", "cost.json"), "trace cost.json, line 1"),
        (
            (*SLO, "--cost", "cost.json", *WORK, "--output", "no/where.json"),
            "no/where.json: there is no folder no",
        ),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], said: str
) -> None:
    message = plan(folder, monkeypatch, *arguments)
    assert isinstance(message, str)
    assert message.startswith("bakehouse: ")
    assert said in message
    assert len(message.splitlines()) == 1
