"""Adapts a plug-in of `harness.sdk` to the interface of a system (harness.systems.base.System).

The plug-in defines its programs and how to query its hosts; when, how often and for how long is decided here.
Exceptions of its methods are reported in one line, with file and line in the plug-in.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import io
import json
import logging
import os
import re
import shutil
import tarfile
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from harness.clusters.abilities import SeesStrays
from harness.clusters.base import Cluster, HostProcess, KeepsLogs, Program, RemoteHosts, RunsCommands
from harness.clusters.threads import all_of, in_thread
from harness.errors import OperatorError
from harness.metrics.expression import Metric, Page, declared_metrics, declared_pages
from harness.programs import SYSTEM_PATH
from harness.sdk import Client, CommandFailed, Host, Output, Recipe, Status, System
from harness.sdk.install import ERROR_LINE, cache_directory, fetched, find_file, is_fetched
from harness.sdk.known import Known
from harness.sdk.plugin import (
    NoExceptionError,
    Plugin,
    PluginError,
    blamed,
    hints_of,
    place_of,
    recipes_of,
    settings_of,
    source_line,
)
from harness.systems.base import CLIENTS_DECIDE, CheckOutcome, LongRequest, Setting
from harness.systems.guest_operator import GuestOperator, has_members, operation_missing
from harness.systems.guest_trace import judge_logs
from harness.systems.host_programs import HostPrograms
from harness.systems.host_user import user_of, words_for_user
from harness.systems.planned_hosts import PlannedHosts
from harness.systems.program_logs import last_lines
from harness.unawaited import take_unawaited
from harness.worker import is_its_own, times_cancelled
from harness.workloads.base import CLIENT
from harness.workloads.capability import json_problem
from nemesis.target import PAUSED

__all__ = ["GuestSystem", "adapted", "with_client"]

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

POLL_S = 0.1
"""Interval of readiness polls; each runs a short command on the host."""

STATUS_TIMEOUT_S = 1.0
"""For one host to report whether it leads: an isolated one must not hold up the others."""

QUESTION_TIMEOUT_S = 10.0
"""For queries that are not urgent: whether a host is ready, what it holds."""

_MISTAKES = (AttributeError, NameError, PluginError, TypeError)
"""Exceptions that mean that the plug-in's own code is wrong, whatever the system did."""

MISTAKEN_S = 5.0
"""How long `status` may raise one of _MISTAKES at the start: a leader that is still None causes a TypeError too."""

FORMING_S = 5.0
"""Wait for a leader at the start; after this `start_together` is called without one."""

ADDRESS_HINT = " (hosts of --cluster local share this machine: the program must listen only on host.listen(port))"

LOOPBACK = "127.0.0.1"
LOOPBACK_HINT = f" but at {LOOPBACK}, which other hosts cannot reach: the program must listen on host.listen(port)"

ENDED_WELL = " status 0"
"""End of the message about a program that exited without an error."""

FOREGROUND_HINT = " (if it daemonises: keep it in the foreground)"

BACKGROUND_HINT = ", but a daemon of it serves on the host: keep the program in the foreground"

LEADER = "leader"
"""Key beside the host names in the problems of `_absent`: no host leads."""

STATUS_HANGS = "status() did not return, so the plug-in may be the cause"
"""Reason for "unknown" if `status` hangs, while clients may find the system healthy."""

MAX_STATE_CHARS = 300
"""Limit of the quoted part of a replica's state if replicas differ."""

_PROGRAM_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_. -]{0,99}")
"""A valid program name; its log file is named after it."""

_UNPACK = """
import os, sys, tarfile
with tarfile.open(sys.argv[1]) as archive:
    archive.extractall(sys.argv[2])
os.unlink(sys.argv[1])
"""
"""Unpacks an archive on a host with Python, since the host's tar may lack gzip."""

_PRINTED = 'tail -c "+$1" -- "$2" 2>/dev/null | grep -qF -e "$3"'
"""Whether file $2 contains the text $3 from byte $1 (counted from 1) on."""

COPY_TIMEOUT_S = 600.0
"""For a recipe's command on a host, or for unpacking a copied archive there."""


NOT_FOUND = 127
"""Exit status of a command whose program does not exist."""

TIMED_OUT = -9
"""Status of a command on a host that was killed at its timeout."""


def _as_program_name(file: str) -> str:
    """The name of a system's only program, after the system's file, which may have any name."""
    return re.sub(r"[^A-Za-z0-9_. -]", "_", f"_{file}" if file.startswith((" ", "-", ".")) else file)[:100]


@functools.cache
def adapted(plugin: Plugin) -> type[GuestSystem]:
    """The system class for a plug-in."""
    cls = plugin.system_class
    doc = inspect.getdoc(cls) if cls.__doc__ else f"{cls.__name__}, in {os.path.basename(_file_of(cls))}"
    return type(
        f"Guest{cls.__name__}",
        (GuestSystem,),
        {
            "plugin": plugin,
            "name": plugin.name,
            "description": str(doc).split("\n\n")[0].replace("\n", " "),
            "settings": settings_of(cls),
            "ports": tuple(cls.ports.values()),
            "extra_hosts": tuple(cls.extra_hosts),
            "recovery_timeout_s": float(cls.recovery_timeout_s),
            "cannot": dict(cls.cannot),
            "metric_pages": declared_pages(cls.metrics),
            "metrics": declared_metrics(cls.metrics),
            "tells_leader": cls.status is not System.status,
            "has_long_request": cls.long_request is not None,
            "client_class": plugin.client_class,
        },
    )


async def _install_on(host: Host, recipe: Recipe) -> None:
    """Run a recipe's own commands on a host with its own file system. Raises OperatorError."""
    for command in recipe.on_host:
        done = await host.run(*command, timeout_s=COPY_TIMEOUT_S, check=False)
        if done.status == 0:
            continue
        if done.status == NOT_FOUND:
            fix = "use hosts or an image (--image) that have this program"
        else:
            fix = (
                "a machine needs current package lists (apt-get update) and a mirror that it reaches; a container has "
                "no outside network, so its image must contain the packages (--image)"
            )
        raise OperatorError(f"install {recipe}: it failed on {host.name}: {_why_failed(done)}: {fix}")


