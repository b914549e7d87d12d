"""`bakehouse.LLM`: a model in this process, prompts in, whole outputs out, without Ray and without a server."""

import asyncio
import secrets
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import TracebackType
from typing import TypeVar

from bakehouse_replica.core.sampling import SamplingParams
from bakehouse_router.api.bodies import chat_call
from bakehouse_router.api.parse import parse_body
from bakehouse_router.api.schema import ChatBody
from bakehouse_router.calls import Call, CompletionCall, GenerationOptions
from bakehouse_router.generation import Generation

from bakehouse_cluster.config import parse_config
from bakehouse_cluster.offline import IN_FLIGHT_PER_SEQUENCE, OfflineModel
from bakehouse_cluster.outputs import Output, as_conversations, as_prompts, as_stops, collect

# `GenerationOptions.top_k`: the whole vocabulary, where None would take the model's default.
KEEP_ALL = 0
# Nobody has to be protected from the owner of this process; the engine's own limits stay.
NO_LIMIT = 2**31 - 1
LIMITS = ("max_choices", "max_stops", "max_stop_chars", "max_logprobs", "max_listed_tokens")

T = TypeVar("T")
Prompt = str | Sequence[int]
Message = Mapping[str, object]


class LLM:
    """One model, loaded by the constructor and released by `close`, or as a context manager.

    `quantize` `int8` computes matrix products in 8 bits. `kv_dtype`: keys and values in `float32` or `float16`;
    `auto` is `float16` where weights have 16 bits or fewer. `kv_memory` is a number of bytes or a text such as
    `512MiB`. `tensor_parallel`: so many processes share the model. Raises `StartupError` where the model cannot be
    served as asked.

        with LLM("smollm2") as llm:
            (output,) = llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=8))
            print(output.text)
    """

    def __init__(
        self,
        model: str = "smollm2",
        *,
        revision: str | None = None,
        dtype: str = "auto",
        quantize: str = "none",
        kv_dtype: str = "auto",
        device: str = "auto",
        tensor_parallel: int = 1,
        max_model_len: int | None = None,
        kv_memory: int | str | None = None,
        chat_template: str | None = None,
    ) -> None:
        config = parse_config(
            {
                "model": {
                    "source": model,
                    "revision": revision,
                    "dtype": dtype,
                    "quantize": quantize,
                    "kv_dtype": kv_dtype,
                    "device": device,
                    "max_model_len": max_model_len,
                    "chat_template": chat_template,
                },
                "replica": {"kv_memory": kv_memory, "tensor_parallel": tensor_parallel},
                "gateway": dict.fromkeys(LIMITS, NO_LIMIT),
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

            outputs = llm.generate(["One, two,", [504, 3575]], SamplingParams(n=2, max_tokens=16), stop="\\n")
        """
        options = self._options(params, stop)
        name = self._model.gateway.model_name
        return self._answer(
            [CompletionCall(model=name, prompts=(prompt,), options=options) for prompt in as_prompts(prompts)]
        )

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | None = None,
        stop: str | Sequence[str] | None = None,
    ) -> list[Output]:
        """Answer a conversation, or each of several; messages are as OpenAI has them.

        `params` and errors as in `generate`.

            (output,) = llm.chat([{"role": "user", "content": "What is the capital of France?"}])
        """
        options = self._options(params, stop)
        return self._answer([self._chat_call(turns, options) for turns in as_conversations(messages)])

    def close(self) -> None:
        """Release memory and threads; idempotent."""
        _run(self._model.engine.close())

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _options(self, params: SamplingParams | None, stop: str | Sequence[str] | None) -> GenerationOptions:
        params = self._model.text.defaults if params is None else params
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
            stops=as_stops(stop),
            stop_token_ids=params.stop_token_ids,
            logprobs=params.logprobs,
            prompt_logprobs=params.prompt_logprobs,
            logit_bias=params.logit_bias,
            allowed_token_ids=params.allowed_token_ids,
            bad_words_ids=params.bad_words_ids,
            grammar=params.grammar,
            reports_tokens=True,
        )

    def _chat_call(self, turns: Sequence[object], options: GenerationOptions) -> Call:
        body = parse_body(ChatBody, {"model": self._model.gateway.model_name, "messages": list(turns)})
        return replace(chat_call(body, self._model.gateway.settings), options=options)

    def _answer(self, calls: Sequence[Call]) -> list[Output]:
        return _run(self._answer_all(calls))

    async def _answer_all(self, calls: Sequence[Call]) -> list[Output]:
        """Enough requests in flight that a batch is always full, few enough that the engine's queue is short."""
        gateway = self._model.gateway
        generations = [await gateway.start(call, f"llm-{secrets.token_hex(8)}") for call in calls]
        turns = asyncio.Semaphore(IN_FLIGHT_PER_SEQUENCE * self._model.card.max_sequences)

        async def answer(generation: Generation) -> Output:
            async with turns:
                return await collect(generation)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(answer(generation)) for generation in generations]
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from failed
        return [task.result() for task in tasks]


def _run(work: Coroutine[object, object, T]) -> T:
    """The result of `work`; in a thread of its own where this one runs an event loop already, as notebooks do."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(asyncio.run, work).result()
