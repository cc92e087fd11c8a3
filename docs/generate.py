"""Writes the parts of the documentation that the code knows better: `python docs/generate.py [--check]`.

Each such part stands between `<!-- NAME:begin -->` and `<!-- NAME:end -->`; SECTIONS says what makes it. With
--check nothing is written, and the exit status is 1 if a part is stale (tests/test_docs.py runs that).
"""

from __future__ import annotations

import ast
import io
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import get_args

import msgspec

from mori_mp.config import markdown_table
from mori_mp.shared import pin_cli, wire
from mori_mp.workers.ledger_table import EVENT_DOCS, REFUSALS, ROWS, STATE_DOCS, TRANSITIONS, State

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tests"))
from sysfs_tree import RECORDED, write  # noqa: E402


def table(*rows: tuple[str, ...]) -> str:
    """A Markdown table; the first row is its head."""
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def module_map() -> str:
    """Every module by package, with the first paragraph of its docstring."""
    parts = []
    for folder in sorted(packages(), key=lambda path: (not path.startswith("mori_mp"), path)):
        rows = [
            (f"[`{path.name}`](../{folder}/{path.name})", summary(path))
            for path in sorted((ROOT / folder).glob("*.py"))
        ]
        parts.append(f"**`{folder}/`**\n\n" + table(("module", "what it is"), *rows))
    return "\n\n".join(parts)


def packages() -> Iterator[str]:
    """The folder of every package, from the repository's root."""
    for top in ("mori_mp", "workers", "shared"):
        for path in (ROOT / top).rglob("__init__.py"):
            folder = path.parent.relative_to(ROOT).as_posix()
            if not folder.startswith(("mori_mp/workers", "mori_mp/shared")):  # the links for type checkers
                yield folder


