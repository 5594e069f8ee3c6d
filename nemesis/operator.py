"""What nemeses have in common that act as an operator: request, check, and request again until it is done."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from nemesis.target import Operator, ReplicaView, Target

__all__ = ["OPERATION_TIMEOUT_S", "find_view", "insist", "operator_of", "views_of"]

OPERATION_TIMEOUT_S = 15.0
"""How long an operator repeats a request that is refused: longer than an election with default timings."""

LOOK_TIMEOUT_S = 0.5
"""Limit for one replica to report its status. One that is cut off or stopped must not hold up the others."""

RETRY_S = 0.1


def operator_of(target: Target) -> Operator:
    """The target's operator. Raises ValueError if the system has none."""
    if target.operator is None:
        raise ValueError("this system offers no operator requests")
    return target.operator


async def insist(attempt: Callable[[], Awaitable[None]], *, timeout_s: float = OPERATION_TIMEOUT_S) -> None:
    """Try until it works. Raises the last RuntimeError when time is up."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + timeout_s
    while True:
        try:
            await attempt()
            return
        except RuntimeError:
            if loop.time() > deadline_s:
                raise
            await asyncio.sleep(RETRY_S)


async def views_of(target: Target) -> list[ReplicaView]:
    """What each replica that answers reports about itself."""
    operator = operator_of(target)
    answers = await asyncio.gather(*(operator.view(host, timeout_s=LOOK_TIMEOUT_S) for host in target.hosts))
    return [answer for answer in answers if answer is not None]


async def find_view(
    target: Target, is_it: Callable[[ReplicaView], bool], *, timeout_s: float = OPERATION_TIMEOUT_S
) -> ReplicaView | None:
    """The first replica whose report meets the condition; None when none does in time."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + timeout_s
    while True:
        for view in await views_of(target):
            if is_it(view):
                return view
        if loop.time() > deadline_s:
            return None
        await asyncio.sleep(RETRY_S)
