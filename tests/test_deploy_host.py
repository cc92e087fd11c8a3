"""Agreement with vllm-omni: our reading of deploy files against its own functions and its own files."""

from __future__ import annotations

import ast
import copy
import importlib.util
import os
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from deploy_support import CHAIN, MORI, SHIPPED, SHM, Folder

from mori_mp.deploy import TRANSFER_ENGINE_NAMES, ResolvedConnector, load_deploy
from mori_mp.deploy_yaml import read_document
from mori_mp.ports import Purpose, compute_port
from mori_mp.shared.errors import DeployError


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def _host_deploy_files() -> list[Path]:
    """The deploy files of the vllm-omni in MORI_MP_VLLM_OMNI_DIR, else of the installed one."""
    given_dir = os.environ.get("MORI_MP_VLLM_OMNI_DIR")
    if given_dir:
        root = Path(given_dir)
    else:
        spec = importlib.util.find_spec("vllm_omni")
        if spec is None or spec.origin is None:
            return []
        root = Path(spec.origin).parent
    return sorted((root / "deploy").glob("*.yaml"))


HOST_FILES = _host_deploy_files()
each_host_file = pytest.mark.parametrize("path", HOST_FILES, ids=lambda path: path.stem)


@pytest.mark.skipif(not HOST_FILES, reason="neither vllm-omni nor MORI_MP_VLLM_OMNI_DIR is here")
def test_host_files_load_or_say_what_is_wrong() -> None:
    refused = {}
    for path in HOST_FILES:
        try:
            deploy = load_deploy(path)
        except DeployError as exc:
            refused[path.stem] = str(exc)
            continue
        for stage in deploy.stages:
            assert deploy.connector_for_stage(stage.stage_id).config["stage_id"] == stage.stage_id
        assert len(deploy.topology()) == len(deploy.stages)
    assert len(refused) < len(HOST_FILES)
    for message in refused.values():
        assert "has no stages" in message, "the only files that are not deploy files are those without stages"


@pytest.mark.skipif(not HOST_FILES, reason="neither vllm-omni nor MORI_MP_VLLM_OMNI_DIR is here")
def test_shipped_yaml_agrees_with_the_hosts_file_of_that_name() -> None:
    [theirs] = [path for path in HOST_FILES if path.name == SHIPPED.name]
    assert read_document(SHIPPED).root == read_document(theirs).root


