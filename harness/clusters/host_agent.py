"""The agent: a single file, standard library only, through which the harness acts on a host.

A host has its own processes, files and network, be it a namespace, a container or a machine behind SSH. The agent runs
there: it runs commands, starts the programs of a test and reports how they end, sends and receives probe datagrams, and
reads and writes files. It listens on a Unix socket. On its own machine the harness connects to that directly; elsewhere
it uses the sub-command `relay` through `docker exec` or an SSH channel. When the connection breaks, agent and programs
keep running; the harness reconnects and repeats its requests under the same ids, and a repeated request is performed
once.

    agent.py start BASE RUN_ID    claim the host for a run, start the daemon in the background, report it in JSON
    agent.py daemon DIR RUN_ID    serve; in a container this is process 1
    agent.py relay DIR            copy bytes between standard input and output and the daemon
    agent.py others DIR           print the runs, with their directories, whose agents are in the same network namespace
    agent.py clean BASE RUN_ID HOST ...  remove everything of a run: end its processes, run its undo commands, delete
                                  its directory; the files of these hosts are kept beside it
    agent.py fork RUN_ID ...      serve hosts on the harness's own machine, a process each; the arguments are the socket
                                  descriptor and directory of each. All end with standard input, or the harness

Messages are JSON, one per line. Programs and commands carry the run's id in their environment, so `clean` finds them.
Whatever else they start stays below the agent, to which the kernel reparents every orphan, and ends with it.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ctypes
import fcntl
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

__all__ = [
    "CONTROL_FILE",
    "LISTENING",
    "MAX_LINE_BYTES",
    "MAX_OUTPUT_BYTES",
    "NO_AGENT_STATUS",
    "RUN_VARIABLE",
    "SOCKET",
    "TIME_WAIT",
    "TIME_WAIT_S",
    "Agent",
    "adopt_orphans",
    "ancestors",
    "death_signal_setter",
    "end_descendants",
    "let_go",
    "main",
    "remove_tree",
    "socket_end",
    "sockets_here",
    "sockets_of",
]

RUN_VARIABLE = "SPLITBRAIN_RUN"
KEPT = ".left"
"""Suffix to the name of a run's directory: the directory beside it that keeps files which could not be fetched."""
MADE_BASE = "made-base"
"""File in a run's directory: the run created the parent directory too, and it is removed with the run's."""
MAX_LINE_BYTES = 4 << 20
"""Longest message: the output of a command and some room; file contents are sent in smaller pieces."""
MAX_OUTPUT_BYTES = 1 << 20
"""How much is kept of a command's output, and of its errors: more than any tool that is called here prints."""
MAX_REMEMBERED = 256
"""Answers kept in case a request is repeated after a broken connection; far more than are pending at a time."""
MAX_CHILDREN = 1000
MAX_UNSENT_BYTES = 16 << 20
"""A connection with this much unsent is closed, because nobody reads it; the harness reconnects."""
TAIL_BYTES = 2048
"""How much of a program's last output is included in the event of its end."""
NONCE_BYTES = 16
MAX_DATAGRAMS_PER_WAKE = 256
"""Datagrams read in one go, so that a flood cannot hold up the loop."""
START_TIMEOUT_S = 60.0
RELAY_TIMEOUT_S = 3.0
"""Time for an agent that has just been started to listen; one that does not listen by then has ended."""
KILL_TIMEOUT_S = 10.0
END_TIMEOUT_S = 5.0
"""Time for everything below an agent to be gone once killed; processes waiting for a disk in the kernel take longer."""
NO_AGENT_STATUS = 3
PROGRAM_VARIABLE = "SPLITBRAIN_PROGRAM"
"""Environment variable of a program and of all that it starts; identifies it among the agent's programs."""
HELPERS = "fault-"
"""Name prefix of processes that act on a program from outside and do not belong to it."""
MAX_MEMBERS = 2000
"""Most processes that are listed for one program; a system has hundreds at most."""
MAX_COMMAND_CHARS = 200
EXEC_TIMEOUT_S = 1.0
"""Time for an exec to complete, which takes less than a millisecond of processor time."""
HOLD_PASSES = 50
HOLD_PAUSE_S = 0.01
"""Number of looks, and the pause between them, for processes not yet stopped or killed, including new ones."""
CONTROL_FILE = "faults.control"
_IN_FORCE_AT, _IN_FORCE_BYTES = 16, 72
"""Position of its flags and delay (nemesis/mechanisms/shim/control.h); a clock slot without its flag does nothing."""
LISTENING = "0A"
"""State of a listening TCP socket in the kernel's tables."""
_OPEN = ("01", "02", "04", "05", "08")
"""States of a TCP connection that is being opened, is open, or is half-closed."""
TIME_WAIT, TIME_WAIT_S = "06", 60.0
"""State of a closed TCP connection, and how long the kernel keeps its addresses and ports reserved."""
UNCONNECTED = "07"
"""State of a UDP socket that receives from any address."""
SOCKET = "agent.sock"
UNDO_FILE = "undo.json"
HELPER_POLL_S = 0.02
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_CLONE_NEWNET, _CLONE_NEWNS, _CLONE_NEWUSER = 0x40000000, 0x00020000, 0x10000000
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000
_SIOCSIFFLAGS, _SIOCSIFADDR, _SIOCSIFNETMASK, _IFF_UP = 0x8914, 0x8916, 0x891C, 1
_STOP_OR_KILL = 1 << signal.SIGSTOP - 1 | 1 << signal.SIGKILL - 1
_PF_KTHREAD = 0x00200000
"""In a process's flags (linux/sched.h)."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_MAPPED = bytes(10) + b"\xff\xff"
"""Prefix of an IPv4-mapped IPv6 address."""
_ADMIN_PATH = "/usr/local/sbin:/usr/sbin:/sbin"

Message = dict[str, Any]


class _Refused(Exception):
    """A request that cannot be done; the message goes back to the harness."""


class _Child:
    """A process that the agent started."""

    def __init__(self, popen: subprocess.Popen[bytes], log_path: str | None, mark: str) -> None:
        self.popen = popen
        self.mark = mark.encode()
        self.known: dict[int, int] = {}
        """Its processes seen so far: pid -> start, in ticks since boot."""
        self.signalling = asyncio.Lock()
        """Held while its processes are killed, stopped or continued: a request to stop them repeats until all have
        stopped, and would stop again what another request continues meanwhile."""
        self.adopted: dict[int, int] = {}
        """Strays that count as its processes: pid -> start, in ticks since boot."""
        self.log_path = log_path
        self.exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    @property
    def status(self) -> int | None:
        return self.exited.result() if self.exited.done() else None

    def news(self) -> Message:
        """The event that reports its end."""
        tail = _tail(self.log_path) if self.log_path else ""
        return {"event": "exit", "pid": self.popen.pid, "status": self.status, "tail": tail}


class _Process(NamedTuple):
    """A process as the kernel knows it; `started` in ticks since boot."""

    pid: int
    name: str
    letter: str
    parent: int
    session: int
    started: int

    @property
    def has_ended(self) -> bool:
        """Whether none of its threads runs any more."""
        return self.letter in ("Z", "X")


class _End(NamedTuple):
    """One end of a connection."""

    address: str
    port: int


class _Socket(NamedTuple):
    """A socket in the kernel's tables; `state` as in linux/tcp_states.h, in hexadecimal, also for UDP. `timer_s` is the
    time left on its timer, in seconds."""

    inode: int
    own: _End
    peer: _End
    state: str
    unsent_bytes: int
    timer_s: float


class Agent:
    """Serves requests in `directory` for one run."""

    def __init__(self, directory: str, run_id: str) -> None:
        self._directory = directory
        self._run_id = run_id
        self._children: dict[int, _Child] = {}
        self._connections: set[asyncio.StreamWriter] = set()
        self._remembered: OrderedDict[str, asyncio.Task[Message]] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()
        self._udp: socket.socket | None = None
        self._programs = 0
        self._stopping = asyncio.Event()
        self._set_death_signal = death_signal_setter()
        operations: list[Callable[..., Awaitable[Message]]] = [
            self._hello, self._run, self._spawn, self._signal, self._list, self._write, self._read, self._pack,
            self._udp_open, self._udp_send, self._undo, self._ask, self._state,
            self._enter, self._members, self._strays, self._adopt, self._end_strays,
            self._connections_of, self._send_queues,
        ]  # fmt: skip
        self._operations = {operation.__name__[1:]: operation for operation in operations}

    async def serve(self, listener: socket.socket | None = None) -> None:
        """Serve until SIGTERM, on `listener` or else on a socket in the agent's directory; then end all descendants of
        this process."""
        adopt_orphans()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, self._reap)
        loop.add_signal_handler(signal.SIGTERM, self._stopping.set)
        os.chdir(self._directory)  # a socket address is limited to 107 bytes, and the path may be longer
        if listener is None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(SOCKET)
        place: Message = {"path": SOCKET} if listener is None else {"sock": listener}
        server = await asyncio.start_unix_server(self._serve_connection, limit=MAX_LINE_BYTES, **place)
        try:
            await self._stopping.wait()
        finally:
            server.close()
            for child in self._children.values():
                _kill_group(child.popen.pid, signal.SIGKILL)
                if child.log_path is not None and child.status is None:
                    self._kill_members(child)
            end_descendants()

    async def _serve_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(writer)
        try:
            while line := await reader.readline():
                request = json.loads(line)
                task = asyncio.ensure_future(self._answer(request, writer))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        except (ValueError, OSError):
            pass  # not the harness, or it is gone
        finally:
            self._connections.discard(writer)
            writer.close()

    async def _answer(self, request: Message, writer: asyncio.StreamWriter) -> None:
        ident = str(request["id"])
        if (task := self._remembered.get(ident)) is None:
            task = asyncio.ensure_future(self._perform(request))
            if request["op"] not in ("read", "hello", "list", "state"):  # large answers, or harmless to repeat
                self._remembered[ident] = task
                while len(self._remembered) > MAX_REMEMBERED:
                    self._remembered.popitem(last=False)
        answer = await asyncio.shield(task)
        self._send(writer, {"id": ident, **answer})

    async def _perform(self, request: Message) -> Message:
        try:
            return await self._operations[request["op"]](**request.get("arguments", {}))
        except OSError as error:
            return {"error": f"{error.filename or request['op']}: {error.strerror or error}"}
        except Exception as error:  # whatever it is, the caller must learn that the request failed
            return {"error": str(error) if isinstance(error, _Refused) else f"{type(error).__name__}: {error}"}

    def _send(self, writer: asyncio.StreamWriter, message: Message) -> None:
        if writer.is_closing():
            return
        writer.write(json.dumps(message, separators=(",", ":")).encode() + b"\n")
        if writer.transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            writer.transport.abort()

    def _tell_all(self, message: Message) -> None:
        for writer in list(self._connections):
            self._send(writer, message)

    async def _hello(self) -> Message:
        python = {"python": list(sys.version_info[:3]), "interpreter": sys.executable, "directory": os.getcwd()}
        return {**python, "pid": os.getpid(), "wall_ns": time.time_ns(), "monotonic_ns": time.monotonic_ns()}

    # Processes

    def _start(
        self, argv: list[str], log_path: str | None, mounts: list[list[str]] | None = None, **options: Any
    ) -> _Child:
        """Start a process in a session of its own. A program, which has a log, gets a death signal, so it dies with the
        agent; a short command ends on its own, and starts in half the time without one."""
        if len(self._children) >= MAX_CHILDREN:
            ended = [pid for pid, child in self._children.items() if child.status is not None]
            for pid in ended[: len(ended) // 2 + 1]:
                del self._children[pid]
            if not ended:
                raise _Refused(f"{MAX_CHILDREN} processes are running already")
        self._programs += 1
        mark = f"{os.getpid()}-{self._programs}"
        options["env"] = {**options["env"], PROGRAM_VARIABLE: mark}
        try:
            first = self._set_death_signal if log_path else None
            if mounts:
                first = _mounts_setter(mounts, self._set_death_signal)
            popen = subprocess.Popen(argv, start_new_session=True, preexec_fn=first, **options)
        except OSError as error:
            raise _Refused(f"{error.filename or argv[0]}: {error.strerror}") from None
        except subprocess.SubprocessError:  # a failed preexec_fn gives no reason
            raise _Refused(f"{argv[0]}: cannot set up its own mounts") from None
        child = self._children[popen.pid] = _Child(popen, log_path, mark)
        return child

    def _members_of(self, child: _Child) -> list[_Process]:
        """Every process of a program that has not ended, including what it started, whatever group, session or parent
        that has by now. Found by parent and session, by the mark in the environment, or because it was seen before."""
        table = {process.pid: process for process in _processes()}
        first = child.popen.pid
        found = {pid for pid, started in child.known.items() if pid in table and table[pid].started == started}
        found |= {process.pid for process in _adopted(child, table)}
        if child.status is None:
            found.add(first)
        mark = PROGRAM_VARIABLE.encode() + b"=" + child.mark
        found |= {pid for pid in table.keys() - found if _has_in_environment(pid, mark)}
        found = _with_offspring(found | {process.pid for process in table.values() if process.session == first}, table)
        members = [table[pid] for pid in sorted(found & table.keys()) if not table[pid].name.startswith(HELPERS)]
        child.known = {process.pid: process.started for process in members if process.pid not in child.adopted}
        return [process for process in members if not process.has_ended]

    async def _members(self, pid: int) -> Message:
        """The processes of a program that have not ended, each as [pid, start in ticks, state letter, name, whether it
        waits in the kernel and will stop or end by a signal before it runs on]."""
        members = self._members_of(self._child(pid))[:MAX_MEMBERS]
        return {"members": [[*_shown(member), _meets_signal(member)] for member in members]}

    def _find_strays(self) -> list[_Process]:
        """Descendants of this agent that belong to no running command and to none of its programs, other than by having
        been adopted."""
        table = {process.pid: process for process in _processes()}
        children = list(self._children.values())
        left = dict.fromkeys(_descendants([os.getpid()], table))
        adopted = [process for child in children for process in _adopted(child, table)]
        at_work = [child.popen.pid for child in children if child.status is None]
        for process in (*(table[pid] for pid in at_work if pid in table), *_descendants(at_work, table)):
            left.pop(process, None)
        known = {item for child in children for item in child.known.items()}
        sessions, marks = {child.popen.pid for child in children}, {child.mark for child in children}
        of_programs = [
            process
            for process in left
            if (process.pid, process.started) in known or process.session in sessions or _mark_of(process.pid) in marks
        ]
        for process in (*of_programs, *_descendants([process.pid for process in of_programs], table)):
            left.pop(process, None)
        left.update(dict.fromkeys(adopted))
        return [process for process in left if not process.name.startswith(HELPERS)]

    async def _strays(self) -> Message:
        """Orphaned processes that cannot be traced to the program that started them, such as a daemon with an
        environment of its own, each as [pid, start in ticks, state letter, name]."""
        strays = self._find_strays()[:MAX_MEMBERS]
        return {"strays": [list(_shown(stray)) for stray in strays]}

    async def _adopt(self, pid: int, strays: list[list[int]]) -> Message:
        """Count strays, each [pid, start in ticks], as processes of a program from now on, so that they are signalled
        with it. Strays that are older than the program, or were left behind by a command, are not adopted."""
        child, wanted = self._child(pid), {(stray, started) for stray, started in strays}
        first = next((process for process in _processes() if process.pid == pid), None)
        if child.status is None and first is not None:
            for stray in self._find_strays():
                is_its = stray.started >= first.started and not _mark_of(stray.pid)
                if is_its and (stray.pid, stray.started) in wanted:
                    child.adopted[stray.pid] = stray.started
        return {}

    async def _end_strays(self) -> Message:
        """Kill all strays; returns [pid, command] of each that has ended, and of each that has not."""
        commands = dict[int, str]()
        deadline = time.monotonic() + END_TIMEOUT_S
        while (left := self._find_strays()) and time.monotonic() < deadline:
            for stray in left:
                commands.setdefault(stray.pid, _command_of(stray.pid) or stray.name)
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(stray.pid, signal.SIGKILL)
            await asyncio.sleep(HOLD_PAUSE_S)
        ended = commands.keys() - {stray.pid for stray in left}
        return {
            "ended": [[pid, commands[pid]] for pid in sorted(ended)],
            "left": [[stray.pid, commands.get(stray.pid, stray.name)] for stray in left],
        }

    async def _connections_of(self, pids: list[int]) -> Message:
        """The connections that programs have opened, including connected UDP sockets, each as [program's pid, pid, peer
        address, peer port, pid of the program that has the other end, or 0 if it is none of these]; and, as `heard`,
        the addresses on which they receive UDP from anybody, each as [program's pid, pid, address, port]."""
        owners: dict[int, list[tuple[int, int]]] = {}
        for pid in pids:
            for member in self._members_of(self._child(pid)):
                for inode in sockets_of(member.pid):
                    owners.setdefault(inode, []).append((pid, member.pid))
        return {
            "connections": [
                [*owner, *peer, next((program for program, _ in owners.get(other, ())), 0)]
                for inode, peer, other in _connections()
                for owner in owners.get(inode, ())
            ],
            "heard": [
                [*owner, *each.own]
                for each in sockets_here("udp", "udp6")
                if each.state == UNCONNECTED
                for owner in owners.get(each.inode, ())
            ],
        }

    async def _send_queues(self, pids: list[int], ports: list[int]) -> Message:
        """Unacknowledged bytes of the programs' TCP sockets that are connected to one of these ports, each as
        [address, port, bytes]. Sockets that no program has open any more are left out."""
        open_here = {
            inode for pid in pids for member in self._members_of(self._child(pid)) for inode in sockets_of(member.pid)
        }
        wanted = set(ports)
        return {
            "queues": [
                [*each.peer, each.unsent_bytes]
                for each in sockets_here("tcp", "tcp6")
                if each.peer.port in wanted and each.inode in open_here
            ]
        }

    def _child(self, pid: int) -> _Child:
        child = self._children.get(pid)
        if child is None:
            raise _Refused(f"process {pid} was not started by this agent")
        return child

    def _environment(self, additions: dict[str, str] | None) -> dict[str, str]:
        return {**os.environ, **(additions or {}), RUN_VARIABLE: self._run_id}

    async def _run(self, argv: list[str], stdin: str = "", timeout_s: float = 20.0, environment: Any = None) -> Message:
        """Run a short command. Its output goes to memory files, so that no child of it can delay the answer."""
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(os.fdopen(os.memfd_create(name), "w+b")) for name in ("in", "out", "err")]
            given, output, errors = files
            given.write(stdin.encode())
            given.seek(0)
            env = self._environment(environment)
            child = self._start(argv, None, stdin=given, stdout=output, stderr=errors, env=env, cwd="/")
            try:
                status = await asyncio.wait_for(asyncio.shield(child.exited), timeout_s)
            except TimeoutError:
                _kill_group(child.popen.pid, signal.SIGKILL)
                status = -9
            texts = []
            for file in (output, errors):
                file.seek(0)
                texts.append(file.read(MAX_OUTPUT_BYTES).decode(errors="replace"))
        # A killed command that waits in the kernel for a frozen disk ends once the disk thaws; it is remembered until
        # then, so that it does not count as a stray.
        child.exited.add_done_callback(lambda _: self._forget(child))
        return {"status": status, "stdout": texts[0], "stderr": texts[1]}

    def _forget(self, child: _Child) -> None:
        if self._children.get(child.popen.pid) is child:
            del self._children[child.popen.pid]

    async def _spawn(
        self,
        argv: list[str],
        environment: dict[str, str],
        log: str,
        mounts: list[list[str]] | None = None,
        directory: str = "/",
    ) -> Message:
        """Start a long-running program in `directory`; its output is appended to the file `log`. For each [file, place]
        of `mounts`, it sees the file in that place, and nobody else does."""
        os.makedirs(os.path.dirname(log), exist_ok=True)
        with open(log, "ab") as output:
            child = self._start(
                argv, log, mounts, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                env=self._environment(environment), cwd=directory,
            )  # fmt: skip
        return {"pid": child.popen.pid}

    async def _signal(self, pid: int, number: int) -> Message:
        """Signal a program. SIGKILL, SIGSTOP and SIGCONT go to each of its processes, including those that are started
        meanwhile. Other signals go to its process group, but only once its adopted processes have ended by them: a
        program that does not pass them on to these could end at once, and they would be killed with it."""
        child = self._child(pid)
        if number not in (signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT):
            if child.status is None and await self._end_adopted(child, number):
                _kill_group(pid, number)
            return {}
        async with child.signalling:
            await self._signal_all(child, number)
        return {}

    async def _signal_all(self, child: _Child, number: int) -> None:
        # A process that waits in the kernel (D) stops before it runs again.
        done = {signal.SIGKILL: "", signal.SIGSTOP: "TtD", signal.SIGCONT: "RSDI"}[signal.Signals(number)]
        signalled = set[tuple[int, int]]()
        for _ in range(HOLD_PASSES):
            left = [
                member
                for member in self._members_of(child)
                if member.letter not in done or (member.pid, member.started) not in signalled
            ]
            for member in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(member.pid, number)
                signalled.add((member.pid, member.started))
            if not left:
                break
            await asyncio.sleep(HOLD_PAUSE_S)

    async def _end_adopted(self, child: _Child, number: int) -> bool:
        """Signal the adopted processes of a program; returns whether they have ended within END_TIMEOUT_S."""
        for process in _adopted(child, {process.pid: process for process in _processes()}):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process.pid, number)
                os.kill(process.pid, signal.SIGCONT)  # a stopped process does not handle signals
        deadline = time.monotonic() + END_TIMEOUT_S
        while child.adopted and _adopted(child, {process.pid: process for process in _processes()}):
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(HOLD_PAUSE_S)
        return True

    async def _state(self, pid: int) -> Message:
        """The letter of a process's state as /proc shows it; empty when there is no such process."""
        try:
            return {"letter": _living(pid, _letter_of(pid))[1]}
        except OSError:
            return {"letter": ""}

    async def _list(self) -> Message:
        """The programs that have ended, each as its exit event."""
        ended = [child for child in self._children.values() if child.log_path and child.status is not None]
        return {"ended": [child.news() for child in ended]}

    def _reap(self) -> None:
        """Reap whatever has ended: our children, and orphans that were reparented to us."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            child = self._children.get(pid)
            if child is None or child.exited.done():
                continue
            child.popen.returncode = os.waitstatus_to_exitcode(status)
            child.exited.set_result(child.popen.returncode)
            _kill_group(pid, signal.SIGKILL)  # what it started may have outlived it
            if child.log_path is not None:
                self._kill_members(child)
            if child.log_path is not None:
                self._tell_all(child.news())

    def _kill_members(self, child: _Child) -> None:
        for member in self._members_of(child):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(member.pid, signal.SIGKILL)

    # Files

    async def _write(self, path: str, data: str, offset: int, mode: int = 0o644, keep: bool = False) -> Message:
        """Write bytes at an offset of a file and set its mode; offset 0 truncates it first. With `keep`, it is neither
        truncated nor changed in mode, for files that are mapped."""
        os.makedirs(os.path.dirname(path) or "/", exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if offset == 0 and not keep else 0)
        with open(os.open(path, flags, mode), "wb", buffering=0) as file:
            if not keep:
                os.fchmod(file.fileno(), mode)
            content = memoryview(base64.b64decode(data))
            while content:
                written = os.pwrite(file.fileno(), content, offset)
                content, offset = content[written:], offset + written
            if not keep:  # the harness's own files must survive a file system that is shut down
                os.fsync(file.fileno())
        if not keep:
            _sync_directory(os.path.dirname(path) or "/")
        return {}

    async def _read(self, path: str, offset: int, size_bytes: int) -> Message:
        with open(path, "rb") as file:
            file.seek(offset)
            return {"data": base64.b64encode(file.read(min(size_bytes, MAX_OUTPUT_BYTES))).decode()}

    async def _pack(self, path: str) -> Message:
        """Pack a directory into a compressed tar among the agent's files, to be fetched by `read`."""
        packed = os.path.join(self._directory, path.strip("/").replace("/", "-")[-100:] + ".tar.gz")
        await asyncio.to_thread(_pack_directory, path, packed)
        return {"path": packed, "size_bytes": os.path.getsize(packed)}

    # Probes

    async def _udp_open(self, address: str) -> Message:
        """Open the socket for probes on `address`; returns its port. There is only one: later calls return the same."""
        if self._udp is None:
            self._udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            self._udp.setblocking(False)
            self._udp.bind((address, 0))
            asyncio.get_running_loop().add_reader(self._udp, self._take_datagrams, self._udp)
        return {"port": self._udp.getsockname()[1]}

    def _take_datagrams(self, receiver: socket.socket) -> None:
        """Report every nonce that has arrived, and from where."""
        for _ in range(MAX_DATAGRAMS_PER_WAKE):
            try:
                data, (address, _port) = receiver.recvfrom(NONCE_BYTES + 1)
            except OSError:
                return
            if len(data) == NONCE_BYTES:
                self._tell_all({"event": "datagram", "nonce": data.hex(), "from": address})

    async def _udp_send(self, datagrams: list[list[Any]]) -> Message:
        """Send datagrams, each [nonce in hex, address, port]; the answer lists what could not be sent, and why."""
        if self._udp is None:
            raise _Refused("no probe socket is open")
        errors = {}
        for nonce, address, port in datagrams:
            try:
                self._udp.sendto(bytes.fromhex(nonce), (address, port))
            except OSError as error:
                errors[nonce] = error.strerror or str(error)
        return {"errors": errors}

    # Places and helpers

    async def _enter(self, network: str, device: str, address: str, groups: list[str], has_mounts: bool) -> Message:
        """Move the agent, and whatever it starts from now on, to where its host is on this machine: the network
        namespace of this path, whose device gets the host's address and prefix; the control groups, by their
        directories; and, if it `has_mounts`, a mount namespace of its own."""
        libc = ctypes.CDLL(None, use_errno=True)
        for group in groups:
            Path(group, "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")
        with open(network, "rb") as namespace:
            _require(libc.setns(namespace.fileno(), _CLONE_NEWNET), network)
        _bring_up(device, address)
        if has_mounts:
            _require(libc.unshare(_CLONE_NEWNS), "a mount namespace")
            _require(libc.mount(b"none", b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None), "a mount namespace")
        return {}

    async def _ask(self, name: str, line: str, timeout_s: float, listens_within_s: float) -> Message:
        """Send a line to the helper that listens on the socket `name` of this directory, and return the line that it
        answers; one that was just started has `listens_within_s` seconds to listen."""
        deadline_s = time.monotonic() + listens_within_s
        while True:
            try:
                reader, writer = await asyncio.open_unix_connection(name, limit=MAX_LINE_BYTES)
                break
            except OSError as error:
                if time.monotonic() > deadline_s:
                    raise _Refused(f"{name} does not listen: {error.strerror}") from None
                await asyncio.sleep(HELPER_POLL_S)
        try:
            writer.write(line.encode() + b"\n")
            answer = await asyncio.wait_for(reader.readline(), timeout_s)
        except TimeoutError:
            raise _Refused(f"{name} did not answer within {timeout_s:g} s") from None
        finally:
            writer.close()
        if not answer:
            raise _Refused(f"{name} has ended")
        return {"answer": answer.decode()}

    # The end

    async def _undo(self, key: str, argv: list[str] | None, stdin: str = "") -> Message:
        """Store a command under `key` that `clean` runs to undo something; None removes it. "thaw..." runs first."""
        commands = _undo_commands(self._directory)
        commands.pop(key, None)
        if argv is not None:
            commands[key] = {"argv": argv, "stdin": stdin}
        path = os.path.join(self._directory, UNDO_FILE)
        Path(path + ".new").write_text(json.dumps(commands), encoding="utf-8")
        os.replace(path + ".new", path)
        return {}


