"""Gateways for tests: a tiny tokenizer, a dispatcher that plays scripts, a real engine on the fake executor, and a
real HTTP server on the loopback.
"""

import asyncio
import socket
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import uvicorn
from bakehouse_replica.core.sampling import SamplingParams
from bakehouse_replica.core.story import ToldStory
from bakehouse_replica.core.types import (
    Capacity,
    Delivery,
    Failure,
    FinishReason,
    ReplicaCard,
    ReplicaLoad,
    ReplicaStatus,
    Request,
    SchedulingPolicy,
    StepPlan,
    TokenDelta,
    TokenLogprob,
    Usage,
)
from bakehouse_replica.engine import Engine
from bakehouse_replica.executors.fake import FakeExecutor
from bakehouse_router.admission import WaitingQueue
from bakehouse_router.api.http import build_api
from bakehouse_router.attempts import Attempts
from bakehouse_router.calls import ChatCall, CompletionCall, GenerationOptions, ToolUse
from bakehouse_router.dispatch import Dispatcher
from bakehouse_router.gateway import Gateway
from bakehouse_router.generation import RequestDispatcher
from bakehouse_router.metrics import GatewayMetrics
from bakehouse_router.settings import GatewaySettings
from bakehouse_router.structured import GrammarChecker
from bakehouse_router.text.messages import ChatMessage
from bakehouse_router.text.model_text import ModelText, build_model_text
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

MODEL = "tiny"
BOS, END, TURN = "<|bos|>", "<|end|>", "<|turn|>"
SPECIALS = [BOS, END, TURN]
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
VOCABULARY_SIZE = len(SPECIALS) + len(ALPHABET)
END_ID = SPECIALS.index(END)

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'system' and not loop.first %}{{ raise_exception('a system message must be first') }}"
    "{% endif %}<|turn|>{{ message.role }}:{{ message.content | trim }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant:{% endif %}"
)


def write_tiny_tokenizer(folder: Path, *, template: str | None = TEMPLATE) -> None:
    """A byte-level tokenizer without merges (one token a byte) that puts BOS before every text."""
    vocab = {token: index for index, token in enumerate([*SPECIALS, *ALPHABET])}
    backend = Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIALS)
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=None, special_tokens=[(BOS, 0)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=BOS, eos_token=END)  # type: ignore[no-untyped-call]
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)


def tiny_text(folder: Path, *, defaults: SamplingParams | None = None) -> ModelText:
    """The text side of a model with the tiny tokenizer; greedy unless `defaults` say otherwise."""
    write_tiny_tokenizer(folder)
    return text_in(folder, defaults=defaults or SamplingParams(temperature=0.0, stop_token_ids=(END_ID,)))


def text_in(folder: Path, *, template: str | None = None, defaults: SamplingParams | None = None) -> ModelText:
    """The text side of the tokenizer in `folder`; `template` overrides its own."""
    renderer = PreTrainedTokenizerFast.from_pretrained(folder)
    return build_model_text(renderer, template_override=template, defaults=defaults or SamplingParams())


def ids_of(text: str) -> tuple[int, ...]:
    """The tiny tokenizer's ids of a text without special tokens."""
    spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return tuple(len(SPECIALS) + ALPHABET.index(character) for piece, _ in spelled for character in piece)


def tiny_card(replica_id: str = "replica-1", *, max_model_len: int = 512) -> ReplicaCard:
    """A card that fits the tiny tokenizer."""
    return ReplicaCard(
        replica_id=replica_id,
        model_name=MODEL,
        model_digest="digest",
        hash_key=b"key",
        block_size=16,
        n_blocks=256,
        vocabulary_size=VOCABULARY_SIZE,
        max_model_len=max_model_len,
        max_sequences=32,
    )


def status(card: ReplicaCard, problem: str | None = None) -> ReplicaStatus:
    """A replica without load."""
    load = ReplicaLoad(
        version=1,
        n_running=0,
        n_waiting=0,
        waiting_tokens=0,
        n_free_blocks=card.n_blocks,
        n_cached_blocks=0,
        n_held_blocks=0,
        step_time_s=0.0,
    )
    return ReplicaStatus(card=card, load=load, problem=problem)


Step = str | tuple[TokenDelta, ...] | Exception | asyncio.Event


def delta(
    choice: int, text: str, finish: FinishReason | None = None, *, failure: Failure | None = None
) -> TokenDelta:
    """New text of a choice; the script's player fills in where it starts, the usage and the log-probabilities."""
    return TokenDelta(
        request_id="", choice=choice, start=0, token_ids=ids_of(text), finish=finish, failure=failure
    )


def logprob_of(token_id: int, n_top: int) -> TokenLogprob:
    """A made-up log-probability, by which a token is known again."""
    top = tuple((token_id + rank, -float(token_id) - rank) for rank in range(n_top))
    return TokenLogprob(logprob=-float(token_id), rank=1, top=top)


def _logprobs(token_ids: Sequence[int], n_top: int | None) -> tuple[TokenLogprob, ...]:
    return () if n_top is None else tuple(logprob_of(token_id, n_top) for token_id in token_ids)


