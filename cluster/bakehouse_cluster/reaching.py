"""Says, in the same words everywhere, why a server could not be reached."""

import os
import socket
import ssl


def unreachable(url: str, error: BaseException) -> str:
    """A line for a connection to `url` that `error` ended, whichever HTTP client raised it."""
    return f"no server answers at {url}: {reason_of(error)}; start one, or name another by --url"


def reason_of(error: BaseException) -> str:
    """What the system said, which clients wrap in words of their own, several times and in groups."""
    unread, seen = [error], set[int]()
    while unread:
        one = unread.pop(0)
        seen.add(id(one))
        if isinstance(one, OSError) and one.errno is not None:
            has_own_words = isinstance(one, socket.gaierror | ssl.SSLError)  # their numbers are not the system's
            return str(one.strerror) if has_own_words else os.strerror(one.errno)
        inner = (one.__cause__, one.__context__, *(one.exceptions if isinstance(one, BaseExceptionGroup) else ()))
        unread += [other for other in inner if other is not None and id(other) not in seen]
    return " ".join(str(error).split()) or type(error).__name__
