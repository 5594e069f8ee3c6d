"""Runs a name server from its configuration to its end, as `node/serving.py` does a broker, without its modules."""

from __future__ import annotations

import asyncio
import logging

from node.config import NameServerConfig, split_address
from node.nameserver.server import NameServer, NameServerOptions
from node.remoting import ServerLimits
from node.runtime import Runtime

__all__ = ["serve_name_server"]

logger = logging.getLogger("node")


async def serve_name_server(config: NameServerConfig, runtime: Runtime, stop: asyncio.Event) -> None:
    """Run a name server until `stop` is set. Raises OSError or ValueError when it cannot start."""
    host, port = split_address(config.listen)
    tls = config.tls.server_context() if config.tls else None
    options = NameServerOptions(
        broker_expiry_s=config.broker_expiry_s,
        scan_interval_s=config.scan_interval_s,
        kv_config_path=config.kv_config_path,
        limits=ServerLimits(max_connections=config.max_connections),
        tls=tls,
    )
    server = NameServer(host, port, runtime, options=options)
    await server.start()
    logger.info("READY nameserver listen=%s:%d", host, server.port)
    await stop.wait()
    await server.stop()
    logger.info("stopped")
