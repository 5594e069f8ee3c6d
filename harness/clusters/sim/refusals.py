"""What an event loop offers and a simulation lacks: threads, file descriptors, subprocesses, names."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any, NoReturn

from harness.clusters.sim.errors import NotSimulated

__all__ = ["RefusingLoop"]


class _Refused:
    """A method that always raises NotSimulated."""

    def __init__(self, instead: str) -> None:
        self._instead = instead

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, loop: RefusingLoop, owner: type) -> Callable[..., NoReturn]:
        return lambda *args, **options: loop.refuse(self._name, self._instead)


def _refused(instead: str) -> Any:
    return _Refused(instead)


class RefusingLoop(asyncio.AbstractEventLoop):
    """The part of an event loop that is refused. Each refusal is also recorded in `violations`, because simulated
    code may swallow the exception."""

    def __init__(self) -> None:
        self.violations: list[str] = []

    def refuse(self, what: str, instead: str) -> NoReturn:
        """Record a violation and raise NotSimulated."""
        message = f"{what} is not available in simulation: {instead}"
        self.violations.append(message)
        raise NotSimulated(message)

    run_in_executor = _refused("there are no threads; leave blocking work to the runtime's disk")
    set_default_executor = _refused("there are no threads")

    async def getaddrinfo(self, host: Any, port: Any, **options: Any) -> Any:
        """Resolve IPv4 addresses to themselves, and nothing else: there is no name service."""
        try:
            socket.inet_aton(str(host))
        except OSError:
            raise socket.gaierror(socket.EAI_NONAME, f"no name service in simulation: {host!r}") from None
        return [(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (str(host), int(port or 0)))]

    async def getnameinfo(self, sockaddr: Any, flags: int = 0) -> Any:
        return str(sockaddr[0]), str(sockaddr[1])

    create_datagram_endpoint = _refused("programs have only streams")
    create_unix_connection = _refused("hosts do not share a file system")
    create_unix_server = _refused("hosts do not share a file system")
    start_tls = _refused("connections are not encrypted")
    subprocess_exec = _refused("let the cluster start programs on a host")
    subprocess_shell = _refused("let the cluster start programs on a host")
    connect_read_pipe = _refused("there are no file descriptors")
    connect_write_pipe = _refused("there are no file descriptors")
    add_reader = _refused("there are no file descriptors")
    remove_reader = _refused("there are no file descriptors")
    add_writer = _refused("there are no file descriptors")
    remove_writer = _refused("there are no file descriptors")

    def get_task_factory(self) -> Any:
        return None

    set_task_factory = _refused("tasks must be the loop's own, so that their order is repeatable")
    sendfile = _refused("use the runtime's disk")
    sock_recv = _refused("there are no sockets")
    sock_recv_into = _refused("there are no sockets")
    sock_recvfrom = _refused("there are no sockets")
    sock_recvfrom_into = _refused("there are no sockets")
    sock_sendall = _refused("there are no sockets")
    sock_sendto = _refused("there are no sockets")
    sock_connect = _refused("there are no sockets")
    sock_accept = _refused("there are no sockets")
    sock_sendfile = _refused("there are no sockets")
    connect_accepted_socket = _refused("there are no sockets")
