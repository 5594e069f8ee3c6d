"""A broker's registration with a name server (request code 103), read from the wire.

The body is plain JSON or deflated. R deflates a packed format of its own (lengths and lines of text), other
brokers deflate the JSON. All three are read.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from struct import Struct
from struct import error as StructError
from typing import Any, Final

from node.remoting import Command, RequestError, ResponseCode

__all__ = ["MASTER_ID", "QueueData", "Registration", "parse_json_object", "read_registration"]

MASTER_ID: Final = 0
"""Broker id of a master; slaves have others (R)."""
MAX_INFLATED_BYTES: Final = 64 * 1024 * 1024
"""Limit of an inflated body: 100,000 topics take 20 MB. A zip bomb stops here."""
MAX_NAME_CHARS: Final = 255
"""Longest cluster, broker or topic name, or address, that is kept."""
MAX_TOPIC_CHARS: Final = 255
"""Longest topic name that is kept: stored topics have 127 bytes at most, retry topics add a prefix."""

_INT = Struct(">i")


@dataclass(frozen=True, slots=True)
class QueueData:
    """The queues of one topic on one broker. `perm` is R4 + W2 (+1 inherit)."""

    read_queues: int
    write_queues: int
    perm: int
    topic_sys_flag: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """What one broker registers about itself. `topics` is None if it sent nothing about topics."""

    cluster: str
    broker_name: str
    broker_id: int
    address: str
    ha_address: str = ""
    dledger_term: int | None = None
    topics: Mapping[str, QueueData] | None = None
    data_version: str = ""
    filter_servers: tuple[str, ...] = field(default=())


def read_registration(command: Command) -> Registration:
    """The registration in a request. Raises RequestError (SYSTEM_ERROR) naming what is wrong with it."""
    crc = command.get_int("bodyCrc32", 0)
    if crc and crc != zlib.crc32(command.body) & 0x7FFFFFFF:  # R clears the sign bit
        raise _wrong(f"bodyCrc32 is {crc}, the body's is {zlib.crc32(command.body) & 0x7FFFFFFF}")
    topics, data_version, filter_servers = _read_body(command)
    return Registration(
        cluster=_name(command, "clusterName"),
        broker_name=_name(command, "brokerName"),
        broker_id=_broker_id(command),
        address=_name(command, "brokerAddr"),
        ha_address=command.get_str("haServerAddr", "")[:MAX_NAME_CHARS],
        dledger_term=command.get_int("dledgerTerm") if "dledgerTerm" in command.ext_fields else None,
        topics=topics,
        data_version=data_version,
        filter_servers=filter_servers,
    )


def parse_json_object(data: bytes, what: str) -> dict[str, Any]:
    """A JSON object from bytes. Raises RequestError (SYSTEM_ERROR) naming `what`."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _wrong(f"{what} is no JSON: {str(error)[:120]}") from None
    if not isinstance(value, dict):
        raise _wrong(f"{what} is no JSON object")
    return value


def _wrong(message: str) -> RequestError:
    return RequestError(ResponseCode.SYSTEM_ERROR, message)


def _name(command: Command, name: str) -> str:
    value = command.get_str(name)
    if not 0 < len(value) <= MAX_NAME_CHARS:
        raise _wrong(f"{name} has {len(value)} characters, allowed are 1 to {MAX_NAME_CHARS}")
    return value


def _broker_id(command: Command) -> int:
    broker_id = command.get_int("brokerId")
    if not 0 <= broker_id < 2**63:
        raise _wrong(f"brokerId is {broker_id}")
    return broker_id


Body = tuple[dict[str, QueueData] | None, str, tuple[str, ...]]


def _read_body(command: Command) -> Body:
    data = command.body
    if not data:
        return None, "", ()
    if command.get_bool("compressed"):
        data = _inflate(data)
        if not data.lstrip().startswith(b"{"):
            return _read_packed(data)
    body = parse_json_object(data, "the body")
    wrapper = body.get("topicConfigSerializeWrapper", body)  # before 3.0.11 (R) the wrapper was the body
    if not isinstance(wrapper, dict):
        return None, "", _filter_servers(body.get("filterServerList"))
    table = wrapper.get("topicConfigTable")
    version = wrapper.get("dataVersion")
    return (
        _read_topics(table) if isinstance(table, dict) else None,
        json.dumps(version, sort_keys=True) if version is not None else "",
        _filter_servers(body.get("filterServerList")),
    )


def _inflate(data: bytes) -> bytes:
    inflater = zlib.decompressobj()
    try:
        inflated = inflater.decompress(data, MAX_INFLATED_BYTES)
    except zlib.error as error:
        raise _wrong(f"the body says that it is compressed and is not: {error}") from None
    if not inflater.eof:
        raise _wrong("the compressed body is cut short, or too large when inflated")
    return inflated


def _read_topics(table: Mapping[str, Any]) -> dict[str, QueueData]:
    topics: dict[str, QueueData] = {}
    for name, entry in table.items():
        if not isinstance(entry, dict) or not 0 < len(name) <= MAX_TOPIC_CHARS:
            raise _wrong(f"topicConfigTable has no usable entry for {name[:40]!r}")
        sys_flag = entry.get("topicSysFlag", entry.get("topicSynFlag", 0))  # R misspelt it before 4.9.3
        topics[name] = _queue_data(
            name, entry.get("readQueueNums", 0), entry.get("writeQueueNums", 0), entry.get("perm", 0), sys_flag
        )
    return topics


def _queue_data(topic: str, *values: Any) -> QueueData:
    try:
        read_queues, write_queues, perm, sys_flag = (int(value) for value in values)
    except (TypeError, ValueError, OverflowError):
        raise _wrong(f"the entry of topic {topic[:40]!r} holds something that is no number") from None
    if not (0 <= read_queues < 2**31 and 0 <= write_queues < 2**31 and 0 <= perm <= 7 and 0 <= sys_flag < 2**31):
        raise _wrong(f"the entry of topic {topic[:40]!r} is out of range")
    return QueueData(read_queues, write_queues, perm, sys_flag)


def _filter_servers(value: Any) -> tuple[str, ...]:
    return tuple(str(each)[:MAX_NAME_CHARS] for each in value[:16]) if isinstance(value, list) else ()


def _read_packed(data: bytes) -> Body:
    """R's compressed format: three parts, each preceded by its length: data version (JSON), topics (a count, then
    "name readQueues writeQueues perm filterType" each), filter servers (JSON)."""
    try:
        version, at = _part(data, 0)
        (count,) = _INT.unpack_from(data, at)
        at += 4
        topics: dict[str, QueueData] = {}
        for _ in range(count):
            line, at = _part(data, at)
            words = line.decode().split(" ")
            if len(words) < 4 or not 0 < len(words[0]) <= MAX_TOPIC_CHARS:
                raise _wrong(f"the compressed body has no usable topic in {line[:80]!r}")
            topics[words[0]] = _queue_data(words[0], *words[1:4], 0)
        servers, at = _part(data, at)
        text = json.dumps(json.loads(version), sort_keys=True)
        return topics, text, _filter_servers(json.loads(servers) if servers else None)
    except (StructError, ValueError, RecursionError) as error:
        raise _wrong(f"the compressed body cannot be read: {str(error)[:120]}") from None


def _part(data: bytes, at: int) -> tuple[bytes, int]:
    (size,) = _INT.unpack_from(data, at)
    end: int = at + 4 + size
    if size < 0 or end > len(data):
        raise ValueError(f"a part of {size} bytes where {len(data) - at - 4} are left")
    return data[at + 4 : end], end
