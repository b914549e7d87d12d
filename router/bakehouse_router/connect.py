"""A Python client for programs inside the Ray cluster: calls the gateways by handle, without HTTP.

    client = bakehouse.connect()
    for delta in client.generate("Once upon a time", max_tokens=64):
        print(delta.text, end="")
    print(client.chat([{"role": "user", "content": "Hello"}], temperature=0).result().text)

Parameters have the names, defaults, limits and errors that they have over HTTP; where `model` is not given it is
the one that is served. Errors are those of `bakehouse_replica.core.errors`. As with Ray's own handles, `result()`
and `for` are for programs without an event loop, `await` and `async for` for those with one.
"""

import asyncio
import concurrent.futures
import logging
import socket
import threading
from collections.abc import AsyncIterator, Generator, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Generic, NoReturn, TypeVar, cast

import ray
from bakehouse_replica.core.errors import BakehouseError, DeadlineExceeded, InvalidRequest, Overloaded, Unavailable
from ray import serve
from ray._private import ray_constants
from ray.exceptions import RayError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    RayServeException,
    RequestCancelledError,
)
from ray.serve.handle import DeploymentHandle, DeploymentResponse, DeploymentResponseGenerator

from bakehouse_router.handle_messages import Delta, ModelEntry, Reply, Tokenized, whole_reply

# The gateway ends a call at its deadline and says so; a client that hears nothing ends it so much later.
DEADLINE_GRACE_S = 1.0
REACH_TIMEOUT_S = 10.0
LOOPBACKS = frozenset({"localhost", "127.0.0.1", "[::1]"})
_CANCELS = (RequestCancelledError, TaskCancelledError, asyncio.CancelledError, concurrent.futures.CancelledError)
_FOREIGN = (RayError, DeploymentUnavailableError, BackPressureError, *_CANCELS)

Prompt = str | Sequence[int]
Message = Mapping[str, object]
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


class Client:
    """Calls one application by a handle of its gateways; may be shared by threads, and sent to Ray tasks.

    client = bakehouse.connect("10.0.0.5:6379")
    assert client.models().result()[0].name == "smollm2"
    """

    def __init__(self, gateways: DeploymentHandle[object]) -> None:
        self._gateways = gateways

    def generate(self, prompt: Prompt | Sequence[Prompt], **parameters: object) -> Stream:
        """Continue a prompt, a text or token ids, or several: what `POST /v1/completions` does.

            reply = client.generate([1, 2, 3], max_tokens=8, temperature=0, return_token_ids=True).result()
            token_ids = [token.token_id for token in reply.choices[0].tokens]

        `parameters` as in the HTTP body; `timeout_s` in seconds. Choice k of prompt r is choice `r * n + k`.
        Errors are raised when the stream is read.
        """
        return self._stream("completion", {"prompt": _plain(prompt)}, parameters)

    def chat(self, messages: Sequence[Message], **parameters: object) -> Stream:
        """Answer a conversation: what `POST /v1/chat/completions` does.

            stream = client.chat([{"role": "user", "content": "Weather in Rome?"}], tools=[...], timeout_s=30)
            calls = stream.result().tool_calls

        `parameters` as in the HTTP body. Errors are raised when the stream is read.
        """
        return self._stream("chat", {"messages": [dict(message) for message in messages]}, parameters)

    def tokenize(self, prompt: str | Sequence[Message], **parameters: object) -> Pending[Tokenized]:
        """The token ids that the model is given for a text, or for messages: what `POST /tokenize` does.

        n_tokens = len(client.tokenize("How long am I?").result().token_ids)
        """
        if isinstance(prompt, str):
            return self._pending("tokenize", "completion", {"prompt": prompt, **parameters})
        messages = [dict(message) for message in prompt]
        return self._pending("tokenize", "chat", {"messages": messages, **parameters})

    def detokenize(self, token_ids: Sequence[int], **parameters: object) -> Pending[str]:
        """The text of token ids, special tokens left out: what `POST /detokenize` does.

        text = client.detokenize([1, 2, 3]).result()
        """
        return self._pending("detokenize", {"tokens": list(token_ids), **parameters})

    def models(self) -> Pending[tuple[ModelEntry, ...]]:
        """The model that is served, and its context in tokens.

        (model,) = client.models().result()
        """
        return self._pending("models")

    def _stream(self, kind: str, asked: Mapping[str, object], parameters: Mapping[str, object]) -> Stream:
        if "stream" in parameters:
            raise InvalidRequest("stream is no parameter here; iterate over what is returned, or not", "stream")
        fields = {"stream": True, "stream_options": {"include_usage": True}, **asked, **parameters}
        response = self._gateways.options(method_name="stream", stream=True).remote(kind, fields)
        timeout_s = parameters.get("timeout_s")
        is_number = isinstance(timeout_s, int | float) and timeout_s > 0  # else the gateway refuses it
        return Stream(
            cast("DeploymentResponseGenerator[Delta]", response),
            float(cast("float", timeout_s)) if is_number else None,
        )

    def _pending(self, method: str, *args: object) -> Pending[T]:
        response = self._gateways.options(method_name=method).remote(*args)
        return Pending(cast("DeploymentResponse[T]", response))


def connect(address: str = "auto", *, app_name: str = "bakehouse") -> Client:
    """A client of the application `app_name` in the Ray cluster at `address`, for programs that run inside it.

        client = bakehouse.connect()  # in a Ray task or actor, or on a machine of the cluster

    `auto` finds the Ray of this machine, or RAY_ADDRESS; otherwise `host:port` of its GCS. A process that is
    connected to a Ray already stays so, whatever the address. The process needs this package and the cluster's
    version of Ray and Python, and the cluster's token where it asks for one (RAY_AUTH_MODE=token with
    RAY_AUTH_TOKEN_PATH). Raises `Unavailable` where no Ray answers or the application does not run in it.
    """
    if not ray.is_initialized():
        _join(address)
    try:
        return Client(serve.get_app_handle(app_name))
    except RayServeException as error:
        raise Unavailable(f"the application {app_name!r} does not run in this Ray: {error}") from error


def _join(address: str) -> None:
    host, _, port = address.rpartition(":")
    try:
        if port.isdecimal():  # Ray itself would try for minutes
            socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_TIMEOUT_S).close()
        if host in LOOPBACKS:
            # Else Ray replaces it by this machine's address, where a Ray that listens on loopback is not.
            vars(ray_constants)["ENABLE_RAY_CLUSTER"] = False
        ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
    except (OSError, RuntimeError, ValueError, RayError) as error:
        raise Unavailable(f"no Ray can be reached at {address!r}: {error}") from error


def _plain(prompt: Prompt | Sequence[Prompt]) -> object:
    """The prompt as JSON would give it: sequences as lists."""
    if isinstance(prompt, str):
        return prompt
    return [_plain(part) if isinstance(part, str | Sequence) else part for part in prompt]


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