def summary(path: Path) -> str:
    """The first paragraph of a module's docstring, on one line."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].split())


def ledger_diagram() -> str:
    """The buffer ledger as a Mermaid state diagram."""
    return "\n".join(["```mermaid", "stateDiagram-v2", *_edges(), "```"])


def _edges() -> Iterator[str]:
    yield f"    [*] --> {State.PUBLISHED.name}: PUBLISH"
    for state, row in TRANSITIONS.items():
        for target in State:
            events = [event.name for event, goal in row.items() if goal is target]
            if events:
                yield f"    {state.name} --> {target.name}: {', '.join(events)}"
    yield f"    {State.FREED.name} --> [*]"


def ledger_states() -> str:
    """Where the bytes are in each state, and who may touch them."""
    head = ("state", "where the bytes live", "who may touch them", "who can find it", "a lease request")
    return table(
        head,
        *(
            (
                f"`{state.name}`",
                doc.where,
                doc.access,
                doc.visible,
                f"refused: {REFUSALS[state].value}" if state in REFUSALS else "granted",
            )
            for state, doc in STATE_DOCS.items()
        ),
    )


def ledger_rows() -> str:
    """Every transition with its reason."""
    rows = ((f"`{r.state.name}`", f"`{r.event.name}`", f"`{r.target.name}`", r.why) for r in ROWS)
    return table(("from", "event", "to", "why"), *rows)


def ledger_events() -> str:
    """Who fires each event."""
    return table(("event", "who fires it"), *((f"`{event.name}`", doc) for event, doc in EVENT_DOCS.items()))


REQUESTS: tuple[type[msgspec.Struct], ...] = get_args(wire.Request)
NOTICES: tuple[type[msgspec.Struct], ...] = get_args(wire.Notice)
_KINDS = {
    int: "int",
    str: "str",
    bool: "bool",
    bytes: "bin",
    memoryview: "bin",
    list[str]: "*str",
    list[int]: "*int",
}


def wire_v1() -> str:
    """The grammar of the v1 bodies."""
    lines = []
    for struct in (wire.QueryRequest, wire.PullRequest, wire.QueryResponse):
        fields = ", ".join(
            f'"{field.name}": {_KINDS[field.type]}' for field in msgspec.structs.fields(struct)
        )
        lines.append(_wrapped(f"{struct.__name__:<15}= {{ {fields} }}"))
    return "\n".join(["```abnf", *lines, "```"])


def wire_v2() -> str:
    """The grammar of the v2 messages."""
    lines = [_choice("request", REQUESTS), _choice("notice", NOTICES), ""]
    for struct in (*REQUESTS, *NOTICES):
        lines.append(
            _wrapped(f"{_tag(struct):<9}= [ " + ", ".join([f'"{_tag(struct)}"', *_fields(struct)]) + " ]")
        )
    return "\n".join(["```abnf", *lines, "```"])


def _wrapped(rule: str) -> str:
    indent = " " * (rule.index("=") + 4)
    glued = rule.replace(": ", ":\u00a0")  # no line break inside a field
    return textwrap.fill(glued, 100, subsequent_indent=indent).replace("\u00a0", " ")


def _choice(name: str, structs: tuple[type[msgspec.Struct], ...]) -> str:
    return f"{name:<9}= magic ( " + " / ".join(_tag(struct) for struct in structs) + " )"


def _tag(struct: type[msgspec.Struct]) -> str:
    return str(struct.__struct_config__.tag)


def _fields(struct: type[msgspec.Struct]) -> Iterator[str]:
    for field in msgspec.structs.fields(struct):
        text = f"{field.name}: {_KINDS[field.type]}"
        yield text if field.required else f"[{text}]"


def wire_bounds() -> str:
    """The limits that wire.py sets."""
    rows = [("constant", "value")]
    for name, value in vars(wire).items():
        if name.startswith("MAX_"):
            rows.append((f"`{name}`", f"{value:,}".replace(",", " ")))
    return table(*rows)


def plans() -> str:
    """What the planner makes of the machines that the tests have recorded, in its own words."""
    blocks = []
    for title, machine in RECORDED.items():
        gpus = ["0", "5"] if "cpuset" in title else ["5"] if len(machine.kfd) > 1 else ["0"]
        for gpu in gpus:
            with tempfile.TemporaryDirectory() as root, redirect_stdout(io.StringIO()) as printed:
                write(Path(root), machine)
                pin_cli.main(["--table", "--gpu", gpu, "--sysfs-root", root])
            blocks.append(f"# {title}\n$ pin_topology.sh --table --gpu {gpu}\n{printed.getvalue()}")
    return "```console\n" + "\n".join(blocks) + "```"


SECTIONS: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"config-table": markdown_table},
    "docs/configuration.md": {"config-table": markdown_table},
    "docs/architecture.md": {
        "module-map": module_map,
        "ledger-diagram": ledger_diagram,
        "ledger-states": ledger_states,
        "ledger-events": ledger_events,
        "ledger-rows": ledger_rows,
    },
    "docs/tuning.md": {"plans": plans},
    "docs/protocol.md": {"wire-v1": wire_v1, "wire-v2": wire_v2, "wire-bounds": wire_bounds},
}


def regenerated(text: str, name: str, body: str) -> str:
    """The text with one part replaced. ValueError unless both of its markers are there, once."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"{begin} and {end} must be there exactly once")
    before, _, rest = text.partition(begin)
    return f"{before}{begin}\n{body}\n{end}{rest.partition(end)[2]}"


def main(arguments: list[str]) -> int:
    """Write or check all parts; returns the exit status."""
    stale = []
    for file, sections in SECTIONS.items():
        path = ROOT / file
        text = path.read_text(encoding="utf-8")
        for name, make in sections.items():
            fresh = regenerated(text, name, make())
            if fresh != text:
                stale.append(f"{file}: {name}")
            text = fresh
        if "--check" not in arguments:
            path.write_text(text, encoding="utf-8")
    if stale and "--check" in arguments:
        print("stale (run python docs/generate.py):", *stale, sep="\n  ")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
