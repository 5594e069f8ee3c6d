"""What the system under test says of itself during a run: chosen series of its pages for Prometheus."""
