"""The invariants I1 to I7, each with tests that fail when it does not hold (docs/design.md lists them).

Randomized tests run for MORI_MP_SOAK_SECONDS (a couple of seconds by default) from a fixed seed.
"""

from __future__ import annotations

import hashlib
import os
import random
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq
from connector_support import (
    KEY,
    MIB,
    SOAK_SECONDS,
    Background,
    Factory,
    Pair,
    StageProcess,
    assert_whole,
    control_pid,
    counter,
    eventually,
    kill,
    pattern,
    resident_bytes,
    state_of,
    stopped,
    worker_pids,
)
from wire_peers import MAGIC, V1Client, V2Client, encode, endless_message

from mori_mp import MoriTransferEngineConnector
from mori_mp.shared.errors import ConnectorClosed, StartupError

pytestmark = pytest.mark.xdist_group("invariants")

LEASE = {"delivery": "lease", "eager_bytes": 0}
LANDING = {"delivery": "landing", "eager_bytes": 0}
EAGER = {"delivery": "landing", "eager_bytes": MIB}
SENDING_STAGE = {
    "role": "sender",
    "host": "127.0.0.1",
    "zmq_port": 0,
    "memory_pool_size": MIB,
    "stage_id": 0,
    "pin": "off",
    "prefault": False,
}
WAYS = {"lease": LEASE, "landing": LANDING, "eager": EAGER}
MakeV1 = Callable[[int], V1Client]
MakeV2 = Callable[[int], V2Client]
every_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def restarted(connector: MoriTransferEngineConnector, times: int) -> None:
    """Wait until a control process has been replaced so often, and the last one is up."""

    def up() -> bool:
        health = connector.health()
        workers = health["sender"].get("workers")
        return health["control_restarts"] >= times and bool(workers) and all(w["ready"] for w in workers)

    eventually(up, "control process replaced", 30)


def receiving_stage(
    make_stage: type[StageProcess], sender: MoriTransferEngineConnector, **more: Any
) -> StageProcess:
    """A process with a receiver of the edge 0 -> 1."""
    upstream = {
        "sender_host": "127.0.0.1",
        "sender_zmq_port": sender.zmq_port,
        "from_stage": 0,
        "to_stage": 1,
    }
    config = {"role": "receiver", "stage_id": 1, "prestart": False, "memory_pool_size": MIB}
    return make_stage(**config, **upstream, **more)


def quarantined(connector: MoriTransferEngineConnector) -> int:
    """Landing writes that were given up and have not ended."""
    return sum(sender["quarantined"] for sender in connector.receiver.report()["senders"])


# ------------------------------------------------------------------ I1 nothing torn, nobody else's
_HEADER = struct.Struct("<QQQ")


def stamped(key: int, serial: int, size: int) -> bytes:
    """A payload that says whose it is, with a body that no other one has."""
    return _HEADER.pack(key, serial, size) + pattern(size, key * 1_000_003 + serial)


def read_stamp(raw: bytes) -> tuple[int, int]:
    """Return key and serial of an intact payload."""
    key, serial, size = _HEADER.unpack_from(raw)
    assert raw == stamped(key, serial, size), f"torn payload of key {key}, serial {serial}"
    return key, serial


class Traffic:
    """Random puts, replacements, withdrawals and gets over a few keys, until told to stop."""

    KEYS = 6

    def __init__(self, pair: Pair, seed: int) -> None:
        self.pair = pair
        self.seed = seed
        self.stop = threading.Event()
        self.delivered: Counter[tuple[int, int]] = Counter()
        self._serial = 0
        self._metadata: dict[int, Any] = {}

    def run(self, seconds: float, getters: int = 3) -> None:
        """Run for a while; raises what any of the threads has found."""
        threads = [Background(self._put), *(Background(lambda n=n: self._get(n)) for n in range(getters))]
        self.stop.wait(seconds)
        self.stop.set()
        for thread in threads:
            thread.result(60)
        assert self.delivered, "nothing was delivered at all"
        twice = {stamp: n for stamp, n in self.delivered.items() if n > 1}
        assert not twice, f"delivered more than once: {twice}"

    def _put(self) -> None:
        rng = random.Random(self.seed)
        while not self.stop.is_set():
            key = rng.randrange(self.KEYS)
            if rng.random() < 0.15:
                self.pair.sender.cleanup(f"k{key}")
                continue
            self._serial += 1
            size = rng.choice([1, 100, 4000, 5000, 20_000, 150_000])
            ok, _, metadata = self.pair.sender.put("0", "1", f"k{key}", stamped(key, self._serial, size))
            if ok:
                self._metadata[key] = metadata

    def _get(self, number: int) -> None:
        rng = random.Random(self.seed * 100 + number)
        held: list[tuple[Any, tuple[int, int]]] = []
        receiver = self.pair.receiver
        while not self.stop.is_set():
            key = rng.randrange(self.KEYS)
            metadata = self._metadata.get(key) if rng.random() < 0.3 else None
            ahead = rng.choice([0.0, 0.0005, 0.005, 0.05])
            found = receiver.get_with_deadline(
                "0", "1", f"k{key}", metadata, deadline=time.monotonic() + ahead
            )
            if found is not None:
                stamp = read_stamp(found[0].to_bytes())
                assert stamp[0] == key, f"asked for {key}, got {stamp[0]}"
                self.delivered[stamp] += 1
                held.append((found[0], stamp))
            while held and (len(held) > 2 or rng.random() < 0.5):
                buffer, stamp = held.pop(rng.randrange(len(held)))
                assert read_stamp(buffer.to_bytes()) == stamp  # nobody has written there meanwhile
                buffer.release()
        for buffer, stamp in held:
            assert read_stamp(buffer.to_bytes()) == stamp
            buffer.release()


