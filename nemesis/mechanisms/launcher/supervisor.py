"""Answers the reported calls of one program, in two processes.

The supervisor lets each call go on, holds it, delays it or fails it, as the control file says. It never inspects the
data that a call would write, only which file it concerns; a program that changes its arguments meanwhile deceives only
itself. The guardian holds the listener as well: when the supervisor is killed, the guardian lets everything go on, so
that no call hangs and none fails. Both end with the last process that can make a reported call.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from .account import Account, AccountError
from .attach import MAX_PROCESSES, WATCH_S, Attached, listeners_in
from .control import DELAYED, FAILED, HELD, REFUSED, UNDO_OVERFLOW, Control, Settings
from .descriptors import Descriptors
from .files import CHANGE, CREATE, CUT, GROW, READ, RENAME, SYNC, UNLINK, WRITE, Effect, Files
from .filter import DUPLICATING, Call, Listener, Listeners
from .passing import Passing
from .tracing import ProcessTree

__all__ = ["Ledger", "Supervisor", "guard"]

_POLL_S = 0.002
"""How often the control file is read while a call is held; otherwise nothing is polled."""

_HELD_SLOTS = 4096
"""Calls that can be held at the same time, one per thread. Any more are let go on and not counted as held."""

_COUNTED = {SYNC: "syncs", WRITE: "writes", GROW: "grows", READ: "reads"}
"""Disk operation -> column in which it is counted (control.ProgramCounts)."""

_LOOK_S = 1.0
"""How often, while calls have to be reported, to check whether files have numbers that are not reported."""

_UNKNOWN_IDS = 64
"""Number of calls after the last one noted by the supervisor that the guardian lets go on."""


class Ledger:
    """The calls that wait for an answer, in memory shared with the guardian."""

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, 8 * (_HELD_SLOTS + MAX_PROCESSES))
        self._free = list(range(_HELD_SLOTS))
        self._slots: dict[int, int] = {}
        self._newest: dict[int, int] = {}
        """listener's descriptor -> offset at which its newest call is noted"""

    def received(self, listener: Listener, identity: int) -> None:
        """Note the newest call of a listener."""
        struct.pack_into("=Q", self._map, self._newest_at(listener), identity)

    def newest_address(self, listener: Listener) -> int:
        """The address at which the newest call of a listener is noted."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self._map, self._newest_at(listener)))

    def _newest_at(self, listener: Listener) -> int:
        at = self._newest.get(listener.descriptor)
        if at is None:
            at = self._newest[listener.descriptor] = 8 * (_HELD_SLOTS + len(self._newest) % MAX_PROCESSES)
        return at

    def hold(self, identity: int) -> bool:
        """Note a call that will be answered later; False when no slot is free."""
        if not self._free:
            return False
        slot = self._slots[identity] = self._free.pop()
        struct.pack_into("=Q", self._map, 8 * slot, identity)
        return True

    def answered(self, identity: int) -> None:
        """Forget a call."""
        slot = self._slots.pop(identity, None)
        if slot is not None:
            struct.pack_into("=Q", self._map, 8 * slot, 0)
            self._free.append(slot)

    def unanswered(self) -> list[int]:
        """Every call that may be waiting, including those that were never noted."""
        noted = [value for (value,) in struct.iter_unpack("=Q", self._map[:])]
        newest = [each for last in filter(None, noted[_HELD_SLOTS:]) for each in range(last, last + _UNKNOWN_IDS)]
        return [*filter(None, noted[:_HELD_SLOTS]), *newest]


@dataclass(slots=True)
class Pending:
    """A call about a file under the root that has not been answered yet."""

    listener: Listener
    call: Call
    effect: Effect
    met: set[int] = field(default_factory=set)
    """The columns of the faults that it has met so far: it may be held, and then fail."""
    due_ns: int = 0
    """When its delay ends, by the monotonic clock; 0 if it is not delayed."""

    @property
    def operation(self) -> str:
        """Its disk operation."""
        return self.effect.operation


@dataclass(slots=True)
class Supervisor:
    """Answers the reported calls of one program as its control file says, until the program has ended."""

    listeners: Listeners
    control: Control
    files: Files
    ledger: Ledger
    account: Account | None = None
    """The account of unsynced data, if a power cut may need it."""
    undo: str | None = None
    """The directory of an account that is kept only while the control file says so."""
    descriptors: Descriptors | None = None
    """Set if the filter is selective."""
    attachment: Attachment | None = None
    """Set if calls are reported only since a fault began."""
    has_foreign_account: bool = False
    """Another program of the host keeps the account of these files, which is incomplete once this one changes any."""
    waiting: dict[int, Pending] = field(default_factory=dict)
    """thread -> its call that is waiting for an answer"""
    _has_looked: bool = False
    """A call about a file under the root, or about one that may not be inspected, has been counted."""
    _syncs: Syncs | None = None
    _openings: Openings = field(init=False)
    _passing: Passing | None = None
    """None if not supported here."""
    _watched: list[Listener] = field(default_factory=list)
    """The listeners that `_passing` waits for, as of `_changes`."""
    _changes: int = -1
    _wakes: bool = False
    """A periodic timer ends every wait."""

    def serve(self) -> None:
        """Answer calls until no process can make a reported call any more."""
        self._openings = Openings(self.listeners)
        if self.attachment is not None:
            with contextlib.suppress(OSError):
                self.listeners.wake_every(WATCH_S)
                self._wakes = True
        with contextlib.suppress(OSError):
            self._passing = Passing(() if self.descriptors is None else self.descriptors.numbers)
        if self.account is not None:
            self._syncs = Syncs(self.listeners)
        if self.descriptors is not None:
            self.descriptors.note = self._passed
        self._follow()
        while True:
            has_passed = self._pass()
            ready = self.listeners.wait(0 if has_passed else self._timeout_s())
            if ready is None:
                return
            self._follow()
            for listener in ready:
                report = listener.receive()
                if report is None:
                    continue
                identity = listener.identity(report)
                self.ledger.received(listener, identity)
                self._receive(listener, report)
            self._look_again()
            for identity in self._openings.finished():
                self.ledger.answered(identity)
            if self._syncs is not None:
                for pending, begun, status, error_number in self._syncs.finished():
                    self._synced(pending, begun, status, error_number)

    def _pass(self) -> bool:
        """Wait for calls and let them go on in machine code, while none needs inspection. False if some may."""
        if self._passing is None or not self._concerns_nobody():
            return False
        if self.attachment is not None and self.attachment.is_in_force:
            return False
        if self._changes != self.listeners.changes:
            self._changes, self._watched = self.listeners.changes, [*self.listeners]
            notes = [self.ledger.newest_address(each) for each in self._watched]
            self._passing.watch(self._watched, notes, self.listeners.woken, self._timeout_s())
        followed = self.control.read_generation if self.attachment is None else self.attachment.generation
        found = self._passing.serve(self.control.generation_address, followed)
        if found is not None:
            self._follow()
            self._receive(self._watched[found[0]], found[1])
        return True

    def _follow(self) -> None:
        """Apply new settings before a call is answered under them, and report that they are in force."""
        attachment = self.attachment
        if attachment is None:
            return
        generation = self.control.generation
        is_new = generation != attachment.generation
        if not is_new and not attachment.is_in_force:
            return
        now_s, settings = time.monotonic(), self.control.settings()
        if self.descriptors is not None and not (attachment.is_in_force and settings.wants_traps):
            self.descriptors.begin_anew()
            self.control.passed(0)
        attachment.is_in_force = settings.wants_traps
        is_due = is_new or now_s > attachment.looked_at_s + _LOOK_S
        if self.descriptors is not None and settings.wants_traps and (is_due or self.descriptors.has_let_pass):
            attachment.tree.look()
            self.control.passed(self.descriptors.let_pass(attachment.tree.processes))
            attachment.looked_at_s = now_s
        if is_new:
            self._begin_or_end_account(attachment, settings.account)
            attachment.generation = generation
            found = attachment.found
            self.control.trapped(generation, attachment.reached, found.failed, found.error_number)

    def _passed(self, count: int) -> None:
        if self.attachment is not None and self.attachment.is_in_force:
            self.control.passed(count)

    def _begin_or_end_account(self, attachment: Attachment, is_wanted: bool) -> None:
        if self.undo is None or is_wanted == attachment.keeps_account:
            return
        attachment.keeps_account = is_wanted
        try:
            if is_wanted:
                self._syncs = self._syncs or Syncs(self.listeners)
                self.account = Account(self.undo)
                self.account.begin_anew()
            elif self.account is not None:
                self.account.close()
                self.account = None
        except OSError:
            self._give_up()  # another program keeps the account, or it cannot be written

    def _timeout_s(self) -> float | None:
        if not self.waiting:
            return None if self.attachment is None or self._wakes else WATCH_S
        now_ns = time.monotonic_ns()
        return min(max(0, each.due_ns - now_ns) / 1e9 if each.due_ns else _POLL_S for each in self.waiting.values())

    def _concerns_nobody(self) -> bool:
        """Whether calls can go on without inspection, because no fault is in force and no account is kept; that makes
        them cheap. At least one call is inspected first, to learn whether the supervisor is allowed to inspect."""
        return not (
            self.waiting
            or self.account is not None
            or self.has_foreign_account
            or not self._has_looked
            or self.control.settings().has_disk
        )

    def _receive(self, listener: Listener, report: bytearray) -> None:
        if self._concerns_nobody():
            if self.descriptors is not None and listener.number(report) in self.descriptors.numbers:
                self._let_go_on(listener, listener.call(report))
            else:
                listener.let_go_on(listener.identity(report))
            return
        call = listener.call(report)
        if call.name in DUPLICATING:  # not a disk operation
            self._let_go_on(listener, call)
            return
        earlier = self.waiting.pop(call.thread, None)
        if earlier is not None:
            # A signal interrupted the thread's call, and the kernel has restarted the call.
            self.ledger.answered(earlier.call.id)
            earlier.call = call
            self._decide(earlier)
            return
        keeps_account = self.account is not None or self.has_foreign_account
        looks_closely = keeps_account or self.control.settings().full
        try:
            effect = self.files.effect(call, looks_closely=looks_closely)
        except PermissionError:
            self.control.count_unseen()
            self._has_looked = True
            effect = None
        if effect is None:
            self._let_go_on(listener, call)
            return
        self.control.count_call(_COUNTED[effect.operation])
        self._has_looked = True
        self._decide(Pending(listener, call, effect))

    def _let_go_on(self, listener: Listener, call: Call) -> None:
        """Have the kernel execute a call, or answer it here if a file has to get a number."""
        if self.descriptors is None or not self.descriptors.concerns(call):
            listener.let_go_on(call.id)
        elif not self.ledger.hold(call.id):
            self.descriptors.answer(listener, call)
        elif self.descriptors.answer(listener, call, lambda: self._openings.done(call.id)):
            self.ledger.answered(call.id)

    def _decide(self, pending: Pending) -> None:
        """Answer a call, or make it wait."""
        settings, operation = self.control.settings(), pending.operation
        if _is_stalled(pending, settings):
            self._wait(pending, HELD)
        elif _is_delayed(pending, settings):
            if not pending.due_ns:
                pending.due_ns = time.monotonic_ns() + settings.delay_ns
            self._wait(pending, DELAYED)
        elif settings.full and operation == GROW:
            self._refuse(pending, REFUSED, errno.ENOSPC)
        elif (
            (settings.error_write and operation in (WRITE, GROW))
            or (settings.error_sync and operation == SYNC)
            or (settings.error_read and operation == READ)
        ):
            self._refuse(pending, FAILED, errno.EIO)
        else:
            self._go_on(pending)

    def _met(self, pending: Pending, column: int) -> None:
        if column not in pending.met:
            pending.met.add(column)
            self.control.count_met(column, _COUNTED[pending.operation])

    def _wait(self, pending: Pending, column: int) -> None:
        if self.ledger.hold(pending.call.id):
            self._met(pending, column)
            self.waiting[pending.call.thread] = pending
        else:
            self._go_on(pending)

    def _refuse(self, pending: Pending, column: int, error_number: int) -> None:
        self._met(pending, column)
        pending.listener.finish(pending.call.id, error_number)

    def _go_on(self, pending: Pending) -> None:
        """Let the call go on, and record it in the account."""
        effect = pending.effect
        if self.account is None or self._syncs is None:
            if self.has_foreign_account and effect.action:
                self._give_up()
                self.has_foreign_account = False
            self._let_go_on(pending.listener, pending.call)
        elif effect.operation == SYNC and pending.call.name in _SYNCS and effect.path:
            if self.ledger.hold(pending.call.id):
                self._syncs.begin(pending, self.account.sync_begins())
            else:
                self._give_up()
        else:
            try:
                if _record(self.account, effect):
                    self.control.count_recorded()
            except (AccountError, OSError) as error:
                # With a path that does not exist, the call itself will fail.
                if not isinstance(error, FileNotFoundError | NotADirectoryError):
                    self._give_up()
            self._let_go_on(pending.listener, pending.call)

    def _give_up(self) -> None:
        """Mark the account as incomplete: the losses of a power cut can no longer be determined."""
        self.control.add_to_counter(UNDO_OVERFLOW)
        self.account = None

    def _synced(self, pending: Pending, begun: int, status: os.stat_result | None, error_number: int) -> None:
        if self.account is not None and status is not None and not error_number:
            try:
                if pending.call.name in _OF_EVERYTHING:
                    self.account.synced_everything(begun)
                else:
                    self.account.synced(status, begun)
            except (AccountError, OSError):
                self._give_up()
        self.ledger.answered(pending.call.id)
        pending.listener.finish(pending.call.id, error_number)

    def _look_again(self) -> None:
        """Decide again about waiting calls whose delay or fault is over."""
        if not self.waiting:
            return
        settings = self.control.settings()
        for pending in [*self.waiting.values()]:
            if not _is_stalled(pending, settings) and not _is_delayed(pending, settings):
                del self.waiting[pending.call.thread]
                self.ledger.answered(pending.call.id)
                self._decide(pending)


@dataclass(slots=True)
class Attachment:
    """State of a supervisor that attached to a running program, and the settings that it has applied last."""

    tree: ProcessTree
    found: Attached
    reached: int
    generation: int = -1
    is_in_force: bool = False
    """The settings applied last have a fault or an account."""
    keeps_account: bool = False
    looked_at_s: float = 0.0


class Openings:
    """Calls that another thread has answered."""

    def __init__(self, listeners: Listeners) -> None:
        self._done: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._wake = listeners.add_wake()

    def done(self, identity: int) -> None:
        """Called in that thread when a call has been answered."""
        self._done.put(identity)
        self._wake()

    def finished(self) -> list[int]:
        """Calls that have been answered since the last time."""
        found = []
        while not self._done.empty():
            found.append(self._done.get())
        return found


class Syncs:
    """Syncs performed on a program's behalf, in threads, so that none holds up the others' calls."""

    _WORKERS = 8
    """Concurrent syncs; more have to wait. A single disk hardly does more at once."""

    def __init__(self, listeners: Listeners) -> None:
        self._asked: queue.SimpleQueue[tuple[Pending, int]] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[Pending, int, os.stat_result | None, int]] = queue.SimpleQueue()
        self._wake = listeners.add_wake()
        for _ in range(self._WORKERS):
            threading.Thread(target=self._work, daemon=True).start()

    def begin(self, pending: Pending, begun: int) -> None:
        """Sync the file of a call; `begun` is returned with the result."""
        self._asked.put((pending, begun))

    def finished(self) -> list[tuple[Pending, int, os.stat_result | None, int]]:
        """Syncs that have ended since the last time: the call, `begun`, the file's status, and an errno or 0."""
        found = []
        while not self._done.empty():
            found.append(self._done.get())
        return found

    def _work(self) -> None:
        while True:
            pending, begun = self._asked.get()
            status, error_number = _sync(pending.effect.path, pending.call.name)
            self._done.put((pending, begun, status, error_number))
            self._wake()


