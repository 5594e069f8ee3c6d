"""Reading of configurations: a reader that notes every problem, and checks of single values.

A file that is wrong in five places is reported in five lines at once, and an unknown key is named together
with the known one it resembles. Nothing here reads a file or a clock: the text comes from the caller, so a
simulated node is configured the same way.
"""

from __future__ import annotations

import ipaddress
import posixpath
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from node.nearest import nearest

__all__ = [
    "ConfigError",
    "ConfigReader",
    "check_absolute_path",
    "check_address",
    "check_addresses",
    "check_dialled_address",
    "check_member_addresses",
    "check_member_id",
    "check_name",
    "check_table",
    "check_text",
    "integer_in",
    "load_toml",
    "one_of",
    "split_address",
]

MAX_CONFIGURED_MEMBERS: Final = 7
"""Members that a group may start with. Larger ones only add latency; elections and commits are tested up to this size.
Membership changes may make a group larger (node.dledger.membership), for example while a member is replaced."""
_SELF_ID = re.compile(r"n[0-9]{1,4}")
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,100}")


class ConfigError(Exception):
    """The configuration cannot be used. `problems` holds one line for each thing that is wrong."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = tuple(problems)


def split_address(address: str) -> tuple[str, int]:
    """Host and port of "ip:port" or "[ip6]:port". Raises ValueError, whose text says what is wrong."""
    host, colon, port_text = address.rpartition(":")
    if not colon or not port_text.isascii() or not port_text.isdigit():
        raise ValueError(f"{address!r} is not ip:port")
    host = host.removeprefix("[").removesuffix("]")
    try:
        ipaddress.ip_address(host)
    except ValueError as error:
        raise ValueError(f"{address!r} is not ip:port ({host!r} is no IP address)") from error
    if int(port_text) > 65535:
        raise ValueError(f"{address!r} has a port above 65535")
    return host, int(port_text)


class _Missing:
    """No default: the key is required."""


_REQUIRED: Final = _Missing()


class ConfigReader:
    """Takes keys out of one table, noting what is wrong; `finish` reports keys that were not taken."""

    def __init__(self, table: Mapping[str, Any], problems: list[str], prefix: str = "") -> None:
        self._table = table
        self._problems = problems
        self._prefix = prefix
        self._known: list[str] = []

    def problem(self, key: str, text: str) -> None:
        self._problems.append(f"{self._prefix}{key}: {text}")

    def take(self, key: str, check: Callable[[Any], Any], default: Any = _REQUIRED) -> Any:
        """The checked value of `key`; the default (None for a required key) when it is absent or wrong."""
        self._known.append(key)
        fallback = None if default is _REQUIRED else default
        if key not in self._table:
            if default is _REQUIRED:
                self.problem(key, "is required")
            return fallback
        try:
            return check(self._table[key])
        except ValueError as error:
            self.problem(key, str(error))
            return fallback

    def table(self, key: str) -> ConfigReader:
        """A reader of a sub-table; an empty one when it is absent or not a table."""
        value = self.take(key, check_table, {})
        return ConfigReader(value, self._problems, f"{self._prefix}{key}.")

    def optional_table(self, key: str) -> ConfigReader | None:
        """A reader of a sub-table whose presence switches something on; None when it is absent."""
        return self.table(key) if key in self._table else self.take(key, check_table, None)

    def tables(self, key: str) -> list[ConfigReader]:
        """Readers of an array of tables."""
        values = self.take(key, check_tables, [])
        return [
            ConfigReader(value, self._problems, f"{self._prefix}{key}[{number}].")
            for number, value in enumerate(values)
        ]

    def finish(self) -> None:
        for key in self._table:
            if key not in self._known:
                hint = nearest(key, self._known) or f"; known are {', '.join(self._known)}"
                self.problem(key, f"is no known key{hint}")


def check_table(value: Any) -> dict[str, Any]:
    """A TOML table."""
    if not isinstance(value, dict):
        raise ValueError("must be a table")
    return value


def check_tables(value: Any) -> list[dict[str, Any]]:
    """An array of TOML tables."""
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ValueError("must be an array of tables")
    return value


def check_text(value: Any) -> str:
    """A non-empty string."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"must be a non-empty string, not {value!r}")
    return value


