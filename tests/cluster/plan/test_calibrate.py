"""`bakehouse plan calibrate`: sizes of steps, their times on a clock of ours, and the fit."""

import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from bakehouse_cluster import cli
from bakehouse_cluster.config import parse_config
from bakehouse_cluster.plan.calibrate import (
    KINDS,
    Measured,
    StepSize,
    fit,
    fit_of,
    fits_by_kind,
    measure,
    split,
    step_sizes,
)
from bakehouse_cluster.plan.calibrating import calibrate
from bakehouse_cluster.plan.cost_file import read_cost
from bakehouse_replica.core.errors import BakehouseError, StartupError
from bakehouse_replica.core.sampling import SamplingParams
from bakehouse_replica.core.types import Capacity, StepPlan, StepResult
from bakehouse_replica.executors.simulated import StepCost
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

CAPACITY = Capacity(n_blocks=400, block_size=16, max_step_tokens=512, max_sequences=64)
COST = StepCost(
    step_s=0.01,
    prefill_token_s=3e-4,
    decode_sequence_s=2e-4,
    context_token_s=5e-7,
    read_token_s=4e-7,
    pair_s=3e-7,
)
NAMES = ("step_s", "prefill_token_s", "decode_sequence_s", "context_token_s", "read_token_s", "pair_s")
SIZES = step_sizes(CAPACITY, max_model_len=2048, max_prefill_tokens=256)


class ClockedExecutor:
    """Computes nothing: taking a result moves its clock by what the step costs; the first steps are slow."""

    def __init__(self, capacity: Capacity, cost: StepCost, n_slow: int = 0) -> None:
        self.capacity = capacity
        self.now = 0.0
        self.plans: list[StepPlan] = []
        self.most_in_flight = 0
        self._cost = cost
        self._n_slow = n_slow
        self._n_in_flight = 0

    def clock(self) -> float:
        return self.now

    def prepare(self, params: SamplingParams) -> None:
        raise AssertionError("nothing to prepare")

    def begin(self, plan: StepPlan) -> "ClockedStep":
        self.plans.append(plan)
        self._n_in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self._n_in_flight)
        return ClockedStep(self, plan)

    def finish(self, plan: StepPlan) -> StepResult:
        self._n_in_flight -= 1
        self.now += self._cost.seconds(plan) * (100 if plan.step < self._n_slow else 1)
        return StepResult(step=plan.step, sampled=(), elapsed_s=0.0)

    def close(self) -> None:
        raise AssertionError("whoever made it closes it")


class ClockedStep:
    def __init__(self, executor: ClockedExecutor, plan: StepPlan) -> None:
        self._executor, self._plan = executor, plan

    def result(self) -> StepResult:
        return self._executor.finish(self._plan)


def measured_on(executor: ClockedExecutor, sizes: Sequence[StepSize] = SIZES) -> list[Measured]:
    return measure(executor, sizes, vocabulary_size=50, advance=lambda: None, clock=executor.clock)


def exact(cost: StepCost, sizes: Sequence[StepSize] = SIZES) -> list[Measured]:
    return [Measured(size=size, seconds=cost.seconds(size.plan())) for size in sizes]


