"""Configuration: spellings accepted and refused, messages, environment, listener endpoint, documentation."""

from __future__ import annotations

import copy
import logging
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from mori_mp import config_keys
from mori_mp.config import ConnectorConfig, Outgoing, describe, markdown_table
from mori_mp.shared.errors import ConfigError, MoriMPError

README = Path(__file__).resolve().parents[1] / "README.md"
BEGIN, END = "<!-- config-table:begin -->", "<!-- config-table:end -->"

# What the extra of a connector holds in vllm-omni's deploy files beside our keys, what its other connectors
# and stage processors read from a connector's configuration, and what its loader and KV manager put beside.
FOREIGN_KEYS = re.findall(
    r"\w+",
    """
    _stage_id RDMA_DEVICE_NAME agent_name attention_type audio8_tts_codec_dtype
    audiocodec_token_offset audiocodec_vocab_size backends cfg_role cfm_graph_bucket_frames
    cfm_max_graphs code_predictor_prefix_graph_buckets code_predictor_prefix_graph_seq_lens
    code_predictor_prefix_graphs codes codec_chunk_frames codec_chunk_frames_at_begin
    codec_chunk_ramp codec_left_context_frames codec_right_holdback_frames codec_streaming
    codec_token_offset codec_vocab_size connector_act connector_config connector_get_max_wait
    connector_get_max_wait_first_chunk connector_get_sleep_s connector_norm connectors crossfade_sec
    decode_batch_max_size decode_cudagraph_batch_sizes decode_cudagraph_capture_sizes
    decode_enable_tf32 decoder_emit_chunk_frames device devices edges enable_cfm_graph
    enable_hift_graph enable_kv_async_prefetch engine_input_source extra
    fish_speech_backlog_codec_chunk_frames fish_speech_backlog_load_threshold fish_speech_dac_dtype
    fish_speech_dac_max_batch fish_speech_dac_max_padded_frames fish_speech_single_initial_chunk
    fish_speech_tensor_codes from_stage_0 from_stage_1 get_sub_timeout_ms handshake_max_wait_s
    handshake_retry_s handshake_timeout_ms initial_codec_chunk_frames initial_latent_chunk_size
    input_connectors kv_connector kv_prefetch_min_free_mem_ratio kv_role latent_chunk_size
    latent_left_context lease_seconds localbuf master max_position_embeddings memory_type
    metadata_query_timeout_ms metadata_server model_stage model_type mooncake_protocol name
    native_talker need_recv_cache need_send_cache nnodes num_threads omni_connector_config
    omni_from_stage omni_to_stage output_connectors poll_interval_s port proto protocol rank
    rank_mapping rdma receive_device recv_timeout ref_audio_artifact_cache_max_entries
    ref_code_context_frames rpc_port runtime segment source_host source_port spec stages
    tensor_indices to_stage_1 to_stage_2 transfer_timeout transfer_timeout_s type voice_name worker
    worker_cls
    """,
)


def read(**keys: Any) -> ConnectorConfig:
    return ConnectorConfig.from_dict(keys)


def refusal(**keys: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        ConnectorConfig.from_dict(keys)
    return str(caught.value)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MORI_RDMA_DEVICES", raising=False)
    config_keys.warn_once.cache_clear()


# ---- defaults and the dict that is read


def test_empty_configuration_is_the_seeds_defaults() -> None:
    config = ConnectorConfig.from_dict({})
    assert config == ConnectorConfig()
    assert (config.host, config.zmq_port, config.role) == ("127.0.0.1", 50051, "sender")
    assert (config.memory_pool_size, config.memory_pool_device) == (1 << 30, "cpu")
    assert (config.xgmi_num_streams, config.xgmi_num_events) == (64, 64)
    assert (config.qp_per_transfer, config.num_worker_threads, config.post_batch_size) == (1, 1, -1)
    assert (config.sender_host, config.sender_zmq_port, config.stage_id) == (None, None, -1)
    assert config.buffer_ttl_seconds == 300


def test_defaults_pass_the_checks_that_given_values_must_pass() -> None:
    stated = {doc.name: doc.default for doc in describe() if "." not in doc.name and doc.default is not None}
    assert ConnectorConfig.from_dict(stated) == ConnectorConfig()


def test_null_means_not_given() -> None:
    names = [doc.name for doc in describe() if "." not in doc.name]
    assert ConnectorConfig.from_dict(dict.fromkeys(names)) == ConnectorConfig()


def test_the_dict_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_PORT", "6000")
    given_keys = {
        "outgoing": {"zmq_port": "$A_PORT", "host": " x "},
        "zmq_port": "7",
        "codec_chunk_frames": 25,
    }
    before = copy.deepcopy(given_keys)
    ConnectorConfig.from_dict(given_keys)
    assert given_keys == before


@pytest.mark.parametrize("value", [None, [], "host: x", 5])
def test_not_a_mapping(value: Any) -> None:
    with pytest.raises(ConfigError, match="must be a mapping"):
        ConnectorConfig.from_dict(value)


def test_frozen_and_survives_msgpack() -> None:
    config = read(outgoing={"zmq_port": 1}, role="receiver", numa_node=1)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=ConnectorConfig) == config
    with pytest.raises(AttributeError):
        config.zmq_port = 1  # type: ignore[misc]