def _sync_file_system(descriptor: int) -> None:
    if ctypes.CDLL(None, use_errno=True).syncfs(descriptor) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


_SYNCS: Mapping[str, Callable[[int], None]] = {
    "fsync": os.fsync,
    "fdatasync": os.fdatasync,
    "msync": os.fsync,
    "syncfs": _sync_file_system,
    "sync": lambda _: os.sync(),
}
"""Call that makes something durable -> what the supervisor does instead."""

_OF_EVERYTHING = ("syncfs", "sync")
"""Calls that make everything under the root durable."""


def _sync(path: str, call: str) -> tuple[os.stat_result | None, int]:
    try:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except PermissionError:
            descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            _SYNCS[call](descriptor)
            return os.fstat(descriptor), 0
        finally:
            os.close(descriptor)
    except OSError as error:
        return None, error.errno or errno.EIO


def _record(account: Account, effect: Effect) -> bool:
    """Record what a call is about to change; False when there is nothing to record. Raises AccountError, OSError."""
    if effect.action == CHANGE and effect.is_durable:
        return account.writing_through(effect.path, effect.offset, effect.length)
    if effect.action == CHANGE:
        account.changing(effect.path, effect.offset, effect.length)
    elif effect.action == CUT:
        account.changing(effect.path, effect.offset, 0, is_cut=True)
    elif effect.action == CREATE:
        account.creating(effect.path)
    elif effect.action == UNLINK:
        account.unlinking(effect.path)
    elif effect.action == RENAME:
        account.renaming(effect.path, effect.new_path)
    else:
        return False
    return True


