"""`mori-mp pipeline` as its user sees it, over the real connector."""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_tracing import assert_readable, events
from typer.testing import CliRunner, Result

from mori_mp import cli, config_keys
from mori_mp.pipeline.command import parse_settings
from mori_mp.pipeline.free_ports import PortBlock
from mori_mp.pipeline.runner import Runner

ROOT = Path(__file__).parent.parent
SHIPPED = ROOT / "deploy" / "qwen3_omni_moe_mori_intranode.yaml"
TRACE = ROOT / "bench" / "traces" / "qwen3_omni_example.jsonl"
TWO_STAGES = "stages: [{stage_id: 0}, {stage_id: 1, engine_input_source: [0]}]"
SMALL = ("--backend", "shm", "--pool-size", "32MiB", "--num-workers", "1", "--requests", "2", "--gap-ms", "5")


@pytest.fixture(autouse=True)
def stages_find_the_doubles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    handlers = logging.root.handlers[:]
    yield
    logging.root.handlers[:] = handlers


def pipeline(*arguments: str, deploy: Path = SHIPPED) -> Result:
    return CliRunner().invoke(
        cli.build_app(), ["pipeline", "--deploy-config", str(deploy), "--no-live", *arguments]
    )


# -------------------------------------------------------------------------- real runs
def test_both_worker_modes_deliver_everything_and_are_compared(tmp_path: Path) -> None:
    target = tmp_path / "result.json"
    result = pipeline(*SMALL, "--chunks", "5", "--compare", "--show-processes", "--json", str(target))
    assert result.exit_code == 0, result.output
    document = json.loads(target.read_text())
    assert document["ok"] is True
    assert document["options"]["deploy_config"] == str(SHIPPED)
    assert document["options"]["overrides"] == {"memory_pool_size": "32MiB", "num_transfer_workers": 1}
    assert set(document["runs"]) == {"process", "thread"}
    for run in document["runs"].values():
        assert run["problems"] == []
        for edge in run["edges"]:
            assert edge["lost"] == edge["received"]["corrupt"] == 0
            assert edge["sent"]["chunks"] == edge["received"]["chunks"] == 10
            assert edge["received"]["usable_us"]["count"] == 10
        assert [stage["health"]["pool"]["used_bytes"] for stage in run["stages"]] == [0, 0, 0]
    roles = [row["role"].split()[0] for row in document["runs"]["process"]["processes"]]
    assert set(roles) == {"stage", "control", "worker"}
    assert roles.count("stage") == 3
    # Each stage that sends has its own; whether one that only receives has is the connector's affair.
    assert roles.count("control") == roles.count("worker") >= 2
    roles = [row["role"].split()[0] for row in document["runs"]["thread"]["processes"]]
    assert roles == ["stage"] * 3
    assert all(row["rss_mib"] > 10 and row["cpus"] for row in document["runs"]["thread"]["processes"])
    assert [(row["edge"], row["time"]) for row in document["comparison"]] == [
        ("0->1", "put"),
        ("0->1", "usable"),
        ("1->2", "put"),
        ("1->2", "usable"),
    ]
    assert all(row["p50"]["ratio"] > 0 for row in document["comparison"])
    assert result.output.count("PASS 20 chunks") == 2
    assert "thread / process" in result.output


def test_the_spans_of_all_stages_are_written_to_one_trace(tmp_path: Path) -> None:
    target = tmp_path / "run.json"
    landing = ("--delivery", "landing", "--eager-bytes", "0", "--trace-out", str(target))
    result = pipeline(*SMALL, "--chunks", "3", *landing)
    assert result.exit_code == 0, result.output
    assert os.listdir(tmp_path) == ["run.json"]
    trace = json.loads(target.read_text())
    assert_readable(trace)
    for name in ("put", "publish", "pull", "dispatch", "write", "reply", "usable"):
        found = events(trace, name)
        assert len(found) == 12, f"{name}: 2 requests of 3 chunks on 2 edges"
        assert {event["args"]["key"].rpartition("@")[2] for event in found} == {"0_1", "1_2"}
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert {"stage 0", "stage 1", "stage 2", "control 0", "worker 0.1"} <= names
    starts = [e["id"] for e in trace["traceEvents"] if e["ph"] == "s"]
    assert sorted(starts) == sorted(e["id"] for e in trace["traceEvents"] if e["ph"] == "f")
    assert len(set(starts)) == 12
    assert f"trace: 84 spans in {target}" in result.output


def test_a_trace_is_replayed_to_json_on_stdout() -> None:
    result = pipeline(*SMALL, "--trace", str(TRACE), "--get", "wake", "--metadata", "endpoint", "--json", "-")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert [edge["received"]["chunks"] for edge in document["edges"]] == [24, 8]
    assert "PASS" in result.stderr


def test_a_corrupted_chunk_is_exit_status_1(tmp_path: Path) -> None:
    deploy = tmp_path / "two_stages.yaml"
    deploy.write_text(TWO_STAGES)
    double = "pipeline_doubles:FlippingMoriConnector"
    result = pipeline(*SMALL, "--chunks", "4", "--connector", double, "--get", "poll", deploy=deploy)
    assert result.exit_code == 1
    assert "FAIL edge 0->1: 1 chunk(s) corrupt" in result.output
    assert "left over" not in result.output


