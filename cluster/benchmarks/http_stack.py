"""Whether everything around a model keeps up with a fast one: the whole HTTP stack over the fake executor.

64 streams in steps of 8 ms are 8,000 tokens a second; at least 7,500 must arrive, from the first request to the
last `[DONE]`, with the generator on the same cores. Prints what arrived, the gaps between frames of a stream, and
the CPU time of each kind of process; exits with 1 where too little arrived.

    .venv/bin/python cluster/benchmarks/http_stack.py
"""

import argparse
import sys

from local_server import generate_load, serving

NEEDED_SHARE = 7500 / 8000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=1000, help="of each stream")
    parser.add_argument("--step-ms", type=float, default=8.0)
    parser.add_argument("--ingress", default="direct")
    asked = parser.parse_args()
    config = {
        # Long blocks, because the fake executor reads a sequence's past block by block.
        "replica": {
            "executor": "fake",
            "fake_step_ms": asked.step_ms,
            "max_sequences": asked.streams,
            "block_size": 128,
        },
        "server": {"ingress": asked.ingress, "allow_unauthenticated": asked.ingress == "haproxy"},
    }
    with serving(config) as server:
        generate_load(server, n_streams=asked.streams, n_tokens=32)  # what is made at the first requests
        before = server.cpu_s()
        arrived = generate_load(server, n_streams=asked.streams, n_tokens=asked.tokens)
        used = server.cpu_s() - before
    offered, delivered = 1000 * asked.streams / asked.step_ms, arrived.n_tokens / arrived.elapsed_s
    print(
        f"{asked.streams} streams of {asked.tokens} tokens, a step every {asked.step_ms:g} ms: "
        f"{offered:,.0f} tokens/s offered, {delivered:,.0f} delivered ({delivered / offered:.1%}), "
        f"{arrived.n_tokens / arrived.n_frames:.2f} tokens a frame"
    )
    print(
        f"first frame of the last stream after {1000 * arrived.first_s:.0f} ms; gaps between frames: "
        f"p50 {1000 * arrived.gap_p50_s:.1f} ms, p99 {1000 * arrived.gap_p99_s:.1f} ms, "
        f"longest {1000 * arrived.gap_max_s:.0f} ms"
    )
    for role, seconds in used.most_common():
        share, per_token_us = seconds / arrived.elapsed_s, 1e6 * seconds / arrived.n_tokens
        print(f"  {role:18} {share:6.1%} of a core, {per_token_us:6.1f} us a token")
    sys.exit(delivered < NEEDED_SHARE * offered)


if __name__ == "__main__":
    main()
