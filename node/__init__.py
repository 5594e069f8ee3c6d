"""The replica node: a message broker with a replicated log, its store, its name server and its client."""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0"
