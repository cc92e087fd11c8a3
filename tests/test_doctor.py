"""`mori-mp doctor`: what it finds of a host and of a deploy YAML, and the fixes that it names."""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from connector_support import Factory
from typer.testing import CliRunner, Result

from mori_mp import cli, doctor_host
from mori_mp.shared.errors import PoolUnbacked


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("COLUMNS", "200")
    level = logging.getLogger("mori_mp").level
    yield
    logging.getLogger("mori_mp").setLevel(level)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli.build_app(), [str(argument) for argument in arguments])


def findings(*arguments: object) -> dict[tuple[str, str], list[dict[str, str]]]:
    result = run("doctor", "--json", *arguments)
    found: dict[tuple[str, str], list[dict[str, str]]] = {}
    for finding in json.loads(result.output)["findings"]:
        found.setdefault((finding["area"], finding["what"]), []).append(finding)
    broken = [f for each in found.values() for f in each if f["level"] == "broken"]
    assert result.exit_code == (1 if broken else 0)
    return found


def test_doctor_finds_this_host_good(runtime_base: Path) -> None:
    found = findings()
    for area, what in (
        ("imports", "torch"),
        ("memory", "memfd"),
        ("processes", "peer memory"),
        ("engines", "shm"),
        ("transfer", "lease"),
        ("transfer", "landing"),
    ):
        assert found[area, what][0]["level"] == "ok", found[area, what]
    assert not [f for each in found.values() for f in each if f["level"] == "broken"]
    assert all(f["fix"] for each in found.values() for f in each if f["level"] == "warning")
    assert os.listdir(runtime_base) == []
    result = run("doctor", "--no-self-test")
    assert result.exit_code == 0
    assert "transfer" not in result.output


DEPLOY = """
connectors:
  c:
    name: MoriTransferEngineConnector
    extra: {{host: 127.0.0.1, zmq_port: {port}, backend_type: {engine}, memory_pool_size: {size}}}
stages:
  - {{stage_id: 0, output_connectors: {{to_stage_1: c}}}}
  - {{stage_id: 1, input_connectors: {{from_stage_0: c}}}}
"""


def deploy(folder: Path, port: int = 50051, engine: str = "shm", size: str = "16MiB") -> Path:
    path = folder / "deploy.yaml"
    path.write_text(DEPLOY.format(port=port, engine=engine, size=size))
    return path


