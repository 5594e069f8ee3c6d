"""Connections to machines over SSH; paramiko is imported only when it is needed. Everything here blocks."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shlex
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.clusters import host_agent
from harness.clusters.agent_link import ConnectFailure
from harness.clusters.base import ClusterUnavailable
from harness.clusters.known_hosts import append_key, load_known_hosts
from harness.clusters.ssh_inventory import ACCEPT_NEW, SshHost
from harness.errors import how_to_get
from harness.host_files import PROVISION, host_file

if TYPE_CHECKING:
    import paramiko

__all__ = [
    "ChannelStream",
    "HostNotTaken",
    "clean_host",
    "connect_relay",
    "require_paramiko",
    "take_host",
    "why_no_file_systems",
]

_CONNECT_TIMEOUT_S = 15.0
_COMMAND_TIMEOUT_S = 120.0
"""Timeout for claiming or cleaning a host; the agent's own timeouts are shorter."""
_PIECE_BYTES = 1 << 16
_MAX_SAID = 300
_TRACEBACK = "Traceback (most recent call last)"

_LAUNCHER = (
    "import sys\n"
    "if sys.version_info < (3, 11): sys.exit('python %d.%d' % sys.version_info[:2])\n"
    "s = sys.stdin.read()\n"
    "exec(compile(s, 'host_agent.py', 'exec'), {'__name__': '__main__', 'SOURCE': s})"
)
"""Runs the agent's source from standard input on a host that has no file of ours yet."""


_LOOP_TRIAL = """
PATH="$PATH:/usr/local/sbin:/usr/sbin:/sbin"
for program in mkfs.ext4 losetup mount; do
    command -v $program >/dev/null || { echo "$program is missing" >&2; exit 1; }
done
file=$(mktemp) && truncate -s 1M "$file" || exit 1
device=$(losetup --find --show "$file") && losetup --detach "$device"
status=$?
rm -f "$file"
exit $status
"""


_NOWHERE = logging.NullHandler()


class HostNotTaken(ClusterUnavailable):
    """A host could not be claimed, and certainly nothing was changed on it, so there is nothing to clean up."""


class HostUnreachable(HostNotTaken):
    """No connection could be made to a host: it does not answer, or does not let us in."""


def require_paramiko() -> None:
    """Raises ClusterUnavailable when paramiko is not installed."""
    try:
        import paramiko  # noqa: F401
    except ImportError:
        raise ClusterUnavailable(f"ssh: the Python package paramiko is missing: {how_to_get('paramiko')}") from None


def _new_client(host: SshHost) -> paramiko.SSHClient:
    """A client that trusts the host keys in the host's known_hosts file. Raises ClusterUnavailable."""
    import paramiko

    logging.getLogger("paramiko").addHandler(_NOWHERE)  # else its threads print tracebacks to the terminal
    logging.getLogger("paramiko").setLevel(logging.WARNING)
    known_hosts = os.path.expanduser(host.known_hosts)

    class Refuse(paramiko.MissingHostKeyPolicy):
        def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
            where = host.hostname if host.port == 22 else f"-p {host.port} {host.hostname}"
            raise ClusterUnavailable(
                f"{host.name}: the host key of {hostname} is not in {host.known_hosts}: verify it and add it "
                f"(ssh-keyscan {where} >> {host.known_hosts})"
            )

    class Keep(paramiko.MissingHostKeyPolicy):
        def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
            try:
                append_key(known_hosts, hostname, key)
            except OSError as error:
                raise ClusterUnavailable(_cannot_use_known_hosts(host, "written", error)) from None

    client = paramiko.SSHClient()
    client.set_missing_host_key_policy(Keep() if host.host_keys == ACCEPT_NEW else Refuse())
    try:
        load_known_hosts(client, known_hosts)
    except OSError as error:
        client.close()
        raise ClusterUnavailable(_cannot_use_known_hosts(host, "read", error)) from None
    return client


def _cannot_use_known_hosts(host: SshHost, used: str, error: OSError) -> str:
    why = error.strerror or type(error).__name__
    return f"{host.name}: known_hosts {host.known_hosts} cannot be {used} ({why}): set another in the inventory"


