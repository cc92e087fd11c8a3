"""The wire protocol between connectors: v1 (vllm-omni's in-tree class, byte for byte) and v2 on top.

Transport: the sender's control process binds a ZMQ ROUTER on tcp://host:zmq_port; receivers connect a REQ
(v1) or a DEALER (v2). docs/protocol.md has the sequences and the grammar.

v1, one request at a time per socket, no correlation:

    receiver -> sender   [identity] [b""] [payload]
        payload = b"query_info" msgpack{request_id}
                | msgpack{request_id, engine_desc_packed, mem_desc_packed, dst_offset, length}
    sender -> receiver   [identity] [b""] [reply]
        reply   = b"info_not_found" | msgpack{request_id, data_size, is_fast_path}     to a query
                | b"trans_done" | b"trans_error"                                       to a pull

v2, any number of requests under way, each with a correlation id chosen by the receiver:

    receiver -> sender   [identity] [b"mmp2" msgpack[tag, fields...]]     Hello Pull Audit Settle Abandon
    sender -> receiver   [identity] [b"mmp2" msgpack[tag, fields...]]     Welcome Ready Gone Done Stranger

A v1 sender answers a v2 Hello with b"trans_error" (an undecodable pull), which is how it is recognised.
A v2 sender recognises a v1 request by the missing b"mmp2". Fields are only ever added at the end of a v2
array, with a default, so that either side may be newer. There is no pickle anywhere, and every message is
bounded: MAX_REQUEST_BYTES towards a sender, MAX_NOTICE_BYTES towards a receiver.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from mori_mp.shared.errors import WireError

VERSION = 2
MAGIC = b"mmp2"
MAX_KEY_BYTES = 1024
MAX_REQUEST_BYTES = 64 << 10
MAX_EAGER_BYTES = 1 << 20
MAX_NOTICE_BYTES = MAX_EAGER_BYTES + (16 << 10)
MAX_AUDIT_KEYS = 32
MAX_SETTLED = 4096
MAX_EDGES = 64
MAX_PAYLOAD_BYTES = 1 << 48
MAX_PID = 1 << 22  # PID_MAX_LIMIT of the kernel

TRANS_DONE = b"trans_done"
TRANS_ERROR = b"trans_error"
QUERY_INFO = b"query_info"
INFO_NOT_FOUND = b"info_not_found"


def internal_key(key: str, from_stage: object, to_stage: object) -> str:
    """Name a payload on one edge: `{key}@{from_stage}_{to_stage}`."""
    return f"{key}@{from_stage}_{to_stage}"


def edge_name(from_stage: object, to_stage: object) -> str:
    """Name an edge: `{from_stage}_{to_stage}`; the part of an internal key after its last `@`."""
    return f"{from_stage}_{to_stage}"


def edge_of(key: str) -> str:
    """Return the edge name of an internal key, "" if it has none."""
    return key.rpartition("@")[2] if "@" in key else ""


# ------------------------------------------------------------------------------------- v1
class QueryRequest(msgspec.Struct):
    """Receiver -> sender: is this payload there?"""

    request_id: str


class QueryResponse(msgspec.Struct):
    """Sender -> receiver: size in bytes of a payload that is there."""

    request_id: str
    data_size: int
    is_fast_path: bool


class PullRequest(msgspec.Struct):
    """Receiver -> sender: write a payload of length bytes at dst_offset of the described memory."""

    request_id: str
    engine_desc_packed: bytes
    mem_desc_packed: bytes
    dst_offset: int
    length: int


# ------------------------------------------------------------ v2, receiver -> sender
class Hello(msgspec.Struct, array_like=True, tag="hello"):
    """Open or renew a session: who the receiver is, where it takes landing writes, what it subscribes to.

    epoch names the receiver's incarnation; pid and host_id (boot id and pid namespace) let a sender on the
    same host lend memory and watch the holder; eager_credit is how many payload bytes may be under way
    inside Ready notices. The device descriptors are those of its GPU pool, empty when it has none; posts
    describes the slots of it that this sender may push into (shared.posts).
    """

    corr: int
    version: int
    epoch: str
    pid: int
    host_id: str
    engine_desc: bytes
    mem_desc: bytes
    edges: list[str]
    eager_credit: int
    lease: bool = False
    device_engine_desc: bytes = b""
    device_mem_desc: bytes = b""
    posts: bytes = b""


class Pull(msgspec.Struct, array_like=True, tag="pull"):
    """Ask for a payload: landed at dst_offset (length must be right), or lent (lease=True).

    device: dst_offset is one of the receiver's GPU pool. A payload that lies in the other kind of memory is
    answered with ELSEWHERE.
    epoch and incarnation name the process it is meant for, as its Welcome did; any other answers Stranger.
    So no successor can serve a pull that was given up when its addressee died. "" and 0: whoever gets it.
    """

    corr: int
    key: str
    length: int
    dst_offset: int
    lease: bool
    epoch: str = ""
    incarnation: int = 0
    device: bool = False


class Audit(msgspec.Struct, array_like=True, tag="audit"):
    """Ask again for keys that a receiver waits for: notices are a cache, the sender's ledger decides."""

    corr: int
    keys: list[str]


