"""The harness: runs a test from setup to verdict."""

__version__ = "0.1.0"
__all__ = ["__version__"]