def _undo_commands(directory: str) -> dict[str, Message]:
    try:
        return dict(json.loads(Path(directory, UNDO_FILE).read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError):
        return {}


def _tail(path: str) -> str:
    with open(path, "rb") as file:
        file.seek(max(0, os.path.getsize(path) - TAIL_BYTES))
        return file.read(TAIL_BYTES).decode(errors="replace")


def _pack_directory(path: str, packed: str) -> None:
    import tarfile  # slower to import, with what it imports, than all the rest, and needed once at most

    ours = ("lost+found", ".splitbrain-")  # the file system's own, or put there by faults
    with tarfile.open(packed, "w:gz", compresslevel=1) as archive:
        if os.path.isdir(path):
            archive.add(path, ".", filter=lambda m: None if os.path.basename(m.name).startswith(ours) else m)


def _processes() -> Iterator[_Process]:
    """Every process in /proc."""
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            shown = Path("/proc", name, "stat").read_bytes()
        except OSError:
            continue
        before, _, after = shown.rpartition(b")")
        fields = after.split()
        comm = before.partition(b"(")[2].decode(errors="replace")
        _, letter = _living(int(name), fields[0].decode())
        yield _Process(int(name), comm, letter, int(fields[1]), int(fields[3]), int(fields[19]))


def _descendants(pids: list[int], table: dict[int, _Process]) -> list[_Process]:
    """The processes of a table that descend from one of `pids` and have not ended."""
    children: dict[int, list[_Process]] = {}
    for process in table.values():
        children.setdefault(process.parent, []).append(process)
    found, above = list[_Process](), [*pids]
    while above:
        below = children.pop(above.pop(), [])
        found += below
        above += [process.pid for process in below]
    return [process for process in found if not process.has_ended]


def _adopted(child: _Child, table: dict[int, _Process]) -> list[_Process]:
    """The adopted strays of a program that have not ended; what they have started is adopted with them."""
    found = {pid for pid, started in child.adopted.items() if pid in table and table[pid].started == started}
    found = _with_offspring(found, table)
    here = [table[pid] for pid in sorted(found) if not table[pid].has_ended]
    child.adopted = {process.pid: process.started for process in here}
    return here


def _with_offspring(found: set[int], table: dict[int, _Process]) -> set[int]:
    """These processes, and those of a table that they have started, as far as parents and sessions show."""
    while True:
        more = {each.pid for each in table.values() if each.parent in found or each.session in found}
        if more <= found:
            return found
        found = found | more


def _words_of(pid: int) -> list[bytes]:
    """The command line of a process; empty if it is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:-1]
    return []


def _command_of(pid: int) -> str:
    """The beginning of the command line of a process; empty if it is gone."""
    return b" ".join(_words_of(pid)).decode(errors="replace")[:MAX_COMMAND_CHARS]


def adopt_orphans() -> None:
    """Have the kernel reparent orphaned descendants to this process, so that they stay below it."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_descendants() -> None:
    """Kill all descendants of this process, which adopts orphans, until none is left; gives up on those that do not end
    within `END_TIMEOUT_S`. Blocks."""
    deadline = time.monotonic() + END_TIMEOUT_S
    while time.monotonic() < deadline:
        left = _descendants([os.getpid()], {process.pid: process for process in _processes()})
        if not left:
            return
        for process in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(HOLD_PAUSE_S)


def _letter_of(pid: int) -> str:
    """The state letter of a process or thread, as /proc shows it. Raises OSError."""
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0].decode()


