"""What killed runs left in Docker engines and on machines behind SSH, and how it is removed.

Each function takes the run's id, the claim's identity and its details, returns whether something was there, and raises
CannotRemove, one line, when it could not be removed or cannot be recognised as ours; the claim then stays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from harness.errors import OperatorError
from harness.run_state import KIND_CONTAINER, KIND_NETWORK, KIND_SSH_HOST

__all__ = ["REMOTE_REMOVERS", "CannotRemove"]


class CannotRemove(Exception):
    """Something of a run is there and was not removed; the message is one line."""


def _remove_container(run_id: str, name: str, details: Mapping[str, Any]) -> bool:
    return _at_engine(details, lambda engine: bool(engine.remove_container(name, run_id)))


def _remove_network(run_id: str, name: str, details: Mapping[str, Any]) -> bool:
    return _at_engine(details, lambda engine: bool(engine.remove_network(name, run_id)))


def _at_engine(details: Mapping[str, Any], remove: Callable[[Any], bool]) -> bool:
    from harness.clusters.docker_engine import DockerEngine

    try:
        engine = DockerEngine(details.get("engine"))
        try:
            return remove(engine)
        finally:
            engine.close()
    except OperatorError as error:
        raise CannotRemove(str(error)) from None


def _release_ssh_host(run_id: str, name: str, details: Mapping[str, Any]) -> bool:
    from harness.clusters.ssh_connection import clean_host, require_paramiko
    from harness.clusters.ssh_inventory import SshHost

    try:
        require_paramiko()
        removed, left = clean_host(SshHost(**details["host"]), run_id)
    except (OperatorError, TypeError, KeyError) as error:
        raise CannotRemove(str(error)) from None
    if left:
        raise CannotRemove("; ".join(left))
    return bool(removed)


REMOTE_REMOVERS: Mapping[str, Callable[[str, str, Mapping[str, Any]], bool]] = {
    KIND_CONTAINER: _remove_container,
    KIND_NETWORK: _remove_network,
    KIND_SSH_HOST: _release_ssh_host,
}
"""By kind of claim, in the order in which things hold each other."""
