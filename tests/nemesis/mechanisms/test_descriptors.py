"""Selective filters report calls on files, whatever their descriptors, and not those on sockets."""

from __future__ import annotations

import array
import contextlib
import dataclasses
import errno
import os
import signal
import socket
import struct
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nemesis.mechanisms.launcher import descriptors
from nemesis.mechanisms.launcher.descriptors import Descriptors, _free_number, may_open_for, watched_numbers
from nemesis.mechanisms.launcher.files import Opening
from nemesis.mechanisms.launcher.filter import DUPLICATING, FIRST_PLACED, GROUPS, OPENING, SYSCALLS, Call, filter_code
from nemesis.mechanisms.launcher.rights import rights_of
from nemesis.mechanisms.launcher_archive import why_not_attached
from tests.nemesis.mechanisms.launched import Program, wait_until

MACHINE = "x86_64"
ALLOWED, REPORTED = 0x7FFF0000, 0x7FC00000


def decision(code: bytes, call: str, *arguments: int, architecture: int = 0xC000003E) -> int:
    """A filter's result for a call, by interpreting the instructions of classic BPF that it uses."""
    seen = struct.pack("=iIQ6Q", SYSCALLS[MACHINE][call], architecture, 0, *arguments, *[0] * (6 - len(arguments)))
    instructions = [*struct.iter_unpack("=HBBI", code)]
    at = value = index = 0
    while True:
        operation, when, otherwise, number = instructions[at]
        at += 1
        if operation == 0x06:
            return int(number)
        if operation == 0x20:
            [value] = struct.unpack_from("=I", seen, number)
        elif operation == 0x00:
            value = number
        elif operation == 0x07:
            index = value
        elif operation == 0x54:
            value &= number
        elif operation == 0x74:
            value >>= number
        elif operation == 0x7C:
            value = value >> index if index < 32 else 0
        else:
            is_so = {0x15: value == number, 0x35: value >= number, 0x45: bool(value & number)}[operation]
            at += when if is_so else otherwise


NUMBERS = st.integers(0, FIRST_PLACED - 1)


@given(
    watched=st.frozensets(NUMBERS, max_size=40),
    descriptor=NUMBERS | st.integers(FIRST_PLACED, 2**32 - 1),
    call=st.sampled_from([*GROUPS["write"], *GROUPS["sync"], *GROUPS["read"], *DUPLICATING, "fcntl"]),
    command=st.sampled_from([0, 1, 2, 3, 1030, 1031]),
)
@example(watched=frozenset({31, 32, 511}), descriptor=511, call="write", command=0)
def test_a_selective_filter_reports_writes_and_duplications_only_of_files(
    watched: frozenset[int], descriptor: int, call: str, command: int
) -> None:
    code = filter_code(["sync", "write"], MACHINE, watched)
    is_reported = decision(code, call, descriptor | 7 << 32, command) == REPORTED
    is_a_file = descriptor >= FIRST_PLACED or descriptor in watched
    if call in ("write", "pwrite64", "writev", "pwritev", "pwritev2", "sendfile", "dup", "dup2", "dup3"):
        assert is_reported == is_a_file
    elif call == "fcntl":
        assert is_reported == (is_a_file and command in (0, 1030))
    else:
        assert is_reported == (call in GROUPS["write"] or call in GROUPS["sync"])
    whole = filter_code(["sync", "write"], MACHINE)
    assert (decision(whole, call, descriptor) == REPORTED) == (call in GROUPS["write"] or call in GROUPS["sync"])
    assert decision(code, call, descriptor, architecture=0x40000003) == ALLOWED
    if call == "sendfile":  # its source is not its first descriptor
        assert decision(filter_code(["read"], MACHINE, watched), call, descriptor) == REPORTED


@given(groups=st.sets(st.sampled_from(["sync", "write", "read"]), min_size=1), call=st.sampled_from(OPENING))
def test_every_selective_filter_reports_calls_that_open_files(groups: set[str], call: str) -> None:
    assert decision(filter_code(sorted(groups), MACHINE, {0}), call) == REPORTED


@given(taken=st.sets(st.integers(0, 700)), first=st.integers(FIRST_PLACED, 600))
def test_a_chosen_descriptor_is_free_and_has_64_free_ones_below_it(taken: set[int], first: int) -> None:
    number = _free_number(taken, first)
    assert number >= first and number not in taken and len({*range(number)} - taken) >= 64


