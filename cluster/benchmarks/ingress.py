"""What each way into a local server costs: direct, Serve's proxy, HAProxy; Serve's throughput flags off and on.

The replica draws tokens without a model, as fast as it can or in steps of `--step-ms`. One server for each way and
set of flags; the generator runs on the same cores. HAProxy listens on all addresses of this machine while its rows
are measured.

    .venv/bin/python cluster/benchmarks/ingress.py
"""

import argparse
from collections import Counter

from local_server import LocalServer, generate_load, serving
from sse_load import Arrived

LONGEST = 8000  # of a stream: with its prompt it fits the model's context
WAYS = ("direct", "proxy", "haproxy")
# "default" is what `bakehouse serve` does, "off" what Serve does by itself, "on" all of THROUGHPUT_OPTIMIZED.
ENVIRONMENTS: dict[str, dict[str, str]] = {
    "default": {},
    "off": {},
    "on": {
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
        "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
        "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
        "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1000",
    },
}
ROLES = ("gateway", "replica", "proxy")
HEAD = f"{'ingress':8} {'flags':7} {'streams':>7} {'tokens/s':>9} {'frames/s':>9} {'gap p99':>8}  CPU ms a token:"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--step-ms", type=float, default=0.0)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--tokens", type=int, default=32000, help="of all streams of a row together")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--flags", nargs="+", choices=tuple(ENVIRONMENTS), default=tuple(ENVIRONMENTS))
    asked = parser.parse_args()
    print(HEAD, *(f"{role:>8}" for role in (*ROLES, "rest", "all")))
    for way in asked.ways:
        for flags in asked.flags:
            config = {
                "replica": {
                    "executor": "fake",
                    "block_size": 128,  # it reads a sequence's past block by block
                    "fake_step_ms": asked.step_ms,
                    "max_sequences": max(asked.streams),
                },
                "gateway": {"one_loop": flags != "off"},
                "server": {"ingress": way, "allow_unauthenticated": way == "haproxy"},
            }
            with serving(config, ENVIRONMENTS[flags]) as server:
                generate_load(server, n_streams=4, n_tokens=32)  # what is made at the first request
                for n_streams in asked.streams:
                    n_tokens = min(LONGEST, asked.tokens // n_streams)
                    arrived, used = _measured(server, n_streams, n_tokens)
                    print(f"{way:8} {flags:7} {_row(arrived, used)}", flush=True)


def _measured(server: LocalServer, n_streams: int, n_tokens: int) -> tuple[Arrived, Counter[str]]:
    before = server.cpu_s()
    arrived = generate_load(server, n_streams=n_streams, n_tokens=n_tokens)
    return arrived, server.cpu_s() - before


def _row(arrived: Arrived, used: Counter[str]) -> str:
    per_token_ms = {role: 1000 * seconds / arrived.n_tokens for role, seconds in used.items()}
    rest_ms = sum(ms for role, ms in per_token_ms.items() if role not in ROLES)
    costs = [*(per_token_ms.get(role, 0.0) for role in ROLES), rest_ms, sum(per_token_ms.values())]
    return (
        f"{arrived.n_streams:7} {arrived.n_tokens / arrived.elapsed_s:9,.0f} "
        f"{arrived.n_frames / arrived.elapsed_s:9,.0f} {1000 * arrived.gap_p99_s:5.0f} ms  {'':15}"
        + " ".join(f"{cost:8.3f}" for cost in costs)
    )


if __name__ == "__main__":
    main()
