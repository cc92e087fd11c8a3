"""MoriTransferEngineConnector: what vLLM-Omni makes from a deploy YAML, and what its stages call.

Name, configuration keys, methods and metadata are those of vllm-omni's in-tree class. Inside, this is only
the joint of three things: the memory (`pools`), the sending half (`publisher` over a `heart` of processes)
and the receiving half (`receiver`). Which of them exist follows from the role:

    sender     listens from construction on
    receiver   gets, and listens where the next stage will look for it: a middle stage of 0 -> 1 -> 2 is made
               with role receiver and must put all the same. Started in the background, so that neither the
               constructor nor the first put() waits for it
    dual       both from construction on

With `start: on_use`, which the vLLM-Omni plugin sets, neither happens before the connector is used: the host
makes two connectors from one specification (for its scheduler and its model runner) and uses one of them.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from mori_mp import heart as hearts
from mori_mp.backend import choose
from mori_mp.calls import Calls
from mori_mp.config import ConnectorConfig
from mori_mp.device_pool import DevicePool, await_end
from mori_mp.endpoint import check_bindable, resolve_host
from mori_mp.health import StageHealth
from mori_mp.intake import Timeouts
from mori_mp.link import Us
from mori_mp.meters import StageMeters
from mori_mp.pools import Pools
from mori_mp.publisher import Publisher
from mori_mp.receiver import Receiver
from mori_mp.shared.errors import ConnectorClosed, MoriMPError, PoolExhausted, StartupError
from mori_mp.shared.faults import Faults
from mori_mp.shared.files import expand
from mori_mp.shared.pool import host_id
from mori_mp.shared.procinfo import startup_line
from mori_mp.shared.tracing import TraceFile
from mori_mp.shared.wire import edge_name, internal_key
from mori_mp.wanted import Wanted, read_wanted
from mori_mp.workers.engines.gpu_runtime import GpuError

logger = logging.getLogger(__name__)

_CLOSE_WAIT_SECONDS = 0.5
_DUMP_WAIT_SECONDS = 0.2
_START_WAIT_SECONDS = 2.0  # for a listener that is just being started


class MoriTransferEngineConnector:
    """A connector of one stage process.

    Args:
        config: the deploy YAML's `extra` plus what the host adds (role, stage_id, from_stage, to_stage,
            ports). It is kept as it is in `.config`; README.md lists the keys that are ours.

    Raises:
        ConfigError: a key has a wrong value. EngineUnavailable: the backend asked for is not to be had.
        PoolUnbacked: not enough memory for the pool. StartupError: the listener's port is taken, or a child
        process cannot start.
    """

    supports_raw_data: bool = True

    def __init__(self, config: dict[str, Any]) -> None:
        settings = ConnectorConfig.from_dict(config)
        self.config = config
        self.settings = settings
        self.stage_id = settings.stage_id
        self.role = settings.role
        self.host = resolve_host(settings.host)
        self.sender_host: str | None = settings.sender_host
        self.sender_zmq_port: int | None = settings.sender_zmq_port
        if settings.log_level:
            logging.getLogger("mori_mp").setLevel(settings.log_level)
        choice = choose(settings)
        self.backend_type, self.backend_reason = choice
        self._epoch = uuid.uuid4().hex[:12]
        self.engine_key = f"mori-mp-{self.role}-{self._epoch}-pid{os.getpid()}"
        self._pools = Pools(settings, self.backend_type, f"stage{max(self.stage_id, 0)}-{self._epoch}")
        self.slots = self._pools.slots
        self.faults = Faults("stage")
        self._trace = self._trace_file()
        tracer = self._trace.tracer if self._trace is not None else None
        meters = StageMeters(bool(settings.prometheus_port), tracer)
        self.publisher = Publisher(self.slots, tracer)
        lease, passive = settings.delivery != "landing", self._pools.passive
        self.receiver = Receiver(
            Us(self._epoch, host_id(), passive.engine_desc, passive.mem_desc, lease),
            self.slots,
            Timeouts(
                settings.get_timeout_seconds, settings.query_timeout_seconds, settings.buffer_ttl_seconds
            ),
            lease,
            settings.decode == "view",
            settings.tensor_device == "cpu",
            meters,
            self.faults,
        )
        self.heart: hearts.Heart | None = None
        self._starting = threading.Lock()
        self._started_ahead = False
        self._can_get = False  # what the first get() must see to is done
        self.metrics = {"puts": 0, "bytes_put": 0, "errors": 0}
        self._health = StageHealth(
            self._fixed_health(),
            self.metrics,
            self.publisher,
            self.receiver,
            meters,
            self.faults,
            self._path(settings.health_dump_path),
        )
        self._calls = Calls()
        try:
            if settings.start == "at_once":
                self._start()
            elif self.role != "receiver":
                self._check_port()
        except BaseException:
            self.close()
            raise
        logger.info(
            startup_line(
                "stage",
                engine=self.backend_type,
                device=settings.memory_pool_device,
                cpus=frozenset(os.sched_getaffinity(0)),
                endpoint=f"tcp://{self.heart.host}:{self.heart.port}" if self.heart is not None else "",
                stage=self.stage_id,
                connector=self.role,
            )
        )

    def _ensure_device_pool(self) -> None:
        """Have the GPU pool, if there is to be one, before the first put or get."""
        self._pools.ensure_device(self._use_device_pool)

    def _use_device_pool(self, pool: DevicePool) -> None:
        self.publisher.use_device(pool, self.settings.tensor_device == "pool")
        if self.role != "sender":
            self.receiver.use_device(pool)

    def _fixed_health(self) -> dict[str, Any]:
        """Return what health() says of this connector and never changes."""
        return {
            "host": self.host,
            "pool_device": self.settings.memory_pool_device,
            "pool_size": self.settings.memory_pool_size,
            "engine_key": self.engine_key,
            "role": self.role,
            "stage_id": self.stage_id,
            "engine": self.backend_type,
            "engine_reason": self.backend_reason,
        }

    def _path(self, configured: str) -> Path | None:
        return expand(configured, pid=os.getpid(), stage=self.stage_id) if configured else None

    def _trace_file(self) -> TraceFile | None:
        path = self._path(self.settings.trace_path)
        return TraceFile(path, self.stage_id, self._epoch) if path is not None else None

    # --------------------------------------------------------------------------- set-up
    @property
    def can_put(self) -> bool:
        """Tell whether put() has, or can get, a listener to publish at."""
        return self.heart is not None or self.settings.listener_endpoint() is not None

    @property
    def zmq_port(self) -> int | None:
        """Return the port that this connector listens on, or would if it were asked to put."""
        if self.heart is not None:
            return self.heart.port
        endpoint = self.settings.listener_endpoint()
        return endpoint[1] if endpoint is not None else None

    def _ensure_heart(self) -> hearts.Heart:
        """Start the control process and workers once."""
        heart = self.heart
        if heart is not None:
            return heart
        with self._starting:
            self._calls.check_open("put")
            if self.heart is None:
                endpoint = self.settings.listener_endpoint()
                if endpoint is None:
                    raise StartupError(
                        f"stage {self.stage_id} cannot put: {self.settings.no_listener_reason()}"
                    )
                self._ensure_device_pool()
                heart = hearts.start(
                    self.settings,
                    pools=self._pools,
                    epoch=self._epoch,
                    endpoint=(resolve_host(endpoint[0]), endpoint[1]),
                    replay=self.publisher.replay,
                    freed=self.publisher.freed,
                    health=self._health,
                    target=self.publisher.set_target,
                    trace_folder=str(self._trace.folder) if self._trace is not None else "",
                )
                try:
                    self._calls.check_open("put")
                except ConnectorClosed:  # close() did not wait for us
                    heart.supervisor.close()
                    raise
                self.publisher.attach(heart.supervisor.hot)
                self._health.attach(heart)
                self.heart = heart
            return self.heart

    def _start(self) -> None:
        """Listen and greet, as the role has it."""
        self._ensure_device_pool()
        if self.role != "receiver":
            self._ensure_heart()
        else:
            self._start_ahead()
        settings = self.settings
        if self.role != "sender" and settings.from_stage is not None and settings.to_stage is not None:
            self._greet_sender(edge_name(settings.from_stage, settings.to_stage))

    def _check_port(self) -> None:
        """Raise StartupError if the listener's port is taken now, rather than in the first put()."""
        endpoint = self.settings.listener_endpoint()
        if endpoint is not None:
            check_bindable(resolve_host(endpoint[0]), endpoint[1])

    def listen(self) -> None:
        """Have the listener up when this returns, as the first put() would; for hosts that can wait ahead.

        Raises ConnectorClosed, StartupError.
        """
        with self._calls.counted("listen"):
            self._ensure_heart()

    def _start_ahead(self) -> None:
        """Start the listener in the background, once, unless this is a receiver that is not to have one."""
        self._started_ahead = True
        if self.can_put and self.settings.listens_ahead():
            threading.Thread(target=self._prestart, name="mori-mp-prestart", daemon=True).start()

    def _prestart(self) -> None:
        """Start the listener ahead of the first put(), which may never come (a last stage)."""
        try:
            with self._calls.counted("put"):
                self._ensure_heart()
        except ConnectorClosed:
            return
        except MoriMPError as exc:
            logger.warning("stage %d cannot listen yet; its first put() tries again: %s", self.stage_id, exc)

    def _greet_sender(self, edge: str) -> None:
        if self.sender_zmq_port:
            self.receiver.link(resolve_host(self.sender_host), int(self.sender_zmq_port), edge)

    def update_sender_info(self, sender_host: str, sender_zmq_port: int) -> None:
        """Set the endpoint that get() asks when its metadata names none."""
        self.sender_host, self.sender_zmq_port = sender_host, sender_zmq_port

    def get_connection_info(self) -> dict[str, Any]:
        """Return what another stage needs to reach this one."""
        return {
            "host": self.heart.host if self.heart is not None else self.host,
            "zmq_port": self.zmq_port,
            "engine_key": self.engine_key,
            "can_put": self.can_put,
        }

    # ----------------------------------------------------------------------------- put
    def put(
        self, from_stage: str, to_stage: str, put_key: str, data: Any
    ) -> tuple[bool, int, dict[str, Any] | None]:
        """Publish a payload under a key on one edge; returns (ok, bytes, metadata).

        bytes, tensors and ManagedBuffers travel raw (`is_fast_path`); a ManagedBuffer of this connector's own
        pool is published without a copy. Anything else is encoded. (False, 0, None): an empty payload, or the
        pool stayed too full; the log says which. A key put again replaces its payload.

        Raises ConnectorClosed, PayloadError (the object cannot be encoded), StartupError (a receiver that
        cannot listen).
        """
        self._calls.begin("put")
        try:
            return self._put((from_stage, to_stage), put_key, data)
        finally:
            self._calls.end()

    def _put(self, edge: tuple[str, str], key: str, data: Any) -> tuple[bool, int, dict[str, Any] | None]:
        heart = self._ensure_heart()
        if heart.supervisor.failed:
            return self._fault("put_refused", edge, key, heart.supervisor.failed)
        try:
            done = self.publisher.put(key, internal_key(key, *edge), data)
        except PoolExhausted as exc:
            return self._fault("pool_exhausted", edge, key, exc)
        except GpuError as exc:
            return self._fault("gpu_failed", edge, key, exc)
        if done is None:
            logger.warning("put of %r (%s -> %s) refused: the payload is empty", key, *edge)
            return False, 0, None
        size, fast_path = done
        self.metrics["puts"] += 1
        self.metrics["bytes_put"] += size
        source = {"source_host": heart.host, "source_port": heart.port}
        return True, size, {**source, "data_size": size, "is_fast_path": fast_path}

    def _fault(
        self, cause: str, edge: tuple[str, str], key: str, why: object
    ) -> tuple[bool, int, dict[str, Any] | None]:
        """Count and report a put() that failed; returns what it answers."""
        self.metrics["errors"] += 1
        text = f"put of {key!r} ({edge[0]} -> {edge[1]}) failed: {why}"
        self.faults.report(logger, cause, text, key=key, edge=edge_name(*edge))
        return False, 0, None

    # ----------------------------------------------------------------------------- get
    def get(
        self, from_stage: str, to_stage: str, get_key: str, metadata: dict[str, Any] | None = None
    ) -> tuple[Any, int] | None:
        """Return (payload, bytes), or None when it is not there (yet).

        metadata is put()'s, or host and port alone, or {get_key: metadata}, or None (the configured sender is
        asked). With complete metadata a transfer is waited for; otherwise a miss returns at once.

        Raises ConnectorClosed, SenderUnknown, CorruptPayload.
        """
        self._calls.begin("get")
        try:
            return self.receiver.get(self._wanted(from_stage, to_stage, get_key, metadata), None)
        finally:
            self._calls.end()

    def get_with_deadline(
        self,
        from_stage: str,
        to_stage: str,
        get_key: str,
        metadata: dict[str, Any] | None = None,
        *,
        deadline: float,
    ) -> tuple[Any, int] | None:
        """As get(), but wait for the payload until deadline (`time.monotonic()` seconds)."""
        self._calls.begin("get")
        try:
            return self.receiver.get(self._wanted(from_stage, to_stage, get_key, metadata), deadline)
        finally:
            self._calls.end()

    def _wanted(self, from_stage: str, to_stage: str, key: str, metadata: Any) -> Wanted:
        if not self._can_get:
            self._ensure_device_pool()
            if self.settings.observed() and not self._started_ahead and self.heart is None:
                self._start_ahead()  # else nothing is heard of a last stage that starts on use
            self._can_get = True
        sender = self.sender_host, self.sender_zmq_port
        wanted, odd = read_wanted(from_stage, to_stage, key, metadata, sender)
        if odd:
            self.faults.report(logger, "get_failed", odd, key=key, edge=wanted.edge)
        return wanted

    def get_wakeup_generation(self) -> int:
        """Return a counter that moves when a get() that missed may succeed."""
        with self._calls.counted("get_wakeup_generation"):
            return self.receiver.generation

    def wait_for_change(self, generation: int, timeout: float) -> bool:
        """Wait up to timeout seconds until the counter has moved past generation; tell whether it has."""
        with self._calls.counted("wait_for_change"):
            return self.receiver.wait_for_change(generation, time.monotonic() + timeout)

    def abandon_get(self, get_key: str) -> None:
        """Forget an unresolved get(): key as given to get(), on every edge. Transfers under way go on."""
        self.receiver.forget(get_key)

    def reap_consumed(self) -> None:
        """Take back the memory of payloads that receivers have consumed.

        A host's sending thread calls this from before its first put() on; with `start: on_use` the first
        call starts the listener, in the background.
        """
        with suppress(ConnectorClosed), self._calls.counted("reap_consumed"):
            if self.heart is None and not self._started_ahead:
                self._start_ahead()
            self.publisher.collect()

    # ------------------------------------------------------------------- housekeeping
    def cleanup(self, request_id: str, from_stage: str | None = None, to_stage: str | None = None) -> None:
        """Withdraw what was put under a key: on one edge, or on every edge if no stages are given.

        A payload that is being transferred is withdrawn when that has ended. An internal key
        (`key@from_to`) is understood too. Raises ValueError when only one stage is given.
        """
        if (from_stage is None) != (to_stage is None):
            raise ValueError("cleanup() takes both from_stage and to_stage, or neither")
        with suppress(ConnectorClosed), self._calls.counted("cleanup"):
            if from_stage is not None:
                self.publisher.withdraw(request_id, internal_key(request_id, from_stage, to_stage))
            elif not self.publisher.withdraw(request_id) and "@" in request_id:
                self.publisher.withdraw(request_id.rpartition("@")[0], request_id)

    def health(self) -> dict[str, Any]:
        """Describe the connector; answers within a second whatever state its children are in."""
        try:
            with self._calls.counted("health"):
                self.publisher.collect()
                return self._health.document()
        except ConnectorClosed:
            return {"status": "unhealthy", "error": "Connector is closed"}

    def close(self) -> None:
        """End the children, let go of sockets, memory and files. Idempotent; takes at most 5 s."""
        calls: Calls | None = getattr(self, "_calls", None)  # None: made only half
        if calls is None or not calls.shut():
            return
        self.receiver.close()
        if self._starting.acquire(timeout=_START_WAIT_SECONDS):  # else the thread that starts it ends it
            self._starting.release()
            if self.heart is not None:
                self.heart.supervisor.close()
        self._health.close(_DUMP_WAIT_SECONDS)
        if self._trace is not None:
            self._trace.finish()
        calls.afterwards(self._let_go_of_pool, _CLOSE_WAIT_SECONDS)  # a put() may be copying into the pool

    def _let_go_of_pool(self) -> None:
        """Drop our mapping; the memory itself goes when the last buffer of it in use does."""
        self.receiver.let_go_of_pool()
        in_use = ""
        if self._pools.device is not None and not self.publisher.withdraw_from_device():
            in_use = "a receiver is reading it"
        elif not await_end(lambda: self.receiver.late_device_copies) or self.receiver.late_device_writes:
            in_use = "a sender may still write there"
        self._pools.close(in_use)

    def __del__(self) -> None:
        self.close()

    def __enter__(self) -> MoriTransferEngineConnector:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()
