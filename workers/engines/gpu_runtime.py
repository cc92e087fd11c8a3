"""The few calls of a GPU runtime that engines need, through ctypes: libamdhip64 or libcudart.

Both libraries have these functions under the same names but for the prefix, with the same arguments, flags
and error numbers. Loading a runtime needs neither torch nor a compiler: one that this process has mapped
already (torch brings its own) is taken first, then the system's, then one inside an installed Python package.
Two copies of libamdhip64 in one process would be two runtimes, hence that order.

Every failed call raises GpuError with the runtime's own text, and clears the runtime's last error, which
torch would otherwise trip over at its next kernel.

Handles and pointers are plain ints. The runtime keeps a current device per thread: `set_device()` first.
"""

from __future__ import annotations

import ctypes
import os
import re
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from mori_mp.shared.errors import EngineUnavailable, MoriMPError

PATH_ENV = "MORI_MP_GPU_RUNTIME"
HANDLE_BYTES = 64

_NOT_READY = 600
_PEER_ACCESS_ALREADY_ENABLED = 704
_LOST_CONTEXT = frozenset({214, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 999})
_DEVICE_MEMORY = 2
_EVENT_DISABLE_TIMING = 2
_EVENT_INTERPROCESS = 4
_STREAM_NON_BLOCKING = 1
_LAZY_PEER_ACCESS = 1
_COPY_DEFAULT = 4
_BUS_ID_CHARS = 32

_SONAMES = {
    "hip": ("libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so"),
    "cuda": ("libcudart.so.13", "libcudart.so.12", "libcudart.so"),
}
_FOLDERS = {
    "hip": ("ROCM_PATH", "/opt/rocm", ("lib",)),
    "cuda": ("CUDA_HOME", "/usr/local/cuda", ("lib64", "lib")),
}
_PACKAGES = {"hip": ("torch", "_rocm_sdk_core"), "cuda": ("nvidia",)}
_STEMS = {"hip": "libamdhip64.so", "cuda": "libcudart.so"}


class GpuError(MoriMPError, RuntimeError):
    """A call of the GPU runtime failed. code is the runtime's error number."""

    def __init__(self, call: str, code: int, text: str) -> None:
        super().__init__(call, code, text)
        self.call = call
        self.code = code
        self.text = text

    @property
    def context_lost(self) -> bool:
        """True if every later call in this process fails too."""
        return self.code in _LOST_CONTEXT

    def __str__(self) -> str:
        return f"{self.call} failed: {self.text} (error {self.code})"


class _Handle(ctypes.Structure):
    """cudaIpcMemHandle_t, cudaIpcEventHandle_t and their HIP twins; passed by value."""

    _fields_ = (("bytes", ctypes.c_char * HANDLE_BYTES),)


class _PointerAttributes(ctypes.Structure):
    """The common head of cudaPointerAttributes and hipPointerAttribute_t (HIP 6 and later)."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("device", ctypes.c_int),
        ("device_pointer", ctypes.c_void_p),
        ("host_pointer", ctypes.c_void_p),
        ("spare", ctypes.c_char * 64),
    )


_int, _ptr, _size, _uint = ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint
_SIGNATURES: dict[str, tuple[object, ...]] = {
    "GetDeviceCount": (_ptr,),
    "SetDevice": (_int,),
    "GetDevice": (_ptr,),
    "DeviceGetPCIBusId": (ctypes.c_char_p, _int, _int),
    "DeviceGetByPCIBusId": (_ptr, ctypes.c_char_p),
    "DeviceCanAccessPeer": (_ptr, _int, _int),
    "DeviceEnablePeerAccess": (_int, _uint),
    "DeviceSynchronize": (),
    "PointerGetAttributes": (_ptr, _ptr),
    "Malloc": (_ptr, _size),
    "Free": (_ptr,),
    "Memcpy": (_ptr, _ptr, _size, _int),
    "MemcpyAsync": (_ptr, _ptr, _size, _int, _ptr),
    "MemcpyPeerAsync": (_ptr, _int, _ptr, _int, _size, _ptr),
    "IpcGetMemHandle": (_ptr, _ptr),
    "IpcOpenMemHandle": (_ptr, _Handle, _uint),
    "IpcCloseMemHandle": (_ptr,),
    "IpcGetEventHandle": (_ptr, _ptr),
    "IpcOpenEventHandle": (_ptr, _Handle),
    "EventCreateWithFlags": (_ptr, _uint),
    "EventRecord": (_ptr, _ptr),
    "EventQuery": (_ptr,),
    "EventSynchronize": (_ptr,),
    "EventDestroy": (_ptr,),
    "StreamCreateWithFlags": (_ptr, _uint),
    "StreamWaitEvent": (_ptr, _ptr, _uint),
    "StreamSynchronize": (_ptr,),
    "StreamDestroy": (_ptr,),
}


class _Current:
    """Has a device be this thread's current one between enter and exit."""

    __slots__ = ("_before", "_device", "_runtime")

    def __init__(self, runtime: GpuRuntime, device: int) -> None:
        self._runtime = runtime
        self._device = device

    def __enter__(self) -> None:
        runtime, before = self._runtime, ctypes.c_int()
        if code := runtime._get_device(ctypes.addressof(before)):
            raise runtime._error("GetDevice", code)
        self._before = before.value
        if self._before != self._device:
            runtime.set_device(self._device)

    def __exit__(self, *_: object) -> None:
        if self._before != self._device:
            self._runtime.set_device(self._before)


