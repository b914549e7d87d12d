"""From the demands of a workload to requests in token ids; prompts that are not given are drawn at random."""

from array import array
from collections.abc import Callable, Iterator, Sequence
from random import Random

from bakehouse_replica.core.errors import StartupError
from bakehouse_replica.core.sampling import SamplingParams
from bakehouse_replica.core.types import Request

from bakehouse_cluster.bench.workloads import Demand, Messages

Encode = Callable[[str | Messages], tuple[int, ...]]
# Longer than any context: such a request is refused anyhow, and its ids would only fill the memory.
MAX_PROMPT_TOKENS = 10_000_000
_ID = "I"  # unsigned, 32 bits: any vocabulary's ids are far below, so that the remainder is fair enough


class RequestWriter:
    """Writes requests one by one: random ids below `vocabulary_size`, drawn by `draw`; equal prefixes by number.

    `encode` gives the ids of prompts that are text or messages; it is asked for only where there are such.
    `timeout_s`: after which a client gives up.
    """

    def __init__(
        self, *, vocabulary_size: int, draw: Random, encode: Encode, timeout_s: float | None = None
    ) -> None:
        self._vocabulary_size = vocabulary_size
        self._draw = draw
        self._encode = encode
        self._timeout_s = timeout_s
        self._prefixes: dict[int, tuple[int, ...]] = {}
        self._n_written = 0

    def write(self, demand: Demand) -> Request:
        """A request whose answer has exactly the demanded length. Raises `StartupError`."""
        index, self._n_written = self._n_written, self._n_written + 1
        return Request(
            request_id=f"request-{index}",
            prompt_ids=self._prompt_ids(demand),
            params=SamplingParams(max_tokens=demand.n_output, seed=index),
            timeout_s=self._timeout_s,
        )

    def arriving(self, demands: Sequence[Demand]) -> Iterator[tuple[float, Request]]:
        """Each with its time of arrival, written when it is asked for: prompts of a long trace fill the memory."""
        for demand in demands:
            assert demand.arrival_s is not None, "an open loop needs times of arrival"
            yield demand.arrival_s, self.write(demand)

    def _prompt_ids(self, demand: Demand) -> tuple[int, ...]:
        given = demand.given
        if given is None:
            assert demand.n_input is not None, "a demand has a prompt or its length"
            if demand.n_input > MAX_PROMPT_TOKENS:
                raise StartupError(
                    f"{demand.origin or 'the workload'}: a prompt of {demand.n_input} tokens; "
                    f"the longest that is simulated has {MAX_PROMPT_TOKENS}"
                )
            prefix = () if demand.prefix_id is None else self._prefix(demand.prefix_id, demand.n_prefix)
            return prefix + self._random_ids(demand.n_input - len(prefix))
        if not isinstance(given, tuple):
            try:
                return self._encode(given)
            except StartupError as error:
                raise StartupError(f"{demand.origin}: {error.message}") from error
        if not 0 <= min(given) <= max(given) < self._vocabulary_size:
            raise StartupError(
                f"{demand.origin}: token ids from {min(given)} to {max(given)}; "
                f"the model's are from 0 to {self._vocabulary_size - 1}"
            )
        return given

    def _prefix(self, prefix_id: int, n_tokens: int) -> tuple[int, ...]:
        if prefix_id not in self._prefixes:
            self._prefixes[prefix_id] = self._random_ids(n_tokens)
        return self._prefixes[prefix_id]

    def _random_ids(self, n_tokens: int) -> tuple[int, ...]:
        numbers = array(_ID, self._draw.randbytes(array(_ID).itemsize * n_tokens))
        return tuple([number % self._vocabulary_size for number in numbers])
