"""A laboratory for the docker and ssh clusters on one Linux machine, as root; nothing is left running afterwards.

    python scripts/lab.py docker DIR -- COMMAND ...      a Docker engine in its own network namespace
    python scripts/lab.py ssh DIR [--hosts N] -- COMMAND ...    N machines, each an sshd in its own namespaces;
                                                         users root, admin (with sudo) and plain (without)
    python scripts/lab.py rootfs DIR                     a small root file system of this machine's programs, for
                                                         scripts/build-image.sh --rootfs DIR

COMMAND runs in a namespace that reaches the engine or the machines; DOCKER_HOST is set or, for ssh,
DIR/inventory.toml is written. When it ends, everything is taken down and its status is returned. The engine's images
stay in DIR/docker for the next time. What a killed laboratory (kill -9) left, the next one removes. Needs util-linux,
iproute2 and docker.io with iptables, or openssh-server.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

__all__ = ["docker_lab", "machine_rootfs", "main", "missing_for", "ssh_lab"]

START_TIMEOUT_S = 30.0
END_TIMEOUT_S = 15.0
RUNTIME = Path("/tmp")
"""For sockets and locks: a socket's path is limited to 107 bytes."""
SUBNET = "10.78.0"
USER_DIRECTORY = "/var/lib/splitbrain"

NEEDS = {
    "docker": {"dockerd": "docker.io", "containerd": "docker.io", "iptables": "iptables"},
    "ssh": {"sshd": "openssh-server", "ssh-keygen": "openssh-client"},
}
_PATH = f"{os.environ.get('PATH', '')}:/usr/local/sbin:/usr/sbin:/sbin"


def missing_for(kind: str) -> str | None:
    """What this machine lacks for a laboratory of this kind, in one line; None if it has everything."""
    if os.geteuid() != 0:
        return "needs root"
    wanted = {**NEEDS[kind], "ip": "iproute2", "nsenter": "util-linux", "unshare": "util-linux"}
    packages = sorted({package for program, package in wanted.items() if shutil.which(program, path=_PATH) is None})
    return f"missing packages: {' '.join(packages)}" if packages else None


def _run(*argv: str) -> None:
    subprocess.run(argv, check=True, stdin=subprocess.DEVNULL, env={**os.environ, "PATH": _PATH})


