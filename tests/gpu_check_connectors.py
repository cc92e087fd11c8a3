"""Whole connectors on real GPUs: put() to usable beside raw copies and a bounce through the host; a report.

Run by scripts/gpu_check.sh. A sender on the first GPU, a receiver on the second (or both on one), each a
process with a connector of its own. "local + peer" is what no design can beat that copies into a pool and
across: one copy inside the sender's GPU and one to the receiver's, each synchronised, by torch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import count
from pathlib import Path
from typing import Any

import psutil
from connector_support import short_directory
from engine_rig import MB, GpuStage, Machine, Rig

SIZES = (4 << 10, 64 << 10, MB, 16 * MB, 64 * MB, 256 * MB)
POOL_BYTES = 640 * MB
_WARM = 5
_keys = count()


class Pair:
    """A sender and a receiver."""

    def __init__(self, rig: Rig, folder: Path, runtime: Path, **config: Any) -> None:
        self.rig = rig
        self._folder = folder
        self._runtime = runtime
        self.sender = GpuStage(rig, folder / f"sender-{next(_keys)}", runtime)
        self.receiver = GpuStage(rig, folder / f"receiver-{next(_keys)}", runtime)
        base = {"host": "127.0.0.1", "memory_pool_size": POOL_BYTES, "prestart": False, **config}
        self._settings = base
        port = self.sender("make", {**base, "role": "sender", "zmq_port": 0, "stage_id": 0}, rig.devices[0])
        upstream = {"sender_host": "127.0.0.1", "sender_zmq_port": port}
        settings = {**base, "role": "receiver", "stage_id": 1, "from_stage": 0, "to_stage": 1, **upstream}
        self.receiver("make", settings, rig.devices[1])

    def time(self, size: int, rounds: int, to_gpu: bool) -> tuple[list[float], list[float]]:
        """Return how long put() took, and how long it was from its start to usable; microseconds, sorted."""
        expected = self.sender("check_sum", "figures", size)
        puts, usable = [], []
        for number in range(_WARM + rounds):
            key = f"figures-{next(_keys)}"
            begin, end, metadata = self.sender("timed_put", key, "figures", size)
            at, found = self.receiver("timed_get", key, metadata, to_gpu)
            if found != expected:
                raise AssertionError(f"a payload of {size} bytes differs")
            if number >= _WARM:
                puts.append((end - begin) / 1e3)
                usable.append((at - begin) / 1e3)
        return sorted(puts), sorted(usable)

    def time_harness(self, rounds: int) -> float:
        """Return how long the way from one stage to the other takes that is no connector's; median us."""
        passed = []
        for _ in range(_WARM + rounds):
            begin = self.sender("clock")
            passed.append((self.receiver("clock") - begin) / 1e3)
        return statistics.median(passed[_WARM:])

    def land(self) -> None:
        """Have a worker write, as for a receiver that cannot read its sender's pool."""
        other = GpuStage(self.rig, self._folder / f"other-{next(_keys)}", self._runtime)
        settings = {**self._settings, "delivery": "landing", "role": "receiver", "stage_id": 1}
        other("make", settings, self.rig.devices[1])
        key = f"landing-{next(_keys)}"
        _, _, metadata = self.sender("timed_put", key, "figures", MB)
        if other("timed_get", key, metadata, False)[1] != self.sender("check_sum", "figures", MB):
            raise AssertionError("a payload that was written by a worker differs")
        other.end()

    def gpu_memory(self) -> dict[str, dict[str, int]]:
        """Return the MiB that each process has on each GPU, as nvidia-smi tells; {} where it does not."""
        query = [
            "nvidia-smi",
            "--query-compute-apps=pid,gpu_bus_id,used_memory",
            "--format=csv,noheader,nounits",
        ]
        try:
            said = subprocess.run(query, capture_output=True, text=True, check=True).stdout
        except (OSError, subprocess.CalledProcessError):
            return {}
        roles = {}
        for name, stage in (("sender", self.sender), ("receiver", self.receiver)):
            roles[stage.pid] = f"{name}'s stage"
            for child in psutil.Process(stage.pid).children(recursive=True):
                words = child.cmdline()
                kind = "worker" if "worker" in words else "control"
                roles[child.pid] = f"{name}'s {kind} {words[-1] if kind == 'worker' else ''}".strip()
        found: dict[str, dict[str, int]] = {name: {} for name in roles.values()}
        for line in said.splitlines():
            pid, bus, used = (field.strip() for field in line.split(","))
            if used.isdigit():
                found.setdefault(roles.get(int(pid), f"process {pid}"), {})[bus] = int(used)
        return found

    def end(self) -> None:
        self.sender.end()
        self.receiver.end()


