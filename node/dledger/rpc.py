"""The codes of the DLedger protocol and the errors that carry them.

Requests travel in remoting frames with one of these request codes and a body (`messages.py`); the answer's remoting
code is SUCCESS and its body carries a DLedger response code (spec of openmessaging DLedger, R).
"""

from __future__ import annotations

import enum

__all__ = [
    "JSON_CODES",
    "DLedgerCode",
    "DLedgerError",
    "DLedgerRequestCode",
    "PushType",
    "ReadMode",
    "Role",
    "VoteResult",
]


JSON_CODES = 20_000
"""DLedger's own request codes are this much greater than those of the binary format, whose header has 16 bits."""


class DLedgerRequestCode(enum.IntEnum):
    """Remoting request codes of a member, for the binary format; DLedger's own, 20,000 higher, take JSON."""

    METADATA = 30000
    APPEND = 30001
    GET = 30002
    VOTE = 31001
    HEART_BEAT = 31002
    PUSH = 31004
    LEADERSHIP_TRANSFER = 31005
    INSTALL_SNAPSHOT = 31006
    CHANGE_MEMBERS = 31007
    """This one and the next are not in DLedger, whose codes end at 51006."""
    MEMBERS = 31008


class DLedgerCode(enum.IntEnum):
    """Response codes. `is_definite` of a DLedgerError tells which ones leave an append's fate open."""

    UNKNOWN = -1
    SUCCESS = 200
    TIMEOUT = 300
    NETWORK_ERROR = 302
    UNKNOWN_GROUP = 400
    UNKNOWN_MEMBER = 401
    UNEXPECTED_MEMBER = 402
    EXPIRED_TERM = 403
    NOT_LEADER = 404
    NOT_FOLLOWER = 405
    INCONSISTENT_STATE = 406
    INCONSISTENT_TERM = 407
    INCONSISTENT_INDEX = 408
    INCONSISTENT_LEADER = 409
    INDEX_OUT_OF_RANGE = 410
    UNEXPECTED_ARGUMENT = 411
    REPEATED_PUSH = 413
    DISK_ERROR = 414
    DISK_FULL = 415
    TERM_NOT_READY = 416
    FALL_BEHIND_TOO_MUCH = 417
    TAKE_LEADERSHIP_FAILED = 418
    INTERNAL_ERROR = 500
    TERM_CHANGED = 501
    WAIT_QUORUM_ACK_TIMEOUT = 502
    LEADER_PENDING_FULL = 503
    LEADER_TRANSFERRING = 506


class VoteResult(enum.IntEnum):
    """The answer to a request for a vote, with DLedger's names; the numbers are this protocol's own."""

    UNKNOWN = 0
    ACCEPT = 1
    REJECT_UNKNOWN_LEADER = 2
    REJECT_UNEXPECTED_LEADER = 3
    REJECT_EXPIRED_VOTE_TERM = 4
    REJECT_ALREADY_VOTED = 5
    REJECT_ALREADY_HAS_LEADER = 6
    REJECT_TERM_NOT_READY = 7
    REJECT_TERM_SMALL_THAN_LEDGER = 8
    REJECT_EXPIRED_LEDGER_TERM = 9
    REJECT_SMALL_LEDGER_END_INDEX = 10


class PushType(enum.IntEnum):
    """What a leader asks of a follower (seeds S0, S2)."""

    APPEND = 1
    COMMIT = 2
    COMPARE = 3
    TRUNCATE = 4


class Role(enum.Enum):
    """A member's current role."""

    CANDIDATE = "CANDIDATE"
    FOLLOWER = "FOLLOWER"
    LEADER = "LEADER"


class ReadMode(enum.Enum):
    """How a read is made safe; see `node.dledger.reads`."""

    READ_INDEX = "read_index"
    LEASE = "lease"
    LOG = "log"
    UNSAFE = "unsafe"


INDEFINITE_CODES = frozenset(
    (
        DLedgerCode.UNKNOWN,
        DLedgerCode.TIMEOUT,
        DLedgerCode.NETWORK_ERROR,
        DLedgerCode.INTERNAL_ERROR,
        DLedgerCode.TERM_CHANGED,
        DLedgerCode.WAIT_QUORUM_ACK_TIMEOUT,
    )
)
"""After these an append may have happened, or may still happen."""


class DLedgerError(Exception):
    """An operation was refused or is in doubt; `code` is a DLedgerCode, `leader_id` a hint if known."""

    def __init__(self, code: DLedgerCode, message: str = "", *, leader_id: str | None = None) -> None:
        super().__init__(f"{code.name}: {message}" if message else code.name)
        self.code = code
        self.leader_id = leader_id

    @property
    def is_definite(self) -> bool:
        """Whether the operation certainly had, and will have, no effect."""
        return self.code not in INDEFINITE_CODES
