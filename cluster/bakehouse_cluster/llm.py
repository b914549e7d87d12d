"""`bakehouse.LLM`: a model in this process, prompts in, whole outputs out, without Ray and without a server."""

import asyncio
import secrets
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TypeVar, cast

from bakehouse_replica.core.errors import EngineDead, InvalidRequest, Unavailable
from bakehouse_replica.core.types import FailureKind, FinishReason, Request, SamplingParams, TokenDelta, Usage
from bakehouse_replica.engine import Engine
from bakehouse_router.calls import GenerationOptions, build_request, check_token_ids
from bakehouse_router.text.stream import TextStream

from bakehouse_cluster.config import parse_config
from bakehouse_cluster.offline import IN_FLIGHT_PER_SEQUENCE, OfflineModel

# `GenerationOptions.top_k`: the whole vocabulary, where None would take the model's default.
KEEP_ALL = 0

T = TypeVar("T")
Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One continuation. `finish_reason`: `stop` (a stop id or string) or `length`."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """All choices of one prompt; `text`, `token_ids`, `finish_reason` and `usage` are those of the first."""

    prompt_ids: tuple[int, ...]
    choices: tuple[Choice, ...]

    @property
    def text(self) -> str:
        """The first choice's text, without the stop string that ended it."""
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The first choice's ids."""
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        """Why the first choice ended."""
        return self.choices[0].finish_reason

    @property
    def usage(self) -> Usage:
        """The first choice's token counts."""
        return self.choices[0].usage


class LLM:
    """One model, loaded by the constructor and released by `close`, or as a context manager.

    `kv_memory` is a number of bytes or a text such as `512MiB`. Raises `StartupError` where the model cannot be
    served as asked.
    """

    def __init__(
        self,
        model: str = "smollm2",
        *,
        revision: str | None = None,
        dtype: str = "auto",
        device: str = "auto",
        max_model_len: int | None = None,
        kv_memory: int | str | None = None,
    ) -> None:
        config = parse_config(
            {
                "model": {
                    "source": model,
                    "revision": revision,
                    "dtype": dtype,
                    "device": device,
                    "max_model_len": max_model_len,
                },
                "replica": {"kv_memory": kv_memory},
            }
        )
        self._model = OfflineModel(config)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
        stop: str | Sequence[str] | None = None,
    ) -> list[Output]:
        """Continue each prompt, a text or token ids; the outputs stand in the order of the prompts.

        `params` None takes the model's own defaults; `max_tokens` None goes on to the end of the context; a seed
        of None draws a new one for each prompt. All prompts run in one batch that requests board and leave
        between steps. Raises `InvalidRequest`, before anything runs, where a prompt or parameter is wrong.
        """
        params = self._model.text.defaults if params is None else params
        stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
        if "" in stops:
            raise InvalidRequest("stop holds an empty string; it would end every output at once", "stop")
        jobs = [self._job(prompt, params, stops) for prompt in _as_list(prompts)]
        return _run(self._generate_all(jobs))

    def close(self) -> None:
        """Release memory and threads; idempotent."""
        _run(self._model.engine.close())

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _job(self, prompt: Prompt, params: SamplingParams, stops: tuple[str, ...]) -> "_Job":
        text, card = self._model.text, self._model.card
        prompt_ids = text.tokenizer.encode_raw(prompt) if isinstance(prompt, str) else tuple(prompt)
        if not prompt_ids:
            raise InvalidRequest("prompt is empty; it must have at least one token", "prompt")
        check_token_ids(prompt_ids, "prompt", card.vocabulary_size)
        request = build_request(
            request_id=f"llm-{secrets.token_hex(8)}",
            prompt_ids=prompt_ids,
            prompt_field="prompt",
            options=_options(params),
            defaults=text.defaults,
            card=card,
        )
        return _Job(
            request,
            [
                TextStream(
                    text.tokenizer.vocabulary, stops=stops, min_tokens=params.min_tokens, continues_text=True
                )
                for _ in range(params.n)
            ],
        )

    async def _generate_all(self, jobs: Sequence["_Job"]) -> list[Output]:
        """Enough requests in flight that a batch is always full, few enough that the engine's queue is short."""
        turns = asyncio.Semaphore(IN_FLIGHT_PER_SEQUENCE * self._model.card.max_sequences)

        async def generate(job: _Job) -> Output:
            async with turns:
                return await job.run(self._model.engine)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(generate(job)) for job in jobs]
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from failed
        return [task.result() for task in tasks]


class _Job:
    """One prompt on its way: collects its choices' deltas."""

    def __init__(self, request: Request, streams: Sequence[TextStream]) -> None:
        self._request = request
        self._streams = streams
        self._texts: list[list[str]] = [[] for _ in streams]
        self._token_ids: list[list[int]] = [[] for _ in streams]
        self._ends: list[TokenDelta | None] = [None for _ in streams]

    async def run(self, engine: Engine) -> Output:
        """The output once every choice has ended; cancelling this cancels the request."""
        is_aborted = False
        async with aclosing(engine.generate(self._request)) as deliveries:
            async for delivery in deliveries:
                for delta in delivery.deltas:
                    self._take(delta)
                if not is_aborted and all(map(self._is_over, range(len(self._streams)))):
                    # Stop strings, which the engine does not know, have ended it; its last deltas bring the usage.
                    is_aborted = True
                    engine.abort(self._request.request_id)
        return Output(
            prompt_ids=self._request.prompt_ids,
            choices=tuple(self._choice(index) for index in range(len(self._streams))),
        )

    def _take(self, delta: TokenDelta) -> None:
        if delta.failure is not None:
            is_ours = delta.failure.kind is FailureKind.ENGINE
            raise EngineDead(delta.failure.message) if is_ours else InvalidRequest(delta.failure.message)
        self._texts[delta.choice].append(self._streams[delta.choice].feed(delta.token_ids))
        self._token_ids[delta.choice].extend(delta.token_ids)
        if delta.finish is not None:
            self._ends[delta.choice] = delta

    def _is_over(self, index: int) -> bool:
        return self._streams[index].is_stopped or self._ends[index] is not None

    def _choice(self, index: int) -> Choice:
        stream, end = self._streams[index], self._ends[index]
        assert end is not None, "an engine's stream ends with a terminal delta for each choice"
        assert end.finish is not None, "that is what makes it terminal"
        assert end.usage is not None, "a terminal delta without failure carries the usage"
        text = "".join(self._texts[index]) + stream.finish()
        if end.finish is FinishReason.CANCELLED and not stream.is_stopped:
            raise Unavailable("the engine was closed before this prompt's output was complete")
        return Choice(
            text=text,
            token_ids=tuple(self._token_ids[index][: stream.n_tokens]),
            finish_reason=FinishReason.STOP if stream.is_stopped else end.finish,
            usage=replace(end.usage, completion_tokens=stream.n_tokens),
        )


def _options(params: SamplingParams) -> GenerationOptions:
    return GenerationOptions(
        n=params.n,
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        temperature=params.temperature,
        top_k=params.top_k or KEEP_ALL,
        top_p=params.top_p,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        seed=params.seed,
        stop_token_ids=params.stop_token_ids,
    )


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A single prompt is a text, or a sequence that begins with a token id."""
    if isinstance(prompts, str):
        return [prompts]
    if prompts and all(isinstance(part, int) for part in prompts):
        return [cast("Sequence[int]", prompts)]
    return list(cast("Sequence[Prompt]", prompts))


def _run(work: Coroutine[object, object, T]) -> T:
    """The result of `work`; in a thread of its own where this one runs an event loop already, as notebooks do."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(asyncio.run, work).result()
