"""Removes what killed runs left in Docker engines and on machines behind SSH.

Each function takes the run's id, the claim's identity and its details, returns whether something was there, and raises
CannotRemove, with one line, when it could not be removed or cannot be recognised as ours; the claim then stays.
Unreachable means that the host could not even be asked (no connection, or no agent can be run there any more): the
operator may know that it is gone permanently, and drop the claim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from harness.errors import OperatorError
from harness.run_state import KIND_CONTAINER, KIND_NETWORK, KIND_SSH_HOST

__all__ = ["REMOTE_REMOVERS", "CannotRemove", "Unreachable"]


class CannotRemove(Exception):
    """Something of a run exists and was not removed; the message is one line."""


class Unreachable(CannotRemove):
    """The engine or machine that has it does not answer, or cannot run our agent any more; `may_be_left` says in a few
    words what may still be there."""

    def __init__(self, message: str, may_be_left: str) -> None:
        super().__init__(message)
        self.may_be_left = may_be_left


def _remove_container(run_id: str, name: str, details: Mapping[str, Any]) -> bool:
    return _at_engine(details, lambda engine: bool(engine.remove_container(name, run_id)))


def _remove_network(run_id: str, name: str, details: Mapping[str, Any]) -> bool:
    return _at_engine(details, lambda engine: bool(engine.remove_network(name, run_id)))


def _at_engine(details: Mapping[str, Any], remove: Callable[[Any], bool]) -> bool:
    from harness.clusters.docker_engine import DockerEngine, EngineUnreachable

    try:
        engine = DockerEngine(details.get("engine"))
    except EngineUnreachable as error:
        raise Unreachable(str(error), "it may still exist there, with any faults that were in force") from None
    except OperatorError as error:
        raise CannotRemove(str(error)) from None
    try:
        return remove(engine)
    except OperatorError as error:
        raise CannotRemove(str(error)) from None
    finally:
        engine.close()


def _release_ssh_host(run_id: str, name: str, details: Mapping[str, Any]) -> bool:
    from harness.clusters.base import ClusterUnavailable
    from harness.clusters.ssh_connection import clean_host, require_paramiko
    from harness.clusters.ssh_inventory import SshHost

    try:
        require_paramiko()
        host = SshHost(**details["host"])
    except (OperatorError, TypeError, KeyError) as error:
        raise CannotRemove(str(error)) from None
    try:
        removed, left = clean_host(host, run_id)
    except ClusterUnavailable as error:  # it does not let us in, or cannot run our agent any more
        raise Unreachable(
            str(error),
            f"{host.user}@{host.hostname}:{host.port} may still have the run's processes, its faults (rules of "
            f"nftables and tc, a skewed clock, mounts) and its files below {host.directory}",
        ) from None
    if left:
        raise CannotRemove("; ".join(left))
    return bool(removed)


REMOTE_REMOVERS: Mapping[str, Callable[[str, str, Mapping[str, Any]], bool]] = {
    KIND_CONTAINER: _remove_container,
    KIND_NETWORK: _remove_network,
    KIND_SSH_HOST: _release_ssh_host,
}
"""Kind of claim -> its remover, in the order of removal: containers hold their network."""