class Host:
    """vllm-omni's own functions, from file to connector configuration."""

    def __init__(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what its dependencies deprecate is not ours to fail on
            self.stage_config = self._import("config.stage_config")
            self.connectors = self._import("distributed.omni_connectors")
            self.initialization = self._import("distributed.omni_connectors.utils.initialization")
            self.adapter = self._import("distributed.omni_connectors.transfer_adapter.chunk_transfer_adapter")
        self.get_stage_connector_spec = self._load_get_stage_connector_spec()

    def _import(self, name: str) -> Any:
        return pytest.importorskip(f"vllm_omni.{name}", reason="vllm-omni cannot be imported here")

    def _load_get_stage_connector_spec(self) -> Any:
        """Compile the one function out of its module, which cannot be imported without diffusers."""
        spec = importlib.util.find_spec("vllm_omni")
        assert spec is not None
        assert spec.origin is not None
        source = Path(spec.origin).parent / "engine" / "stage_init_utils.py"
        [function] = [
            node
            for node in ast.parse(source.read_text()).body
            if isinstance(node, ast.FunctionDef) and node.name == "get_stage_connector_spec"
        ]
        namespace: dict[str, Any] = {
            "Any": Any,
            "TRANSFER_ENGINE_CONNECTOR_NAMES": self.initialization.TRANSFER_ENGINE_CONNECTOR_NAMES,
        }
        exec(compile(ast.Module([function], []), str(source), "exec"), namespace)
        return namespace["get_stage_connector_spec"]

    def load(self, path: Path) -> tuple[dict[str, Any], Any]:
        """Return the merged document and the transfer configuration."""
        document = self.stage_config.resolve_deploy_yaml(path)
        transfer = self.connectors.load_omni_transfer_config(config_dict=copy.deepcopy(document))
        for spec in transfer.connectors.values():
            spec.extra.pop("wakeup_scope", None)  # from 0.32 on: a new one for each start of a server
        return document, transfer

    def connector(
        self, transfer: Any, stage_id: int, rank: int, replica: int, monkeypatch: pytest.MonkeyPatch
    ) -> ResolvedConnector:
        """What the chunk adapter of one worker asks the connector factory for."""
        asked = []
        with monkeypatch.context() as patch:
            patch.setattr(self.adapter, "get_local_tp_rank", lambda: rank)
            patch.setattr(self.adapter, "get_omni_replica_id", lambda: replica)
            patch.setattr(self.adapter.OmniConnectorFactory, "create_connector", asked.append)
            spec = self.get_stage_connector_spec(transfer, stage_id, async_chunk=True)
            model_config = SimpleNamespace(stage_id=stage_id, stage_connector_config=spec)
            self.adapter.OmniChunkTransferAdapter.create_connector(model_config)
        [spec] = asked
        return ResolvedConnector(spec.name, spec.extra)


@pytest.fixture(scope="module")
def host() -> Host:
    return Host()


def _assert_agreement(host: Host, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document, transfer = host.load(path)
    assert read_document(path).root == document
    ours = load_deploy(path)
    assert ours.async_chunk == document.get("async_chunk", True)
    theirs = {tuple(map(int, edge)): (spec.name, spec.extra) for edge, spec in transfer.connectors.items()}
    assert [(edge, (c.name, c.extra)) for edge, c in ours.edges.items()] == list(theirs.items())
    for stage in ours.stages:
        for rank, replica in [(0, 0), (1, 0), (7, 0), (0, 1), (3, 2)]:
            expected = host.connector(transfer, stage.stage_id, rank, replica, monkeypatch)
            actual = ours.connector_for_stage(stage.stage_id, local_rank=rank, replica_id=replica)
            assert actual == expected, f"stage {stage.stage_id}, rank {rank}, replica {replica}"


@each_host_file
def test_agreement_on_the_hosts_files(host: Host, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document, transfer = host.load(path)
    if not document.get("stages"):
        assert not transfer.connectors
        with pytest.raises(DeployError, match="has no stages"):
            load_deploy(path)
        return
    _assert_agreement(host, path, monkeypatch)


AGREEMENT_CASES = {
    "chain": CHAIN,
    "feedback-to-stage-0": CHAIN + "    edges: [{from: 2, to: 0}]\n",
    "role-in-yaml": CHAIN.replace("backend_type: xgmi", "role: dual"),
    "sender-endpoint": CHAIN.replace("backend_type: xgmi", "sender_host: n1, sender_zmq_port: 9"),
    "port-from-environment": CHAIN.replace("zmq_port: 50051", "zmq_port: $MORI_MP_TEST_PORT"),
    "host-from-environment": CHAIN.replace("host: auto", "host: '${oc.env:MORI_MP_TEST_HOST,n5}'"),
    "nixl": CHAIN.replace(MORI, "NixlConnector"),
    "shared-memory-with-edge-keys": CHAIN.replace(MORI, SHM).replace(
        "host: auto", "from_stage: 4, to_stage: 5"
    ),
    "no-default-port": CHAIN.replace("zmq_port: 50051, ", ""),
    "late-sender": f"""
        stages:
          - stage_id: 0
          - {{stage_id: 1, output_connectors: {{to_stage_2: {{name: {MORI}, extra: {{zmq_port: 6000}}}}}}}}
          - {{stage_id: 2}}
          - {{stage_id: 3, output_connectors: {{to_stage_4: {{name: {SHM}, extra: {{to_stage: 9}}}}}}}}
          - {{stage_id: 4}}
        """,
    "fan-in": f"""
        connectors: {{m: {{name: {MORI}}}, s: {{name: {SHM}, extra: {{a: 1e3}}}}}}
        stages:
          - stage_id: 2
            input_connectors: {{from_stage_1: s, from_stage_0: m}}
            output_connectors: {{to_stage_3: m}}
          - {{stage_id: 0, output_connectors: {{to_stage_1: m, to_stage_2: m}}}}
          - {{stage_id: 1, engine_input_source: [0]}}
          - {{stage_id: 3, engine_input_source: [1, 0]}}
        edges: [{{from: "1", to: 3}}]
        """,
    "legacy": f"""
        runtime:
          connectors: {{m: {{name: {MORI}, extra: {{zmq_port: 7000}}}}}}
          edges: [{{from: 0, to: 1}}]
        stage_args:
          - {{stage_id: 0}}
          - {{stage_id: 1, output_connectors: {{to_stage_2: m}}}}
          - {{stage_id: 2, engine_input_source: [1]}}
        """,
}


@pytest.mark.parametrize("case", AGREEMENT_CASES)
def test_agreement_on_other_shapes(
    host: Host, folder: Folder, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.setenv("MORI_MP_TEST_PORT", "7100")
    monkeypatch.delenv("MORI_MP_TEST_HOST", raising=False)
    _assert_agreement(host, folder.write(AGREEMENT_CASES[case]), monkeypatch)


def test_agreement_on_inheritance(host: Host, folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.write(
        CHAIN + "    dtype: a\n    platforms: {rocm: {stages: [{stage_id: 0, devices: '4', env: {A: 1}}]}}\n",
        "base.yaml",
    )
    folder.write("base_config: ../base.yaml\nconnectors: {mori: {extra: {zmq_port: 6000}}}\n", "sub/mid.yaml")
    path = folder.write("""
        base_config: sub/mid.yaml
        dtype: b
        connectors: {mori: {extra: {nested: {a: 1e-3}}}, extra: {name: X}}
        stages:
          - {stage_id: 1, devices: "5", engine_args: {a: 1}, output_connectors: {to_stage_3: mori}}
          - {stage_id: 3, input_connectors: {from_stage_1: mori}}
        platforms: {rocm: {k: 1, stages: [{stage_id: 0, env: {B: 2}}, {stage_id: 1}]}, npu: {stages: []}}
        """)
    # Stage 2 still names stage 1 as its source; the overlay only replaced stage 1's own list.
    _assert_agreement(host, path, monkeypatch)


def test_agreement_on_ports(host: Host) -> None:
    purposes: tuple[Purpose, ...] = ("request_forwarding", "kv_transfer", "orchestrator")
    for purpose in purposes:
        for from_stage in (0, 1, 15):
            for rank in (0, 1, 70):
                for replica in (0, 3):
                    where: dict[str, Any] = {
                        "purpose": purpose,
                        "from_stage": from_stage,
                        "local_rank": rank,
                        "replica_id": replica,
                    }
                    theirs = host.initialization.compute_connector_zmq_port(50051, **where)
                    assert compute_port(50051, **where) == theirs


def test_transfer_engine_names_are_the_hosts_and_ours(host: Host) -> None:
    # In a process where mori-mp's plugin ran, the host's set holds our name too.
    theirs = host.initialization.TRANSFER_ENGINE_CONNECTOR_NAMES
    assert theirs | {"MoriMPConnector"} == TRANSFER_ENGINE_NAMES


@pytest.mark.parametrize(
    "text",
    [
        CHAIN.replace("to_stage_2: mori", "to_stage_2: mory"),
        CHAIN.replace("from_stage_0: mori", f"from_stage_0: {{name: {SHM}}}"),
        CHAIN.replace("zmq_port: 50051", "zmq_port: ${PORT}"),
        CHAIN.replace("extra: {", "host: a, host: b, extra: {"),
        CHAIN.replace("from_stage_0: mori", "from_stage_0: {extra: {}}"),
        "base_config: gone.yaml",
        "a: [1",
    ],
    ids=["undefined", "mismatch", "braces", "key-twice", "no-name", "base-missing", "syntax"],
)
def test_both_refuse(host: Host, folder: Folder, text: str) -> None:
    path = folder.write(text)
    with pytest.raises(Exception):  # noqa: B017  # the host raises whatever it stumbles over
        host.load(path)
    with pytest.raises(DeployError):
        load_deploy(path)