def test_doctor_names_a_port_that_is_taken(make_connector: Factory, tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        found = findings("--no-self-test", "--deploy-config", deploy(tmp_path, port))
    assert [f["level"] for f in found["deploy", "stage 0"]] == ["ok", "broken"]
    assert f"sport = :{port}" in found["deploy", "stage 0"][1]["fix"]
    assert found["deploy", "stage 1"][0]["level"] == "ok"


def test_doctor_knows_connectors_that_run(make_connector: Factory, tmp_path: Path) -> None:
    port = make_connector.sender(stage_id=0).zmq_port
    assert port is not None
    _, finding = findings("--no-self-test", "--deploy-config", deploy(tmp_path, port))["deploy", "stage 0"]
    assert finding["level"] == "note"
    assert finding["detail"] == f"127.0.0.1:{port} is this stage's already: process {os.getpid()} runs it now"
    other = make_connector.sender(stage_id=7).zmq_port
    assert other is not None
    _, finding = findings("--no-self-test", "--deploy-config", deploy(tmp_path, other))["deploy", "stage 0"]
    assert finding["level"] == "broken"
    assert finding["fix"] == f"end process {os.getpid()}, stage 7, which has it"


def test_doctor_tells_what_a_gpu_pool_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mori_mp.doctor_deploy.choose", lambda config: (config.backend_type, "named"))
    path = with_keys(deploy(tmp_path, engine="xgmi", size="512MiB"), "memory_pool_device: cuda")
    found = findings("--no-self-test", "--deploy-config", path)
    _, takes, past, _ = found["deploy", "stage 0"]
    assert takes["level"] == "ok"
    assert "0.50 GiB of GPU memory for its pool, some 0.5 GiB on every GPU that it sees" in takes["detail"]
    assert "workers" not in found["deploy", "stage 1"][1]["detail"]  # it never puts
    assert past["level"] == "note"
    assert "tensor_device: pool" in past["fix"]
    keys = "memory_pool_device: cuda, tensor_device: pool"
    path = with_keys(deploy(tmp_path, engine="xgmi", size="512MiB"), keys)
    assert len(findings("--no-self-test", "--deploy-config", path)["deploy", "stage 0"]) == 3


def test_doctor_lists_what_is_wrong_beside_a_port(tmp_path: Path) -> None:
    path = deploy(tmp_path, size="lots")
    path.write_text(path.read_text().replace("zmq_port: 50051", "zmq_port: 50o51"))
    first, second = findings("--no-self-test", "--deploy-config", path)["deploy", "stage 0"]
    assert "zmq_port must be a port number, got '50o51'" in first["detail"]
    assert "memory_pool_size" in second["detail"]
    path = deploy(tmp_path)
    path.write_text(path.read_text().replace("zmq_port: 50051", "zmq_port: 50o51"))
    assert len(findings("--no-self-test", "--deploy-config", path)["deploy", "stage 0"]) == 1


def test_doctor_knows_a_class_by_half_its_name(tmp_path: Path) -> None:
    path = deploy(tmp_path)
    path.write_text(path.read_text().replace("MoriTransferEngineConnector", "MoriTransferEngine"))
    (finding,) = findings("--no-self-test", "--deploy-config", path)["deploy", "deploy.yaml"]
    assert finding["level"] == "warning"
    assert "did you mean 'MoriTransferEngineConnector'?" in finding["detail"]


def test_doctor_names_what_a_deployment_cannot_have(tmp_path: Path) -> None:
    found = findings("--no-self-test", "--deploy-config", deploy(tmp_path, engine="nonsense"))
    assert "nonsense" in found["deploy", "stage 0"][0]["detail"]
    found = findings("--no-self-test", "--deploy-config", deploy(tmp_path, size="512TiB"))
    assert found["deploy", "pools"][0]["level"] == "broken"
    found = findings("--no-self-test", "--deploy-config", tmp_path / "absent.yaml")
    assert found["deploy", "absent.yaml"][0]["level"] == "broken"


def test_doctor_warns_of_what_is_nearly_right(tmp_path: Path) -> None:
    path = deploy(tmp_path)
    text = path.read_text()
    path.write_text(
        text.replace("memory_pool_size", "memory_pool_sise").replace(
            "  - {", "  - {output_conectors: {}, ", 1
        )
    )
    found = findings("--no-self-test", "--deploy-config", path)
    for stage in ("stage 0", "stage 1"):
        level, detail = found["deploy", stage][0]["level"], found["deploy", stage][0]["detail"]
        assert level == "warning"
        assert "'memory_pool_sise'" in detail
        assert "'memory_pool_size'" in detail
    (finding,) = found["deploy", "deploy.yaml"]
    assert finding["level"] == "warning"
    assert "'output_connectors'" in finding["detail"]


def test_doctor_may_be_strict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mori_mp.doctor.check_cpus", lambda: ())  # this machine's own warnings
    monkeypatch.setattr("mori_mp.doctor.check_limits", lambda: ())
    arguments = ("doctor", "--no-self-test", "--deploy-config")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        free = listener.getsockname()[1]
    path = with_keys(deploy(tmp_path, free), "prestart: false")
    assert run(*arguments, path, "--strict").exit_code == 0
    path = with_keys(deploy(tmp_path, free), "prestart: false, memory_pool_sise: 1")
    assert run(*arguments, path).exit_code == 0
    result = run(*arguments, path, "--strict")
    assert result.exit_code == 1
    assert result.output.count("memory_pool_sise") == 1  # both stages in one row


def test_doctor_checks_the_port_of_a_last_stage_too(make_connector: Factory, tmp_path: Path) -> None:
    port = make_connector.sender().zmq_port
    assert port is not None
    path = deploy(tmp_path, port - 1)
    found = findings("--no-self-test", "--deploy-config", path)["deploy", "stage 1"]
    assert [f["level"] for f in found] == ["ok", "warning"]
    assert f":{port}" in found[1]["detail"]
    assert "prestart: false" in found[1]["fix"]
    path.write_text(path.read_text().replace("{host:", "{prestart: false, host:"))
    found = findings("--no-self-test", "--deploy-config", path)["deploy", "stage 1"]
    assert [f["level"] for f in found] == ["ok"]


def with_keys(path: Path, keys: str) -> Path:
    path.write_text(path.read_text().replace("{host:", f"{{{keys}, host:"))
    return path


def test_doctor_tries_the_interpreter_of_workers(tmp_path: Path) -> None:
    path = with_keys(deploy(tmp_path), "worker_python: /nope/python")
    found = findings("--no-self-test", "--deploy-config", path)
    _, interpreter, _ = found["deploy", "stage 0"]
    assert interpreter["level"] == "broken"
    assert "worker_python='/nope/python' cannot be run: No such file" in interpreter["detail"]
    assert [f["level"] for f in found["deploy", "stage 1"]] == ["ok", "ok"]  # it never puts
    path = with_keys(deploy(tmp_path), f"worker_python: {sys.executable}")
    _, interpreter, _ = findings("--no-self-test", "--deploy-config", path)["deploy", "stage 0"]
    assert interpreter["level"] == "ok"
    assert "has what workers import" in interpreter["detail"]


def test_doctor_checks_the_ports_of_metrics(make_connector: Factory, tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    taken = make_connector.sender().zmq_port
    assert taken is not None
    path = with_keys(deploy(tmp_path), f"prestart: false, prometheus_port: {taken - 1}")
    found = findings("--no-self-test", "--deploy-config", path)["deploy", "stage 1"]
    assert len(found) == 3  # it listens, to serve them
    last = found[-1]
    assert last["level"] == "warning"
    assert f"127.0.0.1:{taken}" in last["detail"]
    assert "change prometheus_port" in last["detail"]
    assert last["fix"] == f"end process {os.getpid()}, stage 0, which has it"


def test_doctor_finds_ports_that_are_given_twice(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    path = with_keys(deploy(tmp_path, port=50051), "prometheus_port: 50051")
    found = findings("--no-self-test", "--deploy-config", path)
    for number in (0, 1):
        last = found["deploy", f"stage {number}"][-1]
        assert last["level"] == "broken"
        assert f"127.0.0.1:{50051 + number} would be its metrics" in last["detail"]


def test_doctor_names_a_sender_that_does_not_resolve(tmp_path: Path) -> None:
    path = with_keys(deploy(tmp_path), "sender_host: no-such-host.invalid")
    found = findings("--no-self-test", "--deploy-config", path)["deploy", "stage 1"]
    assert [f["level"] for f in found] == ["ok", "broken", "ok"]
    assert "sender_host='no-such-host.invalid' does not resolve" in found[1]["detail"]


def test_doctor_blames_a_host_once(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    path = with_keys(deploy(tmp_path), "prometheus_port: 9400, sender_host: 127.0.0.1")
    path.write_text(path.read_text().replace("host: 127.0.0.1, zmq", "host: no-such-host.invalid, zmq"))
    found = findings("--no-self-test", "--deploy-config", path)
    assert [f["level"] for f in found["deploy", "stage 0"]] == ["ok", "broken"]
    assert [f["level"] for f in found["deploy", "stage 1"]] == ["ok", "warning"]


@pytest.mark.parametrize(
    ("changes", "fix"),
    [({"engine": "nonsense"}, "`extra`"), ({"engine": "rdma"}, "set a backend_type that this host has")],
)
def test_doctors_arrow_fits_what_is_broken(changes: dict[str, str], fix: str, tmp_path: Path) -> None:
    found = findings("--no-self-test", "--deploy-config", deploy(tmp_path, **changes))  # type: ignore[arg-type]
    assert fix in found["deploy", "stage 0"][0]["fix"]


def test_doctors_arrow_for_a_pool_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def unbacked(*_: object) -> None:
        raise PoolUnbacked("nothing left")

    monkeypatch.setattr(doctor_host.Pool, "create", unbacked)
    finding = findings("--no-self-test")["memory", "memfd"][0]
    assert "nothing left" in finding["detail"]
    assert "memory" in finding["fix"]
    assert "seccomp" not in finding["fix"]


def test_doctor_survives_a_check_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError("no sysfs here")

    monkeypatch.setattr(doctor_host, "read_topology", fail)
    found = findings("--no-self-test")
    assert found["cpus", "topology"][0]["level"] == "warning"
    assert "no sysfs here" in found["doctor", "check_devices"][0]["detail"]


@pytest.mark.parametrize(("reached", "level"), [(True, "ok"), (False, "warning")])
def test_doctor_tells_which_gpus_reach_each_other(
    monkeypatch: pytest.MonkeyPatch, reached: bool, level: str
) -> None:
    for name, answer in (
        ("is_available", lambda: True),
        ("device_count", lambda: 3),
        ("get_device_name", lambda number: "GPU"),
        ("can_device_access_peer", lambda one, other: reached or (one, other) != (2, 1)),
    ):
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr(doctor_host, "gpu_address", lambda device: (None, ["unknown"]))
    (finding,) = [one for one in doctor_host.check_devices() if one.what == "peer access"]
    assert finding.level == level
    if not reached:
        assert finding.detail == "none between cuda:1 and cuda:2"
