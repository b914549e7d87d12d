"""The two that `bakehouse chat` can talk to: a server, by OpenAI's own client, and a model in this process."""

import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import cast

import openai
from bakehouse_replica.core.errors import BakehouseError, Unavailable
from bakehouse_router.calls import ChatCall, GenerationOptions
from bakehouse_router.text.messages import ChatMessage
from openai.types.chat import ChatCompletionMessageParam

from bakehouse_cluster.offline import OfflineModel
from bakehouse_cluster.reaching import unreachable


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """How to answer; None takes the model's default."""

    temperature: float | None = None
    max_tokens: int | None = None


class ServerAnswerer:
    """A server at `url` (with or without `/v1`); `model` None takes the first that it lists."""

    def __init__(self, url: str, *, model: str | None, key: str, options: ChatOptions) -> None:
        base = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")
        self._url = base
        self._client = openai.AsyncOpenAI(base_url=f"{base}/v1", api_key=key, max_retries=0)
        self._model = model
        self._options = options

    async def reach(self) -> None:
        """See `Answerer`."""
        try:
            models = (await self._client.models.list()).data or []
        except openai.APIConnectionError as error:
            raise Unavailable(unreachable(self._url, error)) from error
        except openai.APIError as error:
            if self._model is None:
                raise BakehouseError(_message_of(error)) from error
            return  # it answers, and may know the model all the same
        if self._model is None:
            if not models:
                raise Unavailable(f"{self._url} serves no model")
            self._model = models[0].id

    async def answer(self, turns: list[ChatMessage]) -> AsyncGenerator[str, None]:
        """The answer's text as it comes; closing the generator cancels it."""
        if self._model is None:
            await self.reach()
        assert self._model is not None, "`reach` finds one or raises"
        messages = [
            cast("ChatCompletionMessageParam", {"role": turn.role, "content": turn.content}) for turn in turns
        ]
        try:
            stream = await self._client.chat.completions.create(
                model=self._model,
                messages=messages,
                temperature=self._options.temperature,
                max_completion_tokens=self._options.max_tokens,
                stream=True,
            )
            async with stream:
                async for chunk in stream:
                    if chunk.choices and (text := chunk.choices[0].delta.content):
                        yield text
        except openai.APIConnectionError as error:
            raise Unavailable(unreachable(self._url, error)) from error
        except openai.APIError as error:
            raise BakehouseError(_message_of(error)) from error

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()


class LocalAnswerer:
    """A model in this process."""

    def __init__(self, model: OfflineModel, options: ChatOptions) -> None:
        self._model = model
        self._options = GenerationOptions(temperature=options.temperature, max_tokens=options.max_tokens)

    async def reach(self) -> None:
        """It is here."""

    async def answer(self, turns: list[ChatMessage]) -> AsyncGenerator[str, None]:
        """The answer's text as it comes; closing the generator cancels it."""
        gateway = self._model.gateway
        call = ChatCall(model=gateway.model_name, messages=tuple(turns), options=self._options)
        generation = await gateway.start(call, f"chat-{secrets.token_hex(8)}")
        async with aclosing(generation.pieces()) as pieces:
            async for arrived in pieces:
                for piece in arrived:
                    yield piece.text

    async def close(self) -> None:
        """Release memory and threads."""
        await self._model.engine.close()


def _message_of(error: openai.APIError) -> str:
    """The server's own words, without the client's wrapping."""
    body = error.body
    if isinstance(body, dict) and isinstance(body.get("message"), str):
        return str(body["message"])
    return error.message
