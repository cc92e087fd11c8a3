"""The names for which the host computes ports and roles: who has them, and that ours is among them."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from omni_support import Cast, host_missing

NAME_SET = "TRANSFER_ENGINE_CONNECTOR_NAMES"
HOME = "distributed/omni_connectors/utils/config.py"
IMPORTERS = {
    "distributed/omni_connectors/kv_transfer_manager.py",
    "distributed/omni_connectors/utils/initialization.py",
    "engine/stage_engine_core_client.py",
    "engine/stage_init_utils.py",
}
# Of these a stage in an environment without the models' packages imports:
IMPORTED = {
    HOME,
    "distributed/omni_connectors/kv_transfer_manager.py",
    "distributed/omni_connectors/utils/initialization.py",
}
LOAD_OURS = """
import sys
from importlib.metadata import entry_points
ours = [e for e in entry_points(group="vllm.general_plugins") if e.module.startswith("mori_mp.")]
for _ in range(2):
    for entry in ours:
        entry.load()()
print(len(ours), [name for name in ("torch", "zmq", "vllm", "vllm_omni") if name in sys.modules])
"""


@pytest.fixture(scope="module")
def sources() -> dict[str, ast.Module]:
    """The host's modules that mention the set, by path."""
    problem = host_missing()
    if problem:
        pytest.skip(problem)
    spec = importlib.util.find_spec("vllm_omni")
    assert spec is not None
    assert spec.origin is not None
    root = Path(spec.origin).parent
    texts = {str(path.relative_to(root)): path.read_text() for path in sorted(root.rglob("*.py"))}
    return {path: ast.parse(text) for path, text in texts.items() if NAME_SET in text}


def test_no_importer_that_we_do_not_know(sources: dict[str, ast.Module]) -> None:
    """A new one is most likely fine, as the plugin goes by the name, not by this list: look, and add it."""
    assert set(sources) == IMPORTERS | {HOME}


def test_every_copy_can_be_replaced(sources: dict[str, ast.Module]) -> None:
    """Each importer has the set under its own name, and looks it up when it is called, not when imported."""
    for path, tree in sources.items():
        aliases = [
            alias.asname
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
            if alias.name == NAME_SET
        ]
        assert set(aliases) <= {None}, path
        functions = [
            node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        ]
        late = {id(node) for function in functions for part in function.body for node in ast.walk(part)}
        early = [
            node.lineno
            for node in ast.walk(tree)
            if isinstance(node, ast.Name)
            and node.id == NAME_SET
            and isinstance(node.ctx, ast.Load)
            and id(node) not in late
        ]
        assert early == [], path


def test_registering_costs_nothing(sources: dict[str, ast.Module]) -> None:
    """The plugins of the installed package, called where vLLM-Omni is, import none of the heavy packages."""
    done = subprocess.run([sys.executable, "-c", LOAD_OURS], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, "1 []"), done.stderr


@pytest.mark.parametrize("takeover", ["1", "0"])
def test_registered_with_the_real_host(cast: Cast, takeover: str) -> None:
    """vLLM's own loader finds the plugin; ports and roles are computed for both names alike."""
    cast.add("names", {"MORI_MP_TAKEOVER": takeover}, stage=1, closes=False)
    (found,) = cast.play()
    ours = "mori_mp.vllm_omni.plugin"
    assert found["registry"]["MoriMPConnector"] == ours
    assert (found["registry"]["MoriTransferEngineConnector"] == ours) == (takeover == "1")
    assert {path.removesuffix(".py").replace("/", ".") for path in IMPORTED} <= {
        name.removeprefix("vllm_omni.") for name in found["copies"]
    }
    assert all("MoriMPConnector" in names for names in found["copies"].values())
    for own, in_tree in found["resolved"]:
        assert own == in_tree
    assert found["resolved"][1][0]["sender_zmq_port"] == cast.base_port + 16 + 1024
    assert found["again"] is False, "registering twice changes nothing"


def test_not_on_the_allowlist(cast: Cast) -> None:
    """VLLM_PLUGINS without our name: the host is as it was."""
    cast.add("names", {"VLLM_PLUGINS": "vllm_omni_register_models"}, stage=1, closes=False)
    (found,) = cast.play()
    assert "MoriMPConnector" not in found["registry"]
    assert found["registry"]["MoriTransferEngineConnector"].startswith("vllm_omni.")
