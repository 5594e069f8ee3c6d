"""The command line: reads options and configuration, then runs a broker or a name server until told to stop, has a
group change its leader or its members, or converts a store.

The only module that knows it is a process on a real machine: it takes the data directory's lock, raises the limit
of open files, and turns signals and failures into an exit status. Each command imports what it needs itself: a name
server needs no broker, which takes a tenth of a second to load.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import fcntl
import importlib
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import node
from node.config import (
    BrokerConfig,
    ConfigError,
    NameServerConfig,
    parse_broker_config,
    parse_name_server_config,
)
from node.config_reader import check_dialled_address, check_member_id
from node.listening import key_of
from node.logs import LogLimiter, configure_logging
from node.nearest import nearest
from node.real_runtime import RealDisk, real_runtime
from node.runtime import Disk
from node.store.segments import SegmentError

__all__ = ["EXIT_FAILED", "EXIT_OPERATOR", "main", "overrides_of"]

logger = logging.getLogger("node")

EXIT_FAILED = 1
"""The node cannot go on: its store is damaged, or its disk fails."""
EXIT_OPERATOR = 254
"""Someone has to fix the options, the configuration or the machine."""

_INTERRUPTED = "interrupted; the group may do it yet, or have done it"

ENVIRONMENT_PREFIX = "SPLITBRAIN_NODE_"
OPEN_FILES_WANTED = 65_536
"""Soft limit of open files that a node asks for, within the hard one: thousands of connections and log files."""
MAX_CONFIG_CHARS = 1 << 20

_OPERATOR_ERRNOS = frozenset(
    (
        errno.EADDRINUSE,
        errno.EADDRNOTAVAIL,
        errno.EACCES,
        errno.EPERM,
        errno.EROFS,
        errno.ENOENT,
        errno.ENOTDIR,
        errno.ENOSPC,
        errno.EEXIST,
        errno.EISDIR,
        errno.EDQUOT,
        errno.ENAMETOOLONG,
        errno.ELOOP,
    )
)


class OperatorError(Exception):
    """Something that only whoever runs the node can fix. `lines` are printed as they are."""

    def __init__(self, *lines: str) -> None:
        super().__init__("; ".join(lines))
        self.lines = lines


class _Parser(argparse.ArgumentParser):
    """Reports bad options in one line, with status 254 and a hint for a mistyped word."""

    def error(self, message: str) -> NoReturn:
        raise OperatorError(f"{message} (see {self.prog} --help)")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Like the base class, but rejects leftover arguments: the (sub)parser they belong to reports them, and does so
        before it reports a missing option, which may be the mistyped one."""
        for word in args or ():
            if not word.startswith("-"):
                if self._subparsers is not None:  # the rest belongs to the command
                    break
            elif word == "--":
                break
            elif not any(known.startswith(word.partition("=")[0]) for known in self._option_string_actions):
                self._refuse(word)
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            self._refuse(rest[0])
        return found, rest

    def _refuse(self, word: str) -> NoReturn:
        option = word.partition("=")[0]
        if not option.startswith("-"):
            self.error(f"what is {word!r} for?")
        known = sorted(each for each in self._option_string_actions if each.startswith("--"))
        hint = nearest(option, known) or f"; known: {', '.join(known)}"
        self.error(f"unknown option {option}{hint}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = list(map(str, action.choices))
            hint = f"; known: {', '.join(known)}{nearest(str(value), known)}"
            raise argparse.ArgumentError(None, f"unknown {str(action.metavar).lower()} {value!r}{hint}")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="node", description="A replicated message broker and its name server.")
    parser.add_argument("--version", action="version", version=f"node {node.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    broker = commands.add_parser("broker", help="run one member of a broker group")
    broker.add_argument("--config", required=True, metavar="FILE", help="configuration in TOML")
    name_server = commands.add_parser("nameserver", help="run a name server")
    name_server.add_argument("--config", metavar="FILE", help="configuration in TOML")
    name_server.add_argument("--listen", metavar="IP:PORT", help="where to listen; short for --set listen=...")
    transfer = commands.add_parser("transfer", help="give the lead of a broker group to one of its members")
    transfer.add_argument("--config", required=True, metavar="FILE", help="configuration of any member, in TOML")
    transfer.add_argument("--to", required=True, metavar="MEMBER", help="who is to lead, such as n2")
    members = commands.add_parser("members", help="add a member to a broker group, or remove one")
    members.add_argument("--config", required=True, metavar="FILE", help="configuration of any member, in TOML")
    change = members.add_mutually_exclusive_group(required=True)
    change.add_argument("--add", metavar="MEMBER=IP:PORT", help="who is to belong to it, and where the others dial it")
    change.add_argument("--remove", metavar="MEMBER", help="who is to leave it")
    exporting = commands.add_parser("export-store", help="write a stopped broker's store as Apache RocketMQ 4.9 has it")
    exporting.add_argument("--config", required=True, metavar="FILE", help="configuration of the broker, in TOML")
    exporting.add_argument("--to", required=True, metavar="DIR", help="where to: what will be storePathRootDir")
    importing = commands.add_parser("import-store", help="make a broker's store from one of Apache RocketMQ 4.9's")
    importing.add_argument("--config", required=True, metavar="FILE", help="configuration of the broker, in TOML")
    importing.add_argument("--from", required=True, metavar="DIR", dest="source", help="its storePathRootDir")
    for command in (broker, name_server, transfer, members, exporting, importing):
        command.add_argument(
            "--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides",
            help=f"override one key of the configuration (repeatable); {ENVIRONMENT_PREFIX}KEY does so too",
        )  # fmt: skip
    return parser


def overrides_of(environment: Mapping[str, str]) -> list[str]:
    """Overrides from the environment, as "dotted.key=value": SPLITBRAIN_NODE_LIMITS__MAX_CONNECTIONS=50 is
    limits.max_connections=50. They override the file and are overridden by --set."""
    return [
        f"{name.removeprefix(ENVIRONMENT_PREFIX).lower().replace('__', '.')}={value}"
        for name, value in sorted(environment.items())
        if name.startswith(ENVIRONMENT_PREFIX)
    ]


def main(arguments: Sequence[str]) -> int:
    """Run the command in `arguments`; returns the exit status."""
    _complete_streams()
    try:
        parser = _parser()
        options = parser.parse_args(arguments)
        if options.command is None:  # required, but reported only after problems with the options before it
            parser.error("a command is missing")
        overrides = overrides_of(os.environ)
        if options.command == "nameserver" and options.listen:
            overrides.append(f"listen={options.listen}")
        overrides += options.overrides
        if options.command == "broker":
            return _run_broker(parse_broker_config(_read(options.config), overrides))
        if options.command == "transfer":
            return _transfer(parse_broker_config(_read(options.config), overrides), options.to)
        if options.command == "members":
            return _change_members(parse_broker_config(_read(options.config), overrides), options)
        if options.command in ("export-store", "import-store"):
            return _exchange(parse_broker_config(_read(options.config), overrides), options)
        return _run_name_server(parse_name_server_config(_read(options.config) if options.config else "", overrides))
    except OperatorError as error:
        return _complain(error.lines, EXIT_OPERATOR)
    except ConfigError as error:
        where = getattr(options, "config", None) or "options"
        return _complain([f"{where}: {problem}" for problem in error.problems], EXIT_OPERATOR)


def _complain(lines: Sequence[str], status: int) -> int:
    for line in lines:
        try:
            print(f"node: {' '.join(line.split())}", file=sys.stderr, flush=True)
        except OSError:  # stderr is on a full disk: only the status is left, and unflushed text must not change it
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stderr.fileno())
            os.close(nowhere)
    return status