@contextlib.contextmanager
def _laboratory(kind: str) -> Iterator[str]:
    """The name of a laboratory of this process, which holds a lock of that name: what has a name without a holder was
    left by a killed one, and is removed first."""
    for path in RUNTIME.glob("sb-lab-*.lock"):
        with contextlib.suppress(FileNotFoundError, BlockingIOError), open(path) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(path.stem)
            path.unlink()
    name = f"sb-lab-{os.getpid()}-{kind}"
    own = RUNTIME / f"{name}.lock"
    with open(own, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield name
        finally:
            own.unlink(missing_ok=True)


def _remove(name: str) -> None:
    """Remove everything of a laboratory whose process is gone."""
    namespaces = [path.name for path in Path("/run/netns").glob(f"{name}*") if (path.name + "-").startswith(f"{name}-")]
    for number in (signal.SIGTERM, signal.SIGKILL):  # an engine that may end in peace also ends its containers
        pids = {pid for namespace in namespaces for pid in _processes_in(namespace)}
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline = time.monotonic() + END_TIMEOUT_S
        while any(map(_processes_in, namespaces)) and time.monotonic() < deadline:
            time.sleep(0.05)
    for namespace in namespaces:
        _run("ip", "netns", "delete", namespace)
    shutil.rmtree(RUNTIME / f"{name}-exec", ignore_errors=True)
    (RUNTIME / f"{name}.sock").unlink(missing_ok=True)


def _processes_in(namespace: str) -> list[int]:
    asked = ["ip", "netns", "pids", namespace]
    done = subprocess.run(asked, check=True, capture_output=True, text=True, env={**os.environ, "PATH": _PATH})
    return [int(word) for word in done.stdout.split()]


@contextlib.contextmanager
def _namespace(name: str) -> Iterator[list[str]]:
    """A network namespace; yields the prefix that runs a command there."""
    _run("ip", "netns", "add", name)
    try:
        _run("ip", "-netns", name, "link", "set", "lo", "up")
        yield ["nsenter", f"--net=/run/netns/{name}", "--"]
    finally:
        _run("ip", "netns", "delete", name)


@contextlib.contextmanager
def _daemon(argv: Sequence[str], log_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process in its own session; its process group is ended on exit."""
    with open(log_path, "wb") as log:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            env={**os.environ, "PATH": _PATH},
        )  # fmt: skip
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait_for_socket(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        with socket.socket(socket.AF_UNIX) as trial:
            trial.settimeout(1)
            try:
                trial.connect(address)
                return
            except OSError:
                pass
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{log.stem} did not start: {log.read_text(errors='replace')[-500:]}")
        time.sleep(0.02)


@contextlib.contextmanager
def docker_lab(directory: Path) -> Iterator[tuple[list[str], dict[str, str]]]:
    """A Docker engine; yields the prefix of a command that uses it, and additions to the command's environment.

    Raises RuntimeError when it does not start.
    """
    directory.mkdir(parents=True, exist_ok=True)
    log = directory / "dockerd.log"
    with contextlib.ExitStack() as stack:
        lab = stack.enter_context(_laboratory("docker"))
        address, state = str(RUNTIME / f"{lab}.sock"), str(RUNTIME / f"{lab}-exec")
        prefix = stack.enter_context(_namespace(lab))
        dockerd = [
            "dockerd", "--data-root", str(directory / "docker"), "--exec-root", state,
            "-H", f"unix://{address}", "-p", str(directory / "dockerd.pid"),
        ]  # fmt: skip
        stack.callback(shutil.rmtree, state, ignore_errors=True)
        process = stack.enter_context(_daemon([*prefix, *dockerd], log))
        _wait_for_socket(address, process, log)
        yield prefix, {"DOCKER_HOST": f"unix://{address}"}


_HOST_SCRIPT = """
set -e
mount --make-rprivate /
mount -t tmpfs tmpfs /run
mkdir -p /run/sshd /run/lab/sudoers.d {base}
mount --bind {directory} {base}
# Two users besides root, one of whom may use sudo, and the key that logs all of them in.
for file in passwd shadow hosts; do cp -p "/etc/$file" /run/lab/; done
printf 'admin:x:4001:4001::/tmp:/bin/sh\nplain:x:4002:4002::/tmp:/bin/sh\n' >>/run/lab/passwd
printf 'admin:*:19000::::::\nplain:*:19000::::::\n' >>/run/lab/shadow
printf '127.0.1.1 {host}\n' >>/run/lab/hosts
printf 'admin ALL=(root) NOPASSWD: ALL\n' >/run/lab/sudoers.d/lab
chmod 440 /run/lab/sudoers.d/lab
for file in passwd shadow hosts sudoers.d; do [ ! -e "/etc/$file" ] || mount --bind "/run/lab/$file" "/etc/$file"; done
cp {authorized} /run/lab/authorized
# A plain host has none of this machine's shell start-up files.
: > /run/empty
for file in ~/.bashrc ~/.zshenv; do [ ! -e "$file" ] || mount --bind /run/empty "$file"; done
mount -t proc proc /proc
hostname {host}
exec {sshd} -D -e -f /dev/null -h {key} -o ListenAddress={address} -o AuthorizedKeysFile=/run/lab/authorized \
    -o StrictModes=no -o UsePAM=no -o UseDNS=no -o PidFile=none -o PermitRootLogin=prohibit-password
"""


@contextlib.contextmanager
def ssh_lab(directory: Path, host_count: int) -> Iterator[tuple[list[str], Path]]:
    """Machines n1..nN behind SSH; yields the prefix of a command that reaches them, and the path of their inventory.

    Raises RuntimeError when one does not start.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if not (directory / "id").exists():
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(directory / "id"))
    sshd = shutil.which("sshd", path=_PATH) or "sshd"
    known, inventory = [], ["[defaults]", 'user = "root"', f'identity_file = "{directory / "id"}"']
    inventory.append(f'python = "{os.path.realpath(sys.executable)}"')
    inventory.append(f'known_hosts = "{directory / "known_hosts"}"')
    Path(USER_DIRECTORY).mkdir(parents=True, exist_ok=True)  # the mount point in each machine's mount namespace
    with contextlib.ExitStack() as stack:
        lab = stack.enter_context(_laboratory("ssh"))
        prefix = stack.enter_context(_namespace(f"{lab}-net"))
        _run("ip", "-netns", f"{lab}-net", "link", "add", "br0", "type", "bridge")
        _run("ip", "-netns", f"{lab}-net", "addr", "add", f"{SUBNET}.254/24", "dev", "br0")
        _run("ip", "-netns", f"{lab}-net", "link", "set", "br0", "up")
        for number in range(1, host_count + 1):
            host, address = f"n{number}", f"{SUBNET}.{number}"
            key, data, log = directory / f"{host}.key", directory / host, directory / f"{host}.log"
            if not key.exists():
                _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key))
            data.mkdir(exist_ok=True)
            inside = stack.enter_context(_namespace(f"{lab}-{host}"))
            _run("ip", "-netns", f"{lab}-net", "link", "add", host, "type", "veth", "peer", "name", "eth0",
                 "netns", f"{lab}-{host}")  # fmt: skip
            _run("ip", "-netns", f"{lab}-net", "link", "set", host, "master", "br0", "up")
            _run("ip", "-netns", f"{lab}-{host}", "addr", "add", f"{address}/24", "dev", "eth0")
            _run("ip", "-netns", f"{lab}-{host}", "link", "set", "eth0", "up")
            script = _HOST_SCRIPT.format(
                base=USER_DIRECTORY, directory=data, host=host, sshd=sshd, key=key, address=address,
                authorized=directory / "id.pub",
            )  # fmt: skip
            # When the first process of a pid namespace ends, the kernel kills all others in it.
            unshare = ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--", "sh", "-c", script]
            process = stack.enter_context(_daemon([*inside, *unshare], log))
            waiting = [*prefix, sys.executable, "-c", _WAIT_SCRIPT, address, str(START_TIMEOUT_S)]
            if subprocess.run(waiting, check=False).returncode != 0 or process.poll() is not None:
                raise RuntimeError(f"sshd of {host} did not start: {log.read_text(errors='replace')[-500:]}")
            known.append(f"{address} {' '.join(key.with_suffix('.key.pub').read_text().split()[:2])}")
            inventory += [f"[hosts.{host}]", f'hostname = "{address}"']
        (directory / "known_hosts").write_text("\n".join(known) + "\n")
        (directory / "inventory.toml").write_text("\n".join(inventory) + "\n")
        yield prefix, directory / "inventory.toml"


