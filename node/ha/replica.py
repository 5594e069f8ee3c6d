"""Keeps the slave's log a copy of the master's: what to request, what to accept, and where the two logs diverge.

RocketMQ's slave requests the position after its own end, and writes whatever arrives. If its log is not a copy of the
master's (the master lost its tail in a power cut; the slave was master once and has messages of its own), the result
is a log that matches neither or, if the position lies outside the master's log, a slave that silently gets nothing
(rocketmq#3388). This slave requests a little that it already has and compares, which needs no change of the protocol:

    equal up to its own end            it is a copy, and reports its position from then on
    unequal                            it requests from further back, until it knows where the logs diverge
    the master ends before it does     it has what the master lost
    the master begins before its end   it requests only what both have: the master has removed the rest
    the master begins after its end    it is too old: the master has removed what it would need

Only whole records are appended, each checked to belong at its position, so that the log always ends with a whole record
and every reported position is one where the next record begins.
"""

from __future__ import annotations

from typing import Protocol

from node.ha.frames import Frame
from node.store.commit_log import BLANK_HEAD_SIZE_BYTES
from node.store.record import BLANK_MAGIC, RECORD_MAGIC, RecordError, summarize_record

__all__ = [
    "Ahead",
    "BeginsWithin",
    "Behind",
    "CopyLog",
    "Diverged",
    "Mismatch",
    "NotACopy",
    "OutOfStep",
    "Replica",
    "StartsAt",
    "StreamError",
]

FIRST_COMPARED_BYTES = 32 << 10
"""Bytes compared at the start of each connection: hundreds of messages, one frame."""
MAX_RECORD_BYTES = 16 << 20
"""Limit on a record that is held until it is whole; messages, and therefore blanks, have at most 8 MB."""
_PIECE_BYTES = 1 << 20
_MAGIC = RECORD_MAGIC.to_bytes(4, "big")
_MAGIC_AT = 4
_OFFSET_AT = 28
_HEAD_BYTES = 36
"""A record's head up to its physical offset."""


class CopyLog(Protocol):
    """The slave's log."""

    @property
    def begin_position(self) -> int: ...
    @property
    def end_position(self) -> int: ...
    @property
    def segment_size_bytes(self) -> int: ...
    def read_range(self, position: int, size_bytes: int) -> bytes: ...
    def record_before(self, position: int) -> int: ...
    def append_copy(self, record: bytes) -> None: ...


class StreamError(Exception):
    """The connection cannot continue; the text says why."""


class OutOfStep(StreamError):
    """The master sends a position other than the expected one."""


class NotACopy(StreamError):
    """What the master sends cannot belong at its position."""


class StartsAt(StreamError):
    """This log is empty and the master's stream begins at `position`."""

    def __init__(self, position: int) -> None:
        super().__init__(f"the master's newest file begins at {position}")
        self.position = position


class BeginsWithin(StreamError):
    """The master's log begins at `position`, after the requested position and before the end of this log."""

    def __init__(self, position: int) -> None:
        super().__init__(f"the master's log begins at {position}")
        self.position = position


class Mismatch(StreamError):
    """The two logs do not fit together. Up to `keep_position` this one can be kept; None: nothing of it."""

    def __init__(self, text: str, keep_position: int | None) -> None:
        super().__init__(text)
        self.keep_position = keep_position


class Ahead(Mismatch):
    """The master's log ends before this one does."""


class Behind(Mismatch):
    """The master's log begins at this one's end, or after it."""


class Diverged(Mismatch):
    """The two logs hold different bytes. `is_certain` is False while they may diverge further back."""

    def __init__(self, text: str, keep_position: int | None, *, is_certain: bool) -> None:
        super().__init__(text, keep_position)
        self.is_certain = is_certain