def _complete_streams() -> None:
    """Open /dev/null for each closed standard stream before the first file is opened. That file would otherwise get
    its descriptor, and what the interpreter prints would end up in the commit log."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free descriptor, which is this one
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 (open to the end)


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(MAX_CONFIG_CHARS + 1)  # a device may never end
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise OperatorError(f"{path} cannot be read: {reason}") from error
    if len(text) > MAX_CONFIG_CHARS:
        raise OperatorError(f"{path} is no configuration: it has more than {MAX_CONFIG_CHARS:,} characters")
    return text


def _run_broker(config: BrokerConfig) -> int:
    configure_logging(config.log_level, sys.stderr)
    return _run(lambda: _serve_broker(config), config.uvloop, "data_dir", config.data_dir)


def _run_name_server(config: NameServerConfig) -> int:
    configure_logging(config.log_level, sys.stderr)
    return _run(lambda: _serve_name_server(config), config.uvloop, "kv_config_path", config.kv_config_path)


def _transfer(config: BrokerConfig, member: str) -> int:
    from node.dledger.tools import GroupRefuses, give_lead

    if config.classic is not None:
        raise OperatorError("a broker with a classic log has no group to lead")
    try:
        term = asyncio.run(give_lead(config.group, config.dledger_peers, member))
    except GroupRefuses as error:
        return _complain([str(error)], EXIT_OPERATOR if error.is_mistake else EXIT_FAILED)
    except KeyboardInterrupt:
        return _complain([_INTERRUPTED], EXIT_FAILED)
    print(f"{member} leads {config.group} in term {term}")
    return 0


def _change_members(config: BrokerConfig, options: argparse.Namespace) -> int:
    from node.dledger.tools import GroupRefuses, change_members

    if config.classic is not None:
        raise OperatorError("a broker with a classic log has no group")
    member, _, address = (options.add or options.remove).partition("=")
    try:
        check_member_id(member)
        dialled = check_dialled_address(address) if options.add else None
    except ValueError as error:
        raise OperatorError(f"--add or --remove: {error}") from None
    try:
        index = asyncio.run(change_members(config.group, config.dledger_peers, member, dialled))
    except GroupRefuses as error:
        return _complain([str(error)], EXIT_OPERATOR if error.is_mistake else EXIT_FAILED)
    except KeyboardInterrupt:
        return _complain([_INTERRUPTED], EXIT_FAILED)
    print(f"{member} {'belongs' if options.add else 'no longer belongs'} to {config.group} (entry {index})")
    own = config.dledger_peers.get(member)
    if dialled is not None and own not in (None, dialled):
        print(
            f"{options.config} has {member} at {own}: each member whose configuration says so dials it there, not at"
            f" {dialled}, until that is changed and the member restarted"
        )
    return 0


def _exchange(config: BrokerConfig, options: argparse.Namespace) -> int:
    from node.exchange.exporting import export_store
    from node.exchange.importing import import_store
    from node.exchange.staging import ExchangeError

    for option, path in (("--to", getattr(options, "to", "-")), ("--from", getattr(options, "source", "-"))):
        if not path:
            return _complain([f"{option}: the path is empty"], EXIT_OPERATOR)
    heeded = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) is not signal.SIG_IGN]
    before = {number: signal.signal(number, _interrupt) for number in heeded}
    try:
        if options.command == "export-store":
            target = Path(options.to).absolute()
            lines = export_store(config, target)
        else:
            target = Path(config.data_dir)
            lines = import_store(config, Path(options.source).absolute())
    except ExchangeError as error:
        return _complain([str(error)], EXIT_OPERATOR)
    except OSError as error:
        what = _not_a_file(error) or f"{error.filename or target}: {error.strerror or error}"
        return _complain([what], EXIT_OPERATOR if error.errno in _OPERATOR_ERRNOS else EXIT_FAILED)
    except KeyboardInterrupt:
        is_there = target.is_dir() and any(target.iterdir())  # the interrupt came at the very end
        left = f"{target} is there, and whole" if is_there else f"nothing is left of {target}"
        return _complain([f"interrupted; {left}"], EXIT_OPERATOR)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    try:
        print("\n".join(lines), flush=True)
    except OSError:  # nobody reads the output, or the disk is full: the store is complete all the same
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
    return 0


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _run(serve: Callable[[], Coroutine[Any, Any, int]], uvloop: str, key: str, path: str | None) -> int:
    """Run `serve` on the chosen event loop; failures become a line and a status. `path` is where it keeps its data,
    the value of the configuration's `key`."""
    _raise_open_files_limit()
    try:
        with asyncio.Runner(loop_factory=_loop_factory(uvloop)) as runner:
            loop = runner.get_loop()
            loop.set_exception_handler(_LoopErrors(loop.time))
            return runner.run(serve())
    except KeyboardInterrupt:  # SIGINT came before the node installed its own handler: nothing had begun
        return 0
    except OperatorError as error:
        return _complain(error.lines, EXIT_OPERATOR)
    except OSError as error:
        # Newer releases of asyncio raise this, without an errno, for an address that the machine does not have.
        no_address = error.errno is None and str(error).startswith("could not bind")
        status = EXIT_OPERATOR if no_address or error.errno in _OPERATOR_ERRNOS else EXIT_FAILED
        reason = _no_port(error) or _not_a_file(error) or _no_place(error, key, path) or str(error)
        return _complain([reason], status)
    except SegmentError as error:
        return _complain([str(error)], EXIT_OPERATOR)
    except ValueError as error:
        return _complain([f"the store cannot be used: {error}"], EXIT_FAILED)


