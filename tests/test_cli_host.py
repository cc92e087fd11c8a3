"""`mori-mp top`, `health`, `topology`, `pin`, `bench` and `doctor` as their users see them."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import sysfs_tree as trees
from connector_support import (
    MIB,
    Factory,
    control_pid,
    eventually,
    kill,
    short_directory,
    stopped,
    worker_pids,
)
from typer.testing import CliRunner, Result

from mori_mp import cli, cli_health, cli_top, observe
from mori_mp.cli_console import crowded
from mori_mp.observe import Row, Sample
from mori_mp.shared import registry
from mori_mp.shared.registry import Card, Found, PlanCard

ROOT = Path(__file__).parent.parent
SHIPPED = ROOT / "deploy" / "qwen3_omni_moe_mori_intranode.yaml"


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("COLUMNS", "200")
    level = logging.getLogger("mori_mp").level
    yield
    logging.getLogger("mori_mp").setLevel(level)


@pytest.fixture
def empty() -> Iterator[Path]:
    with short_directory() as path:
        yield path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli.build_app(), [str(argument) for argument in arguments])


# -------------------------------------------------------------------------------- from documents to rows
def sample(document: dict[str, Any] | None, at: float, error: str = "", serving: bool = True) -> Sample:
    plan = PlanCard(control=None, workers=["3"], node=None, degraded=False, reasons=[])
    card = Card(
        stage_id=1,
        role="receiver",
        pid=7,
        start_ticks=1,
        started=0.0,
        engine="shm",
        endpoint="tcp://[::1]:50052",
        serving=serving,
        worker_mode="process",
        pool_device="cpu",
        pool_size=4096,
        plan=plan,
    )
    return Sample(Found(Path("/run/7-a"), card), at, document, error)


def told(published: int = 0, cpu_s: float = 0.0, **changes: Any) -> dict[str, Any]:
    return {
        "status": "healthy",
        "errors": 2,
        "control_restarts": 1,
        "pool": {"size": 1000, "used_bytes": 250},
        "receiver": {"counters": {"misses": 9}},
        "sender": {"ledger": {"entries": {"published": 5, "leased": 4, "in_flight": 3, "draining": 2}}},
        "edges": {
            "0_1": {"published": published, "published_bytes": published * 1_000_000},
            "0_2": {"published": published, "published_bytes": 0},
        },
        "processes": [
            {"role": "stage", "index": None, "pid": 7, "cpu_s": 1.0, "restarts": 0},
            {
                "role": "worker",
                "index": 0,
                "pid": 8,
                "cpu_s": cpu_s,
                "rss_bytes": 2**20,
                "restarts": 3,
                "asked_cpus": "2",
                "cpus": "0-3",
                "state": "sleeping",
                "threads": 1,
            },
        ],
        **changes,
    }


def row(now: Sample, before: Sample | None = None) -> Row:
    (found,) = observe.rows([now], {before.key: before} if before else {})
    return found


@pytest.mark.parametrize(("used", "percent"), [(100, 25.0), (900, 90.0)])
def test_a_connector_is_as_full_as_its_fuller_pool(used: int, percent: float) -> None:
    document = {**told(40, 6.0), "device_pool": {"size": 1000, "used_bytes": used}}
    assert row(sample(document, 12.0)).pool_percent == percent


def test_rates_are_those_between_two_documents() -> None:
    found = row(sample(told(40, 6.0), 12.0), sample(told(10, 5.0), 10.0))
    assert (found.puts_per_s, found.mb_per_s) == (30.0, 15.0)
    assert (found.published, found.leased, found.in_flight, found.draining) == (5, 4, 3, 2)
    assert (found.pool_percent, found.misses, found.errors, found.restarts) == (25.0, 9, 2, 4)
    worker = found.processes[1]
    assert (worker.name, worker.cpu_percent, worker.rss_bytes) == ("worker 0", 50.0, 2**20)
    assert (worker.asked_cpus, worker.cpus) == ("3", "0-3")


def test_a_new_control_process_counts_from_zero() -> None:
    found = row(sample(told(4), 12.0), sample(told(1000), 10.0))
    assert found.puts_per_s == 4.0


def test_without_an_earlier_document_there_are_no_rates() -> None:
    found = row(sample(told(4), 1.0))
    assert found.puts_per_s is None
    assert row(sample(told(4), 1.0), sample(None, 0.0)).puts_per_s is None


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"edges": 3, "processes": {}, "pool": [], "sender": {"ledger": None}, "errors": True},
        {"edges": {"0_1": None, "0_2": {"published": "x"}}, "processes": [None, {}], "pool": {"size": 0}},
    ],
)
def test_what_a_document_lacks_is_unknown(document: dict[str, Any]) -> None:
    found = row(sample(document, 1.0), sample(document, 0.0))
    assert found.pool_percent is None
    assert found.published is None
    assert found.errors is None


def test_who_does_not_answer_is_unhealthy() -> None:
    found = row(sample(None, 1.0, "the control process does not answer: timed out"))
    assert (found.status, found.processes) == ("unhealthy", [])
    assert "timed out" in found.error
    assert row(sample(None, 1.0, "being started", serving=False)).status == "starting"


# -------------------------------------------------------------------------------- top and health
def test_nothing_found(empty: Path) -> None:
    result = run("top", "--once", "--runtime-dir", empty)
    assert result.exit_code == 2
    assert "No connector listens below" in result.output
    assert str(empty) in result.output
    assert run("top", "--json", "--runtime-dir", empty).exit_code == 2
    result = run("health", "--stage", "4", "--runtime-dir", empty)
    assert result.exit_code == 2
    assert "no connector of stage 4 listens" in result.stderr


def test_top_shows_both_ends_and_their_processes(make_connector: Factory, tmp_path: Path) -> None:
    pair = make_connector.pair(
        num_transfer_workers=2, receiver={"outgoing": {"zmq_port": 0}, "prestart": True}
    )
    pair.put("k", b"x" * MIB)
    image = tmp_path / "top.svg"
    eventually(lambda: pair.receiver.heart is not None, "the receiver listens too")
    result = run("top", "--once", "--interval", "0.1", "--svg", image)
    assert result.exit_code == 0
    for text in (f"127.0.0.1:{pair.sender.zmq_port}", f"127.0.0.1:{pair.receiver.zmq_port}", "worker 1"):
        assert text in result.output
    assert "<svg" in image.read_text()


@pytest.mark.parametrize("columns", ["80", "100", None])
def test_top_shows_every_column_at_any_width(
    columns: str | None, make_connector: Factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a terminal of 80 columns, and in a pipe, which has no width."""
    pair = make_connector.pair(eager_bytes=0)
    pair.put("k", b"x" * MIB)
    if columns is None:
        monkeypatch.delenv("COLUMNS")
    else:
        monkeypatch.setenv("COLUMNS", columns)
    lines = run("top", "--once", "--interval", "0.1").output.splitlines()
    assert max(map(len, lines)) <= int(columns or 200)
    words = {word for line in lines for word in line.replace("┃", " ").replace("│", " ").split()}
    assert {"puts/s", "published", "leased", "flight", "errors", "restarts", "RSS", "state", "asked"} <= words
    assert {"healthy", "25.0", "control", "sleeping"} <= words


