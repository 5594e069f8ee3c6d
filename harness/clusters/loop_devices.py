"""Loop devices, and how the images on them are recognised as ours.

A loop device outlives its harness in one case: a file system that was frozen when its last mount went stays on it,
with no mount, no process and perhaps no path any more, because the image was in a mount namespace that is gone. So
every image carries a mark in the first kilobyte, which ext4 leaves to boot loaders: the run that made it, the process
of that run's harness, and the path of the run's state. The mark is read through the device itself, so that any later
harness can recognise such a device as ours and as left behind by a dead run.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import json
import os
import struct
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from harness.programs import SYSTEM_PATH, find_program
from harness.run_state import harness_is_live, harness_process
from harness.scratch import scratch_directory

__all__ = ["MARK_BYTES", "ImageMark", "file_id", "image_mark", "loop_devices_of", "marked_devices", "release_device"]

MARK_BYTES = 1024
"""The part at the beginning of a device that ext4 does not use."""

_MARK = b"splitbrain image "

_LOOP_CLR_FD = 0x4C01
_LOOP_GET_STATUS64 = 0x4C05
_LOOP_INFO = struct.Struct("=2Q")
"""The first two fields of `struct loop_info64` (linux/loop.h): device and inode of the file."""

_LOOP_INFO_BYTES = 232
_TIMEOUT_S = 20.0
_DETACH_S = 5.0
"""Time for a released device to become free: a process that has it open for a moment keeps it that long."""


@dataclass(frozen=True, slots=True)
class ImageMark:
    """The owner of an image: the run, its harness's process (with start time, boot id, and the inode of its pid
    namespace), and the path of the run's state, empty if it is not known."""

    run_id: str
    pid: int
    start_ticks: int
    boot_id: str
    state: str = ""
    pid_namespace: int | None = None

    @property
    def is_of_the_dead(self) -> bool:
        """Whether that harness ran here and has ended. No device outlives a boot, so a harness of another boot is on
        another machine, and its state is not known here. Devices are visible in every container that has /dev, so a
        harness may also run in a pid namespace whose processes are not visible here."""
        if self.boot_id != harness_process()["boot_id"]:
            return False
        return harness_is_live(self.pid, self.start_ticks, self.boot_id, self.pid_namespace) is False

    @property
    def has_state(self) -> bool:
        """Whether the run's state still exists. Cleanup by that state first ends what uses the device."""
        return bool(self.state) and os.path.lexists(self.state)


def image_mark(run_id: str, state: str) -> bytes:
    """The mark of an image that this process makes for a run, to be written over the image's first bytes. `state` is
    the path of the run's state; it is left out if it does not fit."""
    process = {"run": run_id, **harness_process()}
    for entry in ({**process, "state": state}, process):
        mark = _MARK + json.dumps(entry).encode() + b"\n"
        if len(mark) <= MARK_BYTES:
            break
    return mark.ljust(MARK_BYTES, b"\0")


def _read_mark(path: str) -> ImageMark | None:
    try:
        with open(path, "rb") as file:
            first = file.read(MARK_BYTES)
    except OSError:
        return None
    if not first.startswith(_MARK):
        return None
    try:
        entry = json.loads(first[len(_MARK) :].split(b"\n")[0])
        pid, start_ticks, state = int(entry["pid"]), int(entry["start_ticks"]), str(entry.get("state", ""))
        pid_namespace = None if entry.get("pid_namespace") is None else int(entry["pid_namespace"])
        return ImageMark(str(entry["run"]), pid, start_ticks, str(entry["boot_id"]), state, pid_namespace)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _attached() -> Iterator[str]:
    """The loop devices that have a backing file, as /dev/loopN."""
    for path in sorted(glob.glob("/sys/block/loop*/loop")):
        yield f"/dev/{path.split('/')[3]}"


def marked_devices() -> list[tuple[str, ImageMark]]:
    """The loop devices with an image of any of our runs. Needs root; finds none otherwise."""
    return [(device, mark) for device in _attached() if (mark := _read_mark(device)) is not None]


def file_id(path: str) -> list[int]:
    """How a loop device identifies its file: [device in the kernel's numbering, inode]. Raises OSError."""
    status = os.stat(path)
    major, minor = os.major(status.st_dev), os.minor(status.st_dev)
    return [(minor & 0xFF) | major << 8 | (minor & ~0xFF) << 12, status.st_ino]


def loop_devices_of(image_id: Sequence[int], run_id: str) -> list[str]:
    """The loop devices, as /dev/loopN, that an image of a run is attached to. The image's path would not identify it,
    as it changes once the mount namespace of the file is gone. Nor would `image_id` alone: the kernel reuses the device
    number of a tmpfs as soon as that is gone, and the next one's image may belong to a live run."""
    found = []
    for device in _attached():
        try:
            descriptor = os.open(device, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue  # it was detached meanwhile
        try:
            answer = fcntl.ioctl(descriptor, _LOOP_GET_STATUS64, bytes(_LOOP_INFO_BYTES))
        except OSError:
            continue
        finally:
            os.close(descriptor)
        if list(_LOOP_INFO.unpack_from(answer)) != list(image_id):
            continue
        mark = _read_mark(device)
        if mark is not None and mark.run_id == run_id:
            found.append(device)
    return found


def release_device(device: str) -> None:
    """Free a loop device that is not mounted any more. A file system that was frozen when its last mount went is still
    on it; it is mounted once more, in a private namespace, and thawed. Raises OSError when the device stays in use,
    subprocess.SubprocessError."""
    thaw_it = 'mount -o noatime "$1" "$2" && { fsfreeze --unfreeze "$2"; umount "$2"; }'
    argv = [find_program("unshare") or "unshare", "--mount", "--propagation", "private", "--"]
    with scratch_directory("trial") as directory:
        subprocess.run(
            [*argv, find_program("sh") or "/bin/sh", "-c", thaw_it, "thaw", device, directory],
            capture_output=True,
            timeout=_TIMEOUT_S,
            env={"PATH": SYSTEM_PATH},
        )
    deadline_s = time.monotonic() + _DETACH_S
    while os.path.exists(f"/sys/block/{os.path.basename(device)}/loop/backing_file"):
        if time.monotonic() > deadline_s:
            raise OSError(f"{device} is still in use: something has it mounted or open")
        with contextlib.suppress(OSError):  # it has just gone, or is in use: the loop's condition shows which
            descriptor = os.open(device, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.ioctl(descriptor, _LOOP_CLR_FD)
            finally:
                os.close(descriptor)
        time.sleep(0.02)
