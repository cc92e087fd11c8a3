"""Messages inside one connector: between its stage process, its control process and its transfer workers.

Three channels, all msgpack arrays of the Structs below:

    stage   <-> control   "hot" socketpair   Publish Withdraw            ->   <- Freed
    stage   <-> control   "admin" socketpair HealthRequest Shutdown      ->   <- Started Failed Health Pooled
                                             StageReport StageFault      ->   <- StageRequest Target
    control <-> worker    "jobs" socketpair  AddPeer DropPeer Job Stop   ->   <- WorkerReady WorkerFailed
                                                                            JobDone PoolBacked

They are SOCK_SEQPACKET socketpairs rather than ZMQ, because the stage must be able to use the hot one without
giving up the GIL (see shared.syscalls), and because a packet then wakes its reader and nobody else, instead
of two I/O threads and the reader: a landing write pays for that twice, as a job and as its end. Each start of
a worker has a pair of its own. Set-up of a child is one JSON line on its standard input, which stays open as
its lifeline: end of file there means that the parent is gone.
"""

from __future__ import annotations

import socket
from typing import Any, TypeAlias

import msgspec

MAX_PACKET_BYTES = 256 << 10
_SOCKET_BUFFER_BYTES = 1 << 20


# --------------------------------------------------------------------------------- hot
class Publish(msgspec.Struct, array_like=True, tag=1):
    """Stage -> control: a payload of size bytes lies at offset of the pool.

    An offset from the host pool's size on means the GPU pool, whose bytes are counted on from there; event is
    the number of its event that the payload is complete behind, -1 for none.
    replayed: told before to a control process that has died since; the lease board may know a reader.
    put_us: when put() was called, CLOCK_MONOTONIC microseconds; 0: not told. took_us: from then until now.
    pushed: it is also being copied into a slot that the receiver has posted.
    """

    key: str
    generation: int
    offset: int
    size: int
    fast_path: bool
    replayed: bool = False
    put_us: int = 0
    took_us: int = 0
    event: int = -1
    pushed: bool = False


class Withdraw(msgspec.Struct, array_like=True, tag=2):
    """Stage -> control: these generations are not wanted any more."""

    generations: list[int]


class Freed(msgspec.Struct, array_like=True, tag=3):
    """Control -> stage: nothing can touch the memory of these generations any more."""

    generations: list[int]


# ------------------------------------------------------------------------------- admin
class HealthRequest(msgspec.Struct, array_like=True, tag=1):
    corr: int


class Shutdown(msgspec.Struct, array_like=True, tag=2):
    """Stage -> control: end your workers and exit."""


class Started(msgspec.Struct, array_like=True, tag=3):
    """Control -> stage: listening on port, workers up."""

    port: int
    pid: int


class Failed(msgspec.Struct, array_like=True, tag=4):
    """Control -> stage: cannot start, for good."""

    error: str


class Health(msgspec.Struct, array_like=True, tag=5):
    corr: int
    report: dict[str, Any]


class Pooled(msgspec.Struct, array_like=True, tag=6):
    """Control -> stage: the pool is backed by memory (error empty) or cannot be."""

    error: str


class StageRequest(msgspec.Struct, array_like=True, tag=7):
    """Control -> stage: tell your part of a health document."""


class StageReport(msgspec.Struct, array_like=True, tag=8):
    """Stage -> control: the answer to a StageRequest."""

    report: dict[str, Any]


class StageFault(msgspec.Struct, array_like=True, tag=9):
    """Stage -> control: something went wrong here, have a dump written."""

    cause: str


class Target(msgspec.Struct, array_like=True, tag=10):
    """Control -> stage: how the only receiver on an edge posts slots (shared.posts); b"": there is none."""

    edge: str
    posts: bytes


# ------------------------------------------------------------------------------ worker
class AddPeer(msgspec.Struct, array_like=True, tag=1):
    """Control -> worker: where the writes of jobs for this peer id go.

    device: they are read from the GPU pool, by the engine over it.
    """

    peer: int
    engine_desc: bytes
    mem_desc: bytes
    device: bool = False


class DropPeer(msgspec.Struct, array_like=True, tag=2):
    peer: int


class Job(msgspec.Struct, array_like=True, tag=3):
    """Control -> worker: one batched write; offsets and sizes in bytes, three lists of one length.

    Local offsets count from the start of the pool that the peer is written from.
    event: which event of the borrowed GPU pool must have happened before the pool is read; -1 for none.
    """

    write_id: int
    peer: int
    local_offsets: list[int]
    remote_offsets: list[int]
    sizes: list[int]
    event: int = -1