@pytest.mark.slow
@every_way
def test_i1_replacing_withdrawing_and_giving_up(make_connector: Factory, way: dict[str, Any]) -> None:
    pair = make_connector.pair(num_transfer_workers=2, buffer_ttl_seconds=1.0, **way)
    Traffic(pair, 1).run(SOAK_SECONDS)
    pair.assert_whole(10)


@pytest.mark.slow
def test_i1_with_workers_held_up(make_connector: Factory) -> None:
    """Writes that are late by a random time, so that gets give up and ask again."""
    pair = make_connector.pair(num_transfer_workers=2, buffer_ttl_seconds=1.0, **LANDING)
    traffic = Traffic(pair, 2)
    workers = worker_pids(pair.sender)
    rng = random.Random(3)

    def hold_up() -> None:
        while not traffic.stop.is_set():
            with stopped(rng.choice(workers)):
                traffic.stop.wait(rng.uniform(0.0, 0.08))
            traffic.stop.wait(rng.uniform(0.0, 0.05))

    holding = Background(hold_up)
    traffic.run(SOAK_SECONDS)
    holding.result()
    assert counter(pair.receiver, "quarantined") > 0
    pair.assert_whole(10)


@every_way
def test_i1_holds_for_a_replacement_under_way(make_connector: Factory, way: dict[str, Any]) -> None:
    """The same key put over and over: each get gives one whole payload, no older than the one before."""
    pair = make_connector.pair(worker_mode="thread", **way)
    last = 0
    for serial in range(1, 40):
        pair.put("k0", stamped(0, serial, 9000))
        if serial % 3 == 0:
            _, got = read_stamp(pair.wait_bytes("k0"))
            assert last < got <= serial
            last = got
    while last < 39:  # a notice of the newest may have been under way
        _, got = read_stamp(pair.wait_bytes("k0"))
        assert last < got
        last = got
    pair.assert_whole()


# -------------------------------------------------------------------- I2 no slot under a live write
def test_i2_a_landing_slot_is_not_handed_out_under_a_late_write(make_connector: Factory) -> None:
    slow = make_connector.pair(receiver={"memory_pool_size": 256 * 1024}, **LANDING)
    receiver = slow.receiver
    quick = Pair(make_connector.sender(worker_mode="thread", **LANDING), receiver)
    slow.put("warm", b"x")
    slow.wait_bytes("warm")
    with stopped(*worker_pids(slow.sender)):
        slow.put("slow", b"\xee" * 40_000)
        deadline = time.monotonic() + 0.3
        assert receiver.get_with_deadline("0", "1", "slow", deadline=deadline) is None
        assert quarantined(receiver) == 1

        # Everything else is handed out, to payloads of another sender, until there is no more.
        receiver.update_sender_info("127.0.0.1", quick.sender.zmq_port or 0)
        held = []
        for number in range(100):
            quick.put(f"q{number}", pattern(20_000, number))
            found = receiver.get_with_deadline("0", "1", f"q{number}", deadline=time.monotonic() + 1)
            if found is None:
                break
            held.append(found[0])
        assert counter(receiver, "pool_exhausted") > 0
        assert 5 <= len(held) < 13
    eventually(lambda: receiver.get_wakeup_generation() and not quarantined(receiver), "late write ended")
    for number, buffer in enumerate(held):
        assert buffer.to_bytes() == pattern(20_000, number), f"payload {number} was written over"
        buffer.release()
    receiver.update_sender_info("127.0.0.1", slow.sender.zmq_port or 0)
    assert slow.wait_bytes("slow") == b"\xee" * 40_000  # what came late is not lost
    quick.sender.cleanup(f"q{len(held)}")
    del found
    assert_whole(receiver, slow.sender, quick.sender)


def test_i2_what_came_late_and_is_not_asked_for_again_makes_room(make_connector: Factory) -> None:
    pair = make_connector.pair(receiver={"memory_pool_size": 64 * 1024}, **LANDING)
    pair.put("warm", b"x")
    pair.wait_bytes("warm")
    with stopped(*worker_pids(pair.sender)):
        pair.put("late", pattern(50_000, 1))
        deadline = time.monotonic() + 0.1
        assert pair.receiver.get_with_deadline("0", "1", "late", deadline=deadline) is None
    eventually(lambda: pair.receiver.get_wakeup_generation() and not quarantined(pair.receiver), "ended")
    pair.put("next", pattern(50_000, 2))
    assert pair.wait_bytes("next") == pattern(50_000, 2)
    pair.assert_whole()


@pytest.mark.parametrize("victim", ["worker", "control"])
def test_i2_the_death_of_the_writer_ends_the_quarantine(make_connector: Factory, victim: str) -> None:
    pair = make_connector.pair(**LANDING)
    pair.put("warm", b"x")
    pair.wait_bytes("warm")
    (worker,) = worker_pids(pair.sender)
    with stopped(worker):
        pair.put("slow", pattern(40_000))
        deadline = time.monotonic() + 0.2
        assert pair.receiver.get_with_deadline("0", "1", "slow", deadline=deadline) is None
        assert quarantined(pair.receiver) == 1
        kill(worker if victim == "worker" else control_pid(pair.sender))
        assert pair.wait_bytes("slow", 20) == pattern(40_000)
    pair.assert_whole(10)


