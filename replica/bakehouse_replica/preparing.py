"""Makes ready what a request needs besides weights, a compiled grammar, before the scheduler knows the request.

That happens in a thread of its own, so that steps never wait for it. An abort that comes meanwhile is remembered
by the scheduler, and meets the request there.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace

from bakehouse_replica.core.errors import DeadlineExceeded
from bakehouse_replica.core.executor import Executor
from bakehouse_replica.core.types import Request


async def prepared(request: Request, executor: Executor, clock: Callable[[], float]) -> Request:
    """Lets the executor make ready what the request needs; returns it with the time that is left to it.

    Raises `DeadlineExceeded` where none is left, and what the executor refuses the request with.
    """
    begun_at = clock()
    preparing = asyncio.to_thread(executor.prepare, request.params)
    if request.timeout_s is None:
        await preparing
        return request
    late = DeadlineExceeded(f"the request's time limit of {request.timeout_s:g} s has passed")
    try:
        await asyncio.wait_for(preparing, request.timeout_s)
    except TimeoutError:
        raise late from None
    left_s = request.timeout_s - (clock() - begun_at)
    if left_s <= 0.0:
        raise late
    return replace(request, timeout_s=left_s)