def _shown(process: _Process) -> tuple[int, int, str, str]:
    return process.pid, process.started, process.letter, process.name


def _meets_signal(process: _Process) -> bool:
    """Whether a process waits in the kernel and will stop or end before it runs on: such a signal is pending, or
    another of its threads has already stopped by it."""
    if process.letter != "D":
        return False
    with contextlib.suppress(OSError):
        fields = dict(line.split(":", 1) for line in Path(f"/proc/{process.pid}/status").read_text().splitlines())
        if any(int(fields[name], 16) & _STOP_OR_KILL for name in ("SigPnd", "ShdPnd")):
            return True
        return any(_letter_of(thread) in ("T", "t") for thread in map(int, os.listdir(f"/proc/{process.pid}/task")))
    return False


def _living(pid: int, letter: str = "Z") -> tuple[int, str]:
    """The thread that represents a process whose first thread is in the state `letter`, and its state. If the first
    thread has ended, the kernel shows a zombie without environment and descriptors even while other threads run; one of
    those represents the process then, or the first thread if none runs."""
    if letter == "Z":
        with contextlib.suppress(OSError):
            for thread in map(int, os.listdir(f"/proc/{pid}/task")):
                with contextlib.suppress(OSError):
                    if (shown := _letter_of(thread)) not in ("Z", "X"):
                        return thread, shown
    return pid, letter


