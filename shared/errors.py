"""Error classes of mori-mp.

Each class says whose turn it is: configuration errors are the operator's, payload errors the caller's,
peer errors the other stage's, and the rest ours. Messages stand alone, because hosts flatten exceptions to
text (vllm-omni's connector factory does), and they survive pickling across process borders.
"""

from __future__ import annotations

from collections.abc import Sequence


class MoriMPError(Exception):
    """Base of every error that mori-mp raises on purpose."""


# ------------------------------------------------------------------ the operator's turn
class ConfigError(MoriMPError, ValueError):
    """A connector's configuration is wrong; the message names key, value and what is allowed."""


class DeployError(MoriMPError, ValueError):
    """A deploy YAML is wrong; the message names file, stage or edge, and the fix."""


class PinningError(MoriMPError, ValueError):
    """A CPU set that was asked for cannot be had."""


class EngineUnavailable(MoriMPError, RuntimeError):
    """A transfer engine is not installed or has no device; the message says how to get it."""


class PoolUnbacked(MoriMPError, MemoryError):
    """The host has not enough memory behind a pool of the configured size."""


class StartupError(MoriMPError, RuntimeError):
    """A control process or transfer worker could not be started (port taken, import failed, ...)."""


# -------------------------------------------------------------------- the caller's turn
class PayloadError(MoriMPError, TypeError):
    """An object cannot be sent; the message names its type and place."""


class ConnectorClosed(MoriMPError, RuntimeError):
    """put() or get() after close()."""


class SenderUnknown(MoriMPError, RuntimeError):
    """get() without metadata and without a sender endpoint."""


class PoolExhausted(MoriMPError, MemoryError):
    """No free block of the pool is large enough.

    requested, free, largest_free and size, that of the whole pool, are bytes. key: configuration key that
    sets the size.
    """

    def __init__(self, requested: int, free: int, largest_free: int, size: int, key: str) -> None:
        super().__init__(requested, free, largest_free, size, key)
        self.requested = requested
        self.free = free
        self.largest_free = largest_free
        self.size = size
        self.key = key

    def __str__(self) -> str:
        if self.requested > self.size:
            return (
                f"a payload of {self.requested} bytes does not fit {self.key}={self.size}. Raise {self.key}."
            )
        return (
            f"pool exhausted: {self.requested} bytes asked for, {self.free} free, largest free block "
            f"{self.largest_free}. Raise {self.key}, or look for consumers that do not pull or do not "
            f"release their buffers (health() shows the oldest)."
        )


# ----------------------------------------------------------------------- the peer's turn
class CorruptPayload(MoriMPError, ValueError):
    """Received bytes do not decode to what they claim to be."""


class WireError(MoriMPError, ValueError):
    """A message on a socket breaks the protocol (size, type, range)."""


class TransferFailed(MoriMPError, RuntimeError):
    """A transfer engine reported a failed write."""


# --------------------------------------------------------------------------- our own turn
class AllocatorMisuse(MoriMPError, RuntimeError):
    """A block was freed twice or never allocated."""


class IllegalTransition(MoriMPError):
    """The ledger was told of something that cannot happen in that state."""

    def __init__(self, key: str, generation: int, state: str, event: str, history: Sequence[str]) -> None:
        super().__init__(key, generation, state, event, tuple(history))
        self.key = key
        self.generation = generation
        self.state = state
        self.event = event
        self.history = tuple(history)

    def __str__(self) -> str:
        story = " -> ".join(self.history) or "none"
        return (
            f"event {self.event} is illegal for {self.key!r} (generation {self.generation}) in state "
            f"{self.state}; events before it: {story}"
        )