def check_name(value: Any) -> str:
    """A name of a group, broker or cluster."""
    if not _NAME.fullmatch(check_text(value)):
        raise ValueError(f"{value!r} may hold up to 100 letters, digits, '_', '.' and '-'")
    return str(value)


def check_member_id(value: Any) -> str:
    """A member id: n and a number."""
    if not _SELF_ID.fullmatch(check_text(value)):
        raise ValueError(f"{value!r} must be n and a number, such as n1")
    return str(value)


def check_member_ids(value: Any) -> tuple[str, ...]:
    """Distinct member ids, whose order matters."""
    if not isinstance(value, list) or len(set(map(str, value))) != len(value):
        raise ValueError("must be a list of different member ids")
    return tuple(check_member_id(each) for each in value)


def check_address(value: Any) -> str:
    """An address as ip:port; port 0 is allowed, for listening."""
    split_address(check_text(value))
    return str(value)


def check_dialled_address(value: Any) -> str:
    """An address as ip:port that a peer can dial."""
    host, port = split_address(check_text(value))
    if port == 0 or ipaddress.ip_address(host).is_unspecified:
        raise ValueError(f"{value!r} cannot be dialled: it needs a definite address and port")
    return str(value)


def check_addresses(value: Any) -> tuple[str, ...]:
    """An array of addresses to dial."""
    if not isinstance(value, list):
        raise ValueError("must be an array of ip:port")
    return tuple(check_dialled_address(item) for item in value)


def check_member_addresses(value: Any) -> dict[str, str]:
    """Member id -> address to dial, ordered by number."""
    members = {check_member_id(key): check_dialled_address(address) for key, address in check_table(value).items()}
    if len(members) > MAX_CONFIGURED_MEMBERS:
        raise ValueError(f"has {len(members)} members, at most {MAX_CONFIGURED_MEMBERS} are supported")
    return dict(sorted(members.items(), key=lambda item: int(item[0][1:])))


def check_absolute_path(value: Any) -> str:
    """An absolute path, normalised."""
    path = check_text(value)
    if not posixpath.isabs(path):
        raise ValueError(f"{path!r} must be an absolute path")
    return posixpath.normpath(path)


def one_of(choices: Sequence[str]) -> Callable[[Any], str]:
    """A check that accepts only these texts; its error names the nearest one. An empty choice stands for an absent
    key: it is accepted but not listed."""
    offered = [choice for choice in choices if choice]

    def check(value: Any) -> str:
        if value not in choices:
            raise ValueError(f"{value!r} is not one of {', '.join(offered)}{nearest(str(value), offered)}")
        return str(value)

    return check


def integer_in(lowest: int, highest: int) -> Callable[[Any], int]:
    """A check that accepts whole numbers in this range."""

    def check(value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not lowest <= value <= highest:
            raise ValueError(f"must be a whole number from {lowest} to {highest}, not {value!r}")
        return value

    return check


def load_toml(text: str, overrides: Sequence[str]) -> dict[str, Any]:
    """The TOML `text` with `overrides` ("dotted.key=value") applied on top. Raises ConfigError."""
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also huge integers (ValueError) and deep nesting (RecursionError)
        raise ConfigError([f"not TOML: {error}"]) from error
    problems = []
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or not key:
            problems.append(f"--set {override}: must be key=value")
            continue
        problem = _override(table, key.strip().split("."), _value(value.strip()))
        if problem:
            problems.append(f"--set {override}: {problem}")
    if problems:
        raise ConfigError(problems)
    return table


def _value(text: str) -> Any:
    """`text` as a TOML value; if it is not one, it is taken as a bare string (`--set read_mode=lease`)."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text


def _override(table: dict[str, Any], path: Sequence[str], value: Any) -> str:
    for step in path[:-1]:
        table = table.setdefault(step, {})
        if not isinstance(table, dict):
            return f"{step} is not a table"
    table[path[-1]] = value
    return ""
