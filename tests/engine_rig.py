"""What the engine tests stand on: engine processes, and the platforms they can run on.

A `Rig` is an engine on a platform: the interpreter and environment its processes need, and what it can do.
Three are there on any Linux machine with gcc: `shm`, `cuda_ipc` over an emulated HIP runtime, and `xgmi`,
which is the real amd-mori wheel over that runtime. The wheel is for CPython 3.10 (here: any that pyenv or
PATH has, or PYTHON310), so its processes run in a virtual environment of that, made once. On a machine with
GPUs, MORI_MP_TEST_GPU=cuda or hip adds the same engines over them. What is missing skips, saying so;
MORI_MP_TEST_MORI=require makes it fail.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import pytest
from engine_host import receive, send
from hipemu import build as hip_build
from hipemu.control import Block

import mori_mp
from mori_mp.shared import errors
from mori_mp.workers.engines.base import EngineBroken

MORI = "amd-mori==1.2.4"
NEEDS_IN_310 = ("msgspec>=0.19",)
MB = 1 << 20

_ROOT = Path(mori_mp.__file__).resolve().parent.parent
_SECONDS = 60.0
_KNOWN = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type)} | {
    "EngineBroken": EngineBroken,
    "TimeoutError": TimeoutError,
}


class HostError(RuntimeError):
    """An engine process raised something that is no error of mori-mp."""


class Missing(RuntimeError):
    """The machine lacks something that a rig needs."""


@dataclass(frozen=True)
class Rig:
    """An engine on a platform. holds: copies can be held back; watches: a peer's death is noticed."""

    name: str
    engine: str
    python: str = sys.executable
    environment: dict[str, str] = field(default_factory=dict)
    on_gpu: bool = True
    holds: bool = False
    watches: bool = True
    devices: tuple[int, int] = (0, 1)
    options: dict[str, Any] = field(default_factory=dict)


class Commands:
    """A process that answers commands: the methods of an object in it."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._link.settimeout(_SECONDS)

    def ask(self, method: str, *arguments: object) -> None:
        """Send a command whose answer is fetched later."""
        send(self._link, [method, *arguments])

    def answer(self) -> Any:
        """Fetch an answer. Raises what the process raised; EOFError if it died."""
        answer = receive(self._link)
        if len(answer) == 1:
            return answer[0]
        kind, text = answer
        raise _KNOWN[kind](text) if kind in _KNOWN else HostError(f"{kind}: {text}")

    def __call__(self, method: str, *arguments: object) -> Any:
        self.ask(method, *arguments)
        return self.answer()


class Nursery:
    """Starts engine processes of a rig, quickly: forks of one that has imported what they need."""

    def __init__(self, rig: Rig) -> None:
        self._process, self._link = _spawn(rig, {}, rig.engine)
        receive(self._link)

    def start(self, environment: dict[str, str]) -> tuple[int, socket.socket]:
        """Start one; returns its pid and the connection to it."""
        ours, theirs = socket.socketpair()
        body = msgspec.msgpack.encode(["start", environment])
        socket.send_fds(self._link, [len(body).to_bytes(8, "little")], [theirs.fileno()])
        self._link.sendall(body)
        theirs.close()
        return receive(self._link)[0], ours

    def wait(self, pid: int) -> int:
        """Wait for the end of one; returns its exit status."""
        send(self._link, ["wait", pid])
        return int(receive(self._link)[0])

    def close(self) -> None:
        self._link.close()
        self._process.wait()


class EngineHost(Commands):
    """An engine process; its commands are the methods of `engine_host.Host`."""

    def __init__(
        self, rig: Rig, block_path: Path, nursery: Nursery | None = None, **environment: str
    ) -> None:
        """Without a nursery it is a process of its own from the start, and any environment can be set."""
        self.rig = rig
        self.block = Block(block_path)
        environment = {**self.block.environment, **environment}
        if nursery is not None:
            self.pid, link = nursery.start(environment)
            self._wait = lambda: nursery.wait(self.pid)
        else:
            process, link = _spawn(rig, environment)
            self.pid, self._wait = process.pid, process.wait
        super().__init__(link)
        self._status: int | None = None
        try:
            self.answer()
        except BaseException:
            self.kill()
            raise

    def memory(self, size: int, device: int | None = None, offset: int = 0) -> None:
        """Give it memory of the kind its engine moves; offset: where in its allocation that begins."""
        if self.rig.on_gpu:
            self("gpu_memory", size, self.rig.devices[0] if device is None else device, offset)
        else:
            self("host_memory", size)

    def become_receiver(self, size: int, seed: int = 0, offset: int = 0) -> tuple[bytes, bytes]:
        """Give it filled memory on the receiver's device; returns its descriptors."""
        self.memory(size, self.rig.devices[1], offset)
        self("fill", seed)
        return tuple(self("receive", self.rig.engine, self.rig.options))

    def become_sender(self, size: int, seed: int = 1) -> int:
        """Give it filled memory and an engine over it; returns the engine's depth."""
        self.memory(size)
        self("fill", seed)
        return int(self("load", self.rig.engine, self.rig.options))

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        if self._status is None:
            os.kill(self.pid, signal.SIGKILL)
        self._end()

    def stop(self) -> int:
        """Have it exit by itself; returns its exit status."""
        self._link.shutdown(socket.SHUT_WR)
        with suppress(EOFError):
            receive(self._link)
        return self._end()

    def _end(self) -> int:
        if self._status is None:
            self._status = self._wait()
            self._link.close()
            self.block.close()
        return self._status


