"""Power cuts judged by Apache's store: it opens what is left of our log on a simulated disk.

After each cut four results must agree, queue by queue and byte by byte: Apache's recovery of the image (padded with
zeros, otherwise unchanged), our recovery, Apache's store on the output of `export-store` for the image, and our broker
on the output of `import-store` for it. With a synchronous flush they must include everything acknowledged.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import crash_loop
from benchmarks._store_oracle import ask_apache_store, pad, queues_of, remove_all
from harness.clusters.sim.host import Incarnation, SimHost
from harness.clusters.sim.loop import SimLoop
from harness.clusters.sim.network import SimNetwork
from harness.clusters.sim.simulation import run_simulated
from node.config import BrokerConfig, parse_broker_config
from node.exchange.exporting import export_store
from node.exchange.importing import import_store
from node.exchange.log_files import LogFiles
from node.serving import serve_broker
from node.store.table_file import decode_table

__all__ = ["power_cuts"]

SEGMENT_BYTES = 262_144
"""As in the configuration of the crash loop."""


def _configuration(address: str, data_dir: object, flush_mode: str) -> BrokerConfig:
    text = crash_loop.CONFIG.format(listen=f"{address}:10911", data_dir=data_dir, ledger="[classic]")
    return parse_broker_config(text.replace('flush_mode = "sync"', f'flush_mode = "{flush_mode}"'))


class _Image:
    """The data left by one cut, and the queues that our broker recovered from it."""

    def __init__(self, directory: Path, files: dict[str, bytes]) -> None:
        self.directory = directory
        self.data = directory / "data"
        _write(self.data, files)
        self.recovered: dict[str, list[Any]] = {}
        self.acknowledged: dict[tuple[str, int, int], bytes] = {}

    @property
    def log(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in sorted((self.data / "commitlog").iterdir())}


def _write(target: Path, files: dict[str, bytes]) -> None:
    for path, content in files.items():
        name = target / path.removeprefix("/data/")
        name.parent.mkdir(parents=True, exist_ok=True)
        name.write_bytes(content)


def _files_of(host: SimHost) -> dict[str, bytes]:
    return {path: bytes(host.disk.inode(path).cache) for path in host.disk.paths() if path.startswith("/data/")}


async def _recovered(loop: SimLoop, network: SimNetwork, image: _Image, user: SimHost, number: int, flush: str) -> None:
    """Run our broker on a copy of the image, stop it in an orderly way, and keep its queues."""
    copy = SimHost(loop, network, f"copy{number}", f"10.1.{number // 250}.{1 + number % 250}")
    for path in sorted(image.data.rglob("*")):
        if path.is_file():
            copy.disk.put(f"/data/{path.relative_to(image.data)}", path.read_bytes())
    running = copy.start(_program(copy.address, flush))
    await crash_loop.wait_listening(user, f"{copy.address}:10911")
    copy.terminate()
    assert await running.wait() == 0
    with tempfile.TemporaryDirectory(prefix="splitbrain-exchange-") as directory:
        _write(Path(directory), _files_of(copy))
        image.recovered = queues_of(Path(directory))


def _program(address: str, flush_mode: str) -> Any:
    config = _configuration(address, "/data", flush_mode)

    async def program(process: Incarnation) -> int:
        return 1 if await serve_broker(config, process.runtime, process.stop_requested) else 0

    return program


async def _cut_again_and_again(
    directory: Path, cuts: int, rng: random.Random, flush_mode: str, images: list[_Image]
) -> int:
    """Load a broker, cut its power and keep its data, `cuts` times. Returns how many unsynced bytes were lost."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimLoop)
    network = SimNetwork(loop)
    broker, user = SimHost(loop, network, "broker", "10.0.0.1"), SimHost(loop, network, "user", "10.0.0.2")
    address, lost_bytes = f"{broker.address}:10911", 0
    expected = crash_loop.Expected()
    for cut in range(cuts):
        broker.boot()
        process = broker.start(_program(broker.address, flush_mode))
        await crash_loop.wait_listening(user, address)
        lasts_s = rng.choice((0.3, 2.0, 12.0)) * rng.uniform(0.2, 1.0)

        async def send(_: Incarnation, pause_s: float = max(lasts_s / 60, 0.002)) -> None:
            await crash_loop.load(address, expected, rng, pause_s=pause_s, senders=4)

        sending = asyncio.create_task(crash_loop.run_on(user, send))
        await asyncio.sleep(lasts_s)
        user.kill()
        sending.cancel()
        network.power_lost(broker.name, [process])
        broker.kill()
        lost_bytes += broker.disk.power_fail()
        image = _Image(directory / f"cut{cut}", _files_of(broker))
        await _recovered(loop, network, image, user, cut, flush_mode)
        if flush_mode == "sync":
            image.acknowledged = dict(expected.placed)
        images.append(image)
    return lost_bytes


