"""The wire protocol: v1 byte for byte, v2 round trips and growth, every bound, and garbage of all kinds."""

from __future__ import annotations

import struct
import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mori_mp.shared import wire
from mori_mp.shared.errors import MoriMPError, WireError

INT_MAX = (1 << 63) - 1

HELLO = wire.Hello(
    7, wire.VERSION, "e0", 4242, "boot/ns", b"engine", b"memory", ["0_1", "0_2"], 1 << 20, True
)
PULL = wire.Pull(8, "req_0_0@0_1", 4096, 8192, False, "s0", 3)
AUDIT = wire.Audit(9, ["a@0_1", "b@0_1"])
SETTLE = wire.Settle([1, 2], [3], "s0")
ABANDON = wire.Abandon([8, 9])
REQUESTS = (HELLO, PULL, AUDIT, SETTLE, ABANDON)

NOTICES = (
    wire.Welcome(7, wire.VERSION, "s0", 1, 4711, "boot/ns", "shm", b"memory"),
    wire.Ready("req_0_0@0_1", 5, 3, True, memoryview(b"abc")),
    wire.Gone("req_0_0@0_1", 5, "expired"),
    wire.Done(8, "", "", 5, 4096, False, 12288),
    wire.Stranger(8),
)


# -- keys --------------------------------------------------------------------------------------------


def test_an_internal_key_ends_with_its_edge() -> None:
    key = wire.internal_key("user@host_0", "thinker", 1)
    assert key == "user@host_0@thinker_1"
    assert wire.edge_of(key) == wire.edge_name("thinker", 1) == "thinker_1"


def test_a_key_without_an_edge_has_none() -> None:
    assert wire.edge_of("req_0_0") == ""


# -- v1, byte for byte -------------------------------------------------------------------------------


def test_v1_query_bytes() -> None:
    payload = wire.encode_v1(wire.QueryRequest("k@0_1"))
    assert payload == b"query_info" + b"\x81" + b"\xaarequest_id" + b"\xa5k@0_1"
    assert wire.decode_request(payload) == wire.QueryRequest("k@0_1")


def test_v1_answer_bytes() -> None:
    payload = wire.encode_v1(wire.QueryResponse("k", 300, True))
    assert payload == b"\x83\xaarequest_id\xa1k\xa9data_size\xcd\x01\x2c\xacis_fast_path\xc3"
    assert wire.decode_query_response(payload) == wire.QueryResponse("k", 300, True)


def test_v1_pull_bytes() -> None:
    payload = wire.encode_v1(wire.PullRequest("k", b"E", b"MM", 4096, 5))
    assert payload == (
        b"\x85\xaarequest_id\xa1k\xb2engine_desc_packed\xc4\x01E\xafmem_desc_packed\xc4\x02MM"
        b"\xaadst_offset\xcd\x10\x00\xa6length\x05"
    )
    assert wire.decode_request(payload) == wire.PullRequest("k", b"E", b"MM", 4096, 5)


def test_v1_words() -> None:
    assert (wire.TRANS_DONE, wire.TRANS_ERROR, wire.INFO_NOT_FOUND, wire.QUERY_INFO) == (
        b"trans_done",
        b"trans_error",
        b"info_not_found",
        b"query_info",
    )


def test_v1_fields_that_we_do_not_know_are_ignored() -> None:
    fields = {"request_id": "k", "engine_desc_packed": b"E", "mem_desc_packed": b"M"}
    payload = msgspec.msgpack.encode({**fields, "dst_offset": 0, "length": 1, "priority": [1, {"x": None}]})
    assert wire.decode_request(payload) == wire.PullRequest("k", b"E", b"M", 0, 1)


def test_a_v1_sender_cannot_take_a_hello_for_a_request() -> None:
    """The in-tree class answers `trans_error` to what does not decode as a pull: that is how we know it."""
    hello = wire.encode(HELLO)
    assert not hello.startswith(wire.QUERY_INFO)
    with pytest.raises(msgspec.DecodeError):
        msgspec.msgpack.decode(hello, type=wire.PullRequest)


@pytest.mark.parametrize("size", [0, -1])
def test_an_answer_with_an_impossible_size_is_refused(size: int) -> None:
    with pytest.raises(WireError, match="claims"):
        wire.decode_query_response(wire.encode_v1(wire.QueryResponse("k", size, True)))


# -- v2 ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda r: type(r).__name__)
def test_requests_survive_the_wire(request_: wire.Request) -> None:
    payload = wire.encode(request_)
    assert payload.startswith(wire.MAGIC)
    assert wire.decode_request(payload) == request_
    assert wire.decode_request(memoryview(payload)) == request_


@pytest.mark.parametrize("notice", NOTICES, ids=lambda n: type(n).__name__)
def test_notices_survive_the_wire(notice: wire.Notice) -> None:
    assert wire.decode_notice(wire.encode(notice)) == notice


