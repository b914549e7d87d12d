"""Prints whether greedy ids of the served float32 path equal the reference path's, and how far others go with it.

.venv/bin/python replica/benchmarks/agreement.py [--model smollm2] [--tokens 20480] [--threads 2] [--outputs 48]

Prompts are pieces of a fixed text. Float32 must draw the reference's ids; a difference is excused where the two
best logits of the reference lie within 1e-3, and every one is printed. Exits with 1 where one is not excused. Of
bfloat16 and int8 is printed how many ids they draw as float32 does before the first other one, and how often their
best next token is float32's behind the same text.
"""

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from bakehouse_replica.core.executor import execute
from bakehouse_replica.core.sampling import SamplingParams
from bakehouse_replica.core.types import Chunk, Sample, StepPlan
from fixed_text import BLOCK_SIZE, Model, PathName, argument_parser, open_model, score

PROMPT_LENGTHS = (3, 16, 17, 31, 32, 33, 64, 65, 100, 127, 128, 200, 256, 300, 400, 500)
EXCUSED_MARGIN = 1e-3
ROUNDED: tuple[PathName, ...] = ("bfloat16", "int8")


@dataclass(frozen=True)
class Continued:
    """What one prompt was continued with, and by how much each id's logit led the runner-up's."""

    output_ids: tuple[int, ...]
    margins: tuple[float, ...]


def prompts_of(model: Model) -> list[tuple[int, ...]]:
    """Pieces of the text, which begin at even distances."""
    stride = (len(model.text_ids) - max(PROMPT_LENGTHS)) // len(PROMPT_LENGTHS)
    return [
        model.text_ids[index * stride : index * stride + length] for index, length in enumerate(PROMPT_LENGTHS)
    ]


def continue_all(model: Model, path: PathName, n_outputs: int) -> list[Continued]:
    """Greedy continuations of all prompts, which run as one batch."""
    histories = [list(prompt) for prompt in prompts_of(model)]
    n_blocks = (max(PROMPT_LENGTHS) + n_outputs) // BLOCK_SIZE + 1
    executor = model.executor(path, len(histories) * n_blocks)
    params = SamplingParams(temperature=0.0, logprobs=2)
    starts = [0] * len(histories)
    margins: list[list[float]] = [[] for _ in histories]
    for output_index in range(n_outputs):
        chunks = tuple(
            Chunk(
                sequence_id=index,
                token_ids=tuple(history[starts[index] :]),
                start=starts[index],
                block_ids=tuple(range(index * n_blocks, index * n_blocks + (len(history) - 1) // BLOCK_SIZE + 1)),
                sample=Sample(params=params, seeds=(0,), output_index=output_index),
            )
            for index, history in enumerate(histories)
        )
        result = execute(executor, StepPlan(step=output_index, copies=(), chunks=chunks))
        for index, sampled in enumerate(result.sampled):
            (draw,) = sampled.draws
            (_, best), (_, second) = draw.logprobs[0].top
            margins[index].append(best - second)
            starts[index] = len(histories[index])
            histories[index] += draw.token_ids
    executor.close()
    return [
        Continued(tuple(history[length:]), tuple(leads))
        for history, length, leads in zip(histories, PROMPT_LENGTHS, margins, strict=True)
    ]


def equal_prefix(found: Sequence[int], wanted: Sequence[int]) -> int:
    """How many ids agree before the first that differs."""
    pairs = enumerate(zip(found, wanted, strict=True))
    return next((index for index, (one, other) in pairs if one != other), len(wanted))


def n_unexcused(found: Sequence[Continued], wanted: Sequence[Continued]) -> int:
    """Prints every difference; counts those that no close race excuses."""
    n = 0
    for index, (one, other) in enumerate(zip(found, wanted, strict=True)):
        at = equal_prefix(one.output_ids, other.output_ids)
        if at == len(other.output_ids):
            continue
        is_excused = other.margins[at] <= EXCUSED_MARGIN
        n += not is_excused
        print(
            f"  prompt {index} differs at output {at}: {one.output_ids[at]}, not {other.output_ids[at]}, which "
            f"led by {other.margins[at]:.1e}: {'excused' if is_excused else 'NOT EXCUSED'}"
        )
    return n


def best_next(model: Model, path: PathName) -> list[int]:
    """The likeliest token at each place of the text."""
    return [token.top[0][0] for token in score(model, path)]


def main() -> None:
    """Measure and print."""
    parser = argument_parser(__doc__)
    parser.add_argument("--outputs", type=int, default=48, help="ids drawn for each prompt")
    arguments = parser.parse_args()
    model = open_model(arguments)
    n_prompts, n_outputs = len(PROMPT_LENGTHS), arguments.outputs
    print(f"{model.files.name}, {n_prompts} prompts of {min(PROMPT_LENGTHS)} to {max(PROMPT_LENGTHS)} tokens")

    reference = continue_all(model, "reference", n_outputs)
    float32 = continue_all(model, "float32", n_outputs)
    n_failed = n_unexcused(float32, reference)
    equal = [equal_prefix(a.output_ids, b.output_ids) for a, b in zip(float32, reference, strict=True)]
    print(
        f"float32 and reference: {sum(equal)} of {n_prompts * n_outputs} greedy ids equal, {n_failed} not excused"
    )

    best_of_float32 = best_next(model, "float32")
    for path in ROUNDED:
        rounded = continue_all(model, path, n_outputs)
        equal = [equal_prefix(a.output_ids, b.output_ids) for a, b in zip(rounded, float32, strict=True)]
        n_whole = sum(n == n_outputs for n in equal)
        print(
            f"{path} and float32: {statistics.mean(equal):.1f} of {n_outputs} greedy ids equal before the first "
            f"other one (median {statistics.median(equal):g}, {n_whole} prompts to the end)"
        )
        n_equal = sum(one == other for one, other in zip(best_next(model, path), best_of_float32, strict=True))
        print(
            f"{path} and float32: {n_equal / len(best_of_float32):.2%} of {len(best_of_float32)} best next tokens "
            "equal, behind the text"
        )
    sys.exit(n_failed > 0)


if __name__ == "__main__":
    main()
