"""Runs a named check of a test module that needs vLLM-Omni, in a process forked from omni_support.Host."""

from __future__ import annotations

import importlib
import multiprocessing
import traceback
from multiprocessing.connection import Connection

import psutil


def check(module: str, name: str, seconds: float = 120.0) -> None:
    """Call CHECKS[name] of a module there; fails with its traceback. Needs a running Host."""
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=_enter, args=(module, name, theirs))
    process.start()
    theirs.close()
    try:
        assert ours.poll(seconds), f"{name}: no answer within {seconds} s"
        failure = ours.recv()
        assert not failure, failure
    finally:
        process.kill()
        process.join()
        process.close()
        ours.close()


def children_left() -> list[str]:
    """Child processes that are there for seconds more; a listener that was starting ends a little late."""
    _, left = psutil.wait_procs(psutil.Process().children(recursive=True), timeout=5)
    return [str(child) for child in left]


def _enter(module: str, name: str, pipe: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    try:
        importlib.import_module(module).CHECKS[name]()
        left = children_left()
        assert left == [], f"child processes are left: {left}"
    except BaseException:
        pipe.send(traceback.format_exc())
    else:
        pipe.send("")
