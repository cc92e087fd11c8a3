"""What is told of a connector before it is made: its workers' interpreter, its ports, its sender's name."""

from __future__ import annotations

import socket
import sys
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mori_mp import beforehand
from mori_mp.beforehand import Claim
from mori_mp.config import ConnectorConfig
from mori_mp.interpreter_probe import supported
from mori_mp.shared.errors import ConfigError, StartupError


@pytest.fixture
def taken() -> Iterator[int]:
    """A port of this machine that somebody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def script(folder: Path, *lines: str) -> str:
    path = folder / "python"
    path.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    path.chmod(0o755)
    return str(path)


def claims(puts: bool = True, **config: Any) -> list[tuple[str, str, int]]:
    found = beforehand.claims(ConnectorConfig.from_dict({"host": "127.0.0.1", **config}), puts)
    return [(claim.purpose, claim.host, claim.port) for claim in found]


# ------------------------------------------------------------------------------- interpreters
def test_this_interpreter_can_run_workers() -> None:
    found = beforehand.check_interpreter(sys.executable, "shm")
    assert found == f"{sys.version_info.major}.{sys.version_info.minor}"


def test_an_interpreter_of_which_nothing_can_be_run(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"worker_python='/nope/python' cannot be run: No such file"):
        beforehand.check_interpreter("/nope/python", "shm")
    path = tmp_path / "python"
    path.write_text("")
    with pytest.raises(StartupError, match="cannot be run: Permission denied"):
        beforehand.check_interpreter(str(path), "shm")


def test_a_program_that_is_no_interpreter(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"it is no Python interpreter \(exit status 0\)"):
        beforehand.check_interpreter(script(tmp_path, "echo hello"), "shm")
    with pytest.raises(StartupError, match="cannot run workers: no such option"):
        beforehand.check_interpreter(script(tmp_path, "echo no such option >&2", "exit 2"), "shm")


def test_an_interpreter_that_does_not_come_to_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beforehand, "_PROBE_SECONDS", 0.1)
    with pytest.raises(StartupError, match=r"did not import in 0\.1 s what a worker needs"):
        beforehand.check_interpreter(script(tmp_path, "exec sleep 60"), "shm")


def test_an_interpreter_without_what_workers_import(tmp_path: Path) -> None:
    venv.create(tmp_path, symlinks=True)
    with pytest.raises(StartupError, match=r"ModuleNotFoundError: No module named '\w+'; install into it"):
        beforehand.check_interpreter(str(tmp_path / "bin" / "python"), "shm")


def test_an_interpreter_without_mori(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mori").mkdir()
    (tmp_path / "mori" / "__init__.py").write_text("")  # before one that may be installed
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(StartupError, match="cannot run workers: Mori is not installed for"):
        beforehand.check_interpreter(sys.executable, "fabric")


@pytest.mark.parametrize(
    ("implementation", "version", "good"),
    [
        ("cpython", (3, 9), False),
        ("cpython", (3, 10), True),
        ("cpython", (3, 13), True),
        ("pypy", (3, 11), False),
    ],
)
def test_interpreters_that_are_supported(implementation: str, version: tuple[int, int], good: bool) -> None:
    assert supported(implementation, version) is good


# ------------------------------------------------------------------------------- the sender's name
UPSTREAM = {"role": "receiver", "stage_id": 1, "from_stage": 0, "to_stage": 1, "sender_zmq_port": 50051}


@pytest.mark.parametrize("role", ["receiver", "dual"])
def test_a_sender_whose_name_does_not_resolve(role: str) -> None:
    config = {**UPSTREAM, "role": role, "sender_host": "no-such-host.invalid"}
    with pytest.raises(ConfigError, match=r"sender_host='no-such-host.invalid' does not resolve \("):
        beforehand.check_sender_host(ConnectorConfig.from_dict(config))


@pytest.mark.parametrize("host", [None, "auto", "127.0.0.1", "localhost", "::1", "192.0.2.7"])
def test_a_sender_whose_name_resolves(host: str | None) -> None:
    beforehand.check_sender_host(ConnectorConfig.from_dict({**UPSTREAM, "sender_host": host}))


def test_a_sender_needs_no_sender() -> None:
    config = {"role": "sender", "sender_host": "no-such-host.invalid"}
    beforehand.check_sender_host(ConnectorConfig.from_dict(config))


# ------------------------------------------------------------------------------- ports
def test_what_a_connector_listens_at() -> None:
    pytest.importorskip("prometheus_client")
    assert claims(zmq_port=50051) == [("listener", "127.0.0.1", 50051)]
    both = claims(zmq_port=50051, prometheus_port=9400, stage_id=2)
    assert both == [("listener", "127.0.0.1", 50051), ("metrics", "127.0.0.1", 9402)]
    assert claims(zmq_port=0) == []
    assert claims(zmq_port=0, prometheus_port=9400) == [("metrics", "127.0.0.1", 9400)]


def test_a_last_stage_listens_if_it_is_told_to() -> None:
    assert claims(puts=False, **UPSTREAM) == [("listener", "127.0.0.1", 50052)]
    assert claims(puts=False, prestart=False, **UPSTREAM) == []
    assert claims(puts=True, prestart=False, **UPSTREAM) == [("listener", "127.0.0.1", 50052)]
    assert len(claims(puts=False, prestart=False, health_dump_path="/dev/null", **UPSTREAM)) == 1
    assert claims(puts=False, role="receiver") == []  # nobody can tell where


@pytest.mark.parametrize(("purpose", "key"), [("listener", "zmq_port"), ("metrics", "prometheus_port")])
def test_an_address_that_is_taken(purpose: Any, key: str, taken: int) -> None:
    with pytest.raises(StartupError, match=f"127.0.0.1:{taken}.*change {key}"):
        beforehand.check_claim(Claim(0, purpose, "127.0.0.1", taken, key))


def test_addresses_that_two_are_to_have() -> None:
    made = [
        Claim(0, "listener", "127.0.0.1", 50051, "zmq_port"),
        Claim(0, "metrics", "127.0.0.1", 9400, "prometheus_port"),
        Claim(1, "listener", "127.0.0.1", 9400, "zmq_port"),
        Claim(1, "metrics", "::1", 9400, "prometheus_port"),  # another address
        Claim(2, "listener", "127.0.0.1", 50051, "zmq_port"),
        Claim(3, "metrics", "127.0.0.1", 50051, "prometheus_port"),
    ]
    found = dict(beforehand.collisions(made))
    assert found.keys() == {1, 2, 3}
    assert found[1].startswith("127.0.0.1:9400 would be its listener (zmq_port) and the metrics (prometheus_")
    assert found[1].endswith("of stage 0; change prometheus_port")
    assert found[2].endswith("the listener (zmq_port) of stage 0; change zmq_port")
    assert found[3].endswith("the listener (zmq_port) of stage 0; change prometheus_port")


def test_a_collision_of_what_all_stages_read_is_cured_where_it_comes_from() -> None:
    made = [Claim(stage, "listener", "127.0.0.1", 50099, "outgoing.zmq_port") for stage in (0, 1)]
    (_, text), *more = beforehand.collisions(made)
    assert not more
    assert "its listener (outgoing.zmq_port) and the listener (outgoing.zmq_port) of stage 0" in text
    assert text.endswith(
        "change outgoing.zmq_port, or name the one stage that it is for in outgoing.from_stage"
    )


def test_whose_port_it_is() -> None:
    shared = {"role": "receiver", "stage_id": 1, **UPSTREAM}
    for outgoing, key in (
        ({"zmq_port": 50099}, "outgoing.zmq_port"),
        ({"zmq_port": 50099, "from_stage": 0}, "zmq_port"),
    ):
        config = ConnectorConfig.from_dict({**shared, "outgoing": outgoing})
        assert [claim.key for claim in beforehand.claims(config, True)] == [key]
