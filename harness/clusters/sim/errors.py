"""What can go wrong with a simulation itself, as opposed to what it simulates."""

from __future__ import annotations

from harness.errors import HarnessError

__all__ = ["Deadlock", "NotSimulated", "Runaway", "SimulationError"]


class SimulationError(HarnessError):
    """A simulated run cannot continue, or was asked for something that simulation does not support."""


class Deadlock(SimulationError):
    """Nothing is ready, no timer is set, and the run has not ended: it would wait forever."""


class Runaway(SimulationError):
    """Too many steps without any progress of time: some code spins instead of waiting."""


class NotSimulated(SimulationError):
    """Code asked the event loop for something of the real world (a thread, a file descriptor, a name)."""