class Settle(msgspec.Struct, array_like=True, tag="settle"):
    """Tell which generations were taken from eager notices and which leases have ended.

    epoch names the stage that counts these generations; any other ignores them. "": whoever gets it.
    """

    consumed: list[int]
    released: list[int]
    epoch: str = ""


class Abandon(msgspec.Struct, array_like=True, tag="abandon"):
    """Give up unanswered pulls, by correlation id.

    Each is answered by Done as soon as no write of it can be under way: when its write ends, else at once,
    with NOT_FOUND if it was parked and with LOST if it is not known (its Done has been sent already).
    """

    pulls: list[int]


Request: TypeAlias = Hello | Pull | Audit | Settle | Abandon


# ------------------------------------------------------------ v2, sender -> receiver
class Welcome(msgspec.Struct, array_like=True, tag="welcome"):
    """Session open. epoch names the sending stage's incarnation (generations are unique within it),
    incarnation counts its control processes, process_group holds all processes that may still write.

    mem_desc describes the sender's pool for offers and leases, empty when it does not lend; device_desc its
    GPU pool and events, for offers. lane is the path of its Unix socket, for receivers on its host (see
    shared.lane). pushes: it fills posted slots.
    """

    corr: int
    version: int
    epoch: str
    incarnation: int
    process_group: int
    host_id: str
    engine: str
    mem_desc: bytes
    lane: str = ""
    device_desc: bytes = b""
    pushes: bool = False


class Ready(msgspec.Struct, array_like=True, tag="ready"):
    """A payload is there; data holds it whole if it travels eagerly, else it is empty.

    offset, if not negative, offers it for reading in place at that offset of the sender's pool: whoever
    claims it first (see shared.claims), until it is consumed or gone. device: it lies in GPU memory; offset
    is one of the sender's GPU pool, and event the number of the event there that it is complete behind.
    """

    key: str
    generation: int
    size: int
    fast_path: bool
    data: memoryview
    offset: int = -1
    device: bool = False
    event: int = -1


class Gone(msgspec.Struct, array_like=True, tag="gone"):
    """A payload that was Ready is no longer to be had (withdrawn, expired, replaced)."""

    key: str
    generation: int
    reason: str


class Done(msgspec.Struct, array_like=True, tag="done"):
    """The end of a Pull or Audit. status: "" when it went well, else a word of STATUSES.

    A lent payload lies at offset of the sender's pool until it is settled.
    """

    corr: int
    status: str
    message: str
    generation: int
    size: int
    fast_path: bool
    offset: int


class Stranger(msgspec.Struct, array_like=True, tag="stranger"):
    """The sender has no session for this socket (it was restarted): say Hello again, then repeat."""

    corr: int


Notice: TypeAlias = Welcome | Ready | Gone | Done | Stranger

NOT_FOUND = "not_found"
BUSY = "busy"
LENGTH = "length"
REFUSED = "refused"
FAILED = "failed"
LOST = "lost"
ELSEWHERE = "elsewhere"
STATUSES = (NOT_FOUND, BUSY, LENGTH, REFUSED, FAILED, LOST, ELSEWHERE)

_encoder = msgspec.msgpack.Encoder()
_request_decoder = msgspec.msgpack.Decoder(Request)
_notice_decoder = msgspec.msgpack.Decoder(Notice)
_query_decoder = msgspec.msgpack.Decoder(QueryRequest)
_pull_decoder = msgspec.msgpack.Decoder(PullRequest)
_response_decoder = msgspec.msgpack.Decoder(QueryResponse)


