"""What the deploy tests share: a chain of three stages, and a folder to write deploy files in."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from mori_mp.deploy import Deploy, load_deploy
from mori_mp.shared.errors import DeployError

SHIPPED = Path(__file__).parent.parent / "deploy" / "qwen3_omni_moe_mori_intranode.yaml"
MORI = "MoriTransferEngineConnector"
SHM = "SharedMemoryConnector"

CHAIN = f"""
    connectors:
      mori: {{name: {MORI}, extra: {{host: auto, zmq_port: 50051, backend_type: xgmi}}}}
    stages:
      - {{stage_id: 0, devices: "0", output_connectors: {{to_stage_1: mori}}}}
      - stage_id: 1
        devices: "1"
        input_connectors: {{from_stage_0: mori}}
        output_connectors: {{to_stage_2: mori}}
      - {{stage_id: 2, devices: "2,3", input_connectors: {{from_stage_1: mori}}}}
"""


class Folder:
    """Writes deploy files, dedented, below one temporary directory and loads them."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, text: str, name: str = "deploy.yaml") -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return path

    def load(self, text: str, name: str = "deploy.yaml") -> Deploy:
        return load_deploy(self.write(text, name))

    def error(self, text: str, name: str = "deploy.yaml") -> str:
        path = self.write(text, name)
        with pytest.raises(DeployError) as caught:
            load_deploy(path)
        assert str(path) in str(caught.value), "every message names the file"
        return str(caught.value)
