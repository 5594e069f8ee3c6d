"""What a system under test is to a plug-in: a class with one method that is required.

    class MyKV(System):
        ports = {"client": 7000}

        def command(self, host):
            return ["my-kv-server", "--listen", host.listen("client"), "--data", host.data]

Everything else has a default. Methods are called with a `Host`; those that are `async` may run commands and connect.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from harness.sdk.client import Client
from harness.sdk.host import Host
from harness.sdk.install import BySetting, Recipe

__all__ = ["Status", "System"]


@dataclass(frozen=True, slots=True)
class Status:
    """What the replica of a host says of itself: whether it leads, and in which term; what else is worth keeping."""

    leads: bool = False
    term: int = 0
    end: int = -1
    """How far its log goes, in a unit of its own: whoever goes furthest is promoted. Where none of several says so,
    nobody is."""
    facts: Mapping[str, Any] | None = None


class System:
    """A system under test. Its name is that of its file or entry point; its description, the class's docstring."""

    client: ClassVar[type[Client] | None] = None
    """The class of its clients; need not be said where the file has only one."""
    install: ClassVar[Recipe | BySetting | Sequence[Recipe | BySetting]] = ()
    """What it is made of: `pip`, `apt`, `maven`, `npm`, `go`, `path`, or `by_setting` one or the other of them. Fetched
    once, and kept in a cache."""
    user: ClassVar[str | None] = None
    """The user that its programs and commands run as where the harness is root on a host, for systems that refuse to be
    root; the data directory is that user's. Where this user cannot get to what was installed, or there is none but
    root, they run in a user namespace in which they are nobody."""
    multiprocess: ClassVar[bool] = False
    """Whether several processes of one program write to its disk. What they have not synced is then kept track of by
    seccomp, which follows all of them."""
    ports: ClassVar[Mapping[str, int]] = {}
    """Its ports by names of your choice: those that hosts and clients connect to."""
    settings: Mapping[str, Any] = {}
    """On the class: setting -> its values, the default first; or the default alone, where any text will do.
    On an instance, and on every client: setting -> the value of this run."""
    extra_hosts: ClassVar[Sequence[str]] = ()
    """Names of hosts that it needs beside those of its replicas."""
    stored: ClassVar[Mapping[str, str]] = {}
    """Role (log, vote, checkpoint) -> files below the data directory that `bit-flip` may damage, as a pattern."""
    logs: ClassVar[Sequence[str]] = ()
    """Patterns of log files below the data directory, to be kept beside what programs print."""
    cannot: ClassVar[Mapping[str, str]] = {}
    """Nemesis, or nemesis=form, that makes no sense here -> why."""
    long_request: ClassVar[tuple[str, bytes] | None] = None
    """(port's name, bytes) of a request that is answered with a kilobyte or more, and may be sent any number of times
    on one connection. Without it there are no clients that leave answers unread (`slow-client`)."""
    ready_line: ClassVar[str | None] = None
    """Text that a program prints once it serves; without one, a host is ready when its ports are listened on."""
    ready_timeout_s: ClassVar[float] = 60.0
    """From the start of the programs until all hosts are ready."""
    recovery_timeout_s: ClassVar[float] = 60.0
    """How long it may take, once every fault is gone, until it serves again. Longer is a violation (`recovers`)."""

    hosts: Sequence[Host]
    """The replicas' hosts; set by the harness."""
    others: Mapping[str, Host]
    """The hosts of `extra_hosts` by name; set by the harness."""

    keys: int
    """How many independent keys the workload has: 0 to keys - 1; set by the harness."""

    def command(self, host: Host) -> Sequence[str]:
        """The program of a host, as words; not run by a shell. A first word without a slash is looked for in what was
        installed, then on the host's PATH. One of `command` and `programs` is required."""
        raise AttributeError("neither command(host) nor programs(host) is defined")

    def programs(self, host: Host) -> Mapping[str, Sequence[str]]:
        """The programs of a host by name, where there is more than one, in the order in which they are started. Each is
        killed, paused and proven."""
        return {"main": self.command(host)}

    def files(self, host: Host) -> Mapping[str, str | bytes]:
        """Files to write below the data directory before the first start: path -> content."""
        return {}

    def environment(self, host: Host) -> Mapping[str, str]:
        """Environment variables of the programs, beside those that the recipes need."""
        return {}

    async def setup(self, host: Host) -> None:
        """What has to be done on a host before its first start, such as making a database."""

    async def start_together(self) -> None:
        """What has to be done once all hosts are ready, such as making a group of them. Called again, until it succeeds
        or `ready_timeout_s` have passed: members may refuse until they know of each other. With `status` it is called
        once somebody leads, or nobody has for 5 s: then it may be what makes the group."""

    async def stop_together(self) -> None:
        """What has to be done at a run's end, before the programs are ended, such as closing connections that are kept.
        Called once, however the run ends: also where nothing had been started, or hosts do not answer."""

    async def ready(self, host: Host) -> bool:
        """Whether the host serves. Asked until it does, and again when faults are over."""
        return await host.listens()

    async def status(self, host: Host) -> Status | None:
        """What the replica says of itself; None, or any exception, when it does not answer. Without this method nobody
        knows who leads, and faults that strike the leader cannot be had."""
        return None

    async def promote(self, host: Host) -> None:
        """Remember that `host` leads from now on: what an operator decides where nobody is elected, when the leader is
        down. Every host's `files` are written and its `programs` asked for anew then, and those of `host` are started
        again; the former leader's when it comes back. Without this method nobody can be promoted."""
        raise AttributeError("promote(host) is not defined")

    async def members(self, host: Host) -> Collection[str]:
        """The names of the hosts that the replica of `host` holds for members of its group, as it has applied them by
        now. It is asked beside `status`. With `leave`, `join` and `status`, members can be changed; none of them is of
        use without the others."""
        raise AttributeError("members(host) is not defined")

    async def leave(self, host: Host) -> None:
        """Have the group let `host` go, by the system's own request, to whoever takes it. The programs of `host` are
        left as they are: what they do then is their own affair. Called again until it succeeds, so what is done already
        must do no harm."""
        raise AttributeError("leave(host) is not defined")

    async def join(self, host: Host) -> None:
        """Have the group take `host` in, whose programs were ended before and are started afterwards, with its `files`
        and `programs` asked for anew. Where it has to begin with nothing, `await host.wipe()` here. Called again until
        it succeeds, and once more where the start failed that followed."""
        raise AttributeError("join(host) is not defined")

    async def state(self, host: Host) -> Any:
        """What the replica holds, as JSON data that must be equal on all hosts in the end. Without this method replicas
        are not compared."""
        return None