def _environment_of(pid: int) -> list[bytes]:
    """The strings b"NAME=value" that a process was started with; empty if they cannot be read."""
    deadline = time.monotonic() + EXEC_TIMEOUT_S
    with contextlib.suppress(OSError):
        while True:
            try:
                shown = Path(f"/proc/{pid}/environ").read_bytes()
            except (ProcessLookupError, PermissionError):  # its first thread has ended, or all of it
                shown = Path(f"/proc/{_living(pid)[0]}/environ").read_bytes()
            if shown or _has_no_environment(pid) or time.monotonic() > deadline:
                return shown.split(b"\0")
            time.sleep(0.001)
    return []


def _has_no_environment(pid: int) -> bool:
    """Whether a process whose environment was read as empty really has none. A process during an exec shows none
    either; if the exec has completed by now, the process has one that was not read yet."""
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    letter, flags, start, end = fields[0], int(fields[6]), int(fields[47]), int(fields[48])
    return letter in (b"Z", b"X") or bool(flags & _PF_KTHREAD) or start == end != 0


def _has_in_environment(pid: int, word: bytes) -> bool:
    return word in _environment_of(pid)


def _mark_of(pid: int) -> bytes:
    """The program that a process belongs to according to its environment; empty if that names none."""
    name = PROGRAM_VARIABLE.encode() + b"="
    return next((word.removeprefix(name) for word in _environment_of(pid) if word.startswith(name)), b"")


