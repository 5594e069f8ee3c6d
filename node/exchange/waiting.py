"""Finds messages that RocketMQ 4.9 does not know how to handle and would never deliver: pending timer messages, and
those that POP consumers have in hand. Only a log without any can be moved."""

from __future__ import annotations

from node.broker.pop_checkpoints import OpenCheckpoints
from node.broker.timers import OpenTimers
from node.exchange.staging import ExchangeError
from node.store.record import RecordSummary

__all__ = ["Waiting"]


class Waiting:
    """Takes every message of a log, in order."""

    def __init__(self) -> None:
        self._timers = OpenTimers()
        self._checkpoints = OpenCheckpoints()

    def take(self, summary: RecordSummary) -> None:
        """Process the next message."""
        self._timers.dispatch(summary)
        self._checkpoints.dispatch(summary)

    def check(self) -> None:
        """Raises ExchangeError if any such message is left."""
        timers, in_hand = len(self._timers.due_ms), self._checkpoints.open_messages
        if timers or in_hand:
            raise ExchangeError(
                f"{timers} timer messages wait and POP consumers have {in_hand} messages in hand, which RocketMQ 4.9"
                " does not know: let them be delivered and acknowledged first"
            )
