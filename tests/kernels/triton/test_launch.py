"""The tables of launch settings: what they serve, and what of them is refused."""

import pytest
import torch
from bakehouse_kernels.triton.launch import (
    DEVICE_CLASSES,
    TABLES,
    DeviceClass,
    Entry,
    Launch,
    device_class_of,
    launch_of,
    parsed,
    table_of,
    trying,
    written,
)


def test_the_first_launch_whose_limits_hold_is_taken() -> None:
    small, large = (Launch(tiles={"BLOCK": n}, num_warps=4, num_stages=2) for n in (16, 64))
    table = {"op": (Entry(up_to={"rows": 16, "width": 8}, launch=small), Entry(up_to={}, launch=large))}
    with trying(table):
        assert launch_of("op", "sm80", rows=16, width=8) is small
        assert launch_of("op", "sm80", rows=17, width=8) is large
        assert launch_of("op", "sm80", rows=16, width=9) is large
    with pytest.raises(KeyError):
        launch_of("op", "sm80", rows=16, width=8)


def test_options_are_the_keyword_arguments_of_a_kernel() -> None:
    launch = Launch(tiles={"BLOCK": 16}, num_warps=4, num_stages=2)
    assert launch.options == {"BLOCK": 16, "num_warps": 4, "num_stages": 2}


@pytest.mark.parametrize("device_class", DEVICE_CLASSES)
def test_a_committed_table_is_written_as_the_tuner_writes_it(device_class: DeviceClass) -> None:
    assert (TABLES / f"{device_class}.json").read_text() == written(table_of(device_class))


def test_all_classes_know_the_same_kernels() -> None:
    first, *others = (set(table_of(device_class)) for device_class in DEVICE_CLASSES)
    assert all(other == first for other in others)


@pytest.mark.parametrize(
    "text", ['{"op": []}', '{"op": [{"up_to": {"rows": 1}, "launch": {"num_warps": 4, "num_stages": 1}}]}']
)
def test_a_kernel_without_a_launch_for_every_size_is_refused(text: str) -> None:
    with pytest.raises(
        ValueError, match="the last launch of op is missing or has limits; it must serve every size"
    ):
        parsed(text)


@pytest.mark.parametrize(
    ("capability", "expected"), [((8, 0), "sm80"), ((8, 9), "sm80"), ((9, 0), "sm90"), ((12, 0), "sm90")]
)
def test_a_gpu_takes_the_table_of_its_generation(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], expected: DeviceClass
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert device_class_of(torch.device("cuda")) == expected
    assert device_class_of(torch.device("cpu")) == "interpreter"


def test_a_gpu_that_is_too_old_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Some GPU")
    with pytest.raises(ValueError, match=r"Some GPU has compute capability 7\.5; the kernels need 8\.0 or newer"):
        device_class_of(torch.device("cuda"))
