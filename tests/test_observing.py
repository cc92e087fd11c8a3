"""What an operator sees of real connectors: health, dumps, metrics, logs and traces, also at a fault."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import socket
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from connector_support import (
    KEY,
    Factory,
    Pair,
    StageProcess,
    control_pid,
    eventually,
    kill,
    pattern,
    resident_bytes,
    stopped,
    worker_pids,
)
from test_tracing import assert_readable, events

from mori_mp import MoriTransferEngineConnector
from mori_mp.health import FaultDumps
from mori_mp.shared import registry
from mori_mp.shared.errors import ConfigError
from mori_mp.workers.dump import DumpFile

pytestmark = pytest.mark.xdist_group("observing")

DOCS = Path(__file__).resolve().parents[1] / "docs" / "health-schema.md"
SPANS = {"put", "publish", "pull", "dispatch", "write", "reply", "usable"}


@pytest.fixture
def metrics_port() -> int:
    """A port that is free now."""
    pytest.importorskip("prometheus_client")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def scrape(port: int, path: str = "/metrics") -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
        text: str = answer.read().decode()
        return text


def sample(text: str, name: str, **labels: str) -> float | None:
    """One sample of a scrape; None when it is not there."""
    for line in text.splitlines():
        found = re.fullmatch(rf"{re.escape(name)}\{{(.*)\}} (\S+)", line)
        if found and labels.items() <= dict(re.findall(r'(\w+)="([^"]*)"', found[1])).items():
            return float(found[2])
    return None


def told(connector: MoriTransferEngineConnector) -> dict[str, Any]:
    """The document that the control process tells at health.sock."""
    base = Path(os.environ["MORI_MP_RUNTIME_DIR"])
    (folder,) = base.glob(f"{os.getpid()}-{connector.engine_key.split('-')[3]}")
    return registry.read_health(folder / registry.HEALTH_SOCKET, 5.0)


def process(document: dict[str, Any], role: str, index: int | None = None) -> dict[str, Any]:
    (row,) = (p for p in document["processes"] if (p["role"], p["index"]) == (role, index))
    return dict(row)


def dumped(path: Path, reason: str) -> dict[str, Any] | None:
    """A dump that was written for a reason; None when there is none (yet)."""
    if not path.exists():
        return None
    document: dict[str, Any] = json.loads(path.read_text())
    return document if document["reason"] == reason else None


def healthy_after(connector: MoriTransferEngineConnector, cause: str) -> dict[str, Any]:
    """The document once a fault is counted and made good."""

    def good() -> dict[str, Any] | None:
        document = connector.health()
        return document if cause in document["faults"]["counts"] and document["status"] == "healthy" else None

    return eventually(good, f"healthy after {cause}") or {}


def degraded(path: Path) -> dict[str, Any] | None:
    """The document at a health.sock, if it tells that something is wrong."""
    document = registry.read_health(path, 5.0)
    return document if document["status"] == "degraded" else None


def move(pair: Pair, key: str = KEY, size: int = 100_000) -> None:
    pair.put(key, pattern(size))
    assert pair.wait_bytes(key) == pattern(size)


# ------------------------------------------------------------------------------ health
def test_both_documents_describe_every_process_and_the_traffic(make_connector: Factory) -> None:
    pair = make_connector.pair(num_transfer_workers=2, delivery="landing", eager_bytes=0)
    move(pair)
    for document in (pair.sender.health(), told(pair.sender)):
        assert document["schema"] == 1
        assert document["status"] == "healthy"
        assert (document["puts"], document["bytes_transferred"]) == (1, 100_000)
        rows = [(row["role"], row["index"], row["ready"]) for row in document["processes"]]
        assert rows == [
            ("stage", None, True),
            ("control", None, True),
            ("worker", 0, True),
            ("worker", 1, True),
        ]
        assert process(document, "stage")["pid"] == os.getpid()
        assert process(document, "control")["pid"] == control_pid(pair.sender)
        assert {process(document, "worker", i)["pid"] for i in (0, 1)} == set(worker_pids(pair.sender))
        for row in document["processes"]:
            assert row["rss_bytes"] > 0
            assert row["threads"] >= 1
            assert row["fds"] > 0
            assert row["cpus"]
            assert row["state"] in ("running", "sleeping", "disk-sleep")
            assert not row["stale"]
        edge = document["edges"]["0_1"]
        assert (edge["published"], edge["published_bytes"], edge["failed_writes"]) == (1, 100_000, 0)
        for name in ("put", "publish", "reply", "write"):
            assert edge["latency_us"][name]["count"] == 1, name
    received = pair.receiver.health()["edges"]["0_1"]
    assert (received["received"], received["received_bytes"]) == (1, 100_000)
    assert received["latency_us"]["get"]["count"] == received["latency_us"]["fetch"]["count"] == 1


def test_the_schema_page_names_every_key(make_connector: Factory, metrics_port: int) -> None:
    pair = make_connector.pair(prometheus_port=metrics_port)
    move(pair)
    pair.sender.put("0", "1", "too large", pattern(8 << 20))
    named = set(re.findall(r"`([\w.\[\]]+)`", DOCS.read_text(encoding="utf-8")))
    leaves = {part for name in named for part in re.split(r"[.\[\]]+", name)}

    def keys(value: Any, path: str) -> set[str]:
        if isinstance(value, list):
            return {found for inner in value for found in keys(inner, path)}
        if not isinstance(value, dict) or path in ("faults.counts", "sender.ledger.oldest"):
            return set()
        names = {f"{path}.{key}".lstrip(".") for key in value}
        for key, inner in value.items():
            inside = path if path == "edges" else f"{path}.{key}".lstrip(".")
            names |= keys(inner, inside)
        return names - {"edges.0_1"}

    found = keys(pair.sender.health(), "") | keys(pair.receiver.health(), "")
    missing = {name for name in found if name.rpartition(".")[2] not in leaves}
    below = ("sender.ledger.", "sender.counters.", "sender.control.", "sender.workers.")
    assert {name for name in missing if not name.startswith(below)} == set()
    causes = set(re.findall(r"`([a-z_]+)`", DOCS.read_text(encoding="utf-8").split("| cause |")[1]))
    assert {"pool_exhausted", "worker_died", "control_died"} <= causes


def test_threads_of_the_stage_are_told_apart(make_connector: Factory) -> None:
    sender = make_connector.sender(worker_mode="thread")
    for document in (sender.health(), told(sender)):
        assert document["status"] == "healthy"
        control, worker = process(document, "control"), process(document, "worker", 0)
        assert control["thread"]
        assert worker["thread"]
        assert control["rss_bytes"] is worker["rss_bytes"] is None
        assert process(document, "stage")["rss_bytes"] > 0


def test_children_stay_small(make_connector: Factory, metrics_port: int) -> None:
    pair = make_connector.pair(prometheus_port=metrics_port)
    move(pair)
    scrape(metrics_port)
    told(pair.sender)
    for pid in (control_pid(pair.sender), *worker_pids(pair.sender)):
        assert resident_bytes(pid) < 45 << 20


# --------------------------------------------------------------------- somebody is sick
def test_a_stopped_control_process_is_marked_and_not_waited_for(make_connector: Factory) -> None:
    pair = make_connector.pair()
    move(pair)
    assert pair.sender.health()["status"] == "healthy"
    with stopped(control_pid(pair.sender)):
        began = time.monotonic()
        document = pair.sender.health()
        assert time.monotonic() - began < 2.0
    assert document["status"] == "degraded"
    pid = process(document, "control")["pid"]
    assert document["error"] == f"stopped by a signal or a debugger: control (pid {pid})"
    assert document["sender"]["stale"] is True
    assert document["sender"]["ledger"]["counters"]["published"] == 1  # what it last said
    assert document["sender"]["age_s"] > 0
    row = process(document, "control")
    assert (row["stale"], row["state"]) == (True, "stopped")
    eventually(lambda: pair.sender.health()["status"] == "healthy", "healthy again")


def test_a_stopped_stage_is_marked_by_its_control_process(
    make_stage: type[StageProcess], runtime_base: Path, tmp_path: Path
) -> None:
    dump = tmp_path / "dump-{stage}.json"
    stage = make_stage(
        role="sender", stage_id=3, host="127.0.0.1", zmq_port=0, memory_pool_size=4 << 20, prefault=False,
        pin="off", num_transfer_workers=1, health_dump_path=str(dump),
    )  # fmt: skip
    stage.ask("put", key=KEY, size=100_000, seed=0)
    (found,) = (found for found in registry.live(runtime_base) if found.card.pid == stage.pid)
    document = registry.read_health(found.health_socket, 5.0)
    assert (document["status"], document["puts"]) == ("healthy", 1)
    control = process(document, "control")["pid"]
    with stopped(stage.pid):
        document = eventually(lambda: degraded(found.health_socket), "noticed")
        os.kill(control, signal.SIGUSR1)
        written = eventually(lambda: dumped(tmp_path / "dump-3.json", "signal"), "dump")
    for told_now in (document, written):
        assert told_now["status"] == "degraded"
        assert told_now["error"] == f"stopped by a signal or a debugger: stage (pid {stage.pid})"
        assert told_now["stage"]["stale"] is True
        assert told_now["puts"] == 1  # what it last said
        row = process(told_now, "stage")
        assert (row["pid"], row["state"], row["stale"]) == (stage.pid, "stopped", True)
        assert told_now["sender"]["ledger"]["entries"]["published"] == 1  # this is not old
    assert eventually(
        lambda: registry.read_health(found.health_socket, 5.0)["status"] == "healthy", "healthy again"
    )


# -------------------------------------------------------------------- somebody has died
def test_a_killed_worker_shows_in_health_dump_log_and_metrics(
    make_connector: Factory, tmp_path: Path, caplog: pytest.LogCaptureFixture, metrics_port: int
) -> None:
    dump = tmp_path / "dump.json"
    pair = make_connector.pair(prometheus_port=metrics_port, health_dump_path=str(dump))
    move(pair)
    (before,) = worker_pids(pair.sender)
    with caplog.at_level(logging.INFO):
        kill(before)
        document = healthy_after(pair.sender, "worker_died")
        eventually(lambda: "[cause=worker_died" in caplog.text, "log line")
    # health
    assert document["faults"]["counts"] == {"worker_died": 1}
    (fault,) = document["faults"]["recent"]
    assert (fault["process"], fault["cause"]) == ("control", "worker_died")
    assert f"pid {before}" in fault["text"]
    row = process(document, "worker", 0)
    assert row["restarts"] == 1
    assert row["pid"] not in (before, None)
    # log: once, through the stage's logging, with who it was
    lines = [r for r in caplog.records if "[cause=worker_died" in r.getMessage()]
    assert len(lines) == 1
    assert lines[0].levelno == logging.ERROR
    assert lines[0].name == "mori_mp.workers.crew"
    assert "[control stage=0" in lines[0].getMessage()
    assert f"pid {before}" in lines[0].getMessage()
    # dump
    written = eventually(lambda: dumped(dump, "fault: worker_died"), "dump")
    assert written["reporter"] == "control"
    assert written["faults"]["counts"] == {"worker_died": 1}
    assert written["puts"] == 1
    assert os.listdir(tmp_path) == ["dump.json"]
    # metrics
    text = scrape(metrics_port)
    assert sample(text, "mori_mp_faults_total", cause="worker_died") == 1
    assert sample(text, "mori_mp_process_restarts_total", process="worker", worker="0") == 1
    assert sample(text, "mori_mp_process_up", process="worker", worker="0") == 1
    assert sample(text, "mori_mp_puts_total", stage="0") == 1
    assert sample(text, "mori_mp_published_bytes_total", edge="0_1") == 100_000
    assert sample(text, "vllm_omni:transfer_size_bytes_count", from_stage="0", to_stage="1") == 1
    assert sample(text, "vllm_omni:transfer_tx_s_count", from_stage="0", to_stage="1") == 1
    move(pair, "again")


def test_a_killed_control_process_shows_in_health_dump_and_log(
    make_connector: Factory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dump = tmp_path / "{pid}" / "dump.json"
    pair = make_connector.pair(health_dump_path=str(dump))
    move(pair)
    before = control_pid(pair.sender)
    kill(before)
    document = healthy_after(pair.sender, "control_died")
    assert document["faults"]["counts"] == {"control_died": 1}
    assert process(document, "control")["restarts"] == 1
    assert process(document, "control")["pid"] not in (before, None)
    assert sum("[cause=control_died" in message for message in caplog.messages) == 1
    written = eventually(
        lambda: dumped(tmp_path / str(os.getpid()) / "dump.json", "fault: control_died"), "dump"
    )
    assert written["reporter"] == "stage"
    assert written["faults"]["counts"] == {"control_died": 1}
    move(pair, "again")
    assert process(told(pair.sender), "control")["restarts"] == 1


def test_a_connector_that_is_given_up_says_so_everywhere(
    make_connector: Factory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dump = tmp_path / "dump.json"
    sender = make_connector.sender(restart_limit=0, health_dump_path=str(dump))
    kill(control_pid(sender))
    eventually(lambda: sender.health()["status"] == "unhealthy", "given up")
    document = eventually(lambda: dumped(dump, "fault: control_given_up"), "dump")
    assert document["status"] == "unhealthy"
    assert "ended 1 times" in document["error"]
    assert process(document, "control")["pid"] is None
    assert sender.put("0", "1", KEY, b"x") == (False, 0, None)
    assert sender.health()["faults"]["counts"] == {"control_given_up": 1, "put_refused": 1}
    assert [r.levelname for r in caplog.records if "cause=" in r.getMessage()] == ["CRITICAL", "ERROR"]


# -------------------------------------------------------------------------------- dumps
def test_a_fault_of_the_stage_has_a_dump_written_with_it_in(make_connector: Factory, tmp_path: Path) -> None:
    """Nothing has died; the control process writes, as the stage tells it."""
    dump = tmp_path / "dump.json"
    sender = make_connector.sender(health_dump_path=str(dump))
    assert sender.put("0", "1", "too large", pattern(8 << 20)) == (False, 0, None)
    written = eventually(lambda: dumped(dump, "fault: pool_exhausted"), "dump")
    assert written["reporter"] == "control"
    assert written["stage"]["stale"] is False
    assert written["faults"]["counts"] == {"pool_exhausted": 1}


def test_a_fault_in_the_control_process_has_a_dump_written(make_connector: Factory, tmp_path: Path) -> None:
    dump = tmp_path / "dump.json"
    sender = make_connector.sender(health_dump_path=str(dump), buffer_ttl_seconds=0.05)
    assert sender.put("0", "1", KEY, b"x")[0]
    written = eventually(lambda: dumped(dump, "fault: expired"), "dump")
    assert written["faults"]["counts"] == {"expired": 1}


def test_faults_that_the_stage_dumps_itself_are_all_in_the_last_dump(tmp_path: Path) -> None:
    """One dump a second at most; what comes in between is in the next, which close() does not wait for."""
    counted: list[str] = []
    dumps = FaultDumps(DumpFile(tmp_path / "dump.json"), lambda: {"seen": list(counted)})
    for cause in ("corrupt", "get_timeout", "get_failed"):
        counted.append(cause)
        dumps.want(cause)
    dumps.close(10.0)
    document = json.loads((tmp_path / "dump.json").read_text())
    assert document["seen"] == counted
    dumps.want("late")
    assert json.loads((tmp_path / "dump.json").read_text()) == document


def test_dumps_at_intervals(make_connector: Factory, tmp_path: Path) -> None:
    dump = tmp_path / "{stage}.json"
    sender = make_connector.sender(health_dump_path=str(dump), health_dump_interval_seconds=0.2)
    first = eventually(lambda: dumped(tmp_path / "0.json", "interval"), "first dump")
    later = eventually(
        lambda: (d := dumped(tmp_path / "0.json", "interval")) and d["time"] > first["time"] and d, "another"
    )
    assert later["status"] == "healthy"
    assert later["stage"]["stale"] is False
    assert later["engine_key"] == sender.engine_key


def test_a_signal_without_a_place_for_the_dump_is_answered_in_the_log(
    make_connector: Factory, caplog: pytest.LogCaptureFixture
) -> None:
    sender = make_connector.sender()
    for pid in (control_pid(sender), *worker_pids(sender)):
        os.kill(pid, signal.SIGUSR1)  # workers do not mind
    eventually(lambda: "health_dump_path is not set" in caplog.text, "log line")
    assert sender.health()["status"] == "healthy"
    assert sender.health()["faults"]["counts"] == {}


# ------------------------------------------------------------------------------ metrics
def test_a_last_stage_that_only_receives_is_scraped_too(make_connector: Factory, metrics_port: int) -> None:
    sender = make_connector.sender()
    receiver = make_connector.receiver(
        sender, start="on_use", prometheus_port=metrics_port - 1, outgoing={"zmq_port": 0}
    )
    Pair(sender, receiver).put(KEY, pattern(5000))
    assert Pair(sender, receiver).wait_bytes(KEY) == pattern(5000)
    eventually(lambda: receiver.heart is not None, "control process")
    text = scrape(metrics_port)  # prometheus_port + stage_id
    assert sample(text, "mori_mp_received_payloads_total", stage="1", edge="0_1") == 1
    assert sample(text, "mori_mp_get_seconds_count", stage="1", edge="0_1") == 1
    assert sample(text, "vllm_omni:transfer_rx_s_count", from_stage="0", to_stage="1") == 1
    assert json.loads(scrape(metrics_port, "/health"))["stage_id"] == 1


def test_a_taken_metrics_port_does_not_stop_the_connector(
    make_connector: Factory, metrics_port: int, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", metrics_port))
        taken.listen()
        pair = make_connector.pair(prometheus_port=metrics_port, receiver={"prometheus_port": 0})
        move(pair)
        metrics = pair.sender.health()["metrics"]
        assert metrics["endpoint"] == f"http://127.0.0.1:{metrics_port}/metrics"
        assert "in use" in metrics["error"]
        eventually(lambda: "no metrics at" in caplog.text, "log line")
    # it is taken once it is free
    eventually(lambda: "error" not in pair.sender.health()["metrics"], "metrics served", 15.0)
    assert "mori_mp_puts_total" in scrape(metrics_port)


def test_without_prometheus_client_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mori_mp.config_rules.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'mori-mp\[metrics\]'"):
        MoriTransferEngineConnector({"prometheus_port": 9400})


def test_prometheus_client_is_not_loaded_unless_asked_for(make_connector: Factory) -> None:
    sender = make_connector.sender()
    told(sender)
    maps = Path(f"/proc/{control_pid(sender)}/maps").read_text()
    assert "psutil" in maps  # a report was asked for
    worker_maps = Path(f"/proc/{worker_pids(sender)[0]}/maps").read_text()
    assert "psutil" not in worker_maps
    loaded = sender.health()
    assert "metrics" not in loaded


# --------------------------------------------------------------------------------- logs
def test_every_process_says_once_that_it_is_up(
    make_connector: Factory, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="mori_mp"):
        sender = make_connector.sender(num_transfer_workers=2)
        eventually(lambda: sum("up: role=" in m for m in caplog.messages) >= 4, "start-up lines")
    lines = [message for message in caplog.messages if "up: role=" in message]
    roles = sorted(found[1] for line in lines if (found := re.search(r"up: role=(\w+)", line)))
    assert roles == ["control", "stage", "worker", "worker"]
    for line in lines:
        fields = dict(re.findall(r"(\w+)=(\S+)", line.split("up: ")[1]))
        assert {"pid", "engine", "device", "node", "cpus", "endpoint"} <= fields.keys()
        assert (fields["engine"], fields["device"]) == ("shm", "cpu")
    assert sum(f"endpoint=tcp://127.0.0.1:{sender.zmq_port}" in line for line in lines) == 2


def test_a_failed_put_is_a_fault_with_key_and_edge(
    make_connector: Factory, caplog: pytest.LogCaptureFixture
) -> None:
    sender = make_connector.sender()
    too_large = pattern(8 << 20)
    for _ in range(15):
        assert not sender.put("0", "1", KEY, too_large)[0]
    lines = [message for message in caplog.messages if "cause=pool_exhausted" in message]
    assert len(lines) == 10  # a flood does not fill the log
    assert f"key={KEY} edge=0_1" in lines[0]
    faults = sender.health()["faults"]
    assert faults["counts"] == {"pool_exhausted": 15}
    assert faults["suppressed_log_lines"] == 5


def test_an_expired_payload_is_a_fault(make_connector: Factory, caplog: pytest.LogCaptureFixture) -> None:
    sender = make_connector.sender(buffer_ttl_seconds=0.1)
    sender.put("0", "1", KEY, b"nobody wants this")
    eventually(lambda: "cause=expired" in caplog.text, "log line")
    (fault,) = sender.health()["faults"]["recent"]
    assert (fault["cause"], fault["key"], fault["edge"]) == ("expired", f"{KEY}@0_1", "0_1")


# ------------------------------------------------------------------------------- traces
@pytest.mark.parametrize("mode", ["process", "thread"])
def test_a_trace_has_every_span_of_a_transfer(make_connector: Factory, tmp_path: Path, mode: str) -> None:
    path = tmp_path / "trace-{stage}.json"
    options = {"delivery": "landing", "eager_bytes": 0, "worker_mode": mode}
    pair = make_connector.pair(trace_path=str(path), **options)
    for number in range(3):
        move(pair, f"k{number}")
    before = time.monotonic_ns() / 1000
    pair.receiver.close()
    pair.sender.close()
    assert sorted(os.listdir(tmp_path)) == ["trace-0.json", "trace-1.json"]
    sent, got = (json.loads((tmp_path / f"trace-{stage}.json").read_text()) for stage in (0, 1))
    assert_readable(sent)
    assert_readable(got)
    by_stage = ({"put", "publish", "dispatch", "write", "reply"}, {"pull", "usable"})
    assert by_stage[0] | by_stage[1] == SPANS
    for trace, names in zip((sent, got), by_stage, strict=True):
        for name in names:
            found = events(trace, name)
            assert [event["args"]["key"] for event in found] == [f"k{n}@0_1" for n in range(3)], name
            assert all(0 < event["ts"] < before for event in found)
            assert all(event["args"]["generation"] for event in found)
    # a payload's way, in order
    first = {name: events(sent, name)[0]["ts"] for name in by_stage[0]}
    assert first["put"] <= first["publish"] + 1  # the same moment, one in whole microseconds
    assert first["put"] <= first["dispatch"] <= first["write"] <= first["reply"]
    processes = {e["args"]["name"] for e in sent["traceEvents"] if e["name"] == "process_name"}
    assert processes == ({"stage 0", "control 0", "worker 0.1"} if mode == "process" else {"stage 0"})
    starts = {e["id"] for e in sent["traceEvents"] if e["ph"] == "s"}
    assert starts
    assert starts == {e["id"] for e in got["traceEvents"] if e["ph"] == "f"}


def test_a_trace_survives_the_death_of_its_children(make_connector: Factory, tmp_path: Path) -> None:
    pair = make_connector.pair(trace_path=str(tmp_path / "{stage}.json"), delivery="landing", eager_bytes=0)
    move(pair, "before")
    parts = tmp_path / "0.json.parts"
    eventually(lambda: len(list(parts.glob("*"))) >= 2, "spans of control and worker on disk")
    kill(control_pid(pair.sender))

    def incarnation() -> int:
        control = pair.sender.health().get("sender", {}).get("control", {})
        return int(control.get("incarnation", 0))

    eventually(lambda: incarnation() == 2, "control process back")  # what it is replayed has no such span
    move(pair, "after")
    pair.sender.close()
    trace = json.loads((tmp_path / "0.json").read_text())
    assert_readable(trace)
    for name in ("publish", "dispatch", "write"):
        assert {event["args"]["key"] for event in events(trace, name)} == {"before@0_1", "after@0_1"}, name


def test_an_unused_connector_leaves_no_trace(make_connector: Factory, tmp_path: Path) -> None:
    sender = make_connector.sender(trace_path=str(tmp_path / "t.json"))
    sender.close()
    assert os.listdir(tmp_path) == []


def test_a_trace_that_cannot_be_written_is_told_and_harms_nothing(
    make_connector: Factory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("not a folder")
    pair = make_connector.pair(trace_path=str(tmp_path / "file" / "t.json"))
    move(pair)
    pair.receiver.close()
    pair.sender.close()
    assert "cannot be written" in caplog.text
