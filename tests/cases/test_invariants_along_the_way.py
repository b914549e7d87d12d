"""Invariants that hold after each chunk and in each step, over HTTP on a scripted model and on random input."""

import asyncio
import json
from random import Random

from answers import CHAT, COMPLETIONS, Json, ask, opened
from bakehouse_replica.core.types import StepPlan
from bakehouse_replica.engine import Engine
from bakehouse_replica.settings import ReplicaSettings
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import Piece, ScriptedServer, scripted_server, vocabulary

ALPHABET = "aEND é😀\n"
BYTES = st.binary(min_size=1, max_size=3) | st.text(ALPHABET, min_size=1, max_size=3).map(str.encode)
STOPS = st.lists(st.sampled_from(["END", "D", "a", "é😀", "aa E", "\n", "EN"]), max_size=3, unique=True)


async def chunks_of(server: ScriptedServer, body: Json) -> list[tuple[str, list[int]]]:
    """The text and the ids of each chunk."""
    path = CHAT if "messages" in body else COMPLETIONS
    reply = await server.http.post(path, json={"model": "scripted", "stream": True, **body})
    frames = reply.text.split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    choices = [json.loads(frame.removeprefix("data: "))["choices"][0] for frame in frames[:-2]]
    return [
        (choice["text"] if "text" in choice else choice["delta"].get("content", ""), choice["token_ids"])
        for choice in choices
    ]


@settings(max_examples=12)
@given(
    cases=st.lists(st.tuples(st.lists(BYTES, max_size=14), STOPS, st.booleans()), min_size=8, max_size=8),
    tokens_per_step=st.sampled_from([1, 2, 5]),
)
def test_i1_the_ids_so_far_are_always_exactly_those_of_the_text_so_far(
    cases: list[tuple[list[bytes], list[str], bool]], tokens_per_step: int
) -> None:
    replies: list[list[Piece]] = [[{"bytes": piece.hex()} for piece in pieces] for pieces, *_ in cases]
    tree: Json = {
        "pieces": vocabulary(*(piece for reply in replies for piece in reply)),
        "eos": 0,
        "replies": [{"when": f"case {index};", "pieces": reply} for index, reply in enumerate(replies)],
        "tokens_per_step": tokens_per_step,
    }
    asked: list[Json] = [
        {"messages": [{"role": "user", "content": f"case {index};"}]} if is_chat else {"prompt": f"case {index};"}
        for index, (_, _, is_chat) in enumerate(cases)
    ]
    bodies: list[Json] = [
        body | {"temperature": 0, "stop": stops, "return_token_ids": True}
        for body, (_, stops, _) in zip(asked, cases, strict=True)
    ]

    async def check() -> None:
        async with scripted_server(tree) as server:
            bytes_of = server.text.tokenizer.vocabulary.bytes_of
            for body, (pieces, stops, _) in zip(bodies, cases, strict=True):
                chunks = await chunks_of(server, body)
                text, spelled, ids = "", b"", []
                for index, (new_text, new_ids) in enumerate(chunks):
                    text += new_text
                    ids += new_ids
                    spelled += b"".join(map(bytes_of, new_ids))
                    # What is cut off is a stop that completed, in the newest token; nothing comes after it.
                    decoded = spelled.decode(errors="replace")
                    is_cut = any(decoded.startswith(text + stop) for stop in stops)
                    assert text == decoded or (is_cut and not any(more for more, _ in chunks[index + 1 :]))
                assert spelled == b"".join(pieces)[: len(spelled)]
                assert len(ids) <= len(pieces) + 1

    asyncio.run(check())


@settings(max_examples=8)
@given(st.integers(0, 2**32))
def test_i4_blocks_add_up_in_every_step_while_clients_come_and_go(seed: int) -> None:
    random = Random(seed)
    engines: list[Engine] = []
    n_audits = 0

    def audit(plan: StepPlan) -> None:
        nonlocal n_audits
        engines[0]._scheduler.check()  # in the engine's own thread
        n_audits += 1

    async def visit(server: ScriptedServer) -> None:
        body: Json = {
            "prompt": [1 + random.randrange(3)] * random.randrange(1, 60),
            "n": random.randrange(1, 4),
            "max_tokens": random.randrange(1, 40),
            "seed": 1,
            "priority": random.randrange(-1, 2),
        }
        if random.random() < 0.3:
            assert (await ask(server.http, body)).status == 200
            return
        n_events = random.randrange(12)
        async with opened(server.http, body) as stream:
            while len(stream.answer.choices) == 0 or not stream.answer.is_done:
                if n_events == 0:
                    return  # and hang up
                n_events -= 1
                await stream.advance()

    async def check() -> None:
        tree: Json = {"pieces": ["x", "y"], "default": {"ids": [0]}, "prefer": [[1]], "max_model_len": 110}
        replica = ReplicaSettings(max_step_tokens=24, max_prefill_tokens=16, max_sequences=6, hash_key=b"key")
        async with scripted_server(tree, replica=replica, n_blocks=14, before_step=audit) as server:
            engines.append(server.engine)
            await asyncio.gather(*(visit(server) for _ in range(16)))
            assert server.engine.failure is None, "an audit failed"
            await server.wait_until_idle()
            load = server.engine.load()
            assert (load.n_held_blocks, load.n_free_blocks + load.n_cached_blocks) == (0, 14)

    asyncio.run(check())
    assert n_audits > 20
