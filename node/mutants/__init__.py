"""Known bugs, switchable by name, to show that faults and checkers find them. Nothing here runs by default."""
