"""What the latencies have to be, and whether a run is good enough."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bakehouse_replica.core.errors import StartupError

from bakehouse_cluster.bench.records import ANSWERED
from bakehouse_cluster.bench.statistics import Distribution
from bakehouse_cluster.plan.choices import Percentile
from bakehouse_cluster.plan.records import SimulatedRecord

LATENCIES = ("ttft", "itl", "e2e")
_TIME = re.compile(r"(?P<number>\d+(\.\d+)?|\.\d+)(?P<unit>ms|s)")
_UNITS = {"ms": 1e-3, "s": 1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """Limits in seconds, None where there is none. Two things are asked of a run:

    * of answered requests, `percentile` of each limited latency is within its limit;
    * of all requests, shed and failed ones too, at least a share of `goodput` is answered within all limits. A
      request's own inter-token latency is the mean of its gaps.
    """

    ttft_s: float | None = None
    itl_s: float | None = None
    e2e_s: float | None = None
    percentile: Percentile = Percentile.P99
    goodput: float = 0.99

    @property
    def limits(self) -> dict[str, float]:
        """By the name of the latency, those that there are."""
        limits = {"ttft": self.ttft_s, "itl": self.itl_s, "e2e": self.e2e_s}
        return {name: limit for name, limit in limits.items() if limit is not None}

    def __str__(self) -> str:
        named = (f"{self.percentile} {name.upper()} {limit:g} s" for name, limit in self.limits.items())
        return f"{', '.join(named)}, goodput {self.goodput:.4g}"

    def is_good(self, record: SimulatedRecord) -> bool:
        """Whether the request was answered within all limits."""
        if record.outcome not in ANSWERED:
            return False
        own = {"ttft": record.ttft_s, "itl": record.mean_gap_s, "e2e": record.latency_s}
        return all((own[name] or 0.0) <= limit for name, limit in self.limits.items())

    def misses(self, latencies: Mapping[str, Distribution | None], good_share: float) -> tuple[str, ...]:
        """What a run lacks, in words; nothing where it meets the objective."""
        missing = []
        for name, limit in self.limits.items():
            found = latencies[name]
            value = None if found is None else getattr(found, self.percentile)
            if value is not None and value > limit:
                missing.append(f"{self.percentile} {name.upper()} is {value:.4g} s")
        if good_share < self.goodput:
            missing.append(f"goodput is {good_share:.4g}")
        return tuple(missing)


def parse_objective(text: str, *, percentile: Percentile, goodput: float) -> Objective:
    """`ttft=1s,itl=50ms` and so on. Raises `StartupError` for an unknown latency, a wrong time or none at all."""
    limits: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        time = _TIME.fullmatch(value.strip())
        if name not in LATENCIES:
            raise StartupError(
                f"--slo: {name!r} is unknown; there are {', '.join(LATENCIES)}, as in ttft=1s,itl=50ms"
            )
        if name in limits:
            raise StartupError(f"--slo: {name} is given twice")
        seconds = 0.0 if time is None else float(time["number"]) * _UNITS[time["unit"]]
        if seconds <= 0:
            raise StartupError(
                f"--slo: {name}={value} is no time above 0 in s or ms, as in {name}=1s or {name}=50ms"
            )
        limits[name] = seconds
    if not 0 < goodput <= 1:
        raise StartupError(f"--goodput {goodput:g}: it must be above 0 and at most 1")
    return Objective(
        ttft_s=limits.get("ttft"),
        itl_s=limits.get("itl"),
        e2e_s=limits.get("e2e"),
        percentile=percentile,
        goodput=goodput,
    )


def good_share(records: Sequence[SimulatedRecord], objective: Objective) -> float:
    """Of all requests, those that were answered within all limits."""
    return sum(map(objective.is_good, records)) / len(records)