needs_attachment = pytest.mark.skipif(why_not_attached() is not None, reason=str(why_not_attached()))

CHILD = """
import array, ctypes, fcntl, os, resource, socket, sys, tempfile, threading
root, libc = sys.argv[1], ctypes.CDLL(None)
def at(name):
    return os.path.join(root, name)
old = os.open(at("old"), os.O_RDWR | os.O_CREAT)
left, right = socket.socketpair()
here, there = socket.socketpair()
beside = os.open(sys.argv[2], os.O_RDWR | os.O_CREAT)
opened = {"old": old}
def attempt(work):
    try:
        return work()
    except OSError as error:
        return error.strerror
def keep(name, fd):
    opened[name] = fd
    return fd
def forked(work):
    ours, theirs = os.pipe()
    if os.fork() == 0:
        os.write(theirs, str(attempt(work)).encode())
        os._exit(0)
    os.wait()
    return os.read(ours, 100).decode()
def take():
    _, [(_, _, data)], _, _ = here.recvmsg(1, socket.CMSG_SPACE(4))
    return array.array("i", data)[0]
def send():
    os.write(here.fileno(), b"r")
    here.recv(1)
    return os.write(here.fileno(), b"x")
def open_below():
    directory = os.open(root, os.O_RDONLY)
    try:
        return os.open("below", os.O_CREAT | os.O_WRONLY, dir_fd=directory)
    finally:
        os.close(directory)
def write_past(number):
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 512:
        os.dup2(old, number)
    else:
        number = os.open(at("new"), os.O_RDWR | os.O_CREAT)
    try:
        return os.write(number, b"x")
    finally:
        os.close(number)
def replace(name):
    number = int(name)
    os.dup2(opened["new"], number)
    return keep("replaced", number)
DO = {
    "open": lambda name: keep(name, os.open(at(name), os.O_CREAT | os.O_RDWR)),
    "open-again": lambda name: os.open(at(name), os.O_CREAT | os.O_EXCL | os.O_RDWR),
    "open-mode": lambda name: (os.umask(0o027), keep(name, os.open(at(name), os.O_CREAT | os.O_WRONLY, 0o666)))[1],
    "open-inherited": lambda name: keep(name, libc.open(at(name).encode(), os.O_CREAT | os.O_WRONLY, 0o600)),
    "open-append": lambda name: keep("append", os.open(at(name), os.O_WRONLY | os.O_APPEND)),
    "open-below": lambda name: keep(name, open_below()),
    "open-here": lambda name: keep(name, os.open(name, os.O_CREAT | os.O_WRONLY)),
    "open-unnamed": lambda name: keep(name, os.open(root, os.O_TMPFILE | os.O_RDWR)),
    "read-only": lambda name: os.open(at(name), os.O_RDONLY),
    "directory": lambda _: attempt(lambda: os.open(root, os.O_RDWR)),
    "dup": lambda name: keep("copy", os.dup(opened[name])),
    "dup-inherited": lambda name: keep("copy", fcntl.fcntl(opened[name], fcntl.F_DUPFD, 3)),
    "dup-socket": lambda _: os.dup(left.fileno()),
    "replace": replace,
    "write-past": lambda name: write_past(int(name)),
    "replace-old": lambda name: os.dup2(old, int(name)),
    "close": lambda name: os.close(opened.pop(name)),
    "flags": lambda name: fcntl.fcntl(opened[name], fcntl.F_GETFD),
    "write": lambda name: os.write(opened[name], b"x"),
    "child-writes": lambda name: forked(lambda: os.write(os.open(at(name), os.O_CREAT | os.O_WRONLY), b"x")),
    "send": lambda _: send(),
    "beside": lambda _: os.write(beside, b"x"),
    "few": lambda limit: resource.setrlimit(resource.RLIMIT_NOFILE, (int(limit), int(limit))),
    "take": lambda name: keep(name, take()),
    "storm": lambda count: storm(int(count)),
}
def storm(count):
    wrong = []
    def work(number):
        for turn in range(count):
            pair = socket.socketpair()
            fd = os.open(at(f"s{number}"), os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
            if fd < 512 or any(each.fileno() >= 512 for each in pair):
                wrong.append((fd, pair))
            os.write(fd, b"%d" % turn)
            os.close(fd)
            for each in pair:
                each.close()
    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wrong or "ok"
for line in sys.stdin:
    name, _, argument = line.strip().partition(" ")
    if name == "channel":
        here = socket.socket(fileno=int(argument))
        print("ok", flush=True)
    else:
        print(attempt(lambda: DO[name](argument)), flush=True)
"""


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Program]:
    argv = [sys.executable, "-I", "-S", "-c", CHILD, str(tmp_path / "data"), str(tmp_path / "beside")]
    made = Program(tmp_path, argv, attaches=True)
    assert made.do("write old") == "1"
    yield made
    made.close()
    wait_until(lambda: made.helpers() == {})