@pytest.mark.parametrize("message", [*REQUESTS, *NOTICES], ids=lambda m: type(m).__name__)
def test_a_newer_peer_may_send_more_fields(message: wire.Request | wire.Notice) -> None:
    payload = wire.encode(message)
    array = msgspec.msgpack.decode(payload[len(wire.MAGIC) :])
    longer = wire.MAGIC + msgspec.msgpack.encode([*array, "new", {"nested": [1, 2]}])
    decode: Any = wire.decode_request if message in REQUESTS else wire.decode_notice
    assert decode(longer) == message


@pytest.mark.parametrize(
    ("message", "defaults"),
    [
        (HELLO, {"lease": False, "device_engine_desc": b"", "device_mem_desc": b"", "posts": b""}),
        (PULL, {"epoch": "", "incarnation": 0, "device": False}),
        (SETTLE, {"epoch": ""}),
    ],
    ids=["hello", "pull", "settle"],
)
def test_an_older_peer_may_leave_out_the_optional_fields(
    message: wire.Request, defaults: dict[str, Any]
) -> None:
    array = msgspec.msgpack.decode(wire.encode(message)[len(wire.MAGIC) :])
    old = wire.decode_request(wire.MAGIC + msgspec.msgpack.encode(array[: -len(defaults)]))
    assert old == msgspec.structs.replace(message, **defaults)


@pytest.mark.parametrize("size", [0, -1, wire.MAX_PAYLOAD_BYTES + 1])
def test_a_notice_of_an_impossible_size_is_refused(size: int) -> None:
    with pytest.raises(WireError, match=f"{size} bytes"):
        wire.decode_notice(wire.encode(wire.Ready("k@0_1", 5, size, True, memoryview(b""))))


def test_a_sender_takes_no_notices_and_a_receiver_no_requests() -> None:
    with pytest.raises(WireError):
        wire.decode_request(wire.encode(NOTICES[0]))
    with pytest.raises(WireError):
        wire.decode_notice(wire.encode(HELLO))
    with pytest.raises(WireError, match="no v2 message"):
        wire.decode_notice(wire.TRANS_DONE)


# -- bounds ------------------------------------------------------------------------------------------


def changed(message: wire.Request, **fields: Any) -> bytes:
    return wire.encode(msgspec.structs.replace(message, **fields))


