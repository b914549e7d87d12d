"""Where a local server's CPU time goes while a real model works: the share of each kind of process.

What is not the replica is overhead; at a concurrency of 32 it must stay under a tenth. Prints the shares under
load and what the same processes use while nothing happens; exits with 1 where the overhead is larger.

    .venv/bin/python cluster/benchmarks/cpu_share.py
"""

import argparse
import sys
import time
from collections import Counter

from local_server import generate_load, serving

ALLOWED_SHARE = 0.1
IDLE_S = 10.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--source", default="smollm2")
    asked = parser.parse_args()
    with serving({"model": {"source": asked.source, "served_name": "smollm2"}}) as server:
        generate_load(server, n_streams=asked.streams, n_tokens=8)  # what is made at the first requests
        idle_before = server.cpu_s()
        time.sleep(IDLE_S)
        idle = server.cpu_s() - idle_before
        used: Counter[str] = Counter()
        n_tokens, elapsed_s = 0, 0.0
        for _ in range(asked.rounds):
            before = server.cpu_s()
            arrived = generate_load(server, n_streams=asked.streams, n_tokens=asked.tokens, n_prompt=asked.prompt)
            used += server.cpu_s() - before
            n_tokens, elapsed_s = n_tokens + arrived.n_tokens, elapsed_s + arrived.elapsed_s
    total_s = used.total()
    print(
        f"{asked.streams} streams of {asked.prompt} + {asked.tokens} tokens: {n_tokens / elapsed_s:.0f} tokens/s"
    )
    print(f"{'':18} {'of the CPU time':>15} {'us a token':>11} {'idle: of a core':>16}")
    for role, seconds in used.most_common():
        print(f"{role:18} {seconds / total_s:15.1%} {1e6 * seconds / n_tokens:11.0f} {idle[role] / IDLE_S:16.1%}")
    overhead = 1 - used["replica"] / total_s
    print(f"{'not the replica':18} {overhead:15.1%}")
    sys.exit(overhead > ALLOWED_SHARE)


if __name__ == "__main__":
    main()
