"""Refuses requests before any page is made, and sets the headers of every answer.

The server listens on loopback, but a browser on this machine runs pages of any site, and each can send requests to
127.0.0.1. A page of another site whose name resolves to this address (DNS rebinding) is recognised by the Host header;
a form of another site by Origin, Sec-Fetch-Site and the token in every form of ours.
"""

from __future__ import annotations

__all__ = ["MAX_BODY_BYTES", "MAX_HEADERS_BYTES", "MAX_TARGET_BYTES", "Guard", "loopback_hosts"]

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

MAX_TARGET_BYTES = 4_096
"""Limit of a request's path and query: our longest filter takes a few hundred bytes."""

MAX_HEADERS_BYTES = 16_384
MAX_BODY_BYTES = 16_384
"""Limit of a form: with every field filled it takes under 2 KB."""

FORM = "application/x-www-form-urlencoded"

POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
_HEADERS = {
    b"content-security-policy": POLICY.encode(),
    b"x-content-type-options": b"nosniff",
    b"x-frame-options": b"DENY",
    b"referrer-policy": b"same-origin",
    b"cross-origin-resource-policy": b"same-origin",
    b"cross-origin-opener-policy": b"same-origin",
    b"cache-control": b"no-store",
}
_REASONS = {
    400: "the request is malformed",
    403: "the request comes from another site",
    405: "this server accepts GET, HEAD and, if runs may be started, POST",
    411: "the length of the body is missing",
    413: "the body is too large",
    414: "the address is too long",
    415: "only forms are accepted",
    421: "the Host header does not name this server",
    431: "the headers are too large",
}

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Any, Any], Awaitable[None]]


def loopback_hosts(port: int) -> frozenset[str]:
    """Valid Host headers for a server on `port` of the loopback address. Browsers omit the default port 80."""
    names = ("127.0.0.1", "localhost")
    return frozenset((*(f"{name}:{port}" for name in names), *(names if port == 80 else ())))


class Guard:
    """ASGI middleware: refuses with 4xx requests that no page of ours would make."""

    def __init__(self, app: App, *, hosts: frozenset[str]) -> None:
        self._app = app
        self._hosts = hosts
        self._origins = frozenset(f"http://{host}" for host in hosts)

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Refuse a request or pass it to the application, and add the common headers to the answer."""
        if scope["type"] != "http":  # only HTTP is served
            return

        async def send_guarded(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                own = {name.lower() for name, _ in message["headers"]}
                message["headers"] = [
                    *message["headers"], *((name, value) for name, value in _HEADERS.items() if name not in own)
                ]  # fmt: skip
            await send(message)

        status = self._refusal(scope)
        if status is None:
            await self._app(scope, receive, send_guarded)
            return
        body = f"{status}: {_REASONS[status]}\n".encode()
        headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(body)).encode())]
        # Do not wait for the rest of a refused body.
        headers.append((b"connection", b"close"))
        if status == 405:
            headers.append((b"allow", b"GET, HEAD, POST"))
        await send_guarded({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})

    def _refusal(self, scope: Scope) -> int | None:
        """The status of a refusal; None for an acceptable request."""
        headers: dict[bytes, list[bytes]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.lower(), []).append(value)
        if sum(len(name) + len(value) for name, value in scope["headers"]) > MAX_HEADERS_BYTES:
            return 431
        hosts = [value.decode("latin-1").lower() for value in headers.get(b"host", [])]
        if len(hosts) != 1 or hosts[0] not in self._hosts:
            return 421
        raw_path = scope.get("raw_path") or scope["path"].encode("utf-8", "surrogateescape")
        if len(raw_path) + len(scope["query_string"]) > MAX_TARGET_BYTES:
            return 414
        if not scope["path"].startswith("/") or not scope["path"].isprintable() or "\\" in scope["path"]:
            return 400
        if scope["method"] in ("GET", "HEAD"):
            has_body = headers.get(b"content-length", [b"0"]) != [b"0"] or b"transfer-encoding" in headers
            return 413 if has_body else None
        if scope["method"] != "POST":
            return 405
        return self._refusal_of_form(headers)

    def _refusal_of_form(self, headers: dict[bytes, list[bytes]]) -> int | None:
        origins = [value.decode("latin-1") for value in headers.get(b"origin", [])]
        if any(origin not in self._origins for origin in origins):
            return 403
        if any(site not in (b"same-origin", b"none") for site in headers.get(b"sec-fetch-site", [])):
            return 403
        lengths = headers.get(b"content-length", [])
        if b"transfer-encoding" in headers or len(lengths) != 1 or not lengths[0].isdigit():
            return 411
        if len(lengths[0]) > 9 or int(lengths[0]) > MAX_BODY_BYTES:
            return 413
        kinds = [value.partition(b";")[0].strip().lower() for value in headers.get(b"content-type", [])]
        return None if kinds == [FORM.encode()] else 415
