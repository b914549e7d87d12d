"""What a gateway is told at start; built by `bakehouse_cluster.config`, read here and nowhere else."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from bakehouse_replica.core.types import ModelSource

LogForm = Literal["off", "text", "json"]
ToolFormatName = Literal["auto", "hermes", "llama3_json", "mistral"]
# The limits that a gateway takes while it serves; the configuration file and Serve's `user_config` call them so.
LIVE_LIMITS = (
    "max_choices",
    "max_prompts",
    "max_stops",
    "max_stop_chars",
    "max_logprobs",
    "max_listed_tokens",
    "max_tools",
    "max_queued_requests",
    "max_queued_tokens",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """One gateway's model and limits.

    `chat_template`: a Jinja template's text that replaces the model's own. `tool_format`: how the model writes
    tool calls, `auto` by its template. `keep_alive_s`: a waiting stream sends a comment after each such pause.
    `max_choices` bounds `n`, `max_prompts` the prompts of one call, `max_stops` the list of stop strings,
    `max_logprobs` the alternatives at each token, `max_schema_bytes` and `max_schema_depth` a JSON schema or
    grammar, `max_listed_tokens` the ids of `logit_bias`, `allowed_token_ids`, `stop_token_ids` and `bad_words`.
    `max_queued_requests` and `max_queued_tokens` bound what waits for its first token. `keys_path` None asks
    nobody for a key; `opens_metrics` shows `/metrics` without one. `ignores_unknown_fields` lists unknown fields
    in a header of the reply instead of refusing them. `request_log`: the form of each request's line in the log;
    `logs_prompts` adds what was asked and answered. `traces`: Serve's tracing is on.
    """

    source: ModelSource = field(default_factory=ModelSource)
    served_name: str | None = None
    chat_template: str | None = None
    tool_format: ToolFormatName = "auto"
    max_body_bytes: int = 4 * 1024 * 1024
    max_choices: int = 16
    max_prompts: int = 64
    max_stops: int = 16
    max_stop_chars: int = 256
    max_logprobs: int = 20
    max_listed_tokens: int = 1024
    max_schema_bytes: int = 64 * 1024
    max_schema_depth: int = 32
    max_tools: int = 128
    max_queued_requests: int = 1024
    max_queued_tokens: int = 1_000_000
    keys_path: Path | None = None
    opens_metrics: bool = False
    cors_origins: tuple[str, ...] = ()
    ignores_unknown_fields: bool = False
    request_log: LogForm = "text"
    logs_prompts: bool = False
    traces: bool = False
    keep_alive_s: float = 5.0
    status_period_s: float = 0.5