def encode(message: Request | Notice) -> bytes:
    """Encode a v2 message with its magic."""
    return MAGIC + _encoder.encode(message)


def encode_v1(message: PullRequest | QueryRequest | QueryResponse) -> bytes:
    """Encode a v1 message; a query gets its prefix."""
    body = _encoder.encode(message)
    return QUERY_INFO + body if isinstance(message, QueryRequest) else body


def decode_request(payload: bytes | memoryview) -> Request | QueryRequest | PullRequest:
    """Decode what a receiver sent, v1 or v2, and check every bound that needs no session.

    Raises WireError.
    """
    view = memoryview(payload)
    if len(view) > MAX_REQUEST_BYTES:
        raise WireError(f"request of {len(view)} bytes; the limit is {MAX_REQUEST_BYTES}")
    try:
        if view[: len(MAGIC)] == MAGIC:
            return _checked(_request_decoder.decode(view[len(MAGIC) :]))
        if view[: len(QUERY_INFO)] == QUERY_INFO:
            query = _query_decoder.decode(view[len(QUERY_INFO) :])
            _check_key(query.request_id)
            return query
        pull = _pull_decoder.decode(view)
        _check_key(pull.request_id)
        _check_range(pull.dst_offset, pull.length)
        return pull
    except msgspec.DecodeError as exc:
        raise WireError(f"undecodable request of {len(view)} bytes: {exc}") from None
    except (RecursionError, UnicodeDecodeError) as exc:
        raise WireError(f"undecodable request of {len(view)} bytes: {type(exc).__name__}") from None


def decode_notice(payload: bytes | memoryview) -> Notice:
    """Decode what a v2 sender sent. Raises WireError."""
    view = memoryview(payload)
    if view[: len(MAGIC)] != MAGIC:
        raise WireError(f"no v2 message: {bytes(view[:16])!r}")
    try:
        notice = _notice_decoder.decode(view[len(MAGIC) :])
        if isinstance(notice, Ready) and not 0 < notice.size <= MAX_PAYLOAD_BYTES:
            raise WireError(f"notice of a payload of {notice.size} bytes")
        return notice
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as exc:
        raise WireError(f"undecodable notice of {len(view)} bytes: {exc}") from None


def decode_query_response(payload: bytes | memoryview) -> QueryResponse:
    """Decode a v1 sender's answer to a query. Raises WireError."""
    try:
        response = _response_decoder.decode(payload)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as exc:
        raise WireError(f"undecodable answer to a query: {exc}") from None
    if response.data_size <= 0:
        raise WireError(f"answer to a query for {response.request_id!r} claims {response.data_size} bytes")
    return response


def _checked(request: Request) -> Request:
    if isinstance(request, Pull):
        _check_key(request.key)
        _check_range(request.dst_offset, request.length)
    elif isinstance(request, Hello):
        if len(request.edges) > MAX_EDGES or any(len(edge) > MAX_KEY_BYTES for edge in request.edges):
            raise WireError(f"hello subscribes to {len(request.edges)} edges; the limit is {MAX_EDGES}")
        if not 0 <= request.pid <= MAX_PID or request.eager_credit < 0:
            raise WireError(f"hello with pid {request.pid} and a credit of {request.eager_credit} bytes")
    elif isinstance(request, Audit):
        if len(request.keys) > MAX_AUDIT_KEYS:
            raise WireError(f"audit of {len(request.keys)} keys; the limit is {MAX_AUDIT_KEYS}")
        for key in request.keys:
            _check_key(key)
    elif isinstance(request, Abandon):
        if len(request.pulls) > MAX_SETTLED:
            raise WireError(f"{len(request.pulls)} pulls abandoned; the limit is {MAX_SETTLED}")
    elif len(request.consumed) + len(request.released) > MAX_SETTLED:
        raise WireError(f"settle of over {MAX_SETTLED} generations")
    return request


def _check_key(key: str) -> None:
    # len() counts characters; a key of that many is within the byte bound only if it is short enough.
    if len(key) * 4 > MAX_KEY_BYTES and len(key.encode()) > MAX_KEY_BYTES:
        raise WireError(f"key of {len(key)} characters; the limit is {MAX_KEY_BYTES} bytes")


def _check_range(offset: int, length: int) -> None:
    if offset < 0 or length < 0 or offset > 1 << 62 or length > 1 << 62:
        raise WireError(f"range out of bounds: offset {offset}, length {length}")