def _why_failed(done: Output) -> str:
    """Why an installation command failed, in one line: its last error."""
    if done.status == TIMED_OUT:
        return f"it took more than {COPY_TIMEOUT_S:g} s"
    said = [line.strip() for line in (done.err.strip() or done.out).splitlines() if line.strip()]
    errors = [line for line in said if ERROR_LINE.match(line)] or said
    return f"status {done.status}{f', {errors[-1][:300]}' if errors else ''}"


def with_client(system_class: type[GuestSystem], client_class: type[Client]) -> type[GuestSystem]:
    """The same system with other clients."""
    return adapted(replace(system_class.plugin, client_class=client_class))


def _file_of(cls: type[Any]) -> str:
    return os.path.realpath(inspect.getsourcefile(cls) or "")


class GuestSystem:
    """See the module docstring; `adapted` makes the subclass for a plug-in."""

    plugin: ClassVar[Plugin]
    name: ClassVar[str]
    description: ClassVar[str]
    settings: ClassVar[Sequence[Setting]]
    ports: ClassVar[Sequence[int]]
    extra_hosts: ClassVar[Sequence[str]]
    recovery_timeout_s: ClassVar[float]
    cannot: ClassVar[Mapping[str, str]]
    """Nemesis, nemesis=form, nemesis=@target or nemesis=form@target -> why it makes no sense for this system."""
    tells_leader: ClassVar[bool]
    """Whether the plug-in has a `status`, which tells who leads."""
    metric_pages: ClassVar[Sequence[Page]]
    metrics: ClassVar[Sequence[Metric]]
    """The metrics that the plug-in declares."""
    has_long_request: ClassVar[bool]
    """Whether the plug-in has a request with a long answer, for clients that do not read it."""
    client_class: ClassVar[type[Client]]
    """Its methods determine what clients can do."""
    offers = frozenset({CLIENT})

    def __init__(
        self, *, cluster: Cluster, settings: Mapping[str, str], keys: int, log_dir: str, operation_timeout_s: float
    ) -> None:
        self._cluster = cluster
        self._log_dir = Path(log_dir)
        self._operation_timeout_s = operation_timeout_s
        self.client_environment: Mapping[str, str] = {}
        self.given_settings: Mapping[str, str] = dict(settings)
        self._values: Mapping[str, str] = Known("setting", self._with_defaults(settings))
        self._recipes = recipes_of(self.plugin.system_class, self._values)
        self._roots: dict[str, list[tuple[Recipe, str]]] = {}
        """Host -> (recipe, directory on that host in which it is installed)."""
        self._environment: dict[str, dict[str, str]] = {}
        self._user_words: dict[str, list[str]] = {}
        """Host -> command prefix there that runs a program as the system's user."""
        self._commands: dict[str, dict[str, Program]] = {}
        self._written: dict[str, dict[str, Any]] = {}
        """Host -> path -> last written content."""
        self._processes: dict[str, HostPrograms] = {}
        self._logged_before: dict[tuple[str, str], int] = {}
        """(host, log name) -> log size in bytes at the program's last start; `ready_line` is searched after it."""
        self._final: dict[str, dict[str, str]] = {}
        self._states: dict[str, Any] | None = None
        """Host -> the replica's state (or _Unread) when last asked at the end; None if replicas were never asked."""
        self._unanswered: dict[str, Exception | SystemExit] = {}
        """Host -> what its last `status` call raised."""
        self._unready: dict[str, BaseException | str] = {}
        """Host -> what its last `ready` call raised, or a message about what it returned."""
        self._is_apart = False
        """Whether replicas were still unequal after a whole recovery timeout."""
        self._is_stopped = False
        self._system = self._create_system(keys)
        missing = functools.partial(self.operation_missing, settings=self._values)
        self.operator = GuestOperator(
            status=self._status_of,
            members=self._members_of if has_members(self.plugin.system_class) else None,
            promote=self._promote,
            leave=self._leave,
            join=self._join,
            missing=missing,
        )

    @property
    def code_files(self) -> Collection[str]:
        """The files that define the plug-in's classes."""
        classes = (*self.plugin.system_class.__mro__, *self.plugin.client_class.__mro__)
        return {_file_of(cls) for cls in classes if cls not in (*System.__mro__, *Client.__mro__)}

    @property
    def set_up_timeout_s(self) -> float:
        """The limit of `setup`, which may take the longest of all methods."""
        return self._system.ready_timeout_s

    @classmethod
    def _with_defaults(cls, settings: Mapping[str, str]) -> dict[str, str]:
        return {setting.name: setting.default for setting in cls.settings} | dict(settings)

    def _create_system(self, keys: int) -> System:
        cls = self.plugin.system_class
        try:
            system = cls()
        except (Exception, SystemExit) as error:
            raise self._blame(error, f"{cls.__name__}()") from None
        names = Known("port", cls.ports)
        hosts = {}
        for number, name in enumerate((*self._cluster.hosts, *self._cluster.extra_hosts), 1):
            environment, words = self._environment[name], self._user_words[name] = dict[str, str](), list[str]()
            hosts[name] = Host(name, number, self._cluster, names, self._find_installed, environment, words)
        system.settings = self._values
        system.keys = keys
        system.hosts = [hosts[name] for name in self._cluster.hosts]
        system.others = Known("host of extra_hosts", {name: hosts[name] for name in self._cluster.extra_hosts})
        self._hosts = hosts
        return system

    @classmethod
    def cannot_run_on(cls, cluster_class: Any) -> str | None:
        """Why a cluster cannot run a plug-in: its hosts cannot run commands. None if it can."""
        if isinstance(cluster_class, RunsCommands):
            return None
        return f"cluster {cluster_class.name} simulates the broker and cannot run other systems"

    @classmethod
    def program_commands(cls, settings: Mapping[str, str]) -> Mapping[str, Sequence[str]]:
        """Program name -> command of a host, if all packages are fetched or are the user's own files; else empty.
        Raises PluginError, OperatorError."""
        recipes = recipes_of(cls.plugin.system_class, cls._with_defaults(settings))
        if not all(is_fetched(recipe) or recipe.kind == "path" for recipe in recipes):
            return {}
        hosts: Any = PlannedHosts(cls.extra_hosts)
        planned = cls(cluster=hosts, settings=settings, keys=1, log_dir="", operation_timeout_s=1.0)
        host = planned._system.hosts[0]
        planned._roots[host.name] = [(recipe, fetched(recipe)) for recipe in recipes]
        return {name: program.argv for name, program in planned._programs_of(host).items()}

    # Starting

    async def start(self) -> None:
        """Install, write files, start every program, wait until every host is ready. Raises PluginError, OperatorError,
        SystemUnderTestError."""
        if (reason := self.cannot_run_on(self._cluster)) is not None:
            raise OperatorError(reason)
        try:
            await all_of(map(self._install, self._hosts.values()))
            await all_of(map(self._become_user, self._hosts.values()))
        except CommandFailed as error:  # a host does not answer
            raise OperatorError(f"{self.name} cannot be installed: {error}") from None
        for host in self._hosts.values():
            self._commands[host.name] = self._programs_of(host)
        await all_of(map(self._prepare_host, self._hosts.values()))
        await all_of(map(self.restart, self._commands))
        await self._wait_until_ready()
        await self._form_group()

    async def _install(self, host: Host) -> None:
        roots = self._roots[host.name] = []
        for recipe in self._recipes:
            if not isinstance(self._cluster, RemoteHosts):
                roots.append((recipe, await in_thread(fetched, recipe)))
            elif recipe.on_host:
                await _install_on(host, recipe)
            else:
                roots.append((recipe, await self._copied(recipe, host)))
        dirs = [each for recipe, root in roots for each in recipe.program_dirs(root)]
        path = SYSTEM_PATH if isinstance(self._cluster, RemoteHosts) else f"{os.environ.get('PATH', '')}:{SYSTEM_PATH}"
        environment = self._environment[host.name]
        if dirs:
            environment["PATH"] = os.pathsep.join([*dirs, path])
        for recipe, root in roots:
            for name, value in recipe.environment(root).items():
                environment[name] = os.pathsep.join(filter(None, (environment.get(name), value)))

    async def _become_user(self, host: Host) -> None:
        """Determine the command prefix that runs programs as the system's user on a host, if it has one."""
        user, paths = type(self._system).user, [root for _, root in self._roots[host.name]]
        if any(recipe.kind == "pip" for recipe in self._recipes):
            paths.append(host.python)  # runs modules of pip packages
        if user is not None:
            self._user_words[host.name] += await words_for_user(host, user, paths)

    async def _own_data(self, host: Host) -> None:
        """Make the system's user the owner of the current contents of the data directory."""
        user = user_of(self._user_words[host.name])
        if user is not None:
            await host.run_as_harness("chown", "-R", user, host.data)

    async def _copied(self, recipe: Recipe, host: Host) -> str:
        """Copy a recipe to a host with its own file system; returns its directory there."""
        source = await in_thread(fetched, recipe)
        target = os.path.join(os.path.dirname(host.data), "installed", recipe.key)
        await self._cluster.put_file(host.name, f"{target}.tar.gz", await in_thread(_packed, source))
        words = (host.python, "-c", _UNPACK, f"{target}.tar.gz", target)
        done = await host.run(*words, timeout_s=COPY_TIMEOUT_S, check=False)
        if done.status != 0:
            raise OperatorError(
                f"install {recipe}: {host.name} cannot unpack it in {target}: {_why_failed(done)}: make room "
                "there, and let the harness's user write there"
            )
        return target

    def _find_installed(self, host: str, name: str) -> str:
        """See Host.installed."""
        for recipe, root in self._roots.get(host, ()):
            local = fetched(recipe)
            found = find_file(local, name, recipe.program_dirs(local))
            if found is not None:
                return os.path.normpath(os.path.join(root, os.path.relpath(found, local)))
        brought = ", ".join(str(recipe) for recipe, _ in self._roots.get(host, ())) or "nothing is installed"
        raise OperatorError(f"{name} is not in what was installed ({brought})")

    def _programs_of(self, host: Host) -> dict[str, Program]:
        """The programs of a host, as the cluster starts them. Raises PluginError."""
        system = self._system
        method = "programs" if type(system).programs is not System.programs else "command"
        asked = self._call_plainly(method, host)
        commands = {_as_program_name(self.name.partition(":")[0]): asked} if method == "command" else asked
        if not isinstance(commands, Mapping):
            raise self._wrong(
                method, f"programs({host.name}) returned {asked!r:.80}, not a mapping of names to lists of words"
            )
        if not commands and host in self._system.hosts:
            raise self._wrong(method, f"programs({host.name}) returned no program: every replica's host needs one")
        environment = {**self._environment[host.name], **self._mapping_of("environment", host)}
        programs = {}
        for name, words in commands.items():
            if not isinstance(name, str) or not _PROGRAM_NAME.fullmatch(name):
                what = f"has an invalid program name {name!r:.80}"
                raise self._wrong(method, f"{method}({host.name}) {what}: use letters, digits, '.', '_' and '-'")
            if isinstance(words, str) or not isinstance(words, Sequence):
                raise self._wrong(method, f"{method}({host.name}) returned {words!r:.80}, not a list of words")
            for word in words:
                if not isinstance(word, str):
                    raise self._wrong(method, f"{method}({host.name}) has {word!r:.80} among its words, not a string")
            if not words:
                raise self._wrong(method, f"{method}({host.name}) returned no words")
            argv = [*self._user_words[host.name], self._program_path(host.name, words[0]), *words[1:]]
            is_multiprocess = type(system).multiprocess
            programs[name] = Program(name, argv, f"{name}.log", environment, is_multiprocess, host.data)
        return programs

    def _program_path(self, host: str, word: str) -> str:
        if os.path.sep in word or not self._roots.get(host):
            return word
        try:
            return self._find_installed(host, word)
        except OperatorError:
            return word  # the host may have it

    def _mapping_of(self, method: str, host: Host) -> Mapping[str, Any]:
        found = self._call_plainly(method, host)
        if not isinstance(found, Mapping) or not all(isinstance(value, str | bytes) for value in found.values()):
            raise self._wrong(
                method, f"{method}({host.name}) returned {found!r:.80}, not a mapping of names to strings"
            )
        for name, text in found.items():
            if isinstance(text, str) and _has_surrogates(text):
                what = f"{method}({host.name}) has a lone surrogate under {name!r}, which UTF-8 cannot encode"
                raise self._wrong(method, f"{what}: {text!r:.80}")
        return found

    def _files_of(self, host: Host) -> Mapping[str, Any]:
        """The files that the plug-in wants on a host. They must be below its data directory, as files elsewhere may be
        the machine's own and nothing would clean them up. Raises PluginError."""
        found = self._mapping_of("files", host)
        for path in found:
            if os.path.isabs(path) or os.path.normpath(path).split(os.sep)[0] == os.pardir:
                raise self._wrong("files", f"files({host.name}) names {path!r}, which is not below host.data")
        return found

    async def _write_files(self, host: Host, *, if_changed: bool = False) -> None:
        """Write the plug-in's files on a host. `if_changed` skips files whose wanted content is unchanged: running
        programs may have modified them since."""
        wanted, before = self._files_of(host), self._written.get(host.name, {})
        for path, content in wanted.items():
            if not if_changed or before.get(path) != content:
                await host.put(path, content)
        self._written[host.name] = dict(wanted)
        await self._own_data(host)

    async def _prepare_host(self, host: Host) -> None:
        await self._write_files(host)
        await self._call(f"setup({host.name})", self._system.setup(host))

    async def _start_together(self, *, tolerate_mistakes_s: float = 0.0) -> None:
        """Call the plug-in's `start_together` until it succeeds: members that have just started may not know each other
        yet and refuse or not answer. Mistakes of the plug-in are reported at once, or after `tolerate_mistakes_s` if an
        unknown leader may cause them."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        deadline_s = loop.time() + self._system.ready_timeout_s
        while True:
            try:
                async with asyncio.timeout(QUESTION_TIMEOUT_S) as limit:
                    await _answer_of(self._system.start_together())
                return self._require_awaited("start_together", "start_together()")
            except OperatorError:
                raise
            except (Exception, SystemExit) as error:
                if isinstance(error, _MISTAKES) and loop.time() >= began_s + tolerate_mistakes_s:
                    raise self._blame(error, "start_together") from None
                if loop.time() > deadline_s:
                    if limit.expired():
                        said = f"start_together() did not end within {QUESTION_TIMEOUT_S:g} s"
                        raise self._wrong("start_together", said) from None
                    raise self._blame(error, "start_together") from None
                logger.debug("start_together: %s: %s", type(error).__name__, error)
            await asyncio.sleep(POLL_S)

    async def _wait_until_ready(self) -> None:
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._system.ready_timeout_s
        waiting = {name: host for name, host in self._hosts.items() if name in self._processes}
        while waiting:
            await self._require_running(waiting)
            ready = await asyncio.gather(*(self._is_ready(host, is_starting=True) for host in waiting.values()))
            waiting = {name: host for (name, host), is_so in zip(waiting.items(), ready, strict=True) if not is_so}
            if waiting and loop.time() > deadline_s:
                raise self._wrong("ready", await self._why_not_ready(list(waiting)))
            if waiting:
                await asyncio.sleep(POLL_S)

    async def _form_group(self) -> None:
        """Wait for a leader, then call the plug-in's `start_together`, which may rely on the leader. If nobody leads
        for FORMING_S, `start_together` may be what forms the group, and is called first."""
        loop = asyncio.get_running_loop()
        is_called = False
        if self.tells_leader:
            deadline_s = loop.time() + self._system.ready_timeout_s
            if type(self._system).start_together is not System.start_together:
                is_called = not await self._has_leader(min(loop.time() + FORMING_S, deadline_s))
            if is_called:
                await self._start_together(tolerate_mistakes_s=MISTAKEN_S)
                deadline_s = loop.time() + self._system.ready_timeout_s
            await self._wait_for_leader(deadline_s)
        await asyncio.sleep(POLL_S)
        await self._require_running(self._processes)  # a host may serve although one of its programs is exiting
        if not is_called:
            await self._start_together()

    async def _has_leader(self, deadline_s: float) -> bool:
        """Whether some host reports by then that it leads, or the plug-in's `status` is broken."""
        while not await self.leaders():
            if asyncio.get_running_loop().time() > deadline_s:
                return bool(self._mistakes())
            await self._require_running(self._processes)
            await asyncio.sleep(POLL_S)
        return True

    async def _require_running(self, names: Collection[str]) -> None:
        """Raises PluginError for the first host with a program that has ended."""
        for name in names:
            if (problem := self._processes[name].first_problem()) is not None:
                await asyncio.sleep(POLL_S)  # its last log lines may still be in flight
                quoted = self._quoted(name)
                hint = ADDRESS_HINT if "address already in use" in quoted.lower() else _foreground_hint(problem)
                hint = await self._access_hint(self._hosts[name]) or hint
                raise self._wrong(self._starter, f"{problem} while starting{quoted}{hint}")

    async def _access_hint(self, host: Host) -> str:
        """What to do about a program of a host that the system's user cannot execute and the harness's user can; empty
        if there is none. Such a program may end in many ways: its loader, its interpreter or a shell reports it."""
        user_words = self._user_words[host.name]
        for program in self._commands[host.name].values() if user_words else ():
            word = program.argv[len(user_words)]
            words = ("test", "-x", os.path.join(host.data, word))
            if os.path.sep not in word or (await host.run(*words, check=False)).status == 0:
                continue
            if (await host.run_as_harness(*words, check=False)).status == 0:
                what = f"{word}, the harness's own Python" if word == host.python else word
                return (
                    f": user {type(self._system).user} cannot execute {what}: install it where all users have access, "
                    "or give them access (chmod a+x to it and to every directory above it)"
                )
        return ""

    async def _wait_for_leader(self, deadline_s: float) -> None:
        """Poll all hosts until one reports that it leads. What `status` raises may be transient; a mistake in the
        plug-in counts only after MISTAKEN_S, since incomplete answers at the start cause the same exceptions."""
        loop = asyncio.get_running_loop()
        mistakes_until_s = loop.time() + MISTAKEN_S
        while True:
            leading = await self.leaders()
            mistakes = self._mistakes()
            if leading and not mistakes:
                return
            if mistakes and loop.time() > min(mistakes_until_s, deadline_s):
                name, error = next(iter(mistakes.items()))
                raise self._blame(error, f"status({name})")
            if not leading and loop.time() > deadline_s:
                said = [str(self._blame(error, f"status({name})")) for name, error in self._unanswered.items()][:1]
                words = f"there is no leader {self._system.ready_timeout_s:g} s after the start"
                raise self._wrong("status", ": ".join([words, *said]))
            await asyncio.sleep(POLL_S)

    def _mistakes(self) -> dict[str, Exception]:
        """Host -> what its last `status` call raised, if that means that the plug-in's own code is wrong."""
        return {name: error for name, error in self._unanswered.items() if isinstance(error, _MISTAKES)}

    async def _why_not_ready(self, names: Sequence[str]) -> str:
        system, name = self._system, names[0]
        wanted = self._why_unready(name) or "ready(host) never returned True"
        if type(system).ready is System.ready:
            wanted = f"its programs never printed {system.ready_line!r}"
            if system.ready_line is None:
                host = self._hosts[name]
                silent = [port for port in system.ports if not await host.listens([port])]
                wanted = f"nothing listens on {', '.join(f'{p} ({system.ports[p]})' for p in silent)}"
                if any([await host.listens([port], at=LOOPBACK) for port in silent]):
                    wanted += LOOPBACK_HINT
        return (
            f"{', '.join(names)} not ready within {system.ready_timeout_s:g} s: on {name} {wanted}{self._quoted(name)}"
        )

    @property
    def _starter(self) -> str:
        return "programs" if type(self._system).programs is not System.programs else "command"

    async def _is_ready(self, host: Host, *, is_starting: bool = False) -> bool:
        """Whether the plug-in reports a host as ready. An exception counts as not ready, as it may be too early to ask;
        at the start a mistake in the plug-in is reported at once."""
        system = self._system
        if system.ready_line is not None and type(system).ready is System.ready:
            return await self._has_printed(host, system.ready_line)
        self._unready.pop(host.name, None)
        limit = asyncio.timeout(QUESTION_TIMEOUT_S)
        try:
            async with limit:
                answer: Any = await _answer_of(system.ready(host))
            if inspect.iscoroutine(answer):
                answer.close()
                raise self._wrong("ready", f"ready({host.name}) returned a coroutine: await it")
            if not answer:
                hint = " (return True once the host serves)" if answer is None else ""
                self._unready[host.name] = f"ready({host.name}) returned {answer!r:.60}{hint}"
            return bool(answer)
        except (Exception, SystemExit) as error:
            if limit.expired():
                self._unready[host.name] = self._hung(f"ready({host.name})", QUESTION_TIMEOUT_S, error)
                return False
            if is_starting and isinstance(error, _MISTAKES):
                raise self._blame(error, f"ready({host.name})") from None
            logger.debug("ready(%s): %s", host.name, error)
            self._unready[host.name] = error
            return False

    def _why_unready(self, name: str) -> str:
        """Why the plug-in's own `ready` last failed, as text; empty if it did not, or if there is none."""
        error = self._unready.get(name)
        if error is None or type(self._system).ready is System.ready:
            return ""
        if isinstance(error, str):
            return error
        return str(self._blame(error, f"ready({name})"))

    async def _has_printed(self, host: Host, line: str) -> bool:
        """Whether a program of a host has printed a text since it was last started."""
        for program in self._commands[host.name].values():
            skipped = self._logged_before.get((host.name, program.log_name), 0)
            words = (f"{skipped + 1}", self._log_path(host, program), line)
            if (await host.run_as_harness("sh", "-c", _PRINTED, "sh", *words, check=False)).status == 0:
                return True
        return False

    def _log_path(self, host: Host, program: Program) -> str:
        if not isinstance(self._cluster, KeepsLogs):
            raise OperatorError(f"ready_line: cluster {self._cluster.name} does not say where logs are")
        return self._cluster.log_path(host.name, program.log_name)

    async def _note_log(self, name: str, program: Program) -> None:
        """Record the log size of a program about to be started: logs are appended to, and output of an earlier run says
        nothing about this one."""
        if self._system.ready_line is None or type(self._system).ready is not System.ready:
            return
        host = self._hosts[name]
        found = await host.run_as_harness("stat", "-c", "%s", "--", self._log_path(host, program), check=False)
        self._logged_before[name, program.log_name] = int(found.out) if found.status == 0 else 0

    # What an operator does

    @classmethod
    def operation_missing(cls, ability: str, settings: Mapping[str, str]) -> str | None:
        """Why it lacks an operator's ability; None if it has it."""
        return operation_missing(ability, system_class=cls.plugin.system_class, name=cls.name)

    async def _status_of(self, host: str, timeout_s: float) -> Status | None:
        return await self._status(self._hosts[host], timeout_s)

    async def _promote(self, name: str) -> None:
        """Tell the plug-in that a host leads, stop its programs, and start them with the new configuration."""
        await self._call(f"promote({name})", self._system.promote(self._hosts[name]))
        await self._end(name)
        await self._reconfigure_and_start(name)

    async def _members_of(self, name: str) -> Collection[str]:
        return await _answer_of(self._system.members(self._hosts[name]))

    async def _leave(self, name: str) -> None:
        await self._call(f"leave({name})", self._system.leave(self._hosts[name]))

    async def _join(self, name: str) -> None:
        """Stop the programs of a host, have the plug-in let it join, and start them with the new configuration."""
        await self._end(name)
        await self._call(f"join({name})", self._system.join(self._hosts[name]))
        await self._reconfigure_and_start(name)

    async def _end(self, name: str) -> None:
        process = self._processes.get(name)
        if process is not None:
            await process.terminate()

    async def _reconfigure_and_start(self, name: str) -> None:
        """Write all files of one host and the changed files of the others; refresh every host's commands, and start
        that one's programs."""
        for host in self._hosts.values():
            self._commands[host.name] = self._programs_of(host)
            await self._write_files(host, if_changed=host.name != name)
        await self.restart(name)

    # What the harness asks of a system

    async def stop(self) -> None:
        """Call `stop_together`, once. SIGTERM to all in parallel; SIGKILL to those that do not exit. Raises PluginError
        for what the plug-in raised, after all have ended."""
        is_first, self._is_stopped = not self._is_stopped, True
        try:
            if is_first:
                await self._call("stop_together()", self._system.stop_together(), timeout_s=QUESTION_TIMEOUT_S)
        finally:
            processes, self._processes = self._processes, {}
            await asyncio.gather(*(process.terminate() for process in processes.values()), return_exceptions=True)

    def process(self, host: str) -> HostProcess | None:
        """The most recently started programs of a host."""
        return self._processes.get(host)

    async def restart(self, host: str) -> None:
        """Start those programs of a host that are not running, in their order."""
        before = self._processes.get(host)
        for name, program in self._commands.get(host, {}).items():
            known = self._processes.get(host)
            if before is not None and name not in before.ended:
                continue
            await self._note_log(host, program)
            try:
                process = await self._cluster.spawn(host, program)
            except OperatorError as error:
                raise self._wrong(self._starter, str(error)) from None
            started = {name: process}
            self._processes[host] = HostPrograms(host, started) if known is None else known.with_started(started)

    async def leaders(self) -> Sequence[str]:
        """Hosts that report that they lead, newest term first."""
        if not self.tells_leader:
            return []
        found = await asyncio.gather(*(self._status(host, STATUS_TIMEOUT_S) for host in self._system.hosts))
        leading = [
            (status.term, host.name)
            for host, status in zip(self._system.hosts, found, strict=True)
            if status is not None and status.leads
        ]
        return [name for _, name in sorted(leading, key=lambda pair: -pair[0])]

    async def status(self, host: str, *, timeout_s: float) -> Mapping[str, str] | None:
        """What the plug-in's `status` reports. Without one: {} if the host's programs run and are ready, or if
        something still listens though they have all ended; else None."""
        if self.tells_leader:
            status = await self._status(self._hosts[host], timeout_s)
            return None if status is None else _status_strings(status)
        process = self._processes.get(host)
        try:
            async with asyncio.timeout(timeout_s):
                if process is not None and process.exit_status() is not None:
                    return {} if await self._is_listened_on(self._hosts[host]) else None
                if process is None or process.ended or await process.state() == PAUSED:
                    return None
                return {} if await self._is_ready(self._hosts[host]) else None
        except TimeoutError:
            return None

    async def _is_listened_on(self, host: Host) -> bool:
        """Whether any process listens on any of a host's ports."""
        return any([await host.listens([port]) for port in host.port_names])

    async def _status(self, host: Host, timeout_s: float) -> Status | None:
        self._unanswered.pop(host.name, None)
        limit = asyncio.timeout(timeout_s)
        try:
            async with limit:
                found: Any = await _answer_of(self._system.status(host))
            if found is None:
                return None
            if isinstance(found, Status):
                if (problem := _status_problem(found)) is not None:
                    raise self._wrong("status", f"status({host.name}) returned a Status whose {problem}")
                return found
            raise self._wrong("status", f"status({host.name}) returned {found!r:.80}, neither a Status nor None")
        except (Exception, SystemExit) as error:
            hung = limit.expired()
            self._unanswered[host.name] = self._hung(f"status({host.name})", timeout_s, error) if hung else error
            logger.debug("status(%s): %s: %s", host.name, type(error).__name__, error)
            return None

    def _hung(self, what: str, timeout_s: float, error: BaseException) -> _Hung:
        where = place_of(error, _file_of(self.plugin.system_class))
        return _Hung(f"{where}: {what} took more than {timeout_s:g} s")

    def facts(self) -> dict[str, Any]:
        """Settings, what was installed, and the final status of the replicas."""
        return {
            "settings": dict(self._values),
            "installed": [str(recipe) for recipe in self._recipes],
            "final_status": dict(self._final),
        }

    async def recover(self, *, timeout_s: float) -> CheckOutcome:
        """Wait until every host is ready and, if the plug-in has a `status`, one of them leads; then give replicas the
        rest of the time to become equal."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        while problems := await self._absent():
            took_s = loop.time() - began_s
            if took_s > timeout_s:
                gone = [name for name in problems if await self._serves_from_the_background(name)]
                problems |= {name: problems[name].removesuffix(FOREGROUND_HINT) + BACKGROUND_HINT for name in gone}
                reason = f"not recovered after {took_s:.0f} s: {'; '.join(problems.values())}"
                details = {"missing": [name for name in problems if name in self._hosts]}
                if self._only_status_hangs(problems):
                    return CheckOutcome("unknown", f"{reason}; {STATUS_HANGS}", details | {CLIENTS_DECIDE: True})
                return CheckOutcome("unknown" if self._mistakes() or gone else False, reason, details)
            await asyncio.sleep(POLL_S)
        hosts = f"{len(self._hosts)} host{'s' if len(self._hosts) > 1 else ''}"
        reason = f"{hosts} served after {loop.time() - began_s:.1f} s"
        if type(self._system).state is not System.state:
            is_equal = await self._wait_until_equal(began_s + (QUESTION_TIMEOUT_S if self._is_apart else timeout_s))
            held = "were equal after" if is_equal else "could not be seen to be equal within"
            reason += f", and the states {held} {loop.time() - began_s:.1f} s"
        return CheckOutcome(True, reason)

    async def _serves_from_the_background(self, name: str) -> bool:
        """Whether a host is served by processes other than its programs, after one of those exited with status 0: it
        daemonised. Its way of starting is to blame, not the system."""
        process = self._processes.get(name)
        if process is None or not (process.first_problem() or "").endswith(ENDED_WELL):
            return False
        if not (isinstance(self._cluster, SeesStrays) and await self._cluster.strays(name)):
            return False
        return await self._is_ready(self._hosts[name])

    async def _wait_until_equal(self, deadline_s: float) -> bool:
        """Poll the replicas' states until they are equal, or until the deadline. Returns whether they are."""
        while True:
            self._states = await self._read_states()
            unread = [state for state in self._states.values() if isinstance(state, _Unread)]
            if any(state.is_mistake for state in unread):
                return False
            if not unread and len({_as_text(state) for state in self._states.values()}) == 1:
                return True
            if asyncio.get_running_loop().time() > deadline_s:
                self._is_apart = True
                return False
            await asyncio.sleep(POLL_S)

    async def _absent(self) -> dict[str, str]:
        """Host, or LEADER -> what keeps the system from being healthy, as text; empty if it is healthy."""
        found: dict[str, str] = {}
        for name, process in self._processes.items():
            if (problem := process.first_problem()) is not None:
                found[name] = f"{problem}{_foreground_hint(problem)}"
            elif await process.state() == PAUSED:
                found[name] = f"the programs of {name} are stopped"
        for name, host in self._hosts.items():
            if name in self._processes and name not in found and not await self._is_ready(host):
                found[name] = ": ".join(filter(None, [f"{name} runs but is not ready", self._why_unready(name)]))
        if self.tells_leader:
            statuses = {host.name: await self._status(host, STATUS_TIMEOUT_S) for host in self._system.hosts}
            self._final = {name: _status_strings(status) for name, status in statuses.items() if status is not None}
            silent = [name for name, status in statuses.items() if status is None]
            found |= {name: self._silence(name) for name in silent if name not in found}
            if not any(status.leads for status in statuses.values() if status is not None):
                found[LEADER] = "there is no leader"
        return found

    def _silence(self, name: str) -> str:
        """Message about a host that runs and does not answer, or about the plug-in's mistake if that is the cause."""
        error = self._mistakes().get(name)
        if error is not None:
            return str(self._blame(error, f"status({name})"))
        hung = self._unanswered.get(name)
        return ": ".join([f"{name} runs but does not answer", *([str(hung)] if isinstance(hung, _Hung) else [])])

    def _only_status_hangs(self, problems: Mapping[str, str]) -> bool:
        """Whether the only problem is that `status` hangs for some hosts."""
        hung = {name for name, error in self._unanswered.items() if isinstance(error, _Hung)}
        silent = {name for name in hung if problems.get(name) == self._silence(name)}
        return bool(silent) and silent == problems.keys() - {LEADER}

    async def _read_states(self) -> dict[str, Any]:
        async def read(host: Host) -> Any:
            limit = asyncio.timeout(QUESTION_TIMEOUT_S)
            try:
                async with limit:
                    state = await _answer_of(self._system.state(host))
            except (Exception, SystemExit) as error:
                if limit.expired():
                    error = self._hung(f"state({host.name})", QUESTION_TIMEOUT_S, error)
                return _Unread(str(self._blame(error, f"state({host.name})")), isinstance(error, _MISTAKES))
            if (problem := json_problem(state)) is not None:
                wrong = self._wrong("state", f"state({host.name}) returned {problem}")
                return _Unread(str(wrong), is_mistake=True)
            return state

        states = await asyncio.gather(*map(read, self._system.hosts))
        return {host.name: state for host, state in zip(self._system.hosts, states, strict=True)}

    def last_words(self, host: str) -> Sequence[str]:
        """The last log lines of a host's programs on this machine, those of the main program last."""
        programs = list(self._commands.get(host, {}).values())
        return [line for program in reversed(programs) for line in last_lines(self._log_dir / host / program.log_name)]

    def _quoted(self, host: str) -> str:
        """The last line that a host's programs logged, and where the rest is: the last line alone does not help with
        javac, Node.js, or a Go panic."""
        words = self.last_words(host)
        more = f" (full log: {self._log_dir / host})" if len(words) > 1 else ""
        return f": {words[-1]}{more}" if words else ""

    def connection(self, kind: str, *, process: int, thread: int) -> Client:
        """A client of the plug-in; its home is one of the replicas' hosts. Raises PluginError."""
        if kind not in self.offers:
            raise OperatorError(f"system {self.name} offers no {kind!r} connections")
        try:
            client = self.client_class()
        except (Exception, SystemExit) as error:
            raise self._blame(error, f"{self.client_class.__name__}()") from None
        client.host = self._system.hosts[thread % len(self._system.hosts)]
        client.hosts = self._system.hosts
        client.others = self._system.others
        client.process = process
        client.settings = self._values
        client.environment = self.client_environment
        client.timeout_s = self._operation_timeout_s
        return client

    async def check(self, *, started_wall_ms: int) -> Mapping[str, CheckOutcome]:
        """Replica agreement, if the plug-in has a `state`, and the replicas' traces, if it has a model of them. Copies
        the system's own logs to the run's log directory."""
        self._keep_logs()
        checks = {}
        if type(self._system).state is not System.state:
            checks["replicas"] = self._compared_states()
        if self._system.trace_model is not None:
            logs = {
                host.name: [self._log_dir / host.name / each.log_name for each in self._commands[host.name].values()]
                for host in self._system.hosts
            }
            checks["trace"] = judge_logs(self._system, logs, _file_of(self.plugin.system_class))
        return checks

    def _compared_states(self) -> CheckOutcome:
        """Whether all replicas hold the same state."""
        if self._states is None:
            return CheckOutcome("unknown", "the replicas were never asked, because the system did not recover")
        unread = {name: state for name, state in self._states.items() if isinstance(state, _Unread)}
        if unread:
            return CheckOutcome("unknown", next(iter(unread.values())).reason)
        texts = {name: _as_text(state) for name, state in self._states.items()}
        first = next(iter(texts))
        other = next((name for name in texts if texts[name] != texts[first]), None)
        if other is None:
            return CheckOutcome(True, f"{len(texts)} replicas hold the same state")
        at = _first_difference(texts[first], texts[other])
        quoted = " and ".join(f"{name} holds {_around(texts[name], at)}" for name in (first, other))
        return CheckOutcome(False, f"replicas differ: {quoted}")

    def _keep_logs(self) -> None:
        for host in self._hosts.values():
            data = Path(self._cluster.local_path(host.name, host.data))
            for pattern in self._system.logs:
                for source in data.glob(pattern):
                    if source.is_file():
                        shutil.copy2(source, self._log_dir / host.name / source.name)

    @classmethod
    def stored_files(cls, settings: Mapping[str, str]) -> Mapping[str, str]:
        """Role -> pattern of files that may be corrupted at rest."""
        return dict(cls.plugin.system_class.stored)

    @classmethod
    def fetch(cls, say: Callable[[str], None], settings: Mapping[str, str]) -> None:
        """Fetch all recipes for these settings into the cache; `say` gets a line for each, and hints about likely
        mistakes in the plug-in. Raises OperatorError."""
        for hint in hints_of(cls.plugin.system_class):
            say(f"note: {hint}")
        for recipe in recipes_of(cls.plugin.system_class, cls._with_defaults(settings)):
            if not is_fetched(recipe):
                say(f"install: {recipe.effort} {recipe} into {cache_directory()}")
            fetched(recipe)

    def long_request(self, host: str) -> LongRequest:
        """The request that the plug-in defines. Raises ValueError if it has none."""
        cls = self.plugin.system_class
        if cls.long_request is None:
            raise ValueError(f"{cls.__name__} has no long_request")
        port, data = cls.long_request
        return LongRequest(cls.ports[port], data)

    def metrics_url(self, host: str, port: str) -> str:
        """Where clients reach a port of a host."""
        return self._hosts[host].url(port)

    # Blaming the plug-in

    def _require_awaited(self, method: str, what: str) -> None:
        """Raises PluginError if a method called a coroutine without awaiting it, so that its work was not done."""
        if (said := take_unawaited()) is not None:
            raise self._wrong(method, f"{what}: {said}")

    async def _call(self, what: str, work: Awaitable[None], *, timeout_s: float | None = None) -> None:
        timeout_s = self._system.ready_timeout_s if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(timeout_s) as limit:
                await _answer_of(work)
            self._require_awaited(what.partition("(")[0], what)
        except OperatorError:
            raise
        except (Exception, SystemExit) as error:
            if limit.expired():
                raise self._wrong(what.partition("(")[0], f"{what} took more than {timeout_s:g} s") from None
            raise self._blame(error, what) from None

    def _call_plainly(self, method: str, host: Host) -> Any:
        try:
            return getattr(self._system, method)(host)
        except (Exception, SystemExit) as error:
            raise self._blame(error, f"{method}({host.name})") from None

    def _blame(self, error: BaseException, what: str) -> PluginError:
        if isinstance(error, _Hung):
            return PluginError(str(error))
        return blamed(error, _file_of(self.plugin.system_class), what)

    def _wrong(self, method: str, what: str) -> PluginError:
        cls = self.plugin.system_class
        function = getattr(cls, method)
        return PluginError(f"{source_line(cls if function is getattr(System, method) else function)}: {what}")


