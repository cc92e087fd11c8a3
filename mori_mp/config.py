"""The connector's configuration: every key, its default, what it means and what it may hold.

Theory of operation. The two Structs below are the only list of keys: reading a configuration, describe() and
the table in the README all walk it (mori_mp.config_keys holds that machinery). ConnectorConfig.from_dict()
takes the dict that the host passes (the deploy YAML's ``extra`` plus what the host adds), never changes it:

    expand $VAR -> read loose spellings -> check type and bounds -> rules over several keys -> ConnectorConfig

A key that is absent or null takes its default. Every problem found is collected, and one ConfigError lists
them all, a line each. Keys that are not ours belong to the stage's other code and are left alone; one that
is nearly ours is probably misspelt and is warned about once per process.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from mori_mp import config_keys
from mori_mp.config_keys import KeyDoc, key, size_key
from mori_mp.config_rules import broken_rules
from mori_mp.shared import files
from mori_mp.shared.errors import ConfigError

logger = logging.getLogger(__name__)

RDMA_DEVICES_ENV = "MORI_RDMA_DEVICES"


def _read_role(value: Any) -> Any:
    # The host's loader passes "auto" where it cannot tell the direction; such a connector may put.
    return "sender" if config_keys.read_lower(value) == "auto" else value


def _read_device_name(value: Any) -> Any:
    return "" if config_keys.read_lower(value) == "auto" else value


def _read_file(value: Any) -> Any:
    """A path whose placeholders are those that mori_mp.shared.files.expand() replaces."""
    if isinstance(value, str) and not set(re.findall(r"\{\w*\}", value)) <= files.PLACEHOLDERS:
        raise ValueError(value)
    return value


def _read_pin(value: Any) -> Any:
    if value is False:  # YAML reads a bare `off` as false
        return "off"
    word = config_keys.read_lower(value)
    if word in ("auto", "off", "force"):
        return word
    # Anything else must look like a path, or a misspelt word would be taken for a file.
    if isinstance(value, str) and ("/" in value or value.endswith(".json")):
        return value
    raise ValueError(value)


_Port = Annotated[int, Meta(ge=1, le=65535)]
_ListenPort = Annotated[int, Meta(ge=0, le=65535)]
_PoolBytes = Annotated[int, Meta(ge=4096, le=1 << 50)]
_Stage = Annotated[int, Meta(ge=0)]
_Count = Annotated[int, Meta(ge=1, le=4096)]
_Timeout = Annotated[float, Meta(gt=0, le=31_536_000)]
_Duration = Annotated[float, Meta(ge=0, le=31_536_000)]
_Host = Annotated[str, Meta(pattern=r"^[^\s/]*$")]

_HOST_TEXT = "a host name or IP address, or `auto` (also empty, `*`, `0.0.0.0`, `::`) for the detected one"
_FILE_TEXT = "a path; `{pid}` (the stage's) and `{stage}` are replaced, other words in braces refused"
_CPULIST_TEXT = "a kernel cpulist such as 0-3,8; empty = automatic"


class Outgoing(msgspec.Struct, frozen=True, kw_only=True):
    """A middle stage's listener, where the deploy YAML states it instead of leaving it to be computed."""

    host: Annotated[
        _Host | None, key("Address that the outgoing listener binds; unset = `host`.", allowed=_HOST_TEXT)
    ] = None
    zmq_port: Annotated[
        _ListenPort,
        key("Port that the outgoing listener binds: the port itself, nothing is added. 0 picks a free one."),
    ]
    from_stage: Annotated[
        _Stage | None,
        key("Stage that this entry is for; others pass over it. Unset = whichever stage reads it."),
    ] = None
    to_stage: Annotated[_Stage | None, key("Stage that the outgoing edge leads to.")] = None


class ConnectorConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A checked configuration. Make one with from_dict(); sizes are in bytes, times in seconds."""

    host: Annotated[
        _Host, key("Address of this connector's ZMQ listener, as told to its peers.", allowed=_HOST_TEXT)
    ] = "127.0.0.1"
    zmq_port: Annotated[_ListenPort, key("Port of the ZMQ listener; 0 picks a free one.")] = 50051
    device_name: Annotated[
        str,
        key(
            f"RDMA devices, comma-separated. Unset, empty or `auto`: ${RDMA_DEVICES_ENV},"
            " else the engine chooses.",
            read=_read_device_name,
        ),
    ] = ""
    memory_pool_size: Annotated[
        _PoolBytes, size_key("Size of the registered memory pool.", mistaken=("pool_size",))
    ] = 1024**3
    memory_pool_device: Annotated[
        str,
        Meta(pattern=r"^(cpu|cuda(:[0-9]{1,3})?)$"),
        key(
            "Where the pool lies.",
            allowed="`cpu`, `cuda` or `cuda:N` (torch names ROCm GPUs `cuda` too)",
            read=config_keys.read_lower,
        ),
    ] = "cpu"
    backend_type: Annotated[
        Literal["auto", "rdma", "xgmi", "fabric", "shm", "cuda_ipc"],
        key(
            "Transfer engine. `auto` takes the first that this host can run, whatever the peer has: with a"
            " host pool `rdma`, `shm`; with a GPU pool `xgmi`, `rdma`, `cuda_ipc`. Name one in production.",
            mistaken=("backend",),
        ),
    ] = "auto"
    host_pool_size: Annotated[
        _PoolBytes,
        size_key("Size of the host pool beside a GPU pool: what is not a GPU tensor travels in it."),
    ] = 256 * 1024**2
    xgmi_num_streams: Annotated[_Count, key("Streams of the XGMI engine.")] = 64
    xgmi_num_events: Annotated[_Count, key("Events of the XGMI engine.")] = 64
    cuda_ipc_num_streams: Annotated[_Count, key("Streams of the CUDA IPC engine.")] = 8
    cuda_ipc_num_events: Annotated[
        _Count, key("Events of the CUDA IPC engine: writes under way at once in each worker.")
    ] = 64
    qp_per_transfer: Annotated[_Count, key("RDMA queue pairs that one transfer is spread over.")] = 1
    num_worker_threads: Annotated[_Count, key("Threads inside the RDMA engine of each transfer worker.")] = 1
    post_batch_size: Annotated[
        int,
        Meta(ge=-1, le=1 << 20),
        key("RDMA work requests posted at once; -1 leaves it to the engine.", allowed="-1, or 1..1048576"),
    ] = -1
    enable_transfer_chunking: Annotated[
        bool | None, key("RDMA: cut large transfers into chunks. Unset = as Mori has it.")
    ] = None
    chunk_bytes: Annotated[
        Annotated[int, Meta(ge=4096, le=1 << 40)] | None,
        size_key("RDMA: size of a chunk. Unset = as Mori has it."),
    ] = None
    max_chunks_per_transfer: Annotated[
        _Count | None, key("RDMA: most chunks of one transfer. Unset = as Mori has it.")
    ] = None
    num_nics_per_transfer: Annotated[
        _Count | None, key("RDMA: NICs that one transfer is spread over. Unset = as Mori has it.")
    ] = None
    poll_cq_mode: Annotated[
        Literal["polling", "event"], key("RDMA: how the engine waits for completions.")
    ] = "polling"
    role: Annotated[
        Literal["sender", "receiver", "dual"],
        key(
            "Which way this connector moves payloads. Unset: `dual` where `zmq_port`, `sender_host` and"
            " `sender_zmq_port` are all given, else `sender`.",
            allowed="`sender`, `receiver`, `dual`, `auto` (= `sender`)",
            read=_read_role,
        ),
    ] = "sender"
    start: Annotated[
        Literal["at_once", "on_use"],
        key(
            "When a sender opens its listener and a receiver greets its sender: as soon as it is made, or"
            " when it is used. The vLLM-Omni plugin sets `on_use`."
        ),
    ] = "at_once"
    sender_host: Annotated[
        _Host | None, key("Upstream listener's address, for a get() without metadata.", allowed=_HOST_TEXT)
    ] = None
    sender_zmq_port: Annotated[_Port | None, key("Upstream listener's port.")] = None
    stage_id: Annotated[
        int, Meta(ge=-1), key("Stage this connector serves, set by the host; -1 = none.")
    ] = -1
    from_stage: Annotated[_Stage | None, key("Stage that the edge comes from, set by the host.")] = None
    to_stage: Annotated[_Stage | None, key("Stage that the edge leads to, set by the host.")] = None
    outgoing: Annotated[
        Outgoing | None, key("The listener of a stage that also sends on; wins over `host` and `zmq_port`.")
    ] = None
    num_transfer_workers: Annotated[
        int,
        Meta(ge=1, le=64),
        key("Transfer workers of a sending connector.", mistaken=("workers", "num_workers")),
    ] = 2
    prestart: Annotated[
        bool,
        key("A receiver starts its own listener at once, in the background, not at its first put()."),
    ] = True
    worker_mode: Annotated[
        Literal["process", "thread"],
        key("Run control and workers as processes, or as threads of the stage (for debugging)."),
    ] = "process"
    worker_python: Annotated[
        str, key("Path of another Python interpreter for the transfer workers; empty = the stage's own.")
    ] = ""
    delivery: Annotated[
        Literal["auto", "lease", "landing"],
        key(
            "How a payload reaches a receiver on the same host: `lease` has the receiver read it in the"
            " sender's pool, or a GPU copy it from GPU pool to GPU pool; `landing` has a worker write it"
            " into the receiver's; `auto` leases where both ends can."
        ),
    ] = "auto"
    eager_bytes: Annotated[
        int,
        Meta(ge=0, le=1024**2),
        size_key("Payloads up to this size ride in the READY notice; 0 = none."),
    ] = 65536
    buffer_ttl_seconds: Annotated[
        _Timeout, key("How long a published payload that nobody fetches is kept.", unit="seconds")
    ] = 300.0
    get_timeout_seconds: Annotated[
        _Timeout,
        key(
            "How long a get() with complete metadata waits for its transfer, plus 5 s for each 100 MB.",
            unit="seconds",
        ),
    ] = 30.0
    query_timeout_seconds: Annotated[
        _Timeout, key("How long a sender may take to answer whether a key is ready.", unit="seconds")
    ] = 5.0
    park_seconds: Annotated[
        _Duration,
        key("How long a pull that overtakes its publish is parked before it is refused.", unit="seconds"),
    ] = 0.2
    prefault: Annotated[bool, key("Touch every page of a host pool at start, not on first use.")] = True
    tensor_device: Annotated[
        Literal["cpu", "pool"],
        key("Where tensors decoded from an object payload lie: host memory, or the pool's device."),
    ] = "cpu"
    decode: Annotated[
        Literal["copy", "view"],
        key(
            "Tensors decoded from an object payload: copies, or views that hold their pool memory"
            " while they live."
        ),
    ] = "copy"
    control_cpus: Annotated[
        str, key("CPUs of the control process.", allowed=_CPULIST_TEXT, read=config_keys.read_cpulist)
    ] = ""
    worker_cpus: Annotated[
        str,
        key(
            "CPUs of the transfer workers: one list for all, or one for each, separated by `|`.",
            allowed="kernel cpulists such as 28-31 or 31|29; empty = automatic",
            read=config_keys.read_cpulists,
        ),
    ] = ""
    numa_node: Annotated[
        int, Meta(ge=-1, le=1023), key("NUMA node for the pool and the children; -1 = automatic.")
    ] = -1
    pin: Annotated[
        str,
        key(
            "CPU pinning: planned here, none, planned even where it is unwise, or a plan file.",
            allowed="`auto`, `off`, `force`, or the path of a plan (with a `/`, or ending in `.json`)",
            read=_read_pin,
        ),
    ] = "auto"
    runtime_dir: Annotated[
        str, key("Directory of the Unix sockets and other run-time files; empty = chosen at start.")
    ] = ""
    restart_limit: Annotated[
        int,
        Meta(ge=0, le=1000),
        key("Restarts of a child within 60 s before the connector reports itself failed."),
    ] = 5
    job_timeout_seconds: Annotated[
        _Timeout,
        key("How long a worker may take over one transfer before it counts as hung.", unit="seconds"),
    ] = 30.0
    health_dump_path: Annotated[
        str,
        key(
            "File that health documents are written to: at faults, on SIGUSR1 to the control process, and"
            " periodically; empty = none.",
            allowed=_FILE_TEXT,
            read=_read_file,
        ),
    ] = ""
    health_dump_interval_seconds: Annotated[
        _Duration, key("Seconds between two such writes; 0 = no periodic writes.", unit="seconds")
    ] = 0.0
    prometheus_port: Annotated[
        _ListenPort,
        key(
            "Base of the port at which the control process serves Prometheus metrics (`/metrics`), on the"
            " listener's address: `stage_id` is added. 0 = none. Needs the extra `metrics`."
        ),
    ] = 0
    trace_path: Annotated[
        str,
        key(
            "File that the spans of all transfers are written to when the connector closes, for Perfetto;"
            " empty = none.",
            allowed=_FILE_TEXT,
            read=_read_file,
        ),
    ] = ""
    log_level: Annotated[
        Literal["", "DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"],
        key("Level of the connector's and its children's loggers; empty = as the stage has it."),
    ] = ""

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> ConnectorConfig:
        """Read and check a connector's configuration; `config` is left as it is.

        Raises ConfigError, whose message lists every problem: key, value given, what is allowed.
        """
        if not isinstance(config, Mapping):
            raise ConfigError(
                f"a connector's configuration must be a mapping, got {config_keys.show(config)}"
            )
        problems: list[str] = []
        found = config_keys.read_keys(ConnectorConfig, config, problems)
        if config.get("role") is None and found.keys() >= {"zmq_port", "sender_host", "sender_zmq_port"}:
            found["role"] = "dual"
        problems += broken_rules(config, found, defaults=config_keys.defaults(ConnectorConfig))
        if problems:
            if len(problems) == 1:
                raise ConfigError(f"the connector's configuration has a problem: {problems[0]}")
            lines = "".join(f"\n  {line}" for line in problems)
            raise ConfigError(f"the connector's configuration has {len(problems)} problems:{lines}")
        for text in misspelt_keys(config):
            config_keys.warn_once(text)
        half = found.get("sender_host") is not None and "sender_zmq_port" not in found
        if half and found.get("role") == "receiver":
            logger.warning(
                "sender_host=%r without sender_zmq_port: get() knows no sender until its metadata or "
                "update_sender_info() names one",
                found["sender_host"],
            )
        _settle_device_name(found)
        return ConnectorConfig(**found)

    def listener_endpoint(self) -> tuple[str, int] | None:
        """(host, port) that this connector's listener binds, host unresolved; None where none can be told.

        `outgoing` wins where it is for this stage. A sender or dual connector binds (host, zmq_port). A
        receiver that is asked to put binds the port that the next stage computes for its sender: the host
        gives the stages of one connector `base + from_stage`, so `sender_zmq_port - from_stage + stage_id`.
        """
        endpoint = self._listener()
        return None if isinstance(endpoint, str) else endpoint

    def listener_key(self) -> str:
        """Return the key that sets the listener's port."""
        return "zmq_port" if self._outgoing() is None else "outgoing.zmq_port"

    def metrics_port(self) -> int:
        """Port that this stage's metrics are served at: one YAML does for all stages of a host. 0 = none."""
        return self.prometheus_port and self.prometheus_port + max(self.stage_id, 0)

    def observed(self) -> bool:
        """Whether tools outside are to see this connector, if it is put to use or not."""
        return bool(self.prometheus_port or self.health_dump_path)

    def listens_ahead(self) -> bool:
        """Whether the listener, where there can be one, is started before a put() asks for it."""
        return self.role != "receiver" or self.prestart or self.observed()

    def no_listener_reason(self) -> str:
        """Why listener_endpoint() is None and what to set, for the error message; "" where it is not None."""
        endpoint = self._listener()
        return endpoint if isinstance(endpoint, str) else ""

    def _outgoing(self) -> Outgoing | None:
        out = self.outgoing
        ours = out is not None and (self.stage_id < 0 or out.from_stage in (None, self.stage_id))
        return out if ours else None

    def _listener(self) -> tuple[str, int] | str:
        out = self._outgoing()
        if out is not None:
            return (self.host if out.host is None else out.host), out.zmq_port
        # The host's port arithmetic gives a dual stage its upstream's own port: it has to move on from there.
        if self.role != "receiver" and not (self.role == "dual" and self.zmq_port == self.sender_zmq_port):
            return self.host, self.zmq_port
        cure = "set outgoing: {host, zmq_port}"
        if self.sender_zmq_port is None or self.from_stage is None or self.stage_id < 0:
            return (
                "a receiver's own port follows from sender_zmq_port, from_stage and stage_id, which are"
                f" {self.sender_zmq_port}, {self.from_stage} and {self.stage_id}: {cure}"
            )
        if self.stage_id == self.from_stage:
            return (
                f"stage_id and from_stage are both {self.stage_id}, so its port would be its sender's: {cure}"
            )
        port = self.sender_zmq_port - self.from_stage + self.stage_id
        if not 1 <= port <= 65535:
            return f"sender_zmq_port - from_stage + stage_id is {port}, not a port (1..65535): {cure}"
        return self.host, port


def misspelt_keys(config: Mapping[str, Any]) -> list[str]:
    """The warnings that from_dict() logs: a sentence for each key that is nearly one of ours."""
    return config_keys.misspelt(ConnectorConfig, config)


def _settle_device_name(found: dict[str, Any]) -> None:
    """Fill device_name from the environment where an RDMA NIC may be used; drop it, loudly, where none is."""
    name, backend = found.get("device_name", ""), found.get("backend_type", "auto")
    if backend in ("auto", "rdma"):
        found["device_name"] = name or os.environ.get(RDMA_DEVICES_ENV, "")
    elif name:
        logger.warning("device_name=%r is ignored: backend_type=%r uses no RDMA device", name, backend)
        found["device_name"] = ""


# ---- documentation


def describe() -> list[KeyDoc]:
    """Every key, in the order above; those of `outgoing` follow it, named ``outgoing.host`` and so on."""
    return config_keys.describe(ConnectorConfig)


def markdown_table() -> str:
    """The table of all keys as it stands in the README, without a final newline."""
    return config_keys.markdown_table(describe())
