"""Programs of a simulated cluster: what `python -m node ...` does on a real host, as a coroutine on a simulated one."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Any, NoReturn

from harness.clusters.sim.errors import NotSimulated
from harness.clusters.sim.host import EXIT_FAILED, Incarnation, ProgramMain
from node.config import ConfigError, parse_broker_config, parse_name_server_config
from node.nameserver.serving import serve_name_server
from node.serving import serve_broker

__all__ = ["program_of"]

EXIT_OPERATOR = 254
"""Status of a node whose configuration cannot be used."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise NotSimulated(f"a program in simulation: {message}")


def program_of(argv: Sequence[str]) -> ProgramMain:
    """The coroutine function for a command line. Raises NotSimulated when it does not run the node."""
    words = list(argv)
    if "-m" not in words or words[words.index("-m") + 1 : words.index("-m") + 2] != ["node"]:
        raise NotSimulated(f"cannot run {' '.join(words)} in simulation: only `python -m node` runs there")
    parser = _Parser(prog="node", add_help=False)
    commands = parser.add_subparsers(dest="command", required=True)
    broker, name_server = commands.add_parser("broker"), commands.add_parser("nameserver")
    broker.add_argument("--config", required=True)
    name_server.add_argument("--config")
    name_server.add_argument("--listen")
    for command in (broker, name_server):
        command.add_argument("--set", action="append", default=[], dest="overrides")
    options = parser.parse_args(words[words.index("-m") + 2 :])
    serve = _broker if options.command == "broker" else _name_server

    async def program(process: Incarnation) -> int:
        try:
            return await serve(process, options)
        except ConfigError as error:
            for problem in error.problems:
                process.host.log.write_line(f"node: {options.config or 'options'}: {problem}")
            return EXIT_OPERATOR
        except (OSError, ValueError) as error:
            process.host.log.write_line(f"node: {error}")
            return EXIT_FAILED

    return program


def _read(process: Incarnation, path: str) -> str:
    return process.runtime.disk.read_file(path).decode()


async def _broker(process: Incarnation, options: argparse.Namespace) -> int:
    config = parse_broker_config(_read(process, options.config), options.overrides)
    process.log_level = logging.getLevelNamesMapping()[config.log_level.upper()]
    watch = process.host.watch
    on_made = partial(watch.attach, process.host.name) if watch is not None else None
    failure = await serve_broker(config, process.runtime, process.stop_requested, on_made=on_made)
    if failure:
        process.host.log.write_line(f"node: {failure}")
        return EXIT_FAILED
    return 0


def _name_server(process: Incarnation, options: argparse.Namespace) -> Coroutine[Any, Any, int]:
    listen = [f"listen={options.listen}"] if options.listen else []
    text = _read(process, options.config) if options.config else ""
    config = parse_name_server_config(text, [*listen, *options.overrides])
    process.log_level = logging.getLevelNamesMapping()[config.log_level.upper()]

    async def serve() -> int:
        await serve_name_server(config, process.runtime, process.stop_requested)
        return 0

    return serve()
