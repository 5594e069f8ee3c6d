"""What RocketMQ 4.9 does not know, and would therefore never deliver: timer messages that wait, and messages that POP
consumers have in hand. A log in which nothing of it is left can be taken over."""

from __future__ import annotations

from node.broker.pop_checkpoints import OpenCheckpoints
from node.broker.timers import OpenTimers
from node.exchange.staging import ExchangeError
from node.store.record import RecordSummary

__all__ = ["Waiting"]


class Waiting:
    """Fed with every message of a log, in its order."""

    def __init__(self) -> None:
        self._timers = OpenTimers()
        self._checkpoints = OpenCheckpoints()

    def take(self, summary: RecordSummary) -> None:
        """The next message."""
        self._timers.dispatch(summary)
        self._checkpoints.dispatch(summary)

    def check(self) -> None:
        """Raises ExchangeError where anything waits."""
        timers, in_hand = len(self._timers.due_ms), self._checkpoints.open_messages
        if timers or in_hand:
            raise ExchangeError(
                f"{timers} timer messages wait and POP consumers have {in_hand} messages in hand, which RocketMQ 4.9"
                " does not know: let them be delivered and acknowledged first"
            )
