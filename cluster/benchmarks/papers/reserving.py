"""The systems that PagedAttention was compared with: they reserve one contiguous range of slots a request.

A slot holds the keys and values of one token. `ReservingScheduler` stands in for Orca as the paper's section 6.1
re-implements it: iteration-level batching, first come first served, whole prompts in one step, and a buddy
allocator that places the reservations (Kwon et al. 2023, arXiv 2309.06180). It speaks the messages of our own
scheduler, so that one loop and one cost model play both.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count

from bakehouse_replica.core.errors import InvalidRequest
from bakehouse_replica.core.types import (
    Chunk,
    FinishReason,
    Request,
    Sample,
    StepPlan,
    StepResult,
    TokenDelta,
)

MAX_MODEL_LEN = 2048  # of the models in the paper

# How many slots a request of so many prompt and output tokens is given; Pow2 and Oracle look into the future.
Reserve = Callable[[int, int], int]


def reserve_max(n_prompt: int, n_output: int) -> int:
    """The longest context there may be."""
    return MAX_MODEL_LEN


def reserve_pow2(n_prompt: int, n_output: int) -> int:
    """The output rounded up to a power of two, so at most twice what it needs."""
    return n_prompt + (1 << (n_output - 1).bit_length())


def reserve_oracle(n_prompt: int, n_output: int) -> int:
    """What the request will turn out to need."""
    return n_prompt + n_output


RESERVES: dict[str, Reserve] = {"Max": reserve_max, "Pow2": reserve_pow2, "Oracle": reserve_oracle}


class BuddyAllocator:
    """Ranges of 2^k slots, halved and joined again with their other half; the pool may be of any size.

    A range's buddy begins at `begin ^ size`. The pool is cut into descending powers of two, so each begins at a
    multiple of its size, and no two of them are buddies.
    """

    def __init__(self, n_slots: int) -> None:
        self._free: defaultdict[int, set[int]] = defaultdict(set)
        begin = 0
        while begin < n_slots:
            size = 1 << ((n_slots - begin).bit_length() - 1)
            self._free[size].add(begin)
            begin += size

    def allocate(self, n_slots: int) -> tuple[int, int] | None:
        """Begin and size of a range that holds `n_slots`; None where no free range is long enough."""
        wanted = 1 << (n_slots - 1).bit_length()
        fitting = [size for size, begins in self._free.items() if begins and size >= wanted]
        if not fitting:
            return None
        size = min(fitting)
        begin = min(self._free[size])
        self._free[size].remove(begin)
        while size > wanted:
            size //= 2
            self._free[size].add(begin + size)
        return begin, size

    def release(self, begin: int, size: int) -> None:
        """Gives back a range of `allocate`."""
        while begin ^ size in self._free[size]:
            self._free[size].remove(begin ^ size)
            begin, size = min(begin, begin ^ size), size * 2
        self._free[size].add(begin)


@dataclass(frozen=True, slots=True)
class Shares:
    """What a pool's memory is used for, in shares of all of it.

    `tokens` holds state of tokens that have been computed. `reserved` will, by the end of a request that runs.
    `internal` is given to a request that will never need it. `external` is what nobody has been given: idle, or
    lost to placement.
    """

    tokens: float
    reserved: float
    internal: float
    external: float


@dataclass(slots=True, eq=False)
class _Running:
    request: Request
    sequence_id: int
    n_output_limit: int
    n_given: int
    place: tuple[int, int]
    n_output: int = 0

    @property
    def n_computed(self) -> int:
        return len(self.request.prompt_ids) + self.n_output


class ReservingScheduler:
    """Iteration-level batching over reserved ranges; requests have one choice and always run to their length."""

    def __init__(self, *, n_slots: int, reserve: Reserve, max_step_tokens: int, max_sequences: int) -> None:
        self._n_slots = n_slots
        self._reserve = reserve
        self._max_step_tokens = max_step_tokens
        self._max_sequences = max_sequences
        self._allocator = BuddyAllocator(n_slots)
        self._waiting: deque[tuple[Request, int]] = deque()  # with the length of its output
        self._running: list[_Running] = []
        self._steps, self._sequence_ids = count(), count()

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._waiting or self._running)

    def add(self, request: Request, now: float) -> None:
        """Queues a request. Raises `InvalidRequest` where it could never be placed or has no length."""
        n_output, n_prompt = request.params.max_tokens, len(request.prompt_ids)
        if not n_output or request.params.n != 1:
            raise InvalidRequest("a reservation needs max_tokens, and n of 1", "max_tokens")
        n_given = self._reserve(n_prompt, n_output)
        n_largest = 1 << (self._n_slots.bit_length() - 1)  # of the pool's ranges
        if not n_prompt + n_output <= n_given <= n_largest or n_prompt > self._max_step_tokens:
            raise InvalidRequest(f"{n_prompt} and {n_output} tokens do not fit into {n_given} slots", "prompt")
        self._waiting.append((request, n_output))

    def plan(self, now: float) -> StepPlan | None:
        """Every running request's next token, and the whole prompts of those that find a place."""
        chunks = [self._decode(one) for one in self._running]
        n_left = self._max_step_tokens - len(chunks)
        for one in self._admitted(n_left):
            chunks.append(self._chunk(one, one.request.prompt_ids, 0))
            self._running.append(one)
        return StepPlan(step=next(self._steps), copies=(), chunks=tuple(chunks)) if chunks else None

    def apply(self, result: StepResult, now: float) -> list[TokenDelta]:
        """Books one token for each running request, and lets go of those that are complete."""
        deltas = []
        for one, sampled in zip(self._running, result.sampled, strict=True):
            finish = FinishReason.LENGTH if one.n_output + 1 == one.n_output_limit else None
            deltas.append(
                TokenDelta(
                    request_id=one.request.request_id,
                    choice=0,
                    start=one.n_output,
                    token_ids=sampled.draws[0].token_ids,
                    finish=finish,
                )
            )
            one.n_output += 1
            if finish is not None:
                self._allocator.release(*one.place)
        self._running = [one for one in self._running if one.n_output < one.n_output_limit]
        return deltas

    def shares(self) -> Shares:
        """As of now; the newest token of a request counts, for the next step writes it."""
        n_tokens = sum(one.n_computed for one in self._running)
        n_final = sum(len(one.request.prompt_ids) + one.n_output_limit for one in self._running)
        n_given = sum(one.n_given for one in self._running)
        return Shares(
            tokens=n_tokens / self._n_slots,
            reserved=(n_final - n_tokens) / self._n_slots,
            internal=(n_given - n_final) / self._n_slots,
            external=1 - n_given / self._n_slots,
        )

    def _admitted(self, n_tokens_left: int) -> Iterator[_Running]:
        n_running = len(self._running)
        while self._waiting and n_running < self._max_sequences:
            request, n_output = self._waiting[0]
            n_prompt = len(request.prompt_ids)
            if n_prompt > n_tokens_left:
                return
            n_given = self._reserve(n_prompt, n_output)
            place = self._allocator.allocate(n_given)
            if place is None:
                return
            self._waiting.popleft()
            n_tokens_left -= n_prompt
            n_running += 1
            yield _Running(
                request=request,
                sequence_id=next(self._sequence_ids),
                n_output_limit=n_output,
                n_given=n_given,
                place=place,
            )

    def _decode(self, one: _Running) -> Chunk:
        return self._chunk(one, (0,), one.n_computed - 1)

    def _chunk(self, one: _Running, token_ids: tuple[int, ...], start: int) -> Chunk:
        sample = Sample(params=one.request.params, seeds=(0,), output_index=one.n_output)
        return Chunk(sequence_id=one.sequence_id, token_ids=token_ids, start=start, block_ids=(), sample=sample)
