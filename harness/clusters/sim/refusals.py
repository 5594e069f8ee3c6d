"""What an event loop offers and a simulation does not have: threads, file descriptors, subprocesses, names."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any, NoReturn, TypeVarTuple

from harness.clusters.sim.errors import NotSimulated

__all__ = ["RefusingLoop"]

_Ts = TypeVarTuple("_Ts")


class RefusingLoop(asyncio.AbstractEventLoop):
    """The part of an event loop that only says no. Each refusal is also kept in `violations`, because simulated
    code may swallow the exception."""

    def __init__(self) -> None:
        self.violations: list[str] = []

    def refuse(self, what: str, instead: str) -> NoReturn:
        """Note and raise NotSimulated."""
        message = f"{what} in simulation: {instead}"
        self.violations.append(message)
        raise NotSimulated(message)

    def run_in_executor(self, executor: Any, func: Callable[[*_Ts], object], *args: *_Ts) -> Any:
        self.refuse("run_in_executor", "there are no threads; blocking work belongs behind the runtime's disk")

    def set_default_executor(self, *args: Any) -> None:
        self.refuse("set_default_executor", "there are no threads")

    async def getaddrinfo(self, host: Any, port: Any, **options: Any) -> Any:
        """IPv4 addresses stand for themselves; there is no name service to ask for others."""
        try:
            socket.inet_aton(str(host))
        except OSError:
            raise socket.gaierror(socket.EAI_NONAME, f"no name service in simulation: {host!r}") from None
        return [(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (str(host), int(port or 0)))]

    async def getnameinfo(self, sockaddr: Any, flags: int = 0) -> Any:
        return str(sockaddr[0]), str(sockaddr[1])

    async def create_datagram_endpoint(self, *args: Any, **options: Any) -> Any:
        self.refuse("create_datagram_endpoint", "programs have streams only")

    async def create_unix_connection(self, *args: Any, **options: Any) -> Any:
        self.refuse("create_unix_connection", "hosts share no file system")

    async def create_unix_server(self, *args: Any, **options: Any) -> Any:
        self.refuse("create_unix_server", "hosts share no file system")

    async def start_tls(self, *args: Any, **options: Any) -> Any:
        self.refuse("start_tls", "connections carry plain bytes")

    async def subprocess_exec(self, *args: Any, **options: Any) -> Any:
        self.refuse("subprocess_exec", "programs are started on a host by its cluster")

    async def subprocess_shell(self, *args: Any, **options: Any) -> Any:
        self.refuse("subprocess_shell", "programs are started on a host by its cluster")

    async def connect_read_pipe(self, *args: Any, **options: Any) -> Any:
        self.refuse("connect_read_pipe", "there are no file descriptors")

    async def connect_write_pipe(self, *args: Any, **options: Any) -> Any:
        self.refuse("connect_write_pipe", "there are no file descriptors")

    def add_reader(self, fd: Any, callback: Callable[[*_Ts], object], *args: *_Ts) -> None:
        self.refuse("add_reader", "there are no file descriptors")

    def remove_reader(self, *args: Any) -> bool:
        self.refuse("remove_reader", "there are no file descriptors")

    def add_writer(self, fd: Any, callback: Callable[[*_Ts], object], *args: *_Ts) -> None:
        self.refuse("add_writer", "there are no file descriptors")

    def remove_writer(self, *args: Any) -> bool:
        self.refuse("remove_writer", "there are no file descriptors")

    def get_task_factory(self) -> Any:
        return None

    def set_task_factory(self, factory: Any) -> None:
        self.refuse("set_task_factory", "tasks must be the loop's own to come in a repeatable order")

    async def sendfile(self, *args: Any, **options: Any) -> Any:
        self.refuse("sendfile", "files are behind the runtime's disk")

    async def sock_recv(self, *args: Any, **options: Any) -> Any:
        self.refuse("sock_recv", "there are no sockets")

    async def sock_recv_into(self, *args: Any, **options: Any) -> Any:
        self.refuse("sock_recv_into", "there are no sockets")

    async def sock_recvfrom(self, *args: Any, **options: Any) -> Any:
        self.refuse("sock_recvfrom", "there are no sockets")

    async def sock_recvfrom_into(self, *args: Any, **options: Any) -> Any:
        self.refuse("sock_recvfrom_into", "there are no sockets")

    async def sock_sendall(self, *args: Any, **options: Any) -> Any:
        self.refuse("sock_sendall", "there are no sockets")

    async def sock_sendto(self, *args: Any, **options: Any) -> Any:
        self.refuse("sock_sendto", "there are no sockets")

    async def sock_connect(self, *args: Any, **options: Any) -> Any:
        self.refuse("sock_connect", "there are no sockets")

    async def sock_accept(self, *args: Any, **options: Any) -> Any:
        self.refuse("sock_accept", "there are no sockets")

    async def sock_sendfile(self, *args: Any, **options: Any) -> Any:
        self.refuse("sock_sendfile", "there are no sockets")

    async def connect_accepted_socket(self, *args: Any, **options: Any) -> Any:
        self.refuse("connect_accepted_socket", "there are no sockets")
