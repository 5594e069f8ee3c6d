"""The addresses and routes that remote machines report, and conclusions from them."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest

from harness.clusters.remote_cluster import addresses_gained, addresses_of_others, sends_from_another


def shown(*addresses: str) -> str:
    """Output of `ip -json address`, with one device per address."""
    own = [{"ifname": "lo", "addr_info": [{"family": "inet6", "local": "::1", "prefixlen": 128, "scope": "host"}]}]
    return json.dumps([*own, {}, *({"ifname": "e", "addr_info": [{"local": each}]} for each in addresses)])


def test_the_addresses_of_all_other_machines_are_found_for_each_machine() -> None:
    found = addresses_of_others({"n1": shown("fe80::1", "fd00::1"), "n2": shown("fe80::2"), "n3": shown(), "n4": ""})
    assert found == {
        "n1": {"fe80::2"},
        "n2": {"fd00::1", "fe80::1"},
        "n3": {"fd00::1", "fe80::1", "fe80::2"},
        "n4": {"fd00::1", "fe80::1", "fe80::2"},
    }
    assert addresses_of_others({"n1": shown(), "n2": "[]"}) == {}


def test_an_address_that_machines_share_is_not_an_address_of_another() -> None:
    """Such as the bridge of a Docker engine on each of them."""
    found = addresses_of_others({"n1": shown("fe80::1"), "n2": shown("fe80::1", "fe80::2")})
    assert found == {"n1": {"fe80::2"}}


def test_a_gained_address_is_reported_unless_its_device_is_new() -> None:
    before = {"n1": shown("10.0.0.1", "fd00::1"), "n2": shown("10.0.0.2"), "n3": shown("10.0.0.3")}
    new = {"ifname": "docker0", "addr_info": [{"local": "172.17.0.1"}]}
    bridge = json.dumps([*json.loads(shown("10.0.0.3")), new])
    now = {"n1": shown("fd00::7", "10.0.0.1", "fd00::1"), "n2": shown(), "n3": bridge}
    assert addresses_gained(before, before) == {}
    assert addresses_gained(before, now) == {"n1": {"fd00::7"}}
    assert addresses_gained({}, before) == {}


@pytest.mark.skipif(shutil.which("ip") is None, reason="needs iproute2")
def test_the_output_of_the_real_ip_command_is_parsed() -> None:
    here = subprocess.run(["ip", "-json", "-6", "address"], check=True, capture_output=True, text=True).stdout
    others = addresses_of_others({"n1": here, "n2": ""})
    assert "n1" not in others and "::1" not in others.get("n2", ())


def test_a_machine_that_sends_from_another_address_is_detected() -> None:
    same = "10.0.0.2 dev eth0 src 10.0.0.1 uid 0 \\    cache \n"
    far = "192.0.2.7 via 10.0.0.254 dev eth0 src 10.0.0.9 uid 0 \\    cache mtu 1400 \n"
    assert sends_from_another(same, "10.0.0.1") is None
    assert sends_from_another(same + far, "10.0.0.1") == "10.0.0.9"
    assert sends_from_another("local 10.0.0.1 dev lo src 10.0.0.1 uid 0 \\    cache <local> \n", "10.0.0.2") is None
    assert sends_from_another("", "10.0.0.1") is None
