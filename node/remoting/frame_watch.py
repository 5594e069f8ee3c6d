"""A frame that was begun must be complete in time: trickling bytes must not hold memory for ever."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from node.remoting.connection import Connection
    from node.remoting.endpoint import Endpoint

__all__ = ["FrameWatch"]


class FrameWatch:
    """The unfinished frame of one connection: its account and its timer."""

    __slots__ = ("_connection", "_endpoint", "_started_s", "_timer", "is_unfinished")

    def __init__(self, connection: Connection, endpoint: Endpoint) -> None:
        self._connection = connection
        self._endpoint = endpoint
        self._started_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self.is_unfinished = False
        """Whether there was an unfinished frame when `look` was last called."""

    def look(self, frame_completed: bool) -> None:
        """Keep the account and the timer of the unfinished frame after new bytes have come."""
        connection, endpoint = self._connection, self._endpoint
        pending_bytes = connection.pending_bytes
        if frame_completed or not self.is_unfinished:
            self._started_s = connection.last_activity_s
        self.is_unfinished = pending_bytes > 0
        endpoint.unfinished.set(connection, pending_bytes)
        if endpoint.unfinished.total_bytes > endpoint.limits.max_total_unfinished_bytes:
            greediest = endpoint.unfinished.greediest()
            if greediest is not None:
                greediest.give_up("too many bytes of unfinished frames, most of them here")
        if connection.is_closing:
            return
        if pending_bytes and self._timer is None:
            self._timer = connection.loop.call_later(endpoint.limits.frame_timeout_s, self._check)

    def begin_again(self) -> None:
        """Reading goes on after we did not: the time counts from now."""
        self._started_s = self._connection.loop.time()

    def end(self) -> None:
        """The connection is gone."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._endpoint.unfinished.set(self._connection, 0)

    def _check(self) -> None:
        self._timer = None
        connection, limits = self._connection, self._endpoint.limits
        pending_bytes = connection.pending_bytes
        if not pending_bytes or connection.is_closing:
            return
        now_s = connection.loop.time()
        allowed_s = limits.frame_timeout_s + pending_bytes / limits.frame_min_bytes_per_s
        left_s = self._started_s + allowed_s - now_s
        if connection.is_paused:  # it is we who do not read
            left_s = limits.frame_timeout_s
        if left_s <= 0:
            connection.give_up(f"a frame was begun {now_s - self._started_s:.1f} s ago and is not complete")
            return
        self._timer = connection.loop.call_later(left_s, self._check)
