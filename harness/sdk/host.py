"""A host as a plug-in sees it: its name, its addresses, its directory, and a way to run commands there."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from harness.clusters.abilities import KeepsAccount, NamesHosts
from harness.clusters.base import CLIENTS_HOST, Cluster, ReadsFiles, RemoteHosts, RunsCommands
from harness.errors import SystemUnderTestError
from nemesis.mechanisms.hosts import EMPTY_SCRIPT, script_arguments
from nemesis.mechanisms.shell import ShellError

__all__ = ["DEFAULT_COMMAND_TIMEOUT_S", "CommandFailed", "Host", "Output", "run_on"]

DEFAULT_COMMAND_TIMEOUT_S = 60.0
"""For a command on a host: creating a database takes about ten seconds on a busy machine."""

OURS = ".splitbrain-"
"""Prefix of the harness's own files in a data directory."""

_TCP_LISTEN = "0A"
"""State of a listening socket in /proc/net/tcp."""


class CommandFailed(SystemUnderTestError):
    """A command on a host exited with a nonzero status, or took too long."""


@dataclass(frozen=True, slots=True)
class Output:
    """The result of a command: `status` is its exit status, -9 if it timed out."""

    status: int
    out: str
    err: str


async def run_on(
    cluster: Cluster,
    host: str,
    argv: Sequence[str],
    stdin: str,
    timeout_s: float,
    *,
    check: bool,
    environment: Mapping[str, str] | None = None,
) -> Output:
    """Run a command on a host. Raises CommandFailed; for a nonzero status only with `check`."""
    if not isinstance(cluster, RunsCommands):
        raise CommandFailed(f"cluster {cluster.name} cannot run commands on its hosts")
    assigned = [f"{name}={value}" for name, value in (environment or {}).items()]
    words = ["env", *assigned, *argv] if assigned else [*argv]
    try:
        status, out, err = await cluster.run(host, words, stdin=stdin, timeout_s=timeout_s)
    except ShellError as error:
        raise _unanswered(host, error) from None
    if check and status != 0:
        said = (err.strip() or out.strip()).splitlines()
        raise CommandFailed(f"{host}: {' '.join(argv)} ended with status {status}{f': {said[-1]}' if said else ''}")
    return Output(status, out, err)


def _unanswered(host: str, error: ShellError) -> CommandFailed:
    """The error of a host, or of the machine that it is on, as one of its host."""
    said = str(error)
    return CommandFailed(said if error.host == host else f"{host}: {said}")


