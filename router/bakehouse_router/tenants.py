"""What each tenant has used of this gateway since it started: for its own `/v1/usage`, and as series of the table.

Tenants are those of the keys file that have asked for something, and `""` for calls by a handle and where nobody
is asked for a key. One that leaves the file keeps what it has used. All have totals; as Prometheus keeps each
series for long, only the first `MAX_TENANT_SERIES` have series of their own, and later ones share those of
`other`.
"""

import time
from collections import Counter
from dataclasses import dataclass, field

from bakehouse_replica.core.counts import Series
from bakehouse_replica.core.metric_table import (
    MAX_TENANT_SERIES,
    OTHER_TENANTS,
    OUTCOMES,
    TENANT_BLOCK_SECONDS,
    TENANT_GENERATED_TOKENS,
    TENANT_PROMPT_TOKENS,
    TENANT_REQUESTS,
)
from bakehouse_replica.core.types import Cost


@dataclass(slots=True)
class Used:
    """What one tenant has used, or several together. `outcomes`: how many of its requests have ended by each."""

    outcomes: Counter[str] = field(default_factory=Counter)
    block_seconds: float = 0.0
    computed_tokens: int = 0
    cached_tokens: int = 0
    recomputed_tokens: int = 0
    generated_tokens: int = 0

    def pay(self, cost: Cost) -> None:
        """What a replica has told of a request. Output tokens are counted as they arrive, and not here."""
        self.block_seconds += cost.block_seconds
        self.computed_tokens += cost.computed_tokens
        self.cached_tokens += cost.cached_tokens
        self.recomputed_tokens += cost.recomputed_tokens

    def add(self, other: "Used") -> None:
        """Another tenant's, beside."""
        self.outcomes.update(other.outcomes)
        self.block_seconds += other.block_seconds
        self.computed_tokens += other.computed_tokens
        self.cached_tokens += other.cached_tokens
        self.recomputed_tokens += other.recomputed_tokens
        self.generated_tokens += other.generated_tokens

    def series(self, label: str) -> tuple[Series, ...]:
        """As those of this label, the ones at 0 too."""
        prompt_tokens = {
            "computed": self.computed_tokens,
            "cached": self.cached_tokens,
            "recomputed": self.recomputed_tokens,
        }
        return (
            Series(TENANT_BLOCK_SECONDS.name, (label,), self.block_seconds),
            *(Series(TENANT_PROMPT_TOKENS.name, (label, how), n) for how, n in prompt_tokens.items()),
            Series(TENANT_GENERATED_TOKENS.name, (label,), self.generated_tokens),
            *(Series(TENANT_REQUESTS.name, (label, outcome), self.outcomes[outcome]) for outcome in OUTCOMES),
        )


class Tenants:
    """The totals of one gateway process, `since` it started (Unix seconds)."""

    def __init__(self) -> None:
        self.since = int(time.time())
        self._used: dict[str, Used] = {}  # in the order of their first requests

    def used_by(self, tenant: str) -> Used:
        """What this tenant has used; its own record, to which whoever counts for it adds."""
        return self._used.setdefault(tenant, Used())

    def told(self, tenant: str) -> Used:
        """The same for those who only read: nothing, where it has never asked for anything."""
        return self._used.get(tenant) or Used()

    def series(self, only: str | None = None) -> tuple[Series, ...]:
        """Those of all tenants; `only`: of this one, where it has its own."""
        by_label: dict[str, Used] = {}
        for index, (tenant, used) in enumerate(self._used.items()):
            label = tenant if index < MAX_TENANT_SERIES else OTHER_TENANTS
            if only is None or (label == only != OTHER_TENANTS):
                by_label.setdefault(label, Used()).add(used)
        return tuple(series for label, used in by_label.items() for series in used.series(label))
