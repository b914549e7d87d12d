"""What the tuner chooses, with a clock of its own, and what it says without a GPU."""

import pytest
import torch
from bakehouse_kernels import tune
from bakehouse_kernels.triton.cases import Case, Make, copies, norm
from bakehouse_kernels.triton.launch import DEVICE_CLASSES, Entry, Launch, launch_of, table_of
from bakehouse_kernels.tune import TUNED, Tuned, candidates, fastest, tuned


def launch(block: int, num_warps: int = 4) -> Launch:
    return Launch(tiles={"BLOCK": block}, num_warps=num_warps, num_stages=1)


def test_candidates_are_the_launch_and_then_all_others_once() -> None:
    found = candidates(launch(32), {"BLOCK": (16, 32), "num_warps": (4, 8)})
    assert found == [launch(32), launch(16), launch(16, 8), launch(32, 8)]


@pytest.mark.parametrize(
    ("times", "chosen"),
    [
        ({1: 1.0, 2: 0.9, 4: 0.8}, 4),
        ({1: 1.0, 2: 0.985, 4: 1.2}, 1),  # within the noise of the one that stands in the table
        ({1: 1.0, 2: 0.9, 4: 0.895}, 4),
        ({2: 3.0, 4: 2.0}, 4),  # the one in the table does not fit
        ({1: 1.0}, 1),
    ],
)
def test_the_fastest_that_fits_is_chosen_unless_it_gains_too_little(times: dict[int, float], chosen: int) -> None:
    def time_of(one: Launch) -> float:
        block = one.tiles["BLOCK"]
        if block not in times:
            raise RuntimeError("out of resources")
        return times[block]

    assert fastest([launch(1), launch(2), launch(4)], time_of) == (launch(chosen), times[chosen])


def test_where_no_launch_fits_it_says_so() -> None:
    def time_of(_: Launch) -> float:
        raise RuntimeError("out of resources")

    with pytest.raises(RuntimeError, match="none of 1 launches fits the device"):
        fastest([launch(1)], time_of)


def test_a_table_is_tuned_entry_by_entry_under_the_launch_that_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    small, rest = (Entry(up_to=limits, launch=launch(16)) for limits in ({"width": 8}, {}))
    table = {"rms_norm": (small, rest), "copy_blocks": (rest,), "other": (rest,)}
    asked: list[int | None] = []

    def case_of(limits: tune.Limits) -> Case:
        asked.append(limits.get("width"))
        return norm(8, torch.float32, n_rows=1)

    monkeypatch.setattr(
        tune,
        "TUNED",
        {
            "rms_norm": Tuned(case_of, {"num_warps": (4, 8)}),
            "copy_blocks": Tuned(lambda _: copies(1), {"BLOCK": (16, 32)}),
        },
    )
    seen: list[tuple[int, int, int]] = []

    def time_of(_: object) -> float:
        narrow, wide, copy = (
            launch_of("rms_norm", "sm90", width=8),
            launch_of("rms_norm", "sm90", width=9),
            launch_of("copy_blocks", "sm90"),
        )
        seen.append((narrow.num_warps, wide.num_warps, copy.tiles["BLOCK"]))
        return 1.0 / (narrow.num_warps * wide.num_warps * copy.tiles["BLOCK"])

    lines: list[str] = []
    found = tuned(table, time_of, Make(torch.device("cpu")), lines.append)
    assert asked == [8, None]
    assert seen == [(4, 4, 16), (8, 4, 16), (8, 4, 16), (8, 8, 16), (8, 8, 16), (8, 8, 32)]
    assert found == {
        "rms_norm": (Entry(up_to={"width": 8}, launch=launch(16, 8)), Entry(up_to={}, launch=launch(16, 8))),
        "copy_blocks": (Entry(up_to={}, launch=launch(32)),),
        "other": (rest,),
    }
    assert [line.split(":")[0] for line in lines] == ["rms_norm (width <= 8)", "rms_norm", "copy_blocks"]


def test_every_kernel_of_the_tables_is_tuned() -> None:
    assert all(TUNED.keys() == table_of(device_class).keys() for device_class in DEVICE_CLASSES)


@pytest.mark.parametrize("op", TUNED)
def test_what_is_tuned_stands_in_every_table_with_the_options_that_are_tried(op: str) -> None:
    for device_class in DEVICE_CLASSES:
        for entry in table_of(device_class)[op]:
            assert TUNED[op].options.keys() <= entry.launch.options.keys()


def test_without_a_gpu_there_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=r"tuning times kernels on a GPU; torch \S+ sees none"):
        tune.main()
