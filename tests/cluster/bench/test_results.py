"""Result files: read as they were written, compared, shown and drawn."""

import io
import re
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from bakehouse_cluster.bench.compare import least_ratio, pair_points, show_comparison
from bakehouse_cluster.bench.plot import plot_result
from bakehouse_cluster.bench.records import Outcome
from bakehouse_cluster.bench.result import (
    Environment,
    Load,
    Point,
    Result,
    Work,
    read_result,
    require_writable,
    write_result,
)
from bakehouse_cluster.bench.statistics import Distribution, Summary
from bakehouse_cluster.bench.table import show_result
from bakehouse_cluster.bench.workloads import PromptForm
from bakehouse_replica.core.errors import StartupError
from rich.console import Console

PNG = b"\x89PNG\r\n\x1a\n"
TIMES = Distribution(mean=0.02, p50=0.01, p90=0.03, p99=0.04, max=0.05)


def point(n_users: float, output_tokens_per_s: float, **changes: object) -> Point:
    summary = Summary(
        duration_s=2.0,
        n_requests=10,
        outcomes={outcome: 2 for outcome in Outcome},
        n_input_tokens=1000,
        n_input_other=0,
        n_cached_tokens=0,
        n_output_tokens=100,
        n_frames=100,
        output_tokens_per_s=output_tokens_per_s,
        total_tokens_per_s=500.0,
        requests_per_s=2.0,
        ttft_s=TIMES,
        itl_s=TIMES,
        gap_s=TIMES,
        e2e_s=None,
        max_send_delay_s=0.0,
        problems={"HTTP 503: no [red]room[/red]": 2},
    )
    return Point(
        load=Load(kind="concurrency", value=n_users),
        n_planned=10,
        n_input_planned=1000,
        n_output_planned=100,
        prompts_digest="d",
        n_warmup=1,
        warmup="1 request",
        generator_cpu_s=0.1,
        is_partial=False,
        summary=replace(summary, **changes),  # type: ignore[arg-type]
    )


def result(*points: Point, work: Work | None = None) -> Result:
    environment = Environment(
        date="2026-01-01T00:00:00+00:00",
        label="",
        url="http://x",
        model="m",
        server="s",
        tokenizer="t",
        prompt_form=PromptForm.TEXT,
        request_fields={"temperature": 0, "stream_options": {"include_usage": True}},
        software={"bakehouse": "0"},
        platform="p",
        n_cpus=2,
    )
    return Result(environment=environment, work=work or W4, points=points)


W4 = Work(
    name="W4",
    kind="mixed",
    parameters={"n_requests": 48, "input_range": (16, 256), "outputs": (8, 16)},
    seed=0,
    api="completions",
    ignores_eos=True,
    warms_prefixes=False,
)


def shown(text_of: Result, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width)
    show_result(text_of, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_result_is_read_as_it_was_written(tmp_path: Path) -> None:
    written = result(point(1, 100.0), point(8, 300.0, ttft_s=None))
    write_result(written, tmp_path / "r.json")
    assert read_result(tmp_path / "r.json") == written


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "environment: Field required"),
        ("[", "the file: Invalid JSON"),
        ('{"version": 1}', "version: Input should be 2"),
    ],
)
def test_what_is_no_result_is_refused_in_a_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(text)
    if "version" in text:
        write_result(result(point(1, 1.0)), path)
        path.write_text(path.read_text().replace('"version": 2', '"version": 1'))
    with pytest.raises(StartupError) as refused:
        read_result(path)
    assert message in refused.value.message
    assert "\n" not in refused.value.message


def test_what_cannot_be_written_is_known_before_and_nothing_is_changed(tmp_path: Path) -> None:
    there, new = tmp_path / "there.json", tmp_path / "new.json"
    there.write_text("kept")
    require_writable(there)
    require_writable(new)
    assert (there.read_text(), new.exists()) == ("kept", False)
    for wrong in (tmp_path, Path("/proc/x.json"), there / "r.json"):
        with pytest.raises(StartupError, match=re.escape(str(wrong))):
            require_writable(wrong)


def test_a_result_that_cannot_be_written_is_kept_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    written = result(point(1, 100.0))
    with pytest.raises(StartupError, match="cannot be written: No space left on device; the result is in "):
        write_result(written, Path("/dev/full"))
    (kept,) = tmp_path.iterdir()
    assert read_result(kept) == written


def test_only_answered_requests_count_as_answered() -> None:
    assert result(point(1, 1.0), point(2, 1.0)).n_answered == 2 * (2 + 2)
    assert result(point(1, 0.0, outcomes={Outcome.SHED: 3, Outcome.ABORTED: 1})).n_answered == 0


def test_points_of_equal_load_are_paired_and_the_worst_ratio_counts() -> None:
    pairs = pair_points(result(point(1, 100.0), point(8, 300.0)), result(point(8, 150.0), point(1, 200.0)))
    assert [(a.load.value, b.load.value) for a, b in pairs] == [(1, 1), (8, 8)]
    assert least_ratio(pairs) == 0.5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "W2"}, "name is W4 in the first and W2 in the second"),
        ({"seed": 1}, "seed is 0 in the first and 1 in the second"),
        ({"parameters": {"n_requests": 10}}, "parameters is"),
        ({"api": "chat"}, "api is completions"),
        ({"ignores_eos": False}, "ignores_eos is True"),
        ({"warms_prefixes": True}, "warms_prefixes is False"),
    ],
)
def test_different_work_is_not_compared(change: dict[str, object], message: str) -> None:
    other = result(point(1, 1.0), work=replace(W4, **change))  # type: ignore[arg-type]
    with pytest.raises(StartupError, match=message):
        pair_points(result(point(1, 1.0)), other)


