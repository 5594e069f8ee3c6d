"""Splitbrain's checker: history in, verdict out.  Standard library only.

    from checker import Register, check

    result = check(events, Register(), timeout_s=60)
    print(result.verdict, result.reason)
"""

from __future__ import annotations

from checker.codecs.jsonl import FormatError, read_jsonl
from checker.history import History, HistoryBuilder, HistoryError, Operation
from checker.linearizability.check import check
from checker.log import check_log
from checker.models import (
    FAILED,
    ILLEGAL,
    UNKNOWN,
    CASRegister,
    Counter,
    FetchAndAdd,
    FIFOQueue,
    GrowOnlySet,
    KeyValue,
    Log,
    Model,
    ModelError,
    MultiRegister,
    Mutex,
    PriorityQueue,
    Register,
    Set,
    Stack,
    Topic,
    UnorderedQueue,
    VersionedRegister,
    parse_model,
)
from checker.verdict import Edge, Result, Verdict, Witness, worst

__all__ = [
    "FAILED",
    "ILLEGAL",
    "UNKNOWN",
    "CASRegister",
    "Counter",
    "Edge",
    "FIFOQueue",
    "FetchAndAdd",
    "FormatError",
    "GrowOnlySet",
    "History",
    "HistoryBuilder",
    "HistoryError",
    "KeyValue",
    "Log",
    "Model",
    "ModelError",
    "MultiRegister",
    "Mutex",
    "Operation",
    "PriorityQueue",
    "Register",
    "Result",
    "Set",
    "Stack",
    "Topic",
    "UnorderedQueue",
    "Verdict",
    "VersionedRegister",
    "Witness",
    "check",
    "check_log",
    "parse_model",
    "read_jsonl",
    "worst",
]
