"""Prints the perplexity of a fixed text by the reference path and by those that are served.

.venv/bin/python replica/benchmarks/perplexity.py [--model smollm2] [--tokens 20480] [--threads 2]

The text is cut into windows of 512 tokens, each scored from its second token on, by the executor that serves.
Exits with 1 where the perplexity of bfloat16 exceeds that of float32 by more than 0.5 %, or of int8 by 1.5 %.
"""

import math
import sys
from collections.abc import Sequence
from time import perf_counter

from bakehouse_replica.core.types import TokenLogprob
from fixed_text import PathName, argument_parser, open_model, score

MAX_LOSS: dict[PathName, float] = {"bfloat16": 0.005, "int8": 0.015}
PATHS: tuple[PathName, ...] = ("reference", "float32", *MAX_LOSS)


def perplexity(scored: Sequence[TokenLogprob]) -> float:
    """The exponential of the mean surprise, in nats."""
    return math.exp(-math.fsum(token.logprob for token in scored) / len(scored))


def main() -> None:
    """Measure and print."""
    model = open_model(argument_parser(__doc__).parse_args())
    print(f"{model.files.name}, {len(model.text_ids)} tokens, {model.n_threads} threads")
    print(
        f"{'path':>10} {'perplexity':>11} {'to reference':>13} {'first guess right':>18} {'seconds':>8}",
        flush=True,
    )
    found: dict[PathName, float] = {}
    for path in PATHS:
        begun_at = perf_counter()
        scored = score(model, path)
        found[path] = perplexity(scored)
        n_right = sum(token.rank == 1 for token in scored)
        print(
            f"{path:>10} {found[path]:>11.4f} {found[path] / found['reference'] - 1:>+13.3%} "
            f"{n_right / len(scored):>18.2%} {perf_counter() - begun_at:>8.1f}",
            flush=True,
        )
    losses = {path: found[path] / found["float32"] - 1 for path in MAX_LOSS}
    for path, limit in MAX_LOSS.items():
        print(f"{path} to float32: {losses[path]:+.3%}; the limit is {limit:+.1%}")
    sys.exit(any(losses[path] > limit for path, limit in MAX_LOSS.items()))


if __name__ == "__main__":
    main()
