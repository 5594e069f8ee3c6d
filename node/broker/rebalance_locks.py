"""Rebalance locks: which client of a group may consume a queue in order (codes 41 and 42).

A lock is a lease (R: RebalanceLockManager, 60 s) that its owner renews; once it has expired, another client of
the group can get it. The locks live in memory: after a change of masters every client has to ask again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

__all__ = ["LEASE_S", "MAX_LOCKS", "MessageQueue", "RebalanceLocks"]

LEASE_S = 60.0
"""R: rebalanceLockMaxLiveTime."""
MAX_LOCKS = 200_000
"""Locks held at once; when full, expired ones are dropped and further requests refused."""


class MessageQueue(NamedTuple):
    """A queue as clients name it."""

    topic: str
    broker_name: str
    queue_id: int


class _Lock(NamedTuple):
    client_id: str
    renewed_s: float


class RebalanceLocks:
    """The locks of all groups. `now_s` is a clock in seconds that never goes back, such as the loop's."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._locks: dict[str, dict[MessageQueue, _Lock]] = {}
        self._count = 0

    def lock(self, group: str, client_id: str, queues: Iterable[MessageQueue]) -> list[MessageQueue]:
        """Lock or renew; returns those of `queues` that the client now owns."""
        now = self._now_s()
        held = self._locks.setdefault(group, {})
        owned = []
        has_looked = False
        for queue in queues:
            lock = held.get(queue)
            if lock is not None and lock.client_id != client_id and now - lock.renewed_s < LEASE_S:
                continue
            if lock is None:
                if self._count >= MAX_LOCKS and not has_looked:  # only once: it scans all locks
                    self._drop_expired(now)
                    has_looked = True
                if self._count >= MAX_LOCKS:
                    continue
                self._count += 1
            held[queue] = _Lock(client_id, now)
            owned.append(queue)
        if held:
            self._locks[group] = held  # dropping expired locks may have removed the group while it was empty
        else:
            self._locks.pop(group, None)
        return owned

    def unlock(self, group: str, client_id: str, queues: Iterable[MessageQueue]) -> None:
        """Release those of `queues` that the client owns."""
        held = self._locks.get(group, {})
        for queue in queues:
            lock = held.get(queue)
            if lock is not None and lock.client_id == client_id:
                del held[queue]
                self._count -= 1
        if not held:
            self._locks.pop(group, None)

    def _drop_expired(self, now: float) -> None:
        """Forget expired locks."""
        for group, held in list(self._locks.items()):
            for queue in [queue for queue, lock in held.items() if now - lock.renewed_s >= LEASE_S]:
                del held[queue]
                self._count -= 1
            if not held:
                del self._locks[group]
