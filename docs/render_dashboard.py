# /// script
# requires-python = ">=3.10"
# dependencies = ["matplotlib>=3.8"]
# ///
"""Draws a Grafana dashboard without Grafana: each panel's own queries, asked of a Prometheus server.

    uv run docs/render_dashboard.py --prometheus http://127.0.0.1:9090 --minutes 7

or `python` with matplotlib installed; the package itself never needs it. What is drawn is what the file of
the dashboard says, in its grid and with its titles, units and legends, so that a query or a unit that is
wrong there is wrong in the picture (dashboard_data.py asks). Only lines are drawn, not what fills them.

Exit status 0; 1 if a query fails or the dashboard has something that this cannot draw, naming the panel. A
panel without data says so in the picture, and on standard output.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from dashboard_data import Drawn, RenderError, Span, ask

ROOT = Path(__file__).resolve().parent.parent
DASHBOARD = ROOT / "deploy" / "grafana" / "mori-mp.json"
PICTURE = ROOT / "docs" / "images" / "dashboard.svg"

COLUMNS = 24  # of Grafana's grid
_CELL_INCHES = (0.62, 0.30)
_LEGEND_ROWS = 4
_COLOURS = (  # Grafana's classic palette
    *("#7eb26d", "#eab839", "#6ed0e0", "#ef843c", "#e24d42", "#1f78c1"),
    *("#ba43a9", "#705da0", "#508642", "#cca300", "#447ebc", "#c15c17"),
)
_NAMED_COLOURS = {"green": "#73bf69", "yellow": "#fade2a", "red": "#f2495c"}  # Grafana's own
_POINTS = 120  # of a line, unless --step says otherwise


# --------------------------------------------------------------------------------- units
_SI = ((1e9, "G"), (1e6, "M"), (1e3, "k"))
_BINARY = ((2**30, " GiB"), (2**20, " MiB"), (2**10, " KiB"))
_SECONDS = ((1.0, " s"), (1e-3, " ms"), (1e-6, " µs"))


def _scaled(value: float, scales: Sequence[tuple[float, str]], smallest: str = "") -> str:
    for scale, name in scales:
        if abs(value) >= scale * 0.9999:
            return f"{value / scale:.3g}{name}"
    return f"{value:.3g}{smallest}"


UNITS = {
    "short": lambda value: _scaled(value, _SI),
    "ops": lambda value: _scaled(value, _SI) + " ops/s",
    "cps": lambda value: _scaled(value, _SI) + " c/s",
    "bytes": lambda value: _scaled(value, _BINARY, " B"),
    "Bps": lambda value: _scaled(value, tuple((scale, f" {name}B/s") for scale, name in _SI), " B/s"),
    "s": lambda value: _scaled(value, _SECONDS) if value else "0 s",
    "percentunit": lambda value: f"{value * 100:.3g}%",
}


def check(panel: Mapping[str, Any]) -> None:
    """Raises RenderError for a panel that cannot be drawn."""
    where = f"panel {panel['id']} ({panel['title']})"
    if panel["type"] not in ("row", "state-timeline", "timeseries"):
        raise RenderError(f"{where}: panels of type {panel['type']} cannot be drawn")
    if panel["type"] == "state-timeline":
        unknown = {colour for _, colour in states_of(panel).values()} - set(_NAMED_COLOURS)
        if unknown:
            raise RenderError(f"{where}: colour {', '.join(sorted(unknown))} cannot be drawn")
    unit = panel.get("fieldConfig", {}).get("defaults", {}).get("unit")
    if panel["type"] == "timeseries" and unit not in UNITS:
        raise RenderError(f"{where}: unit {unit} cannot be drawn")


def states_of(panel: Mapping[str, Any]) -> dict[float, tuple[str, str]]:
    """Text and colour (Grafana's name) of each value of a state timeline."""
    return {
        float(value): (shown["text"], shown["color"])
        for mapping in panel["fieldConfig"]["defaults"]["mappings"]
        for value, shown in mapping["options"].items()
    }


# ------------------------------------------------------------------------------- picture
def draw(title: str, drawn: Sequence[Drawn], span: Span, path: Path) -> None:
    """Draw the panels where the grid has them."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams.update(
        {"svg.fonttype": "none", "svg.hashsalt": title, "font.size": 7, "font.sans-serif": ["DejaVu Sans"]}
    )
    rows = max(each.panel["gridPos"]["y"] + each.panel["gridPos"]["h"] for each in drawn) + 1
    width, height = COLUMNS * _CELL_INCHES[0], rows * _CELL_INCHES[1]
    figure = pyplot.figure(figsize=(width, height), facecolor="#f4f5f5")

    def place(at: Mapping[str, float], margins: tuple[float, float, float, float]) -> list[float]:
        """A grid position less margins in inches (left, top, right, bottom), as parts of the figure."""
        left, top = at["x"] * _CELL_INCHES[0] + margins[0], (at["y"] + 1) * _CELL_INCHES[1] + margins[1]
        wide = at["w"] * _CELL_INCHES[0] - margins[0] - margins[2]
        high = at["h"] * _CELL_INCHES[1] - margins[1] - margins[3]
        return [left / width, 1 - (top + high) / height, wide / width, high / height]

    figure.text(0.1 / width, 1 - 0.2 / height, title, fontsize=11, weight="bold", va="center")
    begun, ended = (datetime.fromtimestamp(at, timezone.utc) for at in (span.start, span.end))
    period = f"{begun:%Y-%m-%d %H:%M:%S} to {ended:%H:%M:%S} UTC"
    figure.text(1 - 0.1 / width, 1 - 0.2 / height, period, va="center", ha="right", color="#555555")
    for each in drawn:
        at = each.panel["gridPos"]
        if each.panel["type"] == "row":
            left, bottom, _, high = place(at, (0.1, 0, 0, 0))
            figure.text(left, bottom + high / 2, each.panel["title"], fontsize=9, weight="bold", va="center")
            continue
        figure.patches.append(_card(place(at, (0.04, 0.04, 0.04, 0.04)), figure))
        left, bottom, _, high = place(at, (0.12, 0.06, 0.1, 0.06))
        figure.text(left, bottom + high, each.panel["title"], weight="bold", va="top", fontsize=7.5)
        entries = _legend_entries(each)
        lines = _legend_lines([name for name, _ in entries], at["w"] * _CELL_INCHES[0] - 0.2)
        axes = figure.add_axes(place(at, (0.72, 0.3, 0.15, 0.32 + 0.13 * len(lines))))
        _plot(axes, each, span)
        for row, line in enumerate(lines):
            x = left
            for index, text in line:
                y = bottom + 0.13 * (len(lines) - 1 - row) / height
                if index is not None:
                    figure.text(x, y, "━", color=entries[index][1], fontsize=6)
                figure.text(x + 0.13 / width, y, text, fontsize=6, color="#333333")
                x += _text_inches(text) / width
    figure.savefig(path, format="svg", metadata={"Date": None})
    pyplot.close(figure)
    path.write_text(_smaller(path.read_text(encoding="utf-8")), encoding="utf-8")


def _card(where: Sequence[float], figure: Any) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle(
        (where[0], where[1]),
        where[2],
        where[3],
        transform=figure.transFigure,
        facecolor="white",
        edgecolor="#dcdcde",
        linewidth=0.6,
        zorder=-1,
    )


def _colour(index: int) -> str:
    return _COLOURS[index % len(_COLOURS)]


def _legend_entries(each: Drawn) -> list[tuple[str, str]]:
    """Names and colours."""
    if each.panel["type"] == "state-timeline":
        return [(text, _NAMED_COLOURS[colour]) for text, colour in states_of(each.panel).values()]
    return [(series.name, _colour(index)) for index, series in enumerate(each.series)]


def _plot(axes: Any, each: Drawn, span: Span) -> None:
    axes.set_xlim(span.start, span.end)
    axes.spines[:].set_visible(False)
    axes.set_axisbelow(True)
    axes.grid(True, color="#e5e5e7", linewidth=0.5)
    axes.tick_params(length=0, labelsize=6, colors="#555555", pad=2)
    axes.xaxis.set_major_locator(_clock_locator(span))
    axes.xaxis.set_major_formatter(lambda at, _: f"{datetime.fromtimestamp(at, timezone.utc):%H:%M}")
    if not each.series:
        axes.text(0.5, 0.5, "No data", transform=axes.transAxes, ha="center", va="center", color="#777777")
        axes.set_yticks([])
    elif each.panel["type"] == "state-timeline":
        _plot_states(axes, each, span)
    else:
        _plot_lines(axes, each)


def _plot_states(axes: Any, each: Drawn, span: Span) -> None:
    """A bar for each series, coloured by its value; a gap where it has none."""
    states = states_of(each.panel)
    for row, series in enumerate(each.series):
        known = [
            (at, value)
            for at, value in zip(series.times, series.values, strict=True)
            if not math.isnan(value)
        ]
        for value, (_, colour) in states.items():
            bars = [(at, span.step) for at, found in known if found == value]
            axes.broken_barh(_joined(bars), (row - 0.35, 0.7), color=_NAMED_COLOURS[colour], linewidth=0)
    axes.set_yticks(range(len(each.series)), [series.name for series in each.series])
    axes.set_ylim(len(each.series) - 0.5, -0.5)
    axes.grid(False, axis="y")


def _joined(bars: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Bars (start, length) in order, those that touch made one."""
    found: list[tuple[float, float]] = []
    for start, length in bars:
        if found and math.isclose(sum(found[-1]), start):
            found[-1] = (found[-1][0], found[-1][1] + length)
        else:
            found.append((start, length))
    return found


def _plot_lines(axes: Any, each: Drawn) -> None:
    defaults = each.panel["fieldConfig"]["defaults"]
    for index, series in enumerate(each.series):
        axes.plot(series.times, series.values, color=_colour(index), linewidth=0.9)
    if "min" in defaults:
        flat = all(value == defaults["min"] or math.isnan(value) for s in each.series for value in s.values)
        axes.set_ylim(bottom=defaults["min"], top=defaults["min"] + 1 if flat else None)
    axes.yaxis.set_major_locator(_locator(defaults["unit"], axes.get_ylim()[1]))
    axes.yaxis.set_major_formatter(lambda value, _: UNITS[defaults["unit"]](value))


def _locator(unit: str, top: float) -> Any:
    """Four ticks or so, at round values of the unit."""
    from matplotlib.ticker import MaxNLocator, MultipleLocator

    if unit == "bytes" and top >= 4:
        return MultipleLocator(2.0 ** (math.ceil(math.log2(top)) - 2))
    return MaxNLocator(nbins=4, steps=[1, 2, 2.5, 5, 10])


def _clock_locator(span: Span) -> Any:
    from matplotlib.ticker import FixedLocator

    whole = next((m for m in (1, 2, 5, 10, 15, 30) if (span.end - span.start) / (60 * m) <= 8), 60) * 60
    first = math.ceil(span.start / whole) * whole
    return FixedLocator([first + whole * index for index in range(int((span.end - first) // whole) + 1)])


def _text_inches(text: str) -> float:
    return 0.049 * len(text) + 0.24


def _legend_lines(names: Sequence[str], wide: float) -> list[list[tuple[int | None, str]]]:
    """Names in lines of a width in inches; what does not fit into the last line is counted there."""
    lines: list[list[tuple[int | None, str]]] = []
    left = 0.0
    for index, name in enumerate(names):
        if not lines or _text_inches(name) > left:
            if len(lines) == _LEGEND_ROWS:
                lines[-1][-1] = (None, f"… {len(names) - index + 1} more")
                break
            lines.append([])
            left = wide
        lines[-1].append((index, name))
        left -= _text_inches(name)
    return lines


def _smaller(image: str) -> str:
    """A tenth of a point is fine enough, and nobody reads the source: half the size."""

    def path(match: re.Match[str]) -> str:
        data = re.sub(r"-?[0-9]+[.][0-9]+", lambda n: f"{float(n[0]):.1f}".removesuffix(".0"), match[1])
        return f'd="{" ".join(data.split()).replace(" L ", "L")}"'

    image = re.sub(r"\s*<!--.*?-->", "", image)  # matplotlib repeats each text as a comment
    image = re.sub(r' transform="rotate\(-0 [^"]*"', "", image)
    return re.sub(r">\n\s*<", ">\n<", re.sub(r'\bd="([^"]*)"', path, image))


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dashboard", type=Path, default=DASHBOARD, help="the dashboard's JSON")
    parser.add_argument("--prometheus", required=True, metavar="URL", help="the Prometheus server")
    parser.add_argument("--minutes", type=float, default=30.0, help="how much to show (default: 30)")
    parser.add_argument("--end", type=float, help="where it ends, in Unix seconds (default: now)")
    parser.add_argument("--step", type=float, help=f"seconds between points (default: {_POINTS} points)")
    parser.add_argument("--scrape-interval", type=float, default=15.0, help="seconds (default: 15)")
    parser.add_argument("--var", action="append", default=[], metavar="NAME=VALUE", help="choose a variable")
    parser.add_argument("--output", type=Path, default=PICTURE, help="the SVG to write")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> int:
    """Ask, draw, and say which panels have nothing."""
    options = arguments(given)
    end = options.end if options.end is not None else time.time()
    seconds = options.minutes * 60
    step = options.step or max(1.0, round(seconds / _POINTS))
    span = Span(end - seconds, end, step, options.scrape_interval)
    dashboard = json.loads(options.dashboard.read_text(encoding="utf-8"))
    chosen = dict(each.split("=", 1) for each in options.var)
    try:
        for panel in dashboard["panels"]:
            check(panel)
        drawn = ask(dashboard, options.prometheus, span, chosen)
    except RenderError as exc:
        print(f"render_dashboard: {exc}", file=sys.stderr)
        return 1
    draw(dashboard["title"], drawn, span, options.output)
    for each in drawn:
        if each.panel["type"] != "row" and not each.series:
            print(f"no data: panel {each.panel['id']} ({each.panel['title']})")
    print(f"{options.output}: {options.output.stat().st_size // 1024} KiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
