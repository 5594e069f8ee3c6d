"""Finds out whether this machine and user can have network namespaces, by making some.

Versions, capabilities, security modules and kernel options all matter, so the only reliable answer is a trial:
in a mount namespace that vanishes with the trial, make a named namespace with a bridge, a veth pair and our
nftables rules. It takes about 20 ms and leaves nothing behind.
"""

from __future__ import annotations

import functools

from harness.clusters.base import ClusterUnavailable
from harness.clusters.trials import TrialFailed, TrialUnfinished, run_trial
from harness.programs import find_program, require_programs
from nemesis.mechanisms.netem import trial_argv
from nemesis.mechanisms.nft import install_script

__all__ = ["PROGRAMS", "why_no_namespaces", "why_no_netem"]

PROGRAMS = {"ip": "iproute2", "nft": "nftables", "nsenter": "util-linux", "unshare": "util-linux", "mount": "mount"}
"""Programs that netns clusters call, and the Debian package that contains each."""

_TRIAL = """
set -e
mount -t tmpfs tmpfs /run
ip netns add trial
ip -netns trial link add br0 type bridge
ip -netns trial link add v0 type veth peer name v1
nsenter --net=/run/netns/trial nft -f -
"""

_SWITCHES = (
    ("/proc/sys/kernel/unprivileged_userns_clone", "0", "sysctl kernel.unprivileged_userns_clone=1"),
    ("/proc/sys/user/max_user_namespaces", "0", "sysctl user.max_user_namespaces=15000"),
    (
        "/proc/sys/kernel/apparmor_restrict_unprivileged_userns",
        "1",
        "sysctl kernel.apparmor_restrict_unprivileged_userns=0",
    ),
)
"""Kernel settings that forbid user namespaces: file, forbidding value, what root runs to fix it."""


def why_no_namespaces(*, in_user_namespace: bool) -> str | None:
    """None when we can make network namespaces, directly or inside a new user namespace; otherwise why not.

    The reason is one line and names the missing package or permission.
    """
    try:
        require_programs(PROGRAMS)
    except ClusterUnavailable as error:
        return str(error)
    namespaces = ["--net", "--mount", *(("--user", "--map-root-user") if in_user_namespace else ())]
    shell = find_program("sh") or "/bin/sh"
    try:
        run_trial("namespaces", namespaces, [shell, "-c", _TRIAL], stdin=install_script())
        return None
    except TrialUnfinished as error:
        return str(error)
    except TrialFailed as error:
        said = str(error)
    if not _is_mount_point("/"):
        return (
            f"/ is not a mount point, as in a plain chroot ({said}): outside the chroot, run mount --bind DIR DIR for "
            "its directory, then chroot into it again"
        )
    if not in_user_namespace:
        return f"root may not create network namespaces here ({said}): run with CAP_SYS_ADMIN and CAP_NET_ADMIN"
    for path, forbidding, fix in _SWITCHES:
        if _first_line(path) == forbidding:
            return f"unprivileged user namespaces are forbidden ({said}): as root, {fix}"
    return f"cannot create a network namespace inside a user namespace ({said}): run as root"


def _is_mount_point(path: str) -> bool:
    """Whether something is mounted at `path`, as this process sees it. True if that cannot be read."""
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            points = [line.split()[4] for line in file]
    except (OSError, IndexError):
        return True
    return path in points


@functools.cache
def why_no_netem() -> str | None:
    """None when this machine's kernel has the netem that hosts' namespaces need; otherwise why not, in one line.

    Tried by shaping a device in a network namespace that vanishes with the trial.
    """
    if find_program("tc") is None:
        return "tc is missing (apt-get install iproute2)"
    try:
        run_trial("netem", ["--net"], trial_argv())
        return None
    except TrialUnfinished as error:
        return str(error)
    except TrialFailed as error:
        said = str(error).rstrip(".")
    return f"this kernel has no netem ({said})"


def _first_line(path: str) -> str | None:
    try:
        with open(path, encoding="ascii") as file:
            return file.readline().strip()
    except OSError:
        return None
