"""Cards of connectors: who is found, who is not, and that plans are made one after another."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from connector_support import Background, Factory, control_pid, eventually, kill, short_directory, worker_pids

from mori_mp.shared import registry
from mori_mp.shared.errors import StartupError
from mori_mp.shared.registry import Card, PlanCard


@pytest.fixture
def base() -> Iterator[Path]:
    with short_directory() as path:
        yield path


def card(**changes: Any) -> Card:
    plan = PlanCard(control="3", workers=["1-2", None], node=0, degraded=False, reasons=[])
    known = Card(
        stage_id=0,
        role="sender",
        pid=os.getpid(),
        start_ticks=registry.start_ticks(os.getpid()) or 0,
        started=time.time(),
        engine="shm",
        endpoint="tcp://127.0.0.1:50051",
        serving=True,
        worker_mode="process",
        pool_device="cpu",
        pool_size=4096,
        plan=plan,
    )
    return msgspec.structs.replace(known, **changes)


def place(base: Path, name: str, found: Card) -> Path:
    folder = base / name
    folder.mkdir()
    registry.write(folder, found)
    return folder


# -------------------------------------------------------------------------------- cards
def test_cards_are_found_by_stage_the_oldest_first(base: Path) -> None:
    place(base, "10-c", card(stage_id=2, started=3.0))
    place(base, "10-b", card(stage_id=1, started=9.0))
    place(base, "10-a", card(stage_id=1, started=4.0))
    assert [(f.card.stage_id, f.card.started) for f in registry.live(base)] == [(1, 4.0), (1, 9.0), (2, 3.0)]
    assert registry.live(base)[0].health_socket == base / "10-a" / "health.sock"
    assert sorted(os.listdir(base / "10-a")) == ["connector.json"]


def test_the_dead_and_reused_pids_are_passed_over(base: Path) -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as process:
        ticks = registry.start_ticks(process.pid)
        assert ticks is not None
        place(base, "1-alive", card(pid=process.pid, start_ticks=ticks))
        place(base, "1-reused", card(pid=process.pid, start_ticks=ticks - 1))
        assert [found.folder.name for found in registry.live(base)] == ["1-alive"]
        process.kill()
    assert registry.live(base) == []
    assert registry.start_ticks(process.pid) is None


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"[]", b'{"version": 1}', b"\xff\xfe", b'{"version": 99, "stage_id": 0}', b"9" * 200_000],
)
def test_a_card_that_is_none_is_passed_over(base: Path, text: bytes) -> None:
    folder = base / "1-x"
    folder.mkdir()
    (folder / registry.CARD).write_bytes(text)
    place(base, "2-x", card())
    assert [found.folder.name for found in registry.live(base)] == ["2-x"]


def test_a_card_of_a_newer_version_is_passed_over(base: Path) -> None:
    place(base, "1-x", card(version=2))
    assert registry.live(base) == []
    assert registry.live(base / "absent") == []


def test_a_card_that_cannot_be_written_names_its_place(base: Path) -> None:
    with pytest.raises(StartupError, match=r"connector\.json cannot be written"):
        registry.write(base / "absent", card())


def test_taken_cpus_are_those_of_the_others(base: Path) -> None:
    ours = place(base, "1-a", card())
    place(base, "2-b", card(plan=PlanCard(control=None, workers=["8"], node=0, degraded=False, reasons=[])))
    broken = PlanCard(control="x", workers=["9"], node=0, degraded=False, reasons=[])
    place(base, "3-c", card(plan=broken))
    assert registry.taken_cpus(base, but=ours) == {8, 9}
    assert registry.taken_cpus(base) == {1, 2, 3, 8, 9}


def test_the_directory_of_another_user_is_not_trusted(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place(base, "1-a", card())
    assert len(registry.live(base)) == 1
    owner = base.stat().st_uid
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    assert registry.live(base) == []


# -------------------------------------------------------------------------------- planning, one at a time
def test_only_one_plans_at_a_time(base: Path) -> None:
    inside = threading.Event()
    order: list[str] = []

    def second() -> None:
        with registry.planning(base) as alone:
            assert alone
            order.append("second")

    with registry.planning(base) as alone:
        assert alone
        inside.set()
        other = Background(second)
        other.entered.wait()
        order.append("first")
    other.result()
    assert order == ["first", "second"]
    assert os.listdir(base) == []


def test_a_lock_that_is_not_to_be_had_is_told(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "LOCK_SECONDS", 0.05)
    with registry.planning(base), registry.planning(base) as alone:
        assert not alone


def test_a_file_system_without_locks_is_no_obstacle(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(registry.fcntl, "flock", refuse)
    with registry.planning(base) as alone:
        assert not alone


# -------------------------------------------------------------------------------- reading health.sock
def answer(base: Path, *parts: bytes, hold: threading.Event | None = None) -> tuple[Path, Background]:
    """A socket that sends one client these parts."""
    path = base / "health.sock"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()

    def serve() -> None:
        with listener, listener.accept()[0] as client:
            for part in parts:
                client.sendall(part)
            if hold is not None:
                hold.wait(10)

    return path, Background(serve)


def test_a_document_may_come_in_parts(base: Path) -> None:
    path, server = answer(base, b'{"status": "hea', b'lthy"}\n')
    assert registry.read_health(path, 5.0) == {"status": "healthy"}
    server.result()


@pytest.mark.parametrize(
    ("text", "message"),
    [(b"", "no JSON document"), (b"[1]", "no JSON object"), (b"\xff", "no JSON document")],
)
def test_what_is_no_document_is_refused(base: Path, text: bytes, message: str) -> None:
    path, server = answer(base, text)
    with pytest.raises(ValueError, match=message):
        registry.read_health(path, 5.0)
    server.result()


def test_one_who_never_ends_is_left_in_time(base: Path) -> None:
    hold = threading.Event()
    path, server = answer(base, b"{", hold=hold)
    with pytest.raises(OSError, match="timed out"):
        registry.read_health(path, 0.1)
    hold.set()
    server.result()
    with pytest.raises(OSError):
        registry.read_health(base / "nobody.sock", 0.1)


def test_an_endless_answer_is_cut(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "MAX_HEALTH_BYTES", 1000)
    path, server = answer(base, b" " * 2000)
    with pytest.raises(ValueError, match="more than 1000 bytes"):
        registry.read_health(path, 5.0)
    server.result()


# -------------------------------------------------------------------------------- real connectors
def test_a_connector_leaves_its_card_while_it_lives(make_connector: Factory, runtime_base: Path) -> None:
    sender = make_connector.sender(control_cpus="0", worker_cpus="0", num_transfer_workers=2, stage_id=3)
    (found,) = registry.live(runtime_base)
    assert found.card.stage_id == 3
    assert found.card.endpoint == f"tcp://127.0.0.1:{sender.zmq_port}"
    assert (found.card.plan.control, found.card.plan.workers) == ("0", ["0", "0"])
    assert registry.taken_cpus(runtime_base) == {0}
    assert json.loads((found.folder / registry.CARD).read_text())["pid"] == os.getpid()
    sender.close()
    assert registry.live(runtime_base) == []


def test_health_sock_tells_what_the_control_process_knows(
    make_connector: Factory, runtime_base: Path
) -> None:
    sender = make_connector.sender()
    (found,) = registry.live(runtime_base)
    document = registry.read_health(found.health_socket, 5.0)
    pids = {entry["role"]: entry["pid"] for entry in document["processes"]}
    assert pids == {"stage": os.getpid(), "control": control_pid(sender), "worker": worker_pids(sender)[0]}


def test_health_sock_comes_back_with_a_new_control_process(
    make_connector: Factory, runtime_base: Path
) -> None:
    sender = make_connector.sender()
    (found,) = registry.live(runtime_base)
    first = control_pid(sender)
    kill(first)

    def successor() -> bool:
        try:
            document = registry.read_health(found.health_socket, 5.0)
        except OSError:
            return False
        return any(e["role"] == "control" and e["pid"] not in (None, first) for e in document["processes"])

    eventually(successor, "another control process answers")


def test_garbage_and_idlers_do_not_hurt_health_sock(make_connector: Factory, runtime_base: Path) -> None:
    pair = make_connector.pair()
    (found,) = registry.live(runtime_base)
    with ExitStack() as idle:
        for _ in range(30):
            client = idle.enter_context(socket.socket(socket.AF_UNIX))
            client.connect(str(found.health_socket))
            with suppress(BrokenPipeError, ConnectionResetError):  # it has answered and gone
                client.sendall(b"\xff{garbage" * 1000)
        pair.put("k", b"payload" * 1000)
        assert pair.wait_bytes("k") == b"payload" * 1000
        assert registry.read_health(found.health_socket, 5.0)["status"] == "healthy"
    pair.assert_whole()