class GpuRuntime:
    """One loaded runtime. `kind` is "hip" or "cuda", `path` the library's file.

    keep_gil: calls hold on to the GIL. For calls that return at once, in a process whose other threads run
    Python: there, getting the GIL back costs far more than the call.
    """

    def __init__(self, kind: str, path: str, *, keep_gil: bool = False) -> None:
        self.kind = kind
        try:
            self._lib = ctypes.PyDLL(path) if keep_gil else ctypes.CDLL(path)
            self._functions = {name: getattr(self._lib, kind + name) for name in _SIGNATURES}
            self._clear = getattr(self._lib, kind + "GetLastError")
            self._text = getattr(self._lib, kind + "GetErrorString")
        except (OSError, AttributeError) as exc:
            raise EngineUnavailable(f"{path} cannot be used as the {kind} runtime: {exc}") from exc
        for name, arguments in _SIGNATURES.items():
            self._functions[name].argtypes, self._functions[name].restype = arguments, ctypes.c_int
        self._text.argtypes, self._text.restype = (ctypes.c_int,), ctypes.c_char_p
        # What every payload needs goes past _call(): in a process just woken each Python frame costs twice.
        self._get_device = self._functions["GetDevice"]
        self._memcpy_async = self._functions["MemcpyAsync"]
        self._event_record = self._functions["EventRecord"]
        self._event_query = self._functions["EventQuery"]
        self._stream_wait_event = self._functions["StreamWaitEvent"]
        self.path = next(
            (found for found in _mapped(_STEMS[kind]) if Path(found).name == Path(path).name), path
        )
        self._mappings: dict[bytes, tuple[int, int]] = {}
        self._mappings_lock = threading.Lock()

    def _call(self, name: str, *arguments: object) -> None:
        code = self._functions[name](*arguments)
        if code:
            raise self._error(name, code)

    def _error(self, name: str, code: int) -> GpuError:
        self._clear()
        return GpuError(self.kind + name, code, self._text(code).decode(errors="replace"))

    # ------------------------------------------------------------------------- devices
    def device_count(self) -> int:
        """Count the GPUs that this process sees."""
        count = ctypes.c_int()
        self._call("GetDeviceCount", ctypes.addressof(count))
        return count.value

    def set_device(self, device: int) -> None:
        """Make a device this thread's current one."""
        self._call("SetDevice", device)

    def current(self, device: int) -> _Current:
        """Make a device this thread's current one for a moment, for its default stream and new events."""
        return _Current(self, device)

    def current_device(self) -> int:
        device = ctypes.c_int()
        self._call("GetDevice", ctypes.addressof(device))
        return device.value

    def bus_id(self, device: int) -> str:
        """Return a device's PCI bus id in lower case, such as 0000:c1:00.0."""
        text = ctypes.create_string_buffer(_BUS_ID_CHARS)
        self._call("DeviceGetPCIBusId", text, _BUS_ID_CHARS, device)
        return text.value.decode().lower()

    def device_by_bus_id(self, bus_id: str) -> int | None:
        """Return the ordinal that a PCI bus id has in this process; None if it is not visible here."""
        device = ctypes.c_int()
        try:
            self._call("DeviceGetByPCIBusId", ctypes.addressof(device), bus_id.encode())
        except GpuError:
            return None
        return device.value

    def can_access_peer(self, device: int, peer: int) -> bool:
        """Tell whether a device reaches another one's memory directly."""
        answer = ctypes.c_int()
        self._call("DeviceCanAccessPeer", ctypes.addressof(answer), device, peer)
        return bool(answer.value)

    def enable_peer_access(self, peer: int) -> None:
        """Let the current device reach another one's memory; no error if it does already."""
        try:
            self._call("DeviceEnablePeerAccess", peer, 0)
        except GpuError as exc:
            if exc.code != _PEER_ACCESS_ALREADY_ENABLED:
                raise

    def synchronize(self) -> None:
        """Wait for everything on the current device."""
        self._call("DeviceSynchronize")

    # -------------------------------------------------------------------------- memory
    def pointer_device(self, address: int) -> int | None:
        """Return the device whose memory an address is; None for host memory."""
        found = _PointerAttributes()
        try:
            self._call("PointerGetAttributes", ctypes.addressof(found), address)
        except GpuError as exc:
            if exc.context_lost:
                raise
            return None
        return int(found.device) if found.type == _DEVICE_MEMORY else None

    def allocation(self, address: int) -> tuple[int, int]:
        """Return base and size in bytes of the allocation that an address lies in."""
        base, size = ctypes.c_void_p(), ctypes.c_size_t()
        arguments = (ctypes.addressof(base), ctypes.addressof(size), address)
        if self.kind == "hip":
            function = self._lib.hipMemGetAddressRange
        else:  # the driver's: libcudart has no such call
            function = ctypes.CDLL("libcuda.so.1").cuMemGetAddressRange_v2
        function.argtypes, function.restype = (_ptr, _ptr, _ptr), ctypes.c_int
        code = function(*arguments)
        if code:
            raise self._error("MemGetAddressRange", code)
        return base.value or 0, size.value

    def malloc(self, size: int) -> int:
        """Allocate bytes on the current device."""
        address = ctypes.c_void_p()
        self._call("Malloc", ctypes.addressof(address), size)
        return address.value or 0

    def free(self, address: int) -> None:
        self._call("Free", address)

    def memcpy(self, target: int, source: int, size: int) -> None:
        """Copy bytes between any two addresses, host or device, and wait for it.

        The runtime's own call returns before bytes of pageable host memory have reached the device (CUDA
        runtime API, "API synchronization behavior"), and other streams do not wait for the default one.
        """
        self._call("Memcpy", target, source, size, _COPY_DEFAULT)
        self._call("StreamSynchronize", None)

    def memcpy_async(self, target: int, source: int, size: int, stream: int) -> None:
        """Enqueue a copy of bytes between any two addresses."""
        if code := self._memcpy_async(target, source, size, _COPY_DEFAULT, stream):
            raise self._error("MemcpyAsync", code)

    def memcpy_peer_async(
        self, target: int, target_device: int, source: int, source_device: int, size: int, stream: int
    ) -> None:
        """Enqueue a copy of bytes between two devices that this process sees."""
        self._call("MemcpyPeerAsync", target, target_device, source, source_device, size, stream)

    # ----------------------------------------------------------------- memory across processes
    def export_memory(self, base: int) -> bytes:
        """Return the handle by which other processes map the whole allocation that starts at base."""
        handle = _Handle()
        self._call("IpcGetMemHandle", ctypes.addressof(handle), base)
        return bytes(handle)

    def import_memory(self, handle: bytes) -> int:
        """Map another process's allocation for the current device; returns its base here.

        The same handle may be imported many times in one process, also by several threads; it is mapped once.
        """
        with self._mappings_lock:
            known = self._mappings.get(handle)
            if known is not None:
                self._mappings[handle] = (known[0], known[1] + 1)
                return known[0]
            base = ctypes.c_void_p()
            struct = _Handle.from_buffer_copy(handle)
            self._call("IpcOpenMemHandle", ctypes.addressof(base), struct, _LAZY_PEER_ACCESS)
            self._mappings[handle] = (base.value or 0, 1)
            return base.value or 0

    def release_memory(self, handle: bytes) -> None:
        """Undo one import_memory(); nothing may use the mapping any more if it was the last."""
        with self._mappings_lock:
            base, users = self._mappings.pop(handle)
            if users > 1:
                self._mappings[handle] = (base, users - 1)
            else:
                self._call("IpcCloseMemHandle", base)

    # -------------------------------------------------------------------- events, streams
    def event_create(self, *, interprocess: bool = False) -> int:
        """Make an event on the current device, without timing."""
        event = ctypes.c_void_p()
        flags = _EVENT_DISABLE_TIMING | (_EVENT_INTERPROCESS if interprocess else 0)
        self._call("EventCreateWithFlags", ctypes.addressof(event), flags)
        return event.value or 0

    def event_export(self, event: int) -> bytes:
        """Return the handle by which other processes open an interprocess event."""
        handle = _Handle()
        self._call("IpcGetEventHandle", ctypes.addressof(handle), event)
        return bytes(handle)

    def event_import(self, handle: bytes) -> int:
        """Open another process's event."""
        event = ctypes.c_void_p()
        self._call("IpcOpenEventHandle", ctypes.addressof(event), _Handle.from_buffer_copy(handle))
        return event.value or 0

    def event_record(self, event: int, stream: int) -> None:
        """Have an event happen when all that is on a stream now is done."""
        if code := self._event_record(event, stream):
            raise self._error("EventRecord", code)

    def event_query(self, event: int) -> bool:
        """Tell whether an event's last record has happened (True if it was never recorded).

        Raises GpuError when work before it failed.
        """
        code = self._event_query(event)
        if code == 0:
            return True
        if code == _NOT_READY:
            self._clear()
            return False
        raise self._error("EventQuery", code)

    def event_synchronize(self, event: int) -> None:
        """Wait for an event."""
        self._call("EventSynchronize", event)

    def event_destroy(self, event: int) -> None:
        self._call("EventDestroy", event)

    def stream_create(self) -> int:
        """Make a stream on the current device that does not wait for the default stream."""
        stream = ctypes.c_void_p()
        self._call("StreamCreateWithFlags", ctypes.addressof(stream), _STREAM_NON_BLOCKING)
        return stream.value or 0

    def stream_wait_event(self, stream: int, event: int) -> None:
        """Have what is enqueued on a stream from now on wait for an event's last record."""
        if code := self._stream_wait_event(stream, event, 0):
            raise self._error("StreamWaitEvent", code)

    def stream_synchronize(self, stream: int) -> None:
        """Wait for everything on a stream."""
        self._call("StreamSynchronize", stream)

    def stream_destroy(self, stream: int) -> None:
        self._call("StreamDestroy", stream)


