"""Transfer engines on real GPUs: bytes, kills and figures, as a report. Run by scripts/gpu_check.sh.

Every process is set up as in production: a stage owns the pool and lends it, a worker borrows it and writes,
the receiving stage is passive. What fails raises, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from engine_host import pattern
from engine_rig import MB, EngineHost, Machine, Rig

from mori_mp.shared.errors import MoriMPError

SIZES = (4 << 10, 64 << 10, MB, 16 * MB, 64 * MB, 256 * MB, 1024 * MB)
IN_FLIGHT = 8
_numbers = count()


class Check:
    """One engine on this machine's GPUs."""

    def __init__(self, rig: Rig, folder: Path) -> None:
        self.rig, self._folder = rig, folder
        self._hosts: list[EngineHost] = []

    def host(self) -> EngineHost:
        host = EngineHost(self.rig, self._folder / str(next(_numbers)))
        self._hosts.append(host)
        return host

    @contextmanager
    def scene(self, size: int) -> Iterator[tuple[EngineHost, EngineHost, EngineHost]]:
        """Start a stage, a worker that borrows its pool, and a receiver that is the worker's peer 1."""
        stage, receiver = self.host(), self.host()
        stage.memory(size)
        stage("fill", 1)
        self.descriptors = receiver.become_receiver(size)
        worker = self.worker(stage)
        try:
            yield stage, worker, receiver
        finally:
            for host in self._hosts:
                host.kill()
            self._hosts.clear()

    def worker(self, stage: EngineHost) -> EngineHost:
        worker = self.host()
        worker("borrow", stage("lend", 4))
        worker("load", self.rig.engine, self.rig.options)
        worker("add_peer", 1, *self.descriptors)
        return worker


def check(condition: bool, what: str) -> None:
    if not condition:
        raise AssertionError(what)


# --------------------------------------------------------------------------------------- bytes
def whole_writes(case: Check, sizes: tuple[int, ...]) -> dict[str, Any]:
    """Write and compare each size whole."""
    largest = max(sizes)
    sent = pattern(1, largest)
    with case.scene(largest) as (_, worker, receiver):
        for size in sizes:
            worker("write", 1, [largest - size], [0], [size])
            expected = zlib.crc32(memoryview(sent)[largest - size :])
            check(receiver("digests", [0], [size]) == [expected], f"a write of {size} bytes differs")
    return {"sizes": list(sizes)}


def scattered_writes(case: Check, writes: int, size: int = 64 * MB) -> dict[str, Any]:
    """Writes of many descriptors, several in flight, each compared; and nothing else may have changed."""
    dice, region = random.Random(7), size // IN_FLIGHT
    sent, mirror = pattern(1, size), bytearray(pattern(0, size))
    segments_written = 0
    with case.scene(size) as (_, worker, receiver):
        done = 0
        while done < writes:
            batch, tickets = [], []
            for slot in range(IN_FLIGHT):
                number = dice.randint(1, 64)
                edges = sorted(dice.sample(range(region), 2 * number))
                remote = [slot * region + at for at in edges[::2]]
                sizes = [min(end - begin, 8192) for begin, end in zip(edges[::2], edges[1::2], strict=True)]
                local = [dice.randrange(size - length) for length in sizes]
                tickets.append(worker("submit", 1, local, remote, sizes))
                batch.append((local, remote, sizes))
            for ticket in dice.sample(tickets, len(tickets)):
                worker("finish", ticket)
            worker("forget_transfers")
            for local, remote, sizes in batch:
                found = receiver("digests", remote, sizes)
                for here, there, length, digest in zip(local, remote, sizes, found, strict=True):
                    check(zlib.crc32(sent[here : here + length]) == digest, f"segment at {there} differs")
                    mirror[there : there + length] = sent[here : here + length]
                segments_written += len(sizes)
            done += IN_FLIGHT
        check(receiver("digests", [0], [size]) == [zlib.crc32(mirror)], "bytes between the segments changed")
    return {"writes": done, "segments": segments_written, "differing": 0}