# ---- spellings


@pytest.mark.parametrize(
    ("key", "given_value", "value"),
    [
        ("zmq_port", 0, 0),
        ("zmq_port", " 50051 ", 50051),
        ("zmq_port", 6e3, 6000),
        ("memory_pool_size", 5e8, 500_000_000),
        ("memory_pool_size", "4096", 4096),
        ("memory_pool_size", "512MiB", 512 << 20),
        ("memory_pool_size", "1GB", 10**9),
        ("memory_pool_size", "512M", 512 << 20),
        ("memory_pool_size", "1 g", 1 << 30),
        ("memory_pool_size", "0.5T", 1 << 39),
        ("eager_bytes", "64k", 65536),
        ("memory_pool_size", "1.5 gib", 3 << 29),
        ("memory_pool_size", "8192b", 8192),
        ("eager_bytes", "64KiB", 65536),
        ("eager_bytes", 0, 0),
        ("memory_pool_device", "CUDA:1", "cuda:1"),
        ("backend_type", "RDMA", "rdma"),
        ("role", "auto", "sender"),
        ("role", "Receiver", "receiver"),
        ("post_batch_size", "-1", -1),
        ("host", "", ""),
        ("host", "::", "::"),
        ("host", "auto", "auto"),
        ("device_name", "auto", ""),
        ("device_name", "mlx5_0,mlx5_1", "mlx5_0,mlx5_1"),
        ("buffer_ttl_seconds", 5, 5.0),
        ("buffer_ttl_seconds", "0.25", 0.25),
        ("park_seconds", 0, 0.0),
        ("prefault", "False", False),
        ("prefault", "1", True),
        ("prefault", 0, False),
        ("control_cpus", 31, "31"),
        ("control_cpus", " 0-3, 8 ", "0-3,8"),
        ("worker_cpus", "31 | 28-29", "31|28-29"),
        ("pin", False, "off"),
        ("pin", "FORCE", "force"),
        ("pin", "plan.json", "plan.json"),
        ("pin", "/etc/Plan", "/etc/Plan"),
        ("log_level", "debug", "DEBUG"),
        ("stage_id", "2", 2),
    ],
)
def test_accepted(key: str, given_value: Any, value: Any) -> None:
    got = getattr(ConnectorConfig.from_dict({key: given_value}), key)
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("zmq_port", 65536, "0..65535"),
        ("zmq_port", -1, "0..65535"),
        ("zmq_port", True, "0..65535"),
        ("zmq_port", "1e3", "a whole number"),
        ("zmq_port", "5.0", "a whole number"),
        ("zmq_port", 5.5, "a whole number"),
        ("zmq_port", float("inf"), "a whole number"),
        ("zmq_port", "9" * 5000, "a whole number"),
        ("zmq_port", [50051], "a whole number"),
        ("zmq_port", "", "a whole number"),
        ("sender_zmq_port", 0, "1..65535"),
        ("sender_zmq_port", "null", "1..65535"),
        ("memory_pool_size", 4095, "4096..2^50"),
        ("memory_pool_size", 10**40, "4096..2^50"),
        ("memory_pool_size", "1e9", "512MiB"),
        ("memory_pool_size", "512X", "512MiB"),
        ("memory_pool_size", "512Mi", "512MiB"),
        ("memory_pool_size", "0.0001KB", "512MiB"),
        ("memory_pool_size", "-1GB", "512MiB"),
        ("memory_pool_size", True, "512MiB"),
        ("host_pool_size", 4095, "4096..2^50"),
        ("host_pool_size", (1 << 50) + 1, "4096..2^50"),
        ("chunk_bytes", (1 << 40) + 1, "4096..2^40"),
        ("eager_bytes", "2MiB", "0..1048576"),
        ("memory_pool_device", "gpu", "`cpu`, `cuda` or `cuda:N`"),
        ("memory_pool_device", "cuda:", "`cpu`, `cuda` or `cuda:N`"),
        ("memory_pool_device", "cuda:1\n2", "`cpu`, `cuda` or `cuda:N`"),
        ("backend_type", "tcp", "`xgmi`"),
        ("backend_type", 1, "`xgmi`"),
        ("role", "both", "`dual`"),
        ("xgmi_num_streams", 0, "1..4096"),
        ("post_batch_size", 0, "-1, or 1..1048576"),
        ("post_batch_size", -2, "-1, or 1..1048576"),
        ("host", 127, "a host name"),
        ("host", "tcp://10.0.0.1", "a host name"),
        ("stage_id", -2, "-1 or more"),
        ("outgoing", "host", "a mapping"),
        ("num_transfer_workers", 65, "1..64"),
        ("buffer_ttl_seconds", 0, "above 0"),
        ("buffer_ttl_seconds", "nan", "above 0"),
        ("buffer_ttl_seconds", float("inf"), "at most"),
        ("park_seconds", float("nan"), "0..31536000"),
        ("park_seconds", True, "0..31536000"),
        ("prefault", "yes", "`true`, `false`"),
        ("prefault", 2, "`true`, `false`"),
        ("control_cpus", "3-1", "a kernel cpulist"),
        ("control_cpus", "0,,1", "a kernel cpulist"),
        ("control_cpus", "1 2", "a kernel cpulist"),
        ("control_cpus", "0-999999", "a kernel cpulist"),
        ("control_cpus", "1|2", "a kernel cpulist"),
        ("control_cpus", True, "a kernel cpulist"),
        ("worker_cpus", "31|", "kernel cpulists"),
        ("worker_cpus", [31, 29], "kernel cpulists"),
        ("numa_node", -2, "-1..1023"),
        ("pin", "atuo", "`force`"),
        ("pin", True, "`force`"),
        ("log_level", "LOUD", "`INFO`"),
        ("health_dump_path", "/d/{stage}-{host}.json", "`{stage}`"),
        ("trace_path", "{}.json", "`{stage}`"),
    ],
)
def test_refused_naming_key_value_and_what_is_allowed(key: str, value: Any, allowed: str) -> None:
    head, line = refusal(**{key: value}).split(" has a problem: ")
    assert head == "the connector's configuration"
    assert line.startswith(key)
    assert repr(value)[:100] in line
    assert allowed in line


