"""Writes small sysfs trees, with the process's part of procfs in `proc/`, from a compact description."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from mori_mp.shared.topology import Topology, format_cpulist, read_topology

# An eight-GPU MI300X server: addresses of the GPUs, four to a socket, and of one RDMA NIC beside each.
MI300X_GPUS = (
    "0000:05:00.0",
    "0000:26:00.0",
    "0000:46:00.0",
    "0000:65:00.0",
    "0000:85:00.0",
    "0000:a6:00.0",
    "0000:c6:00.0",
    "0000:e5:00.0",
)
MI300X_NICS = tuple(address.replace(":00.0", ":02.0") for address in MI300X_GPUS)


@dataclass(frozen=True)
class Device:
    """A PCI device below one bridge; node -1 is what firmware says when it does not know."""

    address: str
    node: int = -1
    bridge_node: int = -1
    local_cpus: str | None = None
    nic: str | None = None  # RDMA device name; without one it is an AMD accelerator


@dataclass(frozen=True)
class Machine:
    """CPUs are numbered as on EPYC: first threads of all cores, socket by socket, then second threads."""

    sockets: int = 1
    cores: int = 8  # per socket
    threads: int = 1
    l3_cores: int | None = 8  # cores behind one L3; None: sysfs shows no L3
    nodes_per_socket: int | None = 1  # None: no NUMA in sysfs
    devices: tuple[Device, ...] = ()
    kfd: tuple[str, ...] = ()  # GPU addresses in KFD order
    isolated: str = ""
    mask: str | None = ""  # Cpus_allowed_list; "": all; None: no status file
    cgroup: str = "0::/\n"
    mounts: tuple[str, ...] = ("/ /sys/fs/cgroup rw - cgroup2 cgroup2 rw",)
    files: dict[str, str] = field(default_factory=dict)  # extra files, relative to the root

    @property
    def cpus(self) -> int:
        return self.sockets * self.cores * self.threads

    def core(self, index: int) -> list[int]:
        return [index + self.sockets * self.cores * thread for thread in range(self.threads)]

    def span(self, first: int, count: int) -> str:
        """CPU list of all threads of `count` cores from core `first` on."""
        return format_cpulist(cpu for core in range(first, first + count) for cpu in self.core(core))

    def node_cpus(self, node: int) -> str:
        per_node = self.cores // (self.nodes_per_socket or 1)
        return self.span(node * per_node, per_node)


def write(root: Path, machine: Machine) -> Path:
    """Write the tree and return `root`, which serves as sysfs root; procfs is `root`/proc."""

    def put(name: str, text: str) -> None:
        path = f"{root}/{name}"
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="ascii") as file:
            file.write(text + "\n")

    put("devices/system/cpu/online", f"0-{machine.cpus - 1}")
    put("devices/system/cpu/isolated", machine.isolated)
    for index in range(machine.sockets * machine.cores):
        for cpu in machine.core(index):
            base = f"devices/system/cpu/cpu{cpu}"
            put(f"{base}/topology/thread_siblings_list", format_cpulist(machine.core(index)))
            if machine.l3_cores is not None:
                first = index - index % machine.l3_cores
                put(f"{base}/cache/index3/level", "3")
                put(f"{base}/cache/index3/shared_cpu_list", machine.span(first, machine.l3_cores))
    if machine.nodes_per_socket is not None:
        nodes = range(machine.sockets * machine.nodes_per_socket)
        put("devices/system/node/online", f"0-{len(nodes) - 1}")
        for node in nodes:
            socket = node // machine.nodes_per_socket
            row = [10 if n == node else 12 if n // machine.nodes_per_socket == socket else 32 for n in nodes]
            put(f"devices/system/node/node{node}/cpulist", machine.node_cpus(node))
            put(f"devices/system/node/node{node}/distance", " ".join(map(str, row)))
    for number, device in enumerate(machine.devices):
        _put_device(root, device, number, f"0-{machine.cpus - 1}", put)
    for number, address in enumerate(machine.kfd):
        domain, bus, rest = address.split(":")
        slot, function = rest.split(".")
        location = int(bus, 16) << 8 | int(slot, 16) << 3 | int(function) | 1 << 28
        text = f"simd_count 1216\ndomain {int(domain, 16)}\nlocation_id {location}"
        put(f"class/kfd/kfd/topology/nodes/{number + 2}/properties", text)
    if machine.kfd:
        put("class/kfd/kfd/topology/nodes/0/properties", "cpu_cores_count 96\nsimd_count 0\nlocation_id 0")
    mask = f"0-{machine.cpus - 1}" if machine.mask == "" else machine.mask
    if mask is not None:
        put("proc/self/status", f"Name:\tstage\nCpus_allowed:\tf\nCpus_allowed_list:\t{mask}\nThreads:\t1")
    put("proc/self/cgroup", machine.cgroup.strip())
    lines = [f"{30 + number} 22 0:28 {mount}" for number, mount in enumerate(machine.mounts)]
    put("proc/self/mountinfo", "\n".join(["22 1 0:21 / /proc rw - proc proc rw", *lines]))
    for name, text in machine.files.items():
        put(name, text)
    return root


def _put_device(
    root: Path, device: Device, number: int, all_cpus: str, put: Callable[[str, str], None]
) -> None:
    domain, bus, _ = device.address.split(":")
    bridge = f"{domain}:{int(bus, 16) & 0xE0 | 1:02x}:{number + 1:02x}.0"
    folder = f"devices/pci{domain}:{int(bus, 16) & 0xE0:02x}"
    for path, address in (
        (f"{folder}/{bridge}", bridge),
        (f"{folder}/{bridge}/{device.address}", device.address),
    ):
        is_bridge = address == bridge
        kind = "0x060400" if is_bridge else "0x020700" if device.nic else "0x120000"
        put(f"{path}/class", kind)
        put(f"{path}/vendor", "0x15b3" if device.nic else "0x1002")
        put(f"{path}/numa_node", str(device.bridge_node if is_bridge else device.node))
        put(
            f"{path}/local_cpulist", all_cpus if is_bridge or device.local_cpus is None else device.local_cpus
        )
        link = root / "bus/pci/devices" / address
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(root / path, link.parent))
    if device.nic:
        link = root / "class/infiniband" / device.nic / "device"
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(root / folder / bridge / device.address, link.parent))


def read(root: Path, machine: Machine) -> Topology:
    """Write the tree and read it back."""
    return read_topology(write(root, machine), root / "proc")


def mi300x(nodes_per_socket: int = 1, threads: int = 2, sockets: int = 2, **changes: object) -> Machine:
    """Two 96-core EPYC sockets with 8-core L3s, eight MI300X and eight NICs."""
    nodes = sockets * nodes_per_socket
    devices = [
        Device(address, node=index * nodes // 8, nic=f"mlx5_{index}" if nic else None)
        for nic, addresses in ((False, MI300X_GPUS), (True, MI300X_NICS))
        for index, address in enumerate(addresses)
    ]
    settings: dict[str, object] = {
        "sockets": sockets,
        "cores": 96,
        "threads": threads,
        "nodes_per_socket": nodes_per_socket,
        "devices": tuple(devices),
        # KFD enumerates in another order than PCI does.
        "kfd": (*MI300X_GPUS[4:], *MI300X_GPUS[:4]),
    }
    return Machine(**{**settings, **changes})  # type: ignore[arg-type]


ODD_CPUSET = "5,11,17-20,101,209-212"  # one L3's cores 17-20 with their siblings, and strays
RECORDED: dict[str, Machine] = {
    "two sockets, eight MI300X, one NUMA node a socket (NPS1)": mi300x(),
    "the same, four NUMA nodes a socket (NPS4)": mi300x(nodes_per_socket=4),
    "the NPS1 machine without SMT": mi300x(threads=1),
    f"the NPS1 machine in a container with the cpuset {ODD_CPUSET}": mi300x(
        files={"fs/cgroup/cpuset.cpus.effective": ODD_CPUSET}
    ),
    "the NPS1 machine in a pod with a quota of 6 CPUs": mi300x(files={"fs/cgroup/cpu.max": "600000 100000"}),
    "a virtual machine of two cores, whose firmware tells no NUMA node (-1)": Machine(
        cores=2, l3_cores=2, devices=(Device(MI300X_GPUS[0]),), kfd=(MI300X_GPUS[0],)
    ),
}
"""Machines whose plans docs/tuning.md shows."""
