"""Where memory really lies: pool pages and workers' own memory, as /proc/*/numa_maps tells it."""

from __future__ import annotations

import mmap
import os
import re
from collections import Counter
from pathlib import Path

import pytest
from connector_support import MIB, Factory, control_pid, eventually, worker_pids

from mori_mp.shared.topology import format_cpulist, read_topology

POOL_BYTES = 16 * MIB
TOPOLOGY = read_topology()
NODES = [node for node, cpus in TOPOLOGY.nodes.items() if cpus & TOPOLOGY.allowed]

pytestmark = pytest.mark.skipif(
    not NODES or not Path("/proc/self/numa_maps").exists(), reason="this kernel has no numa_maps"
)


def pages(pid: int | str, pattern: str) -> Counter[int]:
    """Pages by node of the mappings that a pattern finds."""
    found: Counter[int] = Counter()
    for line in Path(f"/proc/{pid}/numa_maps").read_text().splitlines():
        if re.search(pattern, line):
            for node, count in re.findall(r"\bN(\d+)=(\d+)", line):
                found[int(node)] += int(count)
    return found


def pool_file(pid: int) -> Path:
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        if os.readlink(fd).startswith("/memfd:mori-mp-pool"):
            return fd
    raise AssertionError("the control process has no pool open")


@pytest.mark.parametrize("node", NODES)
def test_pool_and_worker_lie_on_the_workers_node(make_connector: Factory, node: int) -> None:
    cpus = sorted(TOPOLOGY.nodes[node] & TOPOLOGY.allowed)
    sender = make_connector.sender(
        prefault=True,
        memory_pool_size=POOL_BYTES,
        control_cpus=format_cpulist([cpus[0]]),
        worker_cpus=format_cpulist([cpus[-1]]),
        num_transfer_workers=1,
    )
    (worker,) = worker_pids(sender)
    file = pool_file(control_pid(sender))
    eventually(lambda: file.stat().st_blocks * 512 >= POOL_BYTES, "the worker has backed the pool")
    with file.open("rb") as pool, mmap.mmap(pool.fileno(), POOL_BYTES, prot=mmap.PROT_READ) as window:
        before = pages("self", "memfd:mori-mp-pool")
        touched = sum(window[at] for at in range(0, POOL_BYTES, mmap.PAGESIZE))
        seen = pages("self", "memfd:mori-mp-pool") - before
    assert touched == 0
    assert set(seen) == {node}
    own = pages(worker, r"\banon=")
    assert own[node] > own.total() / 2, own  # the interpreter starts before it is pinned
    (entry,) = (row for row in sender.health()["processes"] if row["role"] == "worker")
    assert (entry["numa_node"], entry["cpus"]) == (node, format_cpulist([cpus[-1]]))
