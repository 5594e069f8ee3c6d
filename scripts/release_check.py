"""The README's two commands on bare Debian, as a newcomer has it: made by debootstrap, thrown away afterwards. As root.

    python scripts/release_check.py [--suite bookworm,trixie] [--user newcomer,root] [--cache DIR] [-- COMMAND ...]

For every suite and user: a root file system with python3, python3-venv, make, git and ca-certificates, in mount and
pid namespaces of its own, with a copy of what git has committed here; in it `make demo` and `make test` (or COMMAND, a
line for its shell), which must end with status 0. The network is this machine's. So is what pip is told of it: PIP_*,
*_proxy and the like, /etc/pip.conf, and the files that those variables name (certificates, wheels).

The bare systems are kept in the cache, so that a second check makes none; remove them there to have new ones. Prints a
line for each command; exit status 0 when all of them ended with 0. Needs debootstrap, util-linux and a few gigabytes
for temporary files.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

__all__ = ["PACKAGES", "configured_mirror", "main", "passed_on"]

ROOT = Path(__file__).resolve().parents[1]
SUITES = ("bookworm", "trixie")
NEWCOMER = "newcomer"
USERS = (NEWCOMER, "root")
PACKAGES = "python3,python3-venv,make,git,ca-certificates"
"""What the README asks for, and git to have a checkout with."""
COMMANDS = ("make demo", "make test")

_PASSED_ON = re.compile(r"PIP_\w+|(https?|all|no)_proxy|SSL_CERT_(FILE|DIR)|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE", re.I)
_FILES = ("/etc/resolv.conf", "/etc/hosts", "/etc/pip.conf")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_ENTER = r"""
set -eu
root=$1 user=$2 line=$3
shift 3
mount --make-rprivate /
mount --bind "$root" "$root"
cd "$root"
for path in "$@"; do
    if [ -d "$path" ]; then mkdir -p ".$path"; else mkdir -p ".${path%/*}"; [ -e ".$path" ] || : >".$path"; fi
    mount --bind -o ro "$path" ".$path"
done
mount --rbind /dev dev
mount --rbind /sys sys
mount -t proc proc proc
mount -t tmpfs tmpfs run
mkdir -p old
pivot_root . old
cd /
umount -l /old
# No exec: a process that changes its user no longer gets the signal that ends it with us, and so all the others.
status=0
setpriv --reuid "$user" --regid "$user" --init-groups sh -c "$line" || status=$?
exit "$status"
"""
"""The root file system becomes that of this process, the first of its pid namespace: all others end with it."""


def passed_on(environment: dict[str, str]) -> tuple[dict[str, str], list[str]]:
    """The variables that pip and its like need inside, and the files and directories that have to be there for them."""
    variables = {name: value for name, value in environment.items() if _PASSED_ON.fullmatch(name)}
    named = {value for value in variables.values() if os.path.isabs(value) and os.path.exists(value)}
    return variables, sorted(named | {path for path in _FILES if os.path.isfile(path)})


def configured_mirror(directory: Path = Path("/etc/apt")) -> str | None:
    """The mirror of Debian's packages that this machine's apt uses; None where it uses none."""
    lists = [directory / "sources.list", *sorted((directory / "sources.list.d").glob("*"))]
    for path in lists:
        text = path.read_text(errors="replace") if path.is_file() else ""
        found = re.search(r"^\s*(?:URIs:|deb(?:\s+\[.*?\])?)\s+(https?://\S+/debian)/?(?:\s|$)", text, re.MULTILINE)
        if found:
            return found[1]
    return None


def _home(user: str) -> str:
    return "/root" if user == "root" else f"/home/{user}"


def _make_root(root: Path, suite: str, user: str, cache: Path, mirror: str) -> None:
    """A bare root file system with a checkout of HEAD, owned by `user`, in that user's home."""
    kept = cache / f"{suite}.tar"
    if kept.exists():
        root.mkdir()
        subprocess.run(["tar", "-C", str(root), "--numeric-owner", "-xpf", str(kept)], check=True)
    else:
        with open(cache / f"{suite}.log", "wb") as log:
            argv = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", suite, str(root), mirror]
            subprocess.run(argv, check=True, stdout=log, stderr=log)
        draft = cache / f"{suite}.draft"  # a check that is broken off leaves no half of it
        subprocess.run(["tar", "-C", str(root), "--numeric-owner", "-cf", str(draft), "."], check=True)
        draft.rename(kept)
    (root / "etc/apt/sources.list").write_text(f"deb {mirror} {suite} main\n")
    subprocess.run(["chroot", str(root), "useradd", "--create-home", "--shell", "/bin/sh", NEWCOMER], check=True)
    checkout = root / _home(user).lstrip("/") / "splitbrain"
    subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(checkout)], check=True)
    subprocess.run(["chroot", str(root), "chown", "-R", f"{user}:", f"{_home(user)}/splitbrain"], check=True)


