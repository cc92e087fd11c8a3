"""Whether this host can run connectors: one Finding for each thing that they need or would profit from.

Theory of operation. Every check is a function that yields Findings and touches nothing: it opens what a
connector would open, in the way it would, and closes it again. A check that fails in a way its author did not
foresee is itself a finding. What only some engine or deployment needs is a note, unless a deploy YAML was
given that asks for it. The last check starts two real connectors and moves a payload.
"""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import msgspec

from mori_mp.backend import choose
from mori_mp.config import ConnectorConfig
from mori_mp.deploy import load_deploy
from mori_mp.endpoint import check_bindable, resolve_host
from mori_mp.pins import gpu_address
from mori_mp.ports import TRANSFER_ENGINE_NAMES
from mori_mp.shared.errors import MoriMPError
from mori_mp.shared.memory import available_bytes
from mori_mp.shared.pinning import plan
from mori_mp.shared.pool import Pool
from mori_mp.shared.runtime import base_directory
from mori_mp.shared.topology import device_node, format_cpulist, read_topology

Level = Literal["ok", "note", "warning", "broken"]
_MIB = 1 << 20
_FEW_FILES = 4096
_OURS = ("MoriTransferEngineConnector", "MoriMPConnector")
_ENGINES = ("shm", "cuda_ipc", "xgmi", "rdma", "fabric")
_NEEDED = {"torch": "torch", "zmq": "pyzmq", "msgspec": "msgspec", "psutil": "psutil", "yaml": "pyyaml"}
_OPTIONAL = {
    "mori": ("amd-mori", "engines rdma, xgmi and fabric: pip install 'mori-mp[mori]' (CPython 3.10 or 3.12)"),
    "vllm_omni": ("vllm-omni", "the host whose stages use connectors: pip install vllm-omni"),
    "prometheus_client": ("prometheus-client", "metrics: pip install 'mori-mp[metrics]'"),
}


class Finding(msgspec.Struct, frozen=True):
    """One result. `fix` says what to do, where there is something to do."""

    area: str
    what: str
    level: Level
    detail: str
    fix: str = ""


def examine(deploy: Path | None = None, self_test: bool = True) -> list[Finding]:
    """Run all checks. A deploy YAML adds those of its connectors."""
    checks: list[Callable[[], Iterable[Finding]]] = [
        check_python,
        check_modules,
        check_plugin,
        check_memory,
        check_limits,
        check_cpus,
        check_processes,
        check_runtime_directory,
        check_devices,
        check_engines,
    ]
    if deploy is not None:
        checks.append(lambda: check_deploy(deploy))
    if self_test:
        checks.append(check_transfer)
    return [finding for check in checks for finding in _guarded(check)]


def healthy(findings: Iterable[Finding]) -> bool:
    """Tell whether nothing that is needed is broken."""
    return all(finding.level != "broken" for finding in findings)


def _guarded(check: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    try:
        yield from check()
    except Exception as exc:  # a check must not hide the ones after it
        name = getattr(check, "__name__", "check")
        yield Finding("doctor", name, "broken", f"{type(exc).__name__}: {exc}", "report this as a bug")


# -------------------------------------------------------------------------------- software
def check_python() -> Iterator[Finding]:
    """Interpreter and kernel."""
    found = platform.python_version()
    good = sys.implementation.name == "cpython" and sys.version_info >= (3, 10)
    fix = "" if good else "use CPython 3.10 to 3.13"
    yield Finding("versions", "python", "ok" if good else "broken", f"{found} at {sys.executable}", fix)
    release = platform.release()
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError) as exc:
        yield Finding(
            "versions", "kernel", "broken", f"{release}: no pidfd_open ({exc})", "Linux 5.3 or newer"
        )
    else:
        yield Finding("versions", "kernel", "ok", release)
    yield Finding("versions", "mori-mp", "ok", f"{_version('mori-mp')} at {Path(__file__).parent}")


def check_modules() -> Iterator[Finding]:
    """What is imported: needed packages are imported here, optional ones only looked for."""
    for module, package in _NEEDED.items():
        try:
            import_module(module)
        except Exception as exc:  # broken native libraries raise anything
            detail = f"cannot be imported: {type(exc).__name__}: {exc}"
            yield Finding("imports", package, "broken", detail, f"pip install --force-reinstall {package}")
        else:
            yield Finding("imports", package, "ok", _version(package))
    for module, (package, purpose) in _OPTIONAL.items():
        if find_spec(module) is None:
            yield Finding("imports", package, "note", "not installed", purpose)
        else:
            yield Finding("imports", package, "ok", _version(package))


