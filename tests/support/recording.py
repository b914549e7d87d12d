"""What a gateway in this process has written into its request log, and calls of its gRPC face without a server."""

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import grpc
import pytest

LOGGER = "bakehouse_router.request_log"


class Lines:
    """The lines so far."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog

    @property
    def text(self) -> str:
        return "\n".join(record.getMessage() for record in self._caplog.records if record.name == LOGGER)

    def only(self) -> dict[str, Any]:
        """The one line there is, of a log in JSON."""
        lines = self.text.splitlines()
        assert len(lines) == 1, lines
        line: dict[str, Any] = json.loads(lines[0])
        return line

    def of(self, request_id: str) -> dict[str, Any]:
        """The one line about a request, of a log in JSON."""
        (line,) = [line for line in map(json.loads, self.text.splitlines()) if line["id"] == request_id]
        assert isinstance(line, dict)
        return line

    def forget(self) -> None:
        self._caplog.clear()

    async def arrived(self) -> None:
        """Returns when there is a line."""
        while not self.text:
            await asyncio.sleep(0.002)


def kept_lines(caplog: pytest.LogCaptureFixture) -> Lines:
    caplog.set_level(logging.INFO, logger=LOGGER)
    return Lines(caplog)


class GrpcCall:
    """The context of a call with this metadata; keeps what is told to the client."""

    def __init__(self, metadata: Mapping[str, str]) -> None:
        self._metadata = tuple(metadata.items())
        self.code: grpc.StatusCode | None = None
        self.told: dict[str, str] = {}

    def invocation_metadata(self) -> Sequence[tuple[str, str]]:
        return self._metadata

    def set_code(self, code: grpc.StatusCode, /) -> None:
        self.code = code

    def set_details(self, details: str, /) -> None: ...

    def set_trailing_metadata(self, metadata: list[tuple[str, str]], /) -> None:
        self.told = dict(metadata)