class GpuStage(Commands):
    """A stage process with a connector over GPU memory; its commands are the methods of `gpu_stage.Stage`."""

    def __init__(self, rig: Rig, block_path: Path, runtime: Path, **environment: str) -> None:
        self.block = Block(block_path)
        environment = {**self.block.environment, "MORI_MP_RUNTIME_DIR": str(runtime), **environment}
        if rig.holds:  # emulated
            hip = Path(rig.environment["LD_LIBRARY_PATH"].partition(os.pathsep)[0]) / hip_build.HIP
            environment["MORI_MP_GPU_RUNTIME"] = str(hip)
        stage = replace(rig, python=sys.executable)
        self.rig = rig
        self._process, link = _spawn(stage, environment, program="gpu_stage.py")
        self.pid = self._process.pid
        super().__init__(link)
        self.answer()

    def end(self) -> None:
        """SIGKILL, and wait for the end."""
        self._process.kill()
        self._process.wait()
        self._link.close()
        self.block.close()


def _spawn(
    rig: Rig, environment: dict[str, str], *arguments: str, program: str = "engine_host.py"
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    ours, theirs = socket.socketpair()
    paths = [str(_ROOT), str(_ROOT / "tests"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    process = subprocess.Popen(
        [rig.python, str(_ROOT / "tests" / program), str(theirs.fileno()), *arguments],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env={
            **os.environ,
            **rig.environment,
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            "PYTHONDONTWRITEBYTECODE": "1",
            **environment,
        },
    )
    theirs.close()
    return process, ours


class Machine:
    """What this machine has for rigs; whatever must be built is built once, into a folder that is kept."""

    def __init__(self, cache: Path) -> None:
        self._cache = cache
        self._nurseries: dict[str, Nursery] = {}

    def nursery(self, rig: Rig) -> Nursery:
        """Return the nursery of a rig."""
        if rig.name not in self._nurseries:
            self._nurseries[rig.name] = Nursery(rig)
        return self._nurseries[rig.name]

    def close(self) -> None:
        for nursery in self._nurseries.values():
            nursery.close()

    def rig(self, name: str) -> Rig:
        """Make a rig. Raises Missing."""
        return getattr(self, "_" + name.replace("-", "_"))()

    def _shm(self) -> Rig:
        return Rig("shm", "shm", on_gpu=False, watches=False)

    def _cuda_ipc(self) -> Rig:
        return Rig("cuda_ipc", "cuda_ipc", environment=_libraries(self.emulated_hip()), holds=True)

    def _xgmi(self) -> Rig:
        python, libraries = self.mori()
        return Rig("xgmi", "xgmi", str(python), _libraries(libraries), holds=True)

    def _cuda_ipc_cuda(self) -> Rig:
        return Rig("cuda_ipc-cuda", "cuda_ipc", devices=_gpus("cuda"))

    def _cuda_ipc_hip(self) -> Rig:
        return Rig("cuda_ipc-hip", "cuda_ipc", devices=_gpus("hip"))

    def _xgmi_cuda(self) -> Rig:
        return Rig("xgmi-cuda", "xgmi", environment=_libraries(self.forwarded_hip()), devices=_gpus("cuda"))

    def _xgmi_hip(self) -> Rig:
        return Rig("xgmi-hip", "xgmi", devices=_gpus("hip"))

    def emulated_hip(self) -> Path:
        """Build the emulated HIP runtime alone. Raises Missing."""
        with self._build("hip", _sources()) as (out, fresh):
            if fresh:
                hip_build.build(out)
        return out

    def mori(self) -> tuple[Path, Path]:
        """Return an interpreter with Mori in it, and the libraries it needs. Raises Missing."""
        python, package = Path(sys.executable), _own_mori()
        if package is None:
            python310 = _find_python310()
            with self._build("mori", f"{python310} {MORI} {NEEDS_IN_310}") as (venv, fresh):
                if fresh:
                    _make_venv(python310, venv)
            python = venv / "bin" / "python"
            package = next((venv / "lib").glob("python3.10/site-packages/mori"))
        with self._build("lib", _sources() + str(package)) as (out, fresh):
            if fresh:
                hip_build.build(out, package)
        return python, out

    def forwarded_hip(self) -> Path:
        """Build a HIP runtime over CUDA for the Mori of this interpreter. Raises Missing."""
        package = _own_mori()
        if package is None:
            raise Missing(f"{sys.executable} has no Mori (amd-mori)")
        cuda = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
        with self._build("forward", _sources() + str(package) + str(cuda)) as (out, fresh):
            if fresh:
                hip_build.build(out, package, cuda)
        return out

    @contextmanager
    def _build(self, what: str, key: str) -> Iterator[tuple[Path, bool]]:
        """Yield a folder for key, and whether it is to be filled; one process at a time."""
        for tool in ("gcc", "readelf"):
            if shutil.which(tool) is None:
                raise Missing(f"no {tool} on PATH")
        self._cache.mkdir(parents=True, exist_ok=True)
        out = self._cache / f"{what}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
        done = out.with_suffix(".done")
        with open(out.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            fresh = not done.exists()
            if fresh:
                shutil.rmtree(out, ignore_errors=True)
            yield out, fresh
            done.touch()


def rig_names() -> Sequence[str]:
    """List the rigs to test on this machine."""
    names = ["shm", "cuda_ipc", "xgmi"]
    gpu = os.environ.get("MORI_MP_TEST_GPU", "")
    return [*names, f"cuda_ipc-{gpu}", f"xgmi-{gpu}"] if gpu else names


def skip_or_fail(missing: Missing) -> NoReturn:
    """Skip the test, unless the environment says that nothing may be missing."""
    if os.environ.get("MORI_MP_TEST_MORI") == "require":
        pytest.fail(str(missing))
    pytest.skip(str(missing))


def get_rig(machine: Machine, name: str) -> Rig:
    """Make a rig, or skip the test."""
    try:
        return machine.rig(name)
    except Missing as missing:
        skip_or_fail(missing)


def _libraries(folder: Path) -> dict[str, str]:
    inherited = os.environ.get("LD_LIBRARY_PATH", "")
    return {"LD_LIBRARY_PATH": os.pathsep.join(path for path in (str(folder), inherited) if path)}


def _sources() -> str:
    """Return all that the built libraries are made from, as text to key the cache by."""
    return "".join(path.read_text() for path in sorted(hip_build.HERE.glob("*")) if path.is_file())


def _own_mori() -> Path | None:
    """Find the Mori of this interpreter."""
    spec = find_spec("mori")
    locations = spec.submodule_search_locations if spec is not None else None
    return Path(locations[0]) if locations else None


def _gpus(kind: str) -> tuple[int, int]:
    """Choose the sender's and the receiver's device: two where there are two."""
    code = f"from mori_mp.workers.engines import gpu_runtime as g; print(g.load({kind!r}).device_count())"
    count = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    return (0, 1) if int(count) > 1 else (0, 0)


def _find_python310() -> Path:
    named = os.environ.get("PYTHON310")
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    candidates = [
        *([Path(named)] if named else []),
        *sorted(pyenv.glob("versions/3.10*/bin/python3.10"), reverse=True),
        *([Path(found)] if (found := shutil.which("python3.10")) else []),
    ]
    for candidate in candidates:
        try:
            subprocess.run(
                [candidate, "-c", "import venv, ensurepip"], check=True, capture_output=True, timeout=30
            )
        except (OSError, subprocess.SubprocessError):
            continue
        return candidate
    raise Missing("no Python 3.10 (with venv) in PYTHON310, pyenv or PATH; Mori's wheels need it")


def _make_venv(python310: Path, venv: Path) -> None:
    try:
        subprocess.run([python310, "-m", "venv", venv], check=True, capture_output=True, timeout=120)
        subprocess.run(
            [
                venv / "bin" / "pip",
                "install",
                "--quiet",
                "--no-deps",
                "--only-binary=:all:",
                MORI,
                *NEEDS_IN_310,
            ],
            check=True,
            capture_output=True,
            text=True,
            timeout=300,
        )
    except subprocess.SubprocessError as exc:
        said = getattr(exc, "stderr", None) or str(exc)
        raise Missing(f"{MORI} cannot be installed: {str(said).strip()[-300:]}") from exc
