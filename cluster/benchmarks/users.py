"""Output tokens per second of a running server, for one user and for many at once.

Each user is a closed loop: it sends its next request when the previous one has ended. Prompts are random token
ids, different in every request, so that no prefix cache helps; the end of sequence is ignored, so that every
request yields all its tokens. Start a server, then:

    python cluster/benchmarks/users.py --url http://127.0.0.1:8000 --users 32
"""

import argparse
import asyncio
import json
import random
import statistics
import time
from dataclasses import dataclass, field

import httpx

SHED_STATUSES = (429, 503)
# Ids below this one are special tokens in many vocabularies.
FIRST_TOKEN_ID = 1000


@dataclass(slots=True)
class Tally:
    """What a phase's users have seen."""

    n_tokens: int = 0
    n_done: int = 0
    n_shed: int = 0
    n_errors: int = 0
    first_token_s: list[float] = field(default_factory=list)

    @property
    def n_requests(self) -> int:
        """All that ended, well or badly."""
        return self.n_done + self.n_shed + self.n_errors


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What every user sends."""

    url: str
    model: str
    n_prompt_tokens: tuple[int, int]
    n_output_tokens: int
    n_ids: int


async def ask(client: httpx.AsyncClient, load: Load, draw: random.Random, tally: Tally) -> None:
    """One streamed request, counted."""
    n_prompt = draw.randint(*load.n_prompt_tokens)
    body = {
        "model": load.model,
        "prompt": [draw.randrange(FIRST_TOKEN_ID, load.n_ids) for _ in range(n_prompt)],
        "max_tokens": load.n_output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    begun_s = time.perf_counter()
    first_s, n_tokens = None, 0
    async with client.stream("POST", f"{load.url}/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            tally.n_shed += answer.status_code in SHED_STATUSES
            tally.n_errors += answer.status_code not in SHED_STATUSES
            return
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if event.get("choices") and first_s is None:
                first_s = time.perf_counter() - begun_s
            if event.get("usage"):
                n_tokens = event["usage"]["completion_tokens"]
    if first_s is None or n_tokens != load.n_output_tokens:
        tally.n_errors += 1
        return
    tally.n_done += 1
    tally.n_tokens += n_tokens
    tally.first_token_s.append(first_s)


async def measure(client: httpx.AsyncClient, load: Load, n_users: int, n_requests: int, seed: int) -> float:
    """Run `n_users` at once, each with `n_requests`; prints and returns output tokens per second."""
    tally = Tally()

    async def user(number: int) -> None:
        draw = random.Random(seed * 1000 + number)
        for _ in range(n_requests):
            await ask(client, load, draw, tally)

    begun_s = time.perf_counter()
    await asyncio.gather(*map(user, range(n_users)))
    elapsed_s = time.perf_counter() - begun_s
    rate = tally.n_tokens / elapsed_s
    label = "1 user  " if n_users == 1 else f"{n_users} users"
    print(f"{label}: {rate:8.1f} output tokens/s   {tally.n_done} requests in {elapsed_s:.1f} s")
    if len(tally.first_token_s) > 1:
        cuts = statistics.quantiles(tally.first_token_s, n=100, method="inclusive")
        print(f"          first token: p50 {cuts[49]:.3f} s, p90 {cuts[89]:.3f} s, p99 {cuts[98]:.3f} s")
    print(
        f"          errors {tally.n_errors / tally.n_requests:.1%}, shed (429, 503) "
        f"{tally.n_shed / tally.n_requests:.1%} of {tally.n_requests} requests"
    )
    return rate


async def run(options: argparse.Namespace) -> None:
    """Warm up, then measure one user and many."""
    async with httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=None)) as client:
        models = (await client.get(f"{options.url}/v1/models")).raise_for_status().json()
        load = Load(
            url=options.url,
            model=models["data"][0]["id"],
            n_prompt_tokens=(options.min_prompt_tokens, options.max_prompt_tokens),
            n_output_tokens=options.output_tokens,
            n_ids=options.ids,
        )
        await ask(client, load, random.Random(options.seed), Tally())
        one = await measure(client, load, 1, options.requests_of_one, options.seed + 1)
        many = await measure(client, load, options.users, options.requests, options.seed + 2)
    print(f"ratio   : {many / one:.2f} times the tokens of one user")


def main() -> None:
    """Read the options and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--users", type=int, default=32)
    parser.add_argument("--requests", type=int, default=3, help="requests of each of the many users")
    parser.add_argument("--requests-of-one", type=int, default=6, help="requests of the single user")
    parser.add_argument("--min-prompt-tokens", type=int, default=64)
    parser.add_argument("--max-prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--ids", type=int, default=30_000, help="prompt ids are drawn below this one")
    parser.add_argument("--seed", type=int, default=0)
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