@dataclass
class ScriptedDispatcher:
    """Plays `script` for every request: a text is a delivery of choice 0, an exception is raised, an event is
    waited for. Where the script ends without a `finish`, choice 0 ends by length. Log-probabilities that a request
    asks for are those of `logprob_of`.
    """

    script: Sequence[Step] = ()
    replicas: tuple[ReplicaStatus, ...] = field(default_factory=lambda: (status(tiny_card()),))
    cached_tokens: int = 0
    requests: list[Request] = field(default_factory=list)
    n_open: int = 0
    closed: asyncio.Event = field(default_factory=asyncio.Event)

    async def statuses(self) -> tuple[ReplicaStatus, ...]:
        return self.replicas

    async def explain(self, request_ids: Sequence[str]) -> tuple[ToldStory, ...]:
        return ()

    async def stream(self, request: Request, attempts: Attempts | None = None) -> AsyncGenerator[Delivery, None]:
        attempts = attempts or Attempts()
        attempts.begin(0)
        self.requests.append(request)
        self.n_open += 1
        counts = [0] * request.params.n
        try:
            for step in self.script:
                if isinstance(step, asyncio.Event):
                    await step.wait()
                elif isinstance(step, Exception):
                    raise step
                else:
                    told = self._delivery(request, counts, (delta(0, step),) if isinstance(step, str) else step)
                    attempts.hear(told)
                    yield told
            if not any(isinstance(step, tuple) and any(one.finish for one in step) for step in self.script):
                yield self._delivery(request, counts, (delta(0, "", FinishReason.LENGTH),))
        finally:
            attempts.end()
            self.n_open -= 1
            self.closed.set()

    def _delivery(self, request: Request, counts: list[int], deltas: tuple[TokenDelta, ...]) -> Delivery:
        placed = []
        for one in deltas:
            start = counts[one.choice]
            counts[one.choice] += len(one.token_ids)
            usage = Usage(
                prompt_tokens=len(request.prompt_ids),
                cached_tokens=self.cached_tokens,
                completion_tokens=counts[one.choice],
            )
            is_first = start == 0 and (one.choice == 0 or bool(one.token_ids))
            scored = request.prompt_ids[1:] if start == 0 and one.choice == 0 else ()
            placed.append(
                replace(
                    one,
                    request_id=request.request_id,
                    start=start,
                    logprobs=_logprobs(one.token_ids, request.params.logprobs),
                    prompt_logprobs=_logprobs(scored, request.params.prompt_logprobs),
                    usage=usage if one.finish or is_first else None,
                )
            )
        return Delivery(replica_id=self.replicas[0].card.replica_id, deltas=tuple(placed))


@asynccontextmanager
async def fake_engine(
    *,
    before_step: Callable[[StepPlan], None] | None = None,
    max_model_len: int = 512,
    max_waiting_requests: int = 64,
) -> AsyncGenerator[Engine, None]:
    """An engine on the fake executor, over the tiny vocabulary."""
    card = tiny_card(max_model_len=max_model_len)
    capacity = Capacity(
        n_blocks=card.n_blocks, block_size=card.block_size, max_step_tokens=512, max_sequences=card.max_sequences
    )
    executor = FakeExecutor(capacity, vocabulary_size=card.vocabulary_size, before_step=before_step)
    policy = SchedulingPolicy(max_model_len=max_model_len, max_waiting_requests=max_waiting_requests)
    engine = Engine(executor=executor, policy=policy, card=card)
    engine.start()
    try:
        yield engine
    finally:
        await engine.close()


Prompts = tuple[str | tuple[int, ...], ...]


def completion(*, prompts: Prompts = ((5, 6, 7),), echoes: bool = False, **options: Any) -> CompletionCall:
    """A completion of the tiny model; `options` are those of `GenerationOptions`."""
    chosen = GenerationOptions(**options)
    return CompletionCall(model=MODEL, prompts=prompts, options=chosen, echoes=echoes)


def chat(*contents: str, tool_use: ToolUse | None = None, **options: Any) -> ChatCall:
    """A chat with the tiny model, of user messages."""
    messages = tuple(ChatMessage(role="user", content=content) for content in contents or ("hi",))
    chosen = GenerationOptions(**options)
    return ChatCall(model=MODEL, messages=messages, options=chosen, tool_use=tool_use)


def settings(**changes: float) -> GatewaySettings:
    """The tiny model's gateway settings."""
    return GatewaySettings(served_name=MODEL, **changes)  # type: ignore[arg-type]


@asynccontextmanager
async def served(
    text: ModelText, dispatcher: RequestDispatcher | Engine, gateway_settings: GatewaySettings | None = None
) -> AsyncGenerator[str, None]:
    """The address of a real server over `dispatcher`, or over an engine by the real dispatcher."""
    if isinstance(dispatcher, Engine):
        dispatcher = Dispatcher(dispatcher, resume_wait_s=0.0)
    chosen = gateway_settings or settings()
    queue = WaitingQueue(max_requests=chosen.max_queued_requests, max_tokens=chosen.max_queued_tokens)
    grammars = GrammarChecker(text.tokenizer.vocabulary, chosen)
    metrics = GatewayMetrics(queue=queue)
    gateway = Gateway(chosen, dispatcher, text, grammars=grammars, admission=queue, metrics=metrics)
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(build_api(gateway), log_config=None, lifespan="off", ws="none")
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    await server.startup(sockets=[listener])
    running = asyncio.create_task(server.main_loop())
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        running.cancel()  # it looks only every 0.1 s whether it should end
        await asyncio.wait([running])
        await server.shutdown(sockets=[listener])