@every_way
def test_i2_a_sending_slot_is_not_handed_out_while_it_is_read(
    make_connector: Factory, way: dict[str, Any]
) -> None:
    """put, get, replace, clean up and put again in a small pool: what is held stays as it was."""
    pair = make_connector.pair(worker_mode="thread", memory_pool_size=96 * 1024, **way)
    for turn in range(6):
        pair.put(KEY, pattern(30_000, turn))
        buffer, _ = pair.wait(KEY)
        pair.put(KEY, pattern(30_000, 100 + turn))
        pair.sender.cleanup(KEY)
        for filler in range(3):
            pair.sender.put("0", "1", f"f{filler}", pattern(30_000, 200 + filler))
            pair.sender.cleanup(f"f{filler}")
        assert buffer.to_bytes() == pattern(30_000, turn)
        buffer.release()
    pair.assert_whole()


# ---------------------------------------------------------------------- I3 everything comes back
@pytest.mark.parametrize("seed", range(3))
@every_way
def test_i3_pools_are_whole_after_anything(make_connector: Factory, way: dict[str, Any], seed: int) -> None:
    """A random sequence of puts, gets, cleanups and timeouts, then one TTL. (`leaks` checks the rest.)"""
    rng = random.Random(seed)
    pair = make_connector.pair(
        worker_mode="thread", buffer_ttl_seconds=0.5, park_seconds=0.05, memory_pool_size=256 * 1024, **way
    )
    metadata: dict[str, Any] = {}
    held: list[Any] = []
    for _ in range(80):
        key, what = f"k{rng.randrange(8)}", rng.random()
        if what < 0.45:
            size = rng.choice([1, 3000, 9000, 40_000])
            metadata[key] = pair.sender.put("0", "1", key, pattern(size, rng.randrange(99)))[2]
        elif what < 0.85:
            known = metadata.get(key) if rng.random() < 0.4 else None
            deadline = time.monotonic() + rng.choice([-1, 0.0002, 0.002, 0.03])
            found = pair.receiver.get_with_deadline("0", "1", key, known, deadline=deadline)
            held += [found[0]] if found else []
        elif what < 0.95:
            pair.sender.cleanup(key, *rng.choice([(), ("0", "1")]))
        else:
            pair.receiver.abandon_get(key)
        if held and rng.random() < 0.6:
            held.pop(rng.randrange(len(held))).release()
    held.clear()
    found = None
    pair.assert_whole()


def test_i3_a_sender_without_receivers(make_connector: Factory) -> None:
    sender = make_connector.sender(worker_mode="thread", buffer_ttl_seconds=0.3)
    for number in range(50):
        assert sender.put("0", "1", f"k{number}", pattern(5000))[0]
    assert sender.health()["pool"]["published"] == 50
    assert_whole(sender)


def test_i3_repeated_life_cycles_leave_nothing(make_connector: Factory) -> None:
    """The `leaks` fixture is the assertion."""
    for way in WAYS.values():
        pair = make_connector.pair(**way)
        pair.put("left", pattern(5000))
        pair.put("got", pattern(5000))
        pair.wait_bytes("got")
        make_connector.close()


# ------------------------------------------------------------------------- I4 sudden deaths
@every_way
def test_i4_control_process_killed_with_payloads_published(
    make_connector: Factory, way: dict[str, Any]
) -> None:
    pair = make_connector.pair(**way)
    for number in range(20):
        pair.put(f"k{number}", pattern(5000, number))
    for number in range(5):
        assert pair.wait_bytes(f"k{number}") == pattern(5000, number)
    kill(control_pid(pair.sender))
    for number in range(20, 25):  # while there is none
        pair.put(f"k{number}", pattern(5000, number))
    for number in range(5, 25):
        assert pair.wait_bytes(f"k{number}", 20) == pattern(5000, number)
    for number in range(25):
        assert pair.get(f"k{number}") is None, "delivered twice"
    pair.put("after", b"payload")
    assert pair.wait_bytes("after") == b"payload"
    assert pair.sender.health()["control_restarts"] == 1
    pair.assert_whole(10)


@every_way
def test_i4_control_process_killed_under_a_waiting_get(make_connector: Factory, way: dict[str, Any]) -> None:
    pair = make_connector.pair(**way)
    pair.put("warm", b"x")
    pair.wait_bytes("warm")
    waiting = Background(lambda: pair.wait_bytes("later", 30))
    waiting.entered.wait()
    kill(control_pid(pair.sender))
    pair.put("later", pattern(5000))
    assert waiting.result(40) == pattern(5000)


def test_i4_worker_killed_in_the_middle_of_a_write(make_connector: Factory) -> None:
    pair = make_connector.pair(num_transfer_workers=2, **LANDING)
    pair.put("warm", b"x")
    pair.wait_bytes("warm")
    workers = worker_pids(pair.sender)
    with stopped(*workers):
        for number in range(6):
            pair.put(f"k{number}", pattern(5000, number))
        waiting = [Background(lambda n=n: pair.wait_bytes(f"k{n}", 30)) for n in range(6)]
        eventually(lambda: pair.sender.health()["sender"]["jobs_under_way"] == 2, "jobs handed out")
        for worker in workers:
            kill(worker)
        assert [one.result(40) for one in waiting] == [pattern(5000, number) for number in range(6)]
    report = eventually(
        lambda: [w for w in pair.sender.health()["sender"]["workers"] if w["ready"]][1:], "workers replaced"
    )
    assert report[0]["restarts"] == 1
    assert pair.sender.health()["status"] == "healthy"
    assert pair.sender.health()["control_restarts"] == 0
    pair.assert_whole()


def test_i4_hung_worker_is_replaced(make_connector: Factory) -> None:
    """One that never ends its job is killed after the job time limit, and the job goes to another."""
    pair = make_connector.pair(job_timeout_seconds=0.5, **LANDING)
    pair.put("warm", b"x")
    pair.wait_bytes("warm")
    with stopped(*worker_pids(pair.sender)):
        pair.put(KEY, pattern(5000))
        assert pair.wait_bytes(KEY, 20) == pattern(5000)
    pair.assert_whole()


