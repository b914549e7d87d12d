"""Runs the same work on bakehouse and on what its users would pick instead, side by side on this machine.

Each system is a server with OpenAI's HTTP API on loopback, one at a time; the work is W1 to W4 of
`bakehouse bench`, with the same prompts for all, greedy, the end of sequence ignored, and every answer's length
checked. Servers start anew in each of `--repeat` rounds, in which all systems take their turn, so that a machine's
slow minutes hit all alike; the tables show medians over rounds. The first run installs the peers (5 GB) and
compiles llama.cpp, which takes a C++ compiler and ten minutes or more:

    .venv/bin/python cluster/benchmarks/peers --repeat 3 --output results
"""

import argparse
import os
import platform
import shlex
import signal
import sys
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

import psutil
from bakehouse_cluster.bench.encoders import local_encoder
from bakehouse_cluster.bench.measuring import Plan, run_bench
from bakehouse_cluster.bench.prompts import Encoder
from bakehouse_cluster.bench.result import Load, Result, write_result
from bakehouse_cluster.bench.target import Target
from bakehouse_cluster.bench.workloads import PRESETS
from bakehouse_replica.core.errors import StartupError
from bakehouse_replica.source import default_cache_root
from benchmarks.peers.environments import Unavailable, made_environment, own_bin
from benchmarks.peers.models import ModelFormats, Weights
from benchmarks.peers.processes import free_port, running
from benchmarks.peers.report import Measurement, Row, ratios, table
from benchmarks.peers.systems import SYSTEMS, Place, System

MODEL = "smollm2"


def say(text: str) -> None:
    """A line of progress, which does not mix with the tables."""
    print(text, file=sys.stderr, flush=True)


class Comparison:
    """Measures systems, and keeps what was measured."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._venvs: Path = options.venvs
        self._output: Path = options.output
        self._workloads: tuple[str, ...] = options.workloads
        self._n_threads = len(os.sched_getaffinity(0))
        self._formats = ModelFormats(MODEL, options.venvs / "models", say)
        self._encoder: Encoder = local_encoder(MODEL)
        self._bin_of: dict[str, Path] = {}
        self._measured: dict[str, dict[str, list[Measurement]]] = defaultdict(lambda: defaultdict(list))
        self._problem_of: dict[str, str] = {}

    def prepare(self, system: System) -> None:
        """Install what `system` needs, and write its weights."""
        try:
            environment = system.environment
            bin_path = own_bin() if environment is None else made_environment(environment, self._venvs, say)
            self._formats.path(system.weights)
        except (Unavailable, StartupError, OSError) as error:
            self._give_up(system, str(error))
        else:
            self._bin_of[system.name] = bin_path

    def measure(self, system: System, round_number: int) -> None:
        """All workloads on `system`, unless it is known not to work."""
        if system.name in self._problem_of:
            return
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        command = system.command(self._place(system, port))
        target = Target(url=url, model=command.model, extra_body=system.extra_body)
        folder = self._output / system.name
        folder.mkdir(parents=True, exist_ok=True)
        variables = [f"{name}={value}" for name, value in command.variables.items()]
        settings = shlex.join([*variables, *command.argv])
        say(f"{system.name}, round {round_number}: {settings}")
        log_path = folder / f"server-{round_number}.log"
        try:
            with running(command, url=url, ready_path=system.ready_path, log_path=log_path) as server:
                for name in self._workloads:
                    before = server.cpu_times()
                    result = self._run(system, name, target, round_number, settings)
                    write_result(result, folder / f"{name}-{round_number}.json")
                    if result.is_partial:
                        raise KeyboardInterrupt
                    n_other_cores = server.cpu_times().others_since(before)
                    summary = result.points[0].summary
                    measurement = Measurement(summary=summary, n_other_cores=n_other_cores)
                    self._measured[system.name][name].append(measurement)
                    say(f"{system.name}, {name}: {summary.output_tokens_per_s:.1f} output tokens/s")
        except (Unavailable, StartupError) as error:
            self._give_up(system, str(error))

    def row(self, system: System) -> Row:
        """What is known of `system`."""
        return Row(
            name=system.name,
            n_bits=system.n_bits,
            is_ours=system.is_ours,
            measured=self._measured[system.name],
            problem=self._problem_of.get(system.name),
        )

    def _place(self, system: System, port: int) -> Place:
        return Place(
            bin=self._bin_of[system.name],
            model=self._formats.path(system.weights),
            tokenizer=self._formats.path(Weights.HF_FLOAT32) / "tokenizer.json",
            port=port,
            n_threads=self._n_threads,
        )

    def _run(self, system: System, name: str, target: Target, round_number: int, settings: str) -> Result:
        preset = PRESETS[name]
        plan = Plan(
            name=name,
            workload=preset.workload,
            loads=(Load(kind="concurrency", value=preset.n_users),),
            seed=round_number,
            label=system.name,
        )
        return run_bench(plan, target, self._encoder, server=settings)

    def _give_up(self, system: System, problem: str) -> None:
        self._problem_of[system.name] = problem
        say(f"{system.name}: {problem}")


def machine() -> str:
    """The machine in a line."""
    flags = ""
    with suppress(OSError):  # where there is no /proc
        flags = Path("/proc/cpuinfo").read_text()
    known = [flag for flag in ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile") if flag in flags]
    memory_gb = psutil.virtual_memory().total / 1e9
    return f"{len(os.sched_getaffinity(0))} cores ({', '.join(known)}), {memory_gb:.0f} GB, {platform.platform()}"


def compare(options: argparse.Namespace) -> None:
    """Measure, and print the tables, also of what was measured before Ctrl-C."""
    comparison = Comparison(options)
    try:
        for system in options.systems:
            comparison.prepare(system)
        for round_number in range(1, options.repeat + 1):
            for system in options.systems:
                comparison.measure(system, round_number)
    except KeyboardInterrupt:
        print("interrupted: what follows is partial\n")
    rows = [comparison.row(system) for system in options.systems]
    text = f"{machine()}; medians of {options.repeat} rounds; output tokens/s, latencies in ms\n\n"
    text += f"{table(rows, options.workloads)}\n\n{ratios(rows, options.workloads)}\n"
    print(text)
    (options.output / "table.md").write_text(text)


def _systems(text: str) -> tuple[System, ...]:
    chosen = tuple(system for system in SYSTEMS if any(part in system.name for part in text.split(",")))
    if not chosen:
        raise argparse.ArgumentTypeError(f"none of {', '.join(system.name for system in SYSTEMS)}")
    return chosen


def _workloads(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in PRESETS]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: there are {', '.join(PRESETS)}")
    return names


def main() -> None:
    """Read the options and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", type=_systems, default=SYSTEMS, help="parts of names: vllm,openvino-f16")
    parser.add_argument("--workloads", type=_workloads, default=tuple(PRESETS))
    parser.add_argument("--repeat", type=int, default=1, help="rounds, in which all systems take their turn")
    parser.add_argument("--venvs", type=Path, default=default_cache_root() / "peers", help="kept between runs")
    parser.add_argument("--output", type=Path, default=Path("peers-results"), help="JSON and logs per system")
    options = parser.parse_args()
    options.venvs = options.venvs.resolve()
    options.output = options.output.resolve()
    options.venvs.mkdir(parents=True, exist_ok=True)
    options.output.mkdir(parents=True, exist_ok=True)
    # So that whoever ends this by SIGTERM leaves no server behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    compare(options)


if __name__ == "__main__":
    main()
