"""The `docker` cluster: every host is a container, on a bridge network of the run's own.

    container sb-<run>-n1 ---+
    container sb-<run>-n2 ---+-- network sb-<run>
    ...                      |
    container sb-<run>-nN ---+   the clients are on the machine that the engine runs on

A container's first process is the harness's agent; the host's programs are its children, and faults are injected in
the container's own namespaces (NET_ADMIN, NET_RAW, SYS_PTRACE, nothing more). The harness must be able to reach
containers by their addresses, so it runs where the engine runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Unpack

from harness.clusters import host_agent
from harness.clusters.agent_cluster import ClusterArguments
from harness.clusters.agent_link import ByteStream
from harness.clusters.base import ClusterUnavailable
from harness.clusters.docker_engine import HOST_IMAGE, DockerEngine
from harness.clusters.options import MECHANISM_OPTION
from harness.clusters.remote_cluster import RemoteCluster
from harness.clusters.threads import all_of, in_thread
from harness.errors import HarnessError, OperatorError
from harness.host_files import BUILD_IMAGE, host_file, host_files_directory
from harness.run_state import KIND_CONTAINER, KIND_NETWORK, Claim

__all__ = ["MAX_HOSTS", "DockerCluster"]

MAX_HOSTS = 50
"""Largest number of replicas: far more than show anything new, and each is a process tree of its own."""

_BASE = "/var/lib/splitbrain"
_AGENT = f"{_BASE}/agent.py"
_DIRECTORY = f"{_BASE}/run"
_NEEDED = "a root user, Python 3.11, a shell, coreutils, nftables and iproute2"
_NOT_IN_THE_IMAGE = ("executable file not found", "no such file or directory", "unable to find user")
"""Parts of an engine's error when a container cannot start because its image lacks something."""
_CAPABILITIES = ("NET_ADMIN", "NET_RAW", "SYS_PTRACE")
"""For nftables and devices; for the link relay's packet sockets; for inspecting programs of other users."""


class DockerCluster(RemoteCluster):
    """Hosts as containers, for one run. See harness.clusters.base.Cluster and RemoteCluster.

    `image` needs a root user, Python 3.11, a shell, coreutils, nftables and iproute2. Without one, the project's own
    image is used, and built if it is missing.
    """

    name = "docker"
    description = "a container per host on a dedicated bridge; cuts by nftables in containers; needs a Docker engine"
    max_hosts = MAX_HOSTS
    options: Sequence[str] = ("image", MECHANISM_OPTION)
    _owns_files_of_names = True
    file_systems_missing = "containers cannot mount file systems of their own: use --cluster netns or ssh"

    def __init__(self, *, image: str | None = None, **given: Unpack[ClusterArguments]) -> None:
        super().__init__(**given)
        self._image = image
        self._network_name = f"sb-{self._run.run_id}"
        self._containers = {host: f"sb-{self._run.run_id}-{host}" for host in self._all_hosts}
        self._addresses: dict[str, str] = {}
        self._engine: DockerEngine | None = None

    @classmethod
    def require(cls, *, image: str | None = None) -> None:
        """Raise ClusterUnavailable when no engine answers or the given image does not exist."""
        engine = DockerEngine()
        try:
            if image is not None and not engine.has_image(image):
                raise ClusterUnavailable(f"docker: there is no image {image}: pull it, or leave out --image")
        finally:
            engine.close()

    async def _make_hosts(self) -> None:
        engine = self._engine = await in_thread(DockerEngine)
        image = await in_thread(_image, engine, self._image)
        claims = [Claim(KIND_NETWORK, self._network_name, {"engine": engine.url})]
        claims += [Claim(KIND_CONTAINER, name, {"engine": engine.url}) for name in self._containers.values()]
        self._run.claim_all(claims)
        await in_thread(engine.create_network, self._network_name, self._run.run_id)
        source = Path(host_agent.__file__).read_bytes()

        async def start(host: str) -> None:
            try:
                self._addresses[host] = await in_thread(
                    engine.start_container,
                    name=self._containers[host],
                    image=image,
                    host=host,
                    run_id=self._run.run_id,
                    network=self._network_name,
                    argv=["python3", _AGENT, "daemon", _DIRECTORY, self._run.run_id],
                    environment=self._run.environment,
                    files={_AGENT: source},
                    capabilities=_CAPABILITIES,
                )
            except OperatorError as error:
                if not any(words in str(error) for words in _NOT_IN_THE_IMAGE):
                    raise
                raise ClusterUnavailable(
                    f"docker: image {image} cannot be used for hosts, which need {_NEEDED}: {self._how_to_add('')} "
                    f"({error})"
                ) from None

        await all_of(map(start, self._containers))

    async def _remove_hosts(self) -> list[Exception]:
        engine = self._engine
        if engine is None:
            return []
        claimed = {(claim.kind, claim.ident) for claim in self._run.claims}
        run_id = self._run.run_id
        kept = [host for host in sorted(self._unfetched) if (KIND_CONTAINER, self._containers[host]) in claimed]
        names = {name for host, name in self._containers.items() if host not in kept}

        async def remove(kind: str, name: str) -> None:
            if (kind, name) in claimed:
                removal = engine.remove_container if kind == KIND_CONTAINER else engine.remove_network
                await in_thread(removal, name, run_id)
                self._run.release(kind, name)

        outcomes = await asyncio.gather(
            *(in_thread(engine.end_container, self._containers[host], run_id) for host in kept),
            *(remove(KIND_CONTAINER, name) for name in names),
            return_exceptions=True,
        )
        outcomes += await asyncio.gather(remove(KIND_NETWORK, self._network_name), return_exceptions=True)
        problems = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
        if not problems:
            self._engine = None
            engine.close()
        return [*self._left_in_containers(kept), *problems]

    def _left_in_containers(self, hosts: Sequence[str]) -> list[Exception]:
        """The problem to report for hosts whose files are only in their ended containers."""
        if not hosts:
            return []
        copies = ", ".join(f"docker cp {self._containers[host]}:{self._host_dir(host)} DIRECTORY" for host in hosts)
        return [
            HarnessError(
                f"the files of {', '.join(hosts)} could not be fetched and are still in stopped containers: copy them "
                f"({copies}), then run `harness clean`"
            )
        ]

    def _connect(self, machine: str) -> ByteStream:
        if self._engine is None:
            raise RuntimeError("the cluster was not started")
        return self._engine.connect(self._containers[machine], ["python3", _AGENT, "relay", _DIRECTORY])

    def container(self, host: str) -> str:
        """The name of a host's container."""
        return self._containers[host]

    def _agent_dir(self, machine: str) -> str:
        return _DIRECTORY

    def _address(self, host: str) -> str:
        return self._addresses[host]

    def _how_to_add(self, packages: str) -> str:
        return "add what is missing to the image, or leave out --image"

    def _unreachable_hint(self) -> str:
        return "run the harness on the machine (and in the network namespace) of the Docker engine"


def _image(engine: DockerEngine, wanted: str | None) -> str:
    """The image to use; builds the project's own if it is missing. Raises ClusterUnavailable."""
    if wanted is not None or engine.has_image(HOST_IMAGE):
        return wanted or HOST_IMAGE
    try:
        engine.build_image(HOST_IMAGE, host_files_directory())
    except OperatorError as error:
        fix = f"if no registry is reachable: {host_file(BUILD_IMAGE)} --debootstrap"
        raise ClusterUnavailable(f"{error}; {fix}") from None
    return HOST_IMAGE
