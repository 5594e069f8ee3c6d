"""`harness list`: what can be chosen by name."""

from __future__ import annotations

import argparse

from rich.table import Table

from harness import registry
from harness.report import OutputConsole

__all__ = ["list_command"]


def list_command(arguments: argparse.Namespace) -> int:
    """Print every workload, nemesis, system and cluster with its description and options."""
    console = OutputConsole()
    for kind in registry.KINDS:
        table = Table(title=kind, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
        table.add_column(style="bold", no_wrap=True)
        table.add_column()
        for name, found in registry.load_all(kind).items():
            table.add_row(name, found.description)
            for variant in getattr(found, "variants", ()):
                table.add_row("", f"={variant}")
            for setting in getattr(found, "settings", ()):
                choices = f" ({', '.join(setting.choices)})" if setting.choices else ""
                table.add_row("", f"--set {setting.name}={setting.default}: {setting.description}{choices}")
        console.print(table)
        console.print()
    return 0
