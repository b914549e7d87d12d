"""What can be chosen by name."""

from enum import StrEnum


class Percentile(StrEnum):
    """Which of a latency's percentiles has to keep its limit."""

    P50 = "p50"
    P90 = "p90"
    P99 = "p99"


class Routing(StrEnum):
    """Who decides where a request goes: the production policy, or another one to compare it with."""

    PRODUCTION = "production"
    RANDOM = "random"
    LEAST_LOAD = "least-load"
