"""Stage processes over vLLM-Omni, from the test's side: started, kept in step, asked what came of it.

Importing vLLM-Omni takes long, and its warnings are not ours to fix: so one server process imports it once
(multiprocessing's forkserver), and each stage is a fork of it.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
from collections.abc import Mapping
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from mori_mp.pipeline.free_ports import PortBlock

REQUIRE = "MORI_MP_REQUIRE_VLLM_OMNI"  # set where a missing host is a failure, not a reason to skip
IMPORT_SECONDS = 240.0
STAGE_SECONDS = 60.0
OURS = "MoriTransferEngineConnector"
OWN = "MoriMPConnector"
STRIDE = 1024
"""How far apart the ports of two replicas are."""
# The in-tree class in a stage without Mori and a GPU: Mori's package, and what stands in for pinned memory.
FACADE = {"path": str(Path(__file__).with_name("mori_facade")), "pin": "mori.pinned:pin_memory"}

Plan = dict[str, Any]


def host_missing() -> str:
    """Say what is missing for tests against the real vLLM-Omni; "" where nothing is."""
    for package in ("vllm_omni", "vllm"):
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            return f"{package} is not installed; scripts/test_vllm.sh makes an environment that has it"
    return ""


class Stage:
    """One stage process."""

    def __init__(self, context: Any, scene: str, plan: Plan) -> None:
        self.plan = plan
        self._pipe: Connection
        self._pipe, theirs = context.Pipe()
        self._process: BaseProcess = context.Process(target=_enter, args=(scene, plan, theirs), daemon=False)
        self._process.start()
        theirs.close()

    def says(self, seconds: float = STAGE_SECONDS) -> tuple[str, Any]:
        """Return what the stage says next, a word and what belongs to it; "silent" or "died" if nothing."""
        if not self._pipe.poll(seconds):
            return "silent", f"for {seconds} s"
        try:
            word, value = self._pipe.recv()
        except EOFError:
            self._process.join(5)
            return "died", f"exit code {self._process.exitcode}"
        return word, value

    def expect(self, what: str, seconds: float = STAGE_SECONDS) -> Any:
        """Return what belongs to the next word of the stage, which must be this one."""
        word, value = self.says(seconds)
        assert word == what, f"stage {self.plan.get('stage')}: {word} ({value}) instead of {what!r}"
        return value

    def answer(self) -> None:
        """Let the stage go on."""
        self._pipe.send(None)

    def kill(self) -> None:
        """End it whatever it does."""
        if self._process.is_alive():
            self._process.kill()
        self._process.join(5)
        self._pipe.close()


def _enter(scene: str, plan: Plan, pipe: Connection) -> None:
    from omni_scenes import enter

    enter(scene, plan, pipe)


def _probe(pipe: Connection) -> None:
    import omni_scenes

    pipe.send(omni_scenes.__name__)


class Host:
    """The server process, and the stages that were forked from it."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["omni_scenes"])
        here = str(Path(__file__).parent)
        path = os.environ.get("PYTHONPATH", "")
        os.environ["PYTHONPATH"] = f"{here}{os.pathsep}{path}" if path else here
        ours, theirs = self._context.Pipe()
        probe = self._context.Process(target=_probe, args=(theirs,))
        probe.start()
        theirs.close()
        self.problem = ""
        if not ours.poll(IMPORT_SECONDS):
            self.problem = f"vllm_omni is not imported after {IMPORT_SECONDS:.0f} s"
            probe.kill()
        else:
            try:
                ours.recv()
            except EOFError:
                self.problem = "vllm_omni cannot be imported here; the traceback is in the captured output"
        probe.join(5)

    def start(self, scene: str, plan: Plan) -> Stage:
        """Fork a stage."""
        return Stage(self._context, scene, plan)


class Cast:
    """The stages of one test, on ports and in a runtime directory of their own."""

    def __init__(self, host: Host, runtime: Path, ports: PortBlock) -> None:
        self._host = host
        self._runtime = runtime
        self.base_port = ports.base
        self.stages: list[Stage] = []

    def extra(self, **overrides: Any) -> Plan:
        """The deploy file's `extra`, as far as this machine differs from the one that the file is for."""
        return {
            "host": "127.0.0.1",
            "zmq_port": self.base_port,
            "backend_type": "shm",
            "memory_pool_device": "cpu",
            "memory_pool_size": 64 << 20,
            "num_transfer_workers": 1,
            **overrides,
        }

    def add(self, scene: str, env: Mapping[str, str] | None = None, **plan: Any) -> Stage:
        """Start one more stage."""
        plan.setdefault("extra", self.extra())
        environment = {"MORI_MP_RUNTIME_DIR": str(self._runtime), "MORI_MP_PIN": "off", **(env or {})}
        stage = self._host.start(scene, {"seconds": 30.0, **plan, "env": environment})
        self.stages.append(stage)
        return stage

    def play(self) -> list[Any]:
        """Run all stages to their end; returns what each said of "done", with "ready" and "closed" in it."""
        ready = [stage.expect("ready") for stage in self.stages]
        for stage in self.stages:
            stage.answer()
        done = [stage.expect("done") for stage in self.stages]
        for stage in self.stages:
            stage.answer()
        for stage, said, found in zip(self.stages, ready, done, strict=True):
            found["ready"] = said
            if stage.plan["closes"]:
                found["closed"] = stage.expect("closed")
            assert stage.expect("ended") == [], "child processes are left"
        assert os.listdir(self._runtime) == [], "runtime files are left"
        return done

    def close(self) -> None:
        """End what is still there."""
        for stage in self.stages:
            stage.kill()
