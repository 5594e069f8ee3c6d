"""The clock and disk shim on hosts that share the harness's machine, as the clusters `local` and `netns` use it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Sequence

from harness.faults.local_access import LocalAccess
from harness.run_state import KIND_DIRECTORY, KIND_FILE, TEMP_PREFIX, Claim, RunState
from nemesis.mechanisms.shim import ShimError, library_directory, place_library, why_no_shim
from nemesis.mechanisms.shim_faults import ShimClocks, ShimControls, ShimDisks, ShimPlace

__all__ = ["ShimHosts", "shim_missing"]


def shim_missing(interface: str, ability: str) -> str | None:
    """Why clocks and disks cannot be had by the shim here; None when they can."""
    return why_no_shim()


UNDO_INSIDE = ".splitbrain-undo"
"""The undo directory's name on a file system of a host's own. Names that begin so are nobody's data."""


class ShimHosts:
    """The shim's files on all hosts of a run, and the interfaces that act through it.

    The library lies in a temporary directory, because LD_PRELOAD cannot name every path that a store may have. Beside
    it, under `work_dir`, each host has `faults.control` and, when power cuts are wanted, a directory with the undo log.
    All of it goes with the run.
    """

    def __init__(
        self,
        hosts: Sequence[str],
        *,
        work_dir: str,
        data_dir: Callable[[str], str],
        run: RunState,
        tracks_writes: bool,
        undo_inside: bool = False,
        enter: Callable[[str], Sequence[str]] | None = None,
    ) -> None:
        """Write the files, claimed in the run's state. `tracks_writes`: keep track of what is not synced, `undo_inside`
        the data's directory, where there is a directory for it; `enter` as LocalAccess takes it. Raises ShimError,
        OSError, StateError."""
        self._run = run
        for_library = os.path.join(library_directory(), f"{TEMP_PREFIX}{run.run_id}-shim")
        self._claims = [Claim(KIND_DIRECTORY, for_library, {})]
        run.claim_all(self._claims)
        try:
            library_path = place_library(for_library)
        except (ShimError, OSError):
            self.remove()
            raise

        def undo_path(host: str) -> str:
            if undo_inside:
                return os.path.join(data_dir(host), UNDO_INSIDE)
            return os.path.join(work_dir, host, f"{TEMP_PREFIX}{run.run_id}-undo")

        places = {
            host: ShimPlace(
                library_path=library_path,
                control_path=os.path.join(work_dir, host, "faults.control"),
                data_path=os.path.realpath(data_dir(host)),
                undo_path=undo_path(host) if tracks_writes else None,
                preloaded=os.environ.get("LD_PRELOAD"),
            )
            for host in hosts
        }
        claims = [Claim(KIND_FILE, place.control_path, {}) for place in places.values()]
        if not undo_inside:
            paths = [place.undo_path for place in places.values() if place.undo_path is not None]
            claims += [Claim(KIND_DIRECTORY, path, {}) for path in paths]
        run.claim_all(claims)
        self._claims += claims
        self.access = LocalAccess(run.environment, enter=enter)
        self.controls = ShimControls(self.access, places)
        try:
            for host, place in places.items():
                os.makedirs(os.path.dirname(place.control_path), exist_ok=True)
                if place.undo_path is not None and not undo_inside:
                    os.makedirs(place.undo_path, exist_ok=True)
                with open(place.control_path, "wb") as file:
                    file.write(self.controls.initial_content(host))
        except OSError:
            self.remove()
            raise
        self.clocks = ShimClocks(self.controls)
        self.disks = ShimDisks(self.controls)

    @classmethod
    def wanted(cls, needs: Collection[tuple[str, str]]) -> bool:
        """Whether abilities that a run uses call for the shim."""
        return any(interface in ("clocks", "disks") for interface, _ in needs)

    def environment(self, host: str) -> dict[str, str]:
        """What to add to the environment of a program on `host`; nothing for hosts without replicas."""
        place = self.controls.places.get(host)
        return {} if place is None else place.environment()

    async def close(self) -> None:
        """Let everything go, and wait a moment for probes that were killed."""
        await self.disks.release_all()
        await self.clocks.release_all()
        await self.access.close()

    def remove(self) -> None:
        """Remove the files, once no replica runs any more. Idempotent. Raises OSError."""
        while self._claims:
            claim = self._claims[-1]
            if claim.kind == KIND_DIRECTORY:
                shutil.rmtree(claim.ident, ignore_errors=True)
            elif os.path.lexists(claim.ident):
                os.unlink(claim.ident)
            self._run.release(claim.kind, claim.ident)
            self._claims.pop()
