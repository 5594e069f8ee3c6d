"""What the clusters whose replicas' clocks and disks can be bent have in common: which abilities a run will use, and
the means for them once they are made."""

from __future__ import annotations

from collections.abc import Collection
from typing import Generic, Protocol, TypeVar

from harness.faults.file_system_disks import FileSystemDisks
from nemesis.mechanisms.shim_faults import ShimClocks, ShimDisks
from nemesis.target import Clocks

__all__ = ["Equipped"]


class _Shim(Protocol):
    """The shim of a cluster's hosts, wherever they are."""

    @property
    def clocks(self) -> ShimClocks: ...
    @property
    def disks(self) -> ShimDisks: ...


ShimT = TypeVar("ShimT", bound=_Shim)


class Equipped(Generic[ShimT]):
    """A cluster that is told before `start` what will be needed of it. Its `start` makes `_shim` and `_disks`, its
    `stop` takes them away again."""

    _needs: frozenset[tuple[str, str]] = frozenset()
    """Interface and ability of everything that the run will use."""
    _shim: ShimT | None = None
    """What bends clocks and disks."""
    _disks: FileSystemDisks | None = None
    """Disks with faults of a whole file system, where hosts have one each; they pass the others on to the shim."""
    _real_clocks: Clocks | None = None
    """Clocks that are really set, where hosts have one each; they pass the rest on to the shim."""

    def equip(self, needs: Collection[tuple[str, str]]) -> None:
        """Prepare for the abilities that the run will use; to be called before `start`."""
        self._needs = frozenset(needs)

    @property
    def clocks(self) -> Clocks | None:
        """The clocks of the replicas; None unless `equip` was told of them."""
        if self._real_clocks is not None:
            return self._real_clocks
        return None if self._shim is None else self._shim.clocks

    @property
    def disks(self) -> ShimDisks | FileSystemDisks | None:
        """The disks of the replicas; None unless `equip` was told of them."""
        if self._disks is not None:
            return self._disks
        return None if self._shim is None else self._shim.disks
