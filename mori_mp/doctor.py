"""Whether this host can run connectors: one Finding for each thing that they need or would profit from.

Theory of operation. Every check is a function that yields Findings and touches nothing: it opens what a
connector would open, in the way it would, and closes it again. A check that fails in a way its author did not
foresee is itself a finding. What only some engine or deployment needs is a note, unless a deploy YAML was
given that asks for it. The last check starts two real connectors and moves a payload.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path

from mori_mp.backend import choose, how_to_get_mori
from mori_mp.config import ConnectorConfig
from mori_mp.doctor_deploy import check_deploy
from mori_mp.doctor_host import Finding as Finding
from mori_mp.doctor_host import (
    Level,
    check_cpus,
    check_devices,
    check_limits,
    check_memory,
    check_processes,
    check_runtime_directory,
)
from mori_mp.interpreter_probe import SUPPORTED, supported
from mori_mp.shared.errors import MoriMPError

_MIB = 1 << 20
_ENGINES = ("shm", "cuda_ipc", "xgmi", "rdma", "fabric")
_NEEDED = {"torch": "torch", "zmq": "pyzmq", "msgspec": "msgspec", "psutil": "psutil", "yaml": "pyyaml"}
_OPTIONAL = {
    "mori": ("amd-mori", f"engines rdma, xgmi and fabric: {how_to_get_mori()}"),
    "vllm_omni": ("vllm-omni", "the host whose stages use connectors: pip install vllm-omni"),
    "prometheus_client": ("prometheus-client", "metrics: pip install 'mori-mp[metrics]'"),
}


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


def healthy(findings: Iterable[Finding], strict: bool = False) -> bool:
    """Tell whether nothing that is needed is broken, or, if strict, worth a warning."""
    bad = {"broken", "warning"} if strict else {"broken"}
    return all(finding.level not in bad for finding in findings)


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
    good = supported(sys.implementation.name, sys.version_info[:2])
    fix = "" if good else f"use {SUPPORTED}"
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


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "version unknown"


# -------------------------------------------------------------------------------- a transfer
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
            yield Finding("transfer", delivery, "broken", str(exc), "see the broken findings above")
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
