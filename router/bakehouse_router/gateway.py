"""The service behind every entry: takes calls, fills them in, encodes them once, and starts them."""

import asyncio
import logging
import secrets
from pathlib import PurePath

from bakehouse_replica.core.errors import BakehouseError, Unavailable, UnknownModel
from bakehouse_replica.core.types import ReplicaCard, ReplicaStatus, SamplingParams

from bakehouse_router.calls import (
    Call,
    ChatCall,
    CompletionCall,
    GenerationOptions,
    build_request,
    check_bounds,
    check_token_ids,
)
from bakehouse_router.generation import Generation, RequestDispatcher
from bakehouse_router.settings import GatewaySettings
from bakehouse_router.text.model_text import ModelText
from bakehouse_router.text.stream import TextStream

logger = logging.getLogger(__name__)

# Encoding takes about 1 ms per 3,000 characters; longer prompts go to a thread so that streams do not stall.
_MAX_INLINE_CHARS = 16_384
_PROBE_TIMEOUT_S = 30.0


class Gateway:
    """Serves one model, whose text side is `text`, over whatever replicas `dispatcher` knows."""

    def __init__(self, settings: GatewaySettings, dispatcher: RequestDispatcher, text: ModelText) -> None:
        self.settings = settings
        self._dispatcher = dispatcher
        self._text = text
        self._has_answered = False
        self._probing = asyncio.Lock()

    @property
    def model_name(self) -> str:
        """The name by which this model is listed and answers; a path is known by its last part."""
        asked = self.settings.source.model
        return self.settings.served_name or PurePath(asked).name or asked

    def check_model(self, name: str) -> None:
        """Raises `UnknownModel` unless `name` is the served name or that of the model's source."""
        if name not in (self.model_name, self.settings.source.model):
            raise UnknownModel(f"the model {name[:200]!r} is not served here; {self.model_name!r} is", "model")

    async def statuses(self) -> tuple[ReplicaStatus, ...]:
        """Every known replica, those that do not serve too."""
        return await self._dispatcher.statuses()

    async def serving_card(self) -> ReplicaCard:
        """The card of a replica that serves; of several, one with the shortest context.

        Raises `Unavailable` where none does.
        """
        statuses = await self.statuses()
        serving = [status.card for status in statuses if status.problem is None]
        if not serving:
            problems = "; ".join(f"{status.card.replica_id}: {status.problem}" for status in statuses)
            raise Unavailable(f"no replica serves at the moment ({problems or 'none has started yet'})")
        return min(serving, key=lambda card: card.max_model_len)

    async def start(self, call: Call, call_id: str) -> Generation:
        """The call in flight. `call_id` must be unique: it names the call's requests in every log.

        Raises `InvalidRequest` naming the field that is wrong, or `Unavailable`.
        """
        self.check_model(call.model)
        check_bounds(call, self.settings)
        if call.options.user:
            logger.info("request %s is of user %r", call_id, call.options.user)
        card = await self.serving_card()
        prompts = await self._encode(call, card)
        options = call.options
        requests = [
            build_request(
                request_id=call_id if len(prompts) == 1 else f"{call_id}-{index}",
                prompt_ids=prompt_ids,
                prompt_field=_prompt_field(call),
                options=options,
                defaults=self._text.defaults,
                card=card,
            )
            for index, prompt_ids in enumerate(prompts)
        ]
        n_choices = len(requests) * requests[0].params.n
        streams = [self._text_stream(options, isinstance(call, CompletionCall)) for _ in range(n_choices)]
        return Generation(self._dispatcher, requests, streams, self.settings.keep_alive_s)

    async def check_ready(self) -> ReplicaCard:
        """Proves once, by a request of one token, that the model answers. Raises a `BakehouseError` until then."""
        card = await self.serving_card()
        async with self._probing:
            if not self._has_answered:
                await self._probe(card)
                self._has_answered = True
        return card

    async def _encode(self, call: Call, card: ReplicaCard) -> list[tuple[int, ...]]:
        if _n_chars(call) > _MAX_INLINE_CHARS:
            return await asyncio.to_thread(self._encode_now, call, card)
        return self._encode_now(call, card)

    def _encode_now(self, call: Call, card: ReplicaCard) -> list[tuple[int, ...]]:
        if isinstance(call, ChatCall):
            return [self._text.chat_template.encode(call.messages)]
        encoded = []
        for prompt in call.prompts:
            if isinstance(prompt, str):
                encoded.append(self._text.tokenizer.encode_raw(prompt))
            else:
                check_token_ids(prompt, "prompt", card.vocabulary_size)
                encoded.append(prompt)
        return encoded

    def _text_stream(self, options: GenerationOptions, continues_text: bool) -> TextStream:
        return TextStream(
            self._text.tokenizer.vocabulary,
            stops=options.stops,
            min_tokens=options.min_tokens or 0,
            continues_text=continues_text,
        )

    async def _probe(self, card: ReplicaCard) -> None:
        request = build_request(
            request_id=f"probe-{secrets.token_hex(8)}",
            prompt_ids=(0,),
            prompt_field="prompt",
            options=GenerationOptions(max_tokens=1, ignore_eos=True),
            defaults=SamplingParams(temperature=0.0),
            card=card,
        )
        stream = TextStream(self._text.tokenizer.vocabulary)
        try:
            async with asyncio.timeout(_PROBE_TIMEOUT_S):
                async for _ in Generation(self._dispatcher, [request], [stream], _PROBE_TIMEOUT_S).pieces():
                    pass
        except TimeoutError:
            raise Unavailable(
                f"the model did not answer a request of one token in {_PROBE_TIMEOUT_S:g} s"
            ) from None
        except BakehouseError as error:
            logger.warning("the model did not answer the probe %s: %s", request.request_id, error)
            raise


def _prompt_field(call: Call) -> str:
    return "messages" if isinstance(call, ChatCall) else "prompt"


def _n_chars(call: Call) -> int:
    if isinstance(call, ChatCall):
        return sum(len(message.content) for message in call.messages)
    return sum(len(prompt) for prompt in call.prompts if isinstance(prompt, str))
