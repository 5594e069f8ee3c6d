"""The Docker engine as the harness uses it; the docker package is imported only when it is needed."""

from __future__ import annotations

import contextlib
import io
import os
import socket
import struct
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.clusters.agent_link import ConnectFailure
from harness.clusters.base import ClusterUnavailable
from harness.errors import OperatorError, how_to_get

if TYPE_CHECKING:
    import docker

__all__ = ["HOST_IMAGE", "HOST_LABEL", "RUN_LABEL", "DockerEngine", "EngineUnreachable", "ExecStream"]

HOST_IMAGE = "splitbrain-host:1"
"""The image that the project's Dockerfile builds. The number goes up when hosts need something else."""

RUN_LABEL = "splitbrain.run"
HOST_LABEL = "splitbrain.host"

_TIMEOUT_S = 60
"""Timeout of one request to the engine; only building an image takes longer, and that streams."""

_STDOUT = 1
_HEADER = struct.Struct(">BxxxL")
"""The engine's header before each piece of an exec's output: which stream, how many bytes."""


class EngineUnreachable(ClusterUnavailable):
    """No engine answers."""


class ExecStream:
    """Input and output of a command that runs in a container. See harness.clusters.agent_link.ByteStream."""

    def __init__(self, connection: Any, client: docker.DockerClient) -> None:
        self._holder = connection  # the SDK's object; the connection would be closed when it is collected
        self._socket: socket.socket = getattr(connection, "_sock", connection)
        self._socket.settimeout(None)
        self._client = client

    def receive(self) -> bytes:
        """The next piece of standard output; empty at the end."""
        while True:
            header = self._exactly(_HEADER.size)
            if len(header) < _HEADER.size:
                return b""
            stream, size_bytes = _HEADER.unpack(header)
            piece = self._exactly(size_bytes)
            if stream == _STDOUT or len(piece) < size_bytes:
                return piece

    def _exactly(self, size_bytes: int) -> bytes:
        data = b""
        while len(data) < size_bytes:
            piece = self._socket.recv(size_bytes - len(data))
            if not piece:
                break
            data += piece
        return data

    def send(self, data: bytes) -> None:
        """Send all of `data` to standard input. Raises OSError."""
        self._socket.sendall(data)

    def close(self) -> None:
        """End the connection; the command sees the end of its input."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            self._holder.close()
        self._client.close()


class DockerEngine:
    """One engine. `url` is where it listens; None means $DOCKER_HOST or the usual socket.

    Every method blocks. Errors of the engine are raised as OperatorErrors of one line.
    """

    def __init__(self, url: str | None = None) -> None:
        """Raises ClusterUnavailable when the package is missing, EngineUnreachable when no engine answers."""
        self.url = url or os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
        self._client = self._new_client()

    def _new_client(self) -> docker.DockerClient:
        try:
            import docker
            import docker.errors
        except ImportError:
            raise ClusterUnavailable("docker: the Python package docker is missing: " + how_to_get("docker")) from None
        try:
            client = docker.from_env(timeout=_TIMEOUT_S, environment={**os.environ, "DOCKER_HOST": self.url})
            client.ping()
        except (docker.errors.DockerException, OSError) as error:
            if "Permission denied" in str(error):
                fix = "run as root, or add this user to the docker group"
            else:
                fix = "start it (systemctl start docker), or set DOCKER_HOST"
            raise EngineUnreachable(f"docker: no engine answers at {self.url}: {fix}") from None
        return client

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    @contextlib.contextmanager
    def _errors(self, what: str) -> Any:
        import docker.errors
        import requests

        try:
            yield
        except (docker.errors.DockerException, requests.RequestException, OSError) as error:
            said = str(getattr(error, "explanation", None) or error).strip().splitlines() or [type(error).__name__]
            raise OperatorError(f"docker: {what}: {said[-1][:300]}") from None

    def has_image(self, image: str) -> bool:
        """Whether the engine has an image of that name. Raises OperatorError."""
        with self._errors(f"image {image}"):
            return bool(self._client.images.list(name=image))

    def build_image(self, tag: str, context: Path) -> None:
        """Build the Dockerfile in `context`. Raises OperatorError."""
        with self._errors(f"image {tag} could not be built"):
            self._client.images.build(path=str(context), tag=tag, rm=True, forcerm=True)

    def create_network(self, name: str, run_id: str) -> None:
        """Create an internal bridge network for a run, without outside access. Raises OperatorError."""
        with self._errors(f"network {name}"):
            self._client.networks.create(name, driver="bridge", internal=True, labels={RUN_LABEL: run_id})

    def start_container(
        self,
        *,
        name: str,
        image: str,
        host: str,
        run_id: str,
        network: str,
        argv: Sequence[str],
        environment: Mapping[str, str],
        files: Mapping[str, bytes],
        capabilities: Sequence[str],
    ) -> str:
        """Create a container with `files` in it and start it; returns its IPv4 address. Raises OperatorError."""
        with self._errors(f"container {name}"):
            container = self._client.containers.create(
                image,
                command=list(argv),
                entrypoint=[],
                name=name,
                hostname=host,
                labels={RUN_LABEL: run_id, HOST_LABEL: host},
                cap_add=list(capabilities),
                network=network,
                environment=dict(environment),
                user="root",
                working_dir="/",
            )
            container.put_archive("/", _tar(files))
            container.start()
            container.reload()
            return str(container.attrs["NetworkSettings"]["Networks"][network]["IPAddress"])

    def connect(self, container: str, argv: Sequence[str]) -> ExecStream:
        """Run a command in a container, connected to its input and output. Raises ConnectFailure."""
        import docker.errors
        import requests

        try:
            client = self._new_client()
        except ClusterUnavailable as error:
            raise ConnectFailure(str(error)) from None
        try:
            ident = client.api.exec_create(container, list(argv), stdin=True, stdout=True, stderr=False, user="root")
            return ExecStream(client.api.exec_start(ident["Id"], socket=True), client)
        except (docker.errors.DockerException, requests.RequestException, OSError) as error:
            client.close()
            is_gone = isinstance(error, docker.errors.APIError) and error.status_code in (404, 409)
            if is_gone and "paused" in str(error):
                is_gone = False
            raise ConnectFailure(f"container {container}: {error}", gone=is_gone) from None

    def remove_container(self, name: str, run_id: str) -> bool:
        """End and remove a container of a run; False when there is none.

        Raises OperatorError, also when the container of that name belongs to another run.
        """
        return self._with_container(name, run_id, lambda container: container.remove(force=True, v=True))

    def end_container(self, name: str, run_id: str) -> bool:
        """Stop a container of a run and keep its files; False when there is none. Raises OperatorError, as above."""
        return self._with_container(name, run_id, lambda container: container.stop(timeout=0))

    def _with_container(self, name: str, run_id: str, work: Callable[[Any], object]) -> bool:
        import docker.errors

        with self._errors(f"container {name}"):
            try:
                container = self._client.containers.get(name)
                if container.labels.get(RUN_LABEL) != run_id:
                    raise OperatorError(f"docker: container {name} does not carry the label {RUN_LABEL}={run_id}")
                work(container)
            except docker.errors.NotFound:
                return False
            return True

    def remove_network(self, name: str, run_id: str) -> bool:
        """Remove a run's networks of that name; False when there is none. Raises OperatorError."""
        with self._errors(f"network {name}"):
            found = self._client.networks.list(names=[name], filters={"label": f"{RUN_LABEL}={run_id}"})
            for network in found:
                network.remove()
            return bool(found)


def _tar(files: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path, content in files.items():
            member = tarfile.TarInfo(path.lstrip("/"))
            member.size, member.mode = len(content), 0o755
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()
