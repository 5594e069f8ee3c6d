"""The signature of a request: who asks, proven by a secret that both sides know.

As RocketMQ's clients sign (R: AclClientRPCHook, AclUtils): HMAC-SHA1 over the values of all extension fields in the
order of their names, one after the other, and the body; its Base64 goes into the field Signature, the name of
the key into AccessKey, which is signed too. The request's code is not covered, and nothing stops a replay:
on a network that others can listen to, use TLS as well.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from node.remoting.command import Command

__all__ = ["ACCESS_KEY", "SIGNATURE", "Credentials", "signature_of"]

ACCESS_KEY: Final = "AccessKey"
SECURITY_TOKEN: Final = "SecurityToken"
SIGNATURE: Final = "Signature"


def signature_of(fields: Mapping[str, str], body: bytes, secret_key: str) -> str:
    """The signature of a request with these fields (except Signature itself) and this body."""
    text = "".join([value for name, value in sorted(fields.items(), key=_utf16_order) if name != SIGNATURE])
    digest = hmac.new(secret_key.encode(), text.encode("utf-8", "replace") + body, hashlib.sha1).digest()
    return base64.b64encode(digest).decode()


def _utf16_order(item: tuple[str, str]) -> bytes:
    return item[0].encode("utf-16-be", "surrogatepass")  # as Java compares strings


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """A key with its secret, for a client. Pass `sign` to a RemotingClient, or the whole to a client of brokers."""

    access_key: str
    secret_key: str = field(repr=False)
    security_token: str | None = None

    def sign(self, command: Command) -> None:
        """Set AccessKey, SecurityToken and Signature in a request, replacing what is there."""
        fields = command.ext_fields
        fields[ACCESS_KEY] = self.access_key
        if self.security_token is not None:
            fields[SECURITY_TOKEN] = self.security_token
        fields[SIGNATURE] = signature_of(fields, command.body, self.secret_key)