def test_loads_that_were_warmed_up_otherwise_are_not_compared() -> None:
    cold = result(replace(point(8, 1.0), n_warmup=0))
    with pytest.raises(StartupError, match="at 8 at once, 1 request warmed up in the first and 0 in the second"):
        pair_points(result(point(8, 1.0)), cold)


def test_results_without_a_common_load_or_in_part_are_not_compared() -> None:
    with pytest.raises(StartupError, match="1 at once in the first, 2 at once in the second"):
        pair_points(result(point(1, 1.0)), result(point(2, 1.0)))
    partial = result(replace(point(1, 1.0), is_partial=True))
    with pytest.raises(StartupError, match="the second result is partial"):
        pair_points(result(point(1, 1.0)), partial)


def test_a_comparison_shows_both_and_their_ratio() -> None:
    outcomes = dict.fromkeys(Outcome, 0) | {Outcome.OK: 8, Outcome.SHED: 1, Outcome.ABORTED: 1}
    first, second = result(point(1, 100.0)), result(point(1, 250.0, requests_per_s=0.5, outcomes=outcomes))
    console = Console(file=io.StringIO(), width=100)
    show_comparison(first, second, pair_points(first, second), console)
    assert isinstance(console.file, io.StringIO)
    lines = [line.split() for line in console.file.getvalue().splitlines()]
    compared = [" ".join(line[3:]) for line in lines if line[:3] == ["1", "at", "once"]]
    assert compared == [
        "output tok/s 100.0 250.0 2.50",
        "total tok/s 500.0 500.0 1.00",
        "requests/s 2.00 0.50 0.25",
        *(
            f"{name} {percentile} ms {value} {value} 1.00"
            for name in ("TTFT", "ITL", "gap")
            for percentile, value in (("p50", "10.0"), ("p90", "30.0"), ("p99", "40.0"))
        ),
        "short 20.0% 0%",
        "error 20.0% 0%",
        "shed 20.0% 10.0%",
        "aborted 20.0% 10.0%",
    ]


def test_shares_of_what_went_wrong_stand_beside_every_latency() -> None:
    lines = [line.split() for line in shown(result(point(1, 100.0))).splitlines()]
    wrong = ["20.0%"] * 4
    assert ["1", "at", "once", "TTFT", "10.0", "30.0", "40.0", "50.0", *wrong] in lines
    assert ["1", "at", "once", "E2E", *wrong] in lines
    assert ["1", "at", "once:", "2", "times:", "HTTP", "503:", "no", "[red]room[/red]"] in lines


@pytest.mark.parametrize("width", [20, 80])
def test_no_number_is_shortened_however_narrow_the_terminal(width: int) -> None:
    slow = Distribution(mean=1.0, p50=1303.7123, p90=13037.1234, p99=130371.234, max=1303712.34)
    text = shown(result(point(32, 12345678.9, e2e_s=slow, itl_s=slow, duration_s=98765.43)), width)
    lines = [line.split() for line in text.splitlines()]
    numbers = ["1303712.3", "13037123.4", "130371234.0", "1303712340.0", *["20.0%"] * 4]
    assert ["32", "at", "once", "E2E", *numbers] in lines
    assert ["32", "at", "once", "10", "98765.43", "12345678.9", "500.0", "2.00", "0%"] in lines
    assert not any(line.endswith("…") for line in text.splitlines())


def test_a_comparison_in_a_narrow_terminal_shows_its_numbers() -> None:
    first, second = result(point(1, 12345678.9)), result(point(1, 24691357.8))
    console = Console(file=io.StringIO(), width=20)
    show_comparison(first, second, pair_points(first, second), console)
    assert isinstance(console.file, io.StringIO)
    lines = [line.split() for line in console.file.getvalue().splitlines()]
    assert ["1", "at", "once", "output", "tok/s", "12345678.9", "24691357.8", "2.00"] in lines


def test_a_warm_up_is_told_once_with_its_number_at_each_load() -> None:
    said = [f"{n} request{'s' * (n > 1)} of the same lengths" for n in (1, 8, 8)]
    points = [replace(point(n + 1, 1.0), warmup=text) for n, text in enumerate(said)]
    assert shown(result(*points)).count("warm-up") == 1
    assert "\nwarm-up: 1, 8 requests of the same lengths\n" in shown(result(*points))
    assert "\nwarm-up: 1 request of the same lengths\n" in shown(result(points[0]))


def test_what_is_odd_about_a_measurement_is_said() -> None:
    odd = point(1, 1.0, n_cached_tokens=500, n_input_other=3)
    text = shown(result(replace(odd, is_partial=True)))
    assert "50.0% of the prompts' tokens came from the server's prefix cache" in text
    assert "counted 3 prompts otherwise than planned: 1000 tokens in all instead of 1000" in text
    assert "interrupted: this is partial" in text


def test_a_curve_is_drawn_as_a_png(tmp_path: Path) -> None:
    plot_result(result(point(8, 300.0), point(1, 100.0, itl_s=None)), tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(PNG)


def test_loads_of_two_kinds_are_no_curve(tmp_path: Path) -> None:
    rate = replace(point(1, 1.0), load=Load(kind="rate", value=2.0))
    with pytest.raises(StartupError, match="loads of one kind, not of concurrency and rate"):
        plot_result(result(point(1, 1.0), rate), tmp_path / "p.png")
