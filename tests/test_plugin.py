"""The vLLM plugin, over a host package that has the few parts of vLLM-Omni which it touches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from mori_mp.ports import TRANSFER_ENGINE_NAMES
from mori_mp.vllm_omni import plugin, qwen2_5_pipeline

CONNECTORS = "vllm_omni/distributed/omni_connectors"
HOST = {
    "vllm_omni/__init__.py": "",
    "vllm_omni/distributed/__init__.py": "",
    "vllm_omni/engine/__init__.py": "",
    "vllm_omni/engine/late.py": "from ..distributed.omni_connectors.utils.config import "
    "TRANSFER_ENGINE_CONNECTOR_NAMES\n",
    f"{CONNECTORS}/__init__.py": "from . import early\nfrom .factory import OmniConnectorFactory\n",
    f"{CONNECTORS}/early.py": "from .utils.config import TRANSFER_ENGINE_CONNECTOR_NAMES\n",
    f"{CONNECTORS}/connectors/__init__.py": "",
    f"{CONNECTORS}/connectors/base.py": "from abc import ABC\nclass OmniConnectorBase(ABC): pass\n",
    f"{CONNECTORS}/utils/__init__.py": "",
    f"{CONNECTORS}/utils/config.py": "TRANSFER_ENGINE_CONNECTOR_NAMES = frozenset({'A', 'B'})\n",
    f"{CONNECTORS}/factory.py": """
from .connectors.base import OmniConnectorBase
from .utils import config
def in_tree(config): return "in-tree"
class OmniConnectorFactory:
    _registry = {}
OmniConnectorFactory._registry["MoriTransferEngineConnector"] = in_tree
OmniConnectorFactory._registry["Other"] = in_tree
""",
}
PROLOGUE = """
import json, logging, sys
lines = []
class Lines(logging.Handler):
    def emit(self, record): lines.append((record.levelname, record.getMessage()))
logging.getLogger("mori_mp").addHandler(Lines())
logging.getLogger("mori_mp").setLevel("INFO")
from mori_mp.vllm_omni.plugin import register
def registry():
    from vllm_omni.distributed.omni_connectors.factory import OmniConnectorFactory
    return {name: call.__module__ for name, call in OmniConnectorFactory._registry.items()}
def names():
    import vllm_omni.engine.late
    return {n: sorted(m.TRANSFER_ENGINE_CONNECTOR_NAMES) for n, m in sys.modules.items()
            if hasattr(m, "TRANSFER_ENGINE_CONNECTOR_NAMES")}
