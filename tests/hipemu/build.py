"""Builds the libraries that stand in for ROCm: libamdhip64.so.7 over host memory or over CUDA, and stubs.

    python build.py OUT                              emulated HIP alone
    python build.py OUT --wheel DIR                  and all that the Mori wheel unpacked in DIR needs
    python build.py OUT --wheel DIR --cuda CUDA_HOME the same, with HIP calls passed on to CUDA

Nothing about the wheel is listed by hand: which symbols it wants, under which versions, is read from its
libraries. Calls of the HIP runtime that the sources here do not have become stubs that return
hipErrorNotSupported; libhsa-runtime64, gRPC, protobuf and whatever else is not on this machine become stubs
whose calls fail. A process finds the result through LD_LIBRARY_PATH=OUT. Needs gcc and binutils; takes
seconds.
"""

from __future__ import annotations

import argparse
import ctypes
import re
import subprocess
import sys
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from pathlib import Path

HERE = Path(__file__).resolve().parent
HIP = "libamdhip64.so.7"
_HIP_VERSION = "hip_4.2"  # of functions that the wheel does not name
_HSA = "libhsa-runtime64.so.1"
_NOT_SUPPORTED = 801
_HSA_ERROR = 4096
_GRPC = re.compile(r"lib(protobuf|grpc|gpr|absl|upb|re2|address_sorting|cares)")
_GRPC_SYMBOL = re.compile(r"^_Z.*(grpc|google8protobuf|4absl)|^(gpr|grpc|census|ares|upb)_")
# Data among the C++ symbols: virtual tables, type information, and a few variables of protobuf and gRPC.
_DATA = re.compile(
    r"^_ZT[VIS]|^_ZN.*(fixed_address_empty_string|g_glip|g_core_codegen_interface|kCppTypeToName)"
    r"|^_ZN4grpc6Status2OKE$"
)

Symbols = dict[str, str]
"""Symbol name -> version, "" for none."""


def build(out: Path, wheel: Path | None = None, cuda: Path | None = None) -> Path:
    """Build into out and return it."""
    out.mkdir(parents=True, exist_ok=True)
    wanted, needed = _imports(wheel) if wheel is not None else ({}, set())
    source = "cuda_forward.c" if cuda is not None else "emulated.c"
    flags = ["-Wall", "-Wextra", "-Werror", "-lpthread", "-ldl"]
    if cuda is not None:
        libs = [path for name in ("lib64", "lib") if (path := cuda / name).is_dir()]
        flags += [f"-I{cuda / 'include'}", *(f"-L{path}" for path in libs), "-lcudart"]
        flags += [f"-Wl,-rpath,{path}" for path in libs]
    have = _defined(HERE / source) | _defined(HERE / "common.c")
    hip = dict.fromkeys(have, _HIP_VERSION)
    hip.update({name: version for name, version in wanted.items() if version.startswith("hip_")})
    _library(out, HIP, hip, code=_NOT_SUPPORTED, sources=[source, "common.c"], own=have, flags=flags)
    if wheel is None:
        return out
    _library(out, _HSA, _pick(wanted, lambda _, version: version.startswith("ROCR")), code=_HSA_ERROR)
    grpc = sorted(name for name in needed if _GRPC.match(name))
    for index, name in enumerate(grpc):  # one of them has all the symbols: the linker does not care which
        symbols = _pick(wanted, lambda symbol, _: bool(_GRPC_SYMBOL.search(symbol))) if index == 0 else {}
        _library(out, name, symbols, code=0)
    for name in sorted(needed - set(grpc) - {HIP, _HSA}):
        if not _on_this_machine(name):
            _library(out, name, _of(name, wanted), code=0)
    return out


def _of(soname: str, symbols: Symbols) -> Symbols:
    """Pick the symbols of a plain C library, by their versions or prefixes (libpci: pci_init@LIBPCI_3.0)."""
    stem = soname.removeprefix("lib").partition(".")[0]
    prefix = stem.rpartition("_")[2]
    return _pick(
        symbols,
        lambda name, version: (
            version.lower().startswith(f"lib{stem}") or (not version and name.startswith(prefix))
        ),
    )


