"""What became of a gateway's latest requests and why, by the ids that their clients know.

A request is found by its own id and by that of its reply, and only by whoever comes with a key of the same tenant:
of everybody else's there is no sign. While it runs, its explanation is made anew whenever somebody asks; once it
is over, it is kept as JSON, the latest ones within two bounds.
"""

import asyncio
import json
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import count

from bakehouse_replica.core.errors import UnknownRequest
from bakehouse_replica.core.story import ToldStory

from bakehouse_router.api.explained import add_stories, explanation, ids_without_story
from bakehouse_router.api.token_json import Json
from bakehouse_router.request_report import RequestReport

MAX_REQUESTS = 2048
MAX_BYTES = 16 * 1024 * 1024
# What is more, as of a request of many prompts on many replicas, is told without its prompts: one request is not
# to drive out all others.
MAX_BYTES_EACH = 256 * 1024
# What the tables take for one request beside its explanation.
_OVERHEAD_BYTES = 1024

Ask = Callable[[Sequence[str]], Awaitable[tuple[ToldStory, ...]]]
Report = Callable[[], RequestReport]
_Key = tuple[str, str]  # tenant, id


@dataclass(frozen=True, slots=True)
class _Ended:
    keys: tuple[_Key, ...]
    body: bytes

    @property
    def n_bytes(self) -> int:
        return len(self.body) + _OVERHEAD_BYTES


class _Together:
    """Asks replicas for all who wait for stories in one call: while one is on its way, the others gather for the
    next.

    Each call goes to all replicas. One for each asker took over a third of the tokens a second from 300 streams
    while 32 clients asked at a time (two replicas, two cores); so many askers have one call at a time now.
    """

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._turn = asyncio.Lock()
        self._gathered: dict[str, None] = {}
        self._next: asyncio.Task[tuple[ToldStory, ...]] | None = None  # will ask for what is gathered
        self._asking: asyncio.Task[tuple[ToldStory, ...]] | None = None  # kept, as all its askers may have gone

    async def ask(self, request_ids: Sequence[str]) -> tuple[ToldStory, ...]:
        """The stories of these, and of what others have asked for meanwhile."""
        self._gathered.update(dict.fromkeys(request_ids))
        if self._next is None:
            self._next = asyncio.create_task(self._ask_once())
        return await asyncio.shield(self._next)  # whoever asked first may go; the others wait on

    async def _ask_once(self) -> tuple[ToldStory, ...]:
        async with self._turn:
            self._asking, self._next = self._next, None
            request_ids, self._gathered = tuple(self._gathered), {}
            return await self._ask(request_ids)


class Explanations:
    """The explanations of one gateway's requests. `ask`: the replicas, for stories that they have not told yet."""

    def __init__(self, ask: Ask, *, max_requests: int = MAX_REQUESTS, max_bytes: int = MAX_BYTES) -> None:
        self._together = _Together(ask)
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._live: dict[_Key, Report] = {}
        self._ended: OrderedDict[int, _Ended] = OrderedDict()  # oldest first
        self._numbers: dict[_Key, int] = {}
        self._count = count()
        self.n_bytes = 0

    def __len__(self) -> int:
        """Requests that are over and can be explained."""
        return len(self._ended)

    def begin(self, tenant: str, ids: Sequence[str], report: Report) -> None:
        """A request of `tenant` is under way; `report` tells of it at any time."""
        for request_id in ids:
            self._live[tenant, request_id] = report

    def end(self, tenant: str, ids: Sequence[str], report: Report, last: RequestReport) -> None:
        """What `report` told of is over, as `last` tells. An id that has come again is the later request's."""
        keys = tuple((tenant, request_id) for request_id in dict.fromkeys(ids))
        for key in keys:
            if self._live.get(key) == report:
                del self._live[key]
        ended = _Ended(keys, _within_bounds(explanation(last, is_over=True)))
        number = next(self._count)
        self._ended[number] = ended
        self._numbers.update(dict.fromkeys(keys, number))
        self.n_bytes += ended.n_bytes
        while len(self._ended) > self._max_requests or self.n_bytes > self._max_bytes:
            self._drop_oldest()

    async def explain(self, tenant: str, request_id: str) -> Json:
        """The explanation of a request of `tenant`, by its own id or its reply's.

        Asks replicas, which takes as long as a step or two, at most twice as long as `ask` may take. Raises
        `UnknownRequest` where it is not known here, whoever else's it may be.
        """
        key = (tenant, request_id)
        if key in self._live:
            report = self._live[key]()
            for attempt in report.attempts:
                if attempt.ended_at is None:
                    attempt.route()
            told = explanation(report, is_over=False)
        elif key in self._numbers:
            told = json.loads(self._ended[self._numbers[key]].body)
        else:
            raise UnknownRequest(
                "no request of yours with this id is known to this gateway, which knows the latest "
                f"{self._max_requests} that it has served itself, fewer where they are large; where there are "
                "several gateways, another one may know it"
            )
        missing = ids_without_story(told)
        if missing:
            add_stories(told, await self._together.ask(missing))
        return told

    def _drop_oldest(self) -> None:
        number, ended = self._ended.popitem(last=False)
        self.n_bytes -= ended.n_bytes
        for key in ended.keys:
            if self._numbers.get(key) == number:
                del self._numbers[key]


def _within_bounds(told: Json) -> bytes:
    body = json.dumps(told, separators=(",", ":")).encode()
    if len(body) > MAX_BYTES_EACH:
        n_left_out = len(told["prompts"]) + told["n_prompts_left_out"]  # type: ignore[arg-type, operator]
        body = json.dumps({**told, "prompts": [], "n_prompts_left_out": n_left_out}).encode()
    return body
