"""The papers' models, machines and lengths, as far as they are known, and the assumptions that fill the rest.

A cost model is made from a machine's data sheet, not fitted to any figure that it is to reproduce:

    a   the weights are read once a step, at the memory's bandwidth, and the host takes HOST_STEP_S
    b   2 operations for each parameter and prompt token, at MFU of the peak
    c   the same for a decode row: weights are read once for all rows, but each row is computed
    d   keys and values of a token of context are read, at the memory's bandwidth
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from random import Random

from bakehouse_replica.core.capacity import KVShape
from bakehouse_replica.core.sampling import SamplingParams
from bakehouse_replica.core.scheduler import Scheduler
from bakehouse_replica.core.types import Capacity, Request, SchedulingPolicy
from bakehouse_replica.executors.simulated import StepCost
from benchmarks.papers.playing import Machine, Visit
from benchmarks.papers.reserving import MAX_MODEL_LEN, RESERVES, ReservingScheduler

BLOCK_SIZE = 16
MFU = 0.5
HOST_STEP_S = 3e-3
MAX_STEP_TOKENS = 2560  # vLLM's, at the time of the paper
VOCABULARY_SIZE = 50_000
SYSTEMS = ("Max", "Pow2", "Oracle", "paged")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A model on a machine; FLOP/s and bytes/s are those of all its GPUs together."""

    name: str
    n_parameters: float
    n_layers: int
    hidden_size: int
    n_slots: int
    flop_per_s: float
    byte_per_s: float
    max_sequences: int = 256

    @property
    def kv_shape(self) -> KVShape:
        """Of one block; keys and values have 16 bits, one key-value head each query head."""
        return KVShape(
            n_layers=self.n_layers, n_kv_heads=1, head_dim=self.hidden_size, element_bytes=2, block_size=BLOCK_SIZE
        )

    def cost(self) -> StepCost:
        """By the data sheet, see above."""
        row_s = 2 * self.n_parameters / (MFU * self.flop_per_s)
        return StepCost(
            step_s=2 * self.n_parameters / self.byte_per_s + HOST_STEP_S,
            prefill_token_s=row_s,
            decode_sequence_s=row_s,
            context_token_s=self.kv_shape.block_bytes / BLOCK_SIZE / self.byte_per_s,
        )

    def machine(self, system: str, *, block_size: int = BLOCK_SIZE) -> Machine:
        """One of `SYSTEMS`, empty."""
        if system != "paged":
            return ReservingScheduler(
                n_slots=self.n_slots,
                reserve=RESERVES[system],
                max_step_tokens=MAX_STEP_TOKENS,
                max_sequences=self.max_sequences,
            )
        return our_scheduler(
            Capacity(
                n_blocks=self.n_slots // block_size,
                block_size=block_size,
                max_step_tokens=MAX_STEP_TOKENS,
                max_sequences=self.max_sequences,
            )
        )


