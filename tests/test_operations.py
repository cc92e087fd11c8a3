"""The runbook knows every counter, fault and error class, and the command line's page every command."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from mori_mp import intake
from mori_mp.cli import COMMANDS
from mori_mp.shared import errors
from mori_mp.shared.faults import CAUSES
from mori_mp.shared.topology import TopologyError
from mori_mp.workers import broker, ledger

DOCS = Path(__file__).parent.parent / "docs"
RUNBOOK = (DOCS / "operations.md").read_text(encoding="utf-8")
NAMED = frozenset(re.findall(r"`([A-Za-z_][\w.]*)`", RUNBOOK))


def section(title: str) -> frozenset[str]:
    """The names in one section of the runbook's tables."""
    _, found, rest = RUNBOOK.partition(f"\n### {title}\n")
    assert found, title
    body = re.split(r"\n##+ ", rest)[0]
    return frozenset(re.findall(r"`([a-z_]+)`", "\n".join(line.split("|")[1] for line in rows(body))))


def rows(text: str) -> Iterator[str]:
    """Rows of Markdown tables."""
    return (line for line in text.splitlines() if line.startswith("|"))


@pytest.mark.parametrize(
    ("title", "counters"),
    [
        ("Receiver", intake._COUNTERS),
        ("Control process", broker._COUNTERS),
        ("Ledger", ledger._COUNTERS),
    ],
)
def test_every_counter_is_explained(title: str, counters: tuple[str, ...]) -> None:
    assert section(title) == set(counters)


def test_every_error_class_is_explained() -> None:
    classes = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, errors.MoriMPError)
    }
    assert classes | {TopologyError.__name__} <= NAMED


def test_every_fault_of_the_health_document_is_explained() -> None:
    schema = (DOCS / "health-schema.md").read_text(encoding="utf-8")
    body = schema.partition("| cause | what |")[2]
    causes = {cause for row in rows(body) for cause in re.findall(r"`([a-z_]+)`", row.split("|")[1])}
    assert causes == set(CAUSES)
    assert causes <= NAMED


def test_every_command_is_described() -> None:
    page = (DOCS / "cli.md").read_text(encoding="utf-8")
    table = "\n".join(rows(page))
    assert [name for name in COMMANDS if f"`{name}`" not in table] == []