def test_all_problems_at_once_one_line_each() -> None:
    message = refusal(zmq_port=70000, role="both", post_batch_size=0, outgoing={"host": 3}, control_cpus="x")
    first, *lines = message.splitlines()
    assert "6 problems" in first
    assert sorted(line.split(":")[0].strip() for line in lines) == [
        "control_cpus",
        "outgoing.host",
        "outgoing.zmq_port",
        "post_batch_size=0",
        "role",
        "zmq_port",
    ]


def test_error_is_ours_a_value_error_and_crosses_process_borders() -> None:
    with pytest.raises(ConfigError) as caught:
        read(zmq_port=-1)
    assert isinstance(caught.value, MoriMPError)
    assert isinstance(caught.value, ValueError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


TEXT = st.text("$A{}0159-,|. eEkMiGB/:\n", max_size=6) | st.sampled_from(
    ["cuda", "thread", "auto", "shm", "512MiB"]
)
SCALAR = (
    st.none()
    | st.booleans()
    | st.integers(-2, 70000)
    | st.integers()
    | st.floats()
    | TEXT
    | st.binary(max_size=2)
)
VALUE = SCALAR | st.lists(SCALAR, max_size=2) | st.dictionaries(st.sampled_from(["zmq_port", "host"]), SCALAR)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from([doc.name for doc in describe()]), VALUE, max_size=4))
def test_whatever_is_given_the_answer_is_a_config_or_a_config_error(keys: dict[str, Any]) -> None:
    try:
        config = ConnectorConfig.from_dict(keys)
    except ConfigError:
        return
    # What was accepted is in bounds by msgspec's own count too, and reads back as itself.
    plain = msgspec.to_builtins(config)
    assert msgspec.convert(plain, ConnectorConfig) == config
    assert ConnectorConfig.from_dict(plain) == config


