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
"""For a command on a host: making a database takes some ten seconds on a busy machine."""

OURS = ".splitbrain-"
"""How names in a data directory begin that are nobody's data."""

_TCP_LISTEN = "0A"
"""State of a listening socket in /proc/net/tcp."""


class CommandFailed(SystemUnderTestError):
    """A command on a host ended with another status than 0, or took too long."""


@dataclass(frozen=True, slots=True)
class Output:
    """What came of a command: `status` is its exit status, -9 when its time was up."""

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
    """Run a command on a host. Raises CommandFailed, for another status than 0 only where it is to be checked."""
    if not isinstance(cluster, RunsCommands):
        raise CommandFailed(f"cluster {cluster.name} cannot run commands on its hosts")
    assigned = [f"{name}={value}" for name, value in (environment or {}).items()]
    words = ["env", *assigned, *argv] if assigned else [*argv]
    try:
        status, out, err = await cluster.run(host, words, stdin=stdin, timeout_s=timeout_s)
    except ShellError as error:
        raise CommandFailed(f"{host}: {error}") from None
    if check and status != 0:
        said = (err.strip() or out.strip()).splitlines()
        raise CommandFailed(f"{host}: {' '.join(argv)} ended with status {status}{f': {said[-1]}' if said else ''}")
    return Output(status, out, err)


@dataclass(frozen=True, eq=False)
class Host:
    """One host of a run. Made by the harness."""

    name: str
    """n1, n2, ...; or the name that the system gave to a host of its own."""
    number: int
    """1 for n1; beyond the replicas for hosts of the system's own."""
    cluster: Cluster = field(repr=False)
    ports: Mapping[str, int] = field(repr=False)
    find_installed: Callable[[str, str], str] = field(repr=False)
    environment: Mapping[str, str] = field(repr=False, default_factory=dict)
    """What programs from the install recipes need, PATH among it."""
    user_words: Sequence[str] = field(repr=False, default=())
    """What is put before a command so that it runs as the system's user; nothing where that is the harness's own."""

    @property
    def names(self) -> Sequence[str]:
        """Names by which programs on the other hosts find this one, beside its address: such as may be handed on."""
        return self.cluster.names_of(self.name) if isinstance(self.cluster, NamesHosts) else ()

    @property
    def data(self) -> str:
        """The directory for the system's data: faults of disks act here, and it starts empty in every run."""
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
        """Where the host has a file that an install recipe brought: a program by its name, or a path below what was
        fetched. Raises OperatorError."""
        return self.find_installed(self.name, name)

    def listen(self, port: str) -> str:
        """ "ip:port" to listen on, for a port by its name in `System.ports`. Raises KeyError."""
        return f"{self.ip}:{self.ports[port]}"

    def advertise(self, port: str) -> str:
        """ "name-or-ip:port" by which this host's programs make themselves known to other hosts. Raises KeyError."""
        return f"{self.names[0] if self.names else self.ip}:{self.ports[port]}"

    def address(self, port: str, source: Host | None = None) -> str:
        """ "ip:port" at which clients reach a port; with `source`, at which that host does. Raises KeyError."""
        return self.cluster.address_from(CLIENTS_HOST if source is None else source.name, self.name, self.ports[port])

    def url(self, port: str) -> str:
        """ "http://ip:port" at which clients reach a port. Raises KeyError."""
        return f"http://{self.address(port)}"

    async def run(
        self, *argv: str, stdin: str = "", timeout_s: float = DEFAULT_COMMAND_TIMEOUT_S, check: bool = True
    ) -> Output:
        """Run a command on the host, as the system's user, and have its output. By name it finds what was installed
        into the packages' directories of programs; `installed` gives the path of any other file.

        Raises CommandFailed, unless `check` is off, when it ends with another status than 0.
        """
        return await self.run_as_harness(*self.user_words, *argv, stdin=stdin, timeout_s=timeout_s, check=check)

    async def run_as_harness(
        self, *argv: str, stdin: str = "", timeout_s: float = DEFAULT_COMMAND_TIMEOUT_S, check: bool = True
    ) -> Output:
        """The same as the user that the harness is on the host: root, mostly. Raises CommandFailed."""
        return await run_on(self.cluster, self.name, argv, stdin, timeout_s, check=check, environment=self.environment)

    async def put(self, path: str, content: str | bytes) -> None:
        """Write a file, below the data directory unless the path is absolute. Raises OperatorError."""
        data = content.encode() if isinstance(content, str) else content
        await self.cluster.put_file(self.name, self.path(path), data)

    async def get(self, path: str) -> bytes:
        """The content of a file, below the data directory unless the path is absolute, of some 100 MB at most. Raises
        CommandFailed."""
        if not isinstance(self.cluster, ReadsFiles):
            raise CommandFailed(f"cluster {self.cluster.name} cannot read files of its hosts")
        try:
            return await self.cluster.get_file(self.name, self.path(path))
        except ShellError as error:
            raise CommandFailed(f"{self.name}: {error}") from None

    async def wipe(self) -> None:
        """Remove everything in the data directory; the system's programs must not run. Raises CommandFailed."""
        await self.run_as_harness(*script_arguments(self.python, EMPTY_SCRIPT, self.data, OURS, "lost+found"))
        if isinstance(self.cluster, KeepsAccount):
            try:
                await self.cluster.begin_account(self.name)
            except ShellError as error:
                raise CommandFailed(f"{self.name}: {error}") from None

    async def listens(self, ports: Collection[str] | None = None, *, at: str | None = None) -> bool:
        """Whether sockets listen on these ports (all of the system's when None), by the host's own tables; at the
        host's address, or another one of it. Raises KeyError, and TypeError for a single name in the place of
        several."""
        if isinstance(ports, str):
            raise TypeError(f"listens({ports!r}) takes several names of ports: listens([{ports!r}])")
        tables = ("/proc/net/tcp", "/proc/net/tcp6")
        output = await self.run_as_harness("cat", *tables, check=False, timeout_s=10.0)
        found = listening_ports(output.out, at or self.ip)
        return all(self.ports[name] in found for name in (self.ports if ports is None else ports))


def listening_ports(tables: str, ip: str) -> frozenset[int]:
    """The ports that /proc/net/tcp and tcp6 show as listened on at an IPv4 address, or at every address."""
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