@pytest.mark.parametrize(
    "payload",
    [
        changed(HELLO, edges=["e"] * (wire.MAX_EDGES + 1)),
        changed(HELLO, edges=["e" * (wire.MAX_KEY_BYTES + 1)]),
        changed(HELLO, pid=-1),
        changed(HELLO, pid=wire.MAX_PID + 1),
        changed(HELLO, eager_credit=-1),
        changed(PULL, key="k" * (wire.MAX_KEY_BYTES + 1)),
        changed(PULL, key="ä" * (wire.MAX_KEY_BYTES // 2 + 1)),
        changed(PULL, dst_offset=-1),
        changed(PULL, length=-4096),
        changed(PULL, dst_offset=INT_MAX),
        changed(AUDIT, keys=["k"] * (wire.MAX_AUDIT_KEYS + 1)),
        changed(AUDIT, keys=["k" * (wire.MAX_KEY_BYTES + 1)]),
        changed(SETTLE, consumed=[1] * wire.MAX_SETTLED, released=[2]),
        changed(ABANDON, pulls=[1] * (wire.MAX_SETTLED + 1)),
        wire.encode_v1(wire.QueryRequest("k" * (wire.MAX_KEY_BYTES + 1))),
        wire.encode_v1(wire.PullRequest("k" * (wire.MAX_KEY_BYTES + 1), b"", b"", 0, 1)),
        wire.encode_v1(wire.PullRequest("k", b"", b"", -1, 1)),
        wire.encode_v1(wire.PullRequest("k", b"", b"", 0, INT_MAX)),
        wire.encode_v1(wire.PullRequest("k", b"x" * wire.MAX_REQUEST_BYTES, b"", 0, 1)),
    ],
)
def test_bounds_are_refused(payload: bytes) -> None:
    with pytest.raises(WireError):
        wire.decode_request(payload)


@pytest.mark.parametrize(
    "message",
    [
        msgspec.structs.replace(HELLO, edges=["e" * wire.MAX_KEY_BYTES] * 2, pid=wire.MAX_PID),
        msgspec.structs.replace(PULL, key="ä" * (wire.MAX_KEY_BYTES // 2)),
        msgspec.structs.replace(PULL, key="k" * wire.MAX_KEY_BYTES),
        msgspec.structs.replace(AUDIT, keys=["k" * wire.MAX_KEY_BYTES] * wire.MAX_AUDIT_KEYS),
        msgspec.structs.replace(SETTLE, consumed=[INT_MAX] * wire.MAX_SETTLED, released=[]),
    ],
    ids=["hello", "wide key", "long key", "audit", "settle"],
)
def test_what_is_just_within_bounds_fits_a_request(message: wire.Request) -> None:
    payload = wire.encode(message)
    assert len(payload) <= wire.MAX_REQUEST_BYTES
    assert wire.decode_request(payload) == message


def test_the_largest_eager_notice_fits() -> None:
    data = memoryview(bytes(wire.MAX_EAGER_BYTES))
    ready = wire.Ready("k" * wire.MAX_KEY_BYTES, INT_MAX, len(data), True, data)
    assert len(wire.encode(ready)) <= wire.MAX_NOTICE_BYTES


# -- garbage -----------------------------------------------------------------------------------------

VALID = [wire.encode(m) for m in (*REQUESTS, *NOTICES)] + [
    wire.encode_v1(wire.QueryRequest("k@0_1")),
    wire.encode_v1(wire.PullRequest("k@0_1", b"engine", b"memory", 4096, 5)),
    wire.encode_v1(wire.QueryResponse("k", 300, True)),
]
NESTED = b"\x91" * 60_000 + b"\xc0"


def decodes_or_raises(payload: bytes) -> None:
    """Each decoder returns one of its messages or raises WireError, and nothing else."""
    for decode, types in (
        (wire.decode_request, (*map(type, REQUESTS), wire.QueryRequest, wire.PullRequest)),
        (wire.decode_notice, tuple(map(type, NOTICES))),
        (wire.decode_query_response, (wire.QueryResponse,)),
    ):
        try:
            message = decode(payload)  # type: ignore[operator]
        except WireError:
            continue
        assert isinstance(message, types)


@given(st.binary(max_size=64))
@settings(max_examples=150, deadline=None)
def test_random_bytes_decode_or_raise_wire_error(junk: bytes) -> None:
    for prefix in (b"", wire.MAGIC, wire.QUERY_INFO):
        decodes_or_raises(prefix + junk)


@given(st.sampled_from(VALID), st.data())
@settings(max_examples=250, deadline=None)
def test_damaged_messages_decode_or_raise_wire_error(payload: bytes, data: st.DataObject) -> None:
    damaged = bytearray(payload)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        match data.draw(st.sampled_from(["set", "cut", "insert"])):
            case "set":
                damaged[at] = data.draw(st.integers(0, 255))
            case "cut":
                del damaged[at : at + data.draw(st.integers(1, 4))]
            case _:
                damaged[at:at] = data.draw(st.binary(min_size=1, max_size=4))
        if not damaged:
            break
    decodes_or_raises(bytes(damaged))


JSONISH = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(st.sampled_from(["hello", "pull", "audit", "settle", "ready", "done"]), st.lists(JSONISH, max_size=12))
@settings(max_examples=150, deadline=None)
def test_fields_of_any_type_decode_or_raise_wire_error(tag: str, fields: list[Any]) -> None:
    decodes_or_raises(wire.MAGIC + msgspec.msgpack.encode([tag, *fields]))


@pytest.mark.parametrize("payload", [b"", b"m", wire.MAGIC, wire.QUERY_INFO, b"\xc1", b"\x00" * 64])
def test_stubs_are_refused(payload: bytes) -> None:
    for decode in (wire.decode_request, wire.decode_notice, wire.decode_query_response):
        with pytest.raises(WireError):
            decode(payload)


@pytest.mark.parametrize("valid", VALID, ids=range(len(VALID)))
def test_deep_nesting_is_refused_or_skipped(valid: bytes) -> None:
    """Unknown fields at the end are skipped by the decoder, which must not run out of stack over them."""
    head = len(wire.MAGIC) if valid.startswith(wire.MAGIC) else None
    payloads = [wire.MAGIC + NESTED, wire.QUERY_INFO + NESTED, NESTED]
    if head is not None:
        payloads.append(valid[:head] + bytes([valid[head] + 1]) + valid[head + 1 :] + NESTED)
    for payload in payloads:
        decodes_or_raises(payload)


@pytest.mark.parametrize("count", [0xFFFFFFFF, 20_000_000])
@pytest.mark.parametrize(
    "head",
    [
        wire.MAGIC + b"\x93\xa5audit\x01\xdd",
        wire.MAGIC + b"\x93\xa5audit\x01\x91\xdb",
        wire.MAGIC + b"\x93\xa6settle\xdd",
        wire.MAGIC + b"\xdd",
        wire.MAGIC + b"\x96\xa5ready\xa1k\x01\x01\xc3\xc6",
        wire.QUERY_INFO + b"\xdf",
        b"\xdf",
        b"\x81\xaarequest_id\xdb",
    ],
)
def test_a_length_that_is_a_lie_allocates_nothing(head: bytes, count: int) -> None:
    payload = head + struct.pack(">I", count)
    tracemalloc.start()
    try:
        decodes_or_raises(payload)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


def test_wire_errors_are_ours() -> None:
    assert issubclass(WireError, MoriMPError)