def test_i4_no_get_outlives_its_deadline(make_connector: Factory) -> None:
    """Whatever is dead or stopped."""
    pair = make_connector.pair(get_timeout_seconds=0.5, query_timeout_seconds=0.5, restart_limit=0, **LANDING)
    metadata = pair.put(KEY, pattern(5000))
    pair.put("warm", b"x")
    pair.wait_bytes("warm")

    def timed(ahead: float, given: Any) -> float:
        began = time.monotonic()
        found = pair.receiver.get_with_deadline("0", "1", KEY, given, deadline=began + ahead)
        assert found is None
        return time.monotonic() - began

    control = control_pid(pair.sender)
    with stopped(control):
        assert 0.3 <= timed(0.3, None) < 2.3
        assert 0.3 <= timed(0.3, metadata) < 2.3
        began = time.monotonic()
        assert pair.get(KEY, metadata) is None  # get_timeout_seconds
        assert time.monotonic() - began < 3.0
    eventually(lambda: not quarantined(pair.receiver) or pair.receiver.get_wakeup_generation() < 0, "x", 10)
    pair.receiver.abandon_get(KEY)
    kill(control)
    eventually(lambda: pair.sender.health()["status"] == "unhealthy", "given up")
    assert 0.3 <= timed(0.3, {**metadata, "data_size": 77}) < 2.3
    assert pair.sender.put("0", "1", "x", b"x") == (False, 0, None)  # and says so


@pytest.mark.slow
@pytest.mark.timeout(600)
@every_way
def test_i4_deaths_at_random_moments(make_connector: Factory, way: dict[str, Any]) -> None:
    """Control process and workers die again and again under traffic; every payload arrives, once."""
    pair = make_connector.pair(num_transfer_workers=2, **way)
    stop = threading.Event()
    rng = random.Random(4)
    deaths = Counter[str]()

    def reap() -> None:
        while not stop.wait(rng.uniform(0.0, 0.4)):
            pid = pair.sender.heart.supervisor.pid if pair.sender.heart else 0
            if not pid:
                continue
            try:
                victims = [child.pid for child in psutil.Process(pid).children()]
            except psutil.NoSuchProcess:
                continue
            if victims and rng.random() < 0.5:
                deaths["worker"] += 1
                kill(rng.choice(victims))
            else:
                deaths["control"] += 1
                kill(pid)

    def send() -> int:
        number = 0
        while not stop.is_set():
            if pair.sender.put("0", "1", f"k{number}", stamped(number, 0, 6000))[0]:
                number += 1
            stop.wait(0.005)
        return number

    def receive() -> int:
        number = 0
        while not sending.done or number < sending.result():
            began = time.monotonic()
            found = pair.receiver.get_with_deadline("0", "1", f"k{number}", deadline=began + 0.5)
            assert time.monotonic() - began < 5.5, "a get outlived its deadline"
            if found is None:
                assert time.monotonic() < give_up, f"k{number} was lost: {pair.receiver.health()}"
                continue
            with found[0] as buffer:
                assert read_stamp(buffer.to_bytes()) == (number, 0)
            number += 1
        return number

    give_up = time.monotonic() + SOAK_SECONDS + 60
    sending, reaping = Background(send), Background(reap)
    receiving = Background(receive)
    stop.wait(SOAK_SECONDS)
    stop.set()
    reaping.result()
    assert receiving.result(90) == sending.result() > 0
    assert deaths["control"] > 0
    pair.assert_whole(15)


def test_i4_the_death_of_a_stage_ends_its_children(
    make_stage: type[StageProcess], runtime_base: Path
) -> None:
    stage = make_stage(**SENDING_STAGE)
    assert stage.ask("put", key="k", size=5000, seed=1)[0]
    family = stage.family()
    assert len(family) == 4  # itself, the control process, two workers
    assert any(folder.name.startswith(f"{stage.pid}-") for folder in runtime_base.iterdir())
    with stopped(family[-1].pid):  # one of them is in no state to notice
        began = time.monotonic()
        stage.kill()
        eventually(lambda: not any(p.is_running() and state_of(p.pid) != "Z" for p in family), "gone", 2.0)
        assert time.monotonic() - began < 2.0
    eventually(lambda: not list(runtime_base.iterdir()), "runtime directory gone", 1.0)


def test_i4_leases_survive_the_control_process(make_connector: Factory) -> None:
    """A lease is a record in the pool: the new control process honours it, and its end."""
    pair = make_connector.pair(memory_pool_size=64 * 1024, **LEASE)
    for key in ("before", "during", "after", "unread"):
        pair.put(key, pattern(12_000, len(key)))
    buffers = {key: pair.wait(key)[0] for key in ("before", "during", "after")}
    buffers["before"].release()
    dead = control_pid(pair.sender)
    with stopped(dead):
        kill(dead)
        buffers["during"].release()
    restarted(pair.sender, 1)
    for number in range(8):
        pair.put(f"k{number}", pattern(12_000, 100 + number))
        assert pair.wait_bytes(f"k{number}") == pattern(12_000, 100 + number)
    assert buffers["after"].to_bytes() == pattern(12_000, len("after"))
    eventually(lambda: (pair.sender.reap_consumed(), pair.sender.publisher.outstanding == 2)[1], "two left")
    buffers["after"].release()
    assert pair.wait_bytes("unread") == pattern(12_000, len("unread"))
    pair.assert_whole()


