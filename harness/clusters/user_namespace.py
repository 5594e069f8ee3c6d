"""Namespaces without root: the harness re-executes itself as "root" of a user namespace of its own.

`reexec` replaces the process with `unshare`, which makes the namespaces and replaces itself with this module's `main`,
which prepares /run and /sys and replaces itself with the harness. Nothing forks, so it is one process all along: Ctrl-C
reaches the inner harness, and the shell sees its exit status.

Inside, /run is a file system of our own into which everything of the old one is bound, except for the names of network
namespaces, which need a place that we may mount on. They end with the last process inside.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
import sys
from collections.abc import Sequence
from typing import NoReturn

from harness import run_state
from harness.clusters.netns_trial import why_no_namespaces
from harness.programs import find_program

__all__ = ["INSIDE_VARIABLE", "inside", "main", "reexec", "reexec_command", "reexec_environment", "why_not"]

INSIDE_VARIABLE = "SPLITBRAIN_USER_NAMESPACE"
"""Environment variable of the inner harness: the user id that it has outside."""

_RUN = "/run"
_NETNS_NAME = "netns"
_MS_BIND = 0x1000
_MS_REC = 0x4000
_HARNESS_FAILED = 255


def inside() -> bool:
    """Whether this process is the inner harness. The variable alone does not prove it, as it may be inherited."""
    if INSIDE_VARIABLE not in os.environ or os.geteuid() != 0:
        return False
    with open("/proc/self/uid_map", encoding="ascii") as file:
        return file.read().split() == ["0", os.environ[INSIDE_VARIABLE], "1"]


def why_not() -> str | None:
    """None when an ordinary user can have namespaces here; otherwise why not, in one line. Tries it."""
    return why_no_namespaces(in_user_namespace=True)


def reexec_command(argv: Sequence[str]) -> list[str] | None:
    """The command line that runs `argv` (a full one, program first) as root of a new user namespace.

    None when that is unnecessary (root, or inside already) or impossible (see `why_not`). Run it with
    `reexec_environment`, by exec or as a child.
    """
    if os.geteuid() == 0 or why_not() is not None:
        return None
    unshare = find_program("unshare")
    assert unshare is not None, "the trial has just used it"
    own_module = [sys.executable, "-m", "harness.clusters.user_namespace"]
    return [unshare, "--user", "--map-root-user", "--net", "--mount", "--", *own_module, *argv]


def reexec_environment() -> dict[str, str]:
    """The environment for `reexec_command`: it has our user id outside, and where run states are kept.

    The inner harness has user id 0, so by default it would keep states where root does, and `harness clean` outside
    would not find them.
    """
    return {
        **os.environ,
        INSIDE_VARIABLE: str(os.geteuid()),
        run_state.STATE_DIR_VARIABLE: run_state.default_state_root(),
    }


def reexec(argv: Sequence[str]) -> NoReturn:
    """Replace this process with `argv` running in a user namespace. Raises OSError when that is impossible."""
    command = reexec_command(argv)
    if command is None:
        raise OSError(why_not() or "already root: no user namespace is needed")
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command[0], command, reexec_environment())


def main(argv: Sequence[str]) -> NoReturn:
    """Prepare the mount namespace that `unshare` has just made, and become `argv`."""
    try:
        _prepare_run()
        with contextlib.suppress(OSError):
            # Containers may refuse it. Only tools that look for devices in /sys need it; ours do not.
            _mount("sysfs", "/sys", "sysfs")
        os.execvp(argv[0], list(argv))
    except OSError as error:
        print(f"harness: cannot set up the user namespace: {error}", file=sys.stderr)
        sys.exit(_HARNESS_FAILED)


def _mount(source: str, target: str, kind: str, flags: int = 0, data: str = "") -> None:
    """mount(2). Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    texts = [os.fsencode(text) or None for text in (source, target, kind, data)]
    if libc.mount(*texts[:3], ctypes.c_ulong(flags), texts[3]) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"mount {source} on {target}: {os.strerror(code)}")


def _prepare_run() -> None:
    """Mount a tmpfs on /run and bind its old entries back in, except the directory of network namespaces."""
    entries = {}
    for entry in os.scandir(_RUN):
        if entry.name != _NETNS_NAME:
            # The descriptor leads to the old entry even when something else is mounted over its path.
            entries[entry.name] = os.open(entry.path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    _mount("tmpfs", _RUN, "tmpfs", data="mode=0755")
    for name, descriptor in entries.items():
        path = os.path.join(_RUN, name)
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISLNK(mode):
            os.symlink(os.readlink("", dir_fd=descriptor), path)
        else:
            if stat.S_ISDIR(mode):
                os.mkdir(path)
            else:
                os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            _mount(f"/proc/self/fd/{descriptor}", path, "", _MS_BIND | _MS_REC)
        os.close(descriptor)
    os.mkdir(os.path.join(_RUN, _NETNS_NAME), 0o755)


if __name__ == "__main__":
    main(sys.argv[1:])
