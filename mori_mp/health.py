"""What health() reports: the in-tree class's keys, and the state of every part behind them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mori_mp.connector import MoriTransferEngineConnector

CONTROL_ANSWER_SECONDS = 0.5


def connector_health(connector: MoriTransferEngineConnector) -> dict[str, Any]:
    """Gather a report; a control process that does not answer in time is marked stale, not waited for."""
    receiver = connector.receiver.report()
    received = receiver["counters"]
    report: dict[str, Any] = {
        "status": "healthy",
        "host": connector.host,
        "pool_device": connector.settings.memory_pool_device,
        "pool_size": connector.settings.memory_pool_size,
        "engine_key": connector.engine_key,
        "puts": connector.metrics["puts"],
        "gets": received["gets"],
        "bytes_transferred": connector.metrics["bytes_put"] + received["bytes"],
        "errors": connector.metrics["errors"]
        + received["errors"]
        + received["corrupt"]
        + received["pool_exhausted"]
        + received["refused"],
        "timeouts": received["timeouts"],
        "role": connector.role,
        "stage_id": connector.stage_id,
        "engine": connector.backend_type,
        "engine_reason": connector.backend_reason,
        "pool": {**connector.slots.stats(), "published": connector.publisher.outstanding},
        "receiver": receiver,
    }
    heart = connector.heart
    if heart is None:
        return report
    supervisor = heart.supervisor
    report["pinning"] = {
        "node": heart.plan.node,
        "degraded": heart.plan.degraded,
        "reasons": heart.plan.reasons,
    }
    report["control_restarts"] = supervisor.restarts
    report["put_pool_exhausted"] = connector.publisher.exhausted
    sender = supervisor.health(CONTROL_ANSWER_SECONDS)
    report["sender"] = sender if sender is not None else {"stale": True}
    if supervisor.failed:
        report.update(status="unhealthy", error=supervisor.failed)
    elif supervisor.pool_error:
        report.update(status="degraded", error=supervisor.pool_error)
    elif sender is None:
        report.update(status="degraded", error="the control process does not answer")
    elif not all(worker["ready"] for worker in sender["workers"]):
        report.update(status="degraded", error="a transfer worker is not up")
    return report
