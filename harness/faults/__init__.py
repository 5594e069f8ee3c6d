"""How the fault interfaces of nemesis.target act on a run: on the cluster's hosts and the system's processes."""