def test_i4_dead_lease_holder_frees_the_senders_pool(make_connector: Factory, v2_client: MakeV2) -> None:
    """Also when the control process that granted the leases is dead."""
    sender = make_connector.sender(**LEASE)
    holder = psutil.Popen(["sleep", "1000"])  # who holds a lease is known by its process id
    client = v2_client(sender.zmq_port or 0)
    client.hello(holder.pid)
    for number in range(3):
        assert sender.put("0", "1", f"k{number}", pattern(5000, number))[0]
        client.send("pull", number, f"k{number}@0_1", 5000, 0, True)
        assert client.expect("done")[2] == ""
    kill(control_pid(sender))
    restarted(sender, 1)
    assert sender.health()["sender"]["ledger"]["entries"]["leased"] == 3
    holder.kill()
    holder.wait()
    assert_whole(sender)
    assert sender.health()["sender"]["ledger"]["counters"]["abandoned"] == 3


def test_i4_dead_reader_frees_the_senders_pool(
    make_connector: Factory, make_stage: type[StageProcess]
) -> None:
    """What a receiver read in place is not touched before it is dead, and free one TTL later at most."""
    sender = make_connector.sender(buffer_ttl_seconds=3.0, **LEASE)
    holder = receiving_stage(make_stage, sender)
    for number in range(3):
        assert sender.put("0", "1", f"k{number}", pattern(5000, number))[0]
        assert holder.ask("hold", key=f"k{number}") == 5000
    expected = [hashlib.sha256(pattern(5000, number)).hexdigest() for number in range(3)]
    kill(control_pid(sender))  # the one that knows of them
    restarted(sender, 1)
    for number in range(20):
        assert sender.put("0", "2", f"filler{number}", pattern(5000, 100 + number))[0]
    assert holder.ask("digest") == expected
    for number in range(20):
        sender.cleanup(f"filler{number}")
    eventually(lambda: (sender.reap_consumed(), sender.publisher.outstanding == 3)[1], "the held ones left")
    holder.kill()
    assert_whole(sender, seconds=10)


# --------------------------------------------------------------------------- I5 close() returns
def close_in_time(connector: MoriTransferEngineConnector) -> None:
    """close() within five seconds, and again at once."""
    for limit in (5.0, 0.5):
        began = time.monotonic()
        connector.close()
        assert time.monotonic() - began < limit


@pytest.mark.parametrize("which", ["worker", "workers", "control", "all"])
def test_i5_own_children_stopped(make_connector: Factory, which: str) -> None:
    pair = make_connector.pair(num_transfer_workers=2, **LANDING)
    pair.put("warm", b"x")
    pair.wait_bytes("warm")
    control, workers = control_pid(pair.sender), worker_pids(pair.sender)
    victims = {
        "worker": workers[:1],
        "workers": workers,
        "control": [control],
        "all": [control, *workers],
    }[which]
    with stopped(*victims):
        pair.put(KEY, pattern(5000))
        pulling = Background(lambda: pair.get(KEY))
        pulling.entered.wait()
        close_in_time(pair.sender)
        # All is let go of when close() returns; the kernel may still be taking the last one down.
        eventually(
            lambda: all(state_of(pid) in ("", "Z") for pid in (control, *workers)), "children gone", 1.0
        )
        close_in_time(pair.receiver)
    found = pulling.result(5)
    assert found is None or found[0].to_bytes() == pattern(5000)  # a worker that is not stopped may do it


def test_i5_peer_stopped(make_connector: Factory, make_stage: type[StageProcess]) -> None:
    """A stage that is stopped, with everything below it, holds up neither its receiver nor its sender."""
    upstream = make_stage(**SENDING_STAGE, **LANDING)
    receiver = make_connector.receiver(upstream.hello["port"], **LANDING)
    upstream.ask("put", key="warm", size=10, seed=0)
    assert receiver.get_with_deadline("0", "1", "warm", deadline=time.monotonic() + 10)
    with stopped(*(process.pid for process in upstream.family())):
        waiting = Background(
            lambda: receiver.get_with_deadline("0", "1", KEY, deadline=time.monotonic() + 60)
        )
        waiting.entered.wait()
        close_in_time(receiver)
        assert waiting.result(5) is None


def test_i5_lease_holder_stopped(make_connector: Factory, make_stage: type[StageProcess]) -> None:
    sender = make_connector.sender(**LEASE)
    holder = receiving_stage(make_stage, sender)
    sender.put("0", "1", KEY, pattern(5000))
    assert holder.ask("hold", key=KEY) == 5000
    with stopped(holder.pid):
        for number in range(50):
            sender.put("0", "1", f"k{number}", b"notices that nobody reads")
        close_in_time(sender)
    # The memory that it reads is its own as well by now.
    assert holder.ask("digest") == [hashlib.sha256(pattern(5000)).hexdigest()]
    assert holder.ask("release") == 1
    assert holder.ask("close") < 5.0


@pytest.mark.parametrize("mode", ["process", "thread"])
@pytest.mark.parametrize("call", ["get_with_deadline", "unreachable sender", "wait_for_change", "put"])
def test_i5_another_thread_inside_a_call(make_connector: Factory, call: str, mode: str) -> None:
    pair = make_connector.pair(worker_mode=mode, memory_pool_size=64 * 1024, **LANDING)
    pair.put("warm", b"x")
    pair.wait_bytes("warm")
    nowhere = {"source_host": "127.0.0.1", "source_port": 1, "data_size": 10}
    end, blocked = {
        "get_with_deadline": (pair.receiver, lambda: _get(pair.receiver, None)),
        "unreachable sender": (pair.receiver, lambda: _get(pair.receiver, nowhere)),
        "wait_for_change": (pair.receiver, lambda: _wait_for_change(pair.receiver)),
        "put": (pair.sender, lambda: pair.sender.put("0", "1", "more", pattern(50_000))),
    }[call]
    if call == "put":
        pair.put("full", pattern(60_000))
    waiting = Background(blocked)
    waiting.entered.wait()
    time.sleep(0.05)  # into the wait itself
    assert not waiting.done
    close_in_time(end)
    assert waiting.result(5.0) in (None, False, (False, 0, None))