def _perform(root: Path, user: str, line: str, log_path: Path) -> int:
    """Run a shell's line inside as `user`, in the checkout; returns its status. Everything in there ends with it."""
    variables, paths = passed_on(dict(os.environ))
    environment = {"PATH": _PATH, "HOME": _home(user), "LANG": "C.UTF-8", **variables}
    inside = f"cd {_home(user)}/splitbrain && {line}"
    unshare = ["unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--"]
    argv = [*unshare, "sh", "-c", _ENTER, "sh", str(root), user, inside, *paths]
    with open(log_path, "wb") as log:
        child = subprocess.Popen(argv, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            return child.wait()
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()


def _tail(path: Path, lines: int) -> str:
    return "\n".join(f"    {line}" for line in path.read_text(errors="replace").splitlines()[-lines:])


def _check(suite: str, user: str, commands: Sequence[str], cache: Path, mirror: str) -> bool:
    directory = Path(tempfile.mkdtemp(prefix="splitbrain-release-"))
    is_good = True
    try:
        directory.chmod(0o755)  # an ordinary user has to pass through it
        _make_root(directory / "root", suite, user, cache, mirror)
        for number, line in enumerate(commands):
            began_s = time.monotonic()
            log_path = cache / f"{suite}-{user}-{number}.log"
            status = _perform(directory / "root", user, line, log_path)
            took_s = time.monotonic() - began_s
            print(f"{suite}, {user}: {line}: status {status} after {took_s:.0f} s; {log_path}", flush=True)
            if status != 0:
                print(_tail(log_path, 15), flush=True)
                is_good = False
    finally:
        # Mounts are gone with their namespace, so nothing of this machine is below it any more.
        shutil.rmtree(directory)
    return is_good


def main(arguments: list[str]) -> int:
    """Check every suite as every user; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--suite", default=",".join(SUITES), help="Debian releases (default: %(default)s)")
    parser.add_argument("--user", default=",".join(USERS), help="who performs the commands (default: %(default)s)")
    parser.add_argument("--mirror", default=None, help="of Debian's packages (default: that of this machine's apt)")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir(), "splitbrain-release-cache"),
                        help="for the bare systems, and the logs (default: %(default)s)")  # fmt: skip
    split = arguments.index("--") if "--" in arguments else len(arguments)
    options, words = parser.parse_args(arguments[:split]), arguments[split + 1 :]
    missing = [program for program in ("debootstrap", "unshare", "git") if shutil.which(program) is None]
    if os.geteuid() != 0 or missing:
        problem = f"install {' '.join(missing)}" if missing else "must run as root"
        print(f"release_check: {problem}", file=sys.stderr)
        return 254
    unknown = set(options.user.split(",")) - set(USERS)
    if unknown:
        print(f"release_check: unknown user {' '.join(sorted(unknown))}; known: {', '.join(USERS)}", file=sys.stderr)
        return 254
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # and so through every `finally`
    options.cache.mkdir(parents=True, exist_ok=True)
    commands = [words[0] if len(words) == 1 else shlex.join(words)] if words else COMMANDS
    mirror = options.mirror or configured_mirror()
    if mirror is None:
        parser.error("apt names no mirror of Debian's packages here: give one by --mirror")
    try:
        good = [
            _check(suite, user, commands, options.cache, mirror)
            for suite in options.suite.split(",")
            for user in options.user.split(",")
        ]
    except subprocess.CalledProcessError as error:
        print(f"release_check: {error} ({options.cache} has its log)", file=sys.stderr)
        return 255
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