def load(kind: str = "", path: str = "", *, keep_gil: bool = False) -> GpuRuntime:
    """Load the runtime of a kind ("hip", "cuda", or "" for the first found).

    path, or else the environment variable MORI_MP_GPU_RUNTIME, names the library's file and is taken at its
    word. Raises EngineUnavailable, naming the places searched.
    """
    path = path or os.environ.get(PATH_ENV, "")
    if path:
        return GpuRuntime(kind or _kind_of(path), path, keep_gil=keep_gil)
    kinds = (kind,) if kind else ("hip", "cuda")
    tried: list[str] = []
    for find in (lambda one: _mapped(_STEMS[one]), _installed):
        for one in kinds:
            for candidate in find(one):
                try:
                    return GpuRuntime(one, candidate, keep_gil=keep_gil)
                except EngineUnavailable:
                    tried.append(candidate)
    raise EngineUnavailable(
        f"no {' or '.join(kinds)} runtime can be loaded; tried {', '.join(tried)}. Install ROCm or the CUDA "
        f"runtime, or name its library in {PATH_ENV}"
    )


def _kind_of(path: str) -> str:
    name = Path(path).name
    for kind, stem in _STEMS.items():
        if name.startswith(stem):
            return kind
    raise EngineUnavailable(
        f"{path} is no GPU runtime library: its name starts with neither {' nor '.join(_STEMS.values())}"
    )


def _installed(kind: str) -> Iterator[str]:
    yield from _SONAMES[kind]
    variable, default, folders = _FOLDERS[kind]
    root = Path(os.environ.get(variable) or default)
    for folder in folders:
        yield from (str(root / folder / soname) for soname in _SONAMES[kind])
    for package in _PACKAGES[kind]:
        spec = find_spec(package)  # does not import it
        for location in (spec.submodule_search_locations or ()) if spec is not None else ():
            for pattern in (f"lib/{_STEMS[kind]}*", f"*/lib/{_STEMS[kind]}*"):
                yield from sorted((str(found) for found in Path(location).glob(pattern)), reverse=True)


def _mapped(stem: str) -> list[str]:
    """List the files of a library that this process has mapped."""
    name = re.compile(re.escape(stem) + r"[0-9.]*$")
    found: dict[str, None] = {}
    with open("/proc/self/maps", encoding="utf-8") as maps:
        for line in maps:
            fields = line.rstrip("\n").split(maxsplit=5)
            if len(fields) == 6 and name.match(Path(fields[5]).name):
                found[fields[5]] = None
    return list(found)
