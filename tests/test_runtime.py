"""Runtime directories: where they go, who may enter, and what the next connector may sweep away."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from mori_mp.shared import runtime
from mori_mp.shared.errors import ConfigError

EPOCH = "0123456789ab"


@pytest.fixture
def base() -> Iterator[Path]:
    """A base short enough for sockets, which pytest's own may not be."""
    with TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder) / "base"


@pytest.fixture
def dead_pid() -> int:
    """The pid of a process that is gone."""
    child = subprocess.Popen([sys.executable, "-S", "-c", ""])
    child.wait()
    return child.pid


def test_the_order_of_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MORI_MP_RUNTIME_DIR", "/env")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert runtime.base_directory("/configured") == Path("/configured")
    assert runtime.base_directory() == Path("/env")
    monkeypatch.setenv("MORI_MP_RUNTIME_DIR", "")
    assert runtime.base_directory() == Path("/run/user/7/mori-mp")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert runtime.base_directory() == Path(f"/tmp/mori-mp-{os.getuid()}")


def test_only_the_user_may_enter(base: Path) -> None:
    folder = runtime.create(EPOCH, str(base))
    assert folder == base / f"{os.getpid()}-{EPOCH}"
    for made in (base, folder):
        assert stat.S_IMODE(made.stat().st_mode) == 0o700


def test_a_path_too_long_for_sockets_is_the_operators_to_change(base: Path) -> None:
    with pytest.raises(ConfigError, match="too long for Unix sockets"):
        runtime.create(EPOCH, str(base / ("x" * 80)))
    assert not base.exists()


def test_the_longest_socket_that_is_accepted_can_be_bound(base: Path) -> None:

    name = f"{os.getpid()}-{EPOCH}"
    room = 107 - len(str(base)) - len(f"//{name}/lane-999.sock")
    folder = runtime.create(EPOCH, str(base / ("x" * room)))
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(folder / "lane-999.sock"))


def test_a_link_or_file_in_the_place_of_the_base_is_refused(base: Path) -> None:
    base.mkdir()
    (base / "link").symlink_to(base)
    (base / "file").touch()
    for bad in ("link", "file"):
        with pytest.raises(ConfigError, match=bad):
            runtime.create(EPOCH, str(base / bad))


def test_a_directory_of_another_user_is_refused(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base.mkdir()
    uid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    with pytest.raises(ConfigError, match="not a directory of user"):
        runtime.create(EPOCH, str(base))


def test_the_same_directory_twice_is_refused(base: Path) -> None:
    runtime.create(EPOCH, str(base))
    with pytest.raises(ConfigError, match="cannot be used"):
        runtime.create(EPOCH, str(base))


def test_what_dead_stages_left_behind_is_swept(base: Path, dead_pid: int) -> None:
    left = base / f"{dead_pid}-{EPOCH}"
    left.mkdir(parents=True)
    (left / "lane-1.sock").touch()
    ours = runtime.create("ba9876543210", str(base))
    assert sorted(base.iterdir()) == [ours]


def test_nothing_else_is_swept(base: Path, dead_pid: int) -> None:
    """A base may be any directory of the user's."""
    base.mkdir()
    alive = base / f"{os.getpid()}-ba9876543210"
    results = base / f"{dead_pid}-results"
    year = base / "2024"
    other = base / f"results-{dead_pid}-{EPOCH}"
    for folder in (alive, results, year, other):
        folder.mkdir()
        (folder / "precious").touch()
    (base / f"{dead_pid}-00000000000a").symlink_to(results)
    assert runtime.sweep(base) == []
    for folder in (alive, results, year, other):
        assert (folder / "precious").exists()
