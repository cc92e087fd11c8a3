"""The documentation: generated parts are current, names are real, the README's example runs as printed."""

from __future__ import annotations

import dataclasses
import enum
import json
import os
import re
import subprocess
import sys
import textwrap
from collections import OrderedDict, defaultdict, deque
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple, get_args
from uuid import UUID

import msgspec
import numpy
import pytest
import torch
import yaml
from typer.testing import CliRunner

from mori_mp import cli, codec
from mori_mp.config import ConnectorConfig
from mori_mp.deploy import load_deploy
from mori_mp.shared import messages, wire
from mori_mp.shared.errors import PayloadError

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CLI = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
PAYLOADS = (ROOT / "docs" / "payloads.md").read_text(encoding="utf-8")
PROTOCOL = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")
WITH_DEPLOY_YAML = [ROOT / "README.md", ROOT / "docs" / "vllm-omni.md"]
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
_ASK = """
    import json

    deadline = time.monotonic() + 10
    while True:
        report = sender.health()
        ended = report["sender"]["ledger"]["counters"] if "ledger" in report["sender"] else {}
        done = sum(ended.get(f"delivered_{how}", 0) for how in ("eager", "lease", "landing"))
        if done == 2 and not report["pool"]["used_bytes"] or time.monotonic() > deadline:
            break
    print(json.dumps(report))
"""


@pytest.fixture(scope="module")
def example_output() -> list[str]:
    """What the README's example prints, and as its last line the sender's health report."""
    result = run_python("-c", part(README, "example", "python") + _ASK)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


@pytest.mark.xdist_group("docs")
def test_the_readme_example_prints_what_the_readme_says(example_output: list[str]) -> None:
    printed = README.split("<!-- example:end -->")[1].split("```")[1].strip()
    assert example_output[:-1] == printed.splitlines()


@pytest.mark.xdist_group("docs")
def test_the_readme_health_report_has_the_keys_that_it_says(example_output: list[str]) -> None:
    shown, real = json.loads(part(README, "health", "json")), json.loads(example_output[-1])
    assert keys(shown) - keys(real) == set()
    left_out = README.split("<!-- health:begin -->")[0].rpartition("## Reading health()")[2]
    assert real.keys() - shown.keys() == {name for name in real if f"`{name}`" in left_out}
    for part_of in ("pool", "sender", "receiver"):
        assert keys(shown[part_of]) == keys(real[part_of])


@pytest.mark.xdist_group("docs")
def test_the_readme_health_report_counts_what_the_example_does(example_output: list[str]) -> None:
    shown, real = (json.loads(text) for text in (part(README, "health", "json"), example_output[-1]))
    for name in ("status", "puts", "bytes_transferred", "pool"):
        assert shown[name] == real[name]
    ended = [report["sender"]["ledger"]["counters"] for report in (shown, real)]
    for counters in ended:  # may differ from run to run: a receipt that came twice
        counters.pop("stale_events")
    assert ended[0] == ended[1]


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


