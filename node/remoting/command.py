"""One message of the remoting protocol, request or response.

A command has a header (code, opaque, flags, remark, extension fields) and a body. The header travels as JSON
or in a compact binary form; a reply uses the form of its request. `opaque` pairs a reply with its request, so
that many requests share a connection and may be answered in any order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, overload

from node.remoting.codes import PROTOCOL_VERSION, LanguageCode, ResponseCode
from node.remoting.errors import RemotingError, RequestError

__all__ = ["FLAG_ONEWAY", "FLAG_RESPONSE", "Command", "FieldValue", "FrameError", "Serializer"]

Serializer = Literal["json", "binary"]
FieldValue = str | int | bool

FLAG_RESPONSE = 1
"""Bit of `flag`: this is a reply."""
FLAG_ONEWAY = 2
"""Bit of `flag`: the sender expects no reply."""

_REQUIRED: Final = object()
_PYTHON: Final = LanguageCode.PYTHON.value
_INT64_MIN = -1 << 63
_TOO_LARGE = 1 << 63
_TRUE = frozenset({"true", "1", "yes"})
_FALSE = frozenset({"false", "0", "no", ""})


def _texts(fields: Mapping[str, FieldValue] | None) -> dict[str, str]:
    if not fields:
        return {}
    return {
        name: value if value.__class__ is str else str(value) if value.__class__ is int else field_text(value)
        for name, value in fields.items()
    }


def field_text(value: FieldValue) -> str:
    """A field value as it travels: booleans as "true" and "false", numbers in decimal."""
    if value is True:
        return "true"
    if value is False:
        return "false"
    if isinstance(value, str):
        return str(value)
    return str(int(value))


@dataclass(slots=True)
class Command:
    """A request or a response. `ext_fields` values are text; `flag` holds `FLAG_RESPONSE` and `FLAG_ONEWAY`."""

    code: int
    ext_fields: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    opaque: int = 0
    flag: int = 0
    remark: str | None = None
    language: int = _PYTHON
    version: int = PROTOCOL_VERSION
    serializer: Serializer = "json"

    @classmethod
    def request(
        cls, code: int, fields: Mapping[str, FieldValue] | None = None, body: bytes = b"", *, oneway: bool = False
    ) -> Command:
        """A new request. Whoever sends it sets `opaque`."""
        return cls(code, _texts(fields), body, 0, FLAG_ONEWAY if oneway else 0)

    def reply(
        self,
        code: int,
        *,
        remark: str | None = None,
        fields: Mapping[str, FieldValue] | None = None,
        body: bytes = b"",
    ) -> Command:
        """The answer to this request: same opaque, same serializer, marked as a response."""
        texts = _texts(fields) if fields else {}
        return Command(
            code, texts, body, self.opaque, FLAG_RESPONSE, remark, _PYTHON, PROTOCOL_VERSION, self.serializer
        )

    @property
    def is_response(self) -> bool:
        return self.flag & FLAG_RESPONSE != 0

    @property
    def is_oneway(self) -> bool:
        return self.flag & FLAG_ONEWAY != 0

    @overload
    def get_str(self, name: str) -> str: ...
    @overload
    def get_str(self, name: str, default: str) -> str: ...
    @overload
    def get_str(self, name: str, default: None) -> str | None: ...

    def get_str(self, name: str, default: object = _REQUIRED) -> str | None:
        """Field `name` as text. Raises RequestError (SYSTEM_ERROR, as R does) if it is absent and has no default."""
        value = self.ext_fields.get(name)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise RequestError(ResponseCode.SYSTEM_ERROR, f"the field {name} is missing")
        assert default is None or isinstance(default, str)
        return default

    def get_int(self, name: str, default: int | None = None) -> int:
        """Field `name` as a signed 64-bit integer; an empty value counts as absent. Raises RequestError
        (SYSTEM_ERROR) if it is not an integer, or absent without a default."""
        value = self.ext_fields.get(name)
        if value is None or value == "":
            if default is None:
                raise RequestError(ResponseCode.SYSTEM_ERROR, f"the field {name} is missing")
            return default
        try:
            number = int(value)
        except ValueError:
            number = _TOO_LARGE
        if not _INT64_MIN <= number < _TOO_LARGE or "_" in value:
            raise RequestError(
                ResponseCode.SYSTEM_ERROR, f"the field {name} is no whole number of 64 bits: {value[:40]!r}"
            )
        return number

    def get_bool(self, name: str, default: bool = False) -> bool:
        """Field `name` as a boolean: "true", "1" or "yes", "false", "0", "no" or "", in any case. Raises RequestError
        (SYSTEM_ERROR) if it is none of these."""
        value = self.ext_fields.get(name)
        if value is None:
            return default
        lowered = value.lower()
        if lowered in _TRUE:
            return True
        if lowered in _FALSE:
            return False
        raise RequestError(ResponseCode.SYSTEM_ERROR, f"the field {name} is no truth value: {value[:40]!r}")


class FrameError(RemotingError):
    """Bytes that are not a frame of this protocol, or a command that does not fit into one.

    When the parser raises it, `commands` holds the commands that were complete before the bad bytes. When
    encoding raises it, nothing was sent, hence definite.
    """

    is_definite = True

    def __init__(self, message: str, commands: Sequence[Command] = ()) -> None:
        super().__init__(message)
        self.commands: list[Command] = list(commands)