def sockets_of(pid: int) -> set[int]:
    """The inodes of a process's open sockets."""
    found = set()
    with contextlib.suppress(OSError):
        directory = f"/proc/{_living(pid, _letter_of(pid))[0]}/fd"
        for name in os.listdir(directory):
            with contextlib.suppress(OSError):
                kind, _, rest = os.readlink(f"{directory}/{name}").partition(":[")
                if kind == "socket":
                    found.add(int(rest.rstrip("]")))
    return found


def _connections() -> Iterator[tuple[int, _End, int]]:
    """(inode, peer, inode of the other end) of each TCP connection that was opened here rather than accepted, including
    those that are not established yet or half-closed, and of each connected UDP socket. The last is 0 if the other end
    is not here."""
    tcp, udp = sockets_here("tcp", "tcp6"), sockets_here("udp", "udp6")
    listening = {each.own.port for each in tcp if each.state == LISTENING}
    opened = [each for each in tcp if each.state in _OPEN and each.own.port not in listening]
    for table, sockets in ((tcp, opened), (udp, [each for each in udp if each.state == "01"])):
        other_ends = {(each.own, each.peer): each.inode for each in table}
        # Sockets that receive from anybody, on one address or on all: they hold unaccepted connections, and all UDP.
        takers = {each.own: each.inode for each in table if each.state in (LISTENING, UNCONNECTED)}
        for each in sockets:
            address, port = each.peer
            is_here = address in (each.own.address, "::1") or address.startswith("127.")
            places = (each.peer, *((_End("0.0.0.0", port), _End("::", port)) if is_here else ()))
            taker = next((takers[place] for place in places if place in takers), 0)
            yield each.inode, each.peer, other_ends.get((each.peer, each.own)) or taker