"""
OURS, THEIRS = plugin.__name__, "vllm_omni.distributed.omni_connectors.factory"
HEAVY = "sorted(m for m in sys.modules if m.partition('.')[0] in ('torch', 'zmq', 'vllm', 'vllm_omni'))"
ROOT = Path(__file__).resolve().parents[1]


def run(root: Path, body: str, *options: str, **environment: str) -> Any:
    """Run a program over the host package at root; returns what it assigned to `said`, and its log lines."""
    program = f"{PROLOGUE}\n{body}\nprint(json.dumps([said, lines]))"
    env = {k: v for k, v in os.environ.items() if k not in (plugin.TAKEOVER_ENV, qwen2_5_pipeline.ENABLE_ENV)}
    env |= {"PYTHONPATH": f"{root}{os.pathsep}{ROOT}", **environment}
    done = subprocess.run(
        [sys.executable, *options, "-c", program], env=env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def host(tmp_path: Path) -> Path:
    for name, text in HOST.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_entry_point() -> None:
    found = [e for e in entry_points(group="vllm.general_plugins") if e.module.startswith("mori_mp.")]
    assert [(e.name, e.value) for e in found] == [("mori_mp", "mori_mp.vllm_omni.plugin:register")]
    assert found[0].load() is plugin.register


def test_registering_imports_nothing(host: Path) -> None:
    """The host is left for whoever imports it, and then taken over."""
    said, lines = run(
        host,
        "before = set(sys.modules); register(); register()\n"
        "loaded = set(sys.modules) - before\n"
        f"heavy = {HEAVY}\n"
        "said = [heavy, len(loaded), registry(), names(), len(sys.meta_path)]\n"
        "register(); said.append(registry() == said[2])\n",
    )
    heavy, loaded, registry, names, _, again = said
    assert heavy == []
    assert loaded == 0
    assert registry == {"MoriTransferEngineConnector": OURS, "Other": THEIRS, "MoriMPConnector": OURS}
    assert len(names) == 3, "utils.config, one module imported before the factory and one after the plugin"
    assert all(found == ["A", "B", "MoriMPConnector"] for found in names.values())
    assert again
    assert [level for level, _ in lines] == ["INFO"]
    assert "MORI_MP_TAKEOVER=0" in lines[0][1]


def test_registering_after_the_host_was_imported(host: Path) -> None:
    said, lines = run(host, "registry(); names(); register(); register(); said = [registry(), names()]")
    assert said[0]["MoriTransferEngineConnector"] == said[0]["MoriMPConnector"] == OURS
    assert all("MoriMPConnector" in found for found in said[1].values())
    assert len(lines) == 1


def test_nothing_stays_behind_in_the_import_system(host: Path) -> None:
    body = "before = len(sys.meta_path); register(); registry(); said = len(sys.meta_path) - before"
    assert run(host, body) == [0, run(host, "register(); registry(); said = 0")[1]]


@pytest.mark.parametrize("value", ["0", "false", " Off "])
def test_takeover_declined(host: Path, value: str) -> None:
    """The in-tree class stays under its name; ours is to be had under its own."""
    said, lines = run(host, "register(); said = [registry(), names()]", MORI_MP_TAKEOVER=value)
    assert said[0] == {"MoriTransferEngineConnector": THEIRS, "Other": THEIRS, "MoriMPConnector": OURS}
    assert all("MoriMPConnector" in found for found in said[1].values())
    assert lines == []


def test_no_host(tmp_path: Path) -> None:
    (tmp_path / "vllm_omni").mkdir()  # a folder of that name is no package
    body = f"before = list(sys.meta_path); register(); said = [before == sys.meta_path, {HEAVY}]"
    for qwen in ("0", "1"):
        # -S: without site-packages, where vllm-omni may be.
        said, lines = run(tmp_path, body, "-S", MORI_MP_QWEN2_5_OMNI=qwen)
        assert said == [True, []]
        assert lines == []


def test_a_host_of_another_shape_is_left_alone(host: Path) -> None:
    """An error that says what to do; raising would end every vLLM process."""
    factory = host / CONNECTORS / "factory.py"
    factory.write_text(factory.read_text().replace("_registry", "_constructors"))
    said, lines = run(
        host,
        "register()\n"
        "from vllm_omni.distributed.omni_connectors.factory import OmniConnectorFactory\n"
        "said = sorted(OmniConnectorFactory._constructors)",
    )
    assert said == ["MoriTransferEngineConnector", "Other"]
    assert [level for level, _ in lines] == ["ERROR"]
    assert "uninstall mori-mp" in lines[0][1]


def test_log_lines_join_those_of_vllm(host: Path) -> None:
    """Also when vLLM sets its logger up after the plugin has run, or anew; each line once."""
    said, _ = run(
        host,
        "class Here(Lines):\n"
        "    def __init__(self): super().__init__(); self.seen = []\n"
        "    def emit(self, record): self.seen.append(record.getMessage())\n"
        "ours, vllm = logging.getLogger('mori_mp'), logging.getLogger('vllm')\n"
        "ours.handlers.clear(); ours.setLevel(logging.NOTSET)\n"
        "register(); registry(); register()\n"
        "said = []\n"
        "for turn in ('first', 'second'):\n"
        "    vllm.handlers = [Here()]; vllm.setLevel('INFO'); vllm.propagate = False\n"
        "    logging.getLogger('mori_mp.heart').info(turn)\n"
        "    logging.getLogger('mori_mp.heart').debug('not this')\n"
        "    said.append(vllm.handlers[0].seen)\n",
    )
    assert said == [["first"], ["second"]]


def test_log_lines_stay_where_somebody_has_put_them(host: Path) -> None:
    said, lines = run(host, "register(); registry(); said = len(logging.getLogger('mori_mp').handlers)")
    assert said == 1
    assert len(lines) == 1


def test_created_connector(host: Path) -> None:
    """The factory's call makes ours, a member of the host's base class, and nothing is started for it yet."""
    said, _ = run(
        host,
        "import os\nregister(); registry()\n"
        "from vllm_omni.distributed.omni_connectors.factory import OmniConnectorFactory as Factory\n"
        "from vllm_omni.distributed.omni_connectors.connectors.base import OmniConnectorBase\n"
        "given = {'role': 'sender', 'stage_id': 0, 'zmq_port': 0, 'backend_type': 'shm',\n"
        "         'memory_pool_size': 1 << 20, 'codec_chunk_frames': 25}\n"
        "names = 'MoriTransferEngineConnector', 'MoriMPConnector'\n"
        "made = [Factory._registry[name](given) for name in names]\n"
        "said = [[type(c).__module__, isinstance(c, OmniConnectorBase), c.heart is None,\n"
        "         c.config['codec_chunk_frames'], c.can_put] for c in made] + ['start' in given]\n"
        "for c in made: c.close()\n",
    )
    assert said == [["mori_mp.connector", True, True, 25, True]] * 2 + [False]


def test_deploy_resolves_our_name_too() -> None:
    """Our own reading of deploy files takes both for transfer engines, as the host then does."""
    assert plugin.OWN_NAME in TRANSFER_ENGINE_NAMES
    assert plugin.IN_TREE_NAME in TRANSFER_ENGINE_NAMES
