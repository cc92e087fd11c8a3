"""Prometheus metrics: names and units by convention, values of the health document, a matching dashboard."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from mori_mp.shared import families as omni
from mori_mp.shared.faults import CAUSES
from mori_mp.shared.histogram import Histogram
from mori_mp.workers.report import Child, Part, compose

pytest.importorskip("prometheus_client")
from prometheus_client.parser import text_string_to_metric_families

from mori_mp.workers import metrics

DASHBOARD = Path(__file__).resolve().parents[1] / "deploy" / "grafana" / "mori-mp.json"


def histogram(*times: int) -> dict[str, Any]:
    made = Histogram()
    for time in times:
        made.record(time)
    return made.as_dict()


def document() -> dict[str, Any]:
    """A health document with something in every place."""
    stage = {
        "stage_id": 1,
        "puts": 5,
        "gets": 4,
        "pool": {"size": 4096, "used_bytes": 100, "largest_free": 3000, "quarantined_bytes": 50},
        "device_pool": {"size": 8192, "used_bytes": 200, "largest_free": 7000},
        "receiver": {"counters": {"misses": 7, "eager": 1, "lease": 2, "landing": 3}, "senders": []},
        "queues": {"publish_backlog": 1, "ready_notices": 2},
        "edges": {"0_1": {"received": 4, "received_bytes": 40, "get": histogram(3), "fetch": histogram(2)}},
        "faults": {"counts": {"corrupt": 2}, "recent": [], "suppressed_log_lines": 3},
    }
    states = {"published": 1, "in_flight": 0, "leased": 0, "draining": 0}
    ends = ("eager", "lease", "landing")
    counters = {**{f"delivered_{how}": 1 for how in ends}, "withdrawn": 1, "expired": 9, "replaced": 0}
    sender = {
        "ledger": {"entries": states, "bytes": states, "counters": {**counters, "abandoned": 0}},
        "sessions": 2,
        "parked": 0,
        "jobs_queued": 0,
        "jobs_under_way": 0,
        "freed_backlog": 0,
        "workers": [{"index": 0, "ready": True}],
        "edges": {
            "1_2": {
                "published": 5,
                "published_bytes": 500,
                "publish": histogram(1, 9, 1 << 40),
                "reply": histogram(4),
                "write": histogram(5),
            }
        },
    }
    found = compose(Part(stage), Part(sender), [], reporter="control")
    found["edges"]["1_2"]["latency_us"]["put"] = histogram(30)
    numbers = {"cpu_s": 1.5, "rss_bytes": 30 << 20, "shared_bytes": 9, "threads": 2, "fds": 12}
    switches = {"voluntary_switches": 8, "involuntary_switches": 9}
    children = (
        Child("control", None, 5, True, False, 3.0, 0, ""),
        Child("worker", 1, None, False, False, 1.0, 2, ""),
    )
    found["processes"] = [{**asdict(child), **numbers, **switches} for child in children]
    return found


TRANSFERS: list[dict[str, Any]] = [
    {"0_1": {omni.RX_SECONDS: {"sum": 0.5, "buckets": [1] * 14}}},
    {"1_2": {omni.SIZE_BYTES: {"sum": 5000.0, "buckets": [2, 1] + [0] * 9}}},
]


def samples(text: bytes) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


@pytest.fixture(scope="module")
def scraped() -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    return samples(metrics.Metrics().text(document(), TRANSFERS))


def value(scraped: Any, name: str, **labels: str) -> float:
    return float(scraped[name][tuple(sorted(labels.items()))])


# ------------------------------------------------------------------------------- names
def test_every_family_is_exposed_and_no_other(scraped: Any) -> None:
    told = {name for name in metrics.exposed_names() if not name.startswith("vllm_omni:")}
    assert {name for name in scraped if not name.startswith("vllm_omni:")} == told


@pytest.mark.parametrize("name", metrics.FAMILIES)
def test_names_follow_the_conventions(name: str) -> None:
    kind, text, labels = metrics.FAMILIES[name]
    assert re.fullmatch(r"mori_mp(_[a-z]+)+", name)
    assert not name.endswith(("_total", "_count", "_sum", "_us", "_ms", "_mb"))
    assert kind != "histogram" or name.endswith("_seconds")
    assert text.endswith(".")
    assert set(labels) <= {"edge", "cause", "worker", "process", "status", "state", "queue", "kind"}


def test_every_sample_names_its_stage(scraped: Any) -> None:
    for name, found in scraped.items():
        if name.startswith("mori_mp"):
            assert all(("stage", "1") in labels for labels in found), name


# ------------------------------------------------------------------------------ values
def test_values_are_those_of_the_document(scraped: Any) -> None:
    assert value(scraped, "mori_mp_puts_total", stage="1") == 5
    assert value(scraped, "mori_mp_status", stage="1", status="healthy") == 1
    assert value(scraped, "mori_mp_status", stage="1", status="degraded") == 0
    assert value(scraped, "mori_mp_faults_total", stage="1", cause="corrupt") == 2
    assert value(scraped, "mori_mp_payloads_ended_total", stage="1", cause="expired") == 9
    assert value(scraped, "mori_mp_published_bytes_total", stage="1", edge="1_2") == 500
    assert value(scraped, "mori_mp_deliveries_total", stage="1", cause="landing") == 3
    assert value(scraped, "mori_mp_queue_depth", stage="1", queue="ready_notices") == 2
    assert value(scraped, "mori_mp_process_up", stage="1", process="worker", worker="1") == 0
    assert value(scraped, "mori_mp_process_up", stage="1", process="control", worker="") == 1
    assert value(scraped, "mori_mp_process_restarts_total", stage="1", process="worker", worker="1") == 2


def test_every_cause_is_there_from_zero(scraped: Any) -> None:
    """increase() does not see the step with which a series begins: one death in a week would never show."""
    found = {dict(labels)["cause"]: count for labels, count in scraped["mori_mp_faults_total"].items()}
    assert found == {**dict.fromkeys(CAUSES, 0), "corrupt": 2}


def test_histograms_are_cumulative_and_in_seconds(scraped: Any) -> None:
    name = "mori_mp_put_to_publish_seconds"
    where = {"stage": "1", "edge": "1_2"}
    buckets = {
        dict(labels)["le"]: count
        for labels, count in scraped[f"{name}_bucket"].items()
        if ("edge", "1_2") in labels
    }
    assert list(buckets.values()) == sorted(buckets.values())
    assert buckets["1e-06"] == 0
    assert buckets["2e-06"] == 1
    assert buckets["8e-06"] == 1
    assert buckets["1.6e-05"] == 2
    assert buckets["+Inf"] == value(scraped, f"{name}_count", **where) == 3
    assert value(scraped, f"{name}_sum", **where) == pytest.approx(10e-6 + (1 << 40) / 1e6)


def test_an_empty_document_has_no_samples() -> None:
    assert metrics.Metrics().text({}) == b""


# --------------------------------------------------------------------- vLLM-Omni's own
def test_the_families_of_the_host_keep_names_and_bounds(scraped: Any) -> None:
    edge = {"from_stage": "1", "to_stage": "2"}
    assert value(scraped, "vllm_omni:transfer_size_bytes_bucket", le="1024.0", **edge) == 2
    assert value(scraped, "vllm_omni:transfer_size_bytes_count", **edge) == 3
    assert value(scraped, "vllm_omni:transfer_rx_s_count", from_stage="0", to_stage="1") == 14


def test_names_and_bounds_are_the_hosts() -> None:
    host = pytest.importorskip("vllm_omni.metrics.definitions")
    assert omni.SIZE_BYTES == host.TRANSFER_SIZE_BYTES
    assert omni.TX_SECONDS == host.TRANSFER_TX_S
    assert omni.RX_SECONDS == host.TRANSFER_RX_S
    assert omni.IN_FLIGHT_SECONDS == host.TRANSFER_IN_FLIGHT_S
    assert omni.SECONDS_BOUNDS == host.SECONDS_FAST_BUCKETS
    assert omni.BYTES_BOUNDS == host.BYTES_BUCKETS


# ---------------------------------------------------------------------------- dashboard
def expressions(place: Any) -> list[str]:
    """Every query of a dashboard."""
    found: list[str] = []
    if isinstance(place, dict):
        found += [
            value for key, value in place.items() if key in ("expr", "query") and isinstance(value, str)
        ]
        place = list(place.values())
    if isinstance(place, list):
        for inner in place:
            found += expressions(inner)
    return found


def test_the_dashboard_asks_for_names_that_are_exposed() -> None:
    queries = expressions(json.loads(DASHBOARD.read_text(encoding="utf-8")))
    asked = {name for query in queries for name in re.findall(r"mori_mp_\w+|vllm_omni:\w+", query)}
    assert len(asked) > 20
    assert asked - metrics.exposed_names() == set()


def test_the_dashboard_shows_every_family_but_a_few() -> None:
    queries = " ".join(expressions(json.loads(DASHBOARD.read_text(encoding="utf-8"))))
    unseen = {name for name in metrics.FAMILIES if name not in queries}
    assert unseen == {
        "mori_mp_stage_report_age_seconds",
        "mori_mp_puts",
        "mori_mp_gets",
        "mori_mp_received_bytes",
        "mori_mp_log_lines_suppressed",
        "mori_mp_sessions",
        "mori_mp_process_up",
        "mori_mp_process_uptime_seconds",
        "mori_mp_process_shared_memory_bytes",
    }


def test_the_dashboard_groups_by_labels_that_its_metrics_have() -> None:
    for query in expressions(json.loads(DASHBOARD.read_text(encoding="utf-8"))):
        names = re.findall(r"mori_mp_\w+", query)
        labels = {"stage", "le"}
        for name in names:
            family = re.sub(r"_(total|bucket|sum|count)$", "", name)
            labels |= set(metrics.FAMILIES[family][2])
        grouped = {
            label.strip() for group in re.findall(r"by \(([^)]*)\)", query) for label in group.split(",")
        }
        filtered = set(re.findall(r"(\w+)=~", query))
        assert (grouped | filtered) - labels == set(), query


def test_legends_name_only_labels_that_their_query_keeps() -> None:
    """Grafana leaves a label that is absent empty, so that two lines get one name."""
    targets = [
        target
        for panel in json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
        for target in panel.get("targets", [])
    ]
    for target in targets:
        kept = [set(group.split(", ")) - {"le"} for group in re.findall(r"by \(([^)]*)\)", target["expr"])]
        named = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        assert all(group == named for group in kept), target
        assert kept, target


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        at = panel["gridPos"]
        cells = {(at["x"] + dx, at["y"] + dy) for dx in range(at["w"]) for dy in range(at["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells


# -------------------------------------------------------------------------------- page
def test_the_page_on_metrics_names_every_family_and_no_other() -> None:
    page = (DASHBOARD.parents[2] / "docs" / "observability.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(mori_mp_\w+)`", page))
    suffix = {"counter": "_total", "gauge": "", "histogram": ""}
    assert named == {name + suffix[kind] for name, (kind, _, _) in metrics.FAMILIES.items()}
    assert set(omni.BOUNDS) <= set(re.findall(r"`(vllm_omni:\w+)`", page))