def sockets_here(*tables: str) -> list[_Socket]:
    """The sockets in these tables of the kernel (tcp, udp6, ... of /proc/net), in this network namespace."""
    found = list[_Socket]()
    for name in tables:
        with contextlib.suppress(OSError):
            for line in Path("/proc/net", name).read_text(encoding="ascii").splitlines()[1:]:
                _, own, peer, state, queues, timer, _, _, _, inode, *_ = line.split()
                unsent_bytes = int(queues.partition(":")[0], 16)
                timer_s = int(timer.partition(":")[2], 16) / _TICKS_PER_S
                found.append(_Socket(int(inode), socket_end(own), socket_end(peer), state, unsent_bytes, timer_s))
    return found


def socket_end(shown: str) -> _End:
    """Parse one end of a socket as a table shows it. An IPv4-mapped IPv6 address becomes the IPv4 address."""
    address, _, port = shown.partition(":")
    words = [
        bytes.fromhex(address[at : at + 8])[:: 1 if sys.byteorder == "big" else -1] for at in range(0, len(address), 8)
    ]
    packed = b"".join(words)
    if len(packed) == 16 and packed[:12] != _MAPPED:
        return _End(socket.inet_ntop(socket.AF_INET6, packed), int(port, 16))
    return _End(socket.inet_ntoa(packed[-4:]), int(port, 16))


def _kill_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def _sync_directory(path: str) -> None:
    with contextlib.ExitStack() as stack:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        stack.callback(os.close, descriptor)
        os.fsync(descriptor)


def death_signal_setter(number: int = signal.SIGKILL) -> Callable[[], None]:
    """A function for a child of this process to run first, so that it gets a signal when this process dies.

    The library is loaded here and not in the child: between fork and exec a child should do next to nothing.
    """
    prctl, parent_pid = ctypes.CDLL(None).prctl, os.getpid()

    def set_death_signal() -> None:
        prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
        if os.getppid() != parent_pid:  # it died before the death signal was set
            os._exit(1)

    return set_death_signal