@settings(max_examples=60)
@given(
    n_blocks=st.integers(8, 5000),
    block_size=st.sampled_from([1, 16, 32]),
    max_step_tokens=st.integers(32, 9000),
    max_sequences=st.integers(1, 600),
    max_model_len=st.integers(2, 70_000),
)
def test_every_size_fits_into_a_step_the_pool_and_the_context(
    n_blocks: int, block_size: int, max_step_tokens: int, max_sequences: int, max_model_len: int
) -> None:
    capacity = Capacity(
        n_blocks=n_blocks,
        block_size=block_size,
        max_step_tokens=max_step_tokens,
        max_sequences=max_sequences,
    )
    max_model_len = min(max_model_len, n_blocks * block_size)
    sizes = step_sizes(capacity, max_model_len=max_model_len, max_prefill_tokens=256)
    assert {size.kind for size in sizes} >= {"decodes"}
    assert len(set(sizes)) == len(sizes)
    for size in sizes:
        plan = size.plan(block_size=block_size, vocabulary_size=7)
        blocks = [block_id for chunk in plan.chunks for block_id in chunk.block_ids]
        n_shared = size.n_shared // block_size
        for chunk in plan.chunks:
            starts_alike = chunk.block_ids[:n_shared] == tuple(range(n_shared))
            assert starts_alike == (n_shared == 0 or len(chunk.token_ids) == 1)
        own = [block_id for block_id in blocks if block_id >= n_shared]
        assert len(set(own)) == len(own), "no two tables share another block"
        assert len(set(blocks)) == size.n_blocks(block_size)
        assert max(blocks) < n_blocks
        assert sum(len(chunk.token_ids) for chunk in plan.chunks) == size.n_tokens <= max_step_tokens
        assert size.n_decodes <= max_sequences
        for chunk in plan.chunks:
            n_tokens = chunk.start + len(chunk.token_ids)
            assert n_tokens <= max_model_len
            assert len(chunk.block_ids) == -(-n_tokens // block_size)
            assert max(chunk.token_ids) < 7


def test_the_sizes_of_a_processor_hold_decodes_prompts_and_both_up_to_the_limits() -> None:
    assert {size.kind for size in SIZES} == set(KINDS)
    assert max(size.n_decodes for size in SIZES) == 64
    assert max(size.n_prompt for size in SIZES) == 512
    assert max(size.n_context for size in SIZES) == 2048
    assert max(size.n_prompt for size in SIZES if size.n_decodes) == 256
    for n_prompt in (16, 512):
        assert max(size.n_before for size in SIZES if size.n_prompt == n_prompt) == 2048 - n_prompt


@pytest.mark.parametrize("max_model_len", [256, 1024, 8192])
def test_no_two_parts_of_a_step_always_come_together(max_model_len: int) -> None:
    """Else the fit could not tell which of them takes the time: relative features, each column of length 1."""
    sizes = step_sizes(replace(CAPACITY, n_blocks=1000), max_model_len=max_model_len, max_prefill_tokens=256)
    units = [StepCost(**{name: 1.0}) for name in NAMES]
    shares = np.array(
        [[unit.seconds(one.size.plan()) / one.seconds for unit in units] for one in exact(COST, sizes)]
    )
    assert np.linalg.cond(shares / np.linalg.norm(shares, axis=0)) < 10


@pytest.mark.parametrize("max_flights", [1, 2])
def test_the_time_of_a_size_is_its_own_without_the_first_round(max_flights: int) -> None:
    capacity = replace(CAPACITY, max_flights=max_flights)
    n_filling = 1 + -(-max(size.n_blocks(16) for size in SIZES) // 256)
    executor = ClockedExecutor(capacity, COST, n_slow=n_filling + max_flights * len(SIZES))
    found = measured_on(executor)
    assert [one.size for one in found] == SIZES
    assert [one.seconds for one in found] == pytest.approx([one.seconds for one in exact(COST)])
    assert executor.most_in_flight == max_flights
    assert [plan.step for plan in executor.plans] == list(range(len(executor.plans)))


def test_every_block_is_written_before_it_is_read() -> None:
    executor = ClockedExecutor(CAPACITY, COST)
    measured_on(executor)
    written = {0}
    for plan in executor.plans:
        assert {copy.source for copy in plan.copies} <= written
        written |= {copy.target for copy in plan.copies}
        for chunk in plan.chunks:
            assert set(chunk.block_ids) <= written


def test_a_step_that_costs_as_the_model_says_is_fitted_exactly() -> None:
    found = fit(measured_on(ClockedExecutor(CAPACITY, COST)))
    for name in NAMES:
        assert getattr(found, name) == pytest.approx(getattr(COST, name), rel=1e-6), name


@settings(max_examples=40)
@given(st.lists(st.floats(0.3, 3.0), min_size=len(SIZES), max_size=len(SIZES)))
def test_no_other_coefficients_from_zero_on_have_smaller_relative_errors(factors: list[float]) -> None:
    """By the conditions of Karush, Kuhn and Tucker, which are sufficient, for the problem is convex."""
    noisy = [replace(one, seconds=one.seconds * factor) for one, factor in zip(exact(COST), factors, strict=True)]
    found = fit(noisy)
    units = [StepCost(**{name: 1.0}) for name in NAMES]
    shares = np.array([[unit.seconds(one.size.plan()) / one.seconds for unit in units] for one in noisy])
    coefficients = np.array([getattr(found, name) for name in NAMES])
    slope = shares.T @ (shares @ coefficients - 1) / np.linalg.norm(shares, axis=0)
    assert (coefficients >= 0).all()
    assert (slope > -1e-8).all(), "raising a coefficient makes nothing better"
    assert (np.abs(slope[coefficients > 0]) < 1e-8).all(), "nor does lowering one"


def test_a_coefficient_that_would_be_negative_is_zero() -> None:
    shrinking = [
        Measured(size=size, seconds=0.02 - 1e-6 * size.n_context)
        for size in SIZES
        if size.kind == "decodes" and size.n_decodes == 1
    ]
    found = fit(shrinking)
    assert found.context_token_s == found.read_token_s == 0.0


def test_a_third_is_held_out_and_always_the_same() -> None:
    fitted, held_out = split(exact(COST))
    assert len(held_out) == round(len(SIZES) / 3)
    assert {one.size for one in fitted} | {one.size for one in held_out} == set(SIZES)
    assert not {one.size for one in fitted} & {one.size for one in held_out}
    assert split(exact(COST)) == (fitted, held_out)


def test_errors_are_shares_of_what_was_measured() -> None:
    sizes = [StepSize(n_decodes=n, n_context=16) for n in (1, 2, 4, 8)] + [StepSize(n_prompts=1, n_prompt=64)]
    predicted = exact(COST, sizes)
    off = [1.0, 0.5, 2.0, 0.8, 1.0]  # measured = predicted * off
    measured = [replace(one, seconds=one.seconds * factor) for one, factor in zip(predicted, off, strict=True)]
    found = fit_of(COST, measured)
    assert (found.n_steps, found.error_p50, found.error_p90, found.error_max) == pytest.approx((5, 0.25, 1.0, 1.0))
    total_s = sum(one.seconds for one in measured)
    assert found.measured_s == pytest.approx(total_s)
    assert found.error_total == pytest.approx(sum(one.seconds for one in predicted) / total_s - 1)
    by_kind = fits_by_kind(COST, measured)
    assert {kind: one.n_steps for kind, one in by_kind.items()} == {"decodes": 4, "prompts": 1}
    assert by_kind["prompts"].error_max == pytest.approx(0)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    torch.manual_seed(0)
    tiny = LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    LlamaForCausalLM(tiny).save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def test_a_model_is_calibrated_in_this_process(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = parse_config(
        {
            "model": {"source": str(model), "device": "cpu"},
            "replica": {"kv_memory": 2_000_000, "max_sequences": 4, "max_step_tokens": 64},
        }
    )
    shown = io.StringIO()
    calibrate(config, tmp_path / "cost.json", Console(file=shown, width=200))
    file = read_cost(tmp_path / "cost.json")
    assert (file.device, file.weights, file.kv_dtype) == ("cpu", "float32", "float32")
    assert file.model == str(model)
    assert file.shape == "2 layers of 32, 4 heads and 2 KV heads of 8, feed-forward 48, vocabulary 300"
    assert (file.n_ranks, file.max_context) == (1, 64)
    assert file.cost.seconds(StepSize(n_decodes=1, n_context=16).plan()) > 0
    assert file.fit is not None
    assert file.fit.n_steps == sum(one.n_steps for one in file.fit_by_kind.values())
    assert "steps: " in shown.getvalue(), "how far it is"
    assert f"{file.fit.error_p50:.1%}" in capsys.readouterr().out


def test_the_command_takes_the_options_of_serve_and_writes_the_file(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    options = ["--device", "cpu", "--max-model-len", "48", "--kv-memory", "2MB", "--output", str(path)]
    ran = CliRunner().invoke(cli.app, ["plan", "calibrate", str(model), *options])
    assert ran.exit_code == 0, ran.output
    assert read_cost(path).max_context == 48


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--tensor-parallel", "3"], "tensor"),
        (["--dtype", "float64"], "float64"),
        (["--quantize", "int7"], "int7"),
        (["--kv-dtype", "int8"], "int8"),
        (["--device", "tpu"], "tpu"),
        (["--weights", "none"], "none"),
        (["--overlap", "maybe"], "maybe"),
        (["--revision", "main"], "revision"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(model: Path, options: list[str], said: str) -> None:
    ran = CliRunner().invoke(cli.app, ["plan", "calibrate", str(model), *options])
    assert isinstance(ran.exception, BakehouseError)
    assert said in ran.exception.message


def test_what_runs_no_model_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    script.write_text('{"pieces": ["a", "b"], "eos": 0, "default": {"pieces": ["b"]}}')
    config = parse_config({"model": {"source": f"scripted:{script}"}})
    with pytest.raises(StartupError, match="runs no model"):
        calibrate(config, None, Console(file=io.StringIO()))


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    config = parse_config({"model": {"source": "./nowhere"}})
    with pytest.raises(StartupError, match="there is no folder"):
        calibrate(config, tmp_path / "no" / "cost.json", Console(file=io.StringIO()))