def _pick(symbols: Symbols, matches: Callable[[str, str], bool]) -> Symbols:
    return {name: version for name, version in symbols.items() if matches(name, version)}


def _imports(wheel: Path) -> tuple[Symbols, set[str]]:
    """Return the undefined symbols of a wheel's libraries, and the libraries they need from outside it."""
    undefined: Symbols = {}
    defined: set[str] = set()
    needed: set[str] = set()
    libraries = [path for path in wheel.rglob("*.so*") if path.is_file()]
    for path in libraries:
        for line in _readelf("-d", path):
            if match := re.search(r"\(NEEDED\).*\[(.*)\]", line):
                needed.add(match.group(1))
        for line in _readelf("--dyn-syms", path):
            fields = line.split()
            if len(fields) < 8 or not fields[0].rstrip(":").isdigit():
                continue
            name, _, version = fields[7].partition("@")
            if fields[6] == "UND":
                undefined.setdefault(name, version.lstrip("@"))
            else:
                defined.add(name)
    return (
        {name: version for name, version in undefined.items() if name not in defined},
        needed - {path.name for path in libraries},
    )


def _readelf(option: str, path: Path) -> list[str]:
    found = subprocess.run(["readelf", "-W", option, str(path)], check=True, capture_output=True, text=True)
    return found.stdout.splitlines()


def _defined(source: Path) -> set[str]:
    """List the functions that a source file exports."""
    return set(re.findall(r"^API [^(]*?\b(\w+)\(", source.read_text(), re.MULTILINE))


def _on_this_machine(soname: str) -> bool:
    try:
        ctypes.CDLL(soname)
    except OSError as exc:
        return "cannot open shared object" not in str(exc)
    return True


def _library(
    out: Path,
    soname: str,
    symbols: Symbols,
    code: int,
    sources: list[str] | None = None,
    own: AbstractSet[str] = frozenset(),
    flags: list[str] | None = None,
) -> None:
    """Link one library; symbols that are not its own become stubs that return code."""
    compile_shared = ["gcc", "-shared", "-fPIC", "-O2", "-g", "-fvisibility=hidden"]
    stubs = out / f"{soname}.stubs.c"
    versions = out / f"{soname}.map"
    lines = ['#define STUB __attribute__((visibility("default")))']
    for name in sorted(symbols.keys() - own):
        if _DATA.match(name):
            lines.append(f"STUB char {name}[256] __attribute__((aligned(32)));")
        else:
            lines.append(f"STUB int {name}(void) {{ return {code}; }}")
    stubs.write_text("\n".join(lines) + "\n")
    stubs_object = stubs.with_suffix(".o")
    subprocess.run(
        ["gcc", "-c", "-fPIC", "-fno-builtin", "-w", "-o", str(stubs_object), str(stubs)], check=True
    )
    by_version: dict[str, list[str]] = {}
    for name, version in symbols.items():
        by_version.setdefault(version, []).append(name)
    script = []
    if set(by_version) - {""}:
        nodes = []
        for version, names in sorted(by_version.items()):
            exported = " ".join(f"{name};" for name in sorted(names))
            nodes.append(f"{version or 'BASE'} {{ global: {exported} local: *; }};\n")
        versions.write_text("".join(nodes))
        script = [f"-Wl,--version-script={versions}"]
    target = out / f".{soname}.new"
    inputs = [*(str(HERE / source) for source in sources or []), str(stubs_object)]
    options = [f"-Wl,-soname,{soname}", *script, *(flags or [])]
    subprocess.run([*compile_shared, "-o", str(target), *inputs, *options], check=True)
    target.replace(out / soname)
    for path in (stubs, stubs_object, versions):
        path.unlink(missing_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--wheel", type=Path)
    parser.add_argument("--cuda", type=Path)
    arguments = parser.parse_args()
    build(arguments.out, arguments.wheel, arguments.cuda)
    print(f"built {', '.join(sorted(path.name for path in arguments.out.iterdir()))}", file=sys.stderr)


if __name__ == "__main__":
    main()
