"""The server that is measured: which it is, and how a request to it reads."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

from bakehouse_replica.core.errors import StartupError

from bakehouse_cluster.bench.prompts import Ask
from bakehouse_cluster.bench.workloads import Messages, PromptForm

Api = Literal["completions", "chat"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A server and the fields that it is sent.

    `ignores_eos`: answers have exactly the length asked for. `sends_min_tokens`: also ask for it by `min_tokens`,
    for servers that do not know `ignore_eos`. `asks_usage`: by `stream_options`; without it answers are counted in
    frames. `counts_frames`: ask for token counts in each frame (`continuous_usage_stats`), so that gaps are
    divided exactly. `extra_body`: fields added to each request; null takes one away.
    """

    url: str
    model: str
    key: str | None = None
    api: Api = "completions"
    prompt_form: PromptForm = PromptForm.TEXT
    ignores_eos: bool = True
    sends_min_tokens: bool = False
    asks_usage: bool = True
    counts_frames: bool = False
    extra_body: Mapping[str, object] = field(default_factory=dict)

    def request(self, ask: Ask) -> bytes:
        """The whole HTTP request. Raises `StartupError` where this API cannot express it."""
        path = "chat/completions" if self.api == "chat" else "completions"
        parts = urlsplit(self.url)
        body = json.dumps(self._body(ask)).encode()
        head = [
            f"POST {parts.path.rstrip('/')}/v1/{path} HTTP/1.1",
            f"host: {parts.netloc.rpartition('@')[2]}",
            "content-type: application/json",
            "accept: text/event-stream",
            f"content-length: {len(body)}",
        ]
        if self.key is not None:
            head.append(f"authorization: Bearer {self.key}")
        return "\r\n".join([*head, "", ""]).encode() + body

    def fields(self) -> dict[str, object]:
        """The fields that are the same in all requests."""
        body: dict[str, object] = {"model": self.model, "temperature": 0, "stream": True}
        if self.ignores_eos:
            body["ignore_eos"] = True
        if self.asks_usage:
            options = {"include_usage": True}
            if self.counts_frames:
                options["continuous_usage_stats"] = True
            body["stream_options"] = options
        return body | dict(self.extra_body)

    def _body(self, ask: Ask) -> dict[str, object]:
        lengths = {"max_tokens": ask.n_output}
        if self.sends_min_tokens:
            lengths["min_tokens"] = ask.n_output
        body = self._prompt(ask) | lengths | self.fields()
        return {name: value for name, value in body.items() if value is not None}

    def _prompt(self, ask: Ask) -> dict[str, object]:
        prompt = ask.prompt
        if self.api == "chat":
            if isinstance(prompt, tuple):
                raise StartupError("a chat cannot be asked by token ids; leave out --chat")
            turns = prompt.turns if isinstance(prompt, Messages) else (("user", prompt),)
            return {"messages": [{"role": role, "content": content} for role, content in turns]}
        if isinstance(prompt, Messages):
            raise StartupError("the trace has messages, which need --chat")
        if self.prompt_form is PromptForm.IDS:
            assert ask.token_ids is not None, "a completion's prompt is counted"
            return {"prompt": list(ask.token_ids)}
        return {"prompt": list(prompt) if isinstance(prompt, tuple) else prompt}