A100_40 = (312e12, 1.555e12)
A100_80 = (312e12, 2.039e12)
OPT_13B = Setup(
    name="OPT-13B, 1 A100-40GB",
    n_parameters=13e9,
    n_layers=40,
    hidden_size=5120,
    n_slots=15_728,
    flop_per_s=A100_40[0],
    byte_per_s=A100_40[1],
)
OPT_175B = Setup(
    name="OPT-175B, 8 A100-80GB",
    n_parameters=175e9,
    n_layers=96,
    hidden_size=12_288,
    n_slots=60_100,
    flop_per_s=8 * A100_80[0],
    byte_per_s=8 * A100_80[1],
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Tokens of prompts and outputs, each log-normal with this mean and coefficient of variation, independent.

    `n_prefix`: tokens that all prompts begin with, besides. What is beyond `max_model_len` in all is cut off, and
    of a prompt what is beyond half of it.
    """

    name: str
    prompt_mean: float
    prompt_cv: float
    output_mean: float
    output_cv: float
    n_prefix: int = 0
    max_model_len: int = MAX_MODEL_LEN

    def visits(self, n_requests: int, *, rate: float, seed: int, n: int = 1) -> list[Visit]:
        """Poisson arrivals, `rate` a second; all at once where it is infinite. The same seed draws the same."""
        draw = Random(seed)
        gaps = [draw.expovariate(1.0) / rate for _ in range(n_requests)]
        prefix = tuple(draw.choices(range(VOCABULARY_SIZE), k=self.n_prefix))
        return [
            Visit(arrival_s=arrival_s, request=self._request(str(index), prefix, draw, n))
            for index, arrival_s in enumerate(accumulate(gaps))
        ]

    def _request(self, request_id: str, prefix: Sequence[int], draw: Random, n: int) -> Request:
        n_prompt = min(_log_normal(self.prompt_mean, self.prompt_cv, draw), self.max_model_len // 2)
        n_left = self.max_model_len - self.n_prefix - n_prompt
        n_output = min(_log_normal(self.output_mean, self.output_cv, draw), n_left)
        own = draw.choices(range(VOCABULARY_SIZE), k=n_prompt)
        return Request(
            request_id=request_id,
            prompt_ids=(*prefix, *own),
            params=SamplingParams(temperature=0.0, seed=0, max_tokens=n_output, n=n),
        )


# Means: the paper's section 6.1. The spread of ShareGPT's outputs follows from its figure 2: of Max's memory
# 13.3 % waits for tokens to come, 299 slots for each of 7 requests, and over time that is mean * (1 + cv^2) / 2.
# The other spreads are guesses.
SHAREGPT = Lengths(name="ShareGPT", prompt_mean=161.31, prompt_cv=1.2, output_mean=337.99, output_cv=0.88)
ALPACA = Lengths(name="Alpaca", prompt_mean=19.31, prompt_cv=0.7, output_mean=58.45, output_cv=1.0)


# Few-shot translation (figure 16): 80 tokens of one example, 341 of five. How long sentences are is a guess.
ONE_EXAMPLE = Lengths(
    name="WMT16, 1 example", prompt_mean=34, prompt_cv=0.6, output_mean=45, output_cv=0.6, n_prefix=80
)
FIVE_EXAMPLES = replace(ONE_EXAMPLE, name="WMT16, 5 examples", n_prefix=341)
CHATBOT = Lengths(name="chatbot", prompt_mean=1024, prompt_cv=0.0, output_mean=337.99, output_cv=0.88)
# Sarathi-Serve's: openchat_sharegpt4, whose medians are 1730 and 415.
MISTRAL_7B = Setup(
    name="Mistral-7B, 1 A100-80GB",
    n_parameters=7.2e9,
    n_layers=32,
    hidden_size=1024,  # of keys: 8 key-value heads of 128
    n_slots=400_000,
    flop_per_s=A100_80[0],
    byte_per_s=A100_80[1],
)
OPENCHAT = Lengths(
    name="openchat_sharegpt4",
    prompt_mean=1730,
    prompt_cv=0.7,
    output_mean=415,
    output_cv=0.7,
    max_model_len=8192,
)


def our_scheduler(capacity: Capacity, *, max_prefill_tokens: int | None = None) -> Scheduler:
    """The production scheduler; by default as the papers' systems, whose prompts hold decodes up."""
    return Scheduler(
        capacity=capacity,
        policy=SchedulingPolicy(
            max_model_len=capacity.n_blocks * capacity.block_size,
            max_prefill_tokens=max_prefill_tokens or capacity.max_step_tokens,
            max_waiting_requests=1_000_000,
        ),
        model_digest="",
        hash_key=b"",
    )


def _log_normal(mean: float, cv: float, draw: Random) -> int:
    variance = math.log1p(cv * cv)
    return max(1, round(draw.lognormvariate(math.log(mean) - variance / 2, math.sqrt(variance))))