# ----------------------------------------------------------------------------- options
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--compare", "--worker-mode", "thread"), "leave --worker-mode out"),
        (("--trace", str(TRACE), "--duration", "1"), "leave --duration out"),
        (("--set", "oops"), "--set wants KEY=VALUE"),
        (("--trace", "/nowhere.jsonl"), "cannot be read"),
        (("--backend", "shm", "--set", "codec_chunk_frames=0"), "codec_chunk_frames must be"),
        (("--requests", "0"), "--requests"),
        (("--trace-out", "/nowhere/run.json"), "there is no folder /nowhere"),
        (
            ("--backend", "nonsense"),
            "stage 0: the connector's configuration has a problem: backend_type: got",
        ),
        (
            ("--backend", "shm", "--num-workers", "65"),
            "num_transfer_workers: got 65; allowed: a whole number",
        ),
        (("--backend", "shm", "--pool-size", "1KiB"), "memory_pool_size: got"),
        (("--backend", "shm", "--set", 'outgoing={"port": 1}'), "'port' is not a key of outgoing"),
        (
            ("--backend", "shm", "--set", "host=no-such-host.invalid"),
            "'no-such-host.invalid' does not resolve",
        ),
        (("--backend", "rdma", "--set", "memory_pool_device=cpu"), "--backend shm runs the same topology"),
        (
            ("--backend", "shm", "--set", "worker_python=/nope/python"),
            "stage 0: worker_python='/nope/python' cannot be run: No such file",
        ),
        (
            ("--backend", "shm", "--set", "sender_host=no-such-host.invalid"),
            "stage 1: sender_host='no-such-host.invalid' does not resolve",
        ),
    ],
)
def test_wrong_options_are_exit_status_2_before_anything_starts(
    arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Runner, "run", lambda _: pytest.fail("a run was started"))
    result = pipeline(*arguments)
    assert result.exit_code == 2
    assert "Traceback" not in result.output
    assert message in " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize(
    ("arguments", "edge"),
    [
        (("--pool-size", "256KiB"), "0->1"),  # a prefill chunk of hidden states
        (("--pool-size", "256KiB", "--trace", str(TRACE)), "0->1"),
        (("--set", "host_pool_size=4096"), ""),  # which is not the pool in use
    ],
)
def test_a_chunk_that_can_never_fit_is_told_at_once(
    arguments: tuple[str, ...], edge: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []
    monkeypatch.setattr(Runner, "run", lambda _: started.append(1) or sys.exit(0))
    result = pipeline("--backend", "shm", *arguments)
    assert bool(started) is not bool(edge)
    if edge:
        assert result.exit_code == 2
        assert f"bytes on edge {edge} does not fit memory_pool_size=262144; raise" in result.output


def test_ports_that_cannot_be_had_are_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("prometheus_client")
    monkeypatch.setattr(Runner, "run", lambda _: pytest.fail("a run was started"))
    with PortBlock() as block, socket.socket() as taken:
        port = block.base
        twice = ("--set", f"zmq_port={port}", "--set", f"prometheus_port={port}")
        result = pipeline("--backend", "shm", *twice)
        assert result.exit_code == 2
        assert f"stage 0: 127.0.0.1:{port} would be its metrics" in result.output
        taken.bind(("127.0.0.1", port))
        taken.listen()
        result = pipeline("--backend", "shm", "--set", f"prometheus_port={port}")
    assert result.exit_code == 2
    assert f"stage 0: cannot listen on 127.0.0.1:{port}" in result.output
    assert "change prometheus_port" in result.output


def test_the_codec_chunk_that_is_looked_at_is_the_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Runner, "run", lambda _: pytest.fail("a run was started"))
    many = ("--chunks", "3", "--set", "codec_chunk_frames=10000", "--set", "codec_left_context_frames=15000")
    # 16 codebooks of 8 bytes: the first chunk has 10000 frames, the third 25000.
    result = pipeline("--backend", "shm", "--pool-size", "3000000", *many)
    assert result.exit_code == 2
    assert "stage 1: a chunk of 3200" in result.output


def test_keys_that_are_nearly_right_are_warned_about(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Runner, "run", lambda _: sys.exit(0))
    config_keys.warn_once.cache_clear()
    pipeline("--backend", "shm", "--set", "memory_pool_sise=1")
    assert ["did you mean 'memory_pool_size'?" in text for text in caplog.messages] == [True]


def test_what_a_stage_cannot_have_is_one_line() -> None:
    result = pipeline(*SMALL, "--set", f"memory_pool_size={1 << 49}", "-v")
    assert result.exit_code == 1
    failures = [line for line in result.output.splitlines() if line.startswith("FAIL")]
    assert len(failures) == 1
    assert "memory_pool_size" in failures[0]
    assert "lost" not in result.output
    assert "Traceback" not in result.output


def test_a_missing_deploy_file_is_exit_status_2(tmp_path: Path) -> None:
    result = pipeline(deploy=tmp_path / "none.yaml")
    assert result.exit_code == 2
    assert "does not exist" in result.output


def test_help_has_examples() -> None:
    result = CliRunner().invoke(cli.build_app(), ["pipeline", "--help"])
    assert result.exit_code == 0
    assert "mori-mp pipeline --deploy-config $D --backend shm" in result.output


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a=1", 1),
        ("a=true", True),
        ("a=text", "text"),
        ('a={"b": [1]}', {"b": [1]}),
        ("a=", ""),
        ("a=b=c", "b=c"),
    ],
)
def test_settings_are_json_or_text(text: str, value: Any) -> None:
    assert parse_settings([text]) == {"a": value}


def test_without_its_extra_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_EXTRA", ("typer", "not_installed_here"))
    with pytest.raises(SystemExit, match=r"needs not_installed_here: pip install 'mori-mp\[cli\]'"):
        cli.main()