_WAIT_SCRIPT = """
import socket, sys, time
end = time.monotonic() + float(sys.argv[2])
while True:
    try:
        socket.create_connection((sys.argv[1], 22), 1).close()
        break
    except OSError:
        if time.monotonic() > end:
            sys.exit(1)
        time.sleep(0.02)
"""


ROOTFS_PROGRAMS = (
    "sh", "bash", "cat", "chmod", "chown", "cp", "echo", "env", "false", "grep", "head", "hostname", "id", "kill", "ln",
    "ls", "mkdir", "mv", "ps", "rm", "sed", "sleep", "tail", "tar", "test", "touch", "tr", "true", "uname", "ip", "tc",
    "nft", "mount", "umount", "losetup", "mkfs.ext4", "fsfreeze", "setpriv", "unshare", "gzip",
    "sync", "find", "awk", "cut", "date", "dd", "df", "du", "expr", "install", "mktemp", "nice", "nohup", "readlink",
    "realpath", "rmdir", "sort", "stat", "tee", "timeout", "truncate", "wc", "xargs", "/usr/bin/python3",
)  # fmt: skip
"""Enough for an agent, a replica and faults; programs that this machine lacks are left out."""

OLDER_LIBRARIES = ("libpthread.so.0", "libdl.so.2", "librt.so.1", "libutil.so.1")
"""Separate libraries before glibc 2.34; programs built elsewhere still link to these names."""

CPP_LIBRARIES = ("libstdc++.so.6", "libgcc_s.so.1", "libm.so.6")
"""Libraries that C++ code links to: PostgreSQL's Unicode library is in C++."""


