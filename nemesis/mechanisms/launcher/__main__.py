"""Run a program under faults of this host, whatever libraries it uses.

    python3 -I -S launcher.pyz --control FILE [--program NUMBER] [--root DIRECTORY] [--trap GROUP]...
        [--attach] [--undo DIRECTORY] [--clock] -- PROGRAM [ARGUMENT]...

The program replaces this process and keeps its pid. With `--trap` the kernel reports its file system calls to a
supervisor (supervisor.py): from the start, or with `--attach` from the first disk fault on (attach.py). With `--undo`
the supervisor logs unsynced changes (account.py). With `--clock` a driver skews the wall clock that the program reads
(vdso.py). Neither needs privileges: without them, NO_NEW_PRIVS is set for `--trap`, and the program can gain none by
set-user-ID. Both reach the program's children and threads. What it does is counted under its NUMBER in the control
file.

    python3 -I -S launcher.pyz judge PROGRAM [ARGUMENT]...      what would be needed to reach it (programs.py)
    python3 -I -S launcher.pyz look PID                         what reaches a running program and its children
    python3 -I -S launcher.pyz clock PID|0 APART_MS [PAUSE_S]...
                                                                the clocks that it, or this program, reads
                                                                (clock_probe.py)

These print JSON.

Exits with 2 for wrong arguments, 126 if the faults cannot be set up, 127 if the program cannot be run, each with one
line.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .account import Account
from .attach import wait_for_faults
from .clock_probe import read_clocks
from .control import TRAPS_FROM_THE_START, UNDO_OVERFLOW, Control
from .descriptors import Descriptors
from .files import Files
from .filter import GROUPS, FilterError, Listeners, install_filter
from .programs import judge, look
from .supervisor import Attachment, Ledger, Supervisor, guard
from .tracing import ProcessTree
from .vdso import ClockDriver, ClockError

__all__ = ["main"]

_PR_SET_NAME, _PR_SET_PTRACER, _PR_SET_PTRACER_ANY = 15, 0x59616D61, 2**64 - 1


def _name(name: str) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def _start_helper(serve: Callable[[socket.socket], None]) -> socket.socket:
    """Fork a daemon that runs `serve`: the program must not find a child that it did not start. Returns the channel to
    the daemon."""
    ours, theirs = socket.socketpair()
    first = os.fork()
    if first == 0:
        try:
            _name("fault-helper")  # before it has a child, see vdso.py
            ours.close()
            if os.fork() == 0:
                os.setsid()
                os.chdir("/")
                for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                    signal.signal(number, signal.SIG_IGN)
                nothing = os.open(os.devnull, os.O_RDWR)
                for descriptor in (0, 1, 2):
                    os.dup2(nothing, descriptor)
                serve(theirs)
        finally:
            os._exit(0)
    os.waitpid(first, 0)
    theirs.close()
    return ours


def _ready(channel: socket.socket, what: str) -> None:
    """Wait until the helper is ready. Raises RuntimeError with its error message."""
    said = channel.recv(1000)
    if said != b"+":
        raise RuntimeError(said.decode(errors="replace") or f"the {what} did not start")


@dataclass(frozen=True, slots=True)
class _Traps:
    """Which calls of a program, whose first process is `pid`, are reported: those of `groups`, from its start or, if
    `later`, from its first disk fault on."""

    control: Control
    files: Files
    account: Account | None
    has_foreign_account: bool
    undo: str | None
    groups: Sequence[str]
    pid: int
    later: bool

    def supervise(self, channel: socket.socket) -> None:
        """Answer the calls until the program has ended; the listener arrives over `channel`, unless `later`."""
        tree, listeners, ledger = ProcessTree(self.pid), Listeners(), Ledger()
        guardian, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            guardian.close()
            channel.close()
            _name("fault-guardian")
            guard(theirs, ledger, tree.runs, self._note_loss)
            return
        theirs.close()
        if not self.later:
            _, sent, _, _ = socket.recv_fds(channel, 1, 1)
            if not sent:
                return
            socket.send_fds(guardian, [str(self.pid).encode()], sent)
            listeners.add(sent[0])
        _name("fault-calls")
        channel.sendall(b"+")
        channel.close()
        if self.later:
            found = wait_for_faults(self.control, tree, self.groups, guardian)
            if found is None:
                return
            descriptors = None
            if found.watched is not None:
                descriptors = Descriptors(self.files, found.watched, with_reads="read" in self.groups)
            attachment = Attachment(tree, found, reached=len([*found.listeners]))
            Supervisor(
                found.listeners, self.control, self.files, ledger,
                undo=self.undo, descriptors=descriptors, attachment=attachment,
            ).serve()  # fmt: skip
            return
        Supervisor(
            listeners, self.control, self.files, ledger,
            account=self.account, has_foreign_account=self.has_foreign_account,
        ).serve()  # fmt: skip

    def _note_loss(self) -> None:
        self.control.count_loss()
        if self.undo is not None:
            self.control.add_to_counter(UNDO_OVERFLOW)


def _trap(control: Control, root: str, groups: Sequence[str], undo: str | None, later: bool) -> None:
    files, account, has_foreign_account = Files(root), None, False
    if undo is not None and not later:
        try:
            account = Account(undo)
        except BlockingIOError:
            has_foreign_account = True
    traps = _Traps(control, files, account, has_foreign_account, undo, groups, os.getpid(), later)
    channel = _start_helper(traps.supervise)
    if not later:
        listener = install_filter(groups)
        socket.send_fds(channel, [b"+"], [listener])
        os.close(listener)
        control.trapped(TRAPS_FROM_THE_START, 1, 0)
    _ready(channel, "supervisor")
    channel.close()


def _drive_clock(control: Control, program: int) -> None:
    def serve(channel: socket.socket) -> None:
        try:
            driver = ClockDriver(control, program)
        except (ClockError, OSError) as error:
            channel.sendall(str(error).encode() or b"?")
            return
        _name("fault-clock")
        channel.sendall(b"+")
        channel.close()
        driver.serve()

    channel = _start_helper(serve)
    _ready(channel, "clock driver")
    channel.close()


_QUESTIONS: dict[str, Callable[[Sequence[str]], object]] = {
    "judge": judge,
    "look": lambda words: look(int(words[0])),
    "clock": lambda words: read_clocks(int(words[0]), float(words[1]), [float(word) for word in words[2:]]),
}


def main(arguments: Sequence[str]) -> None:
    """Become the program, or report about one."""
    if arguments and arguments[0] in _QUESTIONS:
        print(json.dumps(_QUESTIONS[arguments[0]](arguments[1:])))
        return
    parser = argparse.ArgumentParser(prog="launcher", allow_abbrev=False)
    parser.add_argument("--control", required=True)
    parser.add_argument("--program", type=int, default=0)
    parser.add_argument("--root")
    parser.add_argument("--trap", action="append", choices=list(GROUPS), default=[])
    parser.add_argument("--attach", action="store_true")
    parser.add_argument("--undo")
    parser.add_argument("--clock", action="store_true")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(arguments)
    if options.trap and not options.root:
        parser.error("--trap needs --root")
    if options.undo and not {"sync", "write"} <= {*options.trap}:
        parser.error("--undo needs --trap sync and --trap write")
    try:
        control = Control(options.control)
        control.claim(options.program)
        # If only ancestors may inspect a process (Yama), the helpers need permission; they are not its ancestors.
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(_PR_SET_PTRACER_ANY), 0, 0, 0)
        if options.clock:
            _drive_clock(control, os.getpid())
        if options.trap:
            later = options.attach and not control.settings().wants_traps
            _trap(control, options.root, options.trap, options.undo, later)
    except (OSError, ValueError, RuntimeError, FilterError) as error:
        print(f"launcher: {error}", file=sys.stderr)
        sys.exit(126)
    try:
        os.execvp(options.command[0], options.command)
    except OSError as error:
        print(f"launcher: {options.command[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(127)


if __name__ == "__main__":
    main(sys.argv[1:])