def _open(host: SshHost) -> paramiko.SSHClient:
    """Open an authenticated connection. Raises ClusterUnavailable for permanent failures, ConnectFailure for others."""
    import paramiko

    client = _new_client(host)
    try:
        client.connect(
            host.hostname,
            port=host.port,
            username=host.user,
            key_filename=None if host.identity_file is None else os.path.expanduser(host.identity_file),
            look_for_keys=host.identity_file is None,
            allow_agent=host.identity_file is None,
            timeout=_CONNECT_TIMEOUT_S,
            banner_timeout=_CONNECT_TIMEOUT_S,
            auth_timeout=_CONNECT_TIMEOUT_S,
        )
    except paramiko.BadHostKeyException:
        client.close()
        raise ClusterUnavailable(
            f"{host.name}: the host key of {host.hostname} has changed: if that is right, remove the old one "
            f"(ssh-keygen -f {host.known_hosts} -R {_known_name(host)})"
        ) from None
    except paramiko.PasswordRequiredException:
        client.close()
        raise ClusterUnavailable(
            f"{host.name}: {host.identity_file or 'the default key'} has a passphrase: give it to an SSH agent "
            "(ssh-add) and leave identity_file out, or use a key without one"
        ) from None
    except paramiko.AuthenticationException as error:
        client.close()
        key = host.identity_file or "the SSH agent's or the default keys"
        raise ClusterUnavailable(
            f"{host.name}: cannot log in to {host.hostname} as {host.user} with {key} ({error}): add the public key "
            "to the user's authorized_keys, or set another user or identity_file"
        ) from None
    except ClusterUnavailable:
        client.close()
        raise
    except (paramiko.SSHException, OSError, EOFError) as error:
        client.close()
        if "private key file" in str(error):
            raise ClusterUnavailable(
                f"{host.name}: {host.identity_file} is not a private key ({error}): set another identity_file"
            ) from None
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error) or type(error).__name__
        raise ConnectFailure(f"{host.name}: cannot connect to {host.hostname}:{host.port} ({why})") from None
    return client


def _known_name(host: SshHost) -> str:
    return host.hostname if host.port == 22 else f"'[{host.hostname}]:{host.port}'"


def _as_root(host: SshHost, argv: list[str]) -> str:
    return shlex.join([*(["sudo", "-n", "--"] if host.uses_sudo else []), *argv])


class ChannelStream:
    """Input and output of a command on a host. See harness.clusters.agent_link.ByteStream."""

    def __init__(self, client: paramiko.SSHClient, command: str) -> None:
        self._client = client
        transport = client.get_transport()
        if transport is None:
            raise EOFError("the connection has ended")
        self._channel = transport.open_session(timeout=_CONNECT_TIMEOUT_S)
        self._channel.exec_command(command)

    def receive(self) -> bytes:
        """Some bytes of standard output; empty at the end."""
        return bytes(self._channel.recv(_PIECE_BYTES))

    def send(self, data: bytes) -> None:
        """Send all of `data` to standard input. Raises OSError."""
        try:
            self._channel.sendall(data)
        except EOFError:
            raise BrokenPipeError("the connection has ended") from None

    def close(self) -> None:
        """End the connection."""
        with contextlib.suppress(OSError, EOFError):  # it may be ending on its own at this moment
            self._channel.close()
        with contextlib.suppress(OSError, EOFError):
            self._client.close()


def connect_relay(host: SshHost, directory: str) -> ChannelStream:
    """A connection to the agent in `directory` of a host. Raises ConnectFailure."""
    try:
        client = _open(host)
    except ClusterUnavailable as error:
        raise ConnectFailure(str(error)) from None
    try:
        return ChannelStream(client, _as_root(host, [host.python, f"{directory}/agent.py", "relay", directory]))
    except Exception as error:
        client.close()
        raise ConnectFailure(f"{host.name}: {error}") from None


def take_host(host: SshHost, run_id: str) -> None:
    """Claim a host for a run and start the agent there. Raises ClusterUnavailable, HostNotTaken."""
    answer = _agent_command(host, ["start", host.directory, run_id])
    if "refused" in answer:
        raise (HostNotTaken if answer.get("taken") else ClusterUnavailable)(f"{host.name}: {answer['refused']}")


def clean_host(host: SshHost, run_id: str, keep: Collection[str] = ()) -> tuple[list[str], list[str]]:
    """Remove everything of a run from a host, except the files of the hosts in `keep`, which are moved to another
    directory (host_agent.KEPT); returns (what was removed, what is left and why). Raises ClusterUnavailable, including
    HostUnreachable."""
    answer = _agent_command(host, ["clean", host.directory, run_id, *keep])
    return list(answer["removed"]), list(answer["left"])


