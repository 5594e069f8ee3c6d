"""Base class for a plug-in's system under test; only one method is required.

    class MyKV(System):
        ports = {"client": 7000}

        def command(self, host):
            return ["my-kv-server", "--listen", host.listen("client"), "--data", host.data]

Everything else has a default. Methods are called with a `Host`; those that are `async` may run commands and connect.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from checker.trace import TraceModel
from harness.sdk.client import Client
from harness.sdk.host import Host
from harness.sdk.install import BySetting, Recipe

__all__ = ["Status", "System"]


@dataclass(frozen=True, slots=True)
class Status:
    """The status that a host's replica reports: whether it leads, its term, and other facts to store."""

    leads: bool = False
    term: int = 0
    end: int = -1
    """The end of its log, in any unit: the replica with the greatest is promoted; none if several replicas are left and
    none reports it."""
    facts: Mapping[str, Any] | None = None


class System:
    """A system under test. Its name is that of its file or entry point; its description, the class's docstring."""

    client: ClassVar[type[Client] | None] = None
    """The class of its clients; may be omitted if the file has only one."""
    install: ClassVar[Recipe | BySetting | Sequence[Recipe | BySetting]] = ()
    """What to install: `pip`, `apt`, `maven`, `npm`, `go`, `path`, or one of them `by_setting`. Fetched once and kept
    in a cache."""
    user: ClassVar[str | None] = None
    """The user that its programs and commands run as if the harness is root on a host, for systems that refuse to run
    as root; this user owns the data directory. If the user cannot access the installed files, or there is no user but
    root, they run in a user namespace as nobody."""
    multiprocess: ClassVar[bool] = False
    """Whether several processes of one program write to its disk. Unsynced writes are then tracked by seccomp, which
    follows all of them."""
    ports: ClassVar[Mapping[str, int]] = {}
    """Name of your choice -> port that hosts or clients connect to."""
    settings: Mapping[str, Any] = {}
    """On the class: setting -> its values, the default first; or the default alone if any text is valid. On an
    instance, and on every client: setting -> the value of this run."""
    setting_descriptions: ClassVar[Mapping[str, str]] = {}
    """Setting -> what it decides, in a few words, for `harness list` and for the message about an unknown setting."""
    extra_hosts: ClassVar[Sequence[str]] = ()
    """Names of hosts that it needs besides those of its replicas."""
    stored: ClassVar[Mapping[str, str]] = {}
    """Role (log, vote, checkpoint) -> pattern of files below the data directory that `bit-flip` may corrupt."""
    metrics: ClassVar[Mapping[str, Mapping[str, str]]] = {}
    """"PORT/PATH" of a page in Prometheus' text format, such as "client/metrics" -> series -> title of its lane in the
    report. A series is a name, name{label="value"}, rate(counter_total) or mean(histogram)."""
    logs: ClassVar[Sequence[str]] = ()
    """Patterns of log files below the data directory, to be kept besides the programs' output."""
    cannot: ClassVar[Mapping[str, str]] = {}
    """Nemesis, nemesis=form, nemesis=@target or nemesis=form@target -> why it makes no sense for this system."""
    long_request: ClassVar[tuple[str, bytes] | None] = None
    """(port name, bytes) of a request with an answer of a kilobyte or more that may be sent any number of times on one
    connection. The nemesis `slow-client`, whose clients do not read answers, requires it."""
    ready_line: ClassVar[str | None] = None
    """Text that a program prints once it serves; by default a host is ready when something listens on its ports."""
    ready_timeout_s: ClassVar[float] = 60.0
    """From the start of the programs until all hosts are ready."""
    recovery_timeout_s: ClassVar[float] = 60.0
    """How long it may take, once every fault is healed, until it serves again. Longer is a violation (`recovers`)."""

    trace_model: ClassVar[type[TraceModel] | None] = None
    """A model of its protocol (docs/trace-validation.md) that must explain the events that its replicas log."""

    hosts: Sequence[Host]
    """The replicas' hosts; set by the harness."""
    others: Mapping[str, Host]
    """The hosts of `extra_hosts` by name; set by the harness."""

    keys: int
    """How many independent keys the workload has: 0 to keys - 1; set by the harness."""

    def command(self, host: Host) -> Sequence[str]:
        """The command line of a host's program, not run by a shell. A first word without a slash is looked up in the
        installed packages, then on the host's PATH. Either `command` or `programs` is required."""
        raise AttributeError("neither command(host) nor programs(host) is defined")

    def programs(self, host: Host) -> Mapping[str, Sequence[str]]:
        """The programs of a host by name, if there are several, in starting order. Process faults act on each, and are
        proven for each."""
        return {"main": self.command(host)}

    def files(self, host: Host) -> Mapping[str, str | bytes]:
        """Files to write below the data directory before the first start: path -> content."""
        return {}

    def environment(self, host: Host) -> Mapping[str, str]:
        """Environment variables of the programs, besides those that the recipes need."""
        return {}

    async def setup(self, host: Host) -> None:
        """Prepare a host before its first start, for example by creating a database."""

    async def start_together(self) -> None:
        """Set up the system once all hosts are ready, for example by forming a group. Called again until it succeeds or
        `ready_timeout_s` is over: members may refuse until they know each other. With `status` it is called once a host
        leads, or after 5 s without a leader, as it may be what forms the group."""

    async def stop_together(self) -> None:
        """Clean up at the end of a run, before the programs are stopped, for example by closing kept connections.
        Called once, however the run ends: even if nothing was started, or hosts do not answer."""

    async def ready(self, host: Host) -> bool:
        """Whether the host serves. Polled at the start until it does, and again after the faults."""
        return await host.listens()

    async def status(self, host: Host) -> Status | None:
        """The status of the replica; None, or any exception, if it does not answer. Without this method the leader is
        unknown, and faults that strike the leader are unavailable."""
        return None

    async def promote(self, host: Host) -> None:
        """Record that `host` leads from now on: an operator's decision when the leader is down, in a system without
        elections. Afterwards `files` and `programs` of every host are queried again, changed files are written, and the
        programs of `host` are restarted; the former leader's start when it comes back. Without this method nothing can
        be promoted."""
        raise AttributeError("promote(host) is not defined")

    async def members(self, host: Host) -> Collection[str]:
        """Names of the hosts that are members of the group according to the configuration that the replica of `host`
        has applied. Queried together with `status`. Membership faults need `members`, `leave`, `join` and `status`."""
        raise AttributeError("members(host) is not defined")

    async def leave(self, host: Host) -> None:
        """Remove `host` from the group by the system's own request, sent to any member that accepts it. The programs of
        `host` are left alone and may react as they like. Called again until it succeeds, so it must be idempotent."""
        raise AttributeError("leave(host) is not defined")

    async def join(self, host: Host) -> None:
        """Add `host` to the group. Its programs were stopped before and are started afterwards, with `files` and
        `programs` queried again. If it must start without data, `await host.wipe()` here. Called again until it
        succeeds, and once more if the start that follows fails."""
        raise AttributeError("join(host) is not defined")

    async def state(self, host: Host) -> Any:
        """The replica's content as JSON data, which must be equal on all hosts at the end. Without this method replicas
        are not compared."""
        return None

    def trace_event(self, line: str) -> Mapping[str, Any] | None:
        """The event for `trace_model` in a line that a program of a replica has printed, with the fields of a trace's
        line but `node`; None if there is none. By default every line that is a JSON object with an `event`."""
        if not line.startswith("{"):
            return None
        try:
            values = json.loads(line)
        except ValueError:
            return None
        return values if isinstance(values, dict) and "event" in values else None
