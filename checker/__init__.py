"""Splitbrain's checker: it takes a history and returns a verdict.  Standard library only.

from checker import Register, check

result = check(events, Register(), timeout_s=60)
print(result.verdict, result.reason)
"""

from __future__ import annotations

from checker.codecs.jsonl import read_jsonl
from checker.codecs.source import FormatError
from checker.delivery import (
    check_consumer_progress,
    check_delay,
    check_replicas,
    check_transaction_visibility,
)
from checker.history import History, HistoryBuilder, HistoryError, Operation
from checker.linearizability.check import check
from checker.log import check_log
from checker.models import (
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
from checker.online import (
    OnlineFetchAndAdd,
    OnlineGrowOnlySet,
    OnlineLog,
    OnlineRegister,
    OnlineVersionedRegister,
)
from checker.queue import check_total_queue
from checker.sequential import check_sequential
from checker.sessions import check_sessions
from checker.sets import check_set, check_set_full
from checker.simple import check_bank, check_counter, check_exclusion, check_long_fork, check_unique_ids
from checker.transactions import check_transactions
from checker.verdict import Edge, Result, Verdict, Witness, worst
from checker.write_skew import check_write_skew

__all__ = [
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
    "OnlineFetchAndAdd",
    "OnlineGrowOnlySet",
    "OnlineLog",
    "OnlineRegister",
    "OnlineVersionedRegister",
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
    "check_bank",
    "check_consumer_progress",
    "check_counter",
    "check_delay",
    "check_exclusion",
    "check_log",
    "check_long_fork",
    "check_replicas",
    "check_sequential",
    "check_sessions",
    "check_set",
    "check_set_full",
    "check_total_queue",
    "check_transaction_visibility",
    "check_transactions",
    "check_unique_ids",
    "check_write_skew",
    "parse_model",
    "read_jsonl",
    "worst",
]
