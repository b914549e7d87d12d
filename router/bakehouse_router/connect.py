"""A Python client for programs inside the Ray cluster: calls the gateways by handle, without HTTP.

    client = bakehouse.connect()
    for delta in client.generate("Once upon a time", max_tokens=64):
        print(delta.text, end="")
    print(client.chat([{"role": "user", "content": "Hello"}], temperature=0).result().text)

Parameters have the names, defaults, limits and errors that they have over HTTP; where `model` is not given it is
the one that is served. Errors are those of `bakehouse_replica.core.errors`. As with Ray's own handles, `result()`
and `for` are for programs without an event loop, `await` and `async for` for those with one.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from typing import TypeVar, cast

import grpc
import ray
from bakehouse_replica.core.errors import InvalidRequest, Unavailable
from ray import serve
from ray._private import ray_constants, services
from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available
from ray._private.gcs_utils import create_gcs_channel
from ray.core.generated.gcs_service_pb2 import GetAllNodeInfoRequest  # type: ignore[attr-defined]
from ray.core.generated.gcs_service_pb2_grpc import NodeInfoGcsServiceStub
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle, DeploymentResponse, DeploymentResponseGenerator

from bakehouse_router.handle_calls import Pending, Stream
from bakehouse_router.handle_messages import Delta, ModelEntry, Tokenized

REACH_TIMEOUT_S = 10.0
LOOPBACKS = frozenset({"127.0.0.1", "::1"})

Prompt = str | Sequence[int]
Message = Mapping[str, object]
T = TypeVar("T")


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

    `auto` is what RAY_ADDRESS says, else the Ray of this machine; otherwise `host:port` of its GCS. A process that
    is connected to a Ray already stays so, whatever the address. The process needs this package and the cluster's
    version of Ray and Python, and the cluster's token where it asks for one (RAY_AUTH_MODE=token with
    RAY_AUTH_TOKEN_PATH). Raises `Unavailable` where no Ray answers, within about `REACH_TIMEOUT_S`, or the
    application does not run in it.
    """
    if not ray.is_initialized():
        _join(address)
    try:
        return Client(serve.get_app_handle(app_name))
    except (RayServeException, RayError) as error:
        raise Unavailable(f"the application {app_name!r} does not run in this Ray: {error}") from None


def _join(address: str) -> None:
    place, origin = (address, "") if address != "auto" else _found()
    try:
        if _node_address(place) in LOOPBACKS:
            # Else Ray takes this machine's address for 127.0.0.1, where a Ray that listens on loopback is not.
            vars(ray_constants)["ENABLE_RAY_CLUSTER"] = False
        ray.init(address=place, log_to_driver=False, logging_level=logging.WARNING)
        # Else Serve prints a line for each handle; a program that has joined a Ray by itself has its own levels.
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
    except (OSError, RuntimeError, ValueError, RayError) as error:
        reason = " ".join(str(error).split())  # some of Ray's have several lines
        # The line says all; the errors behind it would bury it under 30 lines of Ray and gRPC.
        raise Unavailable(f"no Ray can be reached at {place!r}{origin}: {reason}") from None


def _found() -> tuple[str, str]:
    """The address that `auto` means, and who says so."""
    if named := os.environ.get(ray_constants.RAY_ADDRESS_ENVIRONMENT_VARIABLE):
        return named, " (RAY_ADDRESS)"
    services.find_gcs_addresses.cache_clear()  # type: ignore[attr-defined]
    running = services.find_gcs_addresses()  # type: ignore[no-untyped-call]
    if len(running) > 1 and services.find_bootstrap_address(None) is None:  # none of them is `ray start`'s
        raise Unavailable(
            f"several Rays run on this machine, at {', '.join(sorted(running))}: name one by RAY_ADDRESS or "
            f"connect(ADDRESS); a server's line `Python` says its own"
        )
    try:
        address = services.get_ray_address_from_environment("auto", None)
    except ConnectionError:
        raise Unavailable("RAY_ADDRESS is not set, and no Ray runs on this machine") from None
    maybe_enable_token_auth_if_token_available(warn_if_disabled=False)  # as `ray.init` does for `auto`
    return address, " (found on this machine)"


def _node_address(address: str) -> str:
    """Where the node on this machine of the Ray at `address` listens.

    Raises within `REACH_TIMEOUT_S` where nobody answers or no such node is; `ray.init` would try for minutes.
    """
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal():
        raise ValueError("it is not host:port of a GCS")
    try:
        with create_gcs_channel(address) as channel:
            gcs = NodeInfoGcsServiceStub(channel)  # type: ignore[no-untyped-call]
            nodes = gcs.GetAllNodeInfo(GetAllNodeInfoRequest(), timeout=REACH_TIMEOUT_S).node_info_list
    except grpc.RpcError as error:
        raise ConnectionError(_reason(error)) from error
    ids_here: set[str] = services.find_node_ids()  # type: ignore[no-untyped-call]
    for node in nodes:
        if node.node_id.hex() in ids_here:
            return str(node.node_manager_address)
    raise ConnectionError("none of its nodes runs on this machine, as programs inside a Ray need")


def _reason(error: grpc.RpcError) -> str:
    assert isinstance(error, grpc.Call), "every error of a call is one"
    match error.code():
        case grpc.StatusCode.UNAUTHENTICATED:
            return (
                "it asks for its token, which this process does not give: "
                "set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH to the token's file"
            )
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return f"nothing answered within {REACH_TIMEOUT_S:.0f} s"
    return error.details() or error.code().name


def _plain(prompt: Prompt | Sequence[Prompt]) -> object:
    """The prompt as JSON would give it: sequences as lists."""
    if isinstance(prompt, str):
        return prompt
    return [_plain(part) if isinstance(part, str | Sequence) else part for part in prompt]
