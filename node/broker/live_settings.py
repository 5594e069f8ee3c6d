"""Settings that can be changed while the broker runs (code 25; R: updateBrokerConfig), under RocketMQ's names.

A request changes all settings that it names, or none. Changed ones are kept in `brokerConfig.json` and override the
configuration when the broker starts again, as RocketMQ writes them into its own configuration file. Every other setting
of code 26 needs a restart: changing it is refused with a remark that says so.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from node.config import MAX_MESSAGE_SIZE_BYTES, MAX_RECORD_OVERHEAD_BYTES, BrokerConfig
from node.config_reader import integer_in
from node.remoting import RequestError, ResponseCode
from node.runtime import Clock, Disk
from node.store.table_file import read_table, write_table

__all__ = ["LiveSettings", "with_setting"]

logger = logging.getLogger("node.broker")

MAX_SETTINGS: Final = 1000
"""Settings in one request; some thirty exist."""
MAX_LISTED_PROBLEMS: Final = 3
MAX_NAME_CHARACTERS: Final = 40
"""Length of a name or a value that a remark repeats."""


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError("is neither true nor false")
    return text.lower() == "true"


def _integer(text: str, low: int, high: int) -> int:
    if not text.removeprefix("-").isascii() or not text.removeprefix("-").isdecimal() or len(text) > 20:
        raise ValueError("is no integer")
    return integer_in(low, high)(int(text))


def _seconds(text: str, high: int) -> int:
    value_ms = _integer(text, 1000, high * 1000)
    if value_ms % 1000:
        raise ValueError("is no whole number of seconds (it counts milliseconds)")
    return value_ms // 1000


def _max_message_size(config: BrokerConfig, text: str) -> BrokerConfig:
    limits = replace(config.limits, max_message_size_bytes=_integer(text, 1, MAX_MESSAGE_SIZE_BYTES))
    if limits.segment_size_bytes < limits.max_message_size_bytes + MAX_RECORD_OVERHEAD_BYTES:
        raise ValueError(f"does not fit into a file of the log, of {limits.segment_size_bytes} bytes")
    return replace(config, limits=limits)


def _slave_read_enable(config: BrokerConfig, text: str) -> BrokerConfig:
    if config.ha is not None:
        raise ValueError("needs a restart where there is classic HA: a slave's reads are another mode of the log")
    return replace(config, slave_read_enable=_boolean(text))


_Change = Callable[[BrokerConfig, str], BrokerConfig]


def _top(name: str, read: Callable[[str], int | bool]) -> _Change:
    def change(config: BrokerConfig, text: str) -> BrokerConfig:
        changes: dict[str, Any] = {name: read(text)}
        return replace(config, **changes)

    return change


def _transactions(name: str, read: Callable[[str], int | bool]) -> _Change:
    def change(config: BrokerConfig, text: str) -> BrokerConfig:
        changes: dict[str, Any] = {name: read(text)}
        return replace(config, transactions=replace(config.transactions, **changes))

    return change


_LIVE: Final[Mapping[str, _Change]] = {
    "brokerPermission": _top("broker_permission", lambda text: _integer(text, 0, 7)),
    "autoCreateTopicEnable": _top("auto_create_topics", _boolean),
    "autoCreateSubscriptionGroup": _top("auto_create_groups", _boolean),
    "startAcceptSendRequestTimeStamp": _top(
        "start_accept_send_timestamp_ms", lambda text: _integer(text, 0, (1 << 63) - 1)
    ),
    "slaveReadEnable": _slave_read_enable,
    "maxMessageSize": _max_message_size,
    "accessMessageInMemoryMaxRatio": lambda config, text: replace(
        config, limits=replace(config.limits, in_memory_percent=_integer(text, 0, 100))
    ),
    "rejectTransactionMessage": _transactions("reject", _boolean),
    "transactionTimeOut": _transactions("timeout_s", lambda text: _seconds(text, 86_400)),
    "transactionCheckInterval": _transactions("check_interval_s", lambda text: _seconds(text, 86_400)),
    "transactionCheckMax": _transactions("max_checks", lambda text: _integer(text, 1, 1000)),
}
"""The settings that can be changed, each with what makes a configuration with another value of it."""


def with_setting(config: BrokerConfig, name: str, text: str) -> BrokerConfig:
    """The configuration with another value of a changeable setting. Raises ValueError; KeyError if it is none."""
    return _LIVE[name](config, text)


class LiveSettings:
    """The changed settings, on disk. `apply` gets the configuration in force, at the start and after each change."""

    def __init__(
        self, config: BrokerConfig, *, disk: Disk, clock: Clock, apply: Callable[[BrokerConfig], None]
    ) -> None:
        self._config = config
        self._disk = disk
        self._clock = clock
        self._apply = apply
        self._path = f"{config.data_dir}/brokerConfig.json"
        self._changed: dict[str, str] = {}
        self._changing = asyncio.Lock()
        self.version: dict[str, int] = {"timestamp": 0, "counter": 0}
        """How often settings were changed, and when last, in ms of the epoch (R: dataVersion of code 26)."""

    def load(self) -> None:
        """Apply earlier changes. Raises OSError, and ValueError if the file is not a table of settings.

        An entry that no longer fits the configuration, which may have changed since, is left out and logged: a change
        made while a broker ran must not keep this one from starting.
        """
        content = read_table(self._disk, self._path)
        if content is None:
            return
        try:
            stored = {str(name): str(text) for name, text in content["brokerConfig"].items()}
            version = {name: int(content["dataVersion"][name]) for name in self.version}
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{self._path} is no table of settings: fix it, or remove it to start without") from error
        config, changed = self._config, {}
        for name, text in stored.items():
            try:
                config = with_setting(config, name, text)
                changed[name] = text
            except (KeyError, ValueError) as error:
                reason = "is no setting that changes while the broker runs" if isinstance(error, KeyError) else error
                short, given = name[:MAX_NAME_CHARACTERS], text[:MAX_NAME_CHARACTERS]
                logger.warning(
                    "%s: %s=%s is left out, the configuration stands: it %s", self._path, short, given, reason
                )
        if changed:
            changes = ", ".join(f"{name}={text}" for name, text in changed.items())
            logger.info("%s, changed while the broker ran, wins over the configuration: %s", self._path, changes)
        self._changed, self.version = changed, version
        self._accept(config)

    async def update(self, text: bytes, settings: Mapping[str, str]) -> None:
        """Change the settings in a request's body, NAME=VALUE a line; `settings` are all that exist, with their values.

        Durable on return. Raises RequestError, with nothing changed.
        """
        wanted = _lines_of(text)
        async with self._changing:
            await self._change(wanted, settings)

    async def _change(self, wanted: Mapping[str, str], settings: Mapping[str, str]) -> None:
        config, changed, problems, is_fixed = self._config, dict(self._changed), [], False
        for name, value in wanted.items():
            short, given = name[:MAX_NAME_CHARACTERS], value[:MAX_NAME_CHARACTERS]
            if settings.get(name) == value:
                continue
            try:
                config = with_setting(config, name, value)
                changed[name] = value
            except KeyError:
                is_fixed = is_fixed or name in settings
                needs_restart = "does not change while the broker runs: change its configuration and restart it"
                problems.append(f"{short} {needs_restart if name in settings else 'is no setting of this broker'}")
            except ValueError as error:
                problems.append(f"{short}={given} {error}")
        if problems:
            more = len(problems) - MAX_LISTED_PROBLEMS
            remark = "; ".join(problems[:MAX_LISTED_PROBLEMS]) + (f"; and {more} more" if more > 0 else "")
            raise RequestError(ResponseCode.NO_PERMISSION if is_fixed else ResponseCode.SYSTEM_ERROR, remark)
        if changed == self._changed:
            return
        version = {"timestamp": self._clock.wall_ms(), "counter": self.version["counter"] + 1}
        try:
            await write_table(self._disk, self._path, {"brokerConfig": changed, "dataVersion": version})
        except OSError as error:
            raise RequestError(ResponseCode.SYSTEM_ERROR, f"nothing was changed: {error}") from error
        logger.info("changed while the broker runs: %s", ", ".join(f"{name}={value}" for name, value in wanted.items()))
        self._changed, self.version = changed, version
        self._accept(config)

    def _accept(self, config: BrokerConfig) -> None:
        self._config = config
        self._apply(config)


def _lines_of(text: bytes) -> dict[str, str]:
    """Names and values in a body (R: MixAll.string2Properties). None of our values needs an escape."""
    try:
        lines = [line.strip() for line in text.decode().splitlines()]
    except UnicodeDecodeError as error:
        raise RequestError(ResponseCode.SYSTEM_ERROR, f"the settings are no UTF-8: {error}") from error
    wanted: dict[str, str] = {}
    for line in lines:
        if not line or line.startswith(("#", "!")):
            continue
        name, sign, value = line.partition("=")
        if not sign:
            raise RequestError(ResponseCode.SYSTEM_ERROR, f"{line[:MAX_NAME_CHARACTERS]!r} is not NAME=VALUE")
        wanted[name.strip()] = value.strip()
        if len(wanted) > MAX_SETTINGS:
            raise RequestError(ResponseCode.SYSTEM_ERROR, f"more than {MAX_SETTINGS} settings")
    if not wanted:
        raise RequestError(ResponseCode.SYSTEM_ERROR, "no setting is named")
    return wanted
