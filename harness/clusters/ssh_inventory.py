"""The machines of an `ssh` cluster: an inventory in TOML, or OpenSSH configuration.

    [defaults]                      # every key may be here or in a host's table, which takes precedence
    user = "admin"
    identity_file = "~/.ssh/id_ed25519"

    [hosts.n1]
    hostname = "192.0.2.11"         # what the harness connects to

    [hosts.n2]
    hostname = "gateway.example"
    port = 2202
    address = "10.0.0.12"           # what the other hosts know it by, if different

Hosts become n1, n2, ... in the order of the file; one that is called ns1 runs the name server. A file whose name does
not end in .toml is read as OpenSSH configuration, such as the output of `vagrant ssh-config`.
"""

from __future__ import annotations

import dataclasses
import getpass
import ipaddress
import os
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.errors import OperatorError, nearest

__all__ = [
    "ACCEPT_NEW",
    "REAL_CLOCK",
    "SHIM_CLOCK",
    "STRICT",
    "SshHost",
    "load_inventory",
    "parse_ssh_config",
    "parse_toml",
]

STRICT = "strict"
ACCEPT_NEW = "accept-new"
SHIM_CLOCK = "shim"
REAL_CLOCK = "real"

_SSH_CONFIG_KEYS = {
    "hostname": "hostname",
    "user": "user",
    "port": "port",
    "identityfile": "identity_file",
    "userknownhostsfile": "known_hosts",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SshHost:
    """One machine: how it is reached, and what the harness may use there.

    `address` is the IPv4 address that the other hosts know it by; without one, it is the machine's address in `network`
    (such as "10.0.0.0/24"), or that of `hostname`. Data and logs of a run are in `directory`. `host_keys` decides about
    a key that is not in `known_hosts`: "strict" rejects it, "accept-new" accepts and stores it.
    """

    name: str
    hostname: str
    port: int = 22
    user: str = dataclasses.field(default_factory=getpass.getuser)
    identity_file: str | None = None
    known_hosts: str = "~/.ssh/known_hosts"
    host_keys: str = STRICT
    address: str | None = None
    network: str | None = None
    sudo: bool | None = None
    """Whether commands go through sudo; None: for every user but root."""
    clock: str = SHIM_CLOCK
    """What clock faults skew: "shim", the clock that the replica sees, or "real", the machine's own wall clock."""
    python: str = "python3"
    directory: str = "/var/lib/splitbrain"

    @property
    def uses_sudo(self) -> bool:
        return self.user != "root" if self.sudo is None else self.sudo

    def to_json(self) -> dict[str, Any]:
        """The host as plain JSON data, for the run's state; `SshHost(**data)` reads it back."""
        return dataclasses.asdict(self)


_TYPES: Mapping[str, type] = {
    "hostname": str, "port": int, "user": str, "identity_file": str, "known_hosts": str, "host_keys": str,
    "address": str, "network": str, "sudo": bool, "clock": str, "python": str, "directory": str,
}  # fmt: skip


MAX_CHARS = 1 << 20
"""Largest inventory file, enough for some ten thousand machines."""


def load_inventory(path: str) -> list[SshHost]:
    """The machines of an inventory file, in order. Raises OperatorError, which names every problem in one line."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(MAX_CHARS + 1)  # a device file may never end
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise OperatorError(f"inventory {path}: {why}") from None
    if len(text) > MAX_CHARS:
        raise OperatorError(f"inventory {path}: it is longer than {MAX_CHARS:,} characters")
    try:
        return parse_toml(text) if path.endswith(".toml") else parse_ssh_config(text)
    except OperatorError as error:
        raise OperatorError(f"inventory {path}: {error}") from None


def parse_toml(text: str) -> list[SshHost]:
    """Machines of a TOML inventory. Raises OperatorError."""
    try:
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also for numbers of thousands of digits, and deep nesting
        raise OperatorError(f"not TOML: {error}") from None
    problems = [
        f"unknown table or key {key!r}{nearest(key, ('hosts', 'defaults'))}; known: hosts, defaults"
        for key in data
        if key not in ("hosts", "defaults")
    ]
    defaults, hosts = data.get("defaults", {}), data.get("hosts", {})
    if not isinstance(defaults, dict) or not isinstance(hosts, dict):
        raise OperatorError("[defaults] and [hosts.NAME] must be tables")
    problems += _table_problems("defaults", defaults)
    found = []
    for name, table in hosts.items():
        if not isinstance(table, dict):
            problems.append(f"hosts.{name} is not a table")
            continue
        problems += _table_problems(f"hosts.{name}", table)
        values = {**defaults, **table}
        if "hostname" not in values:
            problems.append(f"hosts.{name} has no hostname")
        found.append((name, values))
    if problems:
        raise OperatorError("; ".join(problems))
    return _checked([SshHost(name=name, **values) for name, values in found])


def _table_problems(where: str, table: Mapping[str, Any]) -> list[str]:
    problems = []
    for key, value in table.items():
        wanted = _TYPES.get(key)
        if wanted is None:
            problems.append(f"{where}: unknown key {key!r}{nearest(key, _TYPES)}; known: {', '.join(_TYPES)}")
        elif not isinstance(value, wanted) or (wanted is int and isinstance(value, bool)):
            problems.append(f"{where}: {key} must be {_IN_WORDS[wanted]}, not {value!r}")
    return problems


_IN_WORDS = {str: "a string", int: "a whole number", bool: "true or false"}


def parse_ssh_config(text: str) -> list[SshHost]:
    """Machines of an OpenSSH configuration: one for each `Host` that is a name. Raises OperatorError.

    A configuration that turns off checking of host keys gets `accept-new`: no machine goes unchecked twice.
    """
    hosts: dict[str, dict[str, Any]] = {}
    current: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            words = shlex.split(line.replace("=", " ", 1), comments=True)
        except ValueError as error:
            raise OperatorError(f"line {number}: {error}") from None
        if not words:
            continue
        key, values = words[0].lower(), words[1:]
        if not values:
            raise OperatorError(f"line {number}: {words[0]} has no value; a TOML inventory must be named *.toml")
        if key == "host":
            current = [name for name in values if not set(name) & set("*?!")]
            for name in current:
                hosts.setdefault(name, {})
            continue
        for name in current:
            if key == "stricthostkeychecking" and values[0].lower() in ("no", "off", "accept-new"):
                hosts[name].setdefault("host_keys", ACCEPT_NEW)
            elif key in _SSH_CONFIG_KEYS:
                hosts[name].setdefault(_SSH_CONFIG_KEYS[key], values[0])
    made = []
    for name, values_of in hosts.items():
        values_of.setdefault("hostname", name)
        if values_of.get("known_hosts") == "/dev/null":
            del values_of["known_hosts"]
        if "port" in values_of:
            try:
                values_of["port"] = int(values_of["port"])
            except ValueError:
                raise OperatorError(f"host {name}: port {values_of['port']!r} is not a number") from None
        made.append(SshHost(name=name, **values_of))
    return _checked(made)


def _checked(hosts: Sequence[SshHost]) -> list[SshHost]:
    """The hosts, after checking them. Raises OperatorError, which names every problem."""
    problems = [] if hosts else ["it lists no hosts"]
    for host in hosts:
        if not 1 <= host.port <= 65535:
            problems.append(f"host {host.name}: port must be 1 to 65535, not {host.port}")
        if host.host_keys not in (STRICT, ACCEPT_NEW):
            problems.append(f"host {host.name}: host_keys must be {STRICT} or {ACCEPT_NEW}, not {host.host_keys!r}")
        if host.clock not in (SHIM_CLOCK, REAL_CLOCK):
            problems.append(f"host {host.name}: clock must be {SHIM_CLOCK} or {REAL_CLOCK}, not {host.clock!r}")
        if host.address is not None and not _is_ipv4(host.address):
            problems.append(f"host {host.name}: address must be an IPv4 address, not {host.address!r}")
        if host.network is not None and not _is_network(host.network):
            problems.append(f"host {host.name}: network must look like 10.0.0.0/24, not {host.network!r}")
        if not host.directory.startswith("/"):
            problems.append(f"host {host.name}: directory must begin with /, not {host.directory!r}")
        if host.identity_file is not None and not os.path.isfile(os.path.expanduser(host.identity_file)):
            problems.append(f"host {host.name}: identity_file {host.identity_file} does not exist")
    if problems:
        raise OperatorError("; ".join(problems))
    return list(hosts)


def _is_ipv4(text: str) -> bool:
    try:
        ipaddress.IPv4Address(text)
    except ValueError:
        return False
    return True


def _is_network(text: str) -> bool:
    try:
        ipaddress.IPv4Network(text)
    except ValueError:
        return False
    return True