class Stop(msgspec.Struct, array_like=True, tag=4):
    """Control -> worker: finish what is under way and exit."""


class WorkerReady(msgspec.Struct, array_like=True, tag=5):
    """Worker -> control: engine up. cpus is the effective affinity mask as a cpulist.

    depth: writes that the engine can have under way at once.
    """

    index: int
    pid: int
    cpus: str
    engine: str
    depth: int = 1


class WorkerFailed(msgspec.Struct, array_like=True, tag=6):
    """Worker -> control: cannot start, for good (engine missing, no device)."""

    index: int
    error: str


class JobDone(msgspec.Struct, array_like=True, tag=7):
    """Worker -> control: the write has ended; error is empty when every byte landed."""

    write_id: int
    error: str
    microseconds: int


class PoolBacked(msgspec.Struct, array_like=True, tag=8):
    """Worker -> control: the pool has been prefaulted, or why not."""

    error: str


HotToControl: TypeAlias = Publish | Withdraw
HotToStage: TypeAlias = Freed
AdminToControl: TypeAlias = HealthRequest | Shutdown | StageReport | StageFault
AdminToStage: TypeAlias = Started | Failed | Health | Pooled | StageRequest | Target
ToWorker: TypeAlias = AddPeer | DropPeer | Job | Stop
FromWorker: TypeAlias = WorkerReady | WorkerFailed | JobDone | PoolBacked

hot_to_control = msgspec.msgpack.Decoder(HotToControl)
hot_to_stage = msgspec.msgpack.Decoder(HotToStage)
admin_to_control = msgspec.msgpack.Decoder(AdminToControl)
admin_to_stage = msgspec.msgpack.Decoder(AdminToStage)
to_worker = msgspec.msgpack.Decoder(ToWorker)
from_worker = msgspec.msgpack.Decoder(FromWorker)
encode = msgspec.msgpack.Encoder().encode


# ------------------------------------------------------------------------------ set-up
class ChildSetup(msgspec.Struct, kw_only=True):
    """What boot needs before anything else is imported."""

    role: str
    label: str
    path: list[str]
    cpus: list[int]
    log_level: int


class Observing(msgspec.Struct, kw_only=True):
    """What a control process is told about reports, dumps, metrics and traces.

    stage_report is the stage's part of a health document as it was at the start; stage_started is monotonic
    seconds. Empty paths and port 0 mean: not asked for.
    """

    stage_id: int = -1
    stage_pid: int = 0
    stage_started: float = 0.0
    stage_report: dict[str, Any] = msgspec.field(default_factory=dict)
    dump_path: str = ""
    dump_interval_seconds: float = 0.0
    prometheus_port: int = 0
    trace_folder: str = ""


class ControlSetup(ChildSetup, kw_only=True):
    """All that a control process is told; fds are inherited ones.

    runtime_dir is to be removed if the stage dies. threaded: control and workers are threads of the stage.
    engine moves the host pool, device_engine ("" for none) the GPU pool that gpu_pool describes.
    """

    epoch: str
    incarnation: int
    host: str
    port: int
    hot_fd: int
    admin_fd: int
    pool_fd: int
    pool_size: int
    fence_fd: int
    engine: str
    engine_options: dict[str, Any]
    lend: bool
    mem_desc: bytes
    workers: int
    worker_cpus: list[list[int]]
    worker_python: str
    runtime_dir: str
    threaded: bool
    eager_bytes: int
    ttl_seconds: float
    park_seconds: float
    job_timeout_seconds: float
    restart_limit: int
    prefault: bool
    health_socket: str = ""
    lane_path: str = ""
    device: str = "cpu"
    device_engine: str = ""
    gpu_pool: bytes = b""
    observing: Observing = msgspec.field(default_factory=Observing)


class WorkerSetup(ChildSetup, kw_only=True):
    """All that a transfer worker is told; engines, gpu_pool, threaded as in ControlSetup.

    open_later: the GPU pool is opened for the first write from it.
    """

    index: int
    identity: str
    engine: str
    engine_options: dict[str, Any]
    pool_fd: int
    pool_size: int
    jobs_fd: int
    threaded: bool
    prefault: bool
    device: str = "cpu"
    device_engine: str = ""
    gpu_pool: bytes = b""
    open_later: bool = False
    trace_folder: str = ""
    epoch: str = ""


def socketpair() -> tuple[socket.socket, socket.socket]:
    """Make one channel: packets keep their borders, order and, within the kernel's buffer, never wait."""
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in pair:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER_BYTES)
    return pair
