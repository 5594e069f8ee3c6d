"""Chooses the cluster of a run: the requested one if this machine can host it, or the best one that it can."""

from __future__ import annotations

import os
from dataclasses import dataclass

from harness.clusters import user_namespace
from harness.clusters.base import ClusterUnavailable
from harness.clusters.netns_trial import why_no_namespaces

__all__ = ["AUTO", "Choice", "choose"]

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Choice:
    """A cluster by name, and why it was chosen, in one line.

    `in_user_namespace`: the harness must first re-execute itself by `user_namespace.reexec`.
    """

    name: str
    reason: str
    in_user_namespace: bool = False


def choose(requested: str) -> Choice:
    """The cluster to run on. `auto` selects netns if it is available, and local otherwise.

    Any other name is passed through for the registry to check. Raises ClusterUnavailable when netns is requested and
    not available: the message names the missing package or permission.
    """
    if requested not in (AUTO, "netns"):
        return Choice(name=requested, reason="requested")
    why_not = why_no_namespaces(in_user_namespace=os.geteuid() != 0)
    if why_not is None:
        if os.geteuid() != 0:
            return Choice("netns", "network namespaces inside a user namespace", in_user_namespace=True)
        who = "root of a user namespace" if user_namespace.inside() else "root"
        return Choice("netns", f"network namespaces, as {who}")
    if requested == AUTO:
        return Choice("local", f"no network namespaces: {why_not}")
    raise ClusterUnavailable(f"cluster netns is not available: {why_not}")
