"""Structured output on real weights: what finishes is JSON that its schema accepts."""

import asyncio
import json
from collections import Counter
from random import Random

import pytest
from bakehouse_replica.build import build_engine
from bakehouse_replica.core.sampling import Grammar, GrammarKind, SamplingParams
from bakehouse_replica.core.types import FinishReason, ModelSource, Request
from bakehouse_replica.engine import Engine
from bakehouse_replica.settings import ReplicaSettings
from bakehouse_replica.source import open_source
from bakehouse_router.text.messages import ChatMessage
from bakehouse_router.text.model_text import ModelText, load_model_text
from jsonschema import Draft202012Validator
from random_schemas import Schema, random_schema

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

N_SCHEMAS = 200
N_AT_ONCE = 16
MAX_TOKENS = 200
# 190 do: schemas are bounded, and few need more than 200 tokens.
MIN_FINISHED = N_SCHEMAS // 2


async def _answer(engine: Engine, text: ModelText, schema: Schema, seed: int) -> tuple[FinishReason, str]:
    messages = (ChatMessage(role="user", content="Describe something, as JSON."),)
    request = Request(
        request_id=f"schema-{seed}",
        prompt_ids=text.chat_template.encode(messages),
        params=SamplingParams(
            max_tokens=MAX_TOKENS,
            seed=seed,
            stop_token_ids=text.defaults.stop_token_ids,
            grammar=Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(schema)),
        ),
    )
    token_ids: list[int] = []
    finish = None
    async for delivery in engine.generate(request):
        for delta in delivery.deltas:
            token_ids += delta.token_ids
            finish = delta.finish or finish
            assert delta.failure is None, delta.failure
    assert finish is not None
    vocabulary = text.tokenizer.vocabulary
    errors = "strict" if finish is FinishReason.STOP else "replace"  # a character may be cut by the length
    return finish, b"".join(map(vocabulary.bytes_of, token_ids)).decode(errors=errors)


@pytest.mark.timeout(900)
async def test_every_answer_that_finishes_matches_its_random_schema() -> None:
    source = ModelSource()
    text = load_model_text(open_source(source))
    engine = build_engine(ReplicaSettings(source=source, max_model_len=1024), replica_id="schemas")
    engine.start()
    slots = asyncio.Semaphore(N_AT_ONCE)

    async def check(seed: int) -> FinishReason:
        schema = random_schema(Random(seed))
        async with slots:
            finish, answer = await _answer(engine, text, schema, seed)
        if finish is FinishReason.STOP:
            Draft202012Validator(schema).validate(json.loads(answer))
        return finish

    try:
        finishes = Counter(await asyncio.gather(*map(check, range(N_SCHEMAS))))
    finally:
        await engine.close()
    print(f"of {N_SCHEMAS} answers finished: {dict(finishes)}")
    assert finishes[FinishReason.STOP] >= MIN_FINISHED
    assert finishes[FinishReason.STOP] + finishes[FinishReason.LENGTH] == N_SCHEMAS