# ---- environment


def test_variables_are_expanded_at_any_key(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"T_NET": "10.0", "T_PORT": "6001", "T_SIZE": "2MiB", "T_EMPTY": ""}.items():
        monkeypatch.setenv(name, value)
    config = read(
        host="${T_NET}.0.7",
        zmq_port="$T_PORT",
        memory_pool_size="$T_SIZE",
        prefault="0",
        worker_python="$T_EMPTY",
        outgoing={"host": "$T_NET.0.8", "zmq_port": "${T_PORT}"},
    )
    assert (config.host, config.zmq_port, config.memory_pool_size) == ("10.0.0.7", 6001, 2 << 20)
    assert config.worker_python == ""
    assert config.outgoing == Outgoing(host="10.0.0.8", zmq_port=6001)


def test_unset_variable_names_key_variable_and_original(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("T_UNSET", raising=False)
    message = refusal(host="${T_UNSET}.x", outgoing={"zmq_port": "$T_UNSET"})
    assert "2 problems" in message
    for words in ("host: got '${T_UNSET}.x'", "outgoing.zmq_port: got '$T_UNSET'", "not set T_UNSET"):
        assert words in message


def test_bad_value_of_a_variable_shows_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("T_PORT", "many")
    assert "zmq_port: got 'many' (from '$T_PORT')" in refusal(zmq_port="$T_PORT")


def test_foreign_keys_may_hold_unset_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("T_UNSET", raising=False)
    assert read(codec_note="$T_UNSET", cost="5$ each") == ConnectorConfig()


def test_device_name_falls_back_to_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MORI_RDMA_DEVICES", "mlx5_9")
    assert read(backend_type="rdma").device_name == "mlx5_9"
    assert read(device_name="auto").device_name == "mlx5_9"
    assert read(device_name="mlx5_0").device_name == "mlx5_0"
    assert read(backend_type="xgmi", memory_pool_device="cuda").device_name == ""


def test_reading_leaves_the_environment_alone() -> None:
    before = dict(os.environ)
    read(device_name="mlx5_0", backend_type="rdma")
    assert dict(os.environ) == before


# ---- rules over several keys


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"backend_type": "xgmi"}, "GPU-to-GPU fabric"),
        ({"backend_type": "XGMI", "memory_pool_device": "cpu"}, "memory_pool_device: cuda"),
        ({"backend_type": "cuda_ipc"}, "memory_pool_device: cuda"),
        ({"backend_type": "shm", "memory_pool_device": "cuda:0"}, "memory_pool_device: cpu"),
        ({"worker_cpus": "1|2|3"}, "one cpulist for all workers"),
        ({"worker_mode": "thread", "worker_python": "/usr/bin/python3.12"}, "worker_mode: process"),
        ({"health_dump_interval_seconds": 5}, "health_dump_path"),
    ],
)
def test_keys_that_do_not_go_together(keys: dict[str, Any], words: str) -> None:
    message = refusal(**keys)
    assert words in message
    assert all(key in message for key in keys)


@pytest.mark.parametrize(
    "keys",
    [
        {"backend_type": "xgmi", "memory_pool_device": "cuda"},
        {"backend_type": "cuda_ipc", "memory_pool_device": "cuda:3"},
        {"backend_type": "shm"},
        {"backend_type": "rdma"},
        {"memory_pool_device": "cuda"},
        {"worker_cpus": "1|2|3", "num_transfer_workers": 3},
        {"worker_cpus": "1-3", "num_transfer_workers": 3},
        {"health_dump_interval_seconds": 5, "health_dump_path": "h.json"},
    ],
)
def test_keys_that_go_together(keys: dict[str, Any]) -> None:
    config = ConnectorConfig.from_dict(keys)
    assert all(getattr(config, key) == value for key, value in keys.items())


def test_a_refused_key_is_not_refused_twice() -> None:
    message = refusal(backend_type="xgmi", memory_pool_device="gpu")
    assert "a problem" in message
    assert "GPU-to-GPU" not in message


