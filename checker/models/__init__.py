"""Sequential specifications: how each object behaves when it is used by one client at a time."""

from __future__ import annotations

from checker.models.base import ILLEGAL, UNKNOWN, Model, ModelError
from checker.models.collections import (
    FIFOQueue,
    GrowOnlySet,
    PriorityQueue,
    Set,
    Stack,
    UnorderedQueue,
)
from checker.models.counters import Counter, FetchAndAdd
from checker.models.keyvalue import KeyValue
from checker.models.logs import Log, Topic
from checker.models.registers import CASRegister, MultiRegister, Mutex, Register, VersionedRegister
from checker.models.registry import MODELS, parse_model

__all__ = [
    "ILLEGAL",
    "MODELS",
    "UNKNOWN",
    "CASRegister",
    "Counter",
    "FIFOQueue",
    "FetchAndAdd",
    "GrowOnlySet",
    "KeyValue",
    "Log",
    "Model",
    "ModelError",
    "MultiRegister",
    "Mutex",
    "PriorityQueue",
    "Register",
    "Set",
    "Stack",
    "Topic",
    "UnorderedQueue",
    "VersionedRegister",
    "parse_model",
]
