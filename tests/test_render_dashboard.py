"""The dashboard's picture: every panel asked as Grafana asks it, a failing query fails, and it is current."""

from __future__ import annotations

import importlib
import json
import math
import re
import sys
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html import unescape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
Reply = Callable[[dict[str, str]], tuple[int, Any]]


@pytest.fixture(scope="module")
def render() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "docs")
        yield importlib.import_module("render_dashboard")
        for name in ("render_dashboard", "dashboard_data"):
            patch.delitem(sys.modules, name)


@contextmanager
def prometheus(reply: Reply) -> Iterator[str]:
    """A server of /api/v1/query_range. reply: form -> (HTTP status, document)."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            text = self.rfile.read(int(self.headers["Content-Length"])).decode()
            status, told = reply(dict(urllib.parse.parse_qsl(text)))
            body = json.dumps(told).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def found(*results: dict[str, Any]) -> tuple[int, Any]:
    return 200, {"status": "success", "data": {"resultType": "matrix", "result": list(results)}}


PINK = {"type": "value", "options": {"0": {"text": "odd", "color": "pink"}}}


def panel(expression: str = "up", **changes: Any) -> dict[str, Any]:
    return {
        "id": 7,
        "type": "timeseries",
        "title": "A title",
        "gridPos": {"x": 0, "y": 0, "w": 8, "h": 8},
        "fieldConfig": {"defaults": {"unit": "short", "min": 0}},
        "targets": [{"expr": expression, "legendFormat": "stage {{stage}} {{absent}}"}],
        **changes,
    }


# ------------------------------------------------------------------------------- queries
def test_every_query_of_the_dashboard_is_asked_without_a_variable_left(render: ModuleType) -> None:
    dashboard = json.loads(render.DASHBOARD.read_text(encoding="utf-8"))
    asked: list[dict[str, str]] = []

    def reply(form: dict[str, str]) -> tuple[int, Any]:
        asked.append(form)
        return found()

    with prometheus(reply) as server:
        drawn = render.ask(dashboard, server, render.Span(1000.0, 1300.0, 5.0, 15.0), {"stage": "1"})
    queries = [form["query"] for form in asked]
    assert len(queries) == sum(len(each.get("targets", [])) for each in dashboard["panels"])
    assert [query for query in queries if "$" in query] == []
    assert any('stage=~"1",edge=~".*"' in query and "[60s]" in query for query in queries)
    assert any("[300s]" in query for query in queries)
    assert {(form["start"], form["end"], form["step"]) for form in asked} == {("1000.0", "1300.0", "5.0")}
    assert [each.panel for each in drawn] == dashboard["panels"]


def test_a_line_has_its_labels_and_its_gaps(render: ModuleType) -> None:
    values = [[100, "1"], [110, "3"]]  # none at 105
    with prometheus(lambda form: found({"metric": {"stage": "2"}, "values": values})) as server:
        (drawn,) = render.ask({"panels": [panel()]}, server, render.Span(100, 115, 5, 5), {})
    (series,) = drawn.series
    assert series.name == "stage 2"
    assert [None if math.isnan(value) else value for value in series.values] == [1, None, 3, None]


@pytest.mark.parametrize("status", [200, 400])
def test_a_query_that_fails_fails_and_names_the_panel(render: ModuleType, status: int) -> None:
    told = {"status": "error", "errorType": "bad_data", "error": "parse error: unexpected <by>"}
    span = render.Span(100, 115, 5, 5)
    with (
        prometheus(lambda form: (status, told)) as server,
        pytest.raises(render.RenderError, match=r"panel 7 \(A title\).*unexpected <by>"),
    ):
        render.ask({"panels": [panel()]}, server, span, {})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (panel("rate(x[$__typo])"), "unknown variable $__typo"),
        (panel(type="gauge"), "panels of type gauge"),
        (panel(fieldConfig={"defaults": {"unit": "furlongs"}}), "unit furlongs"),
        (panel(type="state-timeline", fieldConfig={"defaults": {"mappings": [PINK]}}), "colour pink"),
    ],
)
def test_what_cannot_be_drawn_is_refused(
    render: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    wrong: dict[str, Any],
    message: str,
) -> None:
    dashboard, output = tmp_path / "dashboard.json", tmp_path / "picture.svg"
    dashboard.write_text(json.dumps({"title": "t", "panels": [wrong]}))
    with prometheus(lambda form: found()) as server:
        words = ["--prometheus", server, "--dashboard", str(dashboard), "--output", str(output)]
        assert render.main(words) == 1
    assert f"panel 7 (A title): {message}" in capsys.readouterr().err
    assert not output.exists()


def test_a_variable_that_the_dashboard_lacks_is_refused(render: ModuleType) -> None:
    with pytest.raises(render.RenderError, match="no variable rank"):
        render.ask({"panels": []}, "http://[::1]:1", render.Span(100, 115, 5, 5), {"rank": "1"})


def test_no_server_is_an_error(
    render: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with prometheus(lambda form: found()) as server:
        pass
    output = tmp_path / "picture.svg"
    assert render.main(["--prometheus", server, "--output", str(output)]) == 1
    assert "no answer from" in capsys.readouterr().err
    assert not output.exists()


@pytest.mark.parametrize(
    ("unit", "value", "text"),
    [
        ("bytes", 3 * 2**20, "3 MiB"),
        ("Bps", 2.5e6, "2.5 MB/s"),
        ("s", 0.00025, "250 µs"),
        ("s", 0, "0 s"),
        ("percentunit", 0.5, "50%"),
        ("ops", 1500, "1.5k ops/s"),
        ("short", 0, "0"),
    ],
)
def test_units(render: ModuleType, unit: str, value: float, text: str) -> None:
    assert render.UNITS[unit](value) == text


# ------------------------------------------------------------------------------- picture
def test_the_picture_is_drawn(render: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")

    def reply(form: dict[str, str]) -> tuple[int, Any]:
        start, step = float(form["start"]), float(form["step"])
        values = [[start + step * index, str(index % 2)] for index in range(5)]
        return found() if "fetch" in form["query"] else found({"metric": {"stage": "0"}, "values": values})

    output = tmp_path / "picture.svg"
    with prometheus(reply) as server:
        assert render.main(["--prometheus", server, "--minutes", "5", "--output", str(output)]) == 0
    assert output.read_text(encoding="utf-8").count("No data") == 1
    assert "(fetch)" in capsys.readouterr().out


def test_the_picture_in_the_documentation_has_the_panels_of_the_dashboard(render: ModuleType) -> None:
    """Titles only: the values are of the run that docs/observability.md tells."""
    image = render.PICTURE.read_text(encoding="utf-8")
    texts = {unescape(text) for text in re.findall(r"<text [^>]*>([^<]*)</text>", image)}
    dashboard = json.loads(render.DASHBOARD.read_text(encoding="utf-8"))
    assert {each["title"] for each in dashboard["panels"]} - texts == set()
    assert len(image) < 400 * 1024
