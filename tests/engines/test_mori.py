"""The engine over real Mori (the published amd-mori wheel): configuration, keys, and its known faults."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
from engine_host import pattern
from engine_rig import MB, EngineHost, Rig

from mori_mp.shared.errors import ConfigError, EngineUnavailable, TransferFailed, WireError
from mori_mp.workers import engines
from mori_mp.workers.engines import mori_api
from mori_mp.workers.engines.base import LocalMemory
from mori_mp.workers.engines.mori import MoriEngine

_SENT, _OLD = pattern(1, MB), pattern(0, MB)


# -------------------------------------------------------------------------------- configuration
def test_every_key_reaches_moris_own_configuration(mori_rig: Rig, start) -> None:
    host = start(mori_rig)
    given = {
        "qp_per_transfer": 3,
        "post_batch_size": 7,
        "num_worker_threads": 2,
        "enable_transfer_chunking": True,
        "chunk_bytes": 131072,
        "max_chunks_per_transfer": 9,
        "num_nics_per_transfer": 4,
        "poll_cq_mode": "event",
        "xgmi_num_streams": 5,
        "xgmi_num_events": 6,
        "device_name": "",
    }
    rdma = host("backend_config", "rdma", given)
    expected = {name: str(given[name]) for name in given if name in rdma and name != "poll_cq_mode"}
    assert len(expected) == 7
    assert expected.items() <= rdma.items()
    assert rdma["poll_cq_mode"] == "PollCqMode.EVENT"
    for backend in ("xgmi", "fabric"):
        found = host("backend_config", backend, given)
        assert (found["num_streams"], found["num_events"]) == ("5", "6")


def test_without_keys_the_configuration_is_the_in_tree_one(mori_rig: Rig, start) -> None:
    found = start(mori_rig)("backend_config", "rdma", {})
    assert (found["enable_notification"], found["poll_cq_mode"]) == ("False", "PollCqMode.POLLING")


def test_an_unknown_way_to_poll(mori_rig: Rig, start) -> None:
    with pytest.raises(ConfigError, match="allowed: polling, event"):
        start(mori_rig)("backend_config", "rdma", {"poll_cq_mode": "guess"})


@pytest.mark.parametrize(("streams", "events", "depth"), [(4, 16, 4), (16, 3, 3), (64, 64, 64)])
def test_depth_is_bounded_by_streams_and_events(
    mori_rig: Rig, start, streams: int, events: int, depth: int
) -> None:
    host = start(mori_rig)
    host.memory(MB)
    options = {"xgmi_num_streams": streams, "xgmi_num_events": events}
    assert host("load", "xgmi", options) == depth


# ------------------------------------------------------------------------------ what is missing
def test_rdma_without_a_device(mori_rig: Rig, start) -> None:
    host = start(mori_rig)
    host.memory(MB)
    options = {"host": "127.0.0.1", "device_name": "mlx5_7"}
    with pytest.raises(EngineUnavailable, match=r"no active RDMA device.*/sys/class/infiniband.*device_name"):
        host("load", "rdma", options)
    assert host("environment", "MORI_RDMA_DEVICES") == "mlx5_7"
    with pytest.raises(EngineUnavailable, match="set host"):
        host("load", "rdma", {})


def test_rocm_missing(mori_rig: Rig, start) -> None:
    host = start(mori_rig, LD_LIBRARY_PATH="")
    with pytest.raises(EngineUnavailable, match=r"does not load: .*ROCm 7 libraries"):
        host("backend_config", "xgmi", {})


@pytest.mark.skipif(find_spec("mori") is not None, reason="this interpreter has Mori")
def test_mori_missing() -> None:
    with pytest.raises(
        EngineUnavailable, match=r"not installed for .*worker_python.*CPython 3\.10 and 3\.12"
    ):
        engines.load("xgmi", LocalMemory(4096, 4096, 0), {})


def test_loading_mori_leaves_no_stand_in_for_torch(mori_rig: Rig, start) -> None:
    host = start(mori_rig)
    host("backend_config", "xgmi", {})
    assert host("has_module", "mori.io")
    assert not host("has_module", "torch")


def test_loading_mori_uses_the_torch_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    marker, seen = SimpleNamespace(), []

    def import_module(name: str) -> Any:
        seen.append(sys.modules["torch"])
        return SimpleNamespace(set_log_level=lambda level: None)

    monkeypatch.setitem(sys.modules, "torch", marker)  # type: ignore[arg-type]
    monkeypatch.setattr(mori_api, "import_module", import_module)
    mori_api.load_api()
    assert seen == [marker]
    assert sys.modules["torch"] is marker


# -------------------------------------------------------------------------------------- keys
def test_keys_are_never_used_twice() -> None:
    assert len({mori_api.new_key() for _ in range(100)}) == 100


def receiver_with_key(rig: Rig, start, key: str) -> tuple[EngineHost, tuple[bytes, bytes]]:
    receiver = start(rig)
    receiver("use_key", key)
    return receiver, receiver.become_receiver(MB)


def test_a_peer_that_restarts_with_its_old_key(mori_rig: Rig, start) -> None:
    sender = start(mori_rig)
    sender.become_sender(MB)
    first, descriptors = receiver_with_key(mori_rig, start, "stage-1")
    sender("add_peer", 1, *descriptors)
    sender("write", 1, [0], [0], [MB])
    first.kill()
    second, descriptors = receiver_with_key(mori_rig, start, "stage-1")
    sender("add_peer", 2, *descriptors)  # before the old one is dropped
    sender("write", 2, [0], [0], [MB])
    assert second("peek", 0, MB) == _SENT
    sender("drop_peer", 1)
    sender("write", 2, [100], [0], [10])
    assert second("peek", 0, 10) == _SENT[100:110]


def test_two_living_peers_with_one_key(mori_rig: Rig, start) -> None:
    sender = start(mori_rig)
    sender.become_sender(MB)
    hosts = []
    for peer in (1, 2):
        host, descriptors = receiver_with_key(mori_rig, start, "stage")
        sender("add_peer", peer, *descriptors)
        hosts.append(host)
    sender("write", 1, [0], [0], [8])
    sender("write", 2, [1000], [0], [8])
    assert hosts[0]("peek", 0, 8) == _SENT[:8]
    assert hosts[1]("peek", 0, 8) == _SENT[1000:1008]


def test_a_peer_with_our_own_key_is_refused(mori_rig: Rig, start) -> None:
    sender = start(mori_rig)
    sender("use_key", "everyone")
    sender.become_sender(MB)
    _, descriptors = receiver_with_key(mori_rig, start, "everyone")
    with pytest.raises(WireError, match="own engine key"):
        sender("add_peer", 1, *descriptors)
    _, descriptors = receiver_with_key(mori_rig, start, "somebody")
    sender("add_peer", 1, *descriptors)
    sender("write", 1, [0], [0], [MB])


def test_descriptors_of_two_engines_mixed_up(mori_rig: Rig, start) -> None:
    sender, first, second = start(mori_rig), start(mori_rig), start(mori_rig)
    sender.become_sender(MB)
    (engine_desc, _), (_, mem_desc) = first.become_receiver(MB), second.become_receiver(MB)
    with pytest.raises(WireError, match="came with engine"):
        sender("add_peer", 1, engine_desc, mem_desc)


# ------------------------------------------------------- states that real Mori cannot be brought to here
class FakeStatus:
    def __init__(self, code: str, message: str = "") -> None:
        self.code, self.message = code, message

    def InProgress(self) -> bool:
        return self.code == "IN_PROGRESS"

    def Succeeded(self) -> bool:
        return self.code == "SUCCESS"

    def Code(self) -> SimpleNamespace:
        return SimpleNamespace(name=self.code)

    def Message(self) -> str:
        return self.message


class FakeSession:
    def __init__(self, status: FakeStatus) -> None:
        self.status, self.living, self.writes = status, True, 0

    def alive(self) -> bool:
        return self.living

    def batch_write(self, *_: object) -> FakeStatus:
        self.writes += 1
        return self.status


class FakeIOEngine:
    def __init__(self, key: str, status: FakeStatus) -> None:
        self.key, self.status = key, status
        self.sessions: list[FakeSession] = []
        self.forgotten: list[str] = []

    def create_backend(self, *_: object) -> None: ...
    def register_memory(self, *_: object) -> None: ...
    def register_remote_engine(self, *_: object) -> None: ...

    def deregister_remote_engine(self, engine: Any) -> None:
        self.forgotten.append(engine.key)

    def get_engine_desc(self) -> SimpleNamespace:
        return SimpleNamespace(key=self.key)

    def create_session(self, *_: object) -> FakeSession:
        self.sessions.append(FakeSession(self.status))
        return self.sessions[-1]


def fake_mori(status: FakeStatus) -> SimpleNamespace:
    """Make as much of mori.io as the engine calls; its packed descriptors are the engine's key."""
    return SimpleNamespace(
        MemoryLocationType=SimpleNamespace(GPU="gpu", CPU="cpu"),
        BackendType=SimpleNamespace(RDMA="rdma"),
        PollCqMode=SimpleNamespace(POLLING="polling"),
        RdmaBackendConfig=SimpleNamespace,
        IOEngineConfig=SimpleNamespace,
        IOEngine=lambda key, config: FakeIOEngine(key, status),
        EngineDesc=SimpleNamespace(
            unpack=lambda packed: SimpleNamespace(key=packed.decode(), pid=0, hostname="there")
        ),
        MemoryDesc=SimpleNamespace(
            unpack=lambda packed: SimpleNamespace(
                engine_key=packed.decode(), size=4096, device_bus_id="", loc="cpu", ipc_handle=b""
            )
        ),
    )


