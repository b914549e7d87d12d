"""A model on the text of `texts/`, through the executor that serves it: what the quality scripts share."""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from bakehouse_kernels.api import Ops
from bakehouse_kernels.cpu.ops import CpuOps
from bakehouse_kernels.dispatch import default_block_size, kv_dtype_beside
from bakehouse_kernels.reference import ReferenceOps
from bakehouse_replica.core.executor import Executor, execute
from bakehouse_replica.core.types import Capacity, Chunk, ModelSource, Score, StepPlan, TokenLogprob
from bakehouse_replica.executors.in_process import build_executor
from bakehouse_replica.model.spec import ModelSpec, read_spec
from bakehouse_replica.model.weights import load_weights
from bakehouse_replica.source import ModelFiles, open_source
from bakehouse_replica.tokenizer_files import load_tokenizer

PathName = Literal["reference", "float32", "bfloat16", "int8"]
"""By which operations: their definitions in plain torch, or those that are served."""

TEXT = Path(__file__).parent / "texts" / "news_from_nowhere.txt"
CPU = torch.device("cpu")
WINDOW = 512  # tokens that see each other
N_WINDOWS_PER_STEP = 4
MAX_STEP_TOKENS = N_WINDOWS_PER_STEP * WINDOW
BLOCK_SIZE = default_block_size(CPU)


@dataclass(frozen=True)
class Model:
    """A model's files and shape, the text in its tokens, and how many threads it gets."""

    files: ModelFiles
    spec: ModelSpec
    text_ids: tuple[int, ...]
    n_threads: int

    def executor(self, path: PathName, n_blocks: int) -> Executor:
        """The model on one path, with a cache of `n_blocks` blocks of `BLOCK_SIZE`."""
        weights = load_weights(self.files, self.spec, dtype=torch.float32, device=CPU, rotated=path == "int8")
        capacity = Capacity(
            n_blocks=n_blocks, block_size=BLOCK_SIZE, max_step_tokens=MAX_STEP_TOKENS, max_sequences=64
        )
        return build_executor(spec=self.spec, weights=weights, ops=self._ops(path), capacity=capacity)

    def _ops(self, path: PathName) -> Ops:
        if path == "reference":
            return ReferenceOps()
        return CpuOps(self.n_threads, weight_format=path, kv_dtype=kv_dtype_beside(path))


def open_model(arguments: argparse.Namespace) -> Model:
    """The model that `--model`, `--tokens` and `--threads` ask for."""
    torch.set_num_threads(arguments.threads)
    files = open_source(ModelSource(model=arguments.model))
    ids = load_tokenizer(files).encode(TEXT.read_text(), add_special_tokens=False)
    if len(ids) < arguments.tokens:
        raise SystemExit(f"--tokens is {arguments.tokens}; the text has {len(ids)} for this model")
    return Model(files, read_spec(files), tuple(ids[: arguments.tokens]), arguments.threads)


def argument_parser(description: str | None) -> argparse.ArgumentParser:
    """The options that all quality scripts have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=40 * WINDOW, help="from the beginning of the text")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    return parser


def score(model: Model, path: PathName) -> list[TokenLogprob]:
    """How likely each token of the text was after those before it in its window, with the likeliest in its place.

    The first token of a window is not scored.
    """
    n_blocks = -(-WINDOW // BLOCK_SIZE)
    executor = model.executor(path, N_WINDOWS_PER_STEP * n_blocks)
    scored: list[TokenLogprob] = []
    for step, windows in enumerate(_batches(model.text_ids)):
        chunks = tuple(
            Chunk(
                sequence_id=index,
                token_ids=window,
                start=0,
                block_ids=tuple(range(index * n_blocks, index * n_blocks + -(-len(window) // BLOCK_SIZE))),
                score=Score(first_row=0, target_ids=window[1:], n_top=1),
            )
            for index, window in enumerate(windows)
        )
        result = execute(executor, StepPlan(step=step, copies=(), chunks=chunks))
        scored += [logprob for row in result.scored for logprob in row.logprobs]
    executor.close()
    return scored


def _batches(ids: Sequence[int]) -> Iterator[list[tuple[int, ...]]]:
    windows = [tuple(ids[begin : begin + WINDOW]) for begin in range(0, len(ids), WINDOW)]
    for begin in range(0, len(windows), N_WINDOWS_PER_STEP):
        yield [window for window in windows[begin : begin + N_WINDOWS_PER_STEP] if len(window) > 1]