class _LoopErrors:
    """Handles errors in the loop that nobody else sees. While no file can be opened, the loop fails to accept
    connections, hundreds of times a second: one line is enough, and it recovers as descriptors are closed."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._limiter = LogLimiter(now_s)

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE) and "socket" in context:
            message = "no further connection can be accepted: %s; let this process have more of them (ulimit -n)"
            self._limiter.warning(logger, "accept", message, error.strerror)
        else:
            loop.default_exception_handler(context)


def _no_port(error: OSError) -> str:
    """Why a port cannot be opened, and the key to change; "" if the error is about something else."""
    key = key_of(error)
    if not key:
        return ""
    fix = f"change {key}"
    if key == "fast_port":  # a switch: it is 2 below listen
        fix = "change listen, which is 2 above it, or switch fast_port off"
    if error.errno == errno.EADDRINUSE:
        fix = f"stop what uses it, or {fix}"
    return f"{error.strerror or error}; {fix}"


_FIXES: Mapping[int, str] = {
    errno.EEXIST: "it has to be a directory",
    errno.ENOTDIR: "what is above it has to be a directory",
    errno.EROFS: "mount it for writing",
    errno.EACCES: "let this user write there",
    errno.EPERM: "let this user write there",
    errno.ENOSPC: "make room",
    errno.EDQUOT: "make room",
    errno.ENAMETOOLONG: "name it shorter",
    errno.ELOOP: "its links lead in a circle",
}
"""What helps if a node cannot use a file or directory, besides moving it elsewhere."""


def _no_place(error: OSError, key: str, path: str | None) -> str:
    """What is wrong with the path of `key`, and the fix; "" if the error is about something else, or a disk failure."""
    fix = _FIXES.get(error.errno or 0)
    if fix is None or path is None:
        return ""
    found = error.filename2 or error.filename or path  # a write names no file
    if not isinstance(found, str):
        return ""
    place = path if found == path else f"{path}: {found}"
    return f"{key} {place}: {error.strerror}; {fix}, or change {key}"


def _not_a_file(error: OSError) -> str:
    """Explains that a directory stands where the store has a file; "" if the error is about something else."""
    path = error.filename2 or error.filename
    if error.errno != errno.EISDIR or path is None:
        return ""
    return (
        f"{path} is a directory where the store has a file: move it away, and put that file back if there is one "
        "(what can be made from the log is made anew)"
    )


def _loop_factory(uvloop: str) -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's loop if it is wanted and installed; None means asyncio's own."""
    if uvloop == "off":
        return None
    try:
        factory: Callable[[], asyncio.AbstractEventLoop] = importlib.import_module("uvloop").new_event_loop
    except ImportError:
        if uvloop == "on":
            raise OperatorError("uvloop is not installed for this Python; set uvloop to auto or off") from None
        return None
    return factory