def check_plugin() -> Iterator[Finding]:
    """Whether vLLM will find the plugin."""
    points = metadata.entry_points(group="vllm.general_plugins", name="mori_mp")
    if not points:
        yield Finding(
            "plugin",
            "entry point",
            "warning",
            "vllm.general_plugins has no mori_mp: vLLM-Omni keeps its own class",
            "install mori-mp into the environment of vLLM: pip install .",
        )
        return
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "mori_mp" not in allowed.split(","):
        detail, fix = f"VLLM_PLUGINS={allowed} leaves mori_mp out", "add mori_mp to VLLM_PLUGINS, or unset it"
        yield Finding("plugin", "entry point", "warning", detail, fix)
    elif os.environ.get("MORI_MP_TAKEOVER") == "0":
        yield Finding(
            "plugin", "entry point", "ok", "registered; MORI_MP_TAKEOVER=0: as MoriMPConnector only"
        )
    else:
        yield Finding("plugin", "entry point", "ok", "registered")


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "version unknown"


# -------------------------------------------------------------------------------- memory
def check_memory() -> Iterator[Finding]:
    """memfd, and what a pool may take."""
    try:
        pool = Pool.create(_MIB, "doctor")
    except (OSError, MoriMPError) as exc:
        fix = "allow memfd_create and file sealing (seccomp profile), and leave some memory"
        yield Finding("memory", "memfd", "broken", f"no pool can be made: {exc}", fix)
        return
    try:
        pool.view[:4] = b"pool"
        yield Finding("memory", "memfd", "ok", "made, sealed, mapped and written")
    finally:
        pool.close()
    room = available_bytes()
    want = ConnectorConfig().memory_pool_size
    level: Level = "ok" if room >= want else "warning"
    fix = "" if room >= want else "lower memory_pool_size, or raise the container's memory limit"
    yield Finding("memory", "room for pools", level, f"{room / 2**30:.1f} GiB left on host and cgroup", fix)
    try:
        shm = os.statvfs("/dev/shm")
    except OSError as exc:
        detail = f"{exc}; pools do not use it, torch and vLLM do"
        yield Finding("memory", "/dev/shm", "note", detail, "mount a tmpfs there (docker: --shm-size)")
        return
    free = shm.f_bavail * shm.f_frsize
    detail = f"{free / 2**30:.1f} GiB free; pools are memfds and do not count against it"
    yield Finding("memory", "/dev/shm", "ok", detail)


