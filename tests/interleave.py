"""Deterministic interleavings: run something at a chosen bytecode of another function.

What a second thread, a signal handler or a finalizer can do between two bytecodes, a trace function can do at
that very place, every time. This finds races that a stress test meets once in a million runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any


def run_with_intruder(
    action: Callable[[], object], module_file: str, intrude: Callable[[int], object]
) -> tuple[object, int]:
    """Call ``action``; before each bytecode that it runs in ``module_file`` call ``intrude(0)``, ``(1)``, ...

    Tracing is off inside ``intrude``, so it does not recurse. Returns what ``action`` returned and how many
    bytecodes were interrupted. An exception of ``intrude`` propagates out of ``action``.
    """
    count = 0
    wanted: dict[CodeType, bool] = {}

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        code = frame.f_code
        if code not in wanted:
            wanted[code] = code.co_filename == module_file
        if not wanted[code]:
            return None
        frame.f_trace = trace  # CPython 3.13 wants it set before opcode events are asked for
        frame.f_trace_lines = False
        frame.f_trace_opcodes = True
        if event == "opcode":
            count, position = count + 1, count
            intrude(position)
        return trace

    before = sys.gettrace()
    # CPython 3.12 delivers opcode events only if some frame asked for them before settrace.
    sys._getframe().f_trace_opcodes = True
    sys.settrace(trace)
    try:
        result = action()
    finally:
        sys.settrace(before)
    return result, count
