"""Plays the papers' figures on our scheduler and prints what was published beside what comes out.

    PYTHONPATH=cluster:replica:kernels:router .venv/bin/python -m benchmarks.papers [--quick] [--only P2 P4]

Needs no GPU and no model: a step takes a + b * prompt tokens + c * decodes + d * tokens of context, by the data
sheets of the papers' machines (`setups.py`). In full it takes half an hour on one core.
"""

import argparse
from pathlib import Path

from benchmarks.papers import setups
from benchmarks.papers.figures import FIGURES, FULL, QUICK
from benchmarks.papers.plot import plot
from benchmarks.papers.routes import llm_d


def main() -> None:
    """Print the assumptions, then a Markdown table, line by line as they come."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the work")
    parser.add_argument("--only", nargs="+", choices=FIGURES, default=list(FIGURES))
    parser.add_argument("--plot", type=Path, help="PNG of figures 2 and 12, instead of the table")
    asked = parser.parse_args()
    effort = QUICK if asked.quick else FULL
    if asked.plot is not None:
        plot(asked.plot, effort)
        return
    for setup in (setups.OPT_13B, setups.OPT_175B, setups.MISTRAL_7B):
        print(f"{setup.name}, {setup.n_slots:,} slots: {setup.cost()}")
    print(f"llm-d: {llm_d().shape.cost}; {llm_d().tenants}")
    for lengths in (setups.SHAREGPT, setups.ALPACA, setups.ONE_EXAMPLE, setups.CHATBOT, setups.OPENCHAT):
        print(lengths)
    print("four numbers: Max / Pow2 / Oracle / paged (ours); nothing is shed, broken off or cut short\n")
    print("| | what | published | ours |\n|---|---|---|---|")
    for name in asked.only:
        for row in FIGURES[name](effort):
            print(f"| {row.figure} | {row.what} | {row.published} | {row.ours} |", flush=True)


if __name__ == "__main__":
    main()