def check_limits() -> Iterator[Finding]:
    """Resource limits of this process, which its children inherit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = soft == resource.RLIM_INFINITY
    text = "unlimited" if unlimited else f"{soft / _MIB:.0f} MiB (hard limit {_limit(hard)})"
    if unlimited or not _rdma_devices():
        yield Finding("limits", "memlock", "ok", f"{text}; only RDMA registration needs it")
    else:
        fix = "ulimit -l unlimited (docker: --ulimit memlock=-1), or at least memory_pool_size"
        yield Finding("limits", "memlock", "warning", f"{text}; RDMA registers the whole pool", fix)
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = files < _FEW_FILES
    fix = f"ulimit -n {_FEW_FILES} or more" if few else ""
    yield Finding("limits", "open files", "warning" if few else "ok", str(files), fix)


def _limit(value: int) -> str:
    return "none" if value == resource.RLIM_INFINITY else f"{value / _MIB:.0f} MiB"


# -------------------------------------------------------------------------------- CPUs and processes
def check_cpus() -> Iterator[Finding]:
    """What pinning has to work with."""
    try:
        topology = read_topology()
    except OSError as exc:
        yield Finding(
            "cpus", "topology", "warning", str(exc), "children run unpinned; set pin: off to accept"
        )
        return
    detail = f"{format_cpulist(topology.allowed)} of {format_cpulist(topology.cpus)}"
    yield Finding("cpus", "allowed CPUs", "ok", detail)
    quota = "none" if topology.quota is None else f"{topology.quota:g} CPUs"
    throttled = topology.quota is not None and topology.quota < len(topology.allowed)
    fix = "give the container a cpuset instead of a quota (docker: --cpuset-cpus), so that pinning pays"
    yield Finding("cpus", "CPU quota", "warning" if throttled else "ok", quota, fix if throttled else "")
    made = plan(topology, workers=ConnectorConfig().num_transfer_workers)
    story = "; ".join(made.reasons) or "a whole core for each process"
    fix = "more CPUs for the stage, fewer workers, or pin: off to accept it (mori-mp pin --explain)"
    yield Finding(
        "cpus", "pinning plan", "warning" if made.degraded else "ok", story, fix if made.degraded else ""
    )


_HOLDER = (
    "import os, sys; fd = os.memfd_create('mori-mp-doctor'); os.write(fd, b'seen'); print(fd, flush=True);"
    "sys.stdin.read()"
)


def check_processes() -> Iterator[Finding]:
    """The PID namespace, and whether one process may open another's memory through /proc/<pid>/fd."""
    space = _link("/proc/self/ns/pid")
    if _link("/proc/self") != str(os.getpid()):
        fix = "mount /proc of this PID namespace (unshare --mount-proc; docker: do not bind the host's /proc)"
        detail = f"/proc is not that of this namespace ({space})"
        yield Finding("processes", "PID namespace", "broken", detail, fix)
        return
    detail = f"{space}; stages that share memory must have the same (docker: --pid=container:NAME)"
    yield Finding("processes", "PID namespace", "ok", detail)
    yama = _read("/proc/sys/kernel/yama/ptrace_scope")
    with subprocess.Popen(
        [sys.executable, "-S", "-c", _HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        path = f"/proc/{holder.pid}/fd/{holder.stdout.readline().strip()}"
        try:
            with open(path, "rb") as file:
                seen = file.read(4) == b"seen"
        except OSError as exc:
            fix = "run all stages as one user, without PR_SET_DUMPABLE 0 or hidepid; allow ptrace reads"
            detail = f"{path}: {exc.strerror} (yama ptrace_scope {yama or 'absent'})"
            yield Finding("processes", "peer memory", "broken", detail, fix)
        else:
            detail = f"opens through /proc/<pid>/fd (yama ptrace_scope {yama or 'absent'})"
            yield Finding("processes", "peer memory", "ok" if seen else "broken", detail)


def check_runtime_directory() -> Iterator[Finding]:
    """Whether sockets can be made where connectors make them."""
    base = base_directory()
    parent = base if base.exists() else base.parent
    fix = "set MORI_MP_RUNTIME_DIR to a short path that this user may write"
    try:
        info = parent.lstat()
        with tempfile.TemporaryDirectory(prefix="doctor-", dir=parent):
            pass
    except OSError as exc:
        yield Finding("processes", "runtime directory", "broken", f"{base}: {exc}", fix)
        return
    if parent == base and info.st_uid != os.getuid():
        detail = f"{base} belongs to user {info.st_uid}"
        yield Finding("processes", "runtime directory", "broken", detail, fix)
        return
    yield Finding("processes", "runtime directory", "ok", str(base))


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError as exc:
        return f"unreadable: {exc.strerror}"


# -------------------------------------------------------------------------------- devices and engines
def check_devices() -> Iterator[Finding]:
    """GPUs as torch sees them and RDMA devices as sysfs does, each with its NUMA node."""
    import torch

    topology = read_topology()
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for number in range(count):
        address, story = gpu_address(f"cuda:{number}")
        node, how = device_node(topology, address) if address else (None, "; ".join(story))
        name = torch.cuda.get_device_name(number)
        where = f"node {node} ({how})" if node is not None else f"NUMA node unknown: {how}"
        yield Finding("devices", f"cuda:{number}", "ok", f"{name} at {address or 'unknown address'}, {where}")
    if not count:
        seen = len(topology.gpus)
        if seen:
            detail = f"sysfs shows {seen}, torch {torch.__version__} none"
            fix = "install the ROCm or CUDA build of torch; check *_VISIBLE_DEVICES, /dev/kfd, /dev/nvidia*"
            yield Finding("devices", "GPUs", "warning", detail, fix)
        else:
            yield Finding("devices", "GPUs", "note", "none: pools lie in host memory")
    nics = topology.nics or dict.fromkeys(_rdma_devices(), "")
    for name, address in nics.items():
        node, how = device_node(topology, address) if address else (None, "its PCI address is unknown")
        where = f"node {node} ({how})" if node is not None else f"NUMA node unknown: {how}"
        yield Finding("devices", name, "ok", f"RDMA at {address or 'unknown address'}, {where}")
    if not nics:
        yield Finding("devices", "RDMA", "note", "none: stages must share a host")


def check_engines() -> Iterator[Finding]:
    """Which transfer engines would start here. Only shm, which needs nothing, must."""
    for engine in _ENGINES:
        device = "cpu" if engine in ("shm", "rdma") else "cuda"
        config = ConnectorConfig.from_dict({"backend_type": engine, "memory_pool_device": device})
        try:
            choose(config)
        except MoriMPError as exc:
            level: Level = "broken" if engine == "shm" else "note"
            yield Finding("engines", engine, level, str(exc))
        else:
            yield Finding("engines", engine, "ok", f"pool on {device}")


def _rdma_devices() -> list[str]:
    try:
        return sorted(os.listdir("/sys/class/infiniband"))
    except OSError:
        return []


# -------------------------------------------------------------------------------- a deployment, a transfer
def check_deploy(path: Path) -> Iterator[Finding]:
    """The connectors of a deploy YAML: configuration, engine, memory and ports of those that are ours."""
    area = "deploy"
    try:
        deploy = load_deploy(path)
        nodes = deploy.topology()
    except MoriMPError as exc:
        yield Finding(area, path.name, "broken", str(exc), "correct the file, or its path")
        return
    wanted = 0
    for node in nodes:
        what = f"stage {node.stage.stage_id}"
        try:
            resolved = deploy.connector_for_stage(node.stage.stage_id)
            if resolved.name not in _OURS:
                kind = "its own engine" if resolved.name in TRANSFER_ENGINE_NAMES else "not ours"
                yield Finding(area, what, "note", f"{resolved.name}: {kind}, not checked")
                continue
            config = ConnectorConfig.from_dict(resolved.config)
            engine, reason = choose(config)
        except MoriMPError as exc:
            yield Finding(
                area,
                what,
                "broken",
                str(exc),
                "correct the connector's `extra`, or give it another backend_type",
            )
            continue
        wanted += config.memory_pool_size if config.memory_pool_device == "cpu" else 0
        yield Finding(area, what, "ok", f"{resolved.name}, {config.role}, engine {engine} ({reason})")
        if node.outputs or config.role != "receiver":
            yield _port_finding(what, config)
    room = available_bytes()
    if wanted:
        level: Level = "ok" if wanted <= room else "broken"
        detail = f"{wanted / 2**30:.2f} GiB of host memory for all pools, {room / 2**30:.1f} GiB left"
        fix = "" if level == "ok" else "lower memory_pool_size, or raise the memory limit"
        yield Finding(area, "pools", level, detail, fix)


def _port_finding(what: str, config: ConnectorConfig) -> Finding:
    endpoint = config.listener_endpoint()
    if endpoint is None:
        return Finding("deploy", what, "broken", f"it cannot listen: {config.no_listener_reason()}")
    host, port = resolve_host(endpoint[0]), endpoint[1]
    try:
        check_bindable(host, port)
    except MoriMPError as exc:
        return Finding("deploy", what, "broken", str(exc), f"see who has it: ss -ltnp 'sport = :{port}'")
    return Finding("deploy", what, "ok", f"{host}:{port} is free")


def check_transfer() -> Iterator[Finding]:
    """Two real connectors, a control process, a worker, one payload through a lease and one landed."""
    from mori_mp.connector import MoriTransferEngineConnector

    payload = os.urandom(_MIB)
    for delivery in ("lease", "landing"):
        common = {
            "host": "127.0.0.1",
            "backend_type": "shm",
            "memory_pool_size": 8 * _MIB,
            "num_transfer_workers": 1,
            "delivery": delivery,
            "prefault": False,
        }
        started = time.monotonic()
        try:
            with MoriTransferEngineConnector({**common, "role": "sender", "zmq_port": 0}) as sender:
                upstream = {"sender_host": "127.0.0.1", "sender_zmq_port": sender.zmq_port}
                with MoriTransferEngineConnector({**common, "role": "receiver", **upstream}) as receiver:
                    sender.put("0", "1", "doctor", payload)
                    deadline = time.monotonic() + 10
                    found = receiver.get_with_deadline("0", "1", "doctor", deadline=deadline)
                    same = found is not None and _same(found[0], payload)
        except MoriMPError as exc:
            yield Finding("transfer", delivery, "broken", str(exc), "see the findings above, and the log")
            continue
        spent = time.monotonic() - started
        if same:
            yield Finding(
                "transfer", delivery, "ok", f"1 MiB between two connectors in {spent:.1f} s, all told"
            )
        else:
            detail = "it did not arrive within 10 s" if found is None else "it arrived changed"
            yield Finding("transfer", delivery, "broken", detail, "report this as a bug")


def _same(buffer: object, payload: bytes) -> bool:
    with buffer as opened:  # type: ignore[attr-defined]
        return bytes(opened.to_bytes()) == payload
