"""The gateway as a Serve deployment: one FastAPI app per gateway process, over a handle of the replicas."""

import asyncio

from bakehouse_replica.logs import write_to_serve_log
from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from bakehouse_router.dispatch import Dispatcher
from bakehouse_router.ray_client import RayReplicaClient
from bakehouse_router.settings import GatewaySettings


@serve.ingress()
class GatewayDeployment:
    """Wires text, dispatcher and API together in a gateway process; `bakehouse_cluster.app` deploys it."""

    def __init__(self, settings: GatewaySettings, replicas: DeploymentHandle[object]) -> None:
        for package in ("bakehouse_router", "bakehouse_replica"):
            write_to_serve_log(package)
        self._settings = settings
        self._client = RayReplicaClient(replicas, status_period_s=settings.status_period_s)

    async def __serve_build_asgi_app__(self) -> FastAPI:
        """Called by Serve once, after the constructor and in this process: the app holds live objects."""
        self._client.start()
        return await asyncio.to_thread(_build_api, self._settings, Dispatcher(self._client))

    async def check_health(self) -> None:
        """Of the gateway itself; whether replicas serve is what its `/health` tells."""
        self._client.check()

    async def __del__(self) -> None:
        await self._client.close()


def _build_api(settings: GatewaySettings, dispatcher: Dispatcher) -> FastAPI:
    # They load transformers and torch, 3.5 s that a process which only deploys this class need not wait for.
    from bakehouse_replica.source import open_source

    from bakehouse_router.api.http import build_api
    from bakehouse_router.gateway import Gateway
    from bakehouse_router.text.model_text import load_model_text

    text = load_model_text(open_source(settings.source), template_override=settings.chat_template)
    return build_api(Gateway(settings, dispatcher, text), tells_request_id=False)
