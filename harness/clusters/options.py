"""Options of clusters besides the number of nodes, and whether a cluster is available with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness.clusters.abilities import Configured, JudgesOptions, TakesOptions
from harness.clusters.base import ClusterUnavailable
from harness.errors import OperatorError

__all__ = ["MECHANISM_OPTION", "require_cluster"]

MECHANISM_OPTION = "mechanism"
"""Option of all clusters with real hosts: the mechanism that applies faults to programs. It does not affect whether a
cluster is available, so their classes' `require` and `configured` do not get it."""


def require_cluster(cluster_class: Any, options: Mapping[str, str], *, extra_hosts: Sequence[str] = ()) -> Any:
    """Check, before anything is made, that a cluster class takes these options and is available with them; returns the
    class on which to call `missing`. `extra_hosts` are the hosts that the system has besides its replicas'.

    A class that is not TakesOptions takes none; for one that is neither JudgesOptions nor Configured, availability
    shows only when it is started. Raises OperatorError.
    """
    known = cluster_class.options if isinstance(cluster_class, TakesOptions) else ()
    for name in options:
        if name not in known:
            takes = ", ".join(f"--{option}" for option in known) or "none"
            raise OperatorError(f"--{name}: not an option of cluster {cluster_class.name}, which takes {takes}")
    own = {name: value for name, value in options.items() if name != MECHANISM_OPTION}
    try:
        if isinstance(cluster_class, JudgesOptions):
            cluster_class.require(**own)
        if isinstance(cluster_class, Configured):
            return cluster_class.configured(extra_hosts=extra_hosts, **own)
        return cluster_class
    except ClusterUnavailable as error:
        name = cluster_class.name
        raise OperatorError(f"--cluster {name}: {str(error).removeprefix(f'{name}: ')}") from None
