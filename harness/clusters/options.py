"""Options of clusters beside the number of nodes, and whether a cluster can be had with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness.clusters.abilities import Configured, JudgesOptions, TakesOptions
from harness.clusters.base import ClusterUnavailable
from harness.errors import OperatorError

__all__ = ["MECHANISM_OPTION", "require_cluster"]

MECHANISM_OPTION = "mechanism"
"""By which mechanism programs meet faults: an option of all clusters whose hosts are real, and the business of none of
their classes."""


def require_cluster(cluster_class: Any, options: Mapping[str, str], *, extra_hosts: Sequence[str] = ()) -> Any:
    """See, before anything is made, that a class of clusters takes these options and can be had with them; returns the
    class to be asked what such clusters miss. `extra_hosts` are those that the system has beside its replicas'.

    A class that is no TakesOptions takes none; one that is neither JudgesOptions nor Configured finds out when it is
    started. Raises OperatorError.
    """
    known = cluster_class.options if isinstance(cluster_class, TakesOptions) else ()
    for name in options:
        if name not in known:
            takes = ", ".join(f"--{option}" for option in known) or "no such options"
            raise OperatorError(f"--{name}: cluster {cluster_class.name} takes {takes}")
    own = {name: value for name, value in options.items() if name != MECHANISM_OPTION}
    try:
        if isinstance(cluster_class, JudgesOptions):
            cluster_class.require(**own)
        if isinstance(cluster_class, Configured):
            return cluster_class.configured(extra_hosts=extra_hosts, **own)
        return cluster_class
    except ClusterUnavailable as error:
        raise OperatorError(f"--cluster {cluster_class.name}: {error}") from None
