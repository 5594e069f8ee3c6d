"""The clock and disk shim on hosts: brought there, tried there, and steered from here.

The harness's machine has or builds it. Where that does not load (another processor, an older C library), one that was
built in advance for the host's processor is tried, and then the host's own compiler builds it from the same sources.
In every case a Python there must have felt it before a replica is started.
"""

from __future__ import annotations

import asyncio
import os
import shlex
from collections.abc import Mapping

from harness.clusters.agent_access import AgentAccess, put_file
from harness.clusters.agent_link import AgentLink
from harness.clusters.base import ClusterUnavailable
from harness.clusters.threads import all_of
from nemesis.mechanisms.shim import (
    COMPILERS,
    TRIAL_SCRIPT,
    ShimError,
    build_command,
    build_shim,
    can_be_preloaded,
    prebuilt_shim,
    shim_environment,
    shim_sources,
    trial_control,
    trial_problem,
)
from nemesis.mechanisms.shim_faults import ShimClocks, ShimControls, ShimDisks, ShimPlace

__all__ = ["UNDO_INSIDE", "AgentShim", "agent_shim_missing"]

UNDO_INSIDE = ".splitbrain-undo"
"""The undo directory's name on a file system of a host's own. Names that begin so are nobody's data."""

_BUILD_TIMEOUT_S = 120.0
"""For a compiler on an emulated machine; anywhere else it takes less than a second."""

_TRIAL_TIMEOUT_S = 30.0


def agent_shim_missing() -> str | None:
    """Why clocks and disks of hosts with agents cannot be had from this machine; None when they can."""
    try:
        build_shim()
    except ShimError as error:
        return str(error)
    return None


class AgentShim:
    """The shim's files on all replicas' hosts, and the interfaces that act through it. `places` says where on each host
    they are; they go with the directories that they are in."""

    def __init__(self, access: AgentAccess, links: Mapping[str, AgentLink], places: Mapping[str, ShimPlace]) -> None:
        """Nothing is on the hosts before `install`."""
        self._access = access
        self._links = dict(links)
        self._controls = ShimControls(access, places)
        self.clocks = ShimClocks(self._controls)
        self.disks = ShimDisks(self._controls)

    async def install(self, *, have_library: bool = False) -> None:
        """Put the files on every host and see that a Python there feels them; or, where the hosts `have_library`, one
        that was tried, the other files.

        Raises ClusterUnavailable naming what a host lacks, ShellError when one cannot be asked, ShimError.
        """
        await all_of(self._install(host, have_library) for host in self._links)

    async def _install(self, host: str, have_library: bool) -> None:
        place, link = self._controls.places[host], self._links[host]
        if not have_library:
            await self._bring_library(host)
        await put_file(link, place.control_path, self._controls.initial_content(host))
        if place.undo_path is not None:
            await link.run(["mkdir", "-p", place.undo_path])

    async def _bring_library(self, host: str) -> None:
        place, link = self._controls.places[host], self._links[host]
        if not can_be_preloaded(place.library_path):
            raise ClusterUnavailable(
                f"{host}: LD_PRELOAD cannot name {place.library_path}, for the blank, colon or $ in it: "
                "give the host another `directory` in the inventory"
            )
        library = await asyncio.to_thread(build_shim)
        await put_file(link, place.library_path, library)
        problem = await self._trial_problem(host)
        if problem is not None and await self._put_prebuilt(host):
            problem = await self._trial_problem(host)
        if problem is not None:
            await self._build_there(host, problem)

    async def _trial_problem(self, host: str) -> str | None:
        place, link = self._controls.places[host], self._links[host]
        control_path = os.path.join(os.path.dirname(place.control_path), "trial.control")
        await put_file(link, control_path, trial_control())
        wall_ns, _ = await self._access.now(host)
        python = self._access.python(host)
        environment = shim_environment(place.library_path, control_path, place.data_path)
        argv = [python, "-I", "-S", "-c", TRIAL_SCRIPT]
        _, output, errors = await link.run(argv, timeout_s=_TRIAL_TIMEOUT_S, environment=environment)
        return trial_problem(python, output, errors, true_s=wall_ns / 1e9)

    async def _put_prebuilt(self, host: str) -> bool:
        """Put the shim that was built in advance for the host's own processor there; False when there is none."""
        link = self._links[host]
        _, machine, _ = await link.run(["uname", "-m"])
        library = prebuilt_shim(machine.strip())
        if library is None:
            return False
        await put_file(link, self._controls.places[host].library_path, library)
        return True

    async def _build_there(self, host: str, problem: str) -> None:
        """The host's compiler builds it; `problem` is why our build does not do. Raises ClusterUnavailable."""
        link, library_path = self._links[host], self._controls.places[host].library_path
        find = " || ".join(f"command -v {shlex.quote(name)}" for name in COMPILERS)
        _, found, _ = await link.run(["sh", "-c", find])
        compiler = found.strip()
        if not compiler:
            raise ClusterUnavailable(
                f"{host}: {problem}; with a compiler there it is built there: apt-get install gcc libc6-dev on {host}"
            )
        sources = os.path.join(os.path.dirname(library_path), "shim")
        for name, content in shim_sources().items():
            await put_file(link, os.path.join(sources, name), content)
        argv = build_command(compiler, sources, library_path)
        status, _, errors = await link.run(argv, timeout_s=_BUILD_TIMEOUT_S)
        if status != 0:
            said = next((line for line in errors.splitlines() if "error" in line), errors.strip()[:200])
            raise ClusterUnavailable(
                f"{host}: {compiler} there cannot build the clock and disk shim (apt-get install libc6-dev): {said}"
            )
        problem_there = await self._trial_problem(host)
        if problem_there is not None:
            raise ClusterUnavailable(f"{host}: {problem_there}")

    def environment(self, host: str) -> dict[str, str]:
        """What to add to the environment of a program on `host`; nothing for hosts without replicas."""
        place = self._controls.places.get(host)
        return {} if place is None else place.environment()

    async def release_all(self) -> None:
        """Let everything go: a replica that waits for its disk does not end in order. Raises ShellError."""
        await self.disks.release_all()
        await self.clocks.release_all()
