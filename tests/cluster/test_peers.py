"""The side by side benchmark of peers: its tables, the formats it writes, and the processes it ends."""

import socket
import sys
import textwrap
from pathlib import Path

import gguf
import httpx
import numpy as np
import psutil
import pytest
from bakehouse_cluster.bench.records import Outcome
from bakehouse_cluster.bench.statistics import Distribution, Summary
from benchmarks.peers.environments import Environment, Unavailable, last_line, made_environment
from benchmarks.peers.models import write_gguf
from benchmarks.peers.processes import CpuTimes, free_port, running
from benchmarks.peers.report import Measurement, Row, ratios, table
from benchmarks.peers.systems import SYSTEMS, Command
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter


def _summary(rate: float, *, n_ok: int = 4, n_short: int = 0) -> Summary:
    times = Distribution(mean=0.02, p50=0.0204, p90=0.03, p99=0.0404, max=0.05)
    return Summary(
        duration_s=1.0,
        n_requests=n_ok + n_short,
        outcomes={outcome: 0 for outcome in Outcome} | {Outcome.OK: n_ok, Outcome.SHORT: n_short},
        n_input_tokens=10,
        n_input_other=0,
        n_cached_tokens=0,
        n_output_tokens=10,
        n_frames=10,
        output_tokens_per_s=rate,
        total_tokens_per_s=rate,
        requests_per_s=1.0,
        ttft_s=times,
        itl_s=times,
        gap_s=times,
        e2e_s=times,
        max_send_delay_s=0.0,
        problems={"answered with 3 tokens where 4 were asked for": n_short} if n_short else {},
    )


def _row(name: str, n_bits: int, *rates: float, is_ours: bool = False, n_short: int = 0) -> Row:
    measured = [Measurement(summary=_summary(rate, n_short=n_short), n_other_cores=0.05) for rate in rates]
    return Row(name=name, n_bits=n_bits, is_ours=is_ours, measured={"W2": measured} if rates else {})


def test_a_table_shows_medians_over_rounds_and_latencies_in_milliseconds() -> None:
    lines = table([_row("quick", 32, 10.0, 90.0, 20.0)], ["W2", "W3"]).splitlines()

    assert "| quick | 32 | 20.0 |  |" in lines
    assert "| quick | TTFT | 20 / 40 |  |" in lines
    assert "| quick | ITL | 20 / 40 |  |" in lines


def test_a_table_says_why_a_system_was_not_measured_and_what_failed() -> None:
    absent = Row(name="absent", n_bits=8, is_ours=False, measured={}, problem="pip install absent: no such thing")
    text = table([absent, _row("short", 8, 5.0, n_short=1)], ["W2"])

    assert "* absent: not measured: pip install absent: no such thing" in text
    assert "* short: W2: 1 of 5 requests failed: answered with 3 tokens where 4 were asked for" in text


def test_a_table_says_which_measurement_was_disturbed() -> None:
    measured = [Measurement(summary=_summary(5.0), n_other_cores=n_cores) for n_cores in (0.02, 0.73)]
    row = Row(name="noisy", n_bits=32, is_ours=False, measured={"W1": measured, "W2": measured[:1]})

    remarks = table([row], ["W1", "W2"]).rpartition("\n\n")[2].splitlines()

    assert remarks == ["* noisy: W1: other processes used up to 0.7 cores meanwhile"]


def test_others_are_what_neither_server_nor_generator_used() -> None:
    before = CpuTimes(at_s=100.0, machine=50.0, server=20.0, generator=1.0)
    after = CpuTimes(at_s=110.0, machine=68.0, server=32.0, generator=2.0)

    assert after.others_since(before) == pytest.approx((18 - 12 - 1) / 10)


def test_ours_is_compared_with_the_best_peer_that_answered_everything() -> None:
    rows = [
        _row("wide", 16, 100.0),
        _row("narrow", 8, 200.0),
        _row("broken", 32, 900.0, n_short=1),
        _row("ours-32", 32, 150.0, is_ours=True),
        _row("ours-8", 8, 500.0, is_ours=True),
    ]

    lines = ratios(rows, ["W2"]).splitlines()

    assert lines[2:] == [
        "| ours-32 | best peer of 16 or 32 bits | W2 | 1.50 | 1.3 | wide |",
        "| ours-8 | best peer of any kind | W2 | 2.50 | 2 | narrow |",
    ]