class Replica:
    """One connection's view of the log. `compare_bytes` is how much of it is requested again, but nothing before
    `master_begin`, where the master's log is known to begin."""

    def __init__(self, log: CopyLog, *, compare_bytes: int = FIRST_COMPARED_BYTES, master_begin: int = 0) -> None:
        self._log = log
        self._common_begin = max(log.begin_position, master_begin, 1)
        self._partial = bytearray()
        self._is_first = True
        self._own_end = log.end_position
        is_empty = log.end_position == log.begin_position
        # 0 would mean that this log is empty; one that is not requests its second byte at the earliest.
        self.request_position = 0 if is_empty else max(self._own_end - compare_bytes, self._common_begin)
        self._due = self.request_position
        self.is_compared = is_empty
        """Whether this log is known to be a copy of the master's, so that its end may be reported."""

    def receive(self, frame: Frame) -> None:
        """Handle the next frame. Raises StreamError; OSError or LogRefuses if the log does not take more."""
        first, self._is_first = self._is_first, False
        if frame.position != self._due:
            self._judge_position(frame, first=first)
        position, body = frame
        if position < self._own_end and self.is_compared is False:
            if not body:
                raise self._ahead(position)
            compared = min(len(body), self._own_end - position)
            self._compare(position, body[:compared])
            self._due = position = position + compared
            body = body[compared:]
            if position == self._own_end:
                if not self._shows_a_record(position):
                    raise self._diverged(position, "these bytes are the master's, and would be any log's")
                self.is_compared = True
        if body:
            self._due = position + len(body)
            self._partial += body
            self._append_whole_records()

    def _judge_position(self, frame: Frame, *, first: bool) -> None:
        """The frame's position is not the expected one: raise what that means, unless an empty log may begin there."""
        position = frame.position
        if first and self.request_position == 0:
            if position % self._log.segment_size_bytes:
                raise NotACopy(
                    f"the master's file begins at {position}, which is no multiple of this log's file size,"
                    f" {self._log.segment_size_bytes}: both need the same"
                )
            if position != self._log.end_position:
                raise StartsAt(position)
            self._due = position
            return
        if first and not frame.body:
            if position < self._due:
                raise self._ahead(position)
            if position < self._own_end:
                raise BeginsWithin(position)
            where = "behind" if position > self._own_end else "at"
            raise Behind(f"the master's log begins at {position}, {where} the end of this one at {self._own_end}", None)
        raise OutOfStep(f"the master sends position {position} where {self._due} is due")

    def _ahead(self, master_end: int) -> Ahead:
        keep = None
        if master_end > self._log.begin_position:
            keep = self._log.record_before(master_end)
        return Ahead(
            f"the master's log ends at {master_end}, this one at {self._own_end}: it has"
            f" {self._own_end - master_end} bytes that the master lacks",
            keep,
        )

    def _compare(self, position: int, body: bytes) -> None:
        at = 0
        while at < len(body):
            own = self._log.read_range(position + at, len(body) - at)
            if not own:
                raise OSError(f"this log cannot be read at {position + at}")
            theirs = body[at : at + len(own)]
            if own != theirs:
                same = next(i for i, (one, other) in enumerate(zip(own, theirs, strict=True)) if one != other)
                raise self._diverged(position + at + same, "this log and the master's differ")
            at += len(own)

    def _diverged(self, position: int, what: str) -> Diverged:
        """Equality before `position` proves something only if it covers a record's head, which is unique to a message:
        a blank's zeros or a body may be the same in logs that diverged long before."""
        log = self._log
        keep = log.record_before(position)
        is_certain = self.request_position <= self._common_begin or self._shows_a_record(keep)
        return Diverged(
            f"{what} at {position}, {self._own_end - position} bytes before the end",
            keep if keep > self._common_begin else None,
            is_certain=is_certain,
        )

    def _shows_a_record(self, end: int) -> bool:
        """Whether a record's head lies between the requested position and `end`, or the request covered all that the
        logs may have in common."""
        log, at = self._log, self.request_position
        if at <= self._common_begin:
            return True
        while at + _HEAD_BYTES <= end:
            piece = log.read_range(at, min(_PIECE_BYTES, end - at))
            found = piece.find(_MAGIC)
            while found >= 0:
                head_at = at + found - _MAGIC_AT
                offset = log.read_range(head_at + _OFFSET_AT, 8)
                if (
                    self.request_position <= head_at
                    and head_at + _HEAD_BYTES <= end
                    and int.from_bytes(offset, "big") == head_at
                ):
                    return True
                found = piece.find(_MAGIC, found + 1)
            if len(piece) < _HEAD_BYTES:
                at += max(len(piece), 1)
            else:
                at += len(piece) - len(_MAGIC) + 1
        return False

    def _append_whole_records(self) -> None:
        log, partial = self._log, self._partial
        at = 0
        try:
            while len(partial) - at >= BLANK_HEAD_SIZE_BYTES:
                position = log.end_position
                size_bytes = int.from_bytes(partial[at : at + 4], "big")
                room = log.segment_size_bytes - position % log.segment_size_bytes
                if not BLANK_HEAD_SIZE_BYTES <= size_bytes <= min(room, MAX_RECORD_BYTES):
                    raise NotACopy(f"the master sends a record of {size_bytes} bytes at {position}, where {room} fit")
                if len(partial) - at < size_bytes:
                    return
                record = bytes(partial[at : at + size_bytes])
                _check(record, position, room)
                log.append_copy(record)
                at += size_bytes
        finally:
            del partial[:at]


def _check(record: bytes, position: int, room: int) -> None:
    """Raise NotACopy unless `record` can stand at `position`, `room` bytes before the end of a file."""
    magic = int.from_bytes(record[4:8], "big")
    if magic == BLANK_MAGIC:
        if len(record) != room:
            raise NotACopy(f"the master's file ends behind {position + len(record)}: both need the same file size")
        return
    if magic != RECORD_MAGIC:
        raise NotACopy(f"the master sends no record at {position}")
    try:
        physical_offset = summarize_record(record).physical_offset
    except RecordError as error:
        raise NotACopy(f"the master sends a damaged record at {position}: {error}") from error
    if physical_offset != position:
        raise NotACopy(f"the master sends the record for {physical_offset} at {position}")
