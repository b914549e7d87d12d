"""An OpenAI completions server around OpenVINO GenAI's continuous batching, which ships without one.

It runs in a virtual environment of its own (openvino-genai, tokenizers, starlette, uvicorn) and imports nothing of
bakehouse. The pipeline has a process to itself: its `step` holds the interpreter's lock, so HTTP beside it in one
process would wait for it. What a step brought crosses in one message.
"""

import argparse
import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Of the pipeline. `precision`: of the computation; None leaves it to OpenVINO."""

    model: Path
    n_threads: int
    n_sequences: int
    n_step_tokens: int
    cache_gb: int
    precision: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """To the pipeline: begin a request. Its id alone ends one."""

    request_id: int
    token_ids: list[int]
    n_output: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Brought:
    """From the pipeline, after a step: a request's new tokens, and whether these are its last."""

    request_id: int
    token_ids: list[int]
    is_last: bool


def run_pipeline(settings: Settings, link: "Connection[list[Brought] | None, Ask | int]") -> None:
    """The pipeline's process. It sends None once it takes requests, and ends with the one that began it."""
    # Only here: the process that serves HTTP needs none of it.
    import openvino  # type: ignore[import-not-found]
    import openvino_genai  # type: ignore[import-not-found]

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = settings.cache_gb
    scheduler.max_num_seqs = settings.n_sequences
    scheduler.max_num_batched_tokens = settings.n_step_tokens
    scheduler.dynamic_split_fuse = True
    scheduler.enable_prefix_caching = True
    properties: dict[str, object] = {"INFERENCE_NUM_THREADS": settings.n_threads}
    if settings.precision is not None:
        properties["INFERENCE_PRECISION_HINT"] = settings.precision
    pipeline = openvino_genai.ContinuousBatchingPipeline(str(settings.model), scheduler, "CPU", properties)
    config = openvino_genai.GenerationConfig()
    config.ignore_eos = True
    config.do_sample = False
    handles: dict[int, openvino_genai.GenerationHandle] = {}
    link.send(None)
    while True:
        while not handles or link.poll():
            word = link.recv()
            if isinstance(word, Ask):
                config.max_new_tokens = word.n_output
                ids = openvino.Tensor(np.array([word.token_ids], dtype=np.int64))
                handles[word.request_id] = pipeline.add_request(word.request_id, ids, config)
            elif word in handles:
                handles.pop(word).cancel()
        pipeline.step()
        arrived = []
        for request_id, handle in list(handles.items()):
            # Before the tokens are read, so that none come in between.
            is_last = handle.get_status().name != "RUNNING"
            token_ids = []
            while handle.can_read():
                for output in handle.read().values():
                    token_ids += output.generated_ids
            if token_ids or is_last:
                arrived.append(Brought(request_id=request_id, token_ids=token_ids, is_last=is_last))
            if is_last:
                del handles[request_id]
        link.send(arrived)


@dataclass(slots=True)
class Server:
    """The routes that a load generator needs. `link`: to the pipeline's process."""

    link: "Connection[Ask | int, list[Brought] | None]"
    tokenizer: Tokenizer
    model: str
    _queue_of: dict[int, asyncio.Queue[Brought]] = field(default_factory=dict)
    _ids: "itertools.count[int]" = field(default_factory=itertools.count)

    def receive(self) -> None:
        """A message of the pipeline is there."""
        for brought in self.link.recv() or ():
            if brought.request_id in self._queue_of:
                self._queue_of[brought.request_id].put_nowait(brought)

    async def health(self, request: Request) -> JSONResponse:
        """`GET /health`."""
        return JSONResponse({})

    async def models(self, request: Request) -> JSONResponse:
        """`GET /v1/models`."""
        return JSONResponse({"object": "list", "data": [{"id": self.model, "owned_by": "openvino-genai"}]})

    async def completions(self, request: Request) -> StreamingResponse:
        """`POST /v1/completions`, greedy and streamed, of exactly `max_tokens`."""
        body = await request.json()
        prompt = body["prompt"]
        token_ids = self.tokenizer.encode(prompt).ids if isinstance(prompt, str) else prompt
        ask = Ask(request_id=next(self._ids), token_ids=token_ids, n_output=body["max_tokens"])
        return StreamingResponse(self._events(ask), media_type="text/event-stream")

    async def _events(self, ask: Ask) -> AsyncIterator[str]:
        arrived: asyncio.Queue[Brought] = asyncio.Queue()
        self._queue_of[ask.request_id] = arrived
        self.link.send(ask)
        text_of = DecodeStream(skip_special_tokens=False)
        n_output, is_last = 0, False
        try:
            while not is_last:
                brought = await arrived.get()
                is_last = brought.is_last
                n_output += len(brought.token_ids)
                parts = [text_of.step(self.tokenizer, token_id) for token_id in brought.token_ids]
                yield self._event([{"index": 0, "text": "".join(part or "" for part in parts)}])
            yield self._event([{"index": 0, "text": "", "finish_reason": "length"}])
            n_input = len(ask.token_ids)
            usage = {"prompt_tokens": n_input, "completion_tokens": n_output, "total_tokens": n_input + n_output}
            yield self._event([], usage)
            yield "data: [DONE]\n\n"
        finally:
            del self._queue_of[ask.request_id]
            if not is_last:
                self.link.send(ask.request_id)

    def _event(self, choices: list[dict[str, object]], usage: dict[str, int] | None = None) -> str:
        chunk = {"object": "text_completion", "model": self.model, "choices": choices, "usage": usage}
        return f"data: {json.dumps(chunk)}\n\n"


async def serve(server: Server, port: int) -> None:
    """Until a signal."""
    asyncio.get_running_loop().add_reader(server.link.fileno(), server.receive)
    routes = [
        Route("/health", server.health),
        Route("/v1/models", server.models),
        Route("/v1/completions", server.completions, methods=["POST"]),
    ]
    config = uvicorn.Config(Starlette(routes=routes), host="127.0.0.1", port=port, log_level="warning")
    await uvicorn.Server(config).serve()


def main() -> None:
    """Read the options and serve."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a GGUF file or a folder of OpenVINO's format")
    parser.add_argument("--name", required=True, help="what requests call the model")
    parser.add_argument("--tokenizer", type=Path, required=True, help="tokenizer.json")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--step-tokens", type=int, default=512)
    parser.add_argument("--cache-gb", type=int, default=2)
    parser.add_argument(
        "--precision", choices=("f32", "bf16", "f16"), help="of the computation; OpenVINO's choice"
    )
    options = parser.parse_args()
    settings = Settings(
        model=options.model,
        n_threads=options.threads,
        n_sequences=options.sequences,
        n_step_tokens=options.step_tokens,
        cache_gb=options.cache_gb,
        precision=options.precision,
    )
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    context.Process(target=run_pipeline, args=(settings, theirs), daemon=True).start()
    theirs.close()  # so that the end of that process ends the wait for it
    ours.recv()
    server = Server(link=ours, tokenizer=Tokenizer.from_file(str(options.tokenizer)), model=options.name)
    asyncio.run(serve(server, options.port))


if __name__ == "__main__":
    main()