def _raise_open_files_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES_WANTED if hard == resource.RLIM_INFINITY else min(OPEN_FILES_WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _stop_on_signals() -> asyncio.Event:
    """An event that SIGTERM and SIGINT set."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop


def _lock_data_directory(path: str, disk: Disk) -> int:
    """Take the lock that keeps a second broker off the same files; returns its descriptor.

    A directory created here is created durably: if a power cut lost its name, everything in it would be lost.
    """
    disk.make_dirs(path)
    descriptor = os.open(f"{path}/lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise OperatorError(f"data_dir {path} is in use by another broker") from None
    return descriptor


def _refuse_apache_store(path: str) -> None:
    """Raises OperatorError if the directory is an Apache RocketMQ store: it looks like a damaged store of ours."""
    from node.exchange.recognition import mark_of_apache

    mark = mark_of_apache(Path(path))
    if mark:
        raise OperatorError(
            f"data_dir {path} is a store of Apache RocketMQ, as {mark} says: set data_dir to a new directory and run"
            f" import-store --from {path}, which makes a store of this broker from it"
        )


def _refuse_other_log(config: BrokerConfig) -> None:
    """Raises OperatorError if the directory has a log of the other kind: a broker that started an empty log beside it
    would have consumers start over, without any of the old messages."""
    kinds = {"classic": "commitlog", "dledger": "dledger/data"}
    wanted, other = sorted(kinds, reverse=config.classic is None)
    place = Path(config.data_dir, kinds[other])
    if place.is_dir() and any(place.iterdir()):
        raise OperatorError(
            f"data_dir {config.data_dir} has a log of [{other}], {kinds[other]}, and the configuration says [{wanted}]:"
            " set another data_dir, or the configuration back"
        )


async def _serve_broker(config: BrokerConfig) -> int:
    stop = _stop_on_signals()  # before the slowest part of a start; a signal would kill the process there
    from node.serving import serve_broker

    runtime = real_runtime()
    _refuse_apache_store(config.data_dir)
    _refuse_other_log(config)
    lock = _lock_data_directory(config.data_dir, runtime.disk)
    try:
        failure = await serve_broker(config, runtime, stop)
        return _complain([failure], EXIT_FAILED) if failure else 0
    finally:
        if isinstance(runtime.disk, RealDisk):
            runtime.disk.close()
        os.close(lock)


async def _serve_name_server(config: NameServerConfig) -> int:
    stop = _stop_on_signals()
    from node.nameserver.serving import serve_name_server

    await serve_name_server(config, real_runtime(), stop)
    return 0