def _get(receiver: MoriTransferEngineConnector, metadata: Any) -> Any:
    return receiver.get_with_deadline("0", "1", KEY, metadata, deadline=time.monotonic() + 60)


def _wait_for_change(receiver: MoriTransferEngineConnector) -> bool:
    return receiver.wait_for_change(receiver.get_wakeup_generation(), 60)


def test_i5_a_closed_receiver_does_not_spin(make_connector: Factory) -> None:
    """Threads that were waiting have left, rather than burn a core until their deadline."""
    pair = make_connector.pair(worker_mode="thread")
    pair.put("warm", b"x")
    pair.wait_bytes("warm")
    waiting = [Background(lambda: _get(pair.receiver, None)) for _ in range(4)]
    waiting.append(Background(lambda: _wait_for_change(pair.receiver)))
    for one in waiting:
        one.entered.wait()
    pair.receiver.close()
    for one in waiting:
        one.result(2.0)


def test_i5_close_while_the_listener_starts(make_connector: Factory) -> None:
    """close() beside the first put() of a receiver: no child may be left (`leaks` checks)."""
    for delay in (0.0, 0.05, 0.2, 0.4):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        receiver = make_connector.receiver(port - 1)
        putting = Background(lambda receiver=receiver: receiver.put("1", "2", KEY, b"x"))
        putting.entered.wait()
        time.sleep(delay)
        close_in_time(receiver)
        with suppress(ConnectorClosed, StartupError):
            putting.result(10)


def test_i5_dead_children(make_connector: Factory) -> None:
    sender = make_connector.sender(restart_limit=0)
    for pid in (control_pid(sender), *worker_pids(sender)):
        kill(pid)
    close_in_time(sender)


# ---------------------------------------------------------------------- I6 anything from outside
class Hostile:
    """A sender under attack: who its control process is, how large it was, whether it still serves."""

    def __init__(self, sender: MoriTransferEngineConnector, good: V1Client) -> None:
        self.sender = sender
        self.port = sender.zmq_port or 0
        self._good = good
        self.serves()
        self.control = control_pid(sender)
        self.growth = 24 * MIB
        self._before = resident_bytes(self.control)

    def serves(self) -> None:
        """A well-behaved client gets its payload."""
        assert self.sender.put("0", "1", "good", pattern(5000, 7))[0]
        assert self._good.pull("good@0_1", 5000) == b"trans_done"
        assert self._good.bytes_at(0, 5000) == pattern(5000, 7)

    @property
    def grown(self) -> int:
        """Bytes by which the control process is larger than before."""
        return resident_bytes(self.control) - self._before

    def unharmed(self) -> None:
        """It serves, is the same process, and has not grown."""
        self.serves()
        assert control_pid(self.sender) == self.control
        assert self.sender.health()["control_restarts"] == 0
        assert self.grown < self.growth, f"control process grew by {self.grown / MIB:.1f} MiB"


@pytest.fixture
def hostile(make_connector: Factory, v1_client: MakeV1) -> Iterator[Hostile]:
    sender = make_connector.sender(eager_bytes=MIB, memory_pool_size=16 * MIB)
    hostile = Hostile(sender, v1_client(sender.zmq_port or 0))
    yield hostile
    hostile.unharmed()


def test_i6_random_bytes_and_half_open_connections(hostile: Hostile) -> None:
    rng = random.Random(5)
    open_connections = []
    for number in range(150):
        connection = socket.create_connection(("127.0.0.1", hostile.port), timeout=5)
        open_connections.append(connection)
        try:
            if number % 3 == 0:
                connection.sendall(rng.randbytes(rng.randrange(1, 5000)))
            elif number % 3 == 1:  # a ZMTP greeting, whole or in part, then nothing or nonsense
                greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
                connection.sendall(greeting[: rng.randrange(1, 65)])
                connection.sendall(rng.randbytes(rng.randrange(0, 300)))
        except OSError:
            pass  # it has hung up, which is its right
        if number % 10 == 9:
            hostile.serves()
    hostile.unharmed()
    for connection in open_connections:
        connection.close()


def test_i6_random_messages(hostile: Hostile, v2_client: MakeV2) -> None:
    rng = random.Random(6)
    client = v2_client(hostile.port)
    for number in range(1500):
        frames = [rng.randbytes(rng.choice([0, 1, 4, 30, 1000])) for _ in range(rng.randrange(1, 6))]
        if rng.random() < 0.5:
            frames[-1] = rng.choice([MAGIC, b"query_info"]) + frames[-1]
        client.socket.send_multipart(frames)
        if number % 300 == 299:
            hostile.serves()


def _nonsense(rng: random.Random) -> Any:
    return rng.choice(
        [
            *(None, True, -1, 0, 1, 1 << 31, 1 << 32, 1 << 62, (1 << 64) - 1, 1.5),
            *("", "k@0_1", "\x00", "ü" * 400, b"", b"\xff" * 50),
            *([], [1, 2], ["0_1"] * 60, {}, {"a": 1}),
        ]
    )


