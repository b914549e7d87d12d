"""Why a server could not be reached, in the system's words."""

import errno
import socket

import httpx
import pytest
from bakehouse_cluster.reaching import reason_of, unreachable


def caused(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


REFUSED = OSError(errno.ECONNREFUSED, "Connect call failed ('127.0.0.1', 9)")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (REFUSED, "Connection refused"),
        (httpx.ConnectError("[Errno 111] Connection refused"), "[Errno 111] Connection refused"),
        (caused(httpx.ConnectError("All connection attempts failed"), REFUSED), "Connection refused"),
        (caused(ValueError("failed"), ExceptionGroup("several", [KeyError("a"), REFUSED])), "Connection refused"),
        (socket.gaierror(-2, "Name or service not known"), "Name or service not known"),
        (OSError(errno.EHOSTUNREACH, "Connect call failed"), "No route to host"),
        (httpx.ConnectTimeout("timed\nout"), "timed out"),
        (httpx.ConnectTimeout(""), "ConnectTimeout"),
    ],
)
def test_the_systems_reason_is_told_where_there_is_one(error: BaseException, words: str) -> None:
    assert reason_of(error) == words


def test_errors_that_hold_each_other_are_read_once() -> None:
    first, second = ValueError("one"), ValueError("two")
    first.__cause__, second.__cause__ = second, first
    assert reason_of(first) == "one"


def test_a_line_says_where_and_what_to_do() -> None:
    assert unreachable("http://x", REFUSED) == (
        "no server answers at http://x: Connection refused; start one, or name another by --url"
    )