def ordered_puts(case: Check, rounds: int) -> dict[str, Any]:
    """Puts behind a busy stream, written after their event: always the newest bytes arrive."""
    with case.scene(64 * MB) as (stage, worker, receiver):
        for number in range(rounds):
            event, data = number % 4, pattern(number + 10, 100_000)
            stage("queue_copies", event, 3 if case.rig.holds else 50)
            stage("put", event, MB * event, data)
            worker("finish", worker("submit", 1, [MB * event], [0], [len(data)], event))
            check(receiver("peek", 0, len(data)) == data, "a write overtook the put it belongs to")
    return {"rounds": rounds}


# --------------------------------------------------------------------------------------- kills
def killed_workers(case: Check, rounds: int, size: int = 512 * MB) -> dict[str, Any]:
    """SIGKILL a worker under its writes: both pools stay whole, the next worker goes on."""
    sent = zlib.crc32(pattern(1, size))
    with case.scene(size) as (stage, worker, receiver):
        for _ in range(rounds):
            for _ in range(4):
                worker("submit", 1, [0], [0], [size])
            worker.kill()
            check(stage("digests", [0], [size]) == [sent], "the stage's pool changed")
            receiver("fill", 2)
            worker = case.worker(stage)
            worker("write", 1, [0], [0], [size])
            check(receiver("digests", [0], [size]) == [sent], "the next worker's write differs")
    return {"rounds": rounds}


def killed_receivers(case: Check, rounds: int, size: int = 512 * MB) -> dict[str, Any]:
    """SIGKILL a receiver under writes to it: they fail, others go on, its successor is served."""
    sent = zlib.crc32(pattern(1, size))
    outcomes: dict[str, int] = {}
    with case.scene(size) as (_, worker, receiver):
        other = case.host()
        worker("add_peer", 2, *other.become_receiver(size))
        for _ in range(rounds):
            tickets = [worker("submit", 1, [0], [0], [size]) for _ in range(4)]
            receiver.kill()
            for ticket in tickets:
                try:
                    worker("finish", ticket)
                    outcome = "ended before"
                except MoriMPError as exc:
                    outcome = "has exited" if "has exited" in str(exc) else str(exc)
                outcomes[outcome] = outcomes.get(outcome, 0) + 1
            try:
                worker("submit", 1, [0], [0], [1])
                raise AssertionError("a write to a dead receiver was accepted")
            except MoriMPError:
                worker("drop_peer", 1)
            worker("write", 2, [0], [0], [size])
            check(other("digests", [0], [size]) == [sent], "a write to another receiver differs")
            other("fill", 0)
            receiver = case.host()
            worker("add_peer", 1, *receiver.become_receiver(size))
            worker("write", 1, [0], [0], [size])
            check(receiver("digests", [0], [size]) == [sent], "a write to the successor differs")
    return {"rounds": rounds, "writes under way at the kill": outcomes}


def killed_stages(case: Check, rounds: int, size: int = 512 * MB) -> dict[str, Any]:
    """SIGKILL a stage with writes from its pool under way, one of them behind an event: its worker ends."""
    seconds = []
    for _ in range(rounds):
        with case.scene(size) as (stage, worker, _):
            stage("queue_copies", 1, 3 if case.rig.holds else 1000)
            worker("submit", 1, [0], [0], [size], 1)
            worker("submit", 1, [0], [0], [size])
            stage.kill()
            begin = time.monotonic()
            worker("forget_transfers")
            worker("close_engine")
            check(worker.stop() == 0, "a worker did not exit cleanly")
            seconds.append(round(time.monotonic() - begin, 2))
    return {"rounds": rounds, "seconds until the worker had ended": seconds}


