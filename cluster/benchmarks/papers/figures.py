"""Each figure of the papers: what was published, and what ours gives."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from bakehouse_replica.core.capacity import plan_blocks
from benchmarks.papers import setups
from benchmarks.papers.memory import Occupancy, occupancy
from benchmarks.papers.rates import gains, knee
from benchmarks.papers.routes import ROUTES, Cluster, Routed, balancer, llm_d, routed
from benchmarks.papers.setups import SYSTEMS, Lengths, Setup
from benchmarks.papers.stalls import stalls

GIB = 1024**3
SHORT = 100  # tokens of output


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A line of the table."""

    figure: str
    what: str
    published: str
    ours: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much is played: more makes averages steadier and knees sharper. `llm_d_rates`: requests a second."""

    n_requests: int  # of long texts; of short ones, of which more run at once, five times as many
    trace_s: float
    llm_d_rates: tuple[float, ...]
    llm_d_s: float

    def n_requests_of(self, lengths: Lengths) -> int:
        """Of which most wait, for averages that are steady."""
        return self.n_requests * (5 if lengths.output_mean < SHORT else 1)


FULL = Effort(n_requests=600, trace_s=600.0, llm_d_rates=(3, 10, 20, 40), llm_d_s=30.0)
QUICK = Effort(n_requests=200, trace_s=200.0, llm_d_rates=(3, 20), llm_d_s=15.0)


def p1(effort: Effort) -> Iterator[Row]:
    """Sizes of the KV cache, by the function that sizes it when a replica starts."""
    shape = setups.OPT_13B.kv_shape
    n_blocks = plan_blocks(shape, budget_bytes=12 * GIB, max_model_len=2048)
    yield Row(
        figure="P1",
        what="KV of a token of OPT-13B; slots in 12 GiB",
        published="800 KiB; 15.7K",
        ours=f"{shape.block_bytes / shape.block_size / 1024:g} KiB; {n_blocks * shape.block_size:,}",
    )


def p2(effort: Effort) -> Iterator[Row]:
    """Figure 2 and figure 13: what memory holds, and how many requests fit."""
    found = {
        system: occupancy(
            setups.OPT_13B, setups.SHAREGPT, system, n_requests=effort.n_requests_of(setups.SHAREGPT)
        )
        for system in SYSTEMS
    }
    shares = {system: f"{one.shares.tokens:.1%}" for system, one in found.items()}
    yield _row("P2", "share of KV memory that holds tokens", "20.4 / 26.8 / 38.2 / 96.3 %", shares)
    of_max = found["Max"].shares
    yield Row(
        figure="P2",
        what="Max: reserved, internal, external",
        published="13.3, 57.3, 8.9 %",
        ours=f"{of_max.reserved:.1%}, {of_max.internal:.1%}, {of_max.external:.1%}",
    )
    yield _row("P6", "running requests, ShareGPT", "7.00 / 9.81 / 13.62 / 30.42", _running(found))
    alpaca = {
        system: occupancy(setups.OPT_13B, setups.ALPACA, system, n_requests=effort.n_requests_of(setups.ALPACA))
        for system in SYSTEMS
    }
    yield _row("P6", "running requests, Alpaca", "7.00 / 43.24 / 72.75 / 132.44", _running(alpaca))


def p4(effort: Effort) -> Iterator[Row]:
    """Figure 12: the rate at which latency leaves the floor."""
    yield _knees("P4", setups.OPT_13B, setups.SHAREGPT, "paged: 2.7-8x Max, 1.7-2.7x Oracle", effort)
    yield _knees("P4", setups.OPT_13B, setups.ALPACA, "-", effort)
    yield _knees("P5", setups.OPT_175B, setups.ALPACA, "paged gains little", effort)


def p8(effort: Effort) -> Iterator[Row]:
    """Figure 15: what parallel samples save by sharing blocks until they write."""
    for lengths, published in ((setups.ALPACA, "6.09 / 8.53 / 9.79 %"), (setups.SHAREGPT, "16.2 to 30.5 %")):
        saved = [
            occupancy(setups.OPT_13B, lengths, "paged", n_requests=effort.n_requests_of(lengths), n=n).saved_share
            for n in (2, 4, 6)
        ]
        yield Row(
            figure="P8",
            what=f"blocks saved with n = 2, 4, 6, {lengths.name}",
            published=published,
            ours=" / ".join(f"{share:.1%}" for share in saved),
        )


def p9(effort: Effort) -> Iterator[Row]:
    """Figure 16: a prefix that all prompts share; figure 17: prompts of 1024 tokens. Both under overload."""
    for lengths, published in ((setups.ONE_EXAMPLE, "1.67x"), (setups.FIVE_EXAMPLES, "3.58x")):
        rates = _rates(setups.OPT_13B, lengths, ("Oracle", "paged"), effort.n_requests_of(lengths))
        yield Row(
            figure="P9",
            what=f"throughput to Oracle, {lengths.n_prefix} shared tokens",
            published=published,
            ours=f"{rates['paged'] / rates['Oracle']:.2f}x",
        )
    rates = _rates(setups.OPT_13B, setups.CHATBOT, SYSTEMS, effort.n_requests_of(setups.CHATBOT))
    gain = {system: f"{rates['paged'] / rate:.2f}x" for system, rate in rates.items() if system != "paged"}
    yield _row("P10", "throughput to Max / Pow2 / Oracle, chatbot", "2x, all alike", gain)


def p12(effort: Effort) -> Iterator[Row]:
    """Figure 18b, the half that is memory: what large blocks waste."""
    sizes = (1, 8, 16, 32, 64, 128, 256)
    for lengths in (setups.SHAREGPT, setups.ALPACA):
        rates = [
            occupancy(
                setups.OPT_13B, lengths, "paged", n_requests=effort.n_requests_of(lengths), block_size=block_size
            ).output_tokens_per_s
            for block_size in sizes
        ]
        yield Row(
            figure="P12",
            what=f"tokens/s by block size {sizes[0]} to {sizes[-1]}, of the best, {lengths.name}",
            published="good: 16-128 on ShareGPT, 16-32 on Alpaca",
            ours=", ".join(f"{size}: {rate / max(rates):.2f}" for size, rate in zip(sizes, rates, strict=True)),
        )


def sarathi(effort: Effort) -> Iterator[Row]:
    """How long a prompt stops those who decode, whole and in chunks."""
    for n_chunk in (8192, 512, 256):
        found = stalls(
            setups.MISTRAL_7B,
            setups.OPENCHAT,
            max_prefill_tokens=n_chunk,
            max_step_tokens=n_chunk + 256,
            rate=2.0,
            n_requests=effort.n_requests // 2,
        )
        yield Row(
            figure="Sarathi",
            what="gap between tokens p99 and max; TTFT p50; "
            + (f"chunks of {n_chunk}" if n_chunk < 8192 else "whole"),
            published="without chunks a gap lasts a whole prefill",
            ours=" and ".join(f"{1e3 * gap:.0f}" for gap in (found.gap_p99_s, found.gap_max_s))
            + f" ms; {1e3 * found.ttft_p50_s:.0f} ms",
        )


def balancers(effort: Effort) -> Iterator[Row]:
    """SGLang 0.4: hits with and without routing by prefixes."""
    found = routes(balancer(), rate=20.0, n_requests=max(500, effort.n_requests))
    yield Row(
        figure="SGLang",
        what="share of prefix tokens found, " + " / ".join(found),
        published="3.8x the hits",
        ours=" / ".join(f"{one.hit_share:.2f}" for one in found.values()),
    )


def llm_ds(effort: Effort) -> Iterator[Row]:
    """llm-d: a line for each rate."""
    for rate in effort.llm_d_rates:
        found = routes(llm_d(), rate=rate, n_requests=round(rate * effort.llm_d_s))
        yield Row(
            figure="llm-d",
            what=f"{rate:g}/s: TTFT p90, hits, queue a pod; " + " / ".join(found),
            published="92.6 / 94.9 / 0.54 s over 3 to 60/s",
            ours=" / ".join(
                f"{one.ttft_p90_s:.2f} s, {one.hit_share:.2f}, {one.queue:.1f}" for one in found.values()
            ),
        )


FIGURES: Mapping[str, Callable[[Effort], Iterator[Row]]] = {
    "P1": p1,
    "P2": p2,
    "P4": p4,
    "P8": p8,
    "P9": p9,
    "P12": p12,
    "Sarathi": sarathi,
    "SGLang": balancers,
    "llm-d": llm_ds,
}


def routes(cluster: Cluster, *, rate: float, n_requests: int) -> dict[str, Routed]:
    """What each policy reaches with the same requests."""
    return {policy: routed(cluster, policy, rate=rate, n_requests=n_requests) for policy in ROUTES}


def _knees(figure: str, setup: Setup, lengths: Lengths, published: str, effort: Effort) -> Row:
    knees = {system: knee(setup, lengths, system, duration_s=effort.trace_s) for system in SYSTEMS}
    ratios = ", ".join(f"{ratio:.2f}x {system}" for system, ratio in gains(knees).items())
    return Row(
        figure=figure,
        what=f"rate that is carried, {setup.name}, {lengths.name}",
        published=published,
        ours=f"{' / '.join(f'{rate:.2f}' for rate in knees.values())} req/s: {ratios}",
    )


def _rates(setup: Setup, lengths: Lengths, systems: tuple[str, ...], n_requests: int) -> dict[str, float]:
    return {
        system: occupancy(setup, lengths, system, n_requests=n_requests).output_tokens_per_s for system in systems
    }


def _running(found: Mapping[str, Occupancy]) -> dict[str, str]:
    return {system: f"{one.n_running:.2f}" for system, one in found.items()}


def _row(figure: str, what: str, published: str, values: Mapping[str, str]) -> Row:
    return Row(figure=figure, what=what, published=published, ours=" / ".join(values.values()))