def machine_rootfs(directory: Path) -> None:
    """Make a root file system from this machine's programs, libraries and Python in `directory`.

    Takes seconds, whereas debootstrap takes a minute, and needs no network. Raises RuntimeError if this machine has no
    Python 3.11 or newer under /usr.
    """
    ask = "import sys, sysconfig; print(sys.version_info >= (3, 11), sysconfig.get_path('stdlib'))"
    asked = subprocess.run(["/usr/bin/python3", "-c", ask], capture_output=True, text=True, check=False)
    version = asked.stdout.split()
    if version[:1] != ["True"]:
        raise RuntimeError("/usr/bin/python3 is not Python 3.11 or newer (apt-get install python3)")
    for name in ("bin", "sbin", "lib", "lib64"):
        if os.path.islink(f"/{name}"):
            directory.mkdir(parents=True, exist_ok=True)
            (directory / name).symlink_to(os.readlink(f"/{name}"))
    for name in ("dev", "etc", "proc", "run", "sys", "tmp", "var/lib", "usr/local/sbin"):
        (directory / name).mkdir(parents=True, exist_ok=True)
    wanted = {found for name in ROOTFS_PROGRAMS if (found := shutil.which(name, path="/usr/sbin:/usr/bin:/sbin:/bin"))}
    libraries = [path for path in Path(version[1]).rglob("*.so")]
    for path in [*wanted, *map(str, libraries)]:
        printed = subprocess.run(["ldd", path], capture_output=True, text=True, check=False).stdout
        wanted.update(word for word in printed.split() if word.startswith("/"))
    wanted.update(link for link in ("/etc/ld.so.cache",) if os.path.exists(link))
    beside = {os.path.dirname(os.path.realpath(path)) for path in wanted if os.path.basename(path) == "libc.so.6"}
    more = [os.path.join(directory, name) for directory in beside for name in (*OLDER_LIBRARIES, *CPP_LIBRARIES)]
    wanted.update(filter(os.path.exists, more))
    for path in sorted(wanted):
        target = directory / os.path.realpath(os.path.dirname(path)).lstrip("/") / os.path.basename(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target)  # follows symbolic links, and keeps the link's name
    ignore = shutil.ignore_patterns(
        "__pycache__", "test", "tests", "idlelib", "tkinter", "lib2to3", "dist-packages", "config-*"
    )
    shutil.copytree(version[1], directory / version[1].lstrip("/"), ignore=ignore, dirs_exist_ok=True)
    # An unprivileged user besides root, for programs that refuse to run as root.
    (directory / "etc" / "passwd").write_text(
        "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/nonexistent:/bin/sh\n"
    )
    (directory / "etc" / "group").write_text("root:x:0:\nnogroup:x:65534:\n")


def _run_inside(argv: Sequence[str], environment: dict[str, str]) -> int:
    """Run the operator's command. The terminal sends it Ctrl-C directly; it is ended with this process."""
    process = subprocess.Popen(argv, env={**os.environ, **environment})
    try:
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:
                continue
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()


def main(arguments: list[str]) -> int:
    """Run a command in a laboratory; returns its exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kind", choices=("docker", "ssh", "rootfs"))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--hosts", type=int, default=5, metavar="N", help="machines of an ssh laboratory (default: 5)")
    split = arguments.index("--") if "--" in arguments else len(arguments)
    options, command_words = parser.parse_args(arguments[:split]), arguments[split + 1 :]
    if options.kind == "rootfs":
        machine_rootfs(options.directory)
        return 0
    problem = missing_for(options.kind)
    if problem is not None:
        print(f"lab: {problem}", file=sys.stderr)
        return 254
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that every `finally` runs
    directory = options.directory.resolve()
    shell = command_words or [os.environ.get("SHELL", "/bin/sh")]
    try:
        if options.kind == "docker":
            with docker_lab(directory) as (prefix, environment):
                return _run_inside([*prefix, *shell], environment)
        with ssh_lab(directory, options.hosts) as (prefix, _):
            return _run_inside([*prefix, *shell], {})
    except (RuntimeError, subprocess.CalledProcessError) as error:
        print(f"lab: {error}", file=sys.stderr)
        return 255


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
