"""The fault interfaces of nemesis.target for a run: they act on the cluster's hosts and the system's processes."""
