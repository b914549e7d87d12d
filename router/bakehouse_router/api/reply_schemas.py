"""JSON schemas of the replies, for the OpenAPI document."""

from bakehouse_router.api.token_json import Json

_TEXT: Json = {"type": "string"}
_COUNT: Json = {"type": "integer", "minimum": 0}
_MAYBE_TEXT: Json = {"type": ["string", "null"]}
_MAYBE_COUNT: Json = {"type": ["integer", "null"], "minimum": 0}
_MAYBE_OBJECT: Json = {"type": ["object", "null"]}
_SECONDS: Json = {"type": "number", "minimum": 0}
_MAYBE_SECONDS: Json = {"type": ["number", "null"], "minimum": 0}
_TOKEN_IDS: Json = {"type": "array", "items": _COUNT}


def _object(**properties: Json) -> Json:
    """An object that has all of these, and may have others."""
    return {"type": "object", "properties": properties, "required": list(properties)}


def _list(of: Json) -> Json:
    return {"type": "array", "items": of}


def _ref(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


def _reply(kind: str, choice: Json) -> Json:
    return _object(
        id=_TEXT, object={"const": kind}, created=_COUNT, model=_TEXT, choices=_list(choice), usage=_ref("Usage")
    )


_FINISH: Json = {"enum": ["stop", "length", "tool_calls"]}
_MESSAGE = _object(role={"const": "assistant"}, content=_MAYBE_TEXT, refusal={"type": "null"})

REPLY_SCHEMAS: dict[str, Json] = {
    "Error": _object(error=_object(message=_TEXT, type=_TEXT, param=_MAYBE_TEXT, code=_MAYBE_TEXT)),
    "Usage": _object(prompt_tokens=_COUNT, completion_tokens=_COUNT, total_tokens=_COUNT),
    "ChatCompletion": _reply(
        "chat.completion",
        _object(index=_COUNT, message=_MESSAGE, logprobs=_MAYBE_OBJECT, finish_reason=_FINISH),
    ),
    "Completion": _reply(
        "text_completion", _object(index=_COUNT, text=_TEXT, logprobs=_MAYBE_OBJECT, finish_reason=_FINISH)
    ),
    "Response": _object(
        id=_TEXT,
        object={"const": "response"},
        created_at=_COUNT,
        status={"enum": ["completed", "incomplete"]},
        incomplete_details=_MAYBE_OBJECT,
        error={"type": "null"},
        model=_TEXT,
        output=_list(_object(id=_TEXT, type={"enum": ["message", "function_call"]}, status=_TEXT)),
        usage=_object(input_tokens=_COUNT, output_tokens=_COUNT, total_tokens=_COUNT),
    ),
    "Tokens": _object(
        count=_COUNT,
        max_model_len=_COUNT,
        tokens=_TOKEN_IDS,
        token_strs={"type": ["array", "null"], "items": _TEXT},
    ),
    "Text": _object(prompt=_TEXT),
    "Model": _object(
        id=_TEXT,
        object={"const": "model"},
        created=_COUNT,
        owned_by=_TEXT,
        max_model_len=_MAYBE_COUNT,
        context_length=_MAYBE_COUNT,
    ),
    "ModelList": _object(object={"const": "list"}, data=_list(_ref("Model"))),
    "Fleet": _object(object={"const": "list"}, data=_list(_ref("Replica")), gateway=_ref("Gateway")),
    "Replica": _object(
        id=_TEXT,
        serves={"type": "boolean"},
        problem=_MAYBE_TEXT,
        block_size=_COUNT,
        n_blocks=_COUNT,
        kv_bytes=_COUNT,
        max_model_len=_COUNT,
        load=_object(
            n_running=_COUNT,
            n_waiting=_COUNT,
            waiting_tokens=_COUNT,
            n_free_blocks=_COUNT,
            n_cached_blocks=_COUNT,
            n_held_blocks=_COUNT,
        ),
        max_sequences=_COUNT,
        step_time_s=_SECONDS,
        age_s=_SECONDS,
        counted=_MAYBE_OBJECT,
    ),
    "Gateway": _object(
        id=_MAYBE_TEXT,
        model=_TEXT,
        n_open=_COUNT,
        n_waiting=_COUNT,
        waiting_tokens=_COUNT,
        generated_tokens=_COUNT,
    ),
    "Explanation": _object(
        object={"const": "request.explanation"},
        version={"const": 1},
        request_id=_TEXT,
        reply_id=_TEXT,
        face={"enum": ["http", "grpc", "handle"]},
        kind={"enum": ["chat", "completion", "response"]},
        state={"enum": ["running", "ended"]},
        outcome=_MAYBE_TEXT,
        seconds=_SECONDS,
        first_token_s=_MAYBE_SECONDS,
        admission=_object(
            decision={"enum": ["pending", "queued", "shed", "refused"]},
            at_s=_MAYBE_SECONDS,
        ),
        prompts=_list(
            _object(
                prompt=_COUNT,
                attempts=_list(
                    _object(
                        state={"enum": ["running", "ended", "lost"]},
                        loss=_MAYBE_TEXT,
                        at_s=_SECONDS,
                        ended_at_s=_MAYBE_SECONDS,
                        first_token_at_s=_MAYBE_SECONDS,
                        after_tokens=_COUNT,
                        replicas=_list(_TEXT),
                        parts=_list(_object(id=_TEXT, routing=_MAYBE_OBJECT, story=_MAYBE_OBJECT)),
                        n_parts_left_out=_COUNT,
                    )
                ),
                n_attempts_left_out=_COUNT,
            )
        ),
        n_prompts_left_out=_COUNT,
    ),
    "TenantUsage": _object(
        object={"const": "usage"},
        tenant=_TEXT,
        gateway=_MAYBE_TEXT,
        since=_COUNT,
        requests={"type": "object", "additionalProperties": _COUNT},
        block_seconds={"type": "number", "minimum": 0},
        prompt_tokens=_object(computed=_COUNT, cached=_COUNT, recomputed=_COUNT),
        generated_tokens=_COUNT,
    ),
    "TokenizerInfo": {"type": "object", "additionalProperties": _MAYBE_TEXT},
    "Metrics": _TEXT,
    "Health": _object(status={"enum": ["ok", "unavailable"]}, replicas=_list({"type": "object"})),
    "Readiness": _object(status={"const": "ready"}, model=_TEXT),
}
