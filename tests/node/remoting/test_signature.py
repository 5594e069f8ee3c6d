"""Signatures against values computed with another tool from the definition."""

from __future__ import annotations

import base64
import hashlib

from hypothesis import given
from hypothesis import strategies as st

from node.remoting import Command, Credentials
from node.remoting.signature import signature_of

TEXTS = st.text(max_size=12)


def hmac_sha1(key: bytes, data: bytes) -> bytes:
    """HMAC from its definition (RFC 2104), without the library that the node uses."""
    block = (hashlib.sha1(key).digest() if len(key) > 64 else key).ljust(64, b"\0")
    inner = hashlib.sha1(bytes(byte ^ 0x36 for byte in block) + data).digest()
    return hashlib.sha1(bytes(byte ^ 0x5C for byte in block) + inner).digest()


def test_the_reference_vector_of_hmac_sha1() -> None:
    """RFC 2202, test case 2, as the body of a request without fields."""
    expected = bytes.fromhex("effcdf6ae5eb2fa2d27416d5f184df9c259a7c79")
    assert base64.b64decode(signature_of({}, b"what do ya want for nothing?", "Jefe")) == expected


@given(fields=st.dictionaries(TEXTS, TEXTS, max_size=6), body=st.binary(max_size=40), secret=st.text(max_size=80))
def test_the_signature_covers_values_sorted_by_name_and_then_the_body(
    fields: dict[str, str], body: bytes, secret: str
) -> None:
    names = sorted((name for name in fields if name != "Signature"), key=lambda name: name.encode("utf-16-be"))
    data = "".join(fields[name] for name in names).encode() + body
    assert base64.b64decode(signature_of(fields, body, secret)) == hmac_sha1(secret.encode(), data)


def test_signing_covers_the_key_and_replaces_an_old_signature() -> None:
    request = Command.request(10, {"topic": "t", "queueId": 3, "Signature": "old"}, b"body")
    Credentials(access_key="somebody", secret_key="secret-secret").sign(request)
    assert request.ext_fields["AccessKey"] == "somebody"
    expected = hmac_sha1(b"secret-secret", b"somebody" + b"3" + b"t" + b"body")
    assert base64.b64decode(request.ext_fields["Signature"]) == expected
    first = request.ext_fields["Signature"]
    Credentials(access_key="somebody", secret_key="secret-secret").sign(request)
    assert request.ext_fields["Signature"] == first
    Credentials(access_key="somebody", secret_key="secret-secret", security_token="tok").sign(request)
    assert request.ext_fields["SecurityToken"] == "tok" and request.ext_fields["Signature"] != first


def test_the_repr_of_credentials_hides_the_secret_key() -> None:
    assert "secret-secret" not in repr(Credentials(access_key="somebody", secret_key="secret-secret"))
