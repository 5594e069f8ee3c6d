"""The `vagrant` cluster: the `ssh` cluster on the machines that `vagrant up` has made.

They are reached as `vagrant ssh-config` prints in the current directory; they know each other by their addresses on the
private network of the Vagrantfile ($SPLITBRAIN_SUBNET, as there).
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Unpack

from harness.clusters.agent_cluster import ClusterArguments
from harness.clusters.base import ClusterUnavailable
from harness.clusters.options import MECHANISM_OPTION
from harness.clusters.ssh import SshCluster
from harness.clusters.ssh_connection import require_paramiko
from harness.clusters.ssh_inventory import ACCEPT_NEW, REAL_CLOCK, SshHost, parse_ssh_config
from harness.host_files import host_file
from harness.pages import page
from harness.programs import find_program

__all__ = ["DEFAULT_SUBNET", "SUBNET_VARIABLE", "VagrantCluster", "vagrant_hosts"]

SUBNET_VARIABLE = "SPLITBRAIN_SUBNET"
DEFAULT_SUBNET = "192.168.56"
"""The first three numbers of the machines' addresses; VirtualBox allows host-only networks in this range by default."""

_TIMEOUT_S = 120.0
"""Timeout of `vagrant ssh-config`, which starts a Ruby and may query the provider for each machine."""


class VagrantCluster(SshCluster):
    """Hosts as virtual machines of the Vagrantfile in the current directory. See SshCluster."""

    name = "vagrant"
    description = "the virtual machines of `vagrant up`, reached over SSH as `vagrant ssh-config` says"
    options: Sequence[str] = (MECHANISM_OPTION,)

    def __init__(self, **given: Unpack[ClusterArguments]) -> None:
        """Raises ClusterUnavailable when Vagrant is missing or its machines are not up."""
        super().__init__(inventory=vagrant_hosts(), **given)

    @classmethod
    def require(cls, *, inventory: str | None = None) -> None:
        """Raise ClusterUnavailable when paramiko or Vagrant is missing; `inventory` is ignored."""
        require_paramiko()
        _vagrant()

    @classmethod
    def configured(cls, *, inventory: str | None = None, extra_hosts: Sequence[str] = ()) -> type[VagrantCluster]:
        """The class for the machines that are up, on which to call `missing`."""
        return cls._asking(vagrant_hosts, extra_hosts)


def _vagrant() -> str:
    path = find_program("vagrant")
    if path is None:
        raise ClusterUnavailable(f"vagrant is not installed (apt-get install vagrant; see {page('hosts.md')})")
    return path


def vagrant_hosts() -> list[SshHost]:
    """The running machines as hosts, in the Vagrantfile's order. Raises ClusterUnavailable.

    Vagrant generates the machines and their host keys, but does not report the keys. So the first key that is seen is
    stored with the machine's other data, and any other is rejected until the machine is destroyed.
    """
    argv = [_vagrant(), "ssh-config"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_TIMEOUT_S, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        raise ClusterUnavailable(f"`vagrant ssh-config` did not answer within {_TIMEOUT_S:g} s") from None
    # It also fails if only some machines are up; by then it has printed those before the first that is not.
    if done.returncode != 0 and not done.stdout.strip():
        said = " ".join((done.stderr.strip() or "no output").split())[:200]
        raise ClusterUnavailable(f"vagrant's machines are not up ({said}): {_how_to_start()}")
    subnet = os.environ.get(SUBNET_VARIABLE, DEFAULT_SUBNET)
    return [
        dataclasses.replace(
            host,
            host_keys=ACCEPT_NEW,
            clock=REAL_CLOCK,
            known_hosts=os.path.abspath(_known_hosts_path(host)),
            network=f"{subnet}.0/24",
        )
        for host in parse_ssh_config(done.stdout)
    ]


def _how_to_start() -> str:
    """How to start machines: Vagrant looks for its file here and in the directories above."""
    here = Path(os.environ.get("VAGRANT_CWD") or os.getcwd()).absolute()
    if any((place / "Vagrantfile").is_file() for place in (here, *here.parents)):
        return "run `vagrant up`"
    return f"run `cp -r {host_file('Vagrantfile')} {host_file('scripts')} . && vagrant up`"


def _known_hosts_path(host: SshHost) -> str:
    """A file in the machine's data directory, which `vagrant destroy` empties; it is named after the provider's id."""
    data = os.environ.get("VAGRANT_DOTFILE_PATH", ".vagrant")
    machine = os.path.join(data, "machines", host.name)
    providers = sorted(entry.path for entry in os.scandir(machine) if entry.is_dir()) if os.path.isdir(machine) else []
    made = [path for path in providers if os.path.exists(os.path.join(path, "id"))]
    if not made:
        return os.path.join(data, f"known_hosts-{host.name}")
    with open(os.path.join(made[0], "id"), encoding="utf-8") as file:
        ident = file.read().strip()
    return os.path.join(made[0], f"known_hosts-{ident[:64]}")