# ------------------------------------------------------------------------------------- figures
def figures(case: Check, sizes: tuple[int, ...]) -> dict[str, Any]:
    """Time writes beside plain copies between the same GPUs in the same process."""
    rows = []
    with case.scene(max(sizes)) as (stage, worker, _):
        for size in sizes:
            repeats = 300 if size <= MB else 60 if size <= 64 * MB else 20
            for method, target in (("time_writes", 1), ("time_raw_copies", case.rig.devices[1])):
                worker(method, target, size, 10)  # warm
            writes = sorted(worker("time_writes", 1, size, repeats))
            raw = sorted(worker("time_raw_copies", case.rig.devices[1], size, repeats))
            rows.append(
                {
                    "bytes": size,
                    "write_us_p50": round(statistics.median(writes), 1),
                    "write_us_p99": round(writes[int(len(writes) * 0.99)], 1),
                    "write_GBps": round(size / statistics.median(writes) / 1e3, 1),
                    "raw_us_p50": round(statistics.median(raw), 1),
                    "raw_GBps": round(size / statistics.median(raw) / 1e3, 1),
                }
            )
        puts = {}
        for busy in (False, True):
            times = sorted(stage("time_puts", 64 << 10, 500, busy))
            name = "beside a spinning thread" if busy else "idle"
            puts[name] = {"us_p50": round(statistics.median(times), 1), "us_max": round(times[-1], 1)}
    return {"writes": rows, "put of 64 KiB, enqueue and record": puts}


def table(report: dict[str, Any]) -> str:
    """Render the figures."""
    lines = ["| engine | bytes | write p50 us | p99 us | GB/s | raw copy p50 us | GB/s |", "|---" * 7 + "|"]
    for engine, found in report["engines"].items():
        for row in found.get("figures", {}).get("writes", []):
            cells = [row[key] for key in list(row)]
            lines.append(f"| {engine} | " + " | ".join(str(cell) for cell in cells) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kind", choices=("cuda", "hip", "emulated"), required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--build", type=Path, required=True, help="folder for libraries that are built")
    parser.add_argument("--engines", default="cuda_ipc,xgmi")
    parser.add_argument("--quick", action="store_true", help="small sizes and few rounds")
    arguments = parser.parse_args()
    quick = arguments.quick
    sizes = tuple(size for size in SIZES if size <= 16 * MB) if quick else SIZES
    large = 16 * MB if quick else 512 * MB
    steps = {
        "whole writes": lambda case: whole_writes(case, sizes),
        "scattered writes": lambda case: scattered_writes(
            case, 160 if quick else 10_000, MB * 8 if quick else 64 * MB
        ),
        "ordered puts": lambda case: ordered_puts(case, 5 if quick else 100),
        "figures": lambda case: figures(case, sizes),
        "killed workers": lambda case: killed_workers(case, 2 if quick else 4, large),
        "killed receivers": lambda case: killed_receivers(case, 2 if quick else 4, large),
        "killed stages": lambda case: killed_stages(case, 2, large),
    }
    report: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "kind": arguments.kind, "engines": {}}
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        machine = Machine(arguments.build)
        for engine in arguments.engines.split(","):
            name = engine if arguments.kind == "emulated" else f"{engine}-{arguments.kind}"
            case, found = Check(machine.rig(name), Path(folder)), {}
            report["engines"][name] = found
            for step, run in steps.items():
                begin = time.monotonic()
                try:
                    found[step] = run(case)
                except (AssertionError, RuntimeError, OSError, EOFError) as exc:
                    found[step] = {"failed": f"{type(exc).__name__}: {exc}"}
                    failed.append(f"{name}: {step}")
                said = json.dumps(found[step]) if step != "figures" else "below"
                print(f"{name}: {step}: {time.monotonic() - begin:.1f} s: {said}", flush=True)
                (arguments.out / "engines.json").write_text(json.dumps(report, indent=1))
    print(table(report))
    for engine, found in report["engines"].items():
        print(engine, json.dumps(found.get("figures", {}).get("put of 64 KiB, enqueue and record", {})))
    print(f"failed: {', '.join(failed) or 'nothing'}")
    return 1 if failed else 0


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(main())