def _is_stalled(call: Pending, settings: Settings) -> bool:
    return (settings.stall_all and call.operation != READ) or (settings.stall_sync and call.operation == SYNC)


def _is_delayed(call: Pending, settings: Settings) -> bool:
    if settings.delay_ns <= 0 or call.operation == READ:
        return False
    return not call.due_ns or time.monotonic_ns() < call.due_ns


def guard(channel: socket.socket, ledger: Ledger, runs: Callable[[], bool], on_loss: Callable[[], None]) -> None:
    """Hold the listeners of a program; once the supervisor has ended, let every call go on until no process can make
    one any more. `on_loss` is called if some process still can make calls, or may be able to (the program `runs`).

    `channel` delivers listeners. A message with the pid alone announces the listener of that process, a second one
    carries it; if the second is missing, the listener is still in that process.
    """
    listeners, unfinished = Listeners(), set[int]()
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, 100, 1)
        if not message:
            break
        unfinished.add(int(message))
        if descriptors:
            unfinished.discard(int(message))
            listeners.add(descriptors[0])
    for pid in unfinished:
        for descriptor in listeners_in(pid):
            listeners.add(descriptor)
    for identity in ledger.unanswered():
        for listener in listeners:
            listener.let_go_on(identity)
    is_lost = not any(True for _ in listeners) and runs()
    if is_lost:
        on_loss()
    while (ready := listeners.wait(None if is_lost else 0)) is not None:
        if not is_lost:
            is_lost = True
            on_loss()
        for listener in ready:
            report = listener.receive()
            if report is not None:
                listener.let_go_on(listener.identity(report))