def test_i6_well_formed_messages_with_nonsense_inside(hostile: Hostile, v2_client: MakeV2) -> None:
    """Right tags and, half the time, right types; sizes, ids and descriptors of every wrong kind."""
    rng = random.Random(7)
    client = v2_client(hostile.port)
    host = client.hello(0, edges=("0_1",), eager_credit=1 << 40)[6]
    whole = [-1, 0, 1, 5, 1 << 31, (1 << 62) - 1, (1 << 64) - 1]
    holder = psutil.Popen(["sleep", "1000"])  # in whose name leases are taken
    for number in range(1500):
        key = rng.choice(["k@0_1", "nothing", "@", "k@9_9"])
        messages = {
            "hello": [
                1, 2, f"e{number % 7}", rng.choice([holder.pid, 1 << 21, 0]), rng.choice([host, "elsewhere"]),
                b"e", rng.choice([b"", b"m"]), ["0_1"], rng.choice(whole), True,
            ],
            "pull": [rng.choice(whole), key, rng.choice(whole), rng.choice(whole), rng.random() < 0.5],
            "audit": [rng.choice(whole), [key] * rng.randrange(34)],
            "settle": [[rng.choice(whole) for _ in range(3)], [rng.choice(whole) for _ in range(3)]],
            "abandon": [[rng.choice(whole) for _ in range(5)]],
        }  # fmt: skip
        tag = rng.choice(list(messages))
        fields = messages[tag]
        if rng.random() < 0.5:
            fields[rng.randrange(len(fields))] = _nonsense(rng)
        try:
            body = MAGIC + encode([tag, *fields])
        except OverflowError:
            continue
        client.socket.send(body)
        if number % 250 == 249:
            hostile.sender.put("0", "1", "k", pattern(3000))
            hostile.serves()
    holder.kill()
    holder.wait()
    hostile.sender.cleanup("k")
    assert_whole(hostile.sender, seconds=10)


def test_i6_lease_and_landing_of_one_payload_by_one_receiver(
    hostile: Hostile, v1_client: MakeV1, v2_client: MakeV2
) -> None:
    client = v2_client(hostile.port)
    pool = v1_client(hostile.port)
    client.hello(os.getpid(), engine_desc=pool.engine_desc, mem_desc=pool.mem_desc)
    hostile.sender.put("0", "1", "k", pattern(3000))
    client.send("pull", 10, "k@0_1", 3000, 0, True)
    granted = client.expect("done")
    assert granted[1:3] == [10, ""]
    client.send("pull", 11, "k@0_1", 3000, 0, False)
    assert client.expect("done")[2] in ("not_found", "busy")
    client.send("settle", [], [granted[4]])
    assert_whole(hostile.sender)


@pytest.mark.parametrize("pid", ["thread", "dead", "beyond"])
def test_i6_lease_for_a_process_that_is_none(hostile: Hostile, pid: str, v2_client: MakeV2) -> None:
    ready, done = threading.Event(), threading.Event()
    tid = 0

    def thread() -> None:
        nonlocal tid
        tid = threading.get_native_id()
        ready.set()
        done.wait()

    living = threading.Thread(target=thread)
    living.start()
    ready.wait()
    dead = psutil.Popen(["true"])
    dead.wait()
    client = v2_client(hostile.port)
    number = {"thread": tid, "dead": dead.pid, "beyond": 1 << 40}[pid]
    hostile.sender.put("0", "1", "k", pattern(3000))
    if pid == "beyond":
        client.send("hello", 1, 2, "e", number, "h", b"", b"", [], 0, True)
        assert client.socket.recv_multipart() == [b"", b"trans_error"]
    else:
        client.hello(number)
        client.send("pull", 10, "k@0_1", 3000, 0, True)
        client.expect("done")
    done.set()
    living.join()
    hostile.sender.cleanup("k")
    assert_whole(hostile.sender)  # a lease that nobody can hold has ended


def test_i6_huge_frames(hostile: Hostile) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    for size in (1 << 17, 8 * MIB, 64 * MIB):
        attacker = context.socket(zmq.DEALER)
        attacker.setsockopt(zmq.LINGER, 0)
        attacker.setsockopt(zmq.RECONNECT_IVL, 10_000)
        attacker.connect(f"tcp://127.0.0.1:{hostile.port}")
        attacker.send(bytes(size))
        attacker.close(200)
        hostile.serves()
    context.destroy(0)


@pytest.mark.slow
def test_i6_a_message_that_never_ends(hostile: Hostile) -> None:
    """ZMQ keeps its frames without bound; the control process notices, and hangs up on everybody."""
    with suppress(ConnectionError), endless_message(hostile.port, 800 * MIB) as attacker:
        attacker.settimeout(20)
        while attacker.recv(4096):
            pass
    eventually(lambda: hostile.grown < hostile.growth, "memory given back")


def test_i6_subscribers_that_never_read(hostile: Hostile, v2_client: MakeV2) -> None:
    """Notices with payloads inside are bounded by credit, and neither asking nor coming again renews it."""
    # The credit of three at a time, which malloc may keep each time; without it an attack would take 1.8 GB.
    hostile.growth += 3 * 3 * 16 * MIB
    for number in range(12):
        hostile.sender.put("0", "1", f"k{number}", pattern(MIB, number))
    for attack in range(3):
        clients = [v2_client(hostile.port) for _ in range(3)]
        for number, client in enumerate(clients):
            client.socket.setsockopt(zmq.RCVHWM, 1)
            who = f"glutton{attack}{number}"
            for again in range(50):
                client.send("hello", 1, 2, who, os.getpid(), "h", b"", b"", ["0_1"], 1 << 40, True)
                client.send("audit", again, [f"k{n}@0_1" for n in range(12)])
        hostile.unharmed()
        for client in clients:
            client.close()
    for number in range(12):
        hostile.sender.cleanup(f"k{number}")