def test_device_name_without_a_nic_is_ignored_aloud(caplog: pytest.LogCaptureFixture) -> None:
    config = read(backend_type="xgmi", memory_pool_device="cuda", device_name="mlx5_0")
    assert config.device_name == ""
    assert ["mlx5_0" in text and "ignored" in text for text in caplog.messages] == [True]
    caplog.clear()
    read(backend_type="xgmi", memory_pool_device="cuda", device_name="auto")
    assert caplog.messages == []


# ---- role and listener


SENDER_KEYS = {"sender_host": "10.0.0.1", "sender_zmq_port": 6000}


def test_dual_is_inferred_only_without_a_role() -> None:
    assert read(zmq_port=6001, **SENDER_KEYS).role == "dual"
    assert read(**SENDER_KEYS).role == "sender"
    assert read(zmq_port=6001, sender_host="10.0.0.1").role == "sender"
    assert read(zmq_port=6001, role="sender", **SENDER_KEYS).role == "sender"
    assert read(zmq_port=6001, role="auto", **SENDER_KEYS).role == "sender"
    assert read(zmq_port=6001, role="receiver", **SENDER_KEYS).role == "receiver"
    assert read(role="dual").role == "dual"


def receiver(**keys: Any) -> ConnectorConfig:
    """What the host makes of a middle stage: no zmq_port, the upstream's endpoint, the incoming edge."""
    base = {"role": "receiver", "host": "auto", "sender_host": "auto", "sender_zmq_port": 51075 + 16}
    return ConnectorConfig.from_dict({**base, "from_stage": 0, "to_stage": 1, "stage_id": 1, **keys})


@pytest.mark.parametrize(
    ("config", "endpoint"),
    [
        (read(host="10.0.0.2", zmq_port=6001), ("10.0.0.2", 6001)),
        (read(role="dual", zmq_port=0, **SENDER_KEYS), ("127.0.0.1", 0)),
        (receiver(), ("auto", 51075 + 16 + 1)),
        (receiver(from_stage=1, to_stage=3, stage_id=3), ("auto", 51075 + 16 + 2)),
        (receiver(outgoing={"zmq_port": 7000}), ("auto", 7000)),
        (receiver(outgoing={"zmq_port": 7000, "host": "10.0.0.3", "from_stage": 1}), ("10.0.0.3", 7000)),
        # Stages that share one extra: an entry made for another stage is not ours.
        (receiver(outgoing={"zmq_port": 7000, "from_stage": 2}), ("auto", 51075 + 16 + 1)),
        (read(stage_id=0, outgoing={"zmq_port": 7000, "from_stage": 1}), ("127.0.0.1", 50051)),
        (read(outgoing={"zmq_port": 7000}), ("127.0.0.1", 7000)),
    ],
)
def test_listener_endpoint(config: ConnectorConfig, endpoint: tuple[str, int]) -> None:
    assert config.listener_endpoint() == endpoint
    assert config.no_listener_reason() == ""


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"sender_zmq_port": None}, "which are None, 0 and 1"),
        ({"from_stage": None}, "from_stage"),
        ({"stage_id": -1}, "and -1"),
        ({"stage_id": 0}, "both 0"),
        ({"sender_zmq_port": 65535}, "is 65536"),
        ({"from_stage": 9, "sender_zmq_port": 5}, "is -3"),
    ],
)
def test_no_listener_says_why(keys: dict[str, Any], words: str) -> None:
    config = receiver(**keys)
    assert config.listener_endpoint() is None
    assert words in config.no_listener_reason()
    assert "outgoing" in config.no_listener_reason()


def test_half_a_sender_endpoint_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    read(role="receiver", sender_host="10.0.0.2", sender_zmq_port=50051)
    read(role="sender", sender_host="10.0.0.2")
    assert caplog.messages == []
    read(role="receiver", sender_host="10.0.0.2")
    (text,) = caplog.messages
    assert "sender_zmq_port" in text