def fake_engine(status: FakeStatus) -> MoriEngine:
    """Make an RDMA engine over a fake Mori whose writes have a given status, with a peer 1."""
    engine = MoriEngine("rdma", LocalMemory(4096, 4096), {"host": "here"}, api=fake_mori(status))
    engine.add_peer(1, b"peer", b"peer")
    return engine


def test_a_write_that_mori_never_began_is_a_failure() -> None:
    write = fake_engine(FakeStatus("INIT")).submit(1, [0], [0], [8], 1)
    with pytest.raises(TransferFailed, match="failed: INIT"):
        write.poll()


def test_a_failed_write_says_what_mori_said() -> None:
    write = fake_engine(FakeStatus("ERR_RDMA_OP", "retry counter exceeded")).submit(1, [0], [0], [8], 1)
    with pytest.raises(TransferFailed, match="peer failed: ERR_RDMA_OP retry counter exceeded"):
        write.poll()


def test_rdma_peers_share_an_engine_and_a_key_is_taken_once() -> None:
    engine = fake_engine(FakeStatus("SUCCESS"))
    with pytest.raises(EngineUnavailable, match="in use by another peer"):
        engine.add_peer(2, b"peer", b"peer")
    engine.add_peer(2, b"other", b"other")
    peers = engine._peers
    assert peers[1].lane is peers[2].lane
    engine.drop_peer(1)
    assert peers[2].lane.io.forgotten == ["peer"]
    engine.add_peer(3, b"peer", b"peer")


def test_a_session_that_mori_gave_up_is_made_anew() -> None:
    engine = fake_engine(FakeStatus("SUCCESS"))
    (first,) = engine._peers[1].lane.io.sessions
    first.living = False
    assert engine.submit(1, [0], [0], [8], 1).poll()
    assert (first.writes, [one.writes for one in engine._peers[1].lane.io.sessions]) == (0, [0, 1])


def test_a_write_that_never_ends_keeps_the_engine_after_close() -> None:
    engine = fake_engine(FakeStatus("IN_PROGRESS"))
    engine.submit(1, [0], [0], [8], 1)
    lane = engine._peers[1].lane
    engine.close()
    assert lane.io is not None