def test_top_into_a_pipe_prints_each_look_as_it_comes(
    empty: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    seen = []

    def looked(_: float) -> None:
        seen.append(capfd.readouterr().out.count("No connector listens"))
        if len(seen) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("mori_mp.cli_top.time.sleep", looked)
    cli_top.top(runtime_dir=empty)
    assert seen == [1, 1, 1]


def test_top_in_json(make_connector: Factory) -> None:
    pair = make_connector.pair(eager_bytes=0)
    pair.put("k", b"x" * MIB)
    result = run("top", "--json", "--interval", "0.1")
    assert result.exit_code == 0
    (found,) = json.loads(result.output)["connectors"]
    assert (found["stage_id"], found["role"], found["engine"]) == (0, "sender", "shm")
    assert found["published"] == 1
    assert found["pool_percent"] == 25.0
    assert found["puts_per_s"] == 0.0
    assert (found["errors"], found["restarts"]) == (0, 0)
    roles = {process["name"]: process for process in found["processes"]}
    assert roles["control"]["pid"] == control_pid(pair.sender)
    assert roles["worker 0"]["pid"] == worker_pids(pair.sender)[0]
    assert all(process["rss_bytes"] > MIB for process in roles.values())
    assert all(process["cpus"] for process in roles.values())


def test_health_of_a_healthy_connector(make_connector: Factory) -> None:
    pair = make_connector.pair()
    pair.put("k", b"x" * MIB)
    pair.wait_bytes("k")
    result = run("health")
    assert result.exit_code == 0
    assert f"stage 0 healthy sender shm tcp://127.0.0.1:{pair.sender.zmq_port}" in result.output
    result = run("health", "--json", "--stage", "0")
    (document,) = json.loads(result.output)
    assert document["puts"] == 1
    assert document["reporter"] == "control"


def test_health_tells_what_waits_and_for_whom() -> None:
    """What leads from a symptom to its cause is in the few lines, not in --json alone."""
    fault = {"cause": "sender_unreached", "text": "not reached", "edge": "0_1", "peer": "tcp://h:1"}
    oldest = {"key": "k@1_2", "state": "published", "age_s": 61.2}
    document = told(
        receiver={
            "counters": {"misses": 9, "unreached": 4, "timeouts": 0},
            "senders": [
                {"address": "tcp://h:1", "protocol": "unknown", "ready": 0},
                {"address": "tcp://h:2", "protocol": "v2", "ready": 3},
            ],
        },
        sender={"ledger": {"entries": {}, "oldest": oldest}, "sessions": 0},
        faults={"counts": {"sender_unreached": 4}, "recent": [{**fault, "time": at} for at in (1.0, 2.0)]},
    )
    lines = [str(line) for line in cli_health.summary(sample(document, 1.0))]
    assert "  oldest payload: k@1_2, published, 61 s old; receivers that have said hello: 0" in lines
    assert "  fetches from tcp://h:1: no answer yet" in lines
    assert "  fetches from tcp://h:2: announced and not fetched 3" in lines
    assert "  get() calls without a payload: unreached 4" in lines
    assert lines[-1].endswith("sender_unreached: not reached [edge=0_1 peer=tcp://h:1] (2 times)")


def test_a_dead_worker_shows_in_health_and_top(make_connector: Factory) -> None:
    sender = make_connector.sender()
    (worker,) = worker_pids(sender)
    kill(worker)

    def replaced() -> dict[str, Any] | None:
        (document,) = json.loads(run("health", "--json").output)
        return document if document["status"] == "healthy" and document["faults"]["counts"] else None

    document = eventually(replaced, "another worker is up")
    assert document["faults"]["counts"] == {"worker_died": 1}
    result = run("health")
    assert "restarts of control and workers: 1" in result.output
    assert "worker_died" in result.output
    (found,) = json.loads(run("top", "--json", "--interval", "0.1").output)["connectors"]
    assert found["restarts"] == 1


def test_a_control_process_that_does_not_answer_is_unhealthy(make_connector: Factory) -> None:
    sender = make_connector.sender()
    with stopped(control_pid(sender)):
        result = run("health", "--timeout", "0.2")
        assert result.exit_code == 1
        assert f"the control process (pid {control_pid(sender)}, stopped) does not answer" in result.output
        (document,) = json.loads(run("health", "--json", "--timeout", "0.2").output)
        assert (document["status"], document["stage_id"]) == ("unhealthy", 0)
    assert run("health").exit_code == 0


# -------------------------------------------------------------------------------- topology and pin
@pytest.fixture(scope="module")
def nps4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trees.write(tmp_path_factory.mktemp("nps4"), trees.mi300x(nodes_per_socket=4))


def test_topology_of_a_recorded_machine(nps4: Path) -> None:
    document = json.loads(run("topology", "--json", "--sysfs-root", nps4).output)
    assert [node["cores"] for node in document["nodes"]] == [24] * 8
    assert document["nodes"][1]["l3"] == ["24-31,216-223", "32-39,224-231", "40-47,232-239"]
    assert document["gpus"][0] == {
        "kind": "gpu",
        "name": "0",
        "pci": trees.MI300X_GPUS[4],  # in KFD order
        "node": 4,
        "how": "numa_node of the device",
    }
    assert len(document["rdma"]) == 8
    result = run("topology", "--sysfs-root", nps4)
    assert result.exit_code == 0
    assert "mlx5_7" in result.output


def test_topology_of_nothing(tmp_path: Path) -> None:
    result = run("topology", "--sysfs-root", tmp_path)
    assert result.exit_code == 2
    assert "cannot read the machine's CPUs" in result.stderr


def test_pin_plans(nps4: Path) -> None:
    result = run("pin", "--gpu", "0", "--workers", "1", "--format", "env", "--sysfs-root", nps4)
    assert result.exit_code == 0
    assert "MORI_MP_NUMA_NODE=4" in result.output
    assert run("pin", "--gpu", "99", "--sysfs-root", nps4).exit_code == 1


def plan_file(folder: Path, control: str | None, workers: list[str | None]) -> Path:
    path = folder / "plan.json"
    document = {"version": 1, "node": None, "degraded": False, "reasons": [], "control": control}
    path.write_text(json.dumps({**document, "workers": workers}))
    return path


def test_pin_apply_moves_the_children_and_says_so(
    make_connector: Factory, runtime_base: Path, tmp_path: Path
) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    sender = make_connector.sender(num_transfer_workers=2)
    target = str(cpus[0])
    plan = plan_file(tmp_path, target, [str(cpus[-1]), None])
    result = run("pin", "--apply", "0", "--plan", plan)
    assert result.exit_code == 0, result.output
    control, (first, second) = control_pid(sender), worker_pids(sender)
    for thread in os.listdir(f"/proc/{control}/task"):
        assert os.sched_getaffinity(int(thread)) == {cpus[0]}
    assert os.sched_getaffinity(first) == {cpus[-1]}
    assert os.sched_getaffinity(second) == set(cpus)
    lines = result.output.splitlines()
    assert lines[0].startswith(f"control  pid {control}")
    assert lines[0].endswith(f"asked {target}  effective {target}")
    assert "not asked" in lines[2]
    (found,) = registry.live(runtime_base)
    assert found.card.plan.control == target
    (row,) = json.loads(run("top", "--json", "--interval", "0.1").output)["connectors"]
    assert (row["processes"][1]["asked_cpus"], row["processes"][1]["cpus"]) == (target, target)


@pytest.mark.parametrize(
    ("workers", "target", "message"),
    [
        ([None], "0", "the plan has 1 workers, stage 0 runs 2"),
        ([None, None], "77", "no connector below"),
        ([None, None], "stage", "neither a pid nor a stage id"),
        (["4095", None], "0", "cannot be pinned to 4095"),
    ],
)
def test_pin_apply_refuses_and_says_why(
    make_connector: Factory, tmp_path: Path, workers: list[str | None], target: str, message: str
) -> None:
    make_connector.sender(num_transfer_workers=2)
    cpu = str(min(os.sched_getaffinity(0)))
    result = run("pin", "--apply", target, "--plan", plan_file(tmp_path, cpu, workers))
    assert result.exit_code == 1
    assert message in result.stderr


def test_pin_apply_wants_one_connector(make_connector: Factory, tmp_path: Path) -> None:
    make_connector.sender()
    make_connector.sender()
    result = run("pin", "--apply", "0", "--plan", plan_file(tmp_path, "0", [None]))
    assert result.exit_code == 1
    assert "several connectors" in result.stderr


def test_pin_apply_does_not_move_threads(make_connector: Factory, tmp_path: Path) -> None:
    make_connector.sender(worker_mode="thread")
    result = run("pin", "--apply", "0", "--plan", plan_file(tmp_path, "0", [None]))
    assert result.exit_code == 1
    assert "worker_mode: thread" in result.stderr


def test_the_script_applies_too(make_connector: Factory, tmp_path: Path) -> None:
    sender = make_connector.sender()
    cpu = min(os.sched_getaffinity(0))
    script = [ROOT / "scripts" / "pin_topology.sh", "--apply", str(os.getpid()), "--plan"]
    done = subprocess.run(
        [*script, plan_file(tmp_path, str(cpu), [str(cpu)])],
        capture_output=True,
        text=True,
        env={**os.environ, "MORI_MP_PYTHON": sys.executable},
    )
    assert done.returncode == 0, done.stderr
    assert os.sched_getaffinity(control_pid(sender)) == {cpu}
    assert os.sched_getaffinity(worker_pids(sender)[0]) == {cpu}


# -------------------------------------------------------------------------------- bench and doctor
def test_bench_measures_both_modes(runtime_base: Path) -> None:
    result = run("bench", "--sizes", "4KiB,100000", "--count", "3", "--gap-ms", "0", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.output)
    cases = {(case["size"], case["state"]): case for case in document["cases"]}
    assert set(cases) == {(4096, "idle"), (4096, "busy"), (100_000, "idle"), (100_000, "busy")}
    for case in cases.values():
        assert case["process"]["count"] == case["thread"]["count"] == 3
        assert case["ratio_p50"] == pytest.approx(case["thread"]["p50"] / case["process"]["p50"], abs=0.01)
    assert os.listdir(runtime_base) == []


def test_bench_names_wrong_sizes() -> None:
    result = run("bench", "--sizes", "4KiB,many")
    assert result.exit_code == 2
    assert "--sizes wants sizes" in result.output
    assert run("bench", "--sizes", "1").exit_code == 2


def test_bench_says_why_a_connector_cannot_start() -> None:
    result = run("bench", "--sizes", "4KiB", "--count", "1", "--set", "backend_type=cuda_ipc")
    assert result.exit_code == 1
    assert "backend_type" in result.stderr


# -------------------------------------------------------------------------------- help
@pytest.mark.parametrize("name", list(cli.COMMANDS))
def test_every_command_has_help_with_examples(name: str) -> None:
    result = run(name, "--help")
    assert result.exit_code == 0
    assert f"mori-mp {name}" in result.output.partition("Examples")[2]


def test_the_version_is_told() -> None:
    result = run("--version")
    assert result.exit_code == 0
    assert result.output == f"mori-mp {metadata.version('mori-mp')}\n"


def test_the_shell_can_complete() -> None:
    assert "--install-completion" in run("--help").output


def test_measurements_on_few_cpus_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    assert crowded(3) == ""
    assert crowded(4).startswith("Measured on 3 CPUs, fewer than the 4 processes")
