"""The first code of every child process; run as a script by `mori_mp.workers.spawn`.

Order matters. The child pins itself before it imports anything that could start a thread, because an
affinity mask set later, or from outside, reaches one thread only. Its set-up is the first line on standard
input, and standard input then stays open as its lifeline. `site` is not run (-S): the parent's sys.path
comes with the set-up, and start-up is faster without. A child of another interpreter (worker_python) runs
it, has its own packages, and takes nothing but mori_mp from the parent's path.
"""

import json
import os
import signal
import sys

LIFELINE_FD = 0


def read_line(fd: int) -> bytes:
    """Read up to a newline, byte-exactly, so that nothing behind it is swallowed."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(fd, 1)
        if not byte:
            sys.exit("mori-mp: the parent process went away before it had told this child what to do")
        line += byte
    return bytes(line)


def main() -> None:
    """Read the set-up, pin, fix the module path, run the role."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # asks for a dump, and a child may be too young to make one
    del sys.path[0]  # this script's folder: its modules are mori_mp.workers.*, nothing else
    line = read_line(LIFELINE_FD)
    setup = json.loads(line)
    if sys.flags.no_site:
        sys.path[:0] = [entry for entry in setup["path"] if entry not in sys.path]
    else:
        sys.path.insert(0, setup["path"][0])
        import mori_mp  # noqa: F401  (its parts are found through it)

        del sys.path[0]
    from mori_mp.shared.affinity import pin_self  # imports nothing that starts a thread

    pin_self(frozenset(setup["cpus"]) or None)
    needs = "msgspec"
    try:
        if setup["role"] == "control":
            needs = "pyzmq and msgspec"
            from mori_mp.workers.control import main as run
        else:
            from mori_mp.workers.transfer import main as run
    except ImportError as exc:
        sys.exit(
            f"mori-mp: {sys.executable} cannot import {exc.name or exc}: a {setup['role']} process's "
            f"interpreter needs {needs} (and what its engine needs) for its own Python version"
        )
    run(line)


if __name__ == "__main__":
    main()
