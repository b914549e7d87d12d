"""What a gateway is told at start; built by `bakehouse_cluster.config`, read here and nowhere else."""

from dataclasses import dataclass, field

from bakehouse_replica.core.types import ModelSource


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """One gateway's model and limits.

    `chat_template`: a Jinja template's text that replaces the model's own. `keep_alive_s`: a waiting stream
    sends a comment after each such pause. `max_choices` bounds `n`, `max_prompts` the prompts of one call,
    `max_stops` the list of stop strings.
    """

    source: ModelSource = field(default_factory=ModelSource)
    served_name: str | None = None
    chat_template: str | None = None
    max_body_bytes: int = 8 * 1024 * 1024
    max_choices: int = 16
    max_prompts: int = 64
    max_stops: int = 16
    max_stop_chars: int = 256
    keep_alive_s: float = 5.0
    status_period_s: float = 0.5
