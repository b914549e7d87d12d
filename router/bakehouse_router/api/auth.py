"""Lets nobody in without a key, but to the few paths that stay open."""

from collections.abc import Awaitable, Callable, Collection

from bakehouse_replica.core.errors import Unauthenticated
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from bakehouse_router.keys import KeyRing

# Load balancers and Kubernetes ask these without a key.
OPEN_PATHS = frozenset({"/health", "/ready"})
METRICS_PATH = "/metrics"
# Asked for every second by each console page that somebody looks at.
REPLICAS_PATH = "/v1/replicas"

Refuse = Callable[[Unauthenticated, Scope, Receive, Send], Awaitable[None]]


class KeyGuard:
    """Asks every request for a key, whether its route exists or not; `request.state.tenant` is whose key it is.

    `open_paths` are answered without one, for the tenant `""`. `refuse` sends the answer to whoever has none.
    """

    def __init__(self, app: ASGIApp, *, keys: KeyRing, open_paths: Collection[str], refuse: Refuse) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = open_paths
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        tenant = ""
        if scope["path"] not in self._open_paths:
            try:
                tenant = self._keys.tenant_of(Headers(scope=scope).get("authorization"))
            except Unauthenticated as error:
                if scope["type"] == "websocket":  # closed before it is accepted: 403, whatever was asked for
                    await send({"type": "websocket.close"})
                else:
                    await self._refuse(error, scope, receive, send)
                return
        scope.setdefault("state", {})["tenant"] = tenant
        await self._app(scope, receive, send)
