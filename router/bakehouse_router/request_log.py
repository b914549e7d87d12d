"""The request log: one line for each request, when it is over.

    request id=req-7f call=chatcmpl-51 face=http kind=chat tenant=alice model=smollm2 outcome=complete finish=stop
    prompt_tokens=12 cached_tokens=0 generated_tokens=5 block_s=0.6601 queue_s=0.0009 first_token_s=0.1204
    total_s=0.3451 replicas=qx3

(one line there). What is not known is left out. As JSON it is one object of the same names. Neither shows what was
asked or answered, nor an error that quotes it, unless the log is told to.
"""

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import asdict

from bakehouse_router.calls import ChatCall
from bakehouse_router.request_report import RequestReport
from bakehouse_router.settings import LogForm

logger = logging.getLogger(__name__)

# Ids and names from clients may be longer; prompts are, as a rule.
MAX_NAME_CHARS = 200
MAX_TEXT_CHARS = 16 * 1024
MAX_FIELD_CHARS = 80
MIN_WAIT_S = 0.001
_FIELD_PATH = re.compile(r"[A-Za-z0-9_.\[\]-]+")
_NEEDS_NO_QUOTES = re.compile(r"[A-Za-z0-9_.,:/@+\[\]-]+")

Value = str | int | float | list[str] | None


class RequestLog:
    """Writes the lines of one gateway in one form; `has_prompts`: with what was asked and answered."""

    def __init__(self, form: LogForm = "text", *, has_prompts: bool = False) -> None:
        self.has_prompts = has_prompts and form != "off"
        self._form = form

    def write(self, report: RequestReport) -> None:
        """One line, whatever the names in the report are."""
        if self._form == "off" or not logger.isEnabledFor(logging.INFO):
            return
        fields = {name: value for name, value in self._fields(report).items() if value not in (None, "", [])}
        if self._form == "json":
            logger.info("%s", json.dumps(fields))
        else:
            logger.info("request %s", _as_text(fields))

    def _fields(self, report: RequestReport) -> dict[str, Value]:
        call, usage, cost, problem = report.call, report.usage, report.cost, report.problem
        fields: dict[str, Value] = {
            "id": report.request_id,
            "call": report.call_id,
            "face": report.face,
            "kind": report.kind,
            "tenant": _cut(report.tenant),
            "user": None if call is None else _cut(call.options.user),
            "model": None if call is None else _cut(call.model),
            "outcome": report.outcome,
            "finish": [str(finish) for finish in report.finishes],
            "param": None if problem is None else _field_name(problem.param),
            # The messages of other errors say what was wrong in the request, and may quote it.
            "error": problem.message if problem is not None and (report.failed_here or self.has_prompts) else None,
            "prompt_tokens": None if usage is None else usage.prompt_tokens,
            "cached_tokens": None if usage is None else usage.cached_tokens,
            "generated_tokens": None if usage is None else usage.completion_tokens,
            "recomputed_tokens": None if cost is None else cost.recomputed_tokens or None,
            "block_s": _rounded(None if cost is None else cost.block_seconds),
            "queue_s": _rounded(report.queue_s),
            "waited": [f"{reason}:{seconds:.3f}" for reason, seconds in _noticeable(report.waited_s)],
            "preempted": report.n_preempted or None,
            "first_token_s": _rounded(report.first_token_s),
            "total_s": _rounded(report.ended_at - report.received_at),
            "replicas": list(report.replica_ids),
            "retried": report.n_retried or None,
            "resumed": report.n_resumed or None,
        }
        return fields | _texts(report) if self.has_prompts else fields


def _noticeable(waited_s: Mapping[str, float]) -> list[tuple[str, float]]:
    """The longest first; what is not a millisecond long is left out."""
    longest = sorted(waited_s.items(), key=lambda item: -item[1])
    return [(reason, seconds) for reason, seconds in longest if seconds >= MIN_WAIT_S]


def _texts(report: RequestReport) -> dict[str, Value]:
    call = report.call
    if call is None:
        return {}
    asked: object
    if isinstance(call, ChatCall):
        asked = [{name: value for name, value in asdict(turn).items() if value} for turn in call.messages]
    else:
        asked = call.prompts
    return {
        "prompt": _cut(json.dumps(asked, ensure_ascii=False), MAX_TEXT_CHARS),
        "answer": [_cut(text, MAX_TEXT_CHARS) for text in report.texts],
    }


def _as_text(fields: Mapping[str, Value]) -> str:
    return " ".join(f"{name}={_word(value)}" for name, value in fields.items())


def _word(value: Value) -> str:
    """As it is, or as a JSON string in ASCII where it would not be one word."""
    text = str(value)
    if isinstance(value, list):
        text = ",".join(value)
        if not _NEEDS_NO_QUOTES.fullmatch(text):
            return json.dumps(value)
    return text if _NEEDS_NO_QUOTES.fullmatch(text) else json.dumps(text)


def _field_name(param: str | None) -> str | None:
    """A client's own key may be what it wanted to ask: only what could be a field's path is shown."""
    is_path = param is not None and len(param) <= MAX_FIELD_CHARS and _FIELD_PATH.fullmatch(param)
    return param if is_path else None


def _cut(text: str, n_chars: int = MAX_NAME_CHARS) -> str:
    return text if len(text) <= n_chars else text[:n_chars] + "…"


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)
