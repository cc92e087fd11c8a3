"""What a forked child of a stage inherits of its connectors: nothing that it may use or end.

A fork copies the objects and shares what lies behind them: sockets, locks on memory, the pipes by whose end
the connector's own processes tell that the stage is gone. So whatever holds one of these is told in the child
that it is the parent's, before any code of the child runs.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol

generation = 0
"""Forks between the process that imported this module and this one. What differs was made by a parent."""


class Inherited(Protocol):
    """An object that a forked child must not use as its parent does."""

    def leave_to_parent(self) -> None:
        """Become harmless. For the child, in which no other thread runs; a lock may be held for ever."""
        ...


_inherited: weakref.WeakSet[Inherited] = weakref.WeakSet()


def watch(inherited: Inherited) -> None:
    """Have an object, for as long as it lives, told in each forked child of this process."""
    _inherited.add(inherited)


def _in_child() -> None:
    global generation
    generation += 1
    for inherited in list(_inherited):
        inherited.leave_to_parent()


os.register_at_fork(after_in_child=_in_child)
