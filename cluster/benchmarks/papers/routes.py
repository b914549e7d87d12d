"""What routing by cached prefixes is worth: the shared-prefix experiments of SGLang and of llm-d.

Replicas, gateway and routing policy are those of `bakehouse plan`. A prompt is a tenant's prefix and tokens of its
own; whose request comes next is drawn. Nothing is shed: the queues are as long as it takes.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from random import Random

import numpy as np
from bakehouse_cluster.bench.records import Outcome
from bakehouse_cluster.plan.fleet import Fleet, GatewayShape, ReplicaShape, open_loop
from bakehouse_cluster.plan.gateway import Route
from bakehouse_cluster.plan.policies import choose_at_random, choose_least_loaded
from bakehouse_replica.core.sampling import SamplingParams
from bakehouse_replica.core.types import Capacity, Request, SchedulingPolicy
from bakehouse_replica.executors.simulated import StepCost
from bakehouse_router.policy.pick import choose
from benchmarks.papers.setups import BLOCK_SIZE, HOST_STEP_S, MFU, VOCABULARY_SIZE

WARM_UP = "warm-up "
ROUTES: Mapping[str, Route] = {"random": choose_at_random, "least load": choose_least_loaded, "production": choose}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenants:
    """`n_tenants` prefixes of `n_prefix` tokens; each request adds `n_own` and is answered with `n_output`."""

    n_tenants: int
    n_prefix: int
    n_own: int
    n_output: int

    def arrivals(
        self, n_requests: int, *, rate: float, warm_up_rate: float, seed: int = 0
    ) -> Iterator[tuple[float, Request]]:
        """First one request of each tenant, then `n_requests` of any, at random times, so many a second."""
        draw, moment = Random(seed), 0.0
        prefixes = [_ids(draw, self.n_prefix) for _ in range(self.n_tenants)]
        for index, prefix in enumerate(prefixes):
            moment += draw.expovariate(warm_up_rate)
            yield moment, self._request(f"{WARM_UP}{index}", prefix, draw)
        for index in range(n_requests):
            moment += draw.expovariate(rate)
            yield moment, self._request(str(index), draw.choice(prefixes), draw)

    def _request(self, request_id: str, prefix: tuple[int, ...], draw: Random) -> Request:
        params = SamplingParams(temperature=0.0, seed=0, max_tokens=self.n_output)
        return Request(request_id=request_id, prompt_ids=prefix + _ids(draw, self.n_own), params=params)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Replicas, what is asked of them, and how fast caches are warmed up before."""

    name: str
    shape: ReplicaShape
    n_replicas: int
    tenants: Tenants
    warm_up_rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Routed:
    """What a policy has reached. `hit_share`: of the prefixes' tokens. `queue`: requests waiting at a replica."""

    hit_share: float
    ttft_mean_s: float
    ttft_p90_s: float
    output_tokens_per_s: float
    queue: float
    shed_share: float


def routed(cluster: Cluster, policy: str, *, rate: float, n_requests: int, seed: int = 0) -> Routed:
    """One of `ROUTES` under `rate` requests a second; the warm-up counts for nothing but the queue."""
    fleet = Fleet(
        cluster.shape,
        cluster.n_replicas,
        gateways=GatewayShape(max_queued_requests=100_000, max_queued_tokens=1_000_000_000),
        route=ROUTES[policy],
        seed=seed,
    )
    tenants = cluster.tenants
    run = open_loop(fleet, tenants.arrivals(n_requests, rate=rate, warm_up_rate=cluster.warm_up_rate, seed=seed))
    records = [record for record in run.records if not record.request_id.startswith(WARM_UP)]
    answered = [record for record in records if record.outcome is Outcome.OK]
    ttft_s = [record.ttft_s for record in answered if record.ttft_s is not None]
    duration_s = run.duration_s - min(record.due_s for record in records)
    waiting_s = sum(totals.waiting_s for totals in run.totals)
    return Routed(
        hit_share=sum(record.n_cached for record in answered) / (len(answered) * tenants.n_prefix),
        ttft_mean_s=float(np.mean(ttft_s)),
        ttft_p90_s=float(np.percentile(ttft_s, 90)),
        output_tokens_per_s=sum(record.n_output for record in answered) / duration_s,
        queue=waiting_s / run.duration_s / cluster.n_replicas,
        shed_share=1 - len(answered) / len(records),
    )


def balancer() -> Cluster:
    """SGLang's claim small: 64 prefixes, of which the cache of each of 8 replicas holds 10 beside what runs."""
    block_size, n_slots, n_held = 16, 8, 10
    tenants = Tenants(n_tenants=64, n_prefix=512, n_own=32, n_output=8)
    n_blocks = (
        n_held * tenants.n_prefix + n_slots * (tenants.n_own + tenants.n_output + block_size)
    ) // block_size
    return Cluster(
        name="64 prefixes, 8 replicas that hold 10",
        shape=ReplicaShape(
            capacity=Capacity(
                n_blocks=n_blocks, block_size=block_size, max_step_tokens=1024, max_sequences=n_slots
            ),
            policy=SchedulingPolicy(max_model_len=1024, max_prefill_tokens=512, max_waiting_requests=100_000),
            cost=StepCost(step_s=0.01, prefill_token_s=1e-4, decode_sequence_s=1e-4, context_token_s=1e-8),
        ),
        n_replicas=8,
        tenants=tenants,
        warm_up_rate=8.0,
    )


def llm_d(scale: int = 1) -> Cluster:
    """llm-d's: Qwen-32B on 8 pods of 2 H100, 307,328 tokens of cache each, 150 prefixes of 6,000 tokens.

    With a `scale` there are as many times fewer tokens everywhere, and each costs as many times more.
    """
    n_parameters, flop_per_s, byte_per_s = 32.8e9, 2 * 989e12, 2 * 3.35e12
    kv_bytes = 2 * 64 * 8 * 128 * 2  # of a token: 64 layers, 8 heads of 128, 16 bits
    row_s = 2 * n_parameters / (MFU * flop_per_s)
    return Cluster(
        name="llm-d: 8 pods, 150 prefixes of 6,000",
        shape=ReplicaShape(
            capacity=Capacity(
                n_blocks=307_328 // scale // BLOCK_SIZE,
                block_size=BLOCK_SIZE,
                max_step_tokens=8192 // scale,
                max_sequences=256,
            ),
            policy=SchedulingPolicy(
                max_model_len=32_768 // scale, max_prefill_tokens=2048 // scale, max_waiting_requests=100_000
            ),
            cost=StepCost(
                step_s=scale * (2 * n_parameters / byte_per_s + HOST_STEP_S),
                prefill_token_s=scale * row_s,
                decode_sequence_s=scale * row_s,
                context_token_s=scale * kv_bytes / byte_per_s,
            ),
        ),
        n_replicas=8,
        tenants=Tenants(n_tenants=150, n_prefix=6000 // scale, n_own=1200 // scale, n_output=200 // scale),
        warm_up_rate=3.0,
    )


def _ids(draw: Random, n_tokens: int) -> tuple[int, ...]:
    return tuple(draw.choices(range(VOCABULARY_SIZE), k=n_tokens))