EIO = "Input/output error"


@needs_attachment
def test_files_are_reported_under_all_of_their_descriptors(program: Program) -> None:
    program.impair("error-write")
    assert program.do("write old") == EIO, "it was open when the fault began"
    program.mend()
    assert int(program.do("open new")) >= FIRST_PLACED and program.do("write new") == "1"
    assert int(program.do("open-append new")) >= FIRST_PLACED and int(program.do("open-below under")) >= FIRST_PLACED
    assert int(program.do("open-unnamed unnamed")) >= FIRST_PLACED
    assert int(program.do("read-only new")) >= FIRST_PLACED, "reads are reported as well"
    assert program.do("directory") == "Is a directory"
    assert program.do("open-again new") == "File exists"
    assert int(program.do("dup new")) >= FIRST_PLACED and program.do("flags copy") == "1"
    assert int(program.do("dup-socket")) < FIRST_PLACED and program.do("beside") == "1"
    program.impair("error-write")
    assert {program.do(f"write {name}") for name in ("old", "new", "append", "under", "unnamed", "copy")} == {EIO}
    assert program.do("child-writes old") == EIO and program.count().failed == 8 and program.count().passed == 0
    program.mend()
    assert {program.do(f"write {name}") for name in ("old", "new", "append", "under", "copy")} == {"1"}


@needs_attachment
@pytest.mark.parametrize("kind", ["error-write", "full", "slow"])
def test_duplicating_a_descriptor_meets_no_disk_fault(program: Program, kind: str) -> None:
    program.impair(kind, delay_ms=1)
    before = program.count()
    assert int(program.do("dup old")) >= FIRST_PLACED and int(program.do("dup-inherited old")) >= FIRST_PLACED
    assert program.do("replace-old 600") == "600" and program.count() == before


@needs_attachment
def test_files_are_opened_as_the_program_would_have_opened_them(program: Program, tmp_path: Path) -> None:
    program.impair("slow", delay_ms=1)
    assert int(program.do("open-mode made")) >= FIRST_PLACED and program.do("flags made") == "1"
    status = os.stat(tmp_path / "data/made")
    assert status.st_mode & 0o777 == 0o640 and (status.st_uid, status.st_gid) == (os.geteuid(), os.getegid())
    assert int(program.do("open-inherited inherited")) >= FIRST_PLACED and program.do("flags inherited") == "0"
    assert int(program.do("dup-inherited made")) >= FIRST_PLACED and program.do("flags copy") == "0"
    assert program.do("open missing/file") == "No such file or directory"
    assert program.do("storm 30") == "ok"
    assert {path.read_text() for path in (tmp_path / "data").glob("s?")} == {"29"}
    assert program.count().passed == 0


@needs_attachment
def test_a_file_with_an_unreported_descriptor_is_counted(program: Program, tmp_path: Path) -> None:
    """By dup2, and where the program may not have as many descriptors."""
    program.impair("error-write")
    program.mend()
    assert int(program.do("open new")) >= FIRST_PLACED
    assert program.do("replace 100") == "100"
    program.impair("error-write")
    wait_until(lambda: program.count().passed == 1)
    assert program.do("close replaced") == "None"
    heal(program)
    program.impair("error-write")
    assert program.count().passed == 0
    heal(program)
    assert program.do("few 200") == "None"
    assert int(program.do("open low")) < 200 and program.do("write low") == "1"
    program.impair("error-write")
    assert program.count().passed == 1
    assert program.do("close low") == "None"
    heal(program)
    program.impair("error-write")
    assert program.count().passed == 0


