"""Checks that hosts of a run do not reach each other over IPv6, which would bypass the cuts."""

from __future__ import annotations

import random
import re
from types import SimpleNamespace
from typing import Any

from nemesis.partition import PARTITION
from nemesis.protocol import Proof

__all__ = ["expect_ipv6_is_closed"]

PORT = 7999

SEND_TO_ALL = """
import socket, sys, time
with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as sender:
    device = socket.if_nametoindex("eth0")
    deadline = time.monotonic() + 20
    while True:
        try:
            sender.sendto(b"x" * 52, ("ff02::1", int(sys.argv[1]), 0, device))
            break
        except OSError:  # its address is still tentative
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
"""
"""Sends to all neighbours by IPv6 multicast, which requires no neighbour discovery."""


async def expect_ipv6_is_closed(cluster: Any) -> None:
    """On three hosts: IPv6 multicast from n1 disproves a cut only once the rule that drops it is removed."""
    target: Any = SimpleNamespace(hosts=cluster.hosts, network=cluster.network)
    planned = await PARTITION.plan(target, random.Random(0), fault_id="f1", variant="n1|n2+n3")

    async def nft(*arguments: str) -> str:
        status, output, errors = await cluster.run("n2", ["nft", *arguments])
        assert status == 0, errors
        return str(output)

    async def proofs() -> tuple[Proof, Proof]:
        """The proofs of a cut that is in force when n1 sends."""
        await PARTITION.inject(target, planned)
        assert await cluster.run("n1", [cluster.python("n1"), "-c", SEND_TO_ALL, str(PORT)]) == (0, "", "")
        proof, met = await PARTITION.prove(target, planned), await PARTITION.prove_met(target, planned)
        await PARTITION.heal(target, planned)
        return proof, met

    for proof in await proofs():
        assert proof.proven, proof
    rules = (await nft("-a", "list", "chain", "inet", "splitbrain", "input")).splitlines()
    [rule] = [line for line in rules if re.search(r"(ipv6|ip6 saddr .*) counter", line)]
    assert re.search(r"counter packets [1-9]", rule), rule
    await nft("delete", "rule", "inet", "splitbrain", "input", "handle", rule.split()[-1])
    for proof in await proofs():
        assert not proof.proven, proof
        assert re.fullmatch(r"\d+ bytes from other hosts reached n2 over IPv6, .*", proof.failed[0])
