"""Describes the HTTP face by OpenAPI 3.1: request bodies are the schemas that check them, errors the one envelope.

Replies are described as far as clients rely on them; fields may be added.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import cast

from pydantic.json_schema import models_json_schema

from bakehouse_router.api.fields import Strict
from bakehouse_router.api.reading import TIMEOUT_HEADER
from bakehouse_router.api.reply_schemas import REPLY_SCHEMAS
from bakehouse_router.api.responses.body import ResponseBody
from bakehouse_router.api.schema import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeChatBody,
    TokenizeTextBody,
)
from bakehouse_router.api.token_json import Json
from bakehouse_router.calls import MAX_TIMEOUT_S

_NO_BRACES = str.maketrans("", "", "{}")
_REF = "#/components/schemas/{model}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One route. `bodies`: one of which is the request's; `reply` names a schema; `streams`: or events of it.

    `media_type`: of the reply.
    """

    method: str
    path: str
    summary: str
    reply: str
    bodies: tuple[type[Strict], ...] = ()
    streams: bool = False
    is_open: bool = False
    media_type: str = "application/json"


_TOKENIZE = (TokenizeTextBody, TokenizeChatBody)
OPERATIONS = (
    Operation(
        method="post",
        path="/v1/chat/completions",
        summary="Answer a conversation",
        reply="ChatCompletion",
        bodies=(ChatBody,),
        streams=True,
    ),
    Operation(
        method="post",
        path="/v1/completions",
        summary="Continue a text",
        reply="Completion",
        bodies=(CompletionBody,),
        streams=True,
    ),
    Operation(
        method="post",
        path="/v1/responses",
        summary="Answer a conversation of typed items",
        reply="Response",
        bodies=(ResponseBody,),
        streams=True,
    ),
    *(
        Operation(
            method="post",
            path=f"{prefix}/tokenize",
            summary="The token ids of a text or of a conversation",
            reply="Tokens",
            bodies=_TOKENIZE,
        )
        for prefix in ("", "/v1")
    ),
    *(
        Operation(
            method="post",
            path=f"{prefix}/detokenize",
            summary="The text of token ids",
            reply="Text",
            bodies=(DetokenizeBody,),
        )
        for prefix in ("", "/v1")
    ),
    Operation(method="get", path="/v1/models", summary="The served models", reply="ModelList"),
    Operation(method="get", path="/v1/models/{name}", summary="A served model", reply="Model"),
    Operation(method="get", path="/v1/replicas", summary="How replicas and this gateway are doing", reply="Fleet"),
    Operation(
        method="get",
        path="/v1/requests/{id}/explain",
        summary="Why a request waited, where it went, and for whom it made way",
        reply="Explanation",
    ),
    Operation(method="get", path="/v1/usage", summary="What the caller's tenant has used", reply="TenantUsage"),
    Operation(method="get", path="/tokenizer_info", summary="The special tokens", reply="TokenizerInfo"),
    Operation(
        method="get", path="/metrics", summary="Counters for Prometheus", reply="Metrics", media_type="text/plain"
    ),
    Operation(method="get", path="/health", summary="Whether any replica serves", reply="Health", is_open=True),
    Operation(method="get", path="/ready", summary="Whether the model answers", reply="Readiness", is_open=True),
)


def _ref(name: str) -> Json:
    return {"$ref": _REF.format(model=name)}


def _json_content(schema: Json) -> Json:
    return {"application/json": {"schema": schema}}


def _responses(operation: Operation) -> Json:
    content: Json = {operation.media_type: {"schema": _ref(operation.reply)}}
    if operation.streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    responses: Json = {"200": {"description": "The answer", "content": content}}
    if operation.reply == "Health":
        responses["503"] = {"description": "No replica serves", "content": _json_content(_ref("Health"))}
    responses["default"] = {"description": "Any error", "content": _json_content(_ref("Error"))}
    return responses


def _timeout_parameter() -> Json:
    return {
        "name": TIMEOUT_HEADER,
        "in": "header",
        "description": "The time that the request may take; of it and `timeout_s` the smaller counts",
        "schema": {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_TIMEOUT_S},
    }


def _model_schema(names: Sequence[str], *, is_required: bool) -> Json:
    return {"enum": list(dict.fromkeys(names)) if is_required else [*dict.fromkeys(names), None]}


def _operation_json(operation: Operation, model_names: Sequence[str]) -> Json:
    described: Json = {
        "operationId": f"{operation.method}{operation.path}".replace("/", "_").translate(_NO_BRACES),
        "summary": operation.summary,
        "responses": _responses(operation),
    }
    if operation.streams:
        described["parameters"] = [_timeout_parameter()]
    if "{name}" in operation.path:
        schema = _model_schema(model_names, is_required=True)
        described["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": schema}]
    if "{id}" in operation.path:
        described["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}]
    if operation.bodies:
        refs = [_ref(body.__name__) for body in operation.bodies]
        schema = refs[0] if len(refs) == 1 else {"anyOf": refs}
        described["requestBody"] = {"required": True, "content": _json_content(schema)}
    if operation.is_open:
        described["security"] = []
    return described


def _body_schemas(model_names: Sequence[str]) -> dict[str, Json]:
    bodies = {body for operation in OPERATIONS for body in operation.bodies}
    _, definitions = models_json_schema(
        [(body, "validation") for body in sorted(bodies, key=lambda body: body.__name__)], ref_template=_REF
    )
    schemas: dict[str, Json] = definitions["$defs"]
    for body in bodies:
        described = schemas[body.__name__]
        is_required = "model" in cast("list[str]", described["required"])
        cast("Json", described["properties"])["model"] = _model_schema(model_names, is_required=is_required)
    return schemas


def openapi_document(model_names: Sequence[str]) -> Json:
    """The whole description, for a server that knows its model by these names."""
    paths: dict[str, Json] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation_json(operation, model_names)
    return {
        "openapi": "3.1.0",
        "info": {"title": "bakehouse", "version": version("bakehouse")},
        "paths": paths,
        "components": {
            "schemas": _body_schemas(model_names) | REPLY_SCHEMAS,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        # Either: a server may be open.
        "security": [{"key": []}, {}],
    }