def heal(program: Program) -> None:
    """Heal the disk, and wait until the supervisor has followed."""
    program.mend()
    wait_until(lambda: program.count().traps_generation >= program.faults.generation)


@needs_attachment
@pytest.mark.parametrize("is_limited", [False, True])
def test_a_file_written_past_a_fault_and_closed_counts_until_the_fault_is_healed(
    program: Program, is_limited: bool
) -> None:
    """However briefly it was open, and whatever other faults come and go meanwhile."""
    if is_limited:
        assert program.do("few 200") == "None"
    program.impair("slow", delay_ms=1)
    assert program.count().passed == 0
    assert program.do("write-past 150") == "1"
    assert program.count().passed == 1, "it is counted by the time the write returns"
    program.impair("full")
    assert program.count().passed == 1
    heal(program)
    assert program.count().passed == 0
    assert program.do("write-past 150") == "1"
    program.impair("slow", delay_ms=1)
    assert program.count().passed == 0


@needs_attachment
def test_sockets_bypass_the_supervisor_and_a_file_received_over_one_is_found(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    argv = [sys.executable, "-I", "-S", "-c", CHILD, str(tmp_path / "data"), str(tmp_path / "beside")]
    with ours, theirs:
        program = Program(tmp_path, argv, attaches=True, inherited=[theirs.fileno()])
        try:
            assert program.do(f"channel {theirs.fileno()}") == "ok"
            program.impair("error-write")
            supervisor = program.helpers()["fault-calls"]
            program.ask("send")
            assert ours.recv(1) == b"r", "it has read its command, which is a reported call"
            os.kill(supervisor, signal.SIGSTOP)
            try:
                ours.send(b"!")
                assert ours.recv(1) == b"x"
            finally:
                os.kill(supervisor, signal.SIGCONT)
            assert program.answer() == "1"
            with open(tmp_path / "data/given", "wb") as file:
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [file.fileno()]))]
                ours.sendmsg([b"!"], rights)
                assert int(program.do("take given")) < FIRST_PLACED
            wait_until(lambda: program.count().passed == 1)
        finally:
            program.close()
    wait_until(lambda: program.helpers() == {})


@needs_attachment
def test_killing_the_supervisor_leaves_a_program_that_opens_files_running(program: Program) -> None:
    program.impair("error-write")
    program.mend()
    program.ask("storm 200")
    os.kill(program.helpers()["fault-calls"], signal.SIGKILL)
    said = program.answer()
    assert "Input/output" not in said and "Bad file" not in said
    assert program.do("open later").isdigit() and program.do("write later") == "1"
    wait_until(lambda: program.count().lost == 1)


SOMEBODY, GROUP, FURTHER = 65534, 65533, 65532
BECOMES_ANOTHER = f"""
import array, ctypes, fcntl, os, resource, socket, sys, tempfile, threading  # which that user may not read
os.chown(sys.argv[1], {SOMEBODY}, {GROUP})
os.chdir(sys.argv[1])
os.close(os.open(sys.argv[1] + "/of-a-group", os.O_CREAT, 0o660))
os.chown(sys.argv[1] + "/of-a-group", 0, {FURTHER})
os.chmod(sys.argv[1] + "/of-a-group", 0o660)
os.close(os.open(sys.argv[1] + "/of-root", os.O_CREAT, 0o600))
os.setgroups([{FURTHER}])
os.setresgid({GROUP}, {GROUP}, {GROUP})
os.setresuid({SOMEBODY}, {SOMEBODY}, {SOMEBODY})
"""


