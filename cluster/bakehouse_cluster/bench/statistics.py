"""From the records of one measurement to its numbers.

A percentile is a measured value: the smallest that at least so large a share does not exceed. The gaps between the
frames of a stream are given as they are, and as inter-token latency: a gap before a frame of k tokens counts as k
latencies of a k-th of it.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from bakehouse_cluster.bench.records import ANSWERED, Outcome, Record

_PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """Of a time in seconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What one measurement has shown. Latencies and tokens are those of answered requests: `ok` and `short`.

    `duration_s`: from the first request to the last end. `n_input_tokens`: as the server counted them, of the
    requests of which it told. `n_input_other`: answered requests whose prompt it counted otherwise than planned.
    `ttft`: until the first frame with text. `gap`: between frames. `itl`: between tokens. `e2e`: until the
    stream's end. `max_send_delay_s`: how late the generator itself was. `problems`: each with its number. Without
    a single answer there are no distributions.
    """

    duration_s: float
    n_requests: int
    outcomes: dict[Outcome, int]
    n_input_tokens: int
    n_input_other: int
    n_cached_tokens: int
    n_output_tokens: int
    n_frames: int
    output_tokens_per_s: float
    total_tokens_per_s: float
    requests_per_s: float
    ttft_s: Distribution | None
    itl_s: Distribution | None
    gap_s: Distribution | None
    e2e_s: Distribution | None
    max_send_delay_s: float
    problems: dict[str, int]

    def share(self, outcome: Outcome) -> float:
        """Of all requests that ended."""
        return self.outcomes[outcome] / self.n_requests if self.n_requests else 0.0


def distribution(values: Sequence[float], weights: Sequence[float] | None = None) -> Distribution | None:
    """Of `values`, each counted `weights` times; None where there are none."""
    if not len(values):
        return None
    array = np.asarray(values)
    p50, p90, p99 = np.percentile(array, _PERCENTILES, weights=weights, method="inverted_cdf")
    return Distribution(
        mean=float(np.average(array, weights=weights)),
        p50=float(p50),
        p90=float(p90),
        p99=float(p99),
        max=float(array.max()),
    )


def token_latencies(record: Record) -> tuple[list[float], list[float]]:
    """The inter-token latencies of a request, and how many tokens had each."""
    latencies, weights = [], []
    for (begun_s, ended_s), n_tokens in zip(pairwise(record.frame_s), record.frame_tokens[1:], strict=False):
        # A frame may hold no token: characters that the server had held back.
        latencies.append((ended_s - begun_s) / max(1.0, n_tokens))
        weights.append(max(1.0, n_tokens))
    return latencies, weights


def summarize(records: Sequence[Record]) -> Summary:
    """The numbers of these requests, in any order."""
    answered = [record for record in records if record.outcome in ANSWERED]
    duration_s = max(r.ended_s for r in records) - min(r.due_s for r in records) if records else 0.0
    latencies, weights = [], []
    for record in answered:
        of_one, weights_of_one = token_latencies(record)
        latencies += of_one
        weights += weights_of_one
    n_input = sum(record.n_input or 0 for record in answered)
    n_output = sum(record.n_output for record in answered)
    per_s = 1 / duration_s if duration_s else 0.0
    counts = Counter(record.outcome for record in records)
    return Summary(
        duration_s=duration_s,
        n_requests=len(records),
        outcomes={outcome: counts[outcome] for outcome in Outcome},
        n_input_tokens=n_input,
        n_input_other=sum(
            record.n_input is not None and record.n_input_planned not in (None, record.n_input)
            for record in answered
        ),
        n_cached_tokens=sum(record.n_cached or 0 for record in answered),
        n_output_tokens=n_output,
        n_frames=sum(len(record.frame_s) for record in answered),
        output_tokens_per_s=n_output * per_s,
        total_tokens_per_s=(n_input + n_output) * per_s,
        requests_per_s=len(answered) * per_s,
        ttft_s=distribution([record.ttft_s for record in answered if record.ttft_s is not None]),
        itl_s=distribution(latencies, weights),
        gap_s=distribution([gap_s for record in answered for gap_s in record.gaps_s]),
        e2e_s=distribution([record.latency_s for record in answered]),
        max_send_delay_s=max((record.sent_s - record.due_s for record in records), default=0.0),
        problems=dict(Counter(record.problem for record in records if record.problem).most_common()),
    )
