"""A call by a handle while it is in flight: waited for, iterated over, cancelled; Ray's errors become ours."""

import asyncio
import concurrent.futures
import threading
from collections.abc import AsyncIterator, Generator, Iterator
from types import TracebackType
from typing import Generic, NoReturn, TypeVar

from bakehouse_replica.core.errors import BakehouseError, DeadlineExceeded, Overloaded, Unavailable
from ray.exceptions import RayError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RequestCancelledError
from ray.serve.handle import DeploymentResponse, DeploymentResponseGenerator

from bakehouse_router.handle_messages import Delta, Reply, whole_reply

# The gateway ends a call at its deadline and says so; a client that hears nothing ends it so much later.
DEADLINE_GRACE_S = 1.0
_CANCELS = (RequestCancelledError, TaskCancelledError, asyncio.CancelledError, concurrent.futures.CancelledError)
_FOREIGN = (RayError, DeploymentUnavailableError, BackPressureError, *_CANCELS)

T = TypeVar("T")


class Pending(Generic[T]):
    """An answer that comes as a whole: `result()`, or `await`."""

    def __init__(self, response: DeploymentResponse[T]) -> None:
        self._response = response

    def result(self, timeout_s: float | None = None) -> T:
        """The answer; raises `DeadlineExceeded` where it has not come after `timeout_s` seconds."""
        try:
            return self._response.result(timeout_s=timeout_s)
        except TimeoutError as error:
            self._response.cancel()  # type: ignore[no-untyped-call]
            raise DeadlineExceeded(f"no answer came within {timeout_s:g} s") from error
        except _FOREIGN as error:
            _raise_ours(error)

    def __await__(self) -> Generator[object, None, T]:
        try:
            return (yield from self._response.__await__())
        except _FOREIGN as error:
            if isinstance(error, asyncio.CancelledError):
                raise
            _raise_ours(error)


class _Deadline:
    """Cancels a call whose gateway does not say in time that its time is over, as where there is no gateway."""

    def __init__(self, response: DeploymentResponseGenerator[Delta], timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.has_passed = False
        self._response = response
        self._timer = threading.Timer(timeout_s + DEADLINE_GRACE_S, self._pass)
        self._timer.daemon = True
        self._timer.start()

    def stop(self) -> None:
        self._timer.cancel()

    def _pass(self) -> None:
        self.has_passed = True
        self._response.cancel()  # type: ignore[no-untyped-call]


class Stream:
    """One call in flight. Iterate over it (`for` or `async for`), or take the whole `result()` (or `await` it).

    It is cancelled, and its memory on the replica freed, by `cancel`, by leaving the loop over it, at the end of a
    `with` block, and when it is dropped. What is raised while it is read: `InvalidRequest` with `param`, the field
    that is wrong; `Overloaded`; `DeadlineExceeded`; `Unavailable`; after `cancel`
    `concurrent.futures.CancelledError`.
    """

    def __init__(self, response: DeploymentResponseGenerator[Delta], timeout_s: float | None) -> None:
        self._response = response
        self._is_over = False
        # It does not know this object, which can so be dropped, and the call with it.
        self._deadline = None if timeout_s is None else _Deadline(response, timeout_s)

    def __iter__(self) -> Iterator[Delta]:
        """The answer in pieces, the usage last; leaving the loop cancels the call."""
        try:
            while (delta := self._next()) is not None:
                yield delta
        finally:
            self._end()

    async def __aiter__(self) -> AsyncIterator[Delta]:
        """The same for a program with an event loop."""
        try:
            while (delta := await self._next_async()) is not None:
                yield delta
        finally:
            self._end()

    def result(self) -> Reply:
        """The whole reply, once it is complete."""
        return whole_reply(iter(self))

    def __await__(self) -> Generator[object, None, Reply]:
        return self._gather().__await__()

    def cancel(self) -> None:
        """End the call now; idempotent, and without effect once the answer is complete."""
        self._end()

    def __enter__(self) -> "Stream":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def __del__(self) -> None:
        self._end()

    async def _gather(self) -> Reply:
        return whole_reply([delta async for delta in self])

    def _next(self) -> Delta | None:
        try:
            return self._seen(next(self._response, None))
        except _FOREIGN as error:
            self._fail(error)

    async def _next_async(self) -> Delta | None:
        try:
            return self._seen(await anext(self._response, None))
        except _FOREIGN as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            self._fail(error)

    def _seen(self, delta: Delta | None) -> Delta | None:
        if delta is None:
            self._is_over = True
        return delta

    def _fail(self, error: BaseException) -> NoReturn:
        if self._deadline is not None and self._deadline.has_passed:
            raise DeadlineExceeded(
                f"the {self._deadline.timeout_s:g} s that the request allowed have passed"
            ) from error
        self._is_over = not isinstance(error, _CANCELS)
        _raise_ours(error)

    def _end(self) -> None:
        if self._deadline is not None:
            self._deadline.stop()
        if not self._is_over:
            self._response.cancel()  # type: ignore[no-untyped-call]


def _raise_ours(error: BaseException) -> NoReturn:
    """Raises the error of ours that `error` stands for."""
    if isinstance(error, RayTaskError) and isinstance(error.cause, BakehouseError):
        raise error.cause from error
    if isinstance(error, BackPressureError):
        raise Overloaded(str(error)) from error
    if isinstance(error, _CANCELS):
        raise concurrent.futures.CancelledError("the call was cancelled") from error
    if isinstance(error, RayTaskError):
        raise error  # a failure inside the gateway, which its log tells more about
    raise Unavailable(f"the gateway was lost or is not available: {type(error).__name__}") from error