# ---- keys that are not ours


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("memory_pool_sze", "memory_pool_size"),
        ("zmqport", "zmq_port"),
        ("zmq-port", "zmq_port"),
        ("ZMQ_PORT", "zmq_port"),
        ("memoryPoolDevice", "memory_pool_device"),
        ("backend_typ", "backend_type"),
        ("num_transfer_worker", "num_transfer_workers"),
        ("buffer_ttl_second", "buffer_ttl_seconds"),
        ("sender_port", "sender_zmq_port"),
        ("pool_size", "memory_pool_size"),
        ("workers", "num_transfer_workers"),
        ("num_workers", "num_transfer_workers"),
        ("backend", "backend_type"),
    ],
)
def test_a_near_miss_is_warned_about_once(key: str, meant: str, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        ConnectorConfig.from_dict({key: 1})
    assert [(r.levelno, repr(key) in r.message, repr(meant) in r.message) for r in caplog.records] == [
        (logging.WARNING, True, True)
    ]


def test_near_miss_inside_outgoing(caplog: pytest.LogCaptureFixture) -> None:
    read(outgoing={"zmq_port": 1, "form_stage": 1})
    assert ["'outgoing.from_stage'" in text for text in caplog.messages] == [True]


def test_the_unknown_key_in_place_of_a_required_one_is_named() -> None:
    text = refusal(outgoing={"port": 1})
    assert "outgoing.zmq_port: missing, and 'port' is not a key of outgoing" in text


@pytest.mark.parametrize("key", FOREIGN_KEYS)
def test_foreign_keys_are_kept_silently(key: str, caplog: pytest.LogCaptureFixture) -> None:
    assert ConnectorConfig.from_dict({key: 1, 7: "not text"}) == ConnectorConfig()  # type: ignore[dict-item]
    assert ConnectorConfig.from_dict({"outgoing": {"zmq_port": 1, key: 1}}).outgoing == Outgoing(zmq_port=1)
    assert caplog.messages == []


def test_the_shipped_deploy_file_of_the_seed_reads(caplog: pytest.LogCaptureFixture) -> None:
    extra = yaml.safe_load(
        """
        host: auto
        zmq_port: 50051
        backend_type: xgmi
        xgmi_num_streams: 64
        xgmi_num_events: 64
        device_name: ""
        memory_pool_size: 1073741824
        memory_pool_device: cuda
        codec_chunk_frames: 25
        codec_left_context_frames: 25
        connector_get_sleep_s: 0.01
        pin: off
        control_cpus: 31
        """
    )
    config = ConnectorConfig.from_dict(extra)
    assert (config.host, config.backend_type, config.memory_pool_device) == ("auto", "xgmi", "cuda")
    assert (config.pin, config.control_cpus) == ("off", "31")
    assert caplog.messages == []


# ---- documentation


def test_every_field_is_described() -> None:
    names = [doc.name for doc in describe()]
    own = [name for name in names if "." not in name]
    assert own == list(ConnectorConfig.__struct_fields__)
    assert [name for name in names if "." in name] == [f"outgoing.{n}" for n in Outgoing.__struct_fields__]
    for doc in describe():
        assert doc.meaning.endswith("."), doc.name
        assert doc.allowed, doc.name
        assert doc.type in {"int", "float", "bool", "str", "mapping"}, doc.name
        assert doc.unit == "seconds" or not doc.name.endswith("_seconds"), doc.name


def test_described_defaults_are_the_structs() -> None:
    defaults = {doc.name: doc.default for doc in describe() if "." not in doc.name}
    assert defaults == msgspec.structs.asdict(ConnectorConfig())


def test_a_field_without_a_description_is_an_error() -> None:
    class Bare(msgspec.Struct):
        port: int = 1

    with pytest.raises(TypeError, match="port carries no key"):
        config_keys.fields_of(Bare)


def test_markdown_table_has_a_row_for_each_key_and_no_stray_columns() -> None:
    rows = markdown_table().splitlines()
    assert len(rows) == 2 + len(describe())
    assert {row.replace("\\|", "").count("|") for row in rows} == {7}
    assert r"31\|29" in markdown_table()


def test_readme_table_is_current() -> None:
    text = README.read_text(encoding="utf-8")
    if BEGIN not in text and END not in text:
        headings = [line for line in text.splitlines() if line.startswith("#") and "Configuration" in line]
        assert headings == [], f"README has {headings} but no table between {BEGIN} and {END}"
        return
    assert text.count(BEGIN) == text.count(END) == 1
    table = text.split(BEGIN)[1].split(END)[0].strip()
    remake = "python -c 'from mori_mp.config import markdown_table as t; print(t())'"
    assert table == markdown_table(), f"README's configuration table is stale; make it anew: {remake}"


def test_importing_it_does_not_import_torch() -> None:
    code = "import sys, mori_mp.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
