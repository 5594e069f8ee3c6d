"""Which descriptors of a program are reported, so that calls on sockets are not slowed down.

A filter stays until its process ends and sees only a descriptor's number. A filter installed in a running program
therefore reports writes to the numbers that were files at that time, and to all numbers from FIRST_PLACED on. Calls
that open a file under the root are answered here: the supervisor opens the file on the program's behalf and gives it a
number from FIRST_PLACED on (SECCOMP_IOCTL_NOTIF_ADDFD). Everything else, sockets above all, gets the lowest free number
as usual. Calls that duplicate such a descriptor (dup, F_DUPFD) are answered in the same way. Children inherit filter
and descriptors; O_CLOEXEC is kept.

The supervisor opens files as the program would: with the program's rights, if they differ from its own and it may
assume them (rights.py). If it may not, or sees other files than the program, the filter is not selective. A file can
bypass a selective filter by `dup2` to a number chosen by the program, over a socket from another program (SCM_RIGHTS),
by `open_by_handle_at`, by a later rename into the root, if the program may have no more descriptors, and if the program
is in a directory that it could not reach with its rights. So when a fault begins and while it lasts, it is checked
whether a file under the root has a number that is not reported. The program then counts as not reached until no fault
is in force any more, since writes to that file met none.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import platform
import queue
import stat
import struct
import threading
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from .files import Files, Opening
from .filter import DUPLICATING, F_DUPFD_CLOEXEC, FIRST_PLACED, OPENING, SYSCALLS, Call, Listener
from .rights import Rights, assumed, rights_of

__all__ = ["Descriptors", "may_open_for", "take_descriptor", "watched_numbers"]

_ALWAYS_WATCHED = frozenset({0, 1, 2})
"""The descriptors that a shell redirects to files, by dup2; few programs write much there."""
_SPARE = 64
"""Free numbers required below a placed descriptor: the kernel assigns the lowest free number first, so no other thread
gets the chosen one meanwhile."""
_PIDFD_GETFD = 438
_SEEN_FROM = ("ns/user", "ns/mnt", "root")
_CLONE_FS = 0x200
_O_TMPFILE = os.O_TMPFILE & ~os.O_DIRECTORY


def may_open_for(thread: int, own: Rights) -> Rights | None:
    """The rights of a process or thread, if a supervisor with rights `own` can open the same files; otherwise None."""
    try:
        rights = rights_of(thread)
        sees_the_same = all(os.readlink(f"/proc/{thread}/{name}") == _seen_here(name) for name in _SEEN_FROM)
    except OSError:
        return None
    return rights if sees_the_same and own.can_assume(rights) else None


@functools.cache
def _seen_here(name: str) -> str:
    return os.readlink(f"/proc/self/{name}")


def take_descriptor(pid: int, descriptor: int) -> int:
    """Duplicate a descriptor of another process into this one. Raises OSError."""
    process = os.pidfd_open(pid)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        taken = int(libc.syscall(_PIDFD_GETFD, process, descriptor, 0))
        if taken < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        return taken
    finally:
        os.close(process)


def watched_numbers(processes: Iterable[int]) -> frozenset[int] | None:
    """The numbers below FIRST_PLACED that a selective filter has to report in all of these stopped processes; None if
    it must not be selective. Numbers from FIRST_PLACED on need no care: all of them are reported."""
    found, own = set(_ALWAYS_WATCHED), rights_of("thread-self")
    for pid in processes:
        if may_open_for(pid, own) is None:
            return None
        for number in _numbers(pid):
            if number < FIRST_PLACED and _may_be_a_file(f"/proc/{pid}/fd/{number}"):
                found.add(number)
    return frozenset(found)


def _numbers(process: int) -> list[int]:
    return [int(name) for name in os.listdir(f"/proc/{process}/fd")]


def _may_be_a_file(link: str) -> bool:
    try:
        return stat.S_ISREG(os.stat(link).st_mode)
    except OSError:
        return True


@dataclass(slots=True)
class Descriptors:
    """Answers the calls that open files or duplicate descriptors in a program with a selective filter. `with_reads`:
    reads are reported, so that files that are only read matter as well."""

    files: Files
    watched: Collection[int]
    with_reads: bool
    has_let_pass: bool = False
    """A file may have a number that is not reported."""
    note: Callable[[int], None] = lambda _: None
    """Called with how many files have such numbers, before the program can use one."""
    numbers: frozenset[int] = field(init=False)
    """The system call numbers of the calls that are answered here."""
    _let_passed: int = 0
    """The most files known to have had such numbers at the same time since `begin_anew`."""
    _number_lock: threading.Lock = field(default_factory=threading.Lock)
    _opener: Opener | None = None
    _own: Rights = field(init=False)

    def __post_init__(self) -> None:
        self._own = rights_of("thread-self")  # before any thread assumes other rights
        table = SYSCALLS[platform.machine()]
        self.numbers = frozenset(table[name] for name in (*OPENING, *DUPLICATING) if name in table)

    def concerns(self, call: Call) -> bool:
        """Whether a call may give a file a number, so that `answer` has to answer it."""
        return call.name in OPENING or call.name in DUPLICATING

    def answer(self, listener: Listener, call: Call, done: Callable[[], None] | None = None) -> bool:
        """Answer such a call. False if another thread will answer it later and then call `done` there; without `done`
        it is answered now."""
        try:
            wanted = self.files.opening(call) if call.name in OPENING and self._is_kept(call) else None
        except (OSError, ValueError, struct.error):
            wanted = None  # the kernel will report the same error
        if call.name in DUPLICATING:
            self._duplicate(listener, call)
        elif wanted is None or (rights := self._rights_for(call, wanted)) is None:
            listener.let_go_on(call.id)
        elif done is not None and wanted.flags & (os.O_CREAT | os.O_TRUNC):
            # These calls wait while a file system is frozen; calls of other threads must not.
            self._opener = self._opener or Opener()
            self._opener.ask(lambda: self._open(listener, call, wanted, rights), done)
            return False
        else:
            self._open(listener, call, wanted, rights)
        return True

    def _is_kept(self, call: Call) -> bool:
        """Whether the requested descriptor is writable, or matters because reads are reported."""
        flags = self.files.flags(call)
        return not flags & os.O_PATH and bool(self.with_reads or flags & os.O_ACCMODE or flags & _O_TMPFILE)

    def _rights_for(self, call: Call, wanted: Opening) -> Rights | None:
        """The rights with which the supervisor opens the file; None if it lets the call pass (see `has_let_pass`)."""
        if not wanted.path:
            return None
        try:
            mode = (os.stat if not wanted.flags & os.O_NOFOLLOW else os.lstat)(wanted.path).st_mode
            if not stat.S_ISREG(mode) and not wanted.flags & _O_TMPFILE:
                return None  # a directory, or something whose opening may block
        except OSError:
            if not wanted.flags & os.O_CREAT:
                return None
        rights = may_open_for(call.thread, self._own) if wanted.is_plain else None
        self.has_let_pass |= rights is None
        return rights

    def _open(self, listener: Listener, call: Call, wanted: Opening, rights: Rights) -> None:
        try:
            umask = os.umask(rights.umask)
            try:
                with assumed(rights, self._own):
                    # Under other rights the directories on the path matter too, so do not use our resolved path.
                    path = wanted.path if rights == self._own else wanted.asked
                    descriptor = os.open(path, wanted.flags, wanted.mode)
            finally:
                os.umask(umask)
        except OSError as error:
            if isinstance(error, PermissionError) and rights != self._own:
                # The program itself may succeed: it can be in a directory that it could not reach with its rights.
                self.has_let_pass = True
                listener.let_go_on(call.id)
            else:
                listener.finish(call.id, error.errno or errno.EIO)
            return
        try:
            self._place(listener, call, descriptor, closes_on_exec=bool(wanted.flags & os.O_CLOEXEC))
        finally:
            os.close(descriptor)

    def _place(
        self, listener: Listener, call: Call, descriptor: int, *, closes_on_exec: bool, first: int = FIRST_PLACED
    ) -> None:
        """Give the program a descriptor with a number from `first` on, or any number if it may have none there."""
        try:
            with self._number_lock:
                number = _free_number(_numbers(call.thread), max(first, FIRST_PLACED))
                listener.place(call.id, descriptor, number=number, closes_on_exec=closes_on_exec)
        except OSError:
            self._lets_pass()
            try:
                listener.place(call.id, descriptor, number=None, closes_on_exec=closes_on_exec)
            except OSError as error:
                listener.finish(call.id, error.errno or errno.EMFILE)

    def _duplicate(self, listener: Listener, call: Call) -> None:
        """Place the duplicate of a file under the root. Other descriptors get their usual number, and so do files if
        the program chooses the number, which is noted."""
        try:
            link = f"/proc/{call.thread}/fd/{call.arguments[0]}"
            if not self.files.has(link):
                listener.let_go_on(call.id)
                return
            if call.name in ("dup2", "dup3"):
                if not self._is_reported(call.arguments[1]) and self._matters(link):
                    self._lets_pass()
                listener.let_go_on(call.id)
                return
            descriptor = take_descriptor(rights_of(call.thread).process, call.arguments[0])
        except OSError:
            self.has_let_pass = True
            listener.let_go_on(call.id)
            return
        try:
            is_fcntl = call.name == "fcntl"
            first = call.arguments[2] if is_fcntl else 0
            closes_on_exec = is_fcntl and call.arguments[1] == F_DUPFD_CLOEXEC
            self._place(listener, call, descriptor, closes_on_exec=closes_on_exec, first=first)
        finally:
            os.close(descriptor)

    def _is_reported(self, number: int) -> bool:
        return number >= FIRST_PLACED or number in self.watched

    def _lets_pass(self) -> None:
        """Note that a file gets such a number; by the next check it may have been written to and closed."""
        self.has_let_pass = True
        self._let_passed = max(1, self._let_passed)
        self.note(self._let_passed)

    def begin_anew(self) -> None:
        """Forget earlier bypasses: no fault is in force, or the first one begins, so they bypassed none."""
        self._let_passed = 0

    def let_pass(self, processes: Iterable[int]) -> int:
        """The most descriptors of files under the root that were seen with unreported numbers at the same time since
        `begin_anew`."""
        self.has_let_pass = False
        found = sum(
            1
            for pid in processes
            for number in self._listed(pid)
            if not self._is_reported(number) and self._matters(f"/proc/{pid}/fd/{number}")
        )
        self._let_passed = max(found, self._let_passed)
        return self._let_passed

    def _listed(self, pid: int) -> list[int]:
        with contextlib.suppress(OSError):
            return _numbers(pid)
        return []

    def _matters(self, link: str) -> bool:
        with contextlib.suppress(OSError):
            # The mode of the link itself shows how the file was opened.
            return self.files.has(link) and (self.with_reads or bool(os.lstat(link).st_mode & stat.S_IWUSR))
        return False


def _free_number(taken: Collection[int], first: int) -> int:
    """A number from `first` on that the kernel will not assign to another thread meanwhile."""
    used = set(taken)
    number, free = first, first - sum(each < first for each in used)
    while number in used or free < _SPARE:
        free += number not in used
        number += 1
    return number


class Opener:
    """A thread, with a umask of its own, for opening files when that may block."""

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[tuple[Callable[[], None], Callable[[], None]]] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def ask(self, work: Callable[[], None], done: Callable[[], None]) -> None:
        """Run `work`, then `done`, in the thread."""
        self._asked.put((work, done))

    def _work(self) -> None:
        if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_FS) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        while True:
            work, done = self._asked.get()
            try:
                work()
            finally:
                done()