def figures(pair: Pair, bounce: Pair, sizes: tuple[int, ...], rounds: int) -> list[dict[str, Any]]:
    """Time every size, idle and beside a busy sender, and what there is to compare it with."""
    rows = []
    for size in sizes:
        repeats = rounds if size <= 64 * MB else max(5, rounds // 4)
        local, peer = pair.rig.devices
        raw = [
            statistics.median(pair.sender("time_raw_copies", size, device, 25)) for device in (local, peer)
        ]
        puts, usable = pair.time(size, repeats, to_gpu=False)
        pair.sender("spin", True)
        busy_puts, busy = pair.time(size, repeats, to_gpu=False)
        pair.sender("spin", False)
        _, bounced = bounce.time(size, max(5, repeats // 4), to_gpu=True)
        median = statistics.median(usable)
        rows.append(
            {
                "bytes": size,
                "put_us_p50": round(statistics.median(puts), 1),
                "usable_us_p50": round(median, 1),
                "usable_us_p99": round(usable[int(len(usable) * 0.99)], 1),
                "GBps": round(size / median / 1e3, 1),
                "local_plus_peer_us": round(sum(raw), 1),
                "ratio": round(median / sum(raw), 2),
                "host_bounce_us_p50": round(statistics.median(bounced), 1),
                "busy_put_us_p50": round(statistics.median(busy_puts), 1),
                "busy_usable_us_p50": round(statistics.median(busy), 1),
                "busy_usable_us_p99": round(busy[int(len(busy) * 0.99)], 1),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


def table(report: dict[str, Any]) -> str:
    """Render the figures."""
    heads = (
        "engine",
        "bytes",
        "put p50 us",
        "put to usable p50 us",
        "p99 us",
        "GB/s",
        "local + peer us",
        "ratio",
        "host bounce p50 us",
        "busy: put p50 us",
        "put to usable p50 us",
        "p99 us",
    )
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for engine, found in report["engines"].items():
        lines += [
            f"| {engine} | " + " | ".join(str(cell) for cell in row.values()) + " |"
            for row in found["figures"]
        ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kind", choices=("cuda", "hip"), required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--build", type=Path, required=True, help="folder for libraries that are built")
    parser.add_argument("--engines", default="cuda_ipc,xgmi")
    parser.add_argument("--quick", action="store_true", help="small sizes and few rounds")
    arguments = parser.parse_args()
    sizes = tuple(size for size in SIZES if size <= MB) if arguments.quick else SIZES
    report: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "kind": arguments.kind, "engines": {}}
    machine = Machine(arguments.build)
    with tempfile.TemporaryDirectory() as blocks, short_directory() as runtime:
        for engine in arguments.engines.split(","):
            rig = machine.rig(f"{engine}-{arguments.kind}")
            pair = Pair(rig, Path(blocks), runtime, backend_type=engine)
            host = {"backend_type": "shm", "memory_pool_device": "cpu"}
            bounce = Pair(rig, Path(blocks), runtime, **host)
            for stage in (pair.sender, bounce.sender):
                stage("tensor", "figures", 1, max(sizes))
            rounds = 10 if arguments.quick else 200
            found = {
                "harness_us_p50": round(pair.time_harness(rounds), 1),
                "figures": figures(pair, bounce, sizes, rounds),
                "MiB of GPU memory": pair.gpu_memory(),
            }
            pair.land()
            found["MiB of GPU memory, a worker has written"] = pair.gpu_memory()
            report["engines"][rig.name] = found
            (arguments.out / "connectors.json").write_text(json.dumps(report, indent=1))
            pair.end()
            bounce.end()
    print(table(report))
    for engine, found in report["engines"].items():
        print(engine, "harness alone:", found["harness_us_p50"], "us")
        for what in ("MiB of GPU memory", "MiB of GPU memory, a worker has written"):
            print(engine, what, json.dumps(found[what]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