def _mounts_setter(mounts: Sequence[Sequence[str]], first: Callable[[], None]) -> Callable[[], None]:
    """A function for a child of this process to run, which calls `first` and then mounts each file of [file, place] in
    its place. An ordinary user may mount only in a user namespace; in it the child keeps its user and group ids."""
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.geteuid(), os.getegid()
    pairs = [(os.fsencode(file), os.fsencode(place)) for file, place in mounts]
    every, bind = ctypes.c_ulong(_MS_REC | _MS_PRIVATE), ctypes.c_ulong(_MS_BIND)

    def set_mounts() -> None:
        first()
        _require(libc.unshare(_CLONE_NEWNS | (_CLONE_NEWUSER if user else 0)), "a mount namespace")
        if user:
            own = {"setgroups": "deny", "uid_map": f"{user} {user} 1", "gid_map": f"{group} {group} 1"}
            for name, line in own.items():
                Path("/proc/self", name).write_text(line, encoding="ascii")
        _require(libc.mount(b"none", b"/", None, every, None), "a mount namespace")
        for file, place in pairs:
            _require(libc.mount(file, place, None, bind, None), "a mount")

    return set_mounts


def _fork_command(run_id: str, *arguments: str) -> int:
    """Serve hosts of this machine, each in a process of its own. Whichever of these processes dies, even if killed, the
    others still shut down cleanly, with all that programs have started."""
    adopt_orphans()
    listeners = {socket.socket(fileno=int(number)): directory for number, directory in _pairs(arguments)}
    prepare, pids = death_signal_setter(signal.SIGTERM), list[int]()
    for listener, directory in listeners.items():
        pid = os.fork()
        if pid == 0:
            prepare()
            for other in listeners.keys() - {listener}:
                other.close()
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            asyncio.run(Agent(directory, run_id).serve(listener))
            os._exit(0)
        pids.append(pid)
    for listener in listeners:
        listener.close()
    left, nothing = set(pids), os.open(os.devnull, os.O_RDONLY)

    def reap(number: int = 0, frame: Any = None) -> None:
        with contextlib.suppress(ChildProcessError):
            while pid := os.waitpid(-1, os.WNOHANG)[0]:
                left.discard(pid)

    signal.signal(signal.SIGCHLD, reap)  # orphans of a killed agent are reparented to us
    signal.signal(signal.SIGTERM, lambda number, frame: os.dup2(nothing, 0))  # ends the read below, at any moment
    reap()
    os.read(0, 1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for pid in left:
        os.kill(pid, signal.SIGTERM)  # not waited for yet, so the pid cannot have been reused
    for pid in left:
        os.waitpid(pid, 0)
    end_descendants()
    return 0


def _pairs(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    return zip(words[::2], words[1::2], strict=True)


def _bring_up(device: str, address: str) -> None:
    """Give a device its address, and bring it and the loopback device up. Raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        own, _, bits = address.partition("/")
        mask = (0xFFFFFFFF << (32 - int(bits)) & 0xFFFFFFFF).to_bytes(4, "big")
        for request, value in ((_SIOCSIFADDR, socket.inet_aton(own)), (_SIOCSIFNETMASK, mask)):
            fcntl.ioctl(any_socket, request, struct.pack("16sH2x4s8x", device.encode(), socket.AF_INET, value))
        for name in ("lo", device):
            fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH14x", name.encode(), _IFF_UP))


def _require(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), what)


def _start_command(base: str, run_id: str, source: str) -> int:
    """Claim the host, start the daemon, print {"started": true} or {"refused": why}."""
    directory, owner = os.path.join(base, run_id), Path(base, "owner")
    was_there = os.path.isdir(base)
    try:
        os.makedirs(base, mode=0o711, exist_ok=True)  # a replica may run as another user
        is_ours = _take(owner, run_id)
    except PermissionError as error:
        # The fix is another user, not another directory. Without a traceback: nothing was changed here.
        sys.exit(f"PermissionError: {error}")
    except OSError as error:
        if not was_there:
            with contextlib.suppress(OSError):
                os.rmdir(base)
        why = f"its directory {base} cannot be used ({error.strerror}): set another with directory = in the inventory"
        print(json.dumps({"refused": why, "taken": True}))
        return 0
    if not is_ours:
        name = owner.read_text().strip()
        why = f"the host is in use by run {name}: if that run is dead, run `harness clean`"
        if name == run_id:
            why = "the host is already in this run under another name: list every machine once"
        if not name:
            why = f"{owner} is empty: if no run is using the host, delete it"
        print(json.dumps({"refused": why, "taken": True}))
        return 0
    os.makedirs(directory, mode=0o711, exist_ok=True)
    if not was_there:
        Path(directory, MADE_BASE).touch()
    path, log_path = os.path.join(directory, "agent.py"), os.path.join(directory, "agent.log")
    Path(path).write_text(source, encoding="utf-8")
    with open(log_path, "wb") as log:
        daemon = subprocess.Popen(
            [sys.executable, path, "daemon", directory, run_id],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd="/",
            env={**os.environ, RUN_VARIABLE: run_id},
        )  # fmt: skip
    deadline = time.monotonic() + START_TIMEOUT_S
    while not os.path.exists(os.path.join(directory, SOCKET)):
        if daemon.poll() is not None or time.monotonic() > deadline:
            said = _tail(log_path)[-300:] or f"no output within {START_TIMEOUT_S:g} s"
            print(json.dumps({"refused": f"the agent did not start: {said}"}))
            return 0
        time.sleep(0.02)
    print(json.dumps({"started": True, "interpreter": sys.executable}))
    return 0


def _take(owner: Path, run_id: str) -> bool:
    """Create the file that names the host's owner; False if it exists. It gets its name only once its content is
    durable, so that a power loss cannot leave a host that is claimed by nobody."""
    draft = owner.with_name(f"{owner.name}.{run_id}.{os.getpid()}")  # unique: others may claim the host concurrently
    try:
        with open(draft, "w", encoding="utf-8") as file:
            file.write(run_id)
            file.flush()
            os.fsync(file.fileno())
        os.link(draft, owner)
    except FileExistsError:
        return False
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()
    return True


def _others_command(directory: str) -> int:
    """Print the runs, with their directories, whose agents are in the same network namespace: their nftables rules
    would replace each other's, even with different directories."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        words = [os.fsdecode(word) for word in _words_of(int(name))]
        is_agent = len(words) > 4 and words[1:3] == [f"{words[3]}/agent.py", "daemon"]
        with contextlib.suppress(OSError):  # it has ended
            is_other = is_agent and os.path.normpath(words[3]) != os.path.normpath(directory)
            if is_other and os.path.samefile(f"/proc/{name}/ns/net", "/proc/self/ns/net"):
                print(words[4], os.path.dirname(words[3]))
    return 0


def _reach(connection: socket.socket, directory: str) -> bool:
    if os.path.isdir(directory):
        os.chdir(directory)
        return connection.connect_ex(SOCKET) == 0
    return False


def _relay_command(directory: str) -> int:
    """Copy bytes both ways until either side closes."""
    with socket.socket(socket.AF_UNIX) as connection:
        deadline = time.monotonic() + RELAY_TIMEOUT_S
        while not _reach(connection, directory):
            if time.monotonic() > deadline:
                os.write(1, b'{"event":"gone"}\n')
                return NO_AGENT_STATUS
            time.sleep(0.02)
        ways = {0: lambda data: connection.sendall(data), connection.fileno(): lambda data: _write_all(1, data)}
        with contextlib.suppress(ConnectionError):  # a daemon that ends with a request unread resets the connection
            while True:
                for descriptor in select.select(list(ways), [], [])[0]:
                    data = os.read(descriptor, 1 << 16)
                    if not data:
                        return 0
                    ways[descriptor](data)
        return 0


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def ancestors() -> frozenset[int]:
    """This process and all its ancestors."""
    found: set[int] = set()
    pid = os.getpid()
    while pid > 0 and pid not in found:
        found.add(pid)
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                pid = int(file.read().rpartition(b")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            break
    return frozenset(found)


def _marked(run_id: str) -> Iterator[int]:
    """Processes of a run by the mark in their environment, except this one and its ancestors."""
    spared = ancestors()
    mark = f"{RUN_VARIABLE}={run_id}".encode()
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) not in spared and _has_in_environment(int(name), mark):
            yield int(name)  # one that has ended has no environment


def _undo_all(commands: dict[str, Message], removed: list[str], left: list[str]) -> None:
    for key, command in reversed(commands.items()):
        argv, given = command["argv"], command["stdin"]
        try:
            done = subprocess.run(argv, input=given, capture_output=True, text=True, timeout=KILL_TIMEOUT_S)
            said = done.stderr.strip() if done.returncode else None
        except (OSError, subprocess.TimeoutExpired) as error:
            said = str(error)
        (removed if said is None else left).append(key if said is None else f"{key}: {said}")


def let_go(directory: str) -> None:
    """Clear all faults in the control files below a directory, before it is removed: a process without a visible mark,
    such as one that overwrites its environment, may wait for its disk until the file no longer says so. Raises
    OSError."""
    for path in Path(directory).rglob(CONTROL_FILE):
        with open(path, "r+b", buffering=0) as file:
            os.pwrite(file.fileno(), bytes(_IN_FORCE_BYTES), _IN_FORCE_AT)


def remove_tree(directory: str) -> None:
    """Remove a directory with its content, of which another process may be removing parts at the same time. Raises
    OSError."""
    import shutil  # only here, as agents start often

    def pass_over(error: BaseException) -> None:
        if not isinstance(error, FileNotFoundError):
            raise error

    if sys.version_info >= (3, 12):
        shutil.rmtree(directory, onexc=lambda function, path, error: pass_over(error))
    else:
        shutil.rmtree(directory, onerror=lambda function, path, info: pass_over(info[1]))


def _end_agents(run_id: str, directory: str) -> None:
    """End the daemon of a run by SIGTERM, with all processes below it; if it takes too long, it is killed later."""
    words = [b"daemon", os.fsencode(directory), run_id.encode()]
    deadline = time.monotonic() + END_TIMEOUT_S + 1
    asked = set[int]()
    while time.monotonic() < deadline:
        pids = [pid for pid in _marked(run_id) if _words_of(pid)[-len(words) :] == words]
        if not pids:
            return
        for pid in set(pids) - asked:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
            asked.add(pid)
        time.sleep(0.02)


def _keep(directory: str, hosts: Sequence[str], left: list[str]) -> None:
    """Move the only copy of these hosts' files out of the directory that is to be removed, to one beside it."""
    for host in hosts:
        try:
            os.makedirs(f"{directory}{KEPT}", exist_ok=True)
            os.rename(os.path.join(directory, host), os.path.join(f"{directory}{KEPT}", host))
        except FileNotFoundError:
            continue
        except OSError as error:
            left.append(f"the files of {host}, which could not be moved: {error.strerror}")


def _clean_command(base: str, run_id: str, *kept_hosts: str) -> int:
    """Remove everything of a run except the files of `kept_hosts`; print {"removed": [...], "left": [...]}."""
    removed, left = list[str](), list[str]()
    directory, owner, seen = os.path.join(base, run_id), Path(base, "owner"), set[int]()
    commands = _undo_commands(directory)
    # A process that waits for a frozen disk cannot be killed.
    _undo_all({key: commands.pop(key) for key in list(commands) if key.startswith("thaw")}, removed, left)
    _end_agents(run_id, directory)
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while (pids := list(_marked(run_id))) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        seen.update(pids)
        time.sleep(0.02)
    left += [f"process {pid} did not exit" for pid in pids]
    removed += [f"process {pid}" for pid in sorted(seen.difference(pids))]
    _undo_all(commands, removed, left)
    if not left:
        with contextlib.suppress(FileNotFoundError):  # another process is cleaning too
            let_go(directory)
        _keep(directory, kept_hosts, left)
    if not left:
        made_base = os.path.exists(os.path.join(directory, MADE_BASE))
        if os.path.isdir(directory):
            remove_tree(directory)
            removed.append(directory)
        with contextlib.suppress(FileNotFoundError):
            if owner.read_text().strip() in (run_id, ""):  # empty: an earlier version, and a power loss
                owner.unlink()
        for draft in owner.parent.glob(f"{owner.name}.{run_id}.*"):
            draft.unlink(missing_ok=True)
        if made_base:
            with contextlib.suppress(OSError):  # other files are there by now
                os.rmdir(base)
    print(json.dumps({"removed": removed, "left": left}))
    return 0


def main(arguments: list[str], source: str = "") -> int:
    """Run a sub-command (see the module's docstring); returns the exit status."""
    os.environ["PATH"] = f"{os.environ.get('PATH', '')}:{_ADMIN_PATH}"
    command, *rest = arguments
    if command == "start":
        base, run_id = rest
        return _start_command(base, run_id, source)
    if command == "relay":
        return _relay_command(*rest)
    if command == "others":
        return _others_command(*rest)
    if command == "clean":
        return _clean_command(*rest)
    if command == "fork":
        return _fork_command(*rest)
    directory, daemon_run_id = rest
    os.makedirs(directory, exist_ok=True)
    asyncio.run(Agent(directory, daemon_run_id).serve())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], globals().get("SOURCE", "")))