def test_i6_a_flood_of_requests_is_bounded(hostile: Hostile, v2_client: MakeV2) -> None:
    """Parked pulls and unknown peers have a limit each; beyond it requests are refused, not kept."""
    client = v2_client(hostile.port)
    client.hello(os.getpid())
    for number in range(6000):
        client.send("pull", number, f"never{number}@0_1", 10, 0, True)
    report = hostile.sender.health()["sender"]
    assert report["parked"] <= 4096
    hostile.serves()
    eventually(lambda: hostile.sender.health()["sender"]["parked"] == 0, "refused in the end")


def test_i6_nonsense_from_a_sender_does_not_harm_a_receiver(make_connector: Factory) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    receiver = make_connector.receiver(port)
    getting = Background(lambda: receiver.get_with_deadline("0", "1", KEY, deadline=time.monotonic() + 2.0))
    identity = router.recv_multipart()[0]
    rng = random.Random(8)
    tags = ["welcome", "ready", "gone", "done", "stranger"]
    for _ in range(500):
        fields = [_nonsense(rng) for _ in range(rng.randrange(9))]
        try:
            body = MAGIC + encode([rng.choice(tags), *fields])
        except OverflowError:
            continue
        frames = [body] if rng.random() < 0.7 else [b"", rng.randbytes(20)]
        router.send_multipart([identity, *frames])
    assert getting.result() is None
    # A lease of memory outside the pool, or of a pool that is none, is an error and nothing else.
    assert receiver.get("0", "1", KEY) is None
    router.close(0)
    context.term()


# ------------------------------------------------------------------------- I7 not the stage's GIL
@pytest.fixture(scope="module")
def shared_stage(runtime_base: Path) -> Iterator[StageProcess]:
    stage = StageProcess(runtime_base, **{**SENDING_STAGE, "memory_pool_size": 16 * MIB, "eager_bytes": 1000})
    yield stage
    assert stage.ask("close") < 5.0
    stage.close()


def test_i7_v1_pulls_are_served_while_the_stage_is_stopped(
    shared_stage: StageProcess, v1_client: MakeV1
) -> None:
    shared_stage.ask("put", key="a", size=50_000, seed=1)
    client = v1_client(shared_stage.hello["port"])
    with stopped(shared_stage.pid):
        answer = client.query("a@0_1")
        assert answer is not None
        assert answer["data_size"] == 50_000
        assert client.pull("a@0_1", 50_000) == b"trans_done"
        assert client.query("a@0_1") is None
        assert state_of(shared_stage.pid) == "T"
    assert client.bytes_at(0, 50_000) == pattern(50_000, 1)


@pytest.mark.parametrize("size", [100, 50_000], ids=["eager", "pulled"])
@pytest.mark.parametrize("delivery", ["lease", "landing"])
def test_i7_v2_receivers_are_served_while_the_stage_is_stopped(
    make_connector: Factory, shared_stage: StageProcess, delivery: str, size: int
) -> None:
    keys = [f"{delivery}{size}-{number}" for number in range(5)]
    for number, key in enumerate(keys):
        shared_stage.ask("put", key=key, size=size, seed=number)
    with stopped(shared_stage.pid):
        receiver = make_connector.receiver(shared_stage.hello["port"], delivery=delivery)  # a new session
        for number, key in enumerate(keys):
            found = receiver.get_with_deadline("0", "1", key, deadline=time.monotonic() + 10)
            assert found is not None
            with found[0] as buffer:
                assert buffer.to_bytes() == pattern(size, number)
        assert state_of(shared_stage.pid) == "T"
        kinds = {"eager", delivery} if size == 100 else {delivery}  # a lender may offer what is small, too
        assert sum(counter(receiver, kind) for kind in kinds) == 5
        receiver.close()
    eventually(lambda: shared_stage.ask("health")["pool"]["used_bytes"] == 0, "all freed")


def test_i7_a_worker_is_replaced_while_the_stage_is_stopped(
    shared_stage: StageProcess, v1_client: MakeV1
) -> None:
    shared_stage.ask("put", key="w", size=50_000, seed=9)
    client = v1_client(shared_stage.hello["port"])
    workers = [p.pid for p in shared_stage.family() if "worker" in p.cmdline()]
    with stopped(shared_stage.pid):
        for worker in workers:
            kill(worker)
        assert client.pull("w@0_1", 50_000) == b"trans_done"
    assert client.bytes_at(0, 50_000) == pattern(50_000, 9)


def test_i7_log_lines_that_nobody_reads_hold_up_nobody(shared_stage: StageProcess, v1_client: MakeV1) -> None:
    """The children's log goes to the stage; when it does not read, lines are lost, not pulls."""
    shared_stage.ask("put", key="l", size=5000, seed=3)
    client = v1_client(shared_stage.hello["port"])
    with stopped(shared_stage.pid):
        for _ in range(3000):  # each is an error that is logged: far more than a pipe holds
            assert client.pull("l@0_1", 4999) == b"trans_error"
        assert client.pull("l@0_1", 5000) == b"trans_done"


def test_i7_memory_freed_meanwhile_is_there_afterwards(
    make_connector: Factory, shared_stage: StageProcess, v1_client: MakeV1
) -> None:
    for number in range(200):
        shared_stage.ask("put", key=f"m{number}", size=50_000, seed=number)
    client = v1_client(shared_stage.hello["port"])
    with stopped(shared_stage.pid):
        for number in range(200):
            assert client.pull(f"m{number}@0_1", 50_000) == b"trans_done"
    eventually(lambda: shared_stage.ask("health")["pool"]["used_bytes"] == 0, "all freed")
