"""Looks up a workload by name, for a system and settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness import registry
from harness.errors import OperatorError
from harness.test import WORKLOAD_PREFIX, split_settings
from harness.workloads.base import CLIENT, AlsoByCapability, ByCapability, OffersClients, Workload
from harness.workloads.capability import missing_capabilities

__all__ = ["client_workload", "make_workload", "require_capabilities"]


def make_workload(name: str, *, system_class: Any, system: str, settings: Mapping[str, str]) -> Workload:
    """The named workload in the variant for the system, created with the workload's part of the test's settings.

    Raises OperatorError for an unknown name, a workload that the system does not support, and invalid settings.
    """
    found = registry.load("workloads", name)
    offers = system_class.offers
    if found.requires not in offers and CLIENT in offers and isinstance(found, AlsoByCapability):
        found = found.by_capability
    if found.requires not in offers:
        needed = "a client of harness.sdk" if found.requires == CLIENT else f"{found.requires!r} connections"
        raise OperatorError(f"workload {name} needs {needed}, which system {system} does not offer")
    given = split_settings(settings)[1]
    if isinstance(found, ByCapability):
        return found(given)  # type: ignore[operator, no-any-return]
    if given:
        names = ", ".join(f"{WORKLOAD_PREFIX}{setting}" for setting in given)
        raise OperatorError(f"--set {names}: workload {name} has no settings with system {system}")
    return found()  # type: ignore[no-any-return]


def client_workload(name: str) -> Workload:
    """The named workload in its variant for clients of `harness.sdk`, with default settings. Raises OperatorError."""
    found = registry.load("workloads", name)
    form = found.by_capability if isinstance(found, AlsoByCapability) else found
    if not isinstance(form, ByCapability):
        raise OperatorError(
            f"workload {name} is not for clients of harness.sdk: it needs {found.requires!r} connections"
        )
    return form({})  # type: ignore[operator, no-any-return]


def require_capabilities(workload: Workload, system_class: Any) -> None:
    """Raises OperatorError if the clients of a system lack methods that a workload needs."""
    if isinstance(workload, ByCapability) and isinstance(system_class, OffersClients):
        lacking = missing_capabilities(workload, system_class.client_class)
        if lacking is not None:
            raise OperatorError(lacking)
