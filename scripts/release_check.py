"""Run the README's two commands on a bare Debian, as a newcomer would: made by debootstrap, then deleted. Needs root.

    python scripts/release_check.py [--suite bookworm,trixie] [--user newcomer,root] [--cache DIR] [-- COMMAND ...]

For every suite and user it makes a root file system with python3, python3-venv, make, git and ca-certificates, in its
own mount and pid namespaces, with a clone of HEAD; in it `make demo` and `make test` (or COMMAND, a line for its shell)
must exit with status 0. The network is this machine's, and so is pip's configuration: PIP_*, *_proxy and similar
variables, /etc/pip.conf, and the files that those variables name (certificates, wheels).

The bare systems are kept in the cache for later checks; delete them there to have them made anew. Prints a line for
each command; the exit status is 0 if all of them exited with 0. Needs debootstrap, util-linux and a few gigabytes for
temporary files.
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
"""What the README requires; git also makes the checkout."""
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
# No exec: a process that changes its user loses its death signal, and so would not end, with all others, when we do.
status=0
setpriv --reuid "$user" --regid "$user" --init-groups sh -c "$line" || status=$?
exit "$status"
"""
"""Makes `root` the root file system of this process, the first of its pid namespace: all others end with it."""


def passed_on(environment: dict[str, str]) -> tuple[dict[str, str], list[str]]:
    """Variables that pip and similar programs need inside, and the files and directories that these variables name."""
    variables = {name: value for name, value in environment.items() if _PASSED_ON.fullmatch(name)}
    named = {value for value in variables.values() if os.path.isabs(value) and os.path.exists(value)}
    return variables, sorted(named | {path for path in _FILES if os.path.isfile(path)})


def configured_mirror(directory: Path = Path("/etc/apt")) -> str | None:
    """The Debian mirror that this machine's apt uses; None if it uses none."""
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
    """Make a bare root file system with a checkout of HEAD, owned by `user`, in that user's home."""
    kept = cache / f"{suite}.tar"
    if kept.exists():
        root.mkdir()
        subprocess.run(["tar", "-C", str(root), "--numeric-owner", "-xpf", str(kept)], check=True)
    else:
        with open(cache / f"{suite}.log", "wb") as log:
            argv = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", suite, str(root), mirror]
            subprocess.run(argv, check=True, stdout=log, stderr=log)
        draft = cache / f"{suite}.draft"  # an interrupted check leaves no partial archive
        subprocess.run(["tar", "-C", str(root), "--numeric-owner", "-cf", str(draft), "."], check=True)
        draft.rename(kept)
    (root / "etc/apt/sources.list").write_text(f"deb {mirror} {suite} main\n")
    subprocess.run(["chroot", str(root), "useradd", "--create-home", "--shell", "/bin/sh", NEWCOMER], check=True)
    checkout = root / _home(user).lstrip("/") / "splitbrain"
    subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(checkout)], check=True)
    subprocess.run(["chroot", str(root), "chown", "-R", f"{user}:", f"{_home(user)}/splitbrain"], check=True)


def _perform(root: Path, user: str, line: str, log_path: Path) -> int:
    """Run a shell command inside as `user`, in the checkout; returns its status. All processes inside end with it."""
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
        directory.chmod(0o755)  # an ordinary user must be able to traverse it
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
        # The mounts vanished with their namespace, so nothing of this machine is below it any more.
        shutil.rmtree(directory)
    return is_good


def main(arguments: list[str]) -> int:
    """Check every suite as every user; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--suite", default=",".join(SUITES), help="Debian releases (default: %(default)s)")
    parser.add_argument("--user", default=",".join(USERS), help="users that run the commands (default: %(default)s)")
    parser.add_argument("--mirror", default=None, help="Debian mirror (default: that of this machine's apt)")
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
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that every `finally` runs
    options.cache.mkdir(parents=True, exist_ok=True)
    commands = [words[0] if len(words) == 1 else shlex.join(words)] if words else COMMANDS
    mirror = options.mirror or configured_mirror()
    if mirror is None:
        parser.error("apt on this machine names no Debian mirror: give one with --mirror")
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
