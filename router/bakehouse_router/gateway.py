"""The service behind every entry: takes calls, fills them in, encodes them once, and starts them."""

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from bakehouse_replica.core.errors import BakehouseError, Unavailable, UnknownModel
from bakehouse_replica.core.live_limits import read_limits
from bakehouse_replica.core.sampling import Grammar, SamplingParams
from bakehouse_replica.core.types import ReplicaCard, ReplicaStatus
from bakehouse_replica.source import name_of
from bakehouse_replica.vocabulary import Vocabulary

from bakehouse_router.bounds import check_bad_words, check_bounds, check_prompt_report
from bakehouse_router.calls import Call, ChatCall, CompletionCall, GenerationOptions, ToolUse
from bakehouse_router.explanations import Explanations
from bakehouse_router.generation import Admission, Deadline, Generation, RequestDispatcher
from bakehouse_router.metrics import GatewayMetrics
from bakehouse_router.prompt_run import PromptJob
from bakehouse_router.prompts import EncodedCall, PromptEncoder, decoded, prompt_field
from bakehouse_router.request_log import RequestLog
from bakehouse_router.request_record import Records, RequestRecord
from bakehouse_router.requests import build_request, check_prompt_length, check_token_ids
from bakehouse_router.settings import LIVE_LIMITS, GatewaySettings
from bakehouse_router.structured import schemas_of_tools
from bakehouse_router.text.model_text import ModelText
from bakehouse_router.text.stream import TextStream
from bakehouse_router.text.tools.formats import choose_tool_format
from bakehouse_router.text.tools.parser import ToolCallParser
from bakehouse_router.tracing import Tracing

logger = logging.getLogger(__name__)

_PROBE_TIMEOUT_S = 30.0


class GrammarChecker(Protocol):
    """What a gateway needs of `bakehouse_router.structured.GrammarChecker`."""

    async def check(self, grammar: Grammar, param: str, *, parts: Mapping[str, Grammar], tenant: str) -> None:
        """Raises `InvalidRequest` naming `param`, or one of the `parts`, where the grammar is none."""
        ...


