"""Models of protocols for trace validation."""