def _agent_command(host: SshHost, arguments: list[str]) -> dict[str, Any]:
    """Run the agent's source as root on a host and return the JSON that it prints.

    Raises HostNotTaken when it was certainly not run, ClusterUnavailable for anything else.
    """
    source = Path(host_agent.__file__).read_text(encoding="utf-8")
    status, output, said = _run_as_root(host, [host.python, "-c", _LAUNCHER, *arguments], source)
    lines = output.strip().splitlines()
    if status == 0 and lines:
        try:
            return dict(json.loads(lines[-1]))
        except ValueError:
            said = lines[-1]
    last = said.splitlines()[-1][:_MAX_SAID] if said else "no output"
    known = _why_not(host, status, said, last)
    if known is not None:
        raise HostNotTaken(known)
    raise ClusterUnavailable(f"{host.name}: the agent could not be started (status {status}): {last}")


def _run_as_root(host: SshHost, argv: list[str], text: str) -> tuple[int, str, str]:
    """Run a command with `text` as its input; (status, output, errors). Raises HostUnreachable, or ClusterUnavailable
    when the connection breaks."""
    try:
        client = _open(host)
    except ConnectFailure as error:
        raise HostUnreachable(f"{error}: is it up, and is this the right address and port?") from None
    except ClusterUnavailable as error:
        raise HostUnreachable(str(error)) from None
    try:
        stdin, stdout, stderr = client.exec_command(_as_root(host, argv), timeout=_COMMAND_TIMEOUT_S)
        with contextlib.suppress(OSError):  # the command ended without reading; its error output says why
            stdin.write(text)
            stdin.flush()
        stdin.channel.shutdown_write()
        output = stdout.read().decode(errors="replace")
        said = stderr.read().decode(errors="replace").strip()
        return stdout.channel.recv_exit_status(), output, said
    except (OSError, EOFError) as error:
        raise ClusterUnavailable(f"{host.name}: the connection was lost: {error or type(error).__name__}") from None
    except Exception as error:  # paramiko raises several types of its own
        raise ClusterUnavailable(f"{host.name}: {error}") from None
    finally:
        client.close()


def why_no_file_systems(hosts: Sequence[SshHost]) -> str | None:
    """Why one of these hosts cannot have a file system of a run's own, in one line that names the fix; None when all
    can, as far as they answer: a host that cannot be reached is reported when it is claimed.

    Tried by attaching a small file to a loop device there, and detaching it.
    """

    def why_not(host: SshHost) -> str | None:
        try:
            status, _, said = _run_as_root(host, ["sh", "-s"], _LOOP_TRIAL)
        except ClusterUnavailable:
            return None
        if status == 0:
            return None
        last = said.splitlines()[-1][:_MAX_SAID] if said else f"status {status}"
        return (
            f"{host.name}: a file system per host needs loop devices and e2fsprogs there ({last}): run modprobe loop "
            f"as root, or {host_file(PROVISION)} to install what is missing"
        )

    with ThreadPoolExecutor(max_workers=max(1, len(hosts))) as pool:
        return next((problem for problem in pool.map(why_not, hosts) if problem is not None), None)


def _why_not(host: SshHost, status: int, said: str, last: str) -> str | None:
    """Why the agent could not run at all, and the fix, judged by the error output `said` and its `last` line; None if
    it may have run: a traceback is its own, whatever the last line looks like."""
    if _TRACEBACK in said:
        return None
    if "sudo:" in said and "python" not in last:
        return (
            f"{host.name}: user {host.user} cannot use sudo without a password ({last}): "
            f"run {host_file(PROVISION)} --sudo {host.user} there"
        )
    if status == 127 or "not found" in last or "No such file" in last:
        return (
            f"{host.name}: there is no {host.python} ({last}): run {host_file(PROVISION)} there "
            "(apt-get install python3)"
        )
    if last.startswith("python "):
        return f"{host.name} has {last}: 3.11 or newer is needed; set another with python = in the inventory"
    if "Permission denied" in last:
        return f"{host.name}: user {host.user} is not root and does not use sudo ({last}): set sudo = true"
    return None