def _first_of(queues: dict[str, list[Any]]) -> dict[str, tuple[Any, ...]]:
    """The queues that are not empty, with their figures as tuples."""
    return {name: tuple(found) for name, found in queues.items() if found[1]}


def _durable_ms(image: _Image) -> int:
    """The store timestamp of the last message that was durable by our checkpoint; 0 without one."""
    try:
        position = int(decode_table((image.data / "checkpoint").read_bytes())["position"])
    except FileNotFoundError:
        return 0
    records = LogFiles(image.data / "commitlog", SEGMENT_BYTES).records(position)
    return max((record.summary.store_timestamp_ms for record in records if record.summary), default=0)


def _exchanged(image: _Image, flush_mode: str) -> list[str]:
    """Run our two commands on the image, with their output next to it. Returns the record counts that they print."""
    lines = export_store(_configuration("127.0.0.1", image.data, flush_mode), image.directory / "exported")
    pad(image.log, image.directory / "apache", segment_size_bytes=SEGMENT_BYTES, durable_ms=_durable_ms(image))
    (image.directory / "apache" / "config").mkdir()
    (image.directory / "apache" / "config" / "topics.json").write_text('{"topicConfigTable":{}}', encoding="utf-8")
    config = _configuration("127.0.0.1", image.directory / "imported", flush_mode)
    lines += import_store(config, image.directory / "apache")
    return lines


def _judge(image: _Image, apache: dict[str, Any], exported: dict[str, Any], lines: list[str]) -> list[str]:
    """The differences between the four results."""
    ours, name = _first_of(image.recovered), image.directory.name
    problems = [f"{name}: {found['error']}" for found in (apache, exported) if "error" in found]
    if problems:
        return problems
    theirs, after_export = _first_of(apache["queues"]), _first_of(exported["queues"])
    problems = [
        f"{name}: Apache finds {theirs.get(queue)} in {queue}, ours {ours.get(queue)}"
        for queue in sorted(ours.keys() | theirs.keys())
        if ours.get(queue) != theirs.get(queue)
    ]
    problems += [
        f"{name}: exported, {queue} has {after_export.get(queue)}, ours {ours.get(queue)}"
        for queue in sorted(ours.keys() | after_export.keys())
        if ours.get(queue) != after_export.get(queue) and not queue.startswith("RMQ_SYS_TRANS_OP")
    ]
    ends = {line.split(" to ")[-1] for line in lines if line.startswith(("exported", "imported"))}
    if ends != {str(apache["end"])}:
        problems.append(f"{name}: Apache's log ends at {apache['end']}, export and import say {sorted(ends)}")
    for topic, queue_id, offset in image.acknowledged:
        if theirs.get(f"{topic}/{queue_id}", (0, 0))[1] <= offset:
            problems.append(f"{name}: number {offset} of {topic}/{queue_id} was acknowledged, and Apache has it not")
    return problems


def power_cuts(cuts: int, *, flush_mode: str, seed: int) -> dict[str, Any]:
    """Cut the power `cuts` times and have every image judged. Raises AssertionError that names the differences."""
    with tempfile.TemporaryDirectory(prefix="splitbrain-exchange-") as directory:
        images: list[_Image] = []
        rng = random.Random(f"exchange/{flush_mode}/{seed}")
        lost_bytes = run_simulated(_cut_again_and_again(Path(directory), cuts, rng, flush_mode, images), seed=seed)
        images = [image for image in images if image.log]
        lines = [_exchanged(image, flush_mode) for image in images]
        targets = [image.directory / name for image in images for name in ("apache", "exported")]
        found = ask_apache_store(targets, segment_size_bytes=SEGMENT_BYTES)
        problems: list[str] = []
        for at, image in enumerate(images):
            problems += _judge(image, found[2 * at], found[2 * at + 1], lines[at])
        remove_all(targets)
        assert not problems, f"{flush_mode}, seed {seed}: {problems[:10]}"
        return {
            "flush_mode": flush_mode,
            "cuts": cuts,
            "images": len(images),
            "lost_unsynced_bytes": lost_bytes,
            "acknowledged": len(images[-1].acknowledged),
            "messages": sum(found[1] for found in images[-1].recovered.values()),
        }
