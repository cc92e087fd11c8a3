"""Processes that hold leases: their end is told once, and none is forgotten for want of a descriptor."""

from __future__ import annotations

import errno
import os
import subprocess
import time
from collections.abc import Callable

import pytest

from mori_mp.workers.holders import Holders
from mori_mp.workers.reactor import Reactor


class Watched:
    """Holders over a reactor of their own, and who has been told to be gone."""

    def __init__(self) -> None:
        self.reactor = Reactor()
        self.gone: list[int] = []
        self.holders = Holders(self.reactor, self.gone.append)


def failing(code: int) -> Callable[[int], int]:
    """Make an os.pidfd_open that fails."""

    def pidfd_open(pid: int) -> int:
        raise OSError(code, os.strerror(code))

    return pidfd_open


def test_the_end_of_a_holder_is_told_once() -> None:
    watched = Watched()
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        for _ in range(2):  # a second lease of the same process
            pids = {process.pid}
            watched.holders.watch(pids)
            assert pids == set()
        assert watched.gone == []
    watched.reactor.poll(time.monotonic() + 30)
    watched.reactor.poll(time.monotonic())
    assert watched.gone == [process.pid]
    watched.holders.close()


def test_a_holder_that_is_gone_already_is_told_at_once() -> None:
    watched = Watched()
    with subprocess.Popen(["true"]) as process:
        pass
    pids = {process.pid}
    watched.holders.watch(pids)
    assert (pids, watched.gone) == (set(), [process.pid])


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_a_holder_that_cannot_be_watched_for_now_is_kept(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    watched = Watched()
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        pids = {process.pid}
        with monkeypatch.context() as patch:
            patch.setattr(os, "pidfd_open", failing(code))
            watched.holders.watch(pids)
        assert (pids, watched.gone) == ({process.pid}, [])
        watched.holders.watch(pids)
        assert (pids, watched.gone) == (set(), [])
    watched.reactor.poll(time.monotonic() + 30)
    assert watched.gone == [process.pid]
    watched.holders.close()
