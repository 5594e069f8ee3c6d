"""What a processor may return, and what a request costs while it is processed."""

from __future__ import annotations

from node.remoting.codes import ResponseCode
from node.remoting.command import Command
from node.remoting.complaints import Complaints
from node.remoting.deferred_reply import DeferredReply
from node.remoting.errors import RequestError
from node.remoting.header_template import TemplateRequest

__all__ = ["Reply", "failure_reply", "size_of"]

_MAX_REMARK_CHARS = 256
"""Length of the remark made of an exception: enough for its sentence, too little to leak a data dump."""

_REQUEST_OVERHEAD_BYTES = 512
"""What a request costs besides its text and body: the objects that hold it."""

Reply = Command | DeferredReply | None


def size_of(command: Command) -> int:
    """About how many bytes a request holds."""
    if isinstance(command, TemplateRequest):
        return command.size_bytes
    fields = command.ext_fields
    size_bytes = len(command.body) + _REQUEST_OVERHEAD_BYTES
    return size_bytes + sum(map(len, fields.values())) if fields else size_bytes


def failure_reply(command: Command, error: BaseException, peer: str, complaints: Complaints) -> Command:
    """The answer to a request whose processor raised `error`; anything but a RequestError is also logged, as a
    complaint about `peer`."""
    if isinstance(error, RequestError):
        return command.reply(error.code, remark=error.remark)
    summary = f"{type(error).__name__}: {error}"[:_MAX_REMARK_CHARS]
    complaints.warn("processor", f"request {command.code} from {peer} failed: {summary}", error=error)
    return command.reply(ResponseCode.SYSTEM_ERROR, remark=summary)
