"""The documentation: generated parts are current, names are real, the README's example runs as printed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from typer.testing import CliRunner

from mori_mp import cli
from mori_mp.shared import messages, wire

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CLI = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
PROTOCOL = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


def part(text: str, name: str, language: str) -> str:
    """The one code block between a pair of markers."""
    inside = text.split(f"<!-- {name}:begin -->")[1].split(f"<!-- {name}:end -->")[0]
    found = re.fullmatch(rf"\s*```{language}\n(.*?)```\s*", inside, re.DOTALL)
    assert found is not None, f"no {language} block between the markers of {name}"
    return found[1]


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", *arguments], capture_output=True, text=True, timeout=60, check=False
    )


def test_generated_parts_are_current() -> None:
    result = run_python(str(ROOT / "docs" / "generate.py"), "--check")
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_stale_part_is_noticed(tmp_path: Path) -> None:
    for name in ("docs", "mori_mp", "workers", "shared", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "docs").unlink()
    (tmp_path / "docs").mkdir()
    for path in filter(Path.is_file, (ROOT / "docs").iterdir()):
        (tmp_path / "docs" / path.name).write_bytes(path.read_bytes())
    stale = README.replace("`zmq_port` | int", "`zmq_port` | text")
    assert stale != README
    (tmp_path / "README.md").write_text(stale, encoding="utf-8")
    script = str(tmp_path / "docs" / "generate.py")
    result = run_python(script, "--check")
    assert (result.returncode, "README.md: config-table" in result.stdout) == (1, True), result
    assert run_python(script).returncode == 0
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == README


# ------------------------------------------------------------------------------ protocol
@pytest.mark.parametrize("struct", [*get_args(wire.Request), *get_args(wire.Notice)])
def test_the_protocol_explains_every_v2_message(struct: Any) -> None:
    tag = struct.__struct_config__.tag
    assert f"\n| `{tag}` | " in PROTOCOL


@pytest.mark.parametrize("status", wire.STATUSES)
def test_the_protocol_explains_every_status(status: str) -> None:
    assert f"\n| `{status}` | " in PROTOCOL


@pytest.mark.parametrize("word", ["MAGIC", "QUERY_INFO", "INFO_NOT_FOUND", "TRANS_DONE", "TRANS_ERROR"])
def test_the_protocol_names_every_word(word: str) -> None:
    assert getattr(wire, word).decode() in PROTOCOL


def test_the_protocol_explains_every_bound() -> None:
    prose = PROTOCOL.split("<!-- wire-bounds:end -->")[1]
    missing = [name for name in vars(wire) if name.startswith("MAX_") and f"`{name}`" not in prose]
    assert missing == []


@pytest.mark.parametrize(
    "channel", ["HotToControl", "AdminToControl", "AdminToStage", "ToWorker", "FromWorker"]
)
def test_the_protocol_names_every_internal_message(channel: str) -> None:
    names = {struct.__name__ for struct in get_args(getattr(messages, channel))}
    assert names
    assert {name for name in names if f"`{name}`" not in PROTOCOL} == set()


# -------------------------------------------------------------------------------- README
@pytest.fixture(scope="module")
def example_output() -> list[str]:
    """What the README's example prints, and as its last line the sender's health report."""
    ask = "    import json\n    print(json.dumps(sender.health()))\n"
    result = run_python("-c", part(README, "example", "python") + ask)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


@pytest.mark.xdist_group("docs")
def test_the_readme_example_prints_what_the_readme_says(example_output: list[str]) -> None:
    printed = README.split("<!-- example:end -->")[1].split("```")[1].strip()
    assert example_output[:-1] == printed.splitlines()


@pytest.mark.xdist_group("docs")
def test_the_readme_health_report_has_only_keys_that_exist(example_output: list[str]) -> None:
    shown = json.loads(part(README, "health", "json"))
    assert keys(shown) - keys(json.loads(example_output[-1])) == set()


def keys(value: Any, path: str = "") -> set[str]:
    """The paths of all keys of a JSON value; the entries of a list count as one."""
    found: set[str] = set()
    if isinstance(value, dict):
        for key, inner in value.items():
            found |= {f"{path}.{key}", *keys(inner, f"{path}.{key}")}
    elif isinstance(value, list):
        for inner in value:
            found |= keys(inner, f"{path}[]")
    return found


# ------------------------------------------------------------------------------ the probe
def probe() -> dict[str, Any]:
    """The liveness probe of docs/cli.md, as Kubernetes reads it."""
    return dict(yaml.safe_load(part(CLI, "probe", "yaml"))["livenessProbe"])


@pytest.mark.parametrize(("answer", "passes"), [(0, True), (1, False), (2, True), (127, False)])
def test_the_liveness_probe_takes_none_found_for_good(tmp_path: Path, answer: int, passes: bool) -> None:
    command = tmp_path / "mori-mp"
    command.write_text(f"#!/bin/sh\nexit {answer}\n", encoding="utf-8")
    command.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    asked = subprocess.run(
        probe()["exec"]["command"], env=environment, timeout=probe()["timeoutSeconds"], check=False
    )
    assert (asked.returncode == 0) is passes


def test_the_command_knows_what_the_liveness_probe_asks(tmp_path: Path) -> None:
    arguments = probe()["exec"]["command"][-1].partition(" > ")[0].split()
    assert arguments[0] == "mori-mp"
    asked = CliRunner().invoke(cli.build_app(), [*arguments[1:], "--runtime-dir", str(tmp_path)])
    assert (asked.exit_code, "listens below" in asked.output) == (2, True)


# --------------------------------------------------------------------------------- links
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        path = (document.parent / file).resolve() if file else document
        if not path.exists() or (anchor and anchor not in anchors(path)):
            broken.append(target)
    assert broken == []


def anchors(path: Path) -> set[str]:
    """The anchors of a Markdown file's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_files_that_are_named_exist(document: Path) -> None:
    named = re.findall(
        r"`((?:mori_mp|workers|shared|scripts|docs|deploy|tests|\.ci)/[\w./]*)`",
        document.read_text(encoding="utf-8"),
    )
    assert {name for name in named if not (ROOT / name).exists()} == set()