@dataclass(frozen=True, eq=False)
class Host:
    """One host of a run. Made by the harness."""

    name: str
    """n1, n2, ...; or the name of one of the system's extra hosts."""
    number: int
    """1 for n1; extra hosts are numbered after the replicas."""
    cluster: Cluster = field(repr=False)
    ports: Mapping[str, int] = field(repr=False)
    find_installed: Callable[[str, str], str] = field(repr=False)
    environment: Mapping[str, str] = field(repr=False, default_factory=dict)
    """Environment variables that the installed programs need, including PATH."""
    user_words: Sequence[str] = field(repr=False, default=())
    """Command prefix that runs a program as the system's user; empty if that is the harness's user."""

    @property
    def names(self) -> Sequence[str]:
        """Names, besides the address, by which programs on other hosts reach this one and which they may pass on."""
        return self.cluster.names_of(self.name) if isinstance(self.cluster, NamesHosts) else ()

    @property
    def data(self) -> str:
        """The directory for the system's data: disk faults act here, and it is empty at the start of every run."""
        return self.cluster.data_dir(self.name)

    @property
    def ip(self) -> str:
        """The address that programs on this host listen on."""
        return self.cluster.bind_address(self.name)

    @property
    def python(self) -> str:
        """A Python interpreter on the host."""
        return self.cluster.python(self.name) if isinstance(self.cluster, RemoteHosts) else sys.executable

    @property
    def port_names(self) -> Collection[str]:
        """The names of the system's ports."""
        return self.ports.keys()

    def path(self, *words: str) -> str:
        """A path below the data directory."""
        return os.path.join(self.data, *words)

    def installed(self, name: str) -> str:
        """The path on the host of an installed file: a program by its name, or a path below what was fetched. Raises
        OperatorError."""
        return self.find_installed(self.name, name)

    def listen(self, port: str) -> str:
        """ "ip:port" to listen on, for a port by its name in `System.ports`. Raises KeyError."""
        return f"{self.ip}:{self.ports[port]}"

    def advertise(self, port: str) -> str:
        """ "name-or-ip:port" that this host's programs should advertise to other hosts. Raises KeyError."""
        return f"{self.names[0] if self.names else self.ip}:{self.ports[port]}"

    def address(self, port: str, source: Host | None = None) -> str:
        """ "ip:port" at which clients, or the host `source`, reach a port. Raises KeyError."""
        return self.cluster.address_from(CLIENTS_HOST if source is None else source.name, self.name, self.ports[port])

    def url(self, port: str) -> str:
        """ "http://ip:port" at which clients reach a port. Raises KeyError."""
        return f"http://{self.address(port)}"

    async def run(
        self, *argv: str, stdin: str = "", timeout_s: float = DEFAULT_COMMAND_TIMEOUT_S, check: bool = True
    ) -> Output:
        """Run a command on the host as the system's user and return its output. PATH includes the program directories
        of the installed packages; `installed` returns the path of any other file.

        Raises CommandFailed for a nonzero exit status, unless `check` is off.
        """
        return await self.run_as_harness(*self.user_words, *argv, stdin=stdin, timeout_s=timeout_s, check=check)

    async def run_as_harness(
        self, *argv: str, stdin: str = "", timeout_s: float = DEFAULT_COMMAND_TIMEOUT_S, check: bool = True
    ) -> Output:
        """Like `run`, but as the harness's user on the host, usually root. Raises CommandFailed."""
        return await run_on(self.cluster, self.name, argv, stdin, timeout_s, check=check, environment=self.environment)

    async def put(self, path: str, content: str | bytes) -> None:
        """Write a file, below the data directory unless the path is absolute. Raises OperatorError."""
        data = content.encode() if isinstance(content, str) else content
        await self.cluster.put_file(self.name, self.path(path), data)

    async def get(self, path: str) -> bytes:
        """The content of a file of at most about 100 MB, below the data directory unless the path is absolute. Raises
        CommandFailed."""
        if not isinstance(self.cluster, ReadsFiles):
            raise CommandFailed(f"cluster {self.cluster.name} cannot read files of its hosts")
        try:
            return await self.cluster.get_file(self.name, self.path(path))
        except ShellError as error:
            raise _unanswered(self.name, error) from None

    async def wipe(self) -> None:
        """Remove everything in the data directory, while the system's programs are not running. Raises
        CommandFailed."""
        await self.run_as_harness(*script_arguments(self.python, EMPTY_SCRIPT, self.data, OURS, "lost+found"))
        if isinstance(self.cluster, KeepsAccount):
            try:
                await self.cluster.begin_account(self.name)
            except ShellError as error:
                raise _unanswered(self.name, error) from None

    async def listens(self, ports: Collection[str] | None = None, *, at: str | None = None) -> bool:
        """Whether sockets listen on these ports (None: all of the system's) according to the host's /proc/net/tcp, at
        the host's address or at `at`. Raises KeyError, and TypeError for a single name instead of several."""
        if isinstance(ports, str):
            raise TypeError(f"listens({ports!r}) takes several names of ports: listens([{ports!r}])")
        tables = ("/proc/net/tcp", "/proc/net/tcp6")
        output = await self.run_as_harness("cat", *tables, check=False, timeout_s=10.0)
        found = listening_ports(output.out, at or self.ip)
        return all(self.ports[name] in found for name in (self.ports if ports is None else ports))


def listening_ports(tables: str, ip: str) -> frozenset[int]:
    """The ports with a listening socket at an IPv4 address or the wildcard address, from /proc/net/tcp and tcp6."""
    own = "".join(f"{int(part):02X}" for part in reversed(ip.split(".")))
    wanted = {own, "0" * 8, "0" * 32, f"{'0' * 16}FFFF0000{own}"}
    found = set()
    for line in tables.splitlines():
        words = line.split()
        if len(words) > 3 and words[3] == _TCP_LISTEN:
            address, _, port = words[1].rpartition(":")
            if address in wanted:
                found.add(int(port, 16))
    return frozenset(found)
