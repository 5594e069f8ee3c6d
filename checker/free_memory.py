"""How much memory this process may still take: the minimum of what the machine, control groups and limits leave."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator

__all__ = ["free_bytes", "free_in_control_groups"]

#: Control group version -> the files with limit and usage, and the fields of ``memory.stat`` for the page cache, which
#: counts as used but is reclaimed when memory is needed.
_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
    2: ("memory.max", "memory.current", ("inactive_file", "active_file")),
}


def free_bytes() -> int | None:
    """Bytes that may still be allocated before the kernel refuses or kills; ``None`` if not known."""
    found = (_on_the_machine(), free_in_control_groups(), _in_the_address_space())
    return min((number for number in found if number is not None), default=None)


def free_in_control_groups(*, own: str = "/proc/self/cgroup", mounted: str = "/sys/fs/cgroup") -> int | None:
    """Bytes that this process's control groups leave, those of a container for instance; ``None`` without a limit."""
    left = [_left_in(directory, version) for directory, version in _groups(own, mounted)]
    return min((number for number in left if number is not None), default=None)


def _groups(own: str, mounted: str) -> Iterator[tuple[str, int]]:
    """(directory, version) of this process's control groups and of those that contain them."""
    for line in _text(own).splitlines():
        _, controllers, path = line.split(":", 2)
        version = 1 if controllers else 2
        if version == 1 and "memory" not in controllers.split(","):
            continue
        roots = [os.path.join(mounted, controllers)] if controllers else [mounted, os.path.join(mounted, "unified")]
        for root in roots:
            # A container sees its own group as the root, whatever the group's path on the machine is.
            inner = os.path.normpath(path)
            while inner != "/":
                yield root + inner, version
                inner = os.path.dirname(inner)
            yield root, version


def _left_in(directory: str, version: int) -> int | None:
    limit_name, usage_name, cached = _FILES[version]
    try:
        limit, used = (int(_text(os.path.join(directory, name))) for name in (limit_name, usage_name))
    except ValueError:  # not there, or "max"
        return None
    words = (line.split() for line in _text(os.path.join(directory, "memory.stat")).splitlines())
    return max(0, limit - used + sum(int(count) for name, count in words if name in cached))


def _on_the_machine() -> int | None:
    for line in _text("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _in_the_address_space() -> int | None:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    used = _text("/proc/self/statm").split()
    if limit == resource.RLIM_INFINITY or not used:
        return None
    return max(0, limit - int(used[0]) * resource.getpagesize())


def _text(path: str) -> str:
    """The content of a file; empty if it cannot be read."""
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
