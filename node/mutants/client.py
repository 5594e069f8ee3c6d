"""Puts a mutant into a client. Separate from `switch.py`, because a program with clients need not import a broker."""

from __future__ import annotations

from typing import Any

from node.client import BrokerClient
from node.client.errors import ClientError
from node.client.results import SendResult
from node.mutants.catalogue import check_mutant
from node.mutants.parts import replace

__all__ = ["mutate_client"]


def mutate_client(name: str, client: BrokerClient) -> None:
    """Put the mutant `name` into a client. Does nothing for "none" and for mutants of nodes."""
    if check_mutant(name) == "indefinite-as-definite":

        async def send(self: BrokerClient, *arguments: Any, **options: Any) -> SendResult:
            try:
                return await BrokerClient.send(self, *arguments, **options)
            except ClientError as error:
                if isinstance(self, mutated):  # and was not restored since the message was sent
                    error.is_definite = True
                raise

        replace(client, send=send)
        mutated = type(client)