# ----------------------------------------------------------------------------- deploy YAML
def deploy_blocks(document: Path) -> list[str]:
    """The YAML blocks of a page that name an engine, without the indentation of a list."""
    text = document.read_text(encoding="utf-8")
    blocks = re.findall(r"^ *```yaml\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)
    return [textwrap.dedent(block) for block in blocks if "backend_type" in block]


@pytest.mark.parametrize(
    "document", [ROOT / "README.md", ROOT / "docs" / "vllm-omni.md"], ids=lambda p: p.name
)
def test_the_keys_of_deploy_yaml_that_pages_show_are_right(
    document: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engines = []
    for block in deploy_blocks(document):
        shown = yaml.safe_load(block)
        extra = shown["connectors"]["mori_connector"]["extra"] if "connectors" in shown else shown
        config = ConnectorConfig.from_dict(extra)
        engines.append((config.backend_type, config.memory_pool_device))
    known = [("shm", "cpu"), ("cuda_ipc", "cuda"), ("xgmi", "cuda")]
    assert engines == known[: len(engines)]
    assert len(engines) >= 2
    assert caplog.messages == []


def test_the_deploy_yaml_of_the_readme_gives_the_ports_that_it_names(tmp_path: Path) -> None:
    path = tmp_path / "deploy.yaml"
    path.write_text(deploy_blocks(ROOT / "README.md")[0], encoding="utf-8")
    deploy = load_deploy(path)
    for stage, port in enumerate((50051, 50052, 50053)):
        config = ConnectorConfig.from_dict(deploy.connector_for_stage(stage).config)
        assert config.listener_endpoint() == ("127.0.0.1", port)
        assert str(port) in README.partition("**Ports.**")[2].partition("**Mixed pipelines.**")[0]


# ------------------------------------------------------------------------------- payloads
class Colour(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Box:
    side: tuple[int, int] = (1, 2)


class Crate(msgspec.Struct):
    side: tuple[int, int] = (1, 2)


class Point(NamedTuple):
    x: int


_UTC = datetime(2026, 1, 2, tzinfo=timezone.utc)
_ROWS: list[tuple[str, list[tuple[Any, Any]]]] = [  # how a row ends; what is put, and what comes
    ("itself", [(x, x) for x in (None, True, -(2**63), 2**64 - 1, 1.5, "a", b"a")]),
    ("itself", [([1, [2]], [1, [2]]), ({"a": 1, 2: None}, {"a": 1, 2: None})]),
    (
        "`list`",
        [((1, (2,)), [1, [2]]), (Point(1), [1]), ({1}, [1]), (frozenset([1]), [1]), (torch.Size([3]), [3])],
    ),
    ("`[start, stop, step]`", [(slice(1, 2), [1, 2, None])]),
    ("`dict`", [(OrderedDict(a=1), {"a": 1}), (defaultdict(int, a=1), {"a": 1})]),
    ("`bytes`", [(bytearray(b"a"), b"a"), (memoryview(b"a"), b"a")]),
    ("`dict` of its fields", [(Box(), {"side": [1, 2]}), (Crate(), {"side": [1, 2]})]),
    ("its value", [(Colour.RED, "red")]),
    ("itself", [(_UTC, _UTC)]),
    (
        "`str`",
        [
            (_UTC.replace(tzinfo=None), "2026-01-02T00:00:00"),
            (_UTC.date(), "2026-01-02"),
            (_UTC.time(), "00:00:00"),
            (timedelta(seconds=3), "PT3S"),
            (Decimal("1.5"), "1.5"),
            (UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        ],
    ),
    ("`bool`, `int`, `float`", [(numpy.bool_(True), True), (numpy.int64(3), 3), (numpy.float32(1.5), 1.5)]),
    ("C order", [(x, x) for x in map(numpy.array, ([[1, 2]], [True], ["ab"], [1j]))]),
    ("on the receiver's GPU", [(torch.ones(2, 3).T.bfloat16(), torch.ones(3, 2).bfloat16())]),
]  # images and vLLM's objects have tests of their own
_REFUSED = [2**64, 1j, numpy.complex64(1), deque(), range(3), Path("a"), len, ValueError(), torch.int8]
_REFUSED += [torch.device("cpu"), torch.eye(2).to_sparse(), numpy.array([None]), object()]


def test_payloads_come_as_the_table_says() -> None:
    lines = PAYLOADS.split("| what is put |")[1].split("\n\n")[0].splitlines()[2:]
    assert len(lines) == len(_ROWS) + 2
    for line, (end, samples) in zip(lines, _ROWS, strict=False):
        assert line.endswith(f"{end} |")
        for given, expected in samples:
            came = codec.decode(codec.plan(given).to_bytes())
            assert type(came) is type(expected), (line, given)
            if isinstance(came, torch.Tensor | numpy.ndarray):
                assert came.dtype == expected.dtype
                came, expected = came.tolist(), expected.tolist()
            assert came == expected, line


@pytest.mark.parametrize("given", _REFUSED, ids=lambda given: type(given).__name__)
def test_payloads_that_the_page_says_are_refused(given: Any) -> None:
    with pytest.raises(PayloadError):
        codec.plan({"given": given})


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
