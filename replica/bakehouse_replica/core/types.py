"""The frozen messages that flow between gateway, scheduler and executor.

Ids are plain ints; text never appears here. Durations are seconds as float. `None` means "not given".
Positions count from 0 at the first prompt token; output indices count from 0 at the first output token, so
output index k of a request with P prompt tokens stands at position P + k.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from bakehouse_replica.core.counts import Series
from bakehouse_replica.core.sampling import SamplingParams, require
from bakehouse_replica.core.story import Story


class FinishReason(StrEnum):
    """Why a choice ended. Each choice gets exactly one."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


class FailureKind(StrEnum):
    """What went wrong with a choice that finished with `FinishReason.ERROR`."""

    DEADLINE = "deadline"
    NO_ROOM = "no_room"  # its KV cache cannot fit in the whole pool
    DRAW = "draw"  # its grammar broke, or its masks left no token to draw; its neighbours go on
    ENGINE = "engine"  # the executor failed: our bug or the machine's


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The cause carried by the terminal delta of a failed choice."""

    kind: FailureKind
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One call: a prompt and how to continue it, for `params.n` choices.

    `prior_output` is what an earlier replica has already emitted; it is replayed *as output*: it counts towards
    `max_tokens`, penalties, stop ids and usage, and emission continues at output index `len(prior_output)`.
    It may be non-empty only where `params.n` is 1. `first_choice`: which choice of the client's call choice 0 of
    this one is, for executors that tell them apart; deltas count from 0 in any case. `priority`: smaller is served
    first. `timeout_s` is the time that remains, so that it can cross machines whose clocks differ. `cache_salt`
    separates tenants: blocks are shared only under an equal salt.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    prior_output: tuple[int, ...] = ()
    first_choice: int = 0
    tenant: str = ""
    cache_salt: str = ""
    priority: int = 0
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        require(bool(self.prompt_ids), "prompt", "empty", "at least one token")
        require(not self.prior_output or self.params.n == 1, "prior_output", "given", "empty where n is above 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Asks for a draw after the last position of a chunk for each of `seeds`.

    More than one seed stands only on the step that forks a request into its choices, which are `choice`,
    `choice + 1`, …. `output_index` is the output index of the token to draw. `prompt_ids` is empty unless
    `params.has_penalties`, `output_ids` unless `params.needs_output`.
    """

    params: SamplingParams
    seeds: tuple[int, ...]
    output_index: int
    choice: int = 0
    prompt_ids: tuple[int, ...] = ()
    output_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Asks for the log-probabilities of prompt tokens that a chunk's rows predict.

    Row `first_row + i` of the chunk predicts `target_ids[i]`, which stands one position further on. With each
    come the `n_top` best tokens.
    """

    first_row: int
    target_ids: tuple[int, ...]
    n_top: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """The tokens `token_ids` of one sequence at positions `start`, `start + 1`, …: prefill and decode alike.

    `block_ids` is the whole block table up to the chunk's last position: position p lives in slot
    `p % block_size` of block `block_ids[p // block_size]`. `follows_draw`: the one token is not known yet, and
    `token_ids` is (0,): it is what the step before, `plan.step - 1`, draws for the same sequence.
    """

    sequence_id: int
    token_ids: tuple[int, ...]
    start: int
    block_ids: tuple[int, ...]
    sample: Sample | None = None
    score: Score | None = None
    follows_draw: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCopy:
    """Copy block `source` onto block `target` before the step's forward pass."""

    source: int
    target: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Everything an executor needs for one step; it keeps no state of its own but the KV cache."""

    step: int
    copies: tuple[BlockCopy, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """How likely one token was in its place: natural logarithm, and rank from 1.

    `top`: the best tokens there as (token id, log-probability), best first; as many as were asked for.
    """

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """What a step yields for one choice: one token, or several where it could look ahead.

    `logprobs` has one entry for each token where they were asked for, else none. `is_complete`: nothing may
    follow these tokens. `failure`: why this choice, and no other, cannot go on.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    is_complete: bool = False
    failure: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """The draws for one sequence, in the order of its `Sample.seeds`."""

    sequence_id: int
    draws: tuple[Draw, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """The log-probabilities of one chunk's `Score.target_ids`, in their order."""

    sequence_id: int
    logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step produced, in the plan's order.

    One `Sampled` for each chunk whose `sample` is given, one `Scored` for each whose `score` is.
    """

    step: int
    sampled: tuple[Sampled, ...]
    elapsed_s: float
    scored: tuple[Scored, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Counts of one choice so far. `cached_tokens`: prompt tokens not computed at first admission.

    Those of the prompt are the request's, equal in all of its choices: not to be summed over them. `queue_s`: how
    long the request waited in this replica's queue before its first admission, None where it had none; it is told
    besides, and equal counts are equal whatever it is.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    queue_s: float | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a request has cost one replica, all of its choices together.

    `block_seconds`: KV blocks over time, of a block with several holders an equal part for each (`core.account`).
    `computed_tokens`: of the prompt, for the first time; `cached_tokens`: of the prompt, found at first admission;
    `recomputed_tokens`: prompt and output once more, after a preemption or the loss of another replica;
    `generated_tokens`: drawn here and kept.
    """

    block_seconds: float
    computed_tokens: int
    cached_tokens: int
    recomputed_tokens: int
    generated_tokens: int

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(
            block_seconds=self.block_seconds + other.block_seconds,
            computed_tokens=self.computed_tokens + other.computed_tokens,
            cached_tokens=self.cached_tokens + other.cached_tokens,
            recomputed_tokens=self.recomputed_tokens + other.recomputed_tokens,
            generated_tokens=self.generated_tokens + other.generated_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDelta:
    """New output ids of one choice, from output index `start` on.

    The first and the last delta of a choice carry `usage`, counted up to that delta; the last carries `finish`.
    `logprobs` has one entry for each token where the request asked for them, else none. `prompt_logprobs` come
    once, with the first delta of choice 0: one entry for each prompt token but the first. `story` and `cost` of
    the whole request come with its last delta, which has a `finish`; they are told besides, and not compared.
    """

    request_id: str
    choice: int
    start: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishReason | None = None
    usage: Usage | None = None
    failure: Failure | None = None
    cost: Cost | None = field(default=None, compare=False)
    story: Story | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """One message of a response stream: what accumulated for a request since the previous message."""

    replica_id: str
    deltas: tuple[TokenDelta, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What an executor can hold and do in one step. `block_bytes`: of one block, 0 where it holds no tensors.

    `max_flights`: how many steps may have been begun whose result nobody has taken. With 2, the next step is
    planned and begun while one runs.
    """

    n_blocks: int
    block_size: int
    block_bytes: int = 0
    max_step_tokens: int
    max_sequences: int
    max_flights: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingPolicy:
    """The scheduler's choices within an executor's `Capacity`.

    `max_prefill_tokens`: prompt tokens per step while at least one sequence decodes, so that decode never
    starves. `max_long_prefills`: how many prompts longer than `long_prefill_tokens` may be in prefill at once,
    so that a short prompt is never stuck behind them. `max_waiting_requests`: the replica's own guard; the
    gateway's queue comes first.
    """

    max_model_len: int
    max_prefill_tokens: int = 512
    long_prefill_tokens: int = 256
    max_long_prefills: int = 1
    max_waiting_requests: int = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaCard:
    """What a replica is; fixed from the moment it is ready. Routers hash with these values only."""

    replica_id: str
    model_name: str
    model_digest: str
    hash_key: bytes = field(repr=False)
    block_size: int
    n_blocks: int
    vocabulary_size: int
    max_model_len: int
    max_sequences: int
    kv_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLoad:
    """A snapshot of one replica; `version` grows with every change.

    `waiting_tokens`: prompt tokens still to be computed, queued or in prefill. `resident`: a bounded sample of
    the block hashes in its prefix index, most recently used first, each cut to 8 bytes.
    """

    version: int
    n_running: int
    n_waiting: int
    waiting_tokens: int
    n_free_blocks: int
    n_cached_blocks: int
    n_held_blocks: int
    step_time_s: float
    resident: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStatus:
    """One replica as seen from outside: `problem` says in words why it does not serve, None where it does.

    `counted`: what it has counted, by the names of the one table. `age_s`: how long ago whoever tells it on asked
    for it; equal news is equal however old.
    """

    card: ReplicaCard
    load: ReplicaLoad
    problem: str | None = None
    counted: tuple[Series, ...] = ()
    age_s: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """Where a model comes from: an alias (`smollm2`), a folder, a GGUF file, a hub id, or `scripted:FILE`.

    `weights` `dummy`: random ones in the shapes of its configuration, whose own weights need not be there.
    """

    model: str = "smollm2"
    revision: str | None = None
    weights: Literal["checkpoint", "dummy"] = "checkpoint"
