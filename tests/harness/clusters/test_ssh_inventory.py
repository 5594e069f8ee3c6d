"""Inventories of machines: parsing, and the errors of bad ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.clusters.ssh import _assign
from harness.clusters.ssh_inventory import ACCEPT_NEW, STRICT, SshHost, load_inventory, parse_ssh_config, parse_toml
from harness.errors import OperatorError

GOOD = """
[defaults]
user = "admin"
network = "10.0.0.0/24"

[hosts.web]
hostname = "192.0.2.11"

[hosts.n2]
hostname = "gateway.example"
port = 2202
user = "root"
address = "10.0.0.12"
sudo = false
"""

VAGRANT = """
Host n1
  HostName 127.0.0.1
  User vagrant
  Port 2222
  UserKnownHostsFile /dev/null
  StrictHostKeyChecking no
  PasswordAuthentication no
  IdentityFile {key}
  IdentitiesOnly yes

Host n2 n3
  HostName=192.0.2.2   # a comment

Host *.example
  User nobody
"""


def test_a_toml_inventory_is_read_with_its_defaults() -> None:
    web, second = parse_toml(GOOD)
    assert (web.name, web.hostname, web.port, web.user, web.uses_sudo) == ("web", "192.0.2.11", 22, "admin", True)
    assert (web.network, web.address, web.host_keys) == ("10.0.0.0/24", None, STRICT)
    assert (second.user, second.port, second.address, second.uses_sudo) == ("root", 2202, "10.0.0.12", False)
    assert SshHost(**second.to_json()) == second


def test_an_openssh_configuration_is_read_as_an_inventory(tmp_path: Path) -> None:
    key = tmp_path / "a key"
    key.touch()
    first, second, third = parse_ssh_config(VAGRANT.format(key=f'"{key}"'))
    assert (first.name, first.hostname, first.port, first.user) == ("n1", "127.0.0.1", 2222, "vagrant")
    assert (first.host_keys, first.identity_file, first.known_hosts) == (ACCEPT_NEW, str(key), "~/.ssh/known_hosts")
    assert (second.hostname, third.hostname, third.host_keys, third.port) == ("192.0.2.2", "192.0.2.2", STRICT, 22)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[hosts.n1]\nhostnmae = 'x'", r"hosts\.n1: unknown key 'hostnmae' \(did you mean hostname\?\)"),
        ("[hosts.n1]\nhostnmae = 'x'", r"hosts\.n1 has no hostname"),
        ("[defautls]\n[hosts.n1]\nhostname = 'x'", r"unknown table or key 'defautls' \(did you mean defaults\?\)"),
        ("[hosts.n1]\nhostname = 'x'\nport = '22'", r"hosts\.n1: port must be a whole number, not '22'"),
        ("[hosts.n1]\nhostname = 'x'\nport = true", r"port must be a whole number, not True"),
        ("[hosts.n1]\nhostname = 'x'\nport = 70000", r"host n1: port must be 1 to 65535, not 70000"),
        ("[hosts.n1]\nhostname = 'x'\naddress = 'n1.local'", r"address must be an IPv4 address, not 'n1\.local'"),
        ("[hosts.n1]\nhostname = 'x'\nnetwork = '10.0.0.1/24'", r"network must look like 10\.0\.0\.0/24"),
        ("[hosts.n1]\nhostname = 'x'\nhost_keys = 'no'", r"host_keys must be strict or accept-new, not 'no'"),
        ("[hosts.n1]\nhostname = 'x'\nidentity_file = '/no/key'", r"identity_file /no/key does not exist"),
        ("[hosts.n1]\nhostname = 'x'\ndirectory = 'runs'", r"directory must begin with /"),
        ("hosts = 3", r"\[defaults\] and \[hosts\.NAME\] must be tables"),
        ("[hosts]\nn1 = 'x'", r"hosts\.n1 is not a table"),
        ("", r"it lists no hosts"),
        ("[hosts.n1", r"at end of document|line 1"),
        ("x = " + "[" * 100_000, r"not TOML: maximum recursion depth"),
        ("x = " + "9" * 5000, r"not TOML: Exceeds the limit"),
        ("#" * (2 << 20), r"it is longer than"),
    ],
)
def test_a_bad_inventory_is_refused_in_one_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "hosts.toml"
    path.write_text(text)
    with pytest.raises(OperatorError, match=said) as caught:
        load_inventory(str(path))
    assert str(caught.value).startswith(f"inventory {path}: ")
    assert "\n" not in str(caught.value)


def test_files_that_are_not_inventories_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match="No such file"):
        load_inventory(str(tmp_path / "none.toml"))
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(OperatorError, match="not UTF-8 text"):
        load_inventory(str(tmp_path / "binary.toml"))
    (tmp_path / "toml-by-another-name").write_text(GOOD)
    with pytest.raises(OperatorError, match=r"must be named \*\.toml"):
        load_inventory(str(tmp_path / "toml-by-another-name"))


@given(st.text(max_size=200))
def test_any_text_is_read_or_refused_in_one_line(text: str) -> None:
    for parse in (parse_toml, parse_ssh_config):
        try:
            hosts = parse(text)
        except OperatorError as error:
            assert re.search(r"[\r\n]", str(error)) is None
        else:
            assert hosts


def test_an_extra_host_gets_its_named_machine_or_a_spare_one_or_shares_one() -> None:
    hosts = [SshHost(name=name, hostname=name) for name in ("a", "b", "c")]
    machines, machine_of = _assign(["n1", "n2"], ["ns1"], hosts)
    assert [machines[host].name for host in ("n1", "n2", "ns1")] == ["a", "b", "c"] and machine_of["ns1"] == "ns1"
    machines, machine_of = _assign(["n1", "n2", "n3"], ["ns1"], hosts)
    assert sorted(machines) == ["n1", "n2", "n3"] and machine_of["ns1"] == "n1"
    own = SshHost(name="ns1", hostname="d")
    machines, machine_of = _assign(["n1", "n2"], ["ns1"], [own, *hosts])
    assert (machines["n1"].name, machine_of["ns1"], machines["ns1"].name) == ("a", "ns1", "ns1")
    machines, machine_of = _assign(["n1", "n2"], ["ns1", "ns2"], [own, *hosts])
    assert (machines["ns1"].name, machines["ns2"].name) == ("ns1", "c")
    machines, machine_of = _assign(["n1", "n2"], [], [own, *hosts])
    assert [machines[host].name for host in ("n1", "n2")] == ["ns1", "a"] and sorted(machine_of) == ["n1", "n2"]
    for extra_hosts, available in ((["ns1"], [own, *hosts]), (["ns1"], [own])):
        with pytest.raises(OperatorError, match=rf"--nodes 4: the inventory has only {len(available) - 1} hosts"):
            _assign(["n1", "n2", "n3", "n4"], extra_hosts, available)
