"""Deploy YAML: schema, inheritance, errors, what each stage's connector gets, and the shipped file."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from deploy_support import CHAIN, MORI, SHIPPED, SHM, Folder
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mori_mp.deploy import TRANSFER_ENGINE_NAMES, Connector, ResolvedConnector, load_deploy
from mori_mp.deploy_yaml import deep_merge, read_document
from mori_mp.ports import RANK_STRIDE, Purpose, compute_port, expand_port
from mori_mp.shared.errors import DeployError


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


# ------------------------------------------------------------------------------------------------ schema
def test_references(folder: Folder) -> None:
    deploy = folder.load(CHAIN)
    assert [(s.stage_id, s.devices) for s in deploy.stages] == [(0, "0"), (1, "1"), (2, "2,3")]
    assert list(deploy.edges) == [(0, 1), (1, 2)]
    expected = Connector(MORI, {"host": "auto", "zmq_port": 50051, "backend_type": "xgmi"})
    assert deploy.edges[0, 1] == deploy.edges[1, 2] == expected
    assert deploy.async_chunk is True
    assert deploy.path == folder.root / "deploy.yaml"


def test_inline_definition_and_async_chunk(folder: Folder) -> None:
    deploy = folder.load("""
        async_chunk: false
        stages:
          - stage_id: 0
            output_connectors: {to_stage_1: {name: MoriMPConnector, extra: {zmq_port: 6000}}}
          - stage_id: 1
        """)
    assert deploy.edges == {(0, 1): Connector("MoriMPConnector", {"zmq_port": 6000})}
    assert deploy.async_chunk is False
    assert deploy.stages[1].devices is None


def test_json(folder: Folder) -> None:
    path = folder.root / "deploy.json"
    document = {
        "connectors": {"c": {"name": MORI}},
        "stages": [{"stage_id": 0, "devices": 3}, {"stage_id": 1}],
    }
    document["stages"][1]["input_connectors"] = {"from_stage_0": "c"}  # type: ignore[index]
    path.write_text(json.dumps(document, indent="\t"))
    deploy = load_deploy(str(path))
    assert deploy.edges == {(0, 1): Connector(MORI)}
    assert deploy.stages[0].devices == "3"


def test_legacy_layout(folder: Folder) -> None:
    deploy = folder.load(f"""
        runtime:
          connectors: {{mori: {{name: {MORI}, extra: {{zmq_port: 7000}}}}}}
          edges: [{{from: 1, to: 2}}, {{from: 0, to: 1}}]
        stage_args:
          - {{stage_id: 0, runtime: {{devices: "5"}}, output_connectors: {{to_stage_1: mori}}}}
          - {{stage_id: 1}}
          - {{stage_id: 2}}
          - {{stage_id: 3, engine_input_source: [2]}}
        """)
    assert deploy.stages[0].devices == "5"
    assert {edge: connector.name for edge, connector in deploy.edges.items()} == {
        (0, 1): MORI,
        (1, 2): SHM,
        (2, 3): SHM,
    }


def test_listed_edges_without_a_connector_use_shared_memory(folder: Folder) -> None:
    deploy = folder.load(CHAIN + '    edges: [{from: 0, to: 1, window_size: -1}, {from: "0", to: 2}]\n')
    assert deploy.edges[0, 1].name == MORI
    assert deploy.edges[0, 2] == Connector(SHM, {})


def test_runtime_section_wins_over_the_top_level_and_says_so(
    folder: Folder, caplog: pytest.LogCaptureFixture
) -> None:
    deploy = folder.load(f"""
        connectors: {{c: {{name: {SHM}}}}}
        runtime: {{connectors: {{c: {{name: {MORI}}}}}}}
        stages: [{{stage_id: 0, output_connectors: {{to_stage_1: c}}}}, {{stage_id: 1}}]
        """)
    assert deploy.edges[0, 1].name == MORI
    assert "ignores the top-level connectors" in caplog.text


def test_ends_that_differ_in_options_warn_and_the_first_wins(
    folder: Folder, caplog: pytest.LogCaptureFixture
) -> None:
    deploy = folder.load(f"""
        connectors:
          a: {{name: {MORI}, extra: {{zmq_port: 50051, host: auto}}}}
          b: {{name: {MORI}, extra: {{zmq_port: 60051, host: auto}}}}
        stages:
          - {{stage_id: 0, output_connectors: {{to_stage_1: a}}}}
          - {{stage_id: 1, input_connectors: {{from_stage_0: b}}}}
        """)
    assert deploy.edges[0, 1].extra["zmq_port"] == 50051
    [record] = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert "edge 0 -> 1" in record.getMessage()
    assert "zmq_port (50051 / 60051)" in record.getMessage()
    assert "host" not in record.getMessage()


# ----------------------------------------------------------------------------------------------- scalars
def test_scalars_read_as_the_host_reads_them(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MORI_MP_TEST_HOST", "node7")
    monkeypatch.delenv("MORI_MP_TEST_UNSET", raising=False)
    deploy = folder.load(r"""
        stages:
          - stage_id: 0
            small: 1e-5
            large: 2E3
            date: 2026-01-02
            from_env: "tcp://${oc.env:MORI_MP_TEST_HOST}:1"
            with_default: ${oc.env:MORI_MP_TEST_UNSET,fallback}
            none: ${oc.env:MORI_MP_TEST_UNSET,null}
            escaped: '\${kept}'
            plain: $MORI_MP_TEST_HOST
        """)
    raw = deploy.stages[0].raw
    assert (raw["small"], raw["large"], raw["date"]) == (1e-5, 2000.0, "2026-01-02")
    assert (raw["from_env"], raw["with_default"], raw["none"]) == ("tcp://node7:1", "fallback", None)
    assert (raw["escaped"], raw["plain"]) == ("${kept}", "$MORI_MP_TEST_HOST")


def test_yaml_merge_keys_are_not_duplicates(folder: Folder) -> None:
    deploy = folder.load(f"""
        x: &base {{name: {MORI}, extra: {{zmq_port: 1}}}}
        connectors:
          c: {{<<: *base, extra: {{zmq_port: 2}}}}
          d: {{<<: *base, <<: {{extra: {{zmq_port: 3}}}}}}
        stages:
          - {{stage_id: 0, output_connectors: {{to_stage_1: c, to_stage_2: d}}}}
          - {{stage_id: 1}}
          - {{stage_id: 2}}
        """)
    assert deploy.edges[0, 1] == Connector(MORI, {"zmq_port": 2})
    assert deploy.edges[0, 2].name == MORI


# ------------------------------------------------------------------------------------------- inheritance
def test_base_config_merges_connectors_deeply_and_stages_by_id(folder: Folder) -> None:
    folder.write(CHAIN + "    async_chunk: false\n    dtype: bfloat16\n", "common/chain.yaml")
    folder.write(
        "base_config: ../common/chain.yaml\nconnectors: {mori: {extra: {zmq_port: 6000}}}\n", "a/mid.yaml"
    )
    deploy = folder.load(
        """
        base_config: a/mid.yaml
        dtype: float16
        connectors: {mori: {extra: {backend_type: rdma}}}
        stages:
          - stage_id: 1
            devices: "7"
            default_sampling_params: {seed: 1, nested: {b: 2}}
          - {stage_id: 3, input_connectors: {from_stage_2: mori}}
        """,
        "top.yaml",
    )
    assert deploy.edges[1, 2].extra == {"host": "auto", "zmq_port": 6000, "backend_type": "rdma"}
    assert [(s.stage_id, s.devices) for s in deploy.stages] == [(0, "0"), (1, "7"), (2, "2,3"), (3, None)]
    assert list(deploy.edges) == [(0, 1), (1, 2), (2, 3)]
    assert deploy.async_chunk is False
    document = read_document(folder.root / "top.yaml")
    assert document.root["dtype"] == "float16"
    assert [path.name for path in document.files] == ["top.yaml", "mid.yaml", "chain.yaml"]


def test_only_the_deep_keys_of_a_stage_are_merged_deeply(folder: Folder) -> None:
    folder.write(
        """
        stages:
          - {stage_id: 0, default_sampling_params: {seed: 1, x: {a: 1}}, env: {A: 1}}
        """,
        "base.yaml",
    )
    deploy = folder.load("""
        base_config: base.yaml
        stages:
          - {stage_id: 0, default_sampling_params: {top_k: 5, x: {b: 2}}, env: {B: 2}}
        """)
    raw = deploy.stages[0].raw
    assert raw["default_sampling_params"] == {"seed": 1, "top_k": 5, "x": {"a": 1, "b": 2}}
    assert raw["env"] == {"B": 2}


def test_platforms_merge_per_platform_and_stage(folder: Folder) -> None:
    folder.write(
        "stages: [{stage_id: 0}]\nplatforms: {rocm: {k: 1, stages: [{stage_id: 0, a: 1}]}}", "base.yaml"
    )
    path = folder.write(
        """
        base_config: base.yaml
        platforms: {rocm: {stages: [{stage_id: 0, b: 2}]}, npu: {k: 2}}
        """
    )
    assert read_document(path).root["platforms"] == {
        "rocm": {"k": 1, "stages": [{"stage_id": 0, "a": 1, "b": 2}]},
        "npu": {"k": 2, "stages": []},
    }


def test_errors_in_a_merged_file_name_all_its_files(folder: Folder) -> None:
    base = folder.write(CHAIN, "base.yaml")
    message = folder.error(
        "base_config: base.yaml\nstages: [{stage_id: 2, input_connectors: {from_stage_1: gone}}]"
    )
    assert str(base) in message
    assert "'gone'" in message


def test_inheritance_in_a_circle(folder: Folder) -> None:
    folder.write("base_config: ../deploy.yaml", "sub/b.yaml")
    message = folder.error("base_config: sub/b.yaml")
    assert "circle" in message
    assert "b.yaml -> " in message
    assert "circle" in folder.error("base_config: self.yaml", "self.yaml")


def test_the_same_base_twice_in_separate_files_is_no_circle(folder: Folder) -> None:
    folder.write(CHAIN, "base.yaml")
    folder.write("base_config: base.yaml", "mid.yaml")
    assert folder.load("base_config: mid.yaml").edges == folder.load("base_config: base.yaml").edges


# ------------------------------------------------------------------------------------------------ errors
@pytest.mark.parametrize(
    ("text", "said"),
    [
        pytest.param("", ["is empty"], id="empty"),
        pytest.param("# nothing\n", ["is empty"], id="comments-only"),
        pytest.param("- a\n- b\n", ["must be a mapping", "list"], id="root-is-a-list"),
        pytest.param("async_chunk: true\n", ["no stages"], id="no-stages"),
        pytest.param("stages:\n", ["no stages"], id="null-stages"),
        pytest.param("stages: {a: 1}\n", ["stages", "list"], id="stages-not-a-list"),
        pytest.param("stages: [{devices: 1}]\n", ["stages[0]", "no stage_id"], id="stage-without-id"),
        pytest.param('stages: [{stage_id: "0"}]\n', ["stages[0]", "stage_id '0'"], id="quoted-stage-id"),
        pytest.param("stages: [{stage_id: true}]\n", ["stage_id True"], id="bool-stage-id"),
        pytest.param("stages: [{stage_id: -1}]\n", ["stage_id -1"], id="negative-stage-id"),
        pytest.param(
            "stages: [{stage_id: 1}, {stage_id: 1}]\n", ["stage_id 1", "twice"], id="stage-id-twice"
        ),
        pytest.param("stages: [{stage_id: 0, devices: [1]}]\n", ["stage 0", "devices"], id="devices-list"),
        pytest.param(
            "async_chunk: 'no'\nstages: [{stage_id: 0}]\n", ["async_chunk", "'no'"], id="async-chunk"
        ),
        pytest.param("a: 1\nb: [1,\nc: 2\n", ["line 4", "begins on line 2", "not YAML"], id="syntax"),
        pytest.param("a: 1\n\tb: 2\n", ["line 2", "not YAML"], id="tab"),
        pytest.param("a: 1\nb: 2\na: 3\n", ["line 3", "'a'", "twice"], id="key-twice"),
        pytest.param("a: \x01\n", ["not YAML"], id="control-character"),
        pytest.param("a: &a [*a]\n", ["anchor"], id="recursive-anchor"),
        pytest.param(
            "stages: []\nstage_args: [{stage_id: 0}]\nbase_config: 3\n", ["base_config"], id="base-type"
        ),
        pytest.param(
            "base_config: gone.yaml\n", ["gone.yaml", "does not exist", "relative"], id="base-missing"
        ),
        pytest.param("base_config: .\n", ["cannot read"], id="base-is-a-folder"),
        pytest.param(
            "stages: [{stage_id: 0}]\nstage_args: [{stage_id: 0}]\n", ["stage_args"], id="both-layouts"
        ),
        pytest.param(
            "stages: [{stage_id: 0}]\nconnectors: [a]\n", ["connectors", "mapping"], id="connectors-list"
        ),
        pytest.param("stages: [{stage_id: 0}]\nedges: {from: 0}\n", ["edges", "list"], id="edges-mapping"),
        pytest.param(
            "stages: [{stage_id: 0}]\nedges: [{from: 0}]\n", ["edges[0]: to", "None"], id="edge-half"
        ),
        pytest.param(
            "stages: [{stage_id: 0}]\nedges: [{from: 0, to: 4}]\n", ["stage 4 does not"], id="edge-to-none"
        ),
        pytest.param(
            "stage_args: [{stage_id: 0, engine_input_source: 0}]\n",
            ["stage 0", "Write [0]"],
            id="source-not-a-list",
        ),
        pytest.param(
            "stages: [{stage_id: 0, x: '${PORT}'}]\n", ["stages[0].x", "$PORT", "${oc.env:PORT}"], id="braces"
        ),
        pytest.param("stages: [{stage_id: 0, x: 'a${b'}]\n", ["stages[0].x", "'${b'"], id="unclosed-braces"),
        pytest.param(
            "x: ${oc.env:MORI_MP_TEST_UNSET}\n", ["x:", "no MORI_MP_TEST_UNSET"], id="unset-variable"
        ),
    ],
)
def test_document_errors(folder: Folder, text: str, said: list[str]) -> None:
    message = folder.error(text)
    for part in said:
        assert part in message


@pytest.mark.parametrize(
    ("stage", "said"),
    [
        pytest.param(
            "output_connectors: {to_stage_1: mory}",
            [
                "stage 0",
                "output_connectors.to_stage_1",
                "'mory'",
                "Did you mean 'mori'?",
                "mori, other, broken",
            ],
            id="undefined-near",
        ),
        pytest.param(
            "output_connectors: {to_stage_1: zzz}",
            ["'zzz'", "not defined", "connectors: mori"],
            id="undefined",
        ),
        pytest.param(
            "input_connectors: {from_stag_1: mori}", ["'from_stag_1'", "'from_stage_1'?"], id="typo"
        ),
        pytest.param(
            "input_connectors: {to_stage_1: mori}", ["input_connectors", "'from_stage_1'?"], id="wrong-side"
        ),
        pytest.param("output_connectors: {to_stage_01: mori}", ["'to_stage_1'?"], id="leading-zero"),
        pytest.param("output_connectors: {to_stage_x: mori}", ["'to_stage_<stage id>'?"], id="no-number"),
        pytest.param("output_connectors: {1: mori}", ["1 is not", "'to_stage_1'?"], id="integer-key"),
        pytest.param(
            "output_connectors: {to_stage_8: mori}", ["stage 8 does not exist", "0, 1"], id="no-such-stage"
        ),
        pytest.param(
            "output_connectors:", ["output_connectors must be a mapping", "None"], id="null-section"
        ),
        pytest.param("output_connectors: [mori]", ["output_connectors must be a mapping"], id="list-section"),
        pytest.param(
            "output_connectors: {to_stage_1: [mori]}", ["name and extra", "['mori']"], id="list-definition"
        ),
        pytest.param(
            "output_connectors: {to_stage_1: {extra: {}}}", ["stage 0", "has no name"], id="no-name"
        ),
        pytest.param(
            "output_connectors: {to_stage_1: broken}", ["'broken'", "has no name"], id="named-no-name"
        ),
        pytest.param("output_connectors: {to_stage_1: {name: 3}}", ["has name 3"], id="name-type"),
        pytest.param(
            "output_connectors: {to_stage_1: {name: X, extra: }}", ["extra must", "None"], id="null-extra"
        ),
        pytest.param(
            "output_connectors: {to_stage_1: {name: X, extra: {on: 1}}}", ["True", "Quote"], id="extra-key"
        ),
        pytest.param(
            "output_connectors: {to_stage_1: other}",
            ["edge 0 -> 1", "output_connectors of stage 0", SHM, "input_connectors of stage 1", MORI],
            id="mismatch",
        ),
    ],
)
def test_connector_errors(folder: Folder, stage: str, said: list[str]) -> None:
    message = folder.error(f"""
        connectors: {{mori: {{name: {MORI}}}, other: {{name: {SHM}}}, broken: {{extra: {{}}}}}}
        stages:
          - stage_id: 0
            {stage}
          - stage_id: 1
            input_connectors: {{from_stage_0: mori}}
        """)
    for part in said:
        assert part in message


def test_json_errors(folder: Folder) -> None:
    assert "line 2" in folder.error('{"stages": [],\n oops}', "a.json")
    assert "'a' is given twice" in folder.error('{"a": 1, "a": 2}', "b.json")
    assert "is empty" in folder.error(" \n", "c.json")


def test_missing_and_unreadable_files(folder: Folder) -> None:
    with pytest.raises(DeployError, match=r"nowhere\.yaml does not exist"):
        load_deploy(folder.root / "nowhere.yaml")
    with pytest.raises(DeployError, match="cannot read"):
        load_deploy(folder.root)
    binary = folder.root / "binary.yaml"
    binary.write_bytes(b"stages: \xff\xfe")
    with pytest.raises(DeployError, match="not UTF-8"):
        load_deploy(binary)


def test_unused_connector_definitions_are_not_looked_at(folder: Folder) -> None:
    assert folder.load(CHAIN.replace("stages:", "  unused:\n    stages:", 1)).edges.keys() == {(0, 1), (1, 2)}


_connector = st.fixed_dictionaries(
    {"name": st.sampled_from([MORI, SHM, "NixlConnector"])},
    optional={
        "extra": st.dictionaries(st.sampled_from(["zmq_port", "role", "from_stage"]), st.integers(1, 9))
    },
)
_ends = st.sampled_from(["a", "b"]) | _connector
_stage = st.fixed_dictionaries(
    {"stage_id": st.integers(0, 2)},
    optional={
        "devices": st.sampled_from(["0", 1]),
        "input_connectors": st.dictionaries(st.sampled_from(["from_stage_0", "from_stage_1"]), _ends),
        "output_connectors": st.dictionaries(st.sampled_from(["to_stage_1", "to_stage_2"]), _ends),
        "engine_input_source": st.lists(st.integers(0, 2), max_size=2),
    },
)
_sound = st.fixed_dictionaries(
    {
        "stages": st.lists(_stage, min_size=2, max_size=3, unique_by=lambda stage: stage["stage_id"]),
        "connectors": st.fixed_dictionaries({"a": _connector, "b": _connector}),
    },
    optional={
        "edges": st.lists(st.fixed_dictionaries({"from": st.just(0), "to": st.integers(0, 2)}), max_size=2),
        "async_chunk": st.booleans(),
    },
)
_odd = st.sampled_from(
    [None, True, -1, 1.5, float("nan"), "", "x", "0", [], [None], {}, {"name": 1}, {"from": 0}]
)


@st.composite
def _documents(draw: st.DrawFn) -> dict[str, Any]:
    """A plausible document in which, as often as not, one value anywhere is something else."""
    document = draw(_sound)
    places: list[tuple[Any, Any]] = [
        (document, "runtime"),
        (document, "base_config"),
        (document, "stage_args"),
    ]
    pending: list[Any] = [document]
    while pending:
        node = pending.pop()
        places += [(node, key) for key in (node if isinstance(node, dict) else range(len(node)))]
        pending += [child for child in _children(node) if isinstance(child, (dict, list))]
    if draw(st.booleans()):
        container, key = draw(st.sampled_from(places))
        container[key] = draw(_odd)
    return document


def _children(node: Any) -> list[Any]:
    return list(node.values()) if isinstance(node, dict) else node


@settings(max_examples=80, deadline=None)
@given(document=_documents())
def test_any_document_loads_or_is_refused_with_our_error(document: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as root:
        path = Path(root) / "deploy.json"
        path.write_text(json.dumps(document))
        with contextlib.suppress(DeployError):
            deploy = load_deploy(path)
            for stage in deploy.stages:
                with contextlib.suppress(DeployError):
                    deploy.connector_for_stage(stage.stage_id)
            deploy.topology()


@settings(max_examples=60, deadline=None)
@given(text=st.text(st.sampled_from("ab01:-{}[]&*!#'\"|>?%@,$\\\n\t \x00é"), max_size=30))
@example(text="a: !!int ''")
@example(text="a: !!bool x")
@example(text="a: !!timestamp x")
@example(text="a: !!python/object:os.system x")
@example(text="a: " + "9" * 5000)
@example(text="[" * 500)
@example(text='base_config: "a\\0b"')
@example(text="a: 1\n---\nb: 2")
def test_any_text_loads_or_is_refused_with_our_error(text: str) -> None:
    with tempfile.TemporaryDirectory() as root:
        for name in ("deploy.yaml", "deploy.json"):
            path = Path(root) / name
            path.write_text(text, encoding="utf-8")
            with contextlib.suppress(DeployError):
                load_deploy(path)


# ------------------------------------------------------------------------------------- stages' connectors
def test_sender_middle_and_last_stage(folder: Folder) -> None:
    deploy = folder.load(CHAIN)
    common = {"host": "auto", "backend_type": "xgmi"}
    assert deploy.connector_for_stage(0) == ResolvedConnector(
        MORI,
        {**common, "stage_id": 0, "role": "sender", "from_stage": 0, "to_stage": 1, "zmq_port": 50051},
    )
    receiver = {**common, "role": "receiver", "sender_host": "auto"}
    assert deploy.connector_for_stage(1) == ResolvedConnector(
        MORI, {**receiver, "stage_id": 1, "from_stage": 0, "to_stage": 1, "sender_zmq_port": 50051}
    )
    assert deploy.connector_for_stage(2) == ResolvedConnector(
        MORI, {**receiver, "stage_id": 2, "from_stage": 1, "to_stage": 2, "sender_zmq_port": 50052}
    )


def test_ranks_replicas_and_purpose_shift_both_ends_alike(folder: Folder) -> None:
    deploy = folder.load(CHAIN)
    for rank, replica, purpose, offset in [
        (0, 0, "request_forwarding", 0),
        (3, 0, "request_forwarding", 48),
        (1, 2, "kv_transfer", 2164),
        (0, 1, "orchestrator", 1224),
    ]:
        asked: dict[str, Any] = {"local_rank": rank, "replica_id": replica, "purpose": purpose}
        assert deploy.connector_for_stage(0, **asked).config["zmq_port"] == 50051 + offset
        assert deploy.connector_for_stage(1, **asked).config["sender_zmq_port"] == 50051 + offset
        assert deploy.connector_for_stage(2, **asked).config["sender_zmq_port"] == 50052 + offset


def test_a_later_sender_without_inputs(folder: Folder) -> None:
    """A stage above 0 whose only edge is an outgoing one listens at its own number."""
    deploy = folder.load(f"""
        stages:
          - stage_id: 0
          - {{stage_id: 1, output_connectors: {{to_stage_2: {{name: {MORI}}}}}}}
          - {{stage_id: 2}}
        """)
    assert deploy.connector_for_stage(1).config == {
        "stage_id": 1,
        "role": "sender",
        "from_stage": 1,
        "to_stage": 2,
        "zmq_port": 50052,
    }
    assert deploy.connector_for_stage(2).config["sender_host"] == "127.0.0.1"
    assert deploy.connector_for_stage(0) == ResolvedConnector(SHM, {"stage_id": 0})


def test_first_incoming_edge_wins_in_file_order(folder: Folder) -> None:
    deploy = folder.load(f"""
        connectors: {{m: {{name: {MORI}}}}}
        stages:
          - {{stage_id: 2, input_connectors: {{from_stage_1: m, from_stage_0: m}}}}
          - {{stage_id: 0, output_connectors: {{to_stage_1: m, to_stage_2: m}}}}
          - {{stage_id: 1}}
        """)
    assert deploy.connector_for_stage(2).config["from_stage"] == 1
    assert deploy.connector_for_stage(0).config["to_stage"] == 2


def test_an_incoming_edge_wins_over_an_earlier_outgoing_one(folder: Folder) -> None:
    deploy = folder.load(f"""
        connectors: {{m: {{name: {MORI}}}}}
        stages:
          - {{stage_id: 2, input_connectors: {{from_stage_1: m}}}}
          - {{stage_id: 1, input_connectors: {{from_stage_0: m}}}}
          - {{stage_id: 0}}
        """)
    assert list(deploy.edges) == [(1, 2), (0, 1)]
    config = deploy.connector_for_stage(1).config
    assert (config["role"], config["from_stage"], config["to_stage"]) == ("receiver", 0, 1)


def test_explicit_sender_endpoint_and_role_win(folder: Folder) -> None:
    deploy = folder.load(CHAIN.replace("backend_type: xgmi", "sender_host: n1, sender_zmq_port: 9"))
    config = deploy.connector_for_stage(1).config
    assert (config["sender_host"], config["sender_zmq_port"]) == ("n1", 9)
    assert "zmq_port" not in config
    deploy = folder.load(CHAIN.replace("backend_type: xgmi", "role: dual"))
    config = deploy.connector_for_stage(1).config
    assert (config["role"], config["zmq_port"]) == ("dual", 50051)


def test_other_connectors_get_identity_and_role_only(folder: Folder) -> None:
    deploy = folder.load(CHAIN.replace(MORI, SHM))
    assert deploy.connector_for_stage(1) == ResolvedConnector(
        SHM, {"host": "auto", "zmq_port": 50051, "backend_type": "xgmi", "stage_id": 1, "role": "receiver"}
    )


def test_our_own_name_is_treated_as_a_transfer_engine(folder: Folder) -> None:
    ours = folder.load(CHAIN.replace(MORI, "MoriMPConnector"), "ours.yaml")
    theirs = folder.load(CHAIN)
    assert "MoriMPConnector" in TRANSFER_ENGINE_NAMES
    for stage_id in (0, 1, 2):
        resolved = ours.connector_for_stage(stage_id)
        assert resolved.name == "MoriMPConnector"
        assert resolved.config == theirs.connector_for_stage(stage_id).config


def test_overrides_act_as_if_written_in_extra(folder: Folder) -> None:
    deploy = folder.load(CHAIN.replace("backend_type: xgmi", "nested: {a: 1}"))
    overrides = {"backend_type": "shm", "host": "10.0.0.1", "zmq_port": "6000", "nested": {"b": 2}}
    sender = deploy.connector_for_stage(0, overrides=overrides).config
    receiver = deploy.connector_for_stage(2, overrides=overrides).config
    assert (sender["zmq_port"], receiver["sender_zmq_port"]) == (6000, 6001)
    assert receiver["sender_host"] == "10.0.0.1"
    assert sender["backend_type"] == receiver["backend_type"] == "shm"
    assert sender["nested"] == {"a": 1, "b": 2}
    assert deploy.connector_for_stage(0).config["zmq_port"] == 50051, "the deploy itself is unchanged"


def test_the_configuration_is_the_callers_own(folder: Folder) -> None:
    deploy = folder.load(CHAIN.replace("backend_type: xgmi", "nested: {a: [1]}"))
    before = copy.deepcopy(deploy.edges)
    config = deploy.connector_for_stage(1).config
    config["nested"]["a"].append(2)
    config["host"] = "changed"
    assert deploy.edges == before


def test_port_from_the_environment(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MORI_MP_TEST_PORT", "7100")
    deploy = folder.load(CHAIN.replace("zmq_port: 50051", "zmq_port: $MORI_MP_TEST_PORT"))
    assert deploy.connector_for_stage(0).config["zmq_port"] == 7100
    assert deploy.connector_for_stage(2).config["sender_zmq_port"] == 7101
    monkeypatch.delenv("MORI_MP_TEST_PORT")
    with pytest.raises(DeployError, match=r"deploy.yaml.*stage 0.*no MORI_MP_TEST_PORT"):
        deploy.connector_for_stage(0)


def test_unusable_ports_name_the_stage(folder: Folder) -> None:
    deploy = folder.load(CHAIN)
    with pytest.raises(DeployError, match=r"stage 1: zmq_port must be a port number, got 'x'"):
        deploy.connector_for_stage(1, overrides={"zmq_port": "x"})
    with pytest.raises(DeployError, match=r"stage 2: port 65536 is outside"):
        deploy.connector_for_stage(2, overrides={"zmq_port": 65535})
    with pytest.raises(DeployError, match=r"stage 7 does not exist.*0, 1, 2"):
        deploy.connector_for_stage(7)
    high = folder.load(f"""
        stages:
          - {{stage_id: 16, output_connectors: {{to_stage_17: {{name: {MORI}}}}}}}
          - {{stage_id: 17}}
        """)
    with pytest.raises(DeployError, match=r"stage 16: from_stage must be in 0..15, got 16"):
        high.connector_for_stage(16)


def test_nixl_is_told_of_its_outgoing_edge(folder: Folder) -> None:
    deploy = folder.load(CHAIN.replace(MORI, "NixlConnector"))
    config = deploy.connector_for_stage(1, local_rank=1).config
    assert config["outgoing"]["to_stage"] == 2
    assert (config["sender_zmq_port"], config["zmq_port"]) == (50067, 50068)
    mixed = folder.load(f"""
        stages:
          - {{stage_id: 0, output_connectors: {{to_stage_1: {{name: NixlConnector}}}}}}
          - {{stage_id: 1, output_connectors: {{to_stage_2: {{name: {MORI}}}}}}}
          - {{stage_id: 2}}
        """)
    with pytest.raises(DeployError, match=r"stage 1: edge 1 -> 2 uses Mori.*Use NixlConnector on both"):
        mixed.connector_for_stage(1)


# ---------------------------------------------------------------------------------------------- topology
def test_topology_orders_stages_and_lists_their_edges(folder: Folder) -> None:
    nodes = folder.load(f"""
        connectors: {{m: {{name: {MORI}}}}}
        stages:
          - {{stage_id: 3, input_connectors: {{from_stage_1: m, from_stage_2: m}}}}
          - {{stage_id: 2, input_connectors: {{from_stage_0: m}}}}
          - {{stage_id: 1, input_connectors: {{from_stage_0: m}}}}
          - {{stage_id: 0}}
          - {{stage_id: 4}}
        """).topology()
    order = [node.stage.stage_id for node in nodes]
    assert sorted(order) == [0, 1, 2, 3, 4]
    assert order.index(0) < min(order.index(1), order.index(2))
    assert order.index(3) > max(order.index(1), order.index(2))
    by_id = {node.stage.stage_id: node for node in nodes}
    assert [(e.from_stage, e.to_stage) for e in by_id[3].inputs] == [(1, 3), (2, 3)]
    assert {e.to_stage for e in by_id[0].outputs} == {1, 2}
    assert by_id[4].inputs == by_id[4].outputs == ()
    assert by_id[1].inputs[0].connector == Connector(MORI)


@pytest.mark.parametrize("edges", ["{from: 0, to: 1}, {from: 1, to: 0}", "{from: 1, to: 1}"])
def test_topology_refuses_cycles(folder: Folder, edges: str) -> None:
    deploy = folder.load(f"stages: [{{stage_id: 0}}, {{stage_id: 1}}]\nedges: [{edges}]")
    with pytest.raises(DeployError, match=r"deploy.yaml: the edges form a cycle, .*1"):
        deploy.topology()


# ------------------------------------------------------------------------------------------------- ports
def test_compute_port() -> None:
    assert compute_port(50051, purpose="request_forwarding", from_stage=0) == 50051
    assert compute_port(50051, purpose="kv_transfer", from_stage=2, local_rank=3, replica_id=1) == 51225
    assert compute_port(50051, purpose="orchestrator", from_stage=15) == 50266


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"purpose": "forwarding"}, r"unknown purpose 'forwarding'.*request_forwarding, kv_transfer"),
        ({"from_stage": 16}, "from_stage must be in 0..15, got 16"),
        ({"from_stage": -1}, "from_stage must be in"),
        ({"local_rank": -1}, "local_rank must not be negative"),
        ({"replica_id": -2}, "replica_id must not be negative, got -2"),
        ({"base": 65535, "from_stage": 1}, "port 65536 is outside"),
        ({"base": 0}, "port 0 is outside"),
        ({"base": 50051, "replica_id": 16}, r"1024 \* replica 16"),
    ],
)
def test_compute_port_refuses(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(DeployError, match=said):
        compute_port(**{"base": 50051, "purpose": "request_forwarding", "from_stage": 0, **wrong})


@given(
    base=st.integers(1, 30000),
    purpose=st.sampled_from(["request_forwarding", "kv_transfer", "orchestrator"]),
    replicas=st.integers(1, 4),
)
def test_ports_of_one_purpose_never_collide(base: int, purpose: Purpose, replicas: int) -> None:
    ports = [
        compute_port(base, purpose=purpose, from_stage=stage, local_rank=rank, replica_id=replica)
        for replica in range(replicas)
        for rank in range(0, 64, 9)
        for stage in range(RANK_STRIDE)
    ]
    assert len(set(ports)) == len(ports)


@pytest.mark.parametrize("value", [True, None, 1.5, float("inf"), float("nan"), "1.5", "", [1]])
def test_expand_port_refuses(value: Any) -> None:
    with pytest.raises(DeployError, match="zmq_port must be a port number"):
        expand_port(value, "zmq_port")


def test_expand_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MORI_MP_TEST_PORT", "12")
    monkeypatch.delenv("MORI_MP_TEST_UNSET", raising=False)
    assert [expand_port(v, "p") for v in (5, "5", 5.0, "$MORI_MP_TEST_PORT", "${MORI_MP_TEST_PORT}3")] == [
        5,
        5,
        5,
        12,
        123,
    ]
    for unset in ("$MORI_MP_TEST_UNSET", "1${MORI_MP_TEST_UNSET}"):
        with pytest.raises(DeployError, match="the environment has no MORI_MP_TEST_UNSET"):
            expand_port(unset, "p")
    monkeypatch.setenv("MORI_MP_TEST_PORT", "http")
    with pytest.raises(DeployError, match="expanded to 'http'"):
        expand_port("$MORI_MP_TEST_PORT", "p")


_trees = st.recursive(
    st.integers(0, 3), lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3), max_leaves=8
)
_mappings = st.dictionaries(st.sampled_from("abc"), _trees, max_size=3)


def _leaves(tree: Mapping[str, Any], prefix: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    found: dict[tuple[str, ...], Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            found.update(_leaves(value, (*prefix, key)))
        else:
            found[(*prefix, key)] = value
    return found


@given(base=_mappings, overlay=_mappings)
def test_deep_merge_keeps_every_overlay_leaf_and_changes_neither_side(
    base: dict[str, Any], overlay: dict[str, Any]
) -> None:
    before = copy.deepcopy((base, overlay))
    merged = deep_merge(base, overlay)
    assert (base, overlay) == before
    leaves = _leaves(merged)
    overlay_leaves = {path: value for path, value in _leaves(overlay).items() if value != {}}
    assert overlay_leaves.items() <= leaves.items()
    for path, value in leaves.items():
        assert value == {} or path in overlay_leaves or _leaves(base).get(path) == value


# ----------------------------------------------------------------------------------------- shipped YAML
def test_shipped_yaml() -> None:
    deploy = load_deploy(SHIPPED)
    assert deploy.async_chunk is True
    assert [(stage.stage_id, stage.devices) for stage in deploy.stages] == [(0, "0"), (1, "1"), (2, "2")]
    assert list(deploy.edges) == [(0, 1), (1, 2)]
    assert [node.stage.stage_id for node in deploy.topology()] == [0, 1, 2]
    for stage_id, port in [
        (0, ("zmq_port", 50051)),
        (1, ("sender_zmq_port", 50051)),
        (2, ("sender_zmq_port", 50052)),
    ]:
        resolved = deploy.connector_for_stage(stage_id)
        expected = {
            "backend_type": "xgmi",
            "memory_pool_device": "cuda",
            "host": "auto",
            "codec_chunk_frames": 25,
            "codec_left_context_frames": 25,
        }
        assert resolved.name == MORI
        assert expected.items() <= resolved.config.items()
        assert resolved.config[port[0]] == port[1]


# ------------------------------------------------------------------------------------- nearly right names
@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        ("output_connectors:", "output_conectors:", ["stage 0", "'output_connectors'"]),
        ("input_connectors:", "input_connector:", ["stage 1", "'input_connectors'"]),
        ("extra:", "extras:", ["connectors.mori", "'extra'"]),
        (MORI, "MoriTransferConnector", ["connectors.mori", repr(MORI)]),
    ],
)
def test_a_name_that_is_nearly_right_is_warned_about_once(
    right: str, wrong: str, said: list[str], folder: Folder, caplog: pytest.LogCaptureFixture
) -> None:
    deploy = folder.load(CHAIN.replace(right, wrong, 1))
    assert [text for text in caplog.messages if "did you mean" in text] == list(deploy.warnings)
    (text,) = deploy.warnings
    for part in (repr(wrong.rstrip(":")), *said):
        assert part in text


def test_a_sound_file_has_no_warnings(folder: Folder) -> None:
    for name in ("MooncakeTransferEngineConnector", "MooncakeStoreConnector", "MyConnector"):
        assert folder.load(CHAIN.replace(MORI, name)).warnings == ()
