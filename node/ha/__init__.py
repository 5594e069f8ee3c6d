"""Classic HA: a master streams its commit log to slaves (S4; R: HAService and what belongs to it)."""
