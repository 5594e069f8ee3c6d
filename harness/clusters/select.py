"""Which cluster a run gets: the one that was asked for if this machine can host it, or the best one it can."""

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
    """The cluster to run on. `auto` takes netns where it can be had, and local otherwise.

    Any other name is taken as it is; the registry judges it. Raises ClusterUnavailable when netns is asked for and
    cannot be had: the message names the package or permission that mends it.
    """
    if requested not in (AUTO, "netns"):
        return Choice(name=requested, reason="asked for")
    why_not = why_no_namespaces(in_user_namespace=os.geteuid() != 0)
    if why_not is None:
        if os.geteuid() != 0:
            return Choice("netns", "network namespaces inside a user namespace", in_user_namespace=True)
        who = "root of a user namespace" if user_namespace.inside() else "root"
        return Choice("netns", f"network namespaces, as {who}")
    if requested == AUTO:
        return Choice("local", f"no network namespaces: {why_not}")
    raise ClusterUnavailable(f"cluster netns cannot be had: {why_not}")
