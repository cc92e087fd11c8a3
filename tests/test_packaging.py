"""What is built and installed: wheel, sdist, public names, directions of imports, children without torch."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Iterator
from importlib import import_module, metadata
from pathlib import Path
from typing import NamedTuple

import pytest

import mori_mp
from mori_mp.backend import how_to_get_mori

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {"mori_mp": "mori_mp", "mori_mp.workers": "workers", "mori_mp.shared": "shared"}


def modules(root: Path) -> Iterator[tuple[str, Path]]:
    """Every module of a tree, by the name that it installs under."""
    for package, name in FOLDERS.items():
        folder = root / name
        for path in sorted(folder.rglob("*.py")):
            inner = path.relative_to(folder)
            if package == "mori_mp" and inner.parts[0] in ("workers", "shared"):
                continue  # the links for type checkers
            dotted = ".".join([package, *inner.with_suffix("").parts])
            yield dotted.removesuffix(".__init__"), path


MODULES = dict(modules(ROOT))


def run_python(*arguments: str, cwd: Path, path: Path | None = None) -> str:
    """Run a new interpreter, with `path` before site-packages on sys.path; returns what it prints."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    if path is not None:
        env["PYTHONPATH"] = str(path)
    result = subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


# ------------------------------------------------------------------------------ building
class Dist(NamedTuple):
    """A copy of the tree, and the folder with the sdist and the wheel that were built from it."""

    tree: Path
    out: Path


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Dist:
    """The sdist, and the wheel that was built from the sdist's contents."""
    out, tree = tmp_path_factory.mktemp("dist"), tmp_path_factory.mktemp("tree")
    # A copy, links and all, because a build leaves files in the tree.
    for name in ("mori_mp", "workers", "shared", "scripts"):
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(tree)]
    result = subprocess.run(build, capture_output=True, text=True, timeout=110, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return Dist(tree, out)


@pytest.fixture(scope="module")
def wheel(dist: Dist) -> Path:
    (found,) = dist.out.glob("mori_mp-*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, installed into a folder of its own."""
    target = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    result = subprocess.run(
        [*pip, "--target", str(target), str(wheel)], capture_output=True, text=True, timeout=90, check=False
    )
    assert result.returncode == 0, result.stderr
    return target


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


@pytest.mark.xdist_group("packaging")
def test_the_wheel_has_one_top_level_package(wheel: Path) -> None:
    tops = {name.partition("/")[0] for name in names(wheel)}
    assert {top for top in tops if not top.startswith("mori_mp-")} == {"mori_mp"}
    with zipfile.ZipFile(wheel) as archive:
        (top_level,) = (name for name in archive.namelist() if name.endswith("top_level.txt"))
        assert archive.read(top_level).split() == [b"mori_mp"]


@pytest.mark.xdist_group("packaging")
def test_the_wheel_has_every_module_of_the_tree_and_no_other(dist: Dist, wheel: Path) -> None:
    expected = set()
    for dotted, path in modules(dist.tree):
        name = dotted.replace(".", "/")
        expected.add(f"{name}/__init__.py" if path.name == "__init__.py" else f"{name}.py")
    assert {name for name in names(wheel) if name.endswith(".py")} == expected


@pytest.mark.xdist_group("packaging")
def test_the_wheel_has_the_rest(wheel: Path) -> None:
    (data,) = {name.partition("/")[0] for name in names(wheel) if ".data/" in name}
    (info,) = {name.partition("/")[0] for name in names(wheel) if ".dist-info/" in name}
    assert {"mori_mp/py.typed", f"{data}/scripts/pin_topology.sh", f"{info}/licenses/LICENSE"} <= names(wheel)
    with zipfile.ZipFile(wheel) as archive:
        entry_points = archive.read(f"{info}/entry_points.txt").decode()
    assert "[console_scripts]\nmori-mp = mori_mp.cli:main\n" in entry_points
    assert "[vllm.general_plugins]\nmori_mp = mori_mp.vllm_omni.plugin:register\n" in entry_points


@pytest.mark.xdist_group("packaging")
def test_a_wheel_can_be_built_from_the_sdist_alone(dist: Dist) -> None:
    # `build` made the wheel of this fixture from the sdist, so what is missing here is missing there.
    (sdist,) = dist.out.glob("mori_mp-*.tar.gz")
    with tarfile.open(sdist) as archive:
        files = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "scripts/pin_topology.sh"} <= files
    missing = {str(path.relative_to(dist.tree)) for _, path in modules(dist.tree)} - files
    assert missing == set()


ROUND_TRIP = """
import sys, time
from pathlib import Path

import mori_mp
from mori_mp import MoriTransferEngineConnector

folder = sys.argv[1]
assert mori_mp.__file__.startswith(folder), mori_mp.__file__
common = {"backend_type": "shm", "memory_pool_size": "4MiB", "from_stage": 0, "to_stage": 1}
sender = MoriTransferEngineConnector({**common, "role": "sender", "stage_id": 0, "zmq_port": 0})
ends = {"sender_host": "127.0.0.1", "sender_zmq_port": sender.zmq_port, "delivery": "landing"}
receiver = MoriTransferEngineConnector({**common, **ends, "role": "receiver", "stage_id": 1})
with sender, receiver:
    assert sender.put("0", "1", "k", b"x" * 100_000)[0]
    buffer, size = receiver.get_with_deadline("0", "1", "k", deadline=time.monotonic() + 20)
    assert buffer.to_bytes() == b"x" * 100_000
    report = sender.health()["sender"]
    children = [report["control"]["pid"], *(worker["pid"] for worker in report["workers"])]
    print(*children)
    for pid in children:
        assert "libtorch" not in Path(f"/proc/{pid}/maps").read_text(), f"process {pid} has loaded torch"
        zmq = "zmq" in Path(f"/proc/{pid}/maps").read_text()
        assert zmq == (pid == children[0]), f"of {children}, process {pid} has zmq: {zmq}"
        boot = Path(f"/proc/{pid}/cmdline").read_text().split(chr(0))[2]
        assert boot.startswith(folder), f"process {pid} runs {boot}, of another installation"
    assert "libtorch" in Path("/proc/self/maps").read_text(), "the check above would not find torch"
"""

SPAWNED = """
import multiprocessing, sys

def child(queue):
    import mori_mp, mori_mp.workers.control, mori_mp.shared.wire
    queue.put((mori_mp.__file__, mori_mp.workers.control.__file__, mori_mp.shared.wire.__file__))

if __name__ == "__main__":
    spawn = multiprocessing.get_context("spawn")
    queue = spawn.SimpleQueue()
    process = spawn.Process(target=child, args=(queue,))
    process.start()
    files = queue.get()
    process.join()
    assert process.exitcode == 0
    assert all(file.startswith(sys.argv[1]) for file in files), files
"""


@pytest.mark.xdist_group("packaging")
def test_the_installed_wheel_moves_a_payload_and_its_children_have_no_torch(
    installed: Path, tmp_path: Path
) -> None:
    pids = run_python("-c", ROUND_TRIP, str(installed), cwd=tmp_path, path=installed).split()
    assert len(pids) == 3
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []


@pytest.mark.xdist_group("packaging")
def test_the_installed_wheel_works_in_spawned_processes(installed: Path, tmp_path: Path) -> None:
    script = tmp_path / "spawned.py"
    script.write_text(SPAWNED, encoding="utf-8")
    run_python(str(script), str(installed), cwd=tmp_path, path=installed)


@pytest.mark.xdist_group("packaging")
def test_nothing_else_can_be_imported_from_the_installed_wheel(installed: Path, tmp_path: Path) -> None:
    code = "from importlib.util import find_spec as find; print(find('workers'), find('shared'))"
    assert run_python("-c", code, cwd=tmp_path, path=installed).split() == ["None", "None"]


def test_this_environment_has_the_package_installed() -> None:
    # An editable one, where the tests run; pin_topology.sh must have come with it.
    (found,) = metadata.distributions(name="mori-mp", path=[sysconfig.get_path("purelib")])
    scripts = {file.name: file.locate() for file in found.files or [] if "bin" in file.parts}
    assert {"mori-mp", "pin_topology.sh"} <= scripts.keys()
    assert os.access(scripts["pin_topology.sh"], os.X_OK)


# --------------------------------------------------------------------------------- names
def test_the_public_names() -> None:
    assert mori_mp.__all__ == ["ConnectorConfig", "ManagedBuffer", "MoriTransferEngineConnector"]
    for name in mori_mp.__all__:
        assert getattr(mori_mp, name).__name__ == name
        assert name in dir(mori_mp)
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        _ = mori_mp.Nonsense


def test_importing_the_package_is_cheap(tmp_path: Path) -> None:
    code = "import sys, mori_mp; print(*{'torch', 'zmq', 'msgspec', 'psutil', 'yaml'} & sys.modules.keys())"
    assert run_python("-c", code, cwd=tmp_path).split() == []


def test_what_children_import_is_theirs(tmp_path: Path) -> None:
    """Every module of workers and shared, imported: no torch, and nothing of the stage's side."""
    theirs = [name for name in MODULES if name.startswith(("mori_mp.workers", "mori_mp.shared"))]
    code = (
        "import sys\nfrom importlib import import_module\n"
        "for name in sys.argv[1:]: import_module(name)\n"
        "print(*[m for m in sys.modules if m == 'torch' or m.split('.')[0] == 'mori_mp'])"
    )
    loaded = set(run_python("-c", code, *theirs, cwd=tmp_path).split())
    assert loaded - {*theirs, "mori_mp"} == set()


def test_every_module_can_be_imported() -> None:
    for name in MODULES:
        import_module(name)


# ---------------------------------------------------------------------------- directions
def imports(path: Path) -> set[str]:
    """Every module that a file imports, anywhere in it, by absolute name."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            base = str(node.module)
            found |= {f"{base}.{alias.name}" for alias in node.names} if base in FOLDERS else {base}
    return found


ALLOWED = {
    "mori_mp.shared": ("mori_mp.shared",),
    "mori_mp.workers": ("mori_mp.workers", "mori_mp.shared"),
}


@pytest.mark.parametrize("package", ALLOWED)
def test_imports_point_one_way(package: str) -> None:
    wrong = []
    for name, path in MODULES.items():
        if not name.startswith(package):
            continue
        for target in imports(path):
            ours = target.split(".")[0] == "mori_mp" and target != "mori_mp"
            if ours and not target.startswith(ALLOWED[package]):
                wrong.append(f"{name} imports {target}")
            if target.split(".")[0] in ("workers", "shared"):
                wrong.append(f"{name} imports {target} instead of mori_mp.{target}")
    assert wrong == []


def test_directions_are_really_looked_at() -> None:
    assert "mori_mp.workers.supervisor" in imports(ROOT / "mori_mp" / "heart.py")
    assert "mori_mp.shared.pool" in imports(ROOT / "workers" / "control.py")


def test_the_way_to_mori_fits_the_python_that_runs() -> None:
    assert "pip install 'mori-mp[mori]'" in how_to_get_mori((3, 12))
    for other in ((3, 11), (3, 13)):
        text = how_to_get_mori(other)
        assert "pip install" not in text
        assert f"this is 3.{other[1]}" in text
        assert "worker_python" in text
