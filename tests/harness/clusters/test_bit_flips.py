"""Two flipped bits at a time in the files of a local host."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from harness.clusters.base import Program
from harness.clusters.local import LocalCluster
from harness.run_state import RunState
from nemesis.mechanisms.shim import why_no_shim

NO_SHIM = why_no_shim()
pytestmark = pytest.mark.skipif(NO_SHIM is not None, reason=f"no shim: {NO_SHIM}")
ONE, TWO = 1 << 5, 1 << 6


@pytest.mark.parametrize("first", ["f1", "f2"])
def test_two_flipped_bits_of_one_byte_are_counted_and_restored_separately(tmp_path: Path, first: str) -> None:
    async def scenario(cluster: LocalCluster) -> None:
        disks, file = cluster.disks, Path(cluster.data_dir("n1")) / "vote"
        file.write_bytes(b"abc")

        async def reads() -> tuple[int | None, int | None]:
            return (await disks.met("f1"))["n1"].met, (await disks.met("f2"))["n1"].met

        async def read() -> None:
            argv = [sys.executable, "-c", f"open({str(file)!r}, 'rb', buffering=0).read()"]
            reader = await cluster.spawn("n1", Program(name="reader", argv=argv, log_name="reader.log"))
            assert await reader.wait() == 0

        await disks.flip_bit("f1", "n1", files="vote", place=0.5, bit=5)
        await read()
        await disks.flip_bit("f2", "n1", files="vote", place=0.5, bit=6)
        assert file.read_bytes() == bytes([ord("a"), ord("b") ^ ONE ^ TWO, ord("c")])
        assert await reads() == (1, None), "reads before the second flip do not count for it"
        await read()
        assert await reads() == (1, 1), "the shim watches one bit at a time: the last one flipped"
        await disks.release(first)
        left = TWO if first == "f1" else ONE
        assert file.read_bytes() == bytes([ord("a"), ord("b") ^ left, ord("c")])
        await disks.release_all()
        assert file.read_bytes() == b"abc"

    async def main() -> None:
        run = RunState.create(f"test-{tmp_path.name}", state_root=str(tmp_path / "states"))
        cluster = LocalCluster(node_count=1, run=run, work_dir=str(tmp_path / "hosts"), ports=[7000])
        cluster.prepare({("disks", "flip")})
        await cluster.start()
        try:
            await scenario(cluster)
        finally:
            await cluster.stop()
        assert run.claims == () and run.close()

    asyncio.run(main())
