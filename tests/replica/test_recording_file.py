"""How far recording has come is told in a file while it lasts."""

import logging
from pathlib import Path

import pytest
from bakehouse_replica.recording_file import RECORDING_FILE, recording_told


def test_the_file_says_how_far_it_is_and_goes_at_the_end(tmp_path: Path) -> None:
    with recording_told(tmp_path / "model") as tell:
        tell(12, 35)
        assert (tmp_path / "model" / RECORDING_FILE).read_text() == "captured 12 of 35 CUDA graphs"
        tell(13, 35)
        assert (tmp_path / "model" / RECORDING_FILE).read_text() == "captured 13 of 35 CUDA graphs"
    assert list((tmp_path / "model").iterdir()) == []


def test_the_file_goes_where_recording_fails(tmp_path: Path) -> None:
    def record() -> None:
        with recording_told(tmp_path) as tell:
            tell(1, 2)
            raise MemoryError

    with pytest.raises(MemoryError):
        record()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_harms_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "model").write_text("in the way of the folder")
    with caplog.at_level(logging.INFO), recording_told(tmp_path / "model") as tell:
        tell(1, 2)
    assert "nobody is told" in caplog.text
