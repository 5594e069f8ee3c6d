"""As whom a system's programs run on a host, where they refuse to be root.

Where the harness is not root on a host, they run as the user that it is. Where it is, one of two:

    another user       by setpriv, with the group of that user and no other
    a user namespace   in which root is nobody and has no rights, but reaches what root owns: where there is no other
                       user (the harness is root of a user namespace itself), or where that user cannot get to the
                       packages or the data, because they lie in a home directory, say

Both end with whoever started them, as programs do that stay the same user, and both have System V memory of their own
where that can be had: a killed PostgreSQL leaves some behind.
"""

from __future__ import annotations

from collections.abc import Sequence

from harness.errors import OperatorError
from harness.sdk import Host

__all__ = ["user_of", "words_for_user"]

_ENDS_WITH_PARENT = ("--pdeathsig", "KILL")
"""The kernel forgets a process's wish to end with its parent when it becomes another user."""

_ARE_THERE = 'for each; do test -e "$each" || exit 1; done'


async def words_for_user(host: Host, user: str, paths: Sequence[str]) -> list[str]:
    """What to put before a command so that it runs as `user`, who has to get to `paths` and to the data. Raises
    OperatorError where nobody but root can run programs there."""

    async def works(*words: str) -> bool:
        return (await host.run_as_harness(*words, check=False)).status == 0

    if (await host.run_as_harness("id", "-u")).out.strip() != "0":
        return []
    own_memory = ["--ipc"] if await works("unshare", "--ipc", "true") else []
    found = await host.run_as_harness("sh", "-c", f"id -u {user} && id -g {user}", check=False)
    if found.status != 0:
        raise OperatorError(f"there is no user {user} on {host.name}: make one there (useradd {user})")
    number, group = found.out.split()
    if not await works("setpriv", "--version"):
        raise OperatorError(f"{host.name} has no setpriv to run programs as {user} with: install util-linux there")
    other = ["setpriv", "--reuid", number, "--regid", group, "--clear-groups", *_ENDS_WITH_PARENT]
    if await works(*other, "sh", "-c", _ARE_THERE, "sh", host.data, *paths):
        return [*(["unshare", *own_memory] if own_memory else []), *other]
    nobody = ["unshare", "--user", *own_memory, "setpriv", *_ENDS_WITH_PARENT]
    if await works(*nobody, "true"):
        return nobody
    raise OperatorError(
        f"user {user} of {host.name} cannot get to {', '.join((host.data, *paths))}: keep runs and packages where "
        "everybody may enter (--store, SPLITBRAIN_CACHE)"
    )


def user_of(words: Sequence[str]) -> str | None:
    """The number of the user that these words of `words_for_user` stand for; None where that is no other one."""
    return words[words.index("--reuid") + 1] if "--reuid" in words else None
