"""A program inside a Ray cluster: uses `bakehouse.connect` in every way and prints what it saw, as JSON.

Its environment says which Ray; the model is that of `tests/e2e/ways_in/conftest.py`.
"""

import asyncio
import json
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError

import bakehouse
import ray
from bakehouse_replica.core.errors import BakehouseError, InvalidRequest
from bakehouse_router.connect import Client

CHAT = [{"role": "user", "content": "greet"}]
Seen = dict[str, object]


def error_of(call: Callable[[], object]) -> list[object]:
    """Class, field and message of what `call` raises."""
    try:
        call()
    except (BakehouseError, CancelledError) as error:
        return [type(error).__name__, error.param if isinstance(error, InvalidRequest) else None, str(error)]
    return ["nothing", None, ""]


def whole(client: Client) -> Seen:
    reply = client.generate("greet", max_tokens=2, logprobs=1, return_token_ids=True).result()
    prompts: list[str | Sequence[int]] = ["greet", [0, 1]]
    several = client.generate(prompts, n=2, max_tokens=2).result()
    tokenized = client.tokenize("Hello world").result()
    return {
        "text": reply.text,
        "finish_reason": reply.finish_reason,
        "completion_tokens": reply.usage.completion_tokens,
        "token_ids": [token.token_id for token in reply.choices[0].tokens],
        "has_logprobs": all(token.logprob is not None for token in reply.choices[0].tokens),
        "several": [choice.text for choice in several.choices],
        "chat": client.chat(CHAT, max_tokens=2).result().text,
        "tokenized": tokenized.token_ids,
        "detokenized": client.detokenize(tokenized.token_ids).result(),
        "models": [[model.name, model.max_model_len] for model in client.models().result()],
    }


def streamed(client: Client) -> Seen:
    deltas = list(client.generate("greet", max_tokens=2))
    return {
        "texts": [delta.text for delta in deltas if delta.choice is not None],
        "has_usage": [delta.usage is not None for delta in deltas],
    }


def refused(client: Client) -> Seen:
    return {
        "bounds": error_of(client.generate("x", max_tokens=-1).result),
        "unknown": error_of(client.generate("x", oven=1).result),
        "model": error_of(client.generate("x", model="rye").result),
        "messages": error_of(client.chat([]).result),
        "stream": error_of(lambda: client.generate("x", stream=True)),
        "ids": error_of(client.detokenize([10**6]).result),
        "deadline": error_of(client.generate("tell", timeout_s=0.3).result),
    }


def broken_off(client: Client) -> Seen:
    """Every way of not reading to the end; what they leave behind is looked at from outside."""
    for _ in client.generate("tell"):
        break
    with client.generate("tell") as left:
        next(iter(left))
    dropped = client.generate("tell")
    next(iter(dropped))
    del dropped
    cancelled = client.generate("tell")
    deltas = iter(cancelled)
    next(deltas)
    cancelled.cancel()
    return {"cancelled": error_of(lambda: list(deltas))}


async def awaited(client: Client) -> Seen:
    reply = await client.generate("greet", max_tokens=2)
    texts = [delta.text async for delta in client.generate("greet", max_tokens=2) if delta.choice is not None]
    async for _ in client.generate("tell"):
        break
    gathering = asyncio.ensure_future(gathered(client))
    await asyncio.sleep(0.3)
    gathering.cancel()
    was_cancelled = isinstance(
        (await asyncio.gather(gathering, return_exceptions=True))[0], asyncio.CancelledError
    )
    return {
        "text": reply.text,
        "texts": texts,
        "tokenized": (await client.tokenize("Hello")).token_ids,
        "was_cancelled": was_cancelled,
    }


async def gathered(client: Client) -> str:
    return (await client.generate("tell")).text


def in_a_task() -> str:
    """Runs in a worker of the cluster, which is connected already."""
    return bakehouse.connect().generate("greet", max_tokens=2).result().text


def main() -> None:
    client = bakehouse.connect()
    seen = {
        "whole": whole(client),
        "streamed": streamed(client),
        "refused": refused(client),
        "broken_off": broken_off(client),
        "awaited": asyncio.run(awaited(client)),
        "in_a_task": ray.get(ray.remote(num_cpus=0)(in_a_task).remote()),
        "sent_to_a_task": ray.get(ray.remote(num_cpus=0)(whole).remote(client)),
        "no_such_app": error_of(lambda: bakehouse.connect(app_name="bakery")),
    }
    print(json.dumps(seen), flush=True)
    sys.stdin.read()  # the blocks must be free while this program still lives


if __name__ == "__main__":
    main()