@needs_attachment
@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_a_program_of_another_user_has_its_files_opened_with_its_own_rights() -> None:
    with tempfile.TemporaryDirectory(prefix="rights-") as name:
        directory = Path(name)
        directory.chmod(0o755)
        data = directory / "data"
        argv = [sys.executable, "-I", "-S", "-c", BECOMES_ANOTHER + CHILD, str(data), str(data / "beside")]
        program = Program(directory, argv, attaches=True)
        try:
            assert program.do("write old") == "1"
            own = rights_of("thread-self")
            program.impair("error-write")
            program.mend()
            assert int(program.do("open-mode made")) >= FIRST_PLACED
            status = (data / "made").stat()
            assert (status.st_uid, status.st_gid, status.st_mode & 0o777) == (SOMEBODY, GROUP, 0o640)
            assert int(program.do("open of-a-group")) >= FIRST_PLACED
            assert program.do("open of-root") == "Permission denied"
            assert int(program.do("dup made")) >= FIRST_PLACED and int(program.do("dup-socket")) < FIRST_PLACED
            assert program.do("storm 20") == "ok"
            assert rights_of(program.helpers()["fault-calls"]) == own
            program.impair("error-write")
            assert {program.do(f"write {each}") for each in ("old", "made", "of-a-group", "copy")} == {EIO}
            assert program.count().passed == 0
            program.mend()
            # It is in the directory but could not resolve its path: the kernel opens the file, and that is detected.
            os.chmod(directory, 0o700)
            assert int(program.do("open-here under")) < FIRST_PLACED
            program.impair("error-write")
            assert program.count().passed == 1
        finally:
            program.close()
        wait_until(lambda: program.helpers() == {})


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_files_are_opened_only_for_processes_without_additional_rights() -> None:
    own = rights_of("thread-self")
    little = dataclasses.replace(own, capabilities=0)
    assert may_open_for(os.getpid(), own) and not may_open_for(os.getpid(), little)
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.setresuid(65534, 65534, 65534)
        os.write(theirs, b"!")
        signal.pause()
    try:
        os.read(ours, 1)
        assert may_open_for(child, own) and not may_open_for(child, little)
        assert not may_open_for(child, dataclasses.replace(own, label=b"another"))
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ours)
        os.close(theirs)
    assert not may_open_for(child, own), "it has ended"


class LetsGoOn:
    """A listener that notes which calls the kernel executes."""

    def __init__(self) -> None:
        self.passed: list[int] = []

    def let_go_on(self, identity: int) -> None:
        self.passed.append(identity)


def test_a_file_that_the_supervisor_may_not_open_may_get_an_unreported_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program may be in a directory that it could not reach with its rights, and opens the file itself."""
    own = rights_of("thread-self")
    theirs = dataclasses.replace(own, capabilities=own.capabilities ^ 1)
    made = Descriptors(None, frozenset(), with_reads=False)  # type: ignore[arg-type]
    listener = LetsGoOn()

    def refuse(*_: Any) -> int:
        raise PermissionError(errno.EACCES, "not reachable")

    monkeypatch.setattr(descriptors, "assumed", lambda *_: contextlib.nullcontext())
    wanted = Opening(str(tmp_path / "f"), str(tmp_path / "f"), os.O_WRONLY, 0o600, True)
    with monkeypatch.context() as patched:
        patched.setattr(os, "open", refuse)
        made._open(listener, Call(7, os.getpid(), "openat", ()), wanted, theirs)  # type: ignore[arg-type]
    assert listener.passed == [7] and made.has_let_pass


def test_a_descriptor_that_cannot_be_duplicated_here_may_get_an_unreported_number() -> None:
    class Unreadable:
        def has(self, link: str) -> bool:
            raise PermissionError(errno.EACCES, link)

    made, listener = Descriptors(Unreadable(), frozenset(), with_reads=False), LetsGoOn()  # type: ignore[arg-type]
    assert made.answer(listener, Call(7, os.getpid(), "dup", (3,)))  # type: ignore[arg-type]
    assert listener.passed == [7] and made.has_let_pass


def test_the_files_of_every_process_are_watched_and_what_cannot_be_inspected_may_be_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    numbers = {1: [0, 50, 60], 2: [51, 61, FIRST_PLACED]}
    files = {"/proc/1/fd/50", "/proc/2/fd/51", f"/proc/2/fd/{FIRST_PLACED}"}

    def status(link: str) -> Any:
        if link == "/proc/2/fd/61":
            raise PermissionError(errno.EACCES, link)
        return os.lstat(__file__) if link in files else os.lstat("/dev/null")

    with monkeypatch.context() as patched:
        patched.setattr(descriptors, "_numbers", numbers.__getitem__)
        patched.setattr(os, "stat", status)
        patched.setattr(descriptors, "may_open_for", lambda pid, own: own)
        watched = watched_numbers([1, 2])
        patched.setattr(descriptors, "may_open_for", lambda pid, own: own if pid == 1 else None)
        watched_if_one_is_foreign = watched_numbers([1, 2])
    assert watched == {0, 1, 2, 50, 51, 61}
    assert watched_if_one_is_foreign is None, "a selective filter would let pass what it opens"