async def _answer_of(work: Awaitable[_T]) -> _T:
    """Await a plug-in's coroutine. A BaseException that the plug-in itself raised, which would end the harness, is
    raised as NoExceptionError."""
    asked = times_cancelled()
    try:
        return await work
    except (Exception, SystemExit):
        raise
    except BaseException as error:
        if not is_its_own(error, asked):
            raise
        raise NoExceptionError(*error.args).with_traceback(error.__traceback__) from error


class _Hung(OperatorError):
    """Replaces the exception of a query (`ready`, `status`, `state`) that timed out: the system may be silent, or the
    plug-in may wait for something else. The message begins with where it waited."""


class _Unread:
    """Stands for a replica state that could not be read; with `is_mistake` the plug-in is wrong, so that retrying, or
    asking another replica, would not help."""

    def __init__(self, reason: str, is_mistake: bool) -> None:
        self.reason = reason
        self.is_mistake = is_mistake


def _as_text(state: Any) -> str:
    """A replica's state as canonical text, for comparison."""
    return json.dumps(state, sort_keys=True)


def _foreground_hint(problem: str) -> str:
    return FOREGROUND_HINT if problem.endswith(ENDED_WELL) else ""


def _first_difference(one: str, other: str) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (here, there) in pairs if here != there), min(len(one), len(other)))


def _around(text: str, at: int) -> str:
    """An excerpt of a text around a position, at most MAX_STATE_CHARS long."""
    begin = max(0, at - MAX_STATE_CHARS // 3)
    piece = text[begin : begin + MAX_STATE_CHARS]
    return f"{'...' if begin else ''}{piece}{'...' if begin + len(piece) < len(text) else ''}"


def _has_surrogates(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)


def _status_problem(status: Status) -> str | None:
    """Which field of a Status has a wrong type, as text; None if all are right."""
    kinds = {
        "leads": (bool, "not True or False"),
        "term": (int, "not an integer"),
        "end": (int, "not an integer"),
    }
    for name, (kind, words) in kinds.items():
        value: Any = getattr(status, name)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            return f"{name} is {value!r:.80}, {words}"
    facts: Any = status.facts
    return None if facts is None or isinstance(facts, Mapping) else f"facts is {facts!r:.80}, not a mapping"


def _status_strings(status: Status) -> dict[str, str]:
    facts = {name: str(value) for name, value in (status.facts or {}).items()}
    return {"leads": str(status.leads).lower(), "term": str(status.term), **facts}


def _packed(directory: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=1) as archive:
        archive.add(directory, ".")
    return buffer.getvalue()
