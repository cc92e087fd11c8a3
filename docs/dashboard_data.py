"""What a Grafana dashboard shows: each panel's queries, asked of a Prometheus server as Grafana asks them.

Grafana's variables are put in as it does: `$__rate_interval`, `$__range`, and those of the dashboard, with
their "All" unless something else is chosen. For docs/render_dashboard.py, which draws it.
"""

from __future__ import annotations

import json
import math
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


class RenderError(Exception):
    """The dashboard cannot be drawn: what it says, or what Prometheus answers."""


@dataclass(frozen=True)
class Span:
    """What is looked at, in Unix seconds, and how often it was scraped."""

    start: float
    end: float
    step: float
    scrape_interval: float

    def variables(self) -> dict[str, str]:
        """Grafana's own variables, as its Prometheus data source makes them."""
        rate = max(self.step + self.scrape_interval, 4 * self.scrape_interval)
        return {
            "__interval": f"{self.step:g}s",
            "__rate_interval": f"{rate:g}s",
            "__range": f"{self.end - self.start:.0f}s",
            "__range_s": f"{self.end - self.start:.0f}",
        }


@dataclass(frozen=True)
class Series:
    """One line: its name in the legend and its values, NaN where there is none."""

    name: str
    times: Sequence[float]
    values: Sequence[float]


@dataclass(frozen=True)
class Drawn:
    """A panel with what its queries gave."""

    panel: Mapping[str, Any]
    series: Sequence[Series]


# ------------------------------------------------------------------------------- queries
def dashboard_variables(dashboard: Mapping[str, Any], chosen: Mapping[str, str]) -> dict[str, str]:
    """Values of the dashboard's own variables: what was chosen, else their "All".

    Raises RenderError for a choice that is no variable of the dashboard, and for a variable without "All".
    """
    values: dict[str, str] = {}
    for variable in dashboard.get("templating", {}).get("list", []):
        if variable["type"] == "datasource":
            continue
        value = chosen.get(variable["name"], variable.get("allValue"))
        if value is None:
            raise RenderError(f"variable {variable['name']} has no value for All: give --var")
        values[variable["name"]] = value
    unknown = sorted(set(chosen) - set(values))
    if unknown:
        raise RenderError(f"the dashboard has no variable {', '.join(unknown)}")
    return values


def substitute(expression: str, variables: Mapping[str, str]) -> str:
    """Put variables into a query. Raises RenderError for one that is not known."""

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name not in variables:
            raise RenderError(f"unknown variable ${name} in {expression}")
        return variables[name]

    return re.sub(r"\$(?:(\w+)|\{(\w+)(?::\w+)?\})", value, expression)


def legend(template: str, labels: Mapping[str, str]) -> str:
    """Fill in a legend as Grafana does: a label that is absent is empty."""
    return re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda match: labels.get(match[1], ""), template).strip()


def query_range(server: str, expression: str, span: Span) -> list[dict[str, Any]]:
    """Ask Prometheus. Raises RenderError with its own words."""
    form = {"query": expression, "start": span.start, "end": span.end, "step": span.step}
    request = urllib.request.Request(
        f"{server.rstrip('/')}/api/v1/query_range", urllib.parse.urlencode(form).encode()
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            told = json.load(answer)
    except urllib.error.HTTPError as exc:
        text = exc.read().decode(errors="replace")
        raise RenderError(f"{expression}: HTTP {exc.code} {text[:500]}") from exc
    except (OSError, ValueError) as exc:
        raise RenderError(f"no answer from {server}: {exc}") from exc
    if told.get("status") != "success":
        raise RenderError(f"{expression}: {told.get('error', told)}")
    return list(told["data"]["result"])


def series_of(target: Mapping[str, Any], found: Sequence[Mapping[str, Any]], span: Span) -> Iterator[Series]:
    """Turn an answer into lines on the grid of steps, so that a gap stays a gap."""
    count = int((span.end - span.start) / span.step) + 1
    times = [span.start + index * span.step for index in range(count)]
    for result in found:
        values = [math.nan] * count
        for at, text in result["values"]:
            values[min(count - 1, round((at - span.start) / span.step))] = float(text)
        if not all(math.isnan(value) for value in values):
            yield Series(legend(target["legendFormat"], result["metric"]), times, values)


def ask(dashboard: Mapping[str, Any], server: str, span: Span, chosen: Mapping[str, str]) -> list[Drawn]:
    """Evaluate every panel. Raises RenderError, naming the panel."""
    variables = {**span.variables(), **dashboard_variables(dashboard, chosen)}
    drawn = []
    for panel in dashboard["panels"]:
        try:
            series: list[Series] = []
            for target in panel.get("targets", []):
                found = query_range(server, substitute(target["expr"], variables), span)
                series += series_of(target, found, span)
        except RenderError as exc:
            raise RenderError(f"panel {panel['id']} ({panel['title']}): {exc}") from exc
        drawn.append(Drawn(panel, sorted(series, key=lambda each: each.name)))
    return drawn
