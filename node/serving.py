"""Runs a broker from its configuration to its end, on whatever runtime and event loop it is given.

It does not know that it is a process: no signals, no locks, no exit status (`command_line.py` adds those). A
simulation runs these same coroutines.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from node.broker.controller import BrokerController
from node.config import BrokerConfig, ConfigError, split_address
from node.dledger import DLedgerServer
from node.dledger.tracing import trace_member
from node.mutants.switch import mutate_broker
from node.runtime import Runtime

__all__ = ["serve_broker"]

logger = logging.getLogger("node")


async def serve_broker(
    config: BrokerConfig,
    runtime: Runtime,
    stop: asyncio.Event,
    *,
    on_made: Callable[[BrokerController], None] | None = None,
) -> str:
    """Run a broker until `stop` is set or it cannot go on; returns why it cannot, "" after an orderly end.

    `on_made` is called with the broker before it starts.

    Raises OSError (address in use, data directory not usable), ValueError or SegmentError (a damaged file) when it
    cannot start, and ConfigError if the file for its trace cannot be written.
    """
    broker = BrokerController(config, runtime)
    mutate_broker(config.mutant, broker)
    if config.trace_file and isinstance(broker.ledger, DLedgerServer) and runtime.open_lines is not None:
        try:
            trace_member(broker.ledger, runtime.open_lines(config.trace_file))
        except OSError as error:
            problem = f"dledger.trace_file: {config.trace_file}: {error.strerror}; name a file that can be written"
            raise ConfigError([problem]) from error
    if on_made is not None:
        on_made(broker)
    await broker.start()
    logger.info(
        "READY broker self_id=%s listen=%s:%d dledger=%s",
        config.self_id, split_address(config.listen)[0], broker.port, config.dledger_listen,
    )  # fmt: skip
    failure = await _until_stopped(stop, broker)
    logger.info("stopping")
    await broker.stop()
    if not failure:
        logger.info("stopped")
    return failure


async def _until_stopped(stop: asyncio.Event, broker: BrokerController) -> str:
    """Wait for the request to stop or for the broker's end; returns why it cannot go on, "" for a request."""
    loop = asyncio.get_running_loop()
    signalled, failed = loop.create_task(stop.wait()), loop.create_task(broker.wait_failed())
    await asyncio.wait((signalled, failed), return_when=asyncio.FIRST_COMPLETED)
    failure = failed.result() if failed.done() else ""
    for task in (signalled, failed):
        task.cancel()
    await asyncio.wait((signalled, failed))
    return failure
