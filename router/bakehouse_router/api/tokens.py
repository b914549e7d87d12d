"""What faces other than HTTP answer at once: the ids of a text, the text of ids, the models that are served."""

from bakehouse_replica.core.errors import BakehouseError

from bakehouse_router.api.bodies import tokenize_call
from bakehouse_router.api.deltas import Fields, Kind
from bakehouse_router.api.parse import parse_body
from bakehouse_router.api.schema import DetokenizeBody, TokenizeChatBody, TokenizeTextBody
from bakehouse_router.api.token_json import TokenReport
from bakehouse_router.gateway import Gateway
from bakehouse_router.handle_messages import ModelEntry, Tokenized


async def tokenized(gateway: Gateway, kind: Kind, fields: Fields) -> Tokenized:
    """The answer to a body of `/tokenize`. Raises `InvalidRequest` or `Unavailable`."""
    body: TokenizeChatBody | TokenizeTextBody
    body = parse_body(TokenizeChatBody, fields) if kind == "chat" else parse_body(TokenizeTextBody, fields)
    call = tokenize_call(body, gateway.model_name)
    token_ids = await gateway.tokenize(call, adds_special_tokens=body.add_special_tokens is not False)
    report = TokenReport(names=gateway.vocabulary)
    return Tokenized(
        token_ids=token_ids,
        token_strs=tuple(map(report.text_of, token_ids)) if body.return_token_strs else (),
        max_model_len=(await gateway.serving_card()).max_model_len,
    )


async def detokenized(gateway: Gateway, fields: Fields) -> str:
    """The answer to a body of `/detokenize`. Raises `InvalidRequest` or `Unavailable`."""
    body = parse_body(DetokenizeBody, fields)
    if body.model:
        gateway.check_model(body.model)
    return await gateway.detokenize(body.tokens)


async def served_models(gateway: Gateway) -> tuple[ModelEntry, ...]:
    """The one model that is served here; without its context where no replica serves."""
    try:
        max_model_len = (await gateway.serving_card()).max_model_len
    except BakehouseError:
        max_model_len = None
    return (ModelEntry(name=gateway.model_name, max_model_len=max_model_len),)
