"""The user that a system's programs run as on a host, for programs that refuse to run as root.

If the harness is not root on a host, they run as the harness's user. If it is root, one of two ways:

    another user       by setpriv, with the group of that user and no other
    a user namespace   in which root appears as nobody, without capabilities, but can access what root owns: if no other
                       user can be had (the harness is itself root of a user namespace), or if that user cannot access
                       the packages or the data, because they are in a home directory for example

Both die with their parent, as programs do that keep their user, and both have their own System V shared memory if
possible, since a killed PostgreSQL leaves some behind.
"""

from __future__ import annotations

from collections.abc import Sequence

from harness.errors import OperatorError
from harness.sdk import Host

__all__ = ["user_of", "words_for_user"]

_ENDS_WITH_PARENT = ("--pdeathsig", "KILL")
"""Set again after the user has changed, because the kernel clears the parent-death signal then."""

_PATHS_EXIST = 'for each; do test -e "$each" || exit 1; done'


async def words_for_user(host: Host, user: str, paths: Sequence[str]) -> list[str]:
    """Command prefix that runs a program as `user`, who must be able to access `paths` and the data. Raises
    OperatorError if only root can run programs there."""

    async def works(*words: str) -> bool:
        return (await host.run_as_harness(*words, check=False)).status == 0

    if (await host.run_as_harness("id", "-u")).out.strip() != "0":
        return []
    own_memory = ["--ipc"] if await works("unshare", "--ipc", "true") else []
    found = await host.run_as_harness("sh", "-c", f"id -u {user} && id -g {user}", check=False)
    if found.status != 0:
        raise OperatorError(f"there is no user {user} on {host.name}: create it there (useradd {user})")
    number, group = found.out.split()
    if not await works("setpriv", "--version"):
        raise OperatorError(f"{host.name} has no setpriv to run programs as {user} with: install util-linux there")
    other = ["setpriv", "--reuid", number, "--regid", group, "--clear-groups", *_ENDS_WITH_PARENT]
    if await works(*other, "sh", "-c", _PATHS_EXIST, "sh", host.data, *paths):
        return [*(["unshare", *own_memory] if own_memory else []), *other]
    nobody = ["unshare", "--user", *own_memory, "setpriv", *_ENDS_WITH_PARENT]
    if await works(*nobody, "true"):
        return nobody
    raise OperatorError(
        f"user {user} of {host.name} cannot access {', '.join((host.data, *paths))}: keep runs and packages where "
        "all users have access (--store, SPLITBRAIN_CACHE)"
    )


def user_of(words: Sequence[str]) -> str | None:
    """The UID in a command prefix of `words_for_user`; None if it does not change to another user."""
    return words[words.index("--reuid") + 1] if "--reuid" in words else None
