"""From deploy YAML and options to the plans of the stages."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from mori_mp.deploy import Deploy, load_deploy
from mori_mp.pipeline import free_ports
from mori_mp.pipeline.free_ports import BLOCK, PortBlock
from mori_mp.pipeline.job import default_timeout_s, with_overrides
from mori_mp.pipeline.plan import ChunkShape
from mori_mp.pipeline.planner import RunOptions, make_plans, wants_local_ports
from mori_mp.shared.errors import DeployError

SHIPPED = Path(__file__).parent.parent / "deploy" / "qwen3_omni_moe_mori_intranode.yaml"
BRANCHING = """
connectors:
  ours: {name: MoriTransferEngineConnector, extra: {zmq_port: 6000, codec_chunk_frames: 10}}
stages:
  - {stage_id: 0, output_connectors: {to_stage_1: ours, to_stage_2: ours}}
  - {stage_id: 1, output_connectors: {to_stage_3: ours}}
  - {stage_id: 2, output_connectors: {to_stage_3: ours}}
  - {stage_id: 3}
  - {stage_id: 4}
"""


def deploy_of(tmp_path: Path, text: str) -> Deploy:
    path = tmp_path / "deploy.yaml"
    path.write_text(text)
    return load_deploy(path)


def configs(deploy: Deploy, options: RunOptions, **more: Any) -> dict[int, dict[str, Any]]:
    return {plan.stage_id: plan.connector_config for plan in make_plans(deploy, options, **more)}


def test_stages_get_the_configuration_of_the_host() -> None:
    deploy = load_deploy(SHIPPED)
    for stage_id, config in configs(deploy, RunOptions()).items():
        assert config == deploy.connector_for_stage(stage_id).config


def test_edges_carry_hidden_states_then_codec_frames() -> None:
    plans = make_plans(load_deploy(SHIPPED), RunOptions(requests=3, chunks=9, seed=5, gap_s=0.5))
    assert [(p.stage_id, [e.label for e in p.inputs], [e.label for e in p.outputs]) for p in plans] == [
        (0, [], ["0->1"]),
        (1, ["0->1"], ["1->2"]),
        (2, ["1->2"], []),
    ]
    assert [edge.kind for plan in plans for edge in plan.inputs] == ["hidden", "codec"]
    traffic = plans[0].traffic
    assert (traffic.requests, traffic.chunks, traffic.seed, traffic.gap_s) == (3, 9, 5, 0.5)
    assert (traffic.codec_chunk_frames, traffic.codec_left_context_frames) == (25, 25)


def test_shm_runs_on_this_host_and_its_own_ports() -> None:
    options = RunOptions(backend="shm")
    assert wants_local_ports(options)
    found = configs(load_deploy(SHIPPED), options, base_port=23456)
    assert found[0]["zmq_port"] == 23456
    assert found[1]["sender_zmq_port"] == 23456
    assert found[2]["sender_zmq_port"] == 23457
    for config in found.values():
        assert config["backend_type"] == "shm"
        assert config["memory_pool_device"] == "cpu"
        assert config["host"] == "127.0.0.1"
        assert config["codec_chunk_frames"] == 25


def test_what_the_operator_sets_wins() -> None:
    options = RunOptions(backend="shm", overrides={"zmq_port": 4000, "host": "::1", "codec_chunk_frames": 8})
    assert not wants_local_ports(options)
    plans = make_plans(load_deploy(SHIPPED), options)
    assert plans[0].connector_config["zmq_port"] == 4000
    assert plans[0].connector_config["host"] == "::1"
    assert plans[0].traffic.codec_chunk_frames == 8


def test_branches_and_joins_become_plans_and_lone_stages_do_not(tmp_path: Path) -> None:
    plans = {p.stage_id: p for p in make_plans(deploy_of(tmp_path, BRANCHING), RunOptions())}
    assert set(plans) == {0, 1, 2, 3}
    assert [edge.label for edge in plans[0].outputs] == ["0->1", "0->2"]
    assert [edge.label for edge in plans[3].inputs] == ["1->3", "2->3"]
    assert {edge.kind for edge in plans[3].inputs} == {"codec"}
    assert plans[0].traffic.codec_chunk_frames == 10


SHARED = "stages:\n  - {stage_id: 0}\n  - {stage_id: 1, engine_input_source: [0]}\n"


def test_a_foreign_connector_is_refused_with_the_way_out(tmp_path: Path) -> None:
    deploy = deploy_of(tmp_path, SHARED)
    with pytest.raises(
        DeployError, match=r"edge 0 -> 1 uses SharedMemoryConnector.*--backend shm.*--connector"
    ):
        make_plans(deploy, RunOptions())


def test_a_backend_takes_over_foreign_edges_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    deploy = deploy_of(tmp_path, SHARED)
    with caplog.at_level(logging.INFO, logger="mori_mp.pipeline.planner"):
        found = configs(deploy, RunOptions(backend="shm"), base_port=20000)
    assert found[1]["sender_zmq_port"] == 20000
    assert "edge 0 -> 1 names SharedMemoryConnector; running it on MoriTransferEngineConnector" in caplog.text


def test_another_class_runs_with_the_host_s_configuration() -> None:
    deploy = load_deploy(SHIPPED)
    plans = make_plans(deploy, RunOptions(connector_class="some.module:Class"))
    assert {plan.connector_class for plan in plans} == {"some.module:Class"}
    assert [p.connector_config for p in plans] == [deploy.connector_for_stage(s).config for s in range(3)]


def test_a_deploy_without_edges_has_nothing_to_run(tmp_path: Path) -> None:
    with pytest.raises(DeployError, match="nothing to run"):
        make_plans(deploy_of(tmp_path, "stages: [{stage_id: 0}]"), RunOptions())


@pytest.mark.parametrize("value", ["many", 0, True])
def test_codec_frames_must_be_a_number(value: Any) -> None:
    with pytest.raises(DeployError, match="codec_chunk_frames must be a whole number >= 1"):
        make_plans(load_deploy(SHIPPED), RunOptions(overrides={"codec_chunk_frames": value}))


def test_a_trace_must_fit_the_topology() -> None:
    deploy, one = load_deploy(SHIPPED), [[ChunkShape((), 0.5)]]
    plans = make_plans(deploy, RunOptions(trace={"0->1": one, "1->2": one}))
    assert {edge.kind for plan in plans for edge in plan.inputs} == {"trace"}
    with pytest.raises(DeployError, match="chunks on 5->6; edges of this file: 0->1, 1->2"):
        make_plans(deploy, RunOptions(trace={"5->6": one, "0->1": one, "1->2": one}))
    with pytest.raises(DeployError, match="no chunks on 1->2"):
        make_plans(deploy, RunOptions(trace={"0->1": one}))


def test_the_default_timeout_follows_the_traffic() -> None:
    assert default_timeout_s(RunOptions(chunks=100, gap_s=0.5)) == 160.0
    assert default_timeout_s(RunOptions(duration_s=30.0)) == 120.0
    trace = {"0->1": [[ChunkShape((), 2.0), ChunkShape((), None)]]}
    assert default_timeout_s(RunOptions(trace=trace, gap_s=1.0)) == 66.0


def test_with_overrides_adds_to_what_is_set() -> None:
    options = with_overrides(RunOptions(overrides={"a": 1}), {"b": 2})
    assert options.overrides == {"a": 1, "b": 2}


def test_two_runs_never_share_a_port_block() -> None:
    with PortBlock() as first, PortBlock() as second:
        assert abs(first.base - second.base) >= BLOCK


def test_all_within_reach_of_a_port_block_lies_below_the_ephemeral_range(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(free_ports, "_ephemeral_start", lambda: 22_100)
    for _ in range(20):
        with PortBlock(reach=2048) as block:
            assert block.base + 2048 <= 22_100