class Gateway:
    """Serves one model, whose text side is `text`, over whatever replicas `dispatcher` knows.

    `grammars` None leaves grammars to the replicas to check; `admission` None lets everything wait; `metrics` None
    counts for itself; `tracing` None traces nothing. Whoever takes a request opens a record for it in `records`,
    and `explanations` tell what became of it.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        dispatcher: RequestDispatcher,
        text: ModelText,
        *,
        grammars: GrammarChecker | None = None,
        admission: Admission | None = None,
        metrics: GatewayMetrics | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self._first_settings = self._settings = settings
        self.explanations = Explanations(dispatcher.explain)
        log = RequestLog(settings.request_log, has_prompts=settings.logs_prompts)
        self.records = Records(log, tracing, self.explanations)
        self.metrics = metrics or GatewayMetrics()
        self._dispatcher = dispatcher
        self._text = text
        self._encoder = PromptEncoder(text)
        self._tool_format = choose_tool_format(settings.tool_format, text.chat_template.text, self.vocabulary)
        self._grammars = grammars
        self._admission = admission
        self._has_answered = False
        self._probing = asyncio.Lock()

    @property
    def settings(self) -> GatewaySettings:
        """What this gateway has been told, with the limits that hold now."""
        return self._settings

    def reconfigure(self, user_config: Mapping[str, object]) -> None:
        """Other limits, of `LIVE_LIMITS`, for calls that come from now on; those not named are as at the start.

        Raises `ConfigError` for what is no limit, and changes nothing then.
        """
        limits: dict[str, Any] = read_limits(
            user_config, LIVE_LIMITS
        )  # fields that hold whole numbers, all of them
        self._settings = settings = replace(self._first_settings, **limits)
        if self._admission is not None:
            self._admission.limit(max_requests=settings.max_queued_requests, max_tokens=settings.max_queued_tokens)

    @property
    def model_name(self) -> str:
        """The name by which this model is listed and answers; a path is known by its last part."""
        return self.settings.served_name or name_of(self.settings.source)

    @property
    def vocabulary(self) -> Vocabulary:
        """What the model's token ids read as."""
        return self._text.tokenizer.vocabulary

    @property
    def defaults(self) -> SamplingParams:
        """How the model samples where a call does not say."""
        return self._text.defaults

    @property
    def tokenizer_info(self) -> dict[str, str | None]:
        """The model's special tokens by the names that templates have for them, and its chat template."""
        template = self._text.chat_template
        return {**template.special_tokens, "chat_template": template.text}

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

    async def start(
        self, call: Call, call_id: str, received_at: float | None = None, record: RequestRecord | None = None
    ) -> Generation:
        """The call, ready to run: iterating it enters the queue. `call_id` must be unique: it names the call's
        requests in every log. `received_at`: by the event loop's clock, None for now; `timeout_s` counts from it.
        `record`: of the request that the call is.

        Raises `InvalidRequest` naming the field that is wrong, `DeadlineExceeded`, or `Unavailable`.
        """
        if record is not None:
            record.begin(call, call_id)
        self.check_model(call.model)
        check_bounds(call, self.settings)
        deadline = _deadline(call.options, received_at)
        try:
            async with asyncio.timeout_at(None if deadline is None else deadline.at) as limit:
                call = await self._with_grammar(call)
                card = await self.serving_card()
                encoded = await self._encoder.encode(call, card)
            check_bad_words((*call.options.bad_words_ids, *encoded.bad_words), self.settings)
            check_prompt_report(call, encoded.prompts)
        except TimeoutError:
            if deadline is None or not limit.expired():
                raise
            raise deadline.exceeded() from None
        generation = Generation(
            self._dispatcher,
            self._jobs(call, call_id, encoded, card, deadline),
            pause_s=self.settings.keep_alive_s,
            deadline=deadline,
            admission=self._admission,
            watch=self.metrics.watch(
                "chat" if isinstance(call, ChatCall) else "completion", received_at, call.options.tenant
            ),
            enter=None if record is None or record.span is None else record.span.enter,
            keeps_text=record is not None and record.keeps_text,
        )
        if record is not None:
            record.follow(generation)
        return generation

    def new_parser(self, call: Call) -> Callable[[], ToolCallParser] | None:
        """What makes a parser for each choice of the call; None where its answer may not call tools."""
        tool_use = _usable_tools(call)
        return None if tool_use is None else lambda: self._tool_format.parser(tool_use)

    async def tokenize(self, call: Call, *, adds_special_tokens: bool = True) -> tuple[int, ...]:
        """The ids of the call's first prompt; `adds_special_tokens`: to a text, as for a completion.

        Raises `InvalidRequest`, `ContextTooLong` where no context of this model could hold it among them.
        """
        self.check_model(call.model)
        card = await self.serving_card()
        encoded = await self._encoder.encode(call, card, adds_special_tokens=adds_special_tokens)
        return encoded.prompts[0]

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text of ids, special tokens left out. Raises `InvalidRequest` for ids that the model lacks."""
        card = await self.serving_card()
        check_prompt_length(len(token_ids), "tokens", card.max_model_len, GenerationOptions(max_tokens=0))
        check_token_ids(token_ids, "tokens", card.vocabulary_size)
        return decoded(token_ids, self.vocabulary)

    async def check_ready(self) -> ReplicaCard:
        """Proves once, by a request of one token, that the model answers. Raises a `BakehouseError` until then."""
        card = await self.serving_card()
        async with self._probing:
            if not self._has_answered:
                await self._probe(card)
                self._has_answered = True
        return card

    async def _with_grammar(self, call: Call) -> Call:
        """The call with the grammar that forces its tools, if it is to; its own is checked."""
        grammar = call.options.grammar
        tool_use = _usable_tools(call)
        if tool_use is not None:
            grammar = self._tool_format.grammar(tool_use)
        if grammar is not None and self._grammars is not None:
            param, parts = call.options.grammar_field, dict[str, Grammar]()
            if tool_use is not None:
                param, parts = "tools", schemas_of_tools(tool_use)
            await self._grammars.check(grammar, param, parts=parts, tenant=call.options.tenant)
        return replace(call, options=replace(call.options, grammar=grammar))

    def _jobs(
        self, call: Call, call_id: str, encoded: EncodedCall, card: ReplicaCard, deadline: Deadline | None
    ) -> list[PromptJob]:
        options = _replica_options(call)
        timeout_s = None if deadline is None else deadline.left_s(asyncio.get_running_loop().time())
        jobs = []
        for index, prompt_ids in enumerate(encoded.prompts):
            request = build_request(
                request_id=call_id if len(encoded.prompts) == 1 else f"{call_id}-{index}",
                prompt_ids=prompt_ids,
                prompt_field=prompt_field(call),
                options=options,
                defaults=self._text.defaults,
                card=card,
                bad_words_ids=encoded.bad_words,
                timeout_s=timeout_s,
            )
            echo = encoded.echoes[index] if encoded.echoes else None
            first_offset = 0 if echo is None else len(echo.text)
            streams = tuple(self._text_stream(call, request.params, first_offset) for _ in range(request.params.n))
            jobs.append(
                PromptJob(request=request, streams=streams, echo=echo, n_prompt_top=call.options.prompt_logprobs)
            )
        return jobs

    def _text_stream(self, call: Call, params: SamplingParams, first_offset: int) -> TextStream:
        is_parsed = _usable_tools(call) is not None
        return TextStream(
            self._tool_format.vocabulary if is_parsed else self.vocabulary,
            stops=call.options.stops,
            stop_token_ids=params.stop_token_ids,
            keeps_stop=call.options.keeps_stop,
            min_tokens=params.min_tokens,
            continues_text=isinstance(call, CompletionCall) or call.continues_last,
            reports_tokens=call.options.shows_tokens,
            first_offset=first_offset,
            is_over=self._end_of_calls(call),
        )

    def _end_of_calls(self, call: Call) -> Callable[[str], bool] | None:
        """Reads one choice's text and tells when the one call allowed is whole; None where more may come."""
        tool_use = _usable_tools(call)
        if tool_use is None or not tool_use.allows_one_call:
            return None
        parser = self._tool_format.parser(tool_use)

        def is_over(text: str) -> bool:
            parser.feed(text)
            return parser.is_complete

        return is_over

    async def _probe(self, card: ReplicaCard) -> None:
        request = build_request(
            request_id=f"probe-{secrets.token_hex(8)}",
            prompt_ids=(0,),
            prompt_field="prompt",
            options=GenerationOptions(max_tokens=1, ignore_eos=True),
            defaults=SamplingParams(temperature=0.0),
            card=card,
        )
        job = PromptJob(request=request, streams=(TextStream(self.vocabulary),))
        try:
            async with asyncio.timeout(_PROBE_TIMEOUT_S):
                async for _ in Generation(self._dispatcher, [job], pause_s=_PROBE_TIMEOUT_S).pieces():
                    pass
        except TimeoutError:
            raise Unavailable(
                f"the model did not answer a request of one token in {_PROBE_TIMEOUT_S:g} s"
            ) from None
        except BakehouseError as error:
            logger.warning("the model did not answer the probe %s: %s", request.request_id, error)
            raise


def _deadline(options: GenerationOptions, received_at: float | None) -> Deadline | None:
    if options.timeout_s is None:
        return None
    begun_at = asyncio.get_running_loop().time() if received_at is None else received_at
    return Deadline(timeout_s=options.timeout_s, at=begun_at + options.timeout_s)


def _usable_tools(call: Call) -> ToolUse | None:
    if not isinstance(call, ChatCall) or call.tool_use is None or call.tool_use.choice == "none":
        return None
    return call.tool_use


def _replica_options(call: Call) -> GenerationOptions:
    """The options as the replica is asked: an echo with log-probabilities shows those of the prompt as well."""
    options = call.options
    if isinstance(call, CompletionCall) and call.echoes and options.logprobs is not None:
        return replace(options, prompt_logprobs=max(options.logprobs, options.prompt_logprobs or 0))
    return options
