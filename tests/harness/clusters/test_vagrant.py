"""The vagrant cluster's view of Vagrant, the Vagrantfile, and the script that provisions its machines."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from harness import programs
from harness.clusters.base import ClusterUnavailable
from harness.clusters.ssh_inventory import ACCEPT_NEW
from harness.clusters.vagrant import VagrantCluster, vagrant_hosts
from harness.run_state import RunState

ROOT = Path(__file__).resolve().parents[3]

SSH_CONFIG = """
Host n1
  HostName 127.0.0.1
  User vagrant
  Port 2222
  UserKnownHostsFile /dev/null
  StrictHostKeyChecking no
  IdentityFile {directory}/key

Host n2
  HostName 127.0.0.1
  User vagrant
  Port 2200
  UserKnownHostsFile /dev/null
  StrictHostKeyChecking no
  IdentityFile {directory}/key
"""


def fake_vagrant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """A `vagrant` that answers as the script says, in a directory of machines."""
    (tmp_path / "bin").mkdir(exist_ok=True)
    program = tmp_path / "bin" / "vagrant"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    (tmp_path / "key").touch()
    (tmp_path / "config").write_text(SSH_CONFIG.format(directory=tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("VAGRANT_DOTFILE_PATH", raising=False)


def test_the_machines_are_those_that_vagrant_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_vagrant(tmp_path, monkeypatch, f'[ "$1" = ssh-config ] && cat {tmp_path}/config')
    machine = tmp_path / ".vagrant" / "machines" / "n1" / "libvirt"
    machine.mkdir(parents=True)
    (machine / "id").write_text("1234-5678")
    (tmp_path / ".vagrant" / "machines" / "n1" / "virtualbox").mkdir()
    monkeypatch.setenv("SPLITBRAIN_SUBNET", "10.9.8")
    first, second = vagrant_hosts()
    assert (first.name, first.hostname, first.port, first.user, first.uses_sudo) == (
        "n1",
        "127.0.0.1",
        2222,
        "vagrant",
        True,
    )
    assert (first.host_keys, first.network) == (ACCEPT_NEW, "10.9.8.0/24")
    assert first.known_hosts == str(machine / "known_hosts-1234-5678")
    assert second.known_hosts == str(tmp_path / ".vagrant" / "known_hosts-n2")
    run = RunState.create(f"tv{os.getpid()}", state_root=str(tmp_path / "state"))
    cluster = VagrantCluster(node_count=2, run=run, work_dir=str(tmp_path / "work"), ports=[1])
    assert cluster.hosts == ("n1", "n2")
    assert run.close()


def test_machines_that_are_not_up_are_reported_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_vagrant(tmp_path, monkeypatch, "printf 'The provider for this machine\\nis not ready\\n' >&2; exit 1")
    ready = r"not up \(The provider for this machine is not ready\): "
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ClusterUnavailable, match=ready + "run `cp -r .*/Vagrantfile .*/scripts . && vagrant up`$"):
        vagrant_hosts()
    (tmp_path / "Vagrantfile").touch()
    with pytest.raises(ClusterUnavailable, match=ready + "run `vagrant up`$"):
        vagrant_hosts()
    fake_vagrant(tmp_path, monkeypatch, f"head -n 9 {tmp_path}/config; exit 1")
    assert [host.name for host in vagrant_hosts()] == ["n1"]


def test_a_missing_vagrant_is_reported_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "SYSTEM_PATH", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ClusterUnavailable, match="apt-get install vagrant"):
        VagrantCluster.require()


def vagrant(tmp_path: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    argv = ["vagrant", "validate", "--ignore-provider"]
    environment = {
        **os.environ,
        "VAGRANT_HOME": str(tmp_path),
        "VAGRANT_DOTFILE_PATH": str(tmp_path / "dot"),
        **variables,
    }
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, env=environment)


@pytest.mark.skipif(shutil.which("vagrant") is None, reason="vagrant is not installed")
def test_the_vagrantfile_is_valid_and_refuses_bad_numbers(tmp_path: Path) -> None:
    good = vagrant(tmp_path, SPLITBRAIN_NODES="3")
    assert good.returncode == 0, good.stderr
    assert "Vagrantfile validated successfully" in good.stdout
    bad = vagrant(tmp_path, SPLITBRAIN_NODES="many")
    assert bad.returncode != 0
    assert 'SPLITBRAIN_NODES must be a whole number from 1 to 15, not "many"' in bad.stderr


def provision(*arguments: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": path} if path else None
    argv = ["/bin/sh", str(ROOT / "scripts" / "provision.sh"), *arguments]
    return subprocess.run(argv, capture_output=True, text=True, env=environment)


def test_the_provisioning_script_refuses_unknown_options() -> None:
    for arguments, said in (
        (["--sodu", "x"], "unknown option --sodu; known: --sudo USER, --own-clock"),
        (["--sudo"], "--sudo needs a user's name"),
    ):
        refused = provision(*arguments)
        assert refused.returncode == 1
        assert refused.stderr == f"provision: {said}\n"
    if os.geteuid() != 0:
        assert "must run as root" in provision().stderr


@pytest.mark.root
@pytest.mark.skipif(
    os.geteuid() != 0
    or any(shutil.which(program) is None for program in ("nft", "ip", "tc", "ps", "mkfs.ext4", "fsfreeze", "losetup")),
    reason="needs root and a host that has all packages",
)
def test_provisioning_a_complete_host_prints_nothing() -> None:
    done = provision()
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
