"""The command line of the planner and the script in front of it."""

from __future__ import annotations

import inspect
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import sysfs_tree
from sysfs_tree import MI300X_GPUS, Machine, mi300x

from mori_mp import cli_pin
from mori_mp.shared import pin_cli
from mori_mp.shared.pinning import Plan, resolve_request
from mori_mp.shared.topology import read_topology

SCRIPT = Path(__file__).parent.parent / "scripts" / "pin_topology.sh"


@pytest.fixture(scope="module")
def nps1_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sysfs_tree.write(tmp_path_factory.mktemp("nps1"), mi300x())


# ---------------------------------------------------------------------------------- command line
def cli(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    try:
        status = pin_cli.main([str(item) for item in arguments])
    except SystemExit as err:
        status = int(err.code or 0)
    out, err_text = capsys.readouterr()
    return status, out, err_text


@pytest.fixture
def _quiet_env(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*pin_cli._REQUEST_VARIABLES, *pin_cli._GPU_FILTERS, "MORI_MP_PYTHON"):
        monkeypatch.delenv(name, raising=False)


pytestmark = pytest.mark.usefixtures("_quiet_env")


def test_cli_writes_a_plan_file(nps1_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # GPU 0 in the driver's order is the first of the second socket.
    status, out, err = cli(capsys, "--sysfs-root", nps1_root, "--gpu", "0", "--workers", "3")
    assert (status, err) == (0, "")
    made = Plan.from_json(out)
    assert made.node == 1
    assert made.control == {191, 383}
    by_address = cli(capsys, "--json", "--sysfs-root", nps1_root, "--gpu", "85:00.0", "--workers", 3)
    assert by_address == (0, out, "")


def test_cli_table(nps1_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = cli(capsys, "--table", "--sysfs-root", nps1_root, "--nic", "mlx5_0", "--workers", 1)
    assert status == 0
    lines = [line.split() for line in out.splitlines()]
    assert ["control", "95,287", "0", "88-95,280-287"] in lines
    assert ["worker", "0", "94,286", "0", "88-95,280-287"] in lines


def test_cli_env_is_what_a_shell_and_the_connector_read(
    nps1_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--sysfs-root", nps1_root, "--gpu", MI300X_GPUS[0])
    _, text, _ = cli(capsys, "--env", *arguments)
    shell = subprocess.run(["sh", "-c", text + "\nenv"], capture_output=True, text=True, check=True)
    env = dict(line.split("=", 1) for line in shell.stdout.splitlines() if line.startswith("MORI_MP_"))
    topology = read_topology(nps1_root, nps1_root / "proc")
    again = resolve_request({}, env).plan(topology, workers=2)
    made = Plan.from_json(cli(capsys, *arguments)[1])
    assert (again.control, again.workers, again.node) == (made.control, made.workers, made.node)


@pytest.mark.parametrize("form", pin_cli._FORMATS)
def test_cli_format_is_the_flag_of_that_name(
    nps1_root: Path, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    where = ("--sysfs-root", nps1_root, "--gpu", 0)
    spelled = cli(capsys, "--format", form, *where)
    assert spelled == cli(capsys, f"--{form}", *where)
    assert spelled[0] == 0


def test_the_script_has_the_options_of_the_command() -> None:
    """docs/cli.md promises it: a command line that works with one works with the other."""
    command = inspect.signature(cli_pin.pin, eval_str=True).parameters
    names = {name.replace("_", "-") for name in command} - {"form"} | {"format"}
    options = pin_cli._parser("x").format_help()
    assert {name for name in names if f"--{name}" not in options} == set()


def test_cli_numactl(nps1_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--numactl", "--sysfs-root", nps1_root, "--gpu", MI300X_GPUS[0], "--reserve", "95", "--smt")
    expected = "numactl --physcpubind=94,285-286 --preferred=0\n"
    assert cli(capsys, *arguments) == (0, expected, "")


def test_cli_strict_and_degraded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = sysfs_tree.write(tmp_path, Machine(cores=2))
    status, out, _ = cli(capsys, "--sysfs-root", root)
    assert status == 0
    assert Plan.from_json(out).degraded
    assert cli(capsys, "--strict", "--sysfs-root", root)[:2] == (3, out)
    status, out, err = cli(capsys, "--env", "--sysfs-root", root)
    assert "export MORI_MP_WORKER_CPUS='none|none'" in out
    assert "fewer than 4" in err


def test_cli_explain_keeps_standard_output_clean(
    nps1_root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "3")
    monkeypatch.setenv("MORI_MP_PIN", "off")
    status, out, err = cli(capsys, "--json", "--explain", "--gpu", 1, "--sysfs-root", nps1_root)
    assert status == 0
    assert Plan.from_json(out).cpus
    for part in (
        "384 online CPUs, 192 cores, 24 L3 domains",
        "numa_node",
        "HIP_VISIBLE_DEVICES=3",
        "MORI_MP_PIN",
    ):
        assert part in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--bogus"], "--bogus"),
        (["--json", "--table"], "not allowed with"),
        (["--workers", "-2"], "workers=-2"),
        (["--gpu", "8"], "8 GPUs"),
        (["--gpu", "left"], "'left'"),
        (["--reserve", "5-1"], "'5-1'"),
        (["--exec"], "needs a command"),
        (["--exec", "--", "true"], "recorded tree"),
    ],
)
def test_cli_usage_errors(
    nps1_root: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    status, out, err = cli(capsys, "--sysfs-root", nps1_root, *arguments)
    assert (status, out) == (1, "")
    assert message in err


def test_cli_exec_pins_itself_to_the_whole_plan_and_checks_the_mask(
    nps1_root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    topology = read_topology(nps1_root, nps1_root / "proc")
    asked: list[frozenset[int] | None] = []
    ran: list[list[str]] = []
    monkeypatch.setattr(pin_cli, "read_topology", lambda: topology)
    monkeypatch.setattr(pin_cli, "pin_self", lambda cpus: asked.append(cpus) or cpus)
    monkeypatch.setattr(os, "execvp", lambda file, args: ran.append(args))
    arguments = ("--gpu", MI300X_GPUS[0], "--workers", 2, "--exec", "--", "serve", "--json")
    cli(capsys, *arguments)
    assert asked == [{93, 94, 95, 285, 286, 287}]
    assert ran == [["serve", "--json"]]
    # A mask that the kernel cut down must not pass unnoticed.
    monkeypatch.setattr(pin_cli, "pin_self", lambda cpus: frozenset({0}))
    status, _, err = cli(capsys, *arguments)
    assert status == 1
    assert "the kernel gave 0" in err
    assert len(ran) == 1


def test_cli_unreadable_topology(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = cli(capsys, "--sysfs-root", tmp_path)
    assert (status, out) == (2, "")
    assert "devices/system/cpu/online" in err


# ------------------------------------------------------------------------------------ the script
def script(*arguments: str, cwd: Path | None = None, **env: str | None) -> subprocess.CompletedProcess[str]:
    wanted = {**os.environ, "MORI_MP_PYTHON": sys.executable, **env}
    environment = {name: value for name, value in wanted.items() if value is not None}
    return subprocess.run([str(SCRIPT), *arguments], capture_output=True, text=True, env=environment, cwd=cwd)


def test_the_script_plans_this_machine() -> None:
    done = script("--workers", "1")
    assert done.returncode == 0, done.stderr
    made = Plan.from_json(done.stdout)
    assert len(made.workers) == 1
    assert made.cpus <= os.sched_getaffinity(0)


def test_the_script_runs_a_command_on_the_plans_cpus() -> None:
    made = Plan.from_json(script("--workers", "1").stdout)
    code = "import os, sys; print(sorted(os.sched_getaffinity(0)), sys.argv[1:])"
    done = script("--workers", "1", "--exec", "--", sys.executable, "-c", code, "a b", "--exec")
    assert done.returncode == 0, done.stderr
    expected = sorted(made.cpus or os.sched_getaffinity(0))
    assert done.stdout.strip() == f"{expected} {['a b', '--exec']}"
    missing = script("--exec", "--", "/no/such/command")
    assert missing.returncode == 1
    assert "/no/such/command" in missing.stderr


def test_the_script_names_a_python_that_will_not_do(tmp_path: Path) -> None:
    done = script(MORI_MP_PYTHON=str(tmp_path / "python"))
    assert done.returncode == 1
    assert "MORI_MP_PYTHON" in done.stderr


def test_the_script_works_from_a_checkout_without_an_installation(tmp_path: Path) -> None:
    python = tmp_path / "python3"  # -S: no site-packages, so neither mori_mp nor its dependencies
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -S "$@"\n')
    python.chmod(0o755)
    path = f"{tmp_path}:/usr/bin:/bin"
    done = script("--json", cwd=tmp_path, MORI_MP_PYTHON=None, PYTHONPATH=None, PATH=path)
    assert done.returncode == 0, done.stderr
    assert Plan.from_json(done.stdout)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_the_script_is_shellcheck_clean() -> None:
    done = subprocess.run(["shellcheck", str(SCRIPT)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