def test_systems_have_names_of_their_own() -> None:
    assert len({system.name for system in SYSTEMS}) == len(SYSTEMS)


def _tiny_gguf(path: Path, matrix: np.ndarray, vector: np.ndarray) -> None:
    writer = GGUFWriter(path, arch="llama")
    writer.add_uint32("llama.block_count", 1)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_tensor("token_embd.weight", matrix)
    writer.add_tensor("output_norm.weight", vector)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_keeps_its_metadata_and_vectors_when_its_matrices_are_quantised(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    matrix, vector = draw.normal(size=(3, 64)).astype(np.float32), draw.normal(size=64).astype(np.float32)
    _tiny_gguf(tmp_path / "wide.gguf", matrix, vector)

    write_gguf(
        tmp_path / "wide.gguf", tmp_path / "narrow.gguf", GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0
    )

    reader = GGUFReader(tmp_path / "narrow.gguf")
    assert reader.fields["llama.block_count"].contents() == 1
    assert reader.fields["tokenizer.ggml.tokens"].contents() == ["a", "b"]
    assert reader.fields["general.file_type"].contents() == gguf.LlamaFileType.MOSTLY_Q8_0
    stored = {tensor.name: tensor for tensor in reader.tensors}
    np.testing.assert_array_equal(stored["output_norm.weight"].data, vector)
    embedding = stored["token_embd.weight"]
    assert embedding.tensor_type is GGMLQuantizationType.Q8_0
    # Q8_0 by its definition: blocks of 32, whole multiples of a 127th of the largest, scales in float16.
    steps = np.abs(matrix.reshape(3, 2, 32)).max(axis=-1, keepdims=True) / 127
    values = gguf.quants.dequantize(embedding.data, embedding.tensor_type).reshape(3, 2, 32)
    assert np.all(np.abs(values - matrix.reshape(3, 2, 32)) <= 0.6 * steps)


_SERVER_WITH_A_CHILD = """
    import http.server, subprocess, sys
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print(child.pid, flush=True)
    http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), http.server.SimpleHTTPRequestHandler).serve_forever()
"""


def test_a_server_and_its_children_end_with_the_block_even_by_an_exception(tmp_path: Path) -> None:
    port = free_port()
    log_path = tmp_path / "log"
    command = Command(argv=(sys.executable, "-c", textwrap.dedent(_SERVER_WITH_A_CHILD), str(port)))

    def interrupted() -> None:
        with running(command, url=f"http://127.0.0.1:{port}", ready_path="/", log_path=log_path) as server:
            assert httpx.get(f"http://127.0.0.1:{port}/").status_code == 200
            assert server.cpu_times().server > 0
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()

    child_pid = int(log_path.read_text().splitlines()[0])
    assert not psutil.pid_exists(child_pid) or psutil.Process(child_pid).status() == psutil.STATUS_ZOMBIE
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0


def test_a_server_that_ends_at_its_start_is_unavailable_with_its_last_error(tmp_path: Path) -> None:
    command = Command(argv=(sys.executable, "-c", "raise ValueError('no such model')"))

    with (
        pytest.raises(Unavailable, match=r"ended with 1 at its start: ValueError: no such model"),
        running(command, url="http://127.0.0.1:1", ready_path="/", log_path=tmp_path / "log"),
    ):
        pass


def test_the_line_of_a_log_that_names_an_error_is_preferred(tmp_path: Path) -> None:
    log_path = tmp_path / "log"
    log_path.write_text("begun\nRuntimeError: it is broken\nhint: see above\n\n")
    assert last_line(log_path) == "RuntimeError: it is broken"
    log_path.write_text("begun\nended\n")
    assert last_line(log_path) == "ended"


def test_a_finished_environment_is_used_as_it_is(tmp_path: Path) -> None:
    environment = Environment(name="one", pip_steps=(("install", "a-package-that-is-never-installed"),))
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "installed").write_text(environment.digest)

    assert made_environment(environment, tmp_path, print) == tmp_path / "one" / "bin"
