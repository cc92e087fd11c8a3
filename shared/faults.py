"""Faults: everything that goes wrong is counted by cause, remembered, and logged, at a bounded rate.

One `Faults` for each process (the stage's connector, the control process). A report does this:

    counts[cause] += 1      always: metrics and health() have the true number
    recent                  the newest RECENT, for health() and dumps
    a log line              through the caller's logger, unless the cause has used up its allowance
    listener(cause)         for whoever has dumps written; not for what is reported below WARNING

A flood of one cause therefore costs a few lines a minute and hides no other cause. What was held back is said
in the next line of that cause that gets through, or by flush() once the flood has ended.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any

CAUSES = (  # every cause that is reported anywhere; docs/health-schema.md explains each
    "bad_request",
    "control_died",
    "control_given_up",
    "corrupt",
    "expired",
    "fence_failed",
    "get_failed",
    "get_refused",
    "get_timeout",
    "gpu_failed",
    "holder_died",
    "notice_dropped",
    "notice_invalid",
    "pool_exhausted",
    "pool_unbacked",
    "pull_refused",
    "put_refused",
    "sender_restarted",
    "sender_unreached",
    "worker_died",
    "worker_failed",
    "worker_given_up",
    "worker_hung",
    "write_failed",
)
RECENT = 32
BURST = 10
PERIOD_SECONDS = 30.0
_MAX_TEXT = 500
_MAX_NAME = 200


class RateLimit:
    """Lets `burst` events of one kind through at once, and as many again every `seconds`, evenly spread."""

    def __init__(self, burst: int = BURST, seconds: float = PERIOD_SECONDS) -> None:
        self._burst = burst
        self._rate = burst / seconds
        self._seconds = seconds
        self._kinds: dict[str, list[float]] = {}  # kind -> [tokens, as of, held back, since]
        self.suppressed = 0

    def allow(self, kind: str, now: float) -> int | None:
        """Ask to let one through at `now` (monotonic seconds).

        Returns how many of its kind were held back before it, or None: hold this one back.
        """
        state = self._kinds.get(kind)
        if state is None:
            state = self._kinds[kind] = [float(self._burst), now, 0, now]
        tokens = min(float(self._burst), state[0] + max(0.0, now - state[1]) * self._rate)
        state[1] = now
        if tokens < 1.0:
            state[0] = tokens
            if not state[2]:
                state[3] = now
            state[2] += 1
            self.suppressed += 1
            return None
        state[0] = tokens - 1.0
        held, state[2] = int(state[2]), 0
        return held

    def overdue(self, now: float) -> list[tuple[str, int]]:
        """Return, and forget, what has been held back for a whole period: (kind, how many)."""
        found = []
        for kind, state in self._kinds.items():
            if state[2] and now - state[3] >= self._seconds:
                found.append((kind, int(state[2])))
                state[2] = 0
        return found


class Faults:
    """See the module's docstring. process names where they happen: "stage" or "control".

    listener is called in the reporting thread, whatever locks that holds: it neither waits nor raises.
    """

    def __init__(
        self,
        process: str,
        limit: RateLimit | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._process = process
        self._limit = limit if limit is not None else RateLimit()
        self._clock = clock
        self._wall = wall
        self._loggers: dict[str, logging.Logger] = {}
        self.listener: Callable[[str], None] | None = None
        self.counts: dict[str, int] = {}
        self._recent: deque[dict[str, Any]] = deque(maxlen=RECENT)

    def report(
        self,
        logger: logging.Logger,
        cause: str,
        text: str,
        *,
        key: str = "",
        edge: str = "",
        peer: str = "",
        level: int = logging.ERROR,
    ) -> None:
        """Note one fault. key: the payload's; edge: taken from an internal key when not given; peer: who."""
        if key and not edge:
            edge = key.rpartition("@")[2] if "@" in key else ""
        self.counts[cause] = self.counts.get(cause, 0) + 1
        where = {"key": key[:_MAX_NAME], "edge": edge[:_MAX_NAME], "peer": peer[:_MAX_NAME]}
        known = {name: value for name, value in where.items() if value}
        text = text[:_MAX_TEXT]
        self._recent.append(
            {"time": self._wall(), "process": self._process, "cause": cause, "text": text, **known}
        )
        self._loggers[cause] = logger
        if self.listener is not None and level >= logging.WARNING:
            self.listener(cause)
        held = self._limit.allow(cause, self._clock())
        if held is None:
            return
        fields = "".join(f" {name}={value}" for name, value in known.items())
        more = f" ({held} more of this cause were not logged)" if held else ""
        logger.log(level, "%s [cause=%s%s]%s", text, cause, fields, more)

    def flush(self) -> None:
        """Say what was held back and has not been said for a whole period; call it now and then."""
        for cause, held in self._limit.overdue(self._clock()):
            self._loggers[cause].warning("%d more faults were not logged one by one [cause=%s]", held, cause)

    def as_dict(self) -> dict[str, Any]:
        """Describe them for health(); see docs/health-schema.md."""
        return {
            "counts": dict(self.counts),
            "recent": list(self._recent),
            "suppressed_log_lines": self._limit.suppressed,
        }
