"""What a step costs, as a file."""

from pathlib import Path

import pytest
from bakehouse_cluster.plan.cost_file import CostFile, Fit, read_cost, write_cost
from bakehouse_replica.core.errors import StartupError
from bakehouse_replica.executors.simulated import StepCost

FILE = CostFile(
    cost=StepCost(step_s=0.01, prefill_token_s=1e-4, decode_sequence_s=2e-4, context_token_s=3e-8, pair_s=1e-9),
    device="cpu",
    model="smollm2",
    machine="two cores",
    fit=Fit(n_steps=100, measured_s=60.0, error_p50=0.02, error_p90=0.1, error_max=0.2, error_total=-0.01),
)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    write_cost(FILE, tmp_path / "cost.json")
    assert read_cost(tmp_path / "cost.json") == FILE


def test_a_cost_without_the_newer_coefficients_has_none_of_them(tmp_path: Path) -> None:
    (tmp_path / "cost.json").write_text('{"cost": {"step_s": 1}, "device": "cpu", "model": "m"}')
    cost = read_cost(tmp_path / "cost.json").cost
    assert cost == StepCost(step_s=1.0, read_token_s=0.0, pair_s=0.0)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "No such file"),
        ("{", "Invalid JSON"),
        ('{"cost": {"step_s": -1}, "device": "cpu", "model": "m"}', "step_s is -1"),
        ('{"cost": {"step_s": "soon"}, "device": "cpu", "model": "m"}', r"cost\.step_s"),
        ('{"cost": {"steps": 1}, "device": "cpu", "model": "m"}', r"cost\.steps"),
        ('{"cost": {"pair_s": NaN}, "device": "cpu", "model": "m"}', "cost: pair_s is nan; it must be"),
        ('{"device": "cpu", "model": "m"}', "cost: Field required"),
        ('{"cost": {}, "device": "cpu", "model": "m", "version": 2}', "version: Input should be 1"),
        ('{"cost": {}, "device": "cpu", "model": "m", "n_ranks": 0}', "n_ranks: .* greater than or equal to 1"),
        ('{"cost": {}, "device": "cpu", "model": "m", "max_context": -5}', "max_context: .* greater than"),
        (
            '{"cost": {}, "device": "cpu", "model": "m", "fit": {"n_steps": 1, "measured_s": NaN, '
            '"error_p50": 0, "error_p90": 0, "error_max": 0, "error_total": 0}}',
            "fit.measured_s: Input should be a finite number",
        ),
        ('{"cost": {}, "device": "tpu", "model": "m"}', "device"),
        ('{"cost": {}, "device": "cpu", "model": "m", "format": "bakehouse-bench"}', "format"),
        ('{"cost": {}, "device": "cpu", "model": "m", "speed": 2}', "speed"),
    ],
)
def test_a_file_that_is_none_is_refused_with_how_to_make_one(
    tmp_path: Path, content: str | None, said: str
) -> None:
    path = tmp_path / "cost.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(StartupError, match=said) as refused:
        read_cost(path)
    assert "bakehouse plan calibrate" in refused.value.message
    assert "\n" not in refused.value.message
